"""Which slices the next configuration should have: pure functions of who lives and what is wanted."""

from __future__ import annotations

from collections.abc import Collection

from tidegate.cluster.directory import Wanted
from tidegate.layers.selector import Configuration


def next_configuration(
    current: Configuration, living: Collection[str], wanted: Wanted, *, is_recovery: bool
) -> Configuration | None:
    """Those of the present configuration that live and are not to be replaced, the oldest first, and as many spares as
    are wanted; None while some are missing. A recovery takes what there is, if every layer has somebody: whoever is
    missing can come later."""
    layers = []
    for layer, present, count in (
        ("access-point", current.access_points, wanted.access_points),
        ("matcher", current.matchers, wanted.matchers),
        ("exit-point", current.exit_points, wanted.exit_points),
    ):
        staying = [name for name in present if name in living and name not in wanted.replaced]
        spare = sorted(
            (
                name
                for name in living
                if name.startswith(f"{layer}-") and name not in present and name not in wanted.replaced
            ),
            key=_number,
        )
        leaving = [name for name in present if name in living and name in wanted.replaced]
        chosen = (staying + spare + (leaving if is_recovery else []))[:count]
        if len(chosen) < (1 if is_recovery else count):
            return None
        layers.append(tuple(chosen))
    access_points, matchers, exit_points = layers
    return Configuration(0, access_points, matchers, exit_points)


def is_the_same(one: Configuration, other: Configuration) -> bool:
    """The same slices, whatever the epoch."""
    return one.slices == other.slices


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
