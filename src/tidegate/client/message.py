"""A message as a consumer receives it. It is decoded together with its frame, but its body only at first access."""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate.errors import QueueError
from tidegate.messages import Record


class Message(msgspec.Struct, array_like=True, gc=False):
    """`receipt` is valid until the lease ends. `delivery` counts deliveries from 1: a higher number means that the
    message was delivered before. `queue` and `sequence` are its place: the physical queue, and its number there."""

    receipt: str
    delivery: int
    queue: int
    sequence: int
    record: Record
    _body: Any = msgspec.UNSET

    @property
    def body(self) -> Any:
        """The decoded body. Raises QueueError if the producer did not write MessagePack; `raw` has the bytes."""
        if self._body is msgspec.UNSET:
            try:
                self._body = msgspec.msgpack.decode(self.record.body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise QueueError(
                    "Q912",
                    f"the body of message {self.queue}/{self.sequence} is malformed: {error}",
                    "read its bytes: message.raw",
                ) from error
        return self._body

    @property
    def raw(self) -> bytes:
        """The body as MessagePack bytes."""
        return bytes(self.record.body)

    @property
    def enqueued_at(self) -> float:
        """The time of enqueueing in seconds since 1970, by the broker's clock."""
        return self.record.enqueued_at

    @property
    def group(self) -> str:
        return self.record.group

    @property
    def device(self) -> str:
        return self.record.device

    @property
    def device_sequence(self) -> int:
        return self.record.sequence

    @property
    def headers(self) -> dict[str, str]:
        return self.record.headers
