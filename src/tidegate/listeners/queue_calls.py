"""Queue calls: everything a native client may request of queues except enqueue, dequeue and settle.

Each action is one method. The arguments come from outside: an unknown action raises P331, invalid arguments P303.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final, TypeVar

import msgspec

from tidegate.errors import NoSuchQueue, ProtocolError
from tidegate.messages import Kept, Levels, Page, QueueCall
from tidegate.queues import LogicalQueues
from tidegate.queues.definition import SUBSCRIPTION, Definition, QueueSettings, SubscriptionSettings
from tidegate.queues.logical_queues import READ_MESSAGES_MAX
from tidegate.queues.statistics import QueueStatistics

T = TypeVar("T")


class _Redrive(msgspec.Struct):
    max: int = READ_MESSAGES_MAX


class _Read(msgspec.Struct, rename={"start": "from", "stop": "to"}):
    physical: int
    start: int
    stop: int
    max: int = READ_MESSAGES_MAX


class _DeleteBelow(msgspec.Struct):
    physical: int
    sequence: int


class _Subscribe(SubscriptionSettings, kw_only=True):
    filter: str
    policy: str = "block"


class NamedSubscription(msgspec.Struct):
    """A named durable subscription as `subscriptions` lists it; times in seconds since 1970."""

    name: str
    filter: str
    policy: str
    last_read_at: float | None
    expires_at: float | None


class QueueCalls:
    """Runs the action that a call names; every result can be encoded as MessagePack."""

    def __init__(self, queues: LogicalQueues) -> None:
        self._queues = queues
        self._actions: Final = {
            "define": self._define,
            "describe": self._describe,
            "list": self._list,
            "drop": self._drop,
            "stats": self._stats,
            "redrive": self._redrive,
            "read": self._read,
            "read_page": self._read_page,
            "delete_below": self._delete_below,
            "levels": self._levels,
            "subscribe": self._subscribe,
            "subscriptions": self._subscriptions,
            "unsubscribe": self._unsubscribe,
        }

    async def answer(self, call: QueueCall) -> Any:
        action = self._actions.get(call.action)
        if action is None:
            raise ProtocolError(
                "P331", f"{call.action[:40]!r} is not a queue action", f"use one of: {', '.join(self._actions)}"
            )
        return await action(call)

    async def _define(self, call: QueueCall) -> QueueSettings:
        return (await self._queues.define(call.name, call.arguments)).settings

    async def _describe(self, call: QueueCall) -> QueueSettings:
        return self._queues.definition(call.name).settings

    async def _list(self, call: QueueCall) -> list[Definition]:
        """Lists the queues that users defined. Dead-letter queues and those of subscriptions have a dot in the name."""
        return [definition for definition in self._queues.definitions() if "." not in definition.name]

    async def _drop(self, call: QueueCall) -> None:
        await self._queues.drop(call.name)

    async def _stats(self, call: QueueCall) -> QueueStatistics:
        return await self._queues.statistics(call.name)

    async def _redrive(self, call: QueueCall) -> int:
        return await self._queues.redrive(call.name, _parse_arguments(call.arguments, _Redrive).max)

    async def _read(self, call: QueueCall) -> list[Kept]:
        asked = _parse_arguments(call.arguments, _Read)
        return await self._queues.read(call.name, asked.physical, asked.start, asked.stop, asked.max)

    async def _read_page(self, call: QueueCall) -> Page:
        asked = _parse_arguments(call.arguments, _Read)
        return await self._queues.read_page(call.name, asked.physical, asked.start, asked.stop, asked.max)

    async def _delete_below(self, call: QueueCall) -> int:
        asked = _parse_arguments(call.arguments, _DeleteBelow)
        return await self._queues.delete_below(call.name, asked.physical, asked.sequence)

    async def _levels(self, call: QueueCall) -> Levels:
        return Levels(self._queues.definition(call.name).id, await self._queues.levels(call.name))

    async def _subscribe(self, call: QueueCall) -> QueueSettings:
        asked = _parse_arguments(call.arguments, _Subscribe)
        return (await self._queues.define_subscription(call.name, asked.filter, asked.policy, asked)).settings

    async def _subscriptions(self, call: QueueCall) -> list[NamedSubscription]:
        listed = []
        for definition in self._queues.definitions():
            if definition.is_subscription:
                name, settings = definition.name.removeprefix(SUBSCRIPTION), definition.settings
                with contextlib.suppress(NoSuchQueue):  # dropped during an earlier await of this loop
                    read_at, expires_at = await self._queues.last_read(definition.name)
                    listed.append(NamedSubscription(name, settings.filter or "", settings.policy, read_at, expires_at))
        return listed

    async def _unsubscribe(self, call: QueueCall) -> None:
        await self._queues.drop(SUBSCRIPTION + call.name)


def _parse_arguments(arguments: dict[str, Any], shape: type[T]) -> T:
    try:
        return msgspec.convert(arguments, shape)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            "P303",
            f"the arguments of the call are invalid: {error}",
            "see docs/protocols.md for each action's arguments",
        ) from error
