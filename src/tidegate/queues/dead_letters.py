"""Dead letters: messages that were delivered too often, or became too old. Their headers record why and when."""

from __future__ import annotations

from typing import Final

import msgspec

from tidegate.queues.records import decode_record, seal, unseal

REASON: Final = "dead-letter-reason"
DELIVERIES: Final = "dead-letter-deliveries"
AT: Final = "dead-letter-at"
QUEUE: Final = "dead-letter-queue"
SEQUENCE: Final = "dead-letter-sequence"
_HEADERS: Final = frozenset({REASON, DELIVERIES, AT, QUEUE, SEQUENCE})


def to_dead_letter(
    sealed: bytes, queue: str, sequence: int, deliveries: int, at: float, *, is_expired: bool = False
) -> bytes:
    """Returns the record with its history in its headers; a corrupt record is returned unchanged."""
    body = unseal(sealed)
    if body is None:
        return sealed
    record = decode_record(body)
    history = {
        REASON: "older than the queue's lifetime_s"
        if is_expired
        else f"delivered {deliveries} times and never deleted",
        DELIVERIES: str(deliveries),
        AT: f"{at:.3f}",
        QUEUE: queue,
        SEQUENCE: str(sequence),
    }
    return seal(msgspec.structs.replace(record, headers=record.headers | history))


def from_dead_letter(sealed: bytes) -> bytes:
    """Returns the record as it was enqueued, without the history."""
    body = unseal(sealed)
    if body is None:
        return sealed
    record = decode_record(body)
    headers = {name: value for name, value in record.headers.items() if name not in _HEADERS}
    return seal(msgspec.structs.replace(record, headers=headers))
