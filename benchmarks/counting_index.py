"""The counting algorithm, as a reference: a subscription matches if as many constraints are satisfied as it has.

Constraints are stored in flat arrays. Those of one attribute, operator and operand are adjacent, and those that compare
numbers are sorted by their bounds. A value selects stretches of the arrays, through Python dictionaries and bisection.
One compiled loop over all stretches then counts the selected constraints of each subscription. So the algorithm visits
every satisfied constraint, and every interval that begins below the value. An index must do better.

It supports only what the workloads use: no absence, no order of strings, one operand for `==` and `!=`, non-empty
patterns on strings only, and attributes whose values are all of one class (so True is never compared with 1).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tidegate.filters import Operator
from tidegate.index.packing import OPERATORS

# First place, place after the last, amount that each place counts, and the smallest end of an interval that counts.
Stretch = tuple[int, int, int, float]
_ANY_END: Final = -np.inf


class _Group(NamedTuple):
    """The constraints of one attribute and operator, from `start` on, with the stretch of each operand or the sorted
    bounds."""

    operator: Operator
    start: int
    stop: int
    stretches: Mapping[Any, Stretch]
    lengths: frozenset[int]
    bounds: Sequence[float]


class CountingIndex:
    """An index over packed filters that cannot be changed later. A subscription is the position of its filter."""

    def __init__(self, filters: Iterable[list[Any]]) -> None:
        constraints = defaultdict[tuple[str, int], list[tuple[Any, Any, int]]](list)
        needed = []
        for subscription, packed in enumerate(filters):
            needed.append(len(packed))
            for name, number, *operands in packed:
                first, last = (operands[0], operands[-1]) if operands else (None, None)
                constraints[name, number].append((first, last, subscription))
        self._needed = np.array(needed, np.int8)
        self._counts = np.empty_like(self._needed)
        self._found = np.empty(len(needed), np.int64)
        self._owners = np.empty(sum(needed), np.int32)
        self._ends = np.empty(sum(needed))
        self._groups = defaultdict[str, list[_Group]](list)
        start = 0
        for (name, number), group in constraints.items():
            self._groups[name].append(self._lay_out(OPERATORS[number], group, start))
            start += len(group)

    def match(self, notification: Mapping[str, Any]) -> list[int]:
        """Returns the subscriptions that the notification satisfies, in no particular order."""
        return self.count(self.select(notification))

    def select(self, notification: Mapping[str, Any]) -> NDArray[np.float64]:
        """Returns the stretches that the notification's values select. This part is pure Python."""
        stretches: list[Stretch] = []
        for name, value in notification.items():
            for group in self._groups.get(name, ()):
                stretches += _satisfied(group, value)
        return np.array(stretches, np.float64).reshape(-1, 4)

    def count(self, selected: NDArray[np.float64]) -> list[int]:
        """Returns the subscriptions whose constraints are all in the stretches. This part is compiled."""
        number = _count(selected, self._owners, self._ends, self._needed, self._counts, self._found)
        found: list[int] = self._found[:number].tolist()
        return found

    def _lay_out(self, operator: Operator, constraints: list[tuple[Any, Any, int]], start: int) -> _Group:
        if operator is not Operator.EXISTS:
            constraints.sort(key=itemgetter(0))
        stop = start + len(constraints)
        self._owners[start:stop] = [owner for _, _, owner in constraints]
        operands = [operand for operand, _, _ in constraints]
        if operator is Operator.RANGE:
            self._ends[start:stop] = [end for _, end, _ in constraints]
        if operator in _BOUNDED:
            return _Group(operator, start, stop, {}, frozenset(), operands)
        stretches: dict[Any, Stretch] = {}
        for place, operand in enumerate(operands, start):
            first = stretches[operand][0] if operand in stretches else place
            stretches[operand] = (first, place + 1, -1 if operator is Operator.NOT_EQUAL else 1, _ANY_END)
        lengths = frozenset(map(len, stretches)) if operator in _PARTS else frozenset[int]()
        return _Group(operator, start, stop, stretches, lengths, ())


def _satisfied(group: _Group, value: Any) -> Iterable[Stretch]:
    operator, start, stop, stretches, lengths, bounds = group
    if operator in _BOUNDED:
        first, last = _BOUNDED[operator](bounds, value)
        return ((start + first, start + last, 1, value if operator is Operator.RANGE else _ANY_END),)
    if operator in _PARTS:
        return [stretches[part] for part in _PARTS[operator](value, lengths) if part in stretches]
    equal = (stretches[value],) if value in stretches else ()
    # For `!=`, the equal constraints are subtracted before all are added, so that no count passes through zero.
    return equal if operator is Operator.EQUAL else (*equal, (start, stop, 1, _ANY_END))


# The range of the sorted bounds that a value satisfies. For intervals: those that do not begin above the value.
_BOUNDED: Final[Mapping[Operator, Callable[[Sequence[float], float], tuple[int, int]]]] = {
    Operator.BELOW: lambda bounds, value: (bisect_right(bounds, value), len(bounds)),
    Operator.AT_MOST: lambda bounds, value: (bisect_left(bounds, value), len(bounds)),
    Operator.ABOVE: lambda bounds, value: (0, bisect_left(bounds, value)),
    Operator.AT_LEAST: lambda bounds, value: (0, bisect_right(bounds, value)),
    Operator.RANGE: lambda bounds, value: (0, bisect_right(bounds, value)),
}
# The patterns of these lengths that a text satisfies.
_PARTS: Final[Mapping[Operator, Callable[[str, Iterable[int]], Iterable[str]]]] = {
    Operator.PREFIX: lambda text, lengths: {text[:length] for length in lengths},
    Operator.SUFFIX: lambda text, lengths: {text[-length:] for length in lengths},
    Operator.CONTAINS: lambda text, lengths: {
        text[start : start + length] for length in lengths for start in range(len(text) - length + 1)
    },
}


@njit(cache=True)
def _count(stretches: Any, owners: Any, ends: Any, needed: Any, counts: Any, found: Any) -> int:
    """Writes the satisfied subscriptions to `found` and returns their number.

    `counts` holds how many satisfied constraints each subscription still needs."""
    counts[:] = needed
    number = 0
    for k in range(len(stretches)):
        worth, least = np.int8(stretches[k, 2]), stretches[k, 3]
        for place in range(np.int64(stretches[k, 0]), np.int64(stretches[k, 1])):
            if least == _ANY_END or ends[place] >= least:
                owner = owners[place]
                counts[owner] -= worth
                if counts[owner] == 0:
                    found[number] = owner
                    number += 1
    return number
