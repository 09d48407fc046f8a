"""The definition of a logical queue: its name, and every setting with its default and its bounds.

The same shape everywhere: the body of `PUT /v1/queues/{name}`, the arguments of `tidegate queue create`, and what a
store keeps. A queue's dead letters are a logical queue too, named after it with the suffix `.dead`; a named
subscription is one with the prefix `subscription.`. So users' names have no dots.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any, Final, Literal

import msgspec

from tidegate.errors import ConflictingQueue, QueueError
from tidegate.filters import Filter
from tidegate.notification import NOTIFICATION_BYTES_MAX

DEAD: Final = ".dead"
SUBSCRIPTION: Final = "subscription."
PHYSICAL_QUEUES_MAX: Final = 64
FED_BYTES_MIN: Final = 2 * NOTIFICATION_BYTES_MAX
"""Of each physical queue that a filter fills: the largest notification, with what is kept beside it, must fit an empty
one, or its publisher would wait for ever."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")

Method = Literal["wakeup", "rds", "pms", "conventional"]
Durability = Literal["fsync", "os", "memory"]
Policy = Literal["block", "drop-oldest"]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class QueueSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a user may say about a queue. `HELP` says what each means."""

    filter: str | None = None
    policy: Policy = "block"
    physical_queues: Annotated[int, msgspec.Meta(ge=1, le=PHYSICAL_QUEUES_MAX)] = 4
    method: Method = "wakeup"
    durability: Durability | None = None
    max_deliveries: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 5
    messages_max: Count = 10_000_000
    bytes_max: Count = 4 * 1024**3
    leased_max: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 100_000
    linger_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.02
    sleep_s: Seconds = 0.5
    sleep: Literal["fixed", "adaptive"] = "fixed"
    park_after: Literal["first", "all"] = "first"
    monitor_period_s: Seconds = 0.5
    deduplication_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 300.0
    deduplication_messages_max: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 100_000


HELP: Final[dict[str, str]] = {
    "filter": "notifications that match it are put into the queue",
    "policy": "what happens to such a notification when the queue is full: block (its publisher waits) or drop-oldest",
    "physical_queues": "how many physical queues it has; cannot be changed",
    "method": "how it is dequeued: wakeup, rds, pms or conventional",
    "durability": "what an acknowledgement means: fsync (survives a power cut), os (survives a crash of the broker) or "
    "memory; by default the best that the store has; cannot be changed",
    "max_deliveries": "after so many deliveries a message goes to the dead-letter queue; 0 for never",
    "messages_max": "messages that it holds; more are refused",
    "bytes_max": "bytes that it holds; more are refused",
    "leased_max": "messages of one physical queue that may be leased at a time",
    "linger_s": "wakeup: a request that wants a minimum gets fewer when the oldest has waited for so long",
    "sleep_s": "rds: how long a request that missed sleeps before it is tried again; the longest sleep when adaptive",
    "sleep": "rds: fixed or adaptive",
    "park_after": "rds: a request sleeps after its first empty physical queue (first) or after its last (all)",
    "monitor_period_s": "pms: how often the physical queues are counted",
    "deduplication_s": "how long a message's device and sequence are remembered",
    "deduplication_messages_max": "how many of them each physical queue remembers at most",
}
FIELDS: Final = {field.name: field for field in msgspec.structs.fields(QueueSettings)}
assert FIELDS.keys() == HELP.keys()
_FIXED: Final = ("physical_queues", "durability")


def _new_id() -> str:
    return secrets.token_hex(8)


class Definition(msgspec.Struct, frozen=True):
    """A logical queue as a store keeps it; `id` tells it from one that is made under its name when it is dropped."""

    name: str
    settings: QueueSettings
    id: str = msgspec.field(default_factory=_new_id)

    @property
    def dead(self) -> str:
        """The name of its dead-letter queue; nothing for one that is such a queue."""
        return "" if self.name.endswith(DEAD) else self.name + DEAD

    def dead_letters(self) -> Definition:
        """The definition of its dead-letter queue: as many physical queues, so that a message stays in its place."""
        settings = QueueSettings(
            physical_queues=self.settings.physical_queues,
            durability=self.settings.durability,
            max_deliveries=0,
            messages_max=self.settings.messages_max,
            bytes_max=self.settings.bytes_max,
            deduplication_s=0.0,
        )
        return Definition(self.name + DEAD, settings, self.id)


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise QueueError(
            "Q902", f"{name!r} is no name of a queue", "use 1 to 100 letters, digits, hyphens and underscores"
        )
    return name


def parse_settings(given: Any, *, is_text: bool = False) -> QueueSettings:
    """Settings as they come from outside; `is_text` for values written as text, as on a command line."""
    try:
        settings = msgspec.convert(given, QueueSettings, strict=not is_text)
    except msgspec.ValidationError as error:
        raise QueueError(
            "Q903", f"the settings of the queue: {error}", f"there are: {', '.join(QueueSettings.__struct_fields__)}"
        ) from error
    if settings.filter is not None:
        Filter.parse(settings.filter)
        if settings.bytes_max < (needed := settings.physical_queues * FED_BYTES_MIN):
            raise QueueError(
                "Q903",
                f"bytes_max is {settings.bytes_max}, too few for the largest notification in each of "
                f"{settings.physical_queues} physical queues",
                f"give a queue that a filter fills at least {needed}, or fewer physical queues",
            )
    return settings


def check_change(before: Definition, after: QueueSettings) -> None:
    """Raises when a queue would have to be emptied for a change."""
    for name in _FIXED:
        old, new = getattr(before.settings, name), getattr(after, name)
        if old != new:
            raise ConflictingQueue(
                "Q904",
                f"queue {before.name!r} has {name} = {old}, not {new}",
                "drop it first, or choose another name",
            )
