"""Messages of queues in JSON: what is posted becomes MessagePack, and what is kept becomes JSON again.

MessagePack can hold more than JSON: bytes come out as base64, numbers that are keys as text, NaN as null. A body that
JSON cannot hold at all (keys that are lists, types of an application, text that is not UTF-8), or that is so deep that
its reader may fail with the whole answer, comes out as `{"$msgpack": …}` with its bytes in base64: it was accepted, so
it is delivered.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tidegate.errors import QueueError
from tidegate.messages import Kept, Leased, NewMessage, Record
from tidegate.queues.records import decode_record

MSGPACK: Final = "$msgpack"
# Lists and objects inside each other. Parsers of JSON give up somewhere above 500, many a little device earlier.
LEVELS_MAX: Final = 100


class PostedMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of `POST /v1/queues/{q}/messages`."""

    body: Any
    group: str = ""
    device: str = ""
    sequence: int = 0
    headers: dict[str, str] = {}


def to_new_messages(posted: list[PostedMessage]) -> list[NewMessage]:
    return [
        NewMessage(_encode_body(index, each.body), each.group, each.device, each.sequence, each.headers)
        for index, each in enumerate(posted)
    ]


def leased_json(leased: Leased) -> dict[str, Any]:
    """A message as a dequeue gives it."""
    record = decode_record(leased.record)
    place = {
        "receipt": leased.receipt,
        "delivery": leased.delivery,
        "queue": leased.queue,
        "sequence": leased.sequence,
    }
    return _record_json(record) | place


def kept_json(kept: Kept) -> dict[str, Any]:
    """A message as a range read gives it."""
    return _record_json(decode_record(kept.record)) | {"sequence": kept.sequence}


def delivery_json(leased: Leased) -> bytes:
    """A notification as a durable subscription gives it."""
    record = decode_record(leased.record)
    return msgspec.json.encode(
        {"notification": body_json(record.body), "publisher": record.device, "sequence": record.sequence}
    )


def body_json(body: msgspec.Raw) -> msgspec.Raw:
    try:
        value = msgspec.msgpack.decode(body)
        if not _is_deep(value, len(memoryview(body))):
            return msgspec.Raw(msgspec.json.encode(value))
    except (ValueError, TypeError, RecursionError):
        pass
    return msgspec.Raw(msgspec.json.encode({MSGPACK: bytes(body)}))


def _record_json(record: Record) -> dict[str, Any]:
    shown = {"body": body_json(record.body), "enqueued_at": record.enqueued_at, "headers": record.headers}
    if record.group:
        shown["group"] = record.group
    if record.device:
        shown |= {"device": record.device, "device_sequence": record.sequence}
    return shown


def _encode_body(index: int, body: Any) -> msgspec.Raw:
    try:
        encoded = msgspec.msgpack.encode(body)
        if not _is_deep(body, len(encoded)):
            return msgspec.Raw(encoded)
    except OverflowError:
        raise QueueError(
            "Q905", f"the body of message [{index}] has an integer over 64 bits", "send it as a text"
        ) from None
    except RecursionError:
        pass
    raise QueueError("Q905", f"the body of message [{index}] is too deep", f"nest at most {LEVELS_MAX} levels")


def _is_deep(value: Any, encoded_bytes: int) -> bool:
    """Whether there are more levels than LEVELS_MAX; each has at least a byte, so most messages are not looked into."""
    return encoded_bytes > LEVELS_MAX and _is_deeper(value, LEVELS_MAX)


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(each, levels - 1) for each in inner)
