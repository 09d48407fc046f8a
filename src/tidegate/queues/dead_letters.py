"""Dead letters: messages that were delivered too often, with what is known of their failure in their headers."""

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


def to_dead_letter(sealed: bytes, queue: str, sequence: int, deliveries: int, at: float) -> bytes:
    """The record with its history; a corrupt one as it is."""
    body = unseal(sealed)
    if body is None:
        return sealed
    record = decode_record(body)
    history = {
        REASON: f"delivered {deliveries} times and never deleted",
        DELIVERIES: str(deliveries),
        AT: f"{at:.3f}",
        QUEUE: queue,
        SEQUENCE: str(sequence),
    }
    return seal(msgspec.structs.replace(record, headers=record.headers | history))


def from_dead_letter(sealed: bytes) -> bytes:
    """The record as it was enqueued."""
    body = unseal(sealed)
    if body is None:
        return sealed
    record = decode_record(body)
    headers = {name: value for name, value in record.headers.items() if name not in _HEADERS}
    return seal(msgspec.structs.replace(record, headers=headers))
