"""The result of a persistent query, as its client knows it: the rows, the number of the last indication, the losses.

Indications are numbered. The next indication reveals a missing one, and so does the answer to a check, which has the
last number, or a result to compare. After a loss the query is opened again after the last number that was read. The
broker sends what was missed, or a whole result, from which the difference is computed. So the changes always add up to
the result.

If a query cannot be resumed, its rows are not kept: a loss is reported with the next change, and stays.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tidegate.client.control import SequenceGaps
from tidegate.client.persistent_transport import Checked, Indicated, Opened, Row

_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.decode


@dataclass(frozen=True)
class Change:
    """A change in the result. The first one has the whole result. `lost` is the number of indications before it that
    never arrived: for a query this change includes them, for a filter they are gone."""

    sequence: int
    added: list[Row]
    removed: list[Row] = field(default_factory=list)
    merged: int = 0
    lost: int = 0


class Finding(NamedTuple):
    """What a message of the broker reveals: how many indications were lost, and the change for the program, if any."""

    losses: int
    change: Change | None


class PersistentResult:
    """Receives the messages of one query, over all its links. `subscription` and `sequence` are where to resume it."""

    def __init__(self, *, is_resumable: bool) -> None:
        self.subscription = ""
        self.sequence = 0
        self._is_resumable = is_resumable
        self._is_known = False
        self._rows: Counter[bytes] = Counter()
        self._gaps = SequenceGaps()
        self._lost_before_next = 0
        self._asked_sequence = 0

    def on_opened(self, opened: Opened) -> Finding:
        rows = Counter(map(_encode, opened.result)) if opened.result is not None else self._rows
        before, self._rows = self._rows, rows
        is_first, self._is_known = not self._is_known, True
        is_different = rows != before and not is_first
        # A difference is one loss, unless a gap in the numbers has already counted it.
        losses = self._gaps.restart(opened.sequence, is_different=is_different and not self._lost_before_next)
        self._lost_before_next += losses
        self.subscription, self.sequence = opened.subscription, opened.sequence
        if not is_different and (not is_first or opened.result is None):
            return Finding(losses, None)
        added, removed = (list(map(_decode, each.elements())) for each in (rows - before, before - rows))
        return Finding(losses, self._change(added, removed))

    def on_indicated(self, heard: Indicated) -> Finding:
        """Takes in an indication. After a loss it does so only if the query cannot be resumed: otherwise another
        opening brings this indication too."""
        losses = self._gaps.on_message(heard.sequence, carried=1)
        self._lost_before_next += losses
        if (losses and self._is_resumable) or heard.sequence <= self.sequence:
            return Finding(losses, None)
        self.sequence = heard.sequence
        if self._is_resumable:
            for row in map(_encode, heard.removed):
                self._rows[row] -= 1
                if self._rows[row] <= 0:
                    del self._rows[row]
            self._rows.update(map(_encode, heard.added))
        return Finding(losses, self._change(heard.added, heard.removed, heard.merged))

    def on_asked(self) -> None:
        """Notes that a check is sent now."""
        self._asked_sequence = self.sequence

    def on_checked(self, checked: Checked) -> int:
        """Returns how many losses the answer to the last check reveals."""
        if checked.sequence is not None:
            losses = self._gaps.on_message(checked.sequence, carried=0)
        else:
            # Results are comparable only if no indication arrived since the check was sent. If one did, its number has
            # already revealed any loss.
            is_quiet = self.sequence == self._asked_sequence
            losses = int(is_quiet and Counter(map(_encode, checked.result or ())) != self._rows)
        self._lost_before_next += losses
        return losses

    def _change(self, added: list[Row], removed: list[Row], merged: int = 0) -> Change:
        lost, self._lost_before_next = self._lost_before_next, 0
        return Change(self.sequence, added, removed, merged, lost)
