"""The definition of a logical queue: its name, and every setting with its default and its bounds.

The body of `PUT /v1/queues/{name}`, the arguments of `tidegate queue create`, and the stored form all have the same
shape. The dead letters of a queue form a logical queue too, which has its name with the suffix `.dead`. A named
subscription is a logical queue with the prefix `subscription.`. Users' names therefore have no dots.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from tidegate.errors import ConflictingQueue, QueueError
from tidegate.filters import Filter
from tidegate.notification import NOTIFICATION_BYTES_MAX

DEAD: Final = ".dead"
SUBSCRIPTION: Final = "subscription."
PHYSICAL_QUEUES_MAX: Final = 64
SUBSCRIPTION_EXPIRES_S: Final = 7 * 86_400.0
"""A named subscription that was not read for this long is dropped, unless its own `expires_s` differs."""
FED_BYTES_MIN: Final = 2 * NOTIFICATION_BYTES_MAX
"""The least room of each physical queue, in a queue with a filter. The largest notification, with the data stored
beside it, must fit an empty physical queue, or its publisher would wait for ever."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")

Method = Literal["wakeup", "rds", "pms", "conventional"]
Durability = Literal["fsync", "os", "memory"]
Policy = Literal["block", "drop-oldest"]
AfterBlock = Literal["refuse", "drop-oldest", "drop-newest"]
AfterLifetime = Literal["delete", "dead-letter"]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class QueueSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of a queue that a user may choose. `HELP` explains each of them."""

    filter: str | None = None
    policy: Policy = "block"
    block_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 10.0
    after_block: AfterBlock = "refuse"
    lifetime_s: Annotated[float, msgspec.Meta(gt=0, le=10 * 366 * 86_400)] | None = None
    after_lifetime: AfterLifetime = "delete"
    expires_s: Annotated[float, msgspec.Meta(ge=0, le=10 * 366 * 86_400)] | None = None
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


class SubscriptionSettings(msgspec.Struct, kw_only=True):
    """Settings of a named subscription's queue, besides filter and policy; None keeps the current value."""

    messages_max: int | None = None
    bytes_max: int | None = None
    block_s: float | None = None
    after_block: str | None = None
    lifetime_s: float | None = None
    after_lifetime: str | None = None
    expires_s: float | None = None

    def given(self) -> dict[str, Any]:
        names = SubscriptionSettings.__struct_fields__
        return {name: value for name in names if (value := getattr(self, name)) is not None}


HELP: Final[dict[str, str]] = {
    "filter": "notifications that match this filter are put into the queue",
    "policy": "what happens to a matching notification when the queue is full: block (its publisher waits) or "
    "drop-oldest",
    "block_s": "policy block: how long a full queue that stores nothing holds back its publishers",
    "after_block": "policy block: what happens to a notification after block_s: refuse (its publisher gets an error "
    "that names the queue), drop-oldest (makes room) or drop-newest (it is not stored)",
    "lifetime_s": "a message older than this is no longer delivered; by default messages have no age limit",
    "after_lifetime": "what happens to a message after lifetime_s: delete, or dead-letter (it moves to the dead-letter "
    "queue)",
    "expires_s": "the queue is dropped, with its messages, if it is not read for this long; 0 for never; by "
    "default never for a queue, and 7 days for a named subscription",
    "physical_queues": "number of physical queues; cannot be changed later",
    "method": "dequeue method: wakeup, rds, pms or conventional",
    "durability": "what an acknowledgement guarantees: fsync (survives a power cut), os (survives a crash of the "
    "broker) or memory; by default the best that the store offers; cannot be changed later",
    "max_deliveries": "after this many deliveries a message moves to the dead-letter queue; 0 for never",
    "messages_max": "most messages that the queue holds; more are refused",
    "bytes_max": "most bytes that the queue holds; more are refused",
    "leased_max": "most messages of one physical queue that may be leased at a time",
    "linger_s": "wakeup: a request with a minimum gets fewer messages once the oldest has waited this long",
    "sleep_s": "rds: how long a request that found nothing sleeps before it is tried again; the longest sleep if "
    "adaptive",
    "sleep": "rds: whether the sleep time is fixed or adaptive",
    "park_after": "rds: a request sleeps after its first empty physical queue (first) or when all its tries were "
    "empty (all)",
    "monitor_period_s": "pms: how often the physical queues are counted",
    "deduplication_s": "how long single messages of devices with gaps in their numbers are remembered; 0 turns off "
    "deduplication by device and sequence",
    "deduplication_messages_max": "most of these messages that each physical queue remembers",
}
FIELDS: Final = {field.name: field for field in msgspec.structs.fields(QueueSettings)}
assert FIELDS.keys() == HELP.keys()
_FIXED: Final = ("physical_queues", "durability")


