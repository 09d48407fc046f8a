"""Frames between the layers. Channels are FIFO; every frame that belongs to a stream carries epoch and stream.

    Connection Point ─Submit─► Access Point ─Publish─► Matcher ─Partial─► Exit Point ─Deliver─► Connection Point
                                    └────────────Body────────────────────────▲
    and back:   DeliverAck (Connection Point → Exit Point), Ack (→ Access Point), SubmitAck (→ Connection Point)
    Change / ChangeOk, ChangeRefused: a subscription begins or ends, and every slice that must have the change has it.
    Load: a slice's counters, sent to the coordinator, which sends them on request (AskLoads, Loads).
    The frames that reconfigure the layers are in `control`. A Connection Point's reports to its sessions are no frames:
    they are in `session_events`.

`sequence` counts the batches of one Access Point to one Exit Point in one stream, without gaps. It is not the
publisher's own sequence, which numbers notifications and is part of the batch.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.errors import TidegateError
from tidegate.layers.batch import Batch
from tidegate.messages import NewMessage

# The frames that travel between processes, by their number on the wire.
NUMBERED: Final[dict[int, type[LayerFrame]]] = {}


class LayerFrame:
    """A frame between slices. Its handler follows from its name: a slice receives a SubmitAck as
    `slice.on_submit_ack(source, frame, now_s)`. Its `number` on the wire never changes, and a new frame gets the next
    one. A frame without a number never leaves its process."""

    __slots__ = ()
    handler: ClassVar[str]
    number: ClassVar[int] = -1

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__()
        cls.handler = "on" + re.sub("([A-Z])", r"_\1", cls.__name__).lower()
        if cls.number >= 0:
            assert NUMBERED.setdefault(cls.number, cls) is cls, f"{cls.__name__} has the number of another frame"


class Refused(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A range of a publisher's sequences, `first` to `last`, that a full queue did not store."""

    queue: str
    first: int
    last: int


class Submit(LayerFrame, msgspec.Struct, gc=False):
    """A publisher's batch enters the layers."""

    number = 0
    batch: Batch


class SubmitAck(LayerFrame, msgspec.Struct, gc=False):
    """Confirms that the batch is in the outbox of every subscriber, and in every queue except for the `refused`
    notifications."""

    number = 1
    publisher: str
    last: int
    refused: list[Refused] = []


class Publish(LayerFrame, msgspec.Struct, gc=False):
    """Asks every Matcher which of its subscriptions a batch satisfies; the answer goes to `exit_point`."""

    number = 2
    access_point: str
    stream: int
    epoch: int
    sequence: int
    batch: Batch
    exit_point: str


class Body(LayerFrame, msgspec.Struct, gc=False):
    """Sends the Exit Point the notifications themselves, once. `entrance` is the Connection Point where they
    entered."""

    number = 3
    access_point: str
    stream: int
    epoch: int
    sequence: int
    batch: Batch
    entrance: str


class Partial(LayerFrame, msgspec.Struct, gc=False):
    """One Matcher's answer: notification i satisfies the subscriptions `ids[offsets[i]:offsets[i + 1]]`."""

    number = 4
    access_point: str
    stream: int
    epoch: int
    sequence: int
    matcher: str
    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]


class Deliver(LayerFrame, msgspec.Struct, gc=False):
    """Sends the joined answer to each Connection Point that has a matching subscriber. `entrance` is the Connection
    Point where the batch entered, `epoch` the configuration under which it was matched."""

    number = 5
    access_point: str
    stream: int
    sequence: int
    batch: Batch
    entrance: str
    epoch: int
    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]


class DeliverAck(LayerFrame, msgspec.Struct, gc=False):
    """Confirms that a batch is in the outboxes (not that subscribers have read it). From a queue point, it confirms
    that the queues have stored the batch except for the `refused` notifications."""

    number = 6
    access_point: str
    stream: int
    sequence: int
    refused: list[Refused] = []


class Ack(LayerFrame, msgspec.Struct, gc=False):
    """Confirms that all Connection Points have acknowledged this batch. It is not cumulative: a subscriber that blocks
    holds back only the publishers it listens to."""

    number = 7
    stream: int
    sequence: int
    refused: list[Refused] = []


class Fill(LayerFrame, msgspec.Struct, gc=False):
    """Asks the queue feeder to put messages into a queue. All earlier notifications of their publisher that match
    `filter`, from sequence `since` on, were sent to the feeder before."""

    queue: str
    messages: list[NewMessage]
    ticket: int
    since: int
    filter: str


class Filled(LayerFrame, msgspec.Struct, gc=False):
    """Confirms that notifications are stored, except the `refused` ones."""

    ticket: int
    refused: list[Refused] = []


class Change(LayerFrame, msgspec.Struct, gc=False):
    """Creates a subscription or replaces its filter, in the packed form of the index; None ends the subscription.
    Each change of a subscription has a higher version."""

    number = 8
    subscription: int
    version: int
    filter: bytes | None


class ChangeOk(LayerFrame, msgspec.Struct, gc=False):
    number = 9
    subscription: int
    version: int


class ChangeRefused(LayerFrame, msgspec.Struct, gc=False):
    """Reports that a Matcher cannot take a subscription. The Connection Point then removes it from other holders."""

    number = 10
    subscription: int
    version: int
    error: TidegateError


class Load(LayerFrame, msgspec.Struct, frozen=True):
    """Counters of one slice. `delays` is a histogram, with the steps of `load.DELAYS_S`, of how long batches took from
    their Connection Point to their subscribers' outboxes. `address` is where clients reach a Connection Point's
    broker."""

    number = 26
    at_s: float
    cpu_s: float
    notifications: int
    deliveries: int = 0
    subscriptions: int = 0
    moved_in: int = 0
    unacknowledged_batches: int = 0
    incomplete_batches: int = 0
    delays: tuple[int, ...] = ()
    address: str = ""


class AskLoads(LayerFrame, msgspec.Struct, frozen=True):
    """Asks the coordinator for the last report of every slice. A sender that is not a slice gives its endpoint."""

    number = 27
    endpoint: str = ""


class Loads(LayerFrame, msgspec.Struct, frozen=True):
    number = 28
    loads: dict[str, Load]


# Frames, each with the name of the slice that it goes to.
Outputs: TypeAlias = list[tuple[str, LayerFrame]]
