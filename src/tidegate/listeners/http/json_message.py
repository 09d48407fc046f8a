"""Queue messages as JSON: posted bodies are stored as MessagePack, and stored bodies are returned as JSON.

MessagePack can represent more than JSON. Bytes become base64, numeric keys become strings, NaN becomes null. Some
bodies have no JSON form: keys that are lists, application types, text that is not UTF-8. Others are nested so deeply
that the client's parser may fail on the whole answer. Both are returned as `{"$msgpack": …}` with their bytes in
base64: the broker accepted them, so it delivers them.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tidegate.errors import QueueError
from tidegate.messages import Kept, Leased, NewMessage, Record
from tidegate.queues.records import decode_record

MSGPACK: Final = "$msgpack"
# Levels of nested lists and objects. JSON parsers fail somewhere above 500, those of small devices often earlier.
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
    """Returns a message as a dequeue reports it."""
    record = decode_record(leased.record)
    place = {
        "receipt": leased.receipt,
        "delivery": leased.delivery,
        "queue": leased.queue,
        "sequence": leased.sequence,
    }
    return _record_json(record) | place


def kept_json(kept: Kept) -> dict[str, Any]:
    """Returns a message as a range read reports it."""
    return _record_json(decode_record(kept.record)) | {"sequence": kept.sequence}


def delivery_json(leased: Leased) -> bytes:
    """Returns a notification as a durable subscription delivers it."""
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
            "Q905", f"the body of message [{index}] has an integer over 64 bits", "send it as a string"
        ) from None
    except RecursionError:
        pass
    raise QueueError("Q905", f"the body of message [{index}] is nested too deeply", f"nest at most {LEVELS_MAX} levels")


def _is_deep(value: Any, encoded_bytes: int) -> bool:
    """Returns whether a value has more than LEVELS_MAX levels. Each level takes at least a byte, so small messages need
    no walk."""
    return encoded_bytes > LEVELS_MAX and _is_deeper(value, LEVELS_MAX)


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(each, levels - 1) for each in inner)