def _new_id() -> str:
    return secrets.token_hex(8)


class Definition(msgspec.Struct, frozen=True):
    """A logical queue as a store keeps it. `id` distinguishes it from a later queue of the same name, created after
    this one was dropped."""

    name: str
    settings: QueueSettings
    id: str = msgspec.field(default_factory=_new_id)

    @property
    def dead(self) -> str:
        """The name of its dead-letter queue; empty if this is a dead-letter queue itself."""
        return "" if self.name.endswith(DEAD) else self.name + DEAD

    @property
    def expires_s(self) -> float:
        """How long the queue may stay unread before it is dropped; 0 means for ever."""
        if self.settings.expires_s is not None:
            return self.settings.expires_s
        return SUBSCRIPTION_EXPIRES_S if self.is_subscription else 0.0

    @property
    def is_subscription(self) -> bool:
        """Whether it is the queue of a named subscription."""
        return self.name.startswith(SUBSCRIPTION) and not self.name.endswith(DEAD)

    def dead_letters(self) -> Definition:
        """Returns the definition of its dead-letter queue. It has as many physical queues, so that a dead letter keeps
        the number of its physical queue."""
        settings = QueueSettings(
            physical_queues=self.settings.physical_queues,
            durability=self.settings.durability,
            max_deliveries=0,
            messages_max=self.settings.messages_max,
            bytes_max=self.settings.bytes_max,
            deduplication_s=0.0,
            expires_s=0.0,
        )
        return Definition(self.name + DEAD, settings, self.id)


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise QueueError(
            "Q902", f"{name!r} is not a valid queue name", "use 1 to 100 letters, digits, hyphens and underscores"
        )
    return name


def parse_settings(given: Any, *, is_text: bool = False) -> QueueSettings:
    """Checks and converts settings from outside. With `is_text` the values are written as text, as on a command
    line."""
    try:
        settings = msgspec.convert(given, QueueSettings, strict=not is_text)
    except msgspec.ValidationError as error:
        raise _invalid(given, str(error)) from error
    if settings.filter is not None:
        Filter.parse(settings.filter)
        if settings.bytes_max < (needed := settings.physical_queues * FED_BYTES_MIN):
            raise QueueError(
                "Q903",
                f"bytes_max is {settings.bytes_max}, too small for the largest notification in each of "
                f"{settings.physical_queues} physical queues",
                f"set bytes_max of a queue with a filter to at least {needed}, or use fewer physical queues",
            )
    return settings


def _invalid(given: Any, problem: str) -> QueueError:
    """Returns the error for settings that msgspec refuses, in the words of `HELP` and not in those of Python."""
    if unknown := re.search(r"unknown field `(.*)`", problem):
        known = ", ".join(FIELDS)
        return QueueError("Q903", f"there is no queue setting {unknown[1][:40]!r}", f"the settings are: {known}")
    place = re.search(r"`\$\.(\w+)`", problem)
    if place is None or place[1] not in FIELDS:
        return QueueError("Q903", "the settings of a queue are not names with values", "use for example method=wakeup")
    name = place[1]
    shown = repr(given[name])[:40] if isinstance(given, dict) else "this value"
    return QueueError("Q903", f"the queue setting {name} cannot be {shown}", f"{name}: {HELP[name]}{_bounds(name)}")


def _bounds(name: str) -> str:
    """Returns the bounds of a number among the settings, to be appended to its help text."""
    kind = FIELDS[name].type
    # The type of an optional setting is a union, whose parts carry the bounds.
    metas = [meta for each in (kind, *get_args(kind)) for meta in getattr(each, "__metadata__", ())]
    if not metas:
        return ""
    low = f"from {metas[0].ge}" if metas[0].gt is None else f"above {metas[0].gt}"
    return f" ({low} to {metas[0].le:,})"


def check_change(before: Definition, after: QueueSettings) -> None:
    """Raises ConflictingQueue for a change of a setting that is fixed as long as the queue exists."""
    for name in _FIXED:
        old, new = getattr(before.settings, name), getattr(after, name)
        if old != new:
            raise ConflictingQueue(
                "Q904",
                f"queue {before.name!r} has {name} = {old}, which cannot be changed to {new}",
                "drop the queue first, or choose another name",
            )
