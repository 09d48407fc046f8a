"""A message as a consumer gets it: decoded together with its frame, its body when it is asked for."""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate.errors import QueueError
from tidegate.messages import Record


class Message(msgspec.Struct, array_like=True, gc=False):
    """`receipt` is good until the lease ends; `delivery` counts from 1: above it the message was given out before.
    `queue` and `sequence` say where it lies: the physical queue, and its number there."""

    receipt: str
    delivery: int
    queue: int
    sequence: int
    record: Record
    _body: Any = msgspec.UNSET

    @property
    def body(self) -> Any:
        """QueueError when whoever enqueued it has not written MessagePack; `raw` has its bytes."""
        if self._body is msgspec.UNSET:
            try:
                self._body = msgspec.msgpack.decode(self.record.body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise QueueError(
                    "Q912", f"the body of message {self.queue}/{self.sequence} is malformed: {error}", "look at its raw"
                ) from error
        return self._body

    @property
    def raw(self) -> bytes:
        """The body's MessagePack."""
        return bytes(self.record.body)

    @property
    def enqueued_at(self) -> float:
        """Seconds since 1970, by the broker's clock."""
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
