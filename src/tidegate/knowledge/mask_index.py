"""An index of masks: finds the keys whose masks a changed triple may match.

A mask fixes or leaves open each of three texts, so at most eight shapes of masks match a triple. Eight look-ups
therefore find all matching masks, however many there are. Persistent queries use the index to find the queries that a
change concerns, and the request pool to find the cached answers that it invalidates.

It may find too many keys, but never too few. A literal and a URI with the same text share an entry. Triples of named
graphs find the keys of `ANY_CHANGE`, and also those of the all-wildcard mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Generic, TypeAlias, TypeVar

from tidegate.knowledge.terms import Literal, Masks, Triple, Uri

_K = TypeVar("_K", bound=Hashable)
_Shape: TypeAlias = tuple[str | None, str | None, str | None]
_ANY: _Shape = (None, None, None)


class MaskIndex(Generic[_K]):
    """Keys by their masks."""

    def __init__(self) -> None:
        self._keys: dict[_Shape, dict[_K, None]] = {}

    def add(self, key: _K, masks: Masks) -> None:
        for shape in _shapes_of(masks):
            self._keys.setdefault(shape, {})[key] = None

    def remove(self, key: _K, masks: Masks) -> None:
        """Removes a key; `masks` must be those that it was added with."""
        for shape in _shapes_of(masks):
            keys = self._keys[shape]
            del keys[key]
            if not keys:
                del self._keys[shape]

    def find(self, triple: Triple) -> Iterator[_K]:
        """Yields the keys that a triple concerns. A key appears once for each of its shapes that matches."""
        if not self._keys:
            return
        for shape in _shapes_matching(triple):
            if (keys := self._keys.get(shape)) is not None:
                yield from keys


def _shapes_of(masks: Masks) -> set[_Shape]:
    if masks.is_everything:
        return {_ANY}
    return {(_text(mask.subject), _text(mask.predicate), _text(mask.object)) for mask in masks.patterns}


def _text(term: Uri | Literal | None) -> str | None:
    return None if term is None else term.text


def _shapes_matching(triple: Triple) -> Iterator[_Shape]:
    if triple.graph:
        return iter([_ANY])
    return itertools.product((None, triple.subject.text), (None, triple.predicate.text), (None, triple.object.text))
