"""Filter budget: bounds the memory for the filters of live subscriptions, per session and for a whole broker.

The number of subscriptions is a poor measure of memory: a filter has 10 bytes or 4,000, and each attribute name that no
other filter uses takes a number and some arrays of the index. Each subscription is therefore charged with bytes: a
fixed part, its packed filter, its values, and the attribute names that are new in its session. The number of names is
bounded too, since an index can number 65,536 of them and one client must not use them up.

A charge estimates what the index and the Connection Point allocate; its parts were measured.
What may go wrong: a budget is exhausted. The new subscription is refused (L620, L621), and all others stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tidegate.errors import Overloaded
from tidegate.filters import Filter

# Per subscription: its entries in the tables of the Connection Point, a Matcher and the index.
SUBSCRIPTION_BYTES: Final = 400
# The index keeps a packed filter as a program and its strings, in arrays with room to grow.
PACKED_FACTOR: Final = 2
# Per value that a filter compares with: a string or number of its own, and a place where the filter is filed.
VALUE_BYTES: Final = 160
# Per attribute name: its number, domain and histogram, and its place in the index.
NAME_BYTES: Final = 2048


@dataclass(slots=True)
class Shape:
    """The attribute names of a filter. Subscriptions of a session with the same names share one."""

    names: tuple[str, ...]
    subscriptions: int = 0


@dataclass(slots=True)
class FilterAccount:
    """Counts the memory that is charged to the filters of one session."""

    bytes: int = 0
    shapes: dict[tuple[str, ...], Shape] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)


class FilterBudget:
    """All accounts of a Connection Point. Invariant: `bytes` is their sum. An account outlives its session until the
    Matchers have removed its filters, so that a client cannot escape its charges by reconnecting."""

    def __init__(self, bytes_max: int, session_bytes_max: int, session_names_max: int) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max
        self._session_bytes_max = session_bytes_max
        self._session_names_max = session_names_max

    def charge(self, account: FilterAccount, subscription_filter: Filter, packed: bytes) -> tuple[Shape, int]:
        """Charges a filter to an account, and returns the shape and bytes to pass to `give_back`. Raises Overloaded,
        and charges nothing, if a budget would be exceeded."""
        names = tuple(sorted({constraint.name for constraint in subscription_filter.constraints}))
        shape = account.shapes.get(names)
        new = 0 if shape is not None else sum(name not in account.names for name in names)
        values = sum(len(constraint.operands) for constraint in subscription_filter.constraints)
        size_bytes = SUBSCRIPTION_BYTES + PACKED_FACTOR * len(packed) + VALUE_BYTES * values
        self._check_names(len(account.names), new)
        self._check_bytes(account, size_bytes + new * NAME_BYTES)
        if shape is None:
            shape = account.shapes[names] = Shape(names)
            for name in names:
                account.names[name] = account.names.get(name, 0) + 1
        shape.subscriptions += 1
        self._add(account, size_bytes + new * NAME_BYTES)
        return shape, size_bytes

    def give_back(self, account: FilterAccount, shape: Shape, size_bytes: int) -> None:
        """Returns to the account what `charge` has taken for a filter."""
        shape.subscriptions -= 1
        freed = 0
        if not shape.subscriptions:
            del account.shapes[shape.names]
            for name in shape.names:
                account.names[name] -= 1
                if not account.names[name]:
                    del account.names[name]
                    freed += 1
        self._add(account, -size_bytes - freed * NAME_BYTES)

    def _add(self, account: FilterAccount, size_bytes: int) -> None:
        account.bytes += size_bytes
        self.bytes += size_bytes
        assert account.bytes >= 0, account.bytes

    def _check_names(self, used: int, new: int) -> None:
        if used + new > self._session_names_max:
            raise Overloaded(
                "L621",
                f"the filters of this connection use {used} attribute names, and the new filter adds {new}",
                f"the maximum is {self._session_names_max}: use values instead of names for what varies, use several "
                "connections, or raise attribute_names_per_connection_max",
                retry_after_s=5.0,
            )

    def _check_bytes(self, account: FilterAccount, size_bytes: int) -> None:
        if account.bytes + size_bytes > self._session_bytes_max or self.bytes + size_bytes > self._bytes_max:
            raise Overloaded(
                "L620",
                f"filters use {account.bytes} bytes on this connection and {self.bytes} in total, and the new filter "
                f"needs {size_bytes}",
                f"the maximum is {self._session_bytes_max} and {self._bytes_max}: use shorter or broader filters, or "
                "raise subscriptions_per_connection_bytes_max or subscriptions_bytes_max",
                retry_after_s=5.0,
            )
