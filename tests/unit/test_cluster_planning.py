"""Which slices come next: spares in the order of their names, nobody who is to be replaced, nobody who is dead."""

from __future__ import annotations

import pytest

from tidegate.cluster.directory import Wanted, parse_address
from tidegate.cluster.planning import next_configuration
from tidegate.errors import ConfigError
from tidegate.layers.selector import Configuration

CURRENT = Configuration(3, ("access-point-1",), ("matcher-1", "matcher-2"), ("exit-point-1",))
ALL = ["access-point-1", "matcher-1", "matcher-2", "matcher-9", "matcher-10", "exit-point-1", "connection-point-1"]


def matchers(living: list[str], wanted: Wanted, *, is_recovery: bool = False) -> tuple[str, ...] | None:
    found = next_configuration(CURRENT, living, wanted, is_recovery=is_recovery)
    return None if found is None else found.matchers


def test_spares_come_in_the_order_of_their_numbers() -> None:
    assert matchers(ALL, Wanted(matchers=3)) == ("matcher-1", "matcher-2", "matcher-9")
    assert matchers(ALL, Wanted(matchers=4)) == ("matcher-1", "matcher-2", "matcher-9", "matcher-10")


def test_nothing_begins_while_some_are_missing() -> None:
    assert matchers(ALL, Wanted(matchers=5)) is None
    assert next_configuration(CURRENT, ["matcher-1"], Wanted(), is_recovery=False) is None


def test_the_oldest_stay_when_there_are_too_many() -> None:
    assert matchers(ALL, Wanted(matchers=1)) == ("matcher-1",)


def test_another_stands_in_for_whoever_is_to_be_replaced() -> None:
    assert matchers(ALL, Wanted(matchers=2, replaced=frozenset({"matcher-1"}))) == ("matcher-2", "matcher-9")


def test_a_recovery_takes_what_there_is() -> None:
    living = [name for name in ALL if not name.startswith("matcher") or name == "matcher-2"]
    assert matchers(living, Wanted(matchers=2), is_recovery=True) == ("matcher-2",)
    assert matchers(ALL, Wanted(matchers=2), is_recovery=True) == ("matcher-1", "matcher-2")
    nobody = [name for name in living if name != "matcher-2"]
    assert matchers(nobody, Wanted(matchers=2), is_recovery=True) is None


def test_a_recovery_keeps_whoever_is_to_be_replaced_when_nobody_else_is_there() -> None:
    living = ["access-point-1", "matcher-1", "exit-point-1"]
    wanted = Wanted(matchers=2, replaced=frozenset({"matcher-1"}))
    assert matchers(living, wanted, is_recovery=True) == ("matcher-1",)


def test_the_address_of_a_zookeeper() -> None:
    assert parse_address("zk://a:2181,b:2181/here/") == ("a:2181,b:2181", "/here")
    assert parse_address("zk://a:2181") == ("a:2181", "/tidegate")
    with pytest.raises(ConfigError, match="C450"):
        parse_address("a:2181")
