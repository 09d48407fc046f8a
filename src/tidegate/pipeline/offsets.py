"""Offsets: how far a streaming query has read a queue. Spark keeps them as JSON in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from tidegate.errors import ConfigError
from tidegate.messages import Levels


@dataclass(frozen=True)
class Offset:
    """The next sequence to read in each physical queue. `id` distinguishes a queue from a later one with the same
    name."""

    queue: str
    id: str
    sequences: list[int]

    @classmethod
    def from_dict(cls, logged: Mapping[str, Any]) -> Offset:
        try:
            return msgspec.convert(dict(logged), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(
                "C421", f"the checkpoint has the invalid offset {dict(logged)!r:.200}: {error}", _CURE
            ) from error

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check(self, queue: str, found: Levels) -> None:
        """Raises ConfigError if this offset cannot belong to that queue."""
        if self.queue != queue:
            raise ConfigError("C421", f"the checkpoint belongs to queue {self.queue!r}, not to {queue!r}", _CURE)
        if self.id != found.id:
            raise ConfigError("C421", f"queue {queue!r} was dropped and created again since the checkpoint", _CURE)
        ends = [level.next for level in found.levels]
        if len(self.sequences) != len(ends) or any(
            sequence > end for sequence, end in zip(self.sequences, ends, strict=True)
        ):
            raise ConfigError(
                "C421",
                f"the checkpoint is ahead of queue {queue!r}, as if an older copy of it was restored: "
                f"{self.sequences} of {ends}",
                _CURE,
            )


_CURE = "give this query a new checkpoint"


def allot(starts: Sequence[int], ends: Sequence[int], rows_max: int) -> list[int]:
    """Returns ends that are at most `rows_max` rows after the starts in total. Each queue gets a share in proportion to
    its waiting rows, so that all of them are finished at the same time."""
    waiting = [max(0, end - start) for start, end in zip(starts, ends, strict=True)]
    total = sum(waiting)
    if total <= rows_max:
        return list(ends)
    shares = [rows_max * each // total for each in waiting]
    # The divisions round down; the rows left over go to the first queues that have more.
    for index, each in enumerate(waiting):
        extra = min(each - shares[index], rows_max - sum(shares))
        shares[index] += extra
    return [start + share for start, share in zip(starts, shares, strict=True)]
