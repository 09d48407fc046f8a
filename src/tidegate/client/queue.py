"""A logical queue, as a program uses it: put messages in, take them out, delete them when the work is done.

queue = broker.queue("alerts")
await queue.put({"station": 4, "NO2": 212})
async for message in queue:
    print(message.body)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from tidegate.client.consumer import Batches, Messages, take
from tidegate.client.control import RetryPace
from tidegate.client.message import Message
from tidegate.client.queue_requests import QueueRequests
from tidegate.errors import Overloaded, QueueError
from tidegate.frames import HEADER_BYTES, decode_body, join_maps
from tidegate.messages import (
    BATCH_MESSAGES_MAX,
    MESSAGE_BYTES_MAX,
    Dequeue,
    Enqueued,
    Level,
    Levels,
    NewMessage,
    Page,
    Record,
    Settled,
)

READ_MESSAGES_MAX: Final = 10_000
# The bytes of an Enqueue frame without its messages and the queue's name.
_ENQUEUE_BYTES: Final = HEADER_BYTES + 64

_encode = msgspec.msgpack.Encoder().encode


class _Kept(msgspec.Struct, array_like=True, gc=False):
    sequence: int
    record: Record


class Queue:
    """A handle for a logical queue: one name over several physical queues. Creating it sends nothing to the broker."""

    def __init__(self, requests: QueueRequests, name: str) -> None:
        self.name = name
        self._requests = requests

    # The queue itself.

    async def create(self, **settings: Any) -> dict[str, Any]:
        """Creates the queue, or replaces the settings of an existing one. Returns all settings (see docs/queues.md)."""
        return _map(await self._requests.call("define", self.name, settings))

    async def drop(self) -> None:
        """Deletes the queue with its messages and its dead letters."""
        await self._requests.call("drop", self.name)

    async def describe(self) -> dict[str, Any]:
        """Returns the settings of the queue."""
        return _map(await self._requests.call("describe", self.name))

    async def stats(self) -> dict[str, Any]:
        return _map(await self._requests.call("stats", self.name))

    async def levels(self) -> list[Level]:
        """Returns how full the physical queues are. The call is cheap enough for polling."""
        return (await self.look()).levels

    async def look(self) -> Levels:
        """Returns the levels and the id of the queue. The id differs if the queue was dropped and created again."""
        found: Levels = decode_body(await self._requests.call("levels", self.name), Levels)
        return found

    async def redrive(self, max: int = READ_MESSAGES_MAX) -> int:  # noqa: A002
        """Moves dead letters back into the queue. Returns how many."""
        return _count(await self._requests.call("redrive", self.name, {"max": max}))

    # Producing.

    async def put(
        self,
        bodies: Any,
        *,
        group: str = "",
        device: str = "",
        sequence: int | None = None,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> Enqueued:
        """Puts one body or a list of bodies, and returns when all are as durable as the queue's settings require.

        Messages of a `group` keep their order. `device` and `sequence` identify a message: if it is put again, the
        queue ignores it. Within a list, `sequence` is that of the first message and counts on. Without them the
        connection identifies messages itself, so that a reconnection never duplicates one. If the broker has no room,
        the call retries for up to `wait_s`, later each time, and then raises the refusal."""
        if bool(device) != (sequence is not None):
            raise QueueError("Q905", "only one of device and sequence is given", "give both, or neither")
        listed = bodies if isinstance(bodies, list) else [bodies]
        kept = dict(headers or {})
        return await self.put_messages(
            [
                NewMessage(_encode_body(body), group, device, (sequence or 0) + index, kept)
                for index, body in enumerate(listed)
            ],
            wait_s=wait_s,
        )

    async def put_messages(self, messages: Sequence[NewMessage], *, wait_s: float = 0.0) -> Enqueued:
        """Puts messages that differ in more than their bodies. Messages that do not fit into one frame are sent in
        several: after an error some of them may be in the queue."""
        await self._requests.wait_until_up()
        deadline_s = asyncio.get_running_loop().time() + wait_s
        enqueued = Enqueued(0, 0, "")
        for part in self._parts(messages):
            reply = await self._enqueue(part, deadline_s)
            enqueued = Enqueued(
                enqueued.accepted + reply.accepted, enqueued.duplicates + reply.duplicates, reply.durability
            )
        return enqueued

    async def put_batch(
        self, messages: Sequence[NewMessage | msgspec.Raw], *, producer: str, number: int, wait_s: float = 0.0
    ) -> Enqueued:
        """Puts messages, encoded or not, as a numbered batch. As long as the queue exists, it ignores a batch of
        `producer` whose number is not above the last accepted one, whatever the order of its messages. So a program
        that crashed can simply repeat its last batch.

        Numbers start at 1 and increase; make one call at a time. A batch must fit into one frame: split a larger one,
        always in the same way, and give each part a number. `wait_s` is as in `put`."""
        if not producer:
            raise QueueError("Q915", f"batch {number} has no producer", "name one, and use the same name to repeat it")
        await self._requests.wait_until_up()
        deadline_s = asyncio.get_running_loop().time() + wait_s
        encoded = [_encode(message) for message in messages]
        room, size = self._room(), sum(map(len, encoded)) + len(producer.encode())
        if size > room or len(encoded) > BATCH_MESSAGES_MAX:
            raise QueueError(
                "Q916",
                f"batch {number} of {producer!r} has {len(encoded)} messages in {size} bytes",
                f"split it into parts of at most {BATCH_MESSAGES_MAX} messages in {room} bytes, and number each",
            )
        fields = {
            "queue": self.name,
            "producer": producer,
            "number": number,
            "messages": msgspec.Raw(join_maps(encoded)),
        }
        return await self._enqueue(_encode(fields), deadline_s)

    # Consuming.

    def __aiter__(self) -> AsyncIterator[Message]:
        return aiter(self.messages())

    def messages(
        self,
        *,
        max: int = 100,  # noqa: A002
        min: int = 1,  # noqa: A002
        wait_s: float = 20.0,
        visibility_s: float = 30.0,
    ) -> Messages:
        """Returns a loop over single messages. In `async with queue.messages() as messages` the last is settled too."""
        return Messages(self._requests, Dequeue(self.name, max, min, wait_s, visibility_s))

    def batches(
        self,
        *,
        max: int = 100,  # noqa: A002
        min: int = 1,  # noqa: A002
        wait_s: float = 20.0,
        visibility_s: float = 30.0,
    ) -> Batches:
        """Returns a loop over batches. A batch is done when the program asks for the next one."""
        return Batches(self._requests, Dequeue(self.name, max, min, wait_s, visibility_s))

    async def take(
        self,
        max: int = 100,  # noqa: A002
        min: int = 1,  # noqa: A002
        wait_s: float = 20.0,
        visibility_s: float = 30.0,
    ) -> list[Message]:
        """Takes up to `max` messages, leased for `visibility_s`. Waits up to `wait_s` for `min` messages, or for fewer
        that have lingered; returns none if none arrive. Delete a message when its work is done; extend its lease if the
        work takes longer."""
        return await take(self._requests, Dequeue(self.name, max, min, wait_s, visibility_s))

    async def delete(self, messages: Message | Iterable[Message]) -> Settled:
        """Deletes messages whose work is done. `stale` counts those whose leases had ended: they come again."""
        return await self._requests.settle(self.name, "delete", _receipts(messages))

    async def extend(self, messages: Message | Iterable[Message], visibility_s: float = 30.0) -> Settled:
        return await self._requests.settle(self.name, "extend", _receipts(messages), visibility_s=visibility_s)

    async def release(self, messages: Message | Iterable[Message], delay_s: float = 0.0) -> Settled:
        """Releases messages whose work has failed: the queue delivers them again after `delay_s`."""
        return await self._requests.settle(self.name, "release", _receipts(messages), delay_s=delay_s)

    # Reading without taking.

    async def read(
        self,
        physical: int,
        start: int,
        stop: int,
        max: int = READ_MESSAGES_MAX,  # noqa: A002
    ) -> list[Message]:
        """Reads messages of a physical queue with sequences from `start` to below `stop`, leased or not. They have no
        receipts; `delete_below` deletes them."""
        messages: list[Message] = []
        while len(messages) < max and start < stop:
            arguments = {"physical": physical, "from": start, "to": stop, "max": max - len(messages)}
            kept: list[_Kept] = decode_body(await self._requests.call("read", self.name, arguments), list[_Kept])
            if not kept:
                break
            messages += [Message("", 0, physical, each.sequence, each.record) for each in kept]
            start = kept[-1].sequence + 1
        return messages

    async def read_page(self, physical: int, start: int, stop: int) -> Page:
        """Reads messages as `read` does, but only one reply of them, as bytes: for programs that read millions."""
        arguments = {"physical": physical, "from": start, "to": stop, "max": READ_MESSAGES_MAX}
        page: Page = decode_body(await self._requests.call("read_page", self.name, arguments), Page)
        return page

    async def delete_below(self, physical: int, sequence: int) -> int:
        """Deletes the messages below a sequence and returns how many. Repeating the call is harmless."""
        arguments = {"physical": physical, "sequence": sequence}
        return _count(await self._requests.call("delete_below", self.name, arguments))

    # Internals.

    async def _enqueue(self, body: bytes, deadline_s: float) -> Enqueued:
        """Sends an encoded Enqueue and retries until the deadline. Retrying is safe: its messages or the batch itself
        are numbered, so the queue keeps them once."""
        loop = asyncio.get_running_loop()
        pace = RetryPace()
        while True:
            try:
                enqueued: Enqueued = decode_body(await self._requests.enqueue(body), Enqueued)
                return enqueued
            except Overloaded as error:
                wait_s = pace.on_refusal(error.retry_after_s)
                if loop.time() + wait_s > deadline_s:
                    raise
                await asyncio.sleep(wait_s)

    def _parts(self, messages: Sequence[NewMessage]) -> list[bytes]:
        """Returns Enqueue bodies with the messages, named and encoded, each small enough for one frame."""
        room = self._room()
        parts: list[list[bytes]] = [[]]
        size = 0
        for index, message in enumerate(messages):
            encoded = _encode(self._named(message))
            if len(memoryview(message.body)) > MESSAGE_BYTES_MAX or len(encoded) > room:
                raise QueueError(
                    "Q905",
                    f"message [{index}] has {len(encoded)} bytes",
                    f"send at most {MESSAGE_BYTES_MAX}, or the address of a larger object",
                )
            if size + len(encoded) > room or len(parts[-1]) == BATCH_MESSAGES_MAX:
                parts.append([])
                size = 0
            parts[-1].append(encoded)
            size += len(encoded)
        # A MessagePack map of two fields, written by hand because the messages are already encoded.
        head = b"\x82" + _encode("queue") + _encode(self.name) + _encode("messages")
        return [head + join_maps(part) for part in parts]

    def _room(self) -> int:
        """Returns how many bytes the messages of one Enqueue may have."""
        return self._requests.frame_bytes_max - _ENQUEUE_BYTES - len(self.name.encode())

    def _named(self, message: NewMessage) -> NewMessage:
        if message.device:
            return message
        device, sequence = self._requests.name, self._requests.next_sequence()
        return NewMessage(message.body, message.group, device, sequence, message.headers)


def _encode_body(body: Any) -> msgspec.Raw:
    try:
        return msgspec.Raw(_encode(body))
    except (TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise QueueError(
            "Q911", f"{body!r:.40} cannot be written as MessagePack: {error}", "use maps, lists, texts, numbers, bytes"
        ) from error


def _receipts(messages: Message | Iterable[Message]) -> list[str]:
    return [messages.receipt] if isinstance(messages, Message) else [message.receipt for message in messages]


def _count(reply: memoryview) -> int:
    return msgspec.msgpack.decode(reply, type=int)


def _map(reply: memoryview) -> dict[str, Any]:
    return msgspec.msgpack.decode(reply, type=dict[str, Any])
