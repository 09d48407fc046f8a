"""Calls about queues: everything that a native client asks of them besides messages. Each action is one function.

The arguments come from outside: an action that does not exist, and arguments of another shape, are ProtocolErrors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from tidegate.errors import ProtocolError
from tidegate.messages import Kept, QueueCall
from tidegate.queues import LogicalQueues
from tidegate.queues.definition import DEAD, SUBSCRIPTION, Definition, QueueSettings
from tidegate.queues.logical_queues import READ_MESSAGES_MAX
from tidegate.queues.statistics import QueueStatistics
from tidegate.queues.store import Level

Action: TypeAlias = Callable[[LogicalQueues, str, dict[str, Any]], Awaitable[Any]]
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


class _Subscribe(msgspec.Struct):
    filter: str
    policy: str = "block"


class NamedSubscription(msgspec.Struct):
    """A named durable subscription, as it is listed."""

    name: str
    filter: str
    policy: str


async def call(queues: LogicalQueues, asked: QueueCall) -> Any:
    """Whatever the action answers, as MessagePack can carry it."""
    action = _ACTIONS.get(asked.action)
    if action is None:
        raise ProtocolError(
            "P331", f"{asked.action[:40]!r} is no action of queues", f"there are: {', '.join(_ACTIONS)}"
        )
    return await action(queues, asked.name, asked.arguments)


async def _define(queues: LogicalQueues, name: str, arguments: dict[str, Any]) -> QueueSettings:
    return (await queues.define(name, arguments)).settings


async def _describe(queues: LogicalQueues, name: str, arguments: dict[str, Any]) -> QueueSettings:
    return queues.definition(name).settings


async def _list(queues: LogicalQueues, name: str, arguments: dict[str, Any]) -> list[Definition]:
    """The users' own: neither dead letters nor subscriptions."""
    return [definition for definition in queues.definitions() if "." not in definition.name]


async def _drop(queues: LogicalQueues, name: str, arguments: dict[str, Any]) -> None:
    await queues.drop(name)


async def _stats(queues: LogicalQueues, name: str, arguments: dict[str, Any]) -> QueueStatistics:
    return await queues.statistics(name)


async def _redrive(queues: LogicalQueues, name: str, arguments: dict[str, Any]) -> int:
    return await queues.redrive(name, _shaped(arguments, _Redrive).max)


async def _read(queues: LogicalQueues, name: str, arguments: dict[str, Any]) -> list[Kept]:
    asked = _shaped(arguments, _Read)
    return await queues.read(name, asked.physical, asked.start, asked.stop, asked.max)


async def _delete_below(queues: LogicalQueues, name: str, arguments: dict[str, Any]) -> int:
    asked = _shaped(arguments, _DeleteBelow)
    return await queues.delete_below(name, asked.physical, asked.sequence)


async def _levels(queues: LogicalQueues, name: str, arguments: dict[str, Any]) -> list[Level]:
    return await queues.levels(name)


async def _subscribe(queues: LogicalQueues, name: str, arguments: dict[str, Any]) -> QueueSettings:
    asked = _shaped(arguments, _Subscribe)
    return (await queues.define_subscription(name, asked.filter, asked.policy)).settings


async def _subscriptions(queues: LogicalQueues, name: str, arguments: dict[str, Any]) -> list[NamedSubscription]:
    return [
        NamedSubscription(
            definition.name.removeprefix(SUBSCRIPTION), definition.settings.filter or "", definition.settings.policy
        )
        for definition in queues.definitions()
        if definition.name.startswith(SUBSCRIPTION) and not definition.name.endswith(DEAD)
    ]


async def _unsubscribe(queues: LogicalQueues, name: str, arguments: dict[str, Any]) -> None:
    await queues.drop(SUBSCRIPTION + name)


_ACTIONS: Final[dict[str, Action]] = {
    "define": _define,
    "describe": _describe,
    "list": _list,
    "drop": _drop,
    "stats": _stats,
    "redrive": _redrive,
    "read": _read,
    "delete_below": _delete_below,
    "levels": _levels,
    "subscribe": _subscribe,
    "subscriptions": _subscriptions,
    "unsubscribe": _unsubscribe,
}


def _shaped(arguments: dict[str, Any], shape: type[T]) -> T:
    try:
        return msgspec.convert(arguments, shape)
    except msgspec.ValidationError as error:
        raise ProtocolError("P303", f"the arguments of the call: {error}", "see docs/protocols.md for them") from error
