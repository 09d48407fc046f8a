"""Planning: chooses the slices of the next configuration from the live slices and the wanted counts, without I/O."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from tidegate.layers.layer import Layer, layer_of
from tidegate.layers.selector import Configuration


class Wanted(msgspec.Struct, frozen=True):
    """The layers that an operator wants. `replaced` are the slices that others shall replace."""

    access_points: int = 1
    matchers: int = 1
    exit_points: int = 1
    replaced: frozenset[str] = frozenset()
    is_buffered: bool = False

    def count(self, layer: Layer) -> int:
        """Returns how many slices the layer shall have."""
        wanted: int = getattr(self, layer.field)
        return wanted


def next_configuration(
    current: Configuration, living: Collection[str], wanted: Wanted, *, is_recovery: bool
) -> Configuration | None:
    """Returns the next configuration, or None while too few slices are live. It keeps the live slices of the present
    one that are not to be replaced, the oldest first, and adds spare slices up to the wanted counts. A recovery takes
    what is available if every layer has at least one slice: the missing ones can join later."""
    layers: dict[str, Any] = {}
    for layer in Layer:
        present, count = current.of(layer), wanted.count(layer)
        staying = [name for name in present if name in living and name not in wanted.replaced]
        spare = sorted(
            (
                name
                for name in living
                if layer_of(name) is layer and name not in present and name not in wanted.replaced
            ),
            key=_number,
        )
        leaving = [name for name in present if name in living and name in wanted.replaced]
        chosen = (staying + spare + (leaving if is_recovery else []))[:count]
        if len(chosen) < (1 if is_recovery else count):
            return None
        layers[layer.field] = tuple(chosen)
    return Configuration(0, **layers)


def has_same_slices(one: Configuration, other: Configuration) -> bool:
    """Reports whether two configurations have the same slices, whatever their epochs."""
    return one.slices == other.slices


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
