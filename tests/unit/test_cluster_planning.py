"""The choice of the next slices: spares in the order of their names, without slices that are dead or to be replaced."""

from __future__ import annotations

import pytest

from tidegate.cluster.directory import parse_address
from tidegate.cluster.planning import Wanted, next_configuration
from tidegate.errors import ConfigError
from tidegate.layers.layer import Layer, layer_of
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


def test_every_layer_has_its_field_in_configurations_and_wanted_counts() -> None:
    assert [CURRENT.of(layer) for layer in Layer] == [CURRENT.access_points, CURRENT.matchers, CURRENT.exit_points]
    assert [Wanted(2, 3, 4).count(layer) for layer in Layer] == [2, 3, 4]
    assert {layer_of(name) for layer in Layer for name in CURRENT.of(layer)} == set(Layer)
    assert [layer.spelled for layer in Layer] == ["Access Points", "Matchers", "Exit Points"]
