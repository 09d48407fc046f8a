"""An index of masks: which of the things filed under masks a changed triple may concern.

A mask fixes texts or leaves them open, so a triple is matched by eight shapes of masks at most: that many look-ups find
all of them, however many there are. What stands here for any number of masks is found by whoever has masks of their
own: persistent queries, and answers that are kept until a change touches them.

It may find too much, never too little: a literal and a URI of the same text are filed together, and what is filed under
the mask of all triples, or under no masks as any change concerns it, is found by triples of named graphs too.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Generic, TypeAlias, TypeVar

from tidegate.knowledge.terms import Literal, Mask, Triple, Uri

_K = TypeVar("_K", bound=Hashable)
_Shape: TypeAlias = tuple[str | None, str | None, str | None]
_ANY: _Shape = (None, None, None)


class MaskIndex(Generic[_K]):
    """`masks` is None for what any change concerns."""

    def __init__(self) -> None:
        self._keys: dict[_Shape, dict[_K, None]] = {}

    def add(self, key: _K, masks: tuple[Mask, ...] | None) -> None:
        for shape in _shapes_of(masks):
            self._keys.setdefault(shape, {})[key] = None

    def remove(self, key: _K, masks: tuple[Mask, ...] | None) -> None:
        """With the masks that it was added with."""
        for shape in _shapes_of(masks):
            keys = self._keys[shape]
            del keys[key]
            if not keys:
                del self._keys[shape]

    def find(self, triple: Triple) -> Iterator[_K]:
        """As often as masks of different shapes match."""
        if not self._keys:
            return
        for shape in _shapes_matching(triple):
            if (keys := self._keys.get(shape)) is not None:
                yield from keys


def _shapes_of(masks: tuple[Mask, ...] | None) -> set[_Shape]:
    if masks is None:
        return {_ANY}
    return {(_text(mask.subject), _text(mask.predicate), _text(mask.object)) for mask in masks}


def _text(term: Uri | Literal | None) -> str | None:
    return None if term is None else term.text


def _shapes_matching(triple: Triple) -> Iterator[_Shape]:
    if triple.graph:
        return iter([_ANY])
    return itertools.product((None, triple.subject.text), (None, triple.predicate.text), (None, triple.object.text))
