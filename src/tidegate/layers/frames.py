"""Frames between the layers. Channels are FIFO; every frame that belongs to a stream carries epoch and stream.

    Connection Point ─Submit─► Access Point ─Publish─► Matcher ─Partial─► Exit Point ─Deliver─► Connection Point
                                    └────────────Body────────────────────────▲
    and back:   DeliverAck (Connection Point → Exit Point), Ack (→ Access Point), SubmitAck (→ Connection Point)
    Change / ChangeOk, ChangeRefused: a subscription begins or ends, and every slice that must know does.
    Load: how much a slice has done, to the coordinator, for whoever asks it (AskLoads, Loads).
    The frames that reconfigure the layers stand in `control`.

`sequence` counts the batches of one Access Point to one Exit Point in one stream, without gaps. It is not the
publisher's own sequence, which numbers notifications and stands in the batch.

A frame names its handler: a slice gets it as `slice.on_publish(source, frame, now_s)`.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.errors import TidegateError
from tidegate.layers.batch import Batch
from tidegate.layers.control import Buried, Command, GoOn, Marker, ReadShare, Reply, Share, Suspect
from tidegate.messages import NewMessage

# A slice by name, or a session of a Connection Point by number.
Address: TypeAlias = str | int


class Submit(msgspec.Struct, gc=False):
    """A publisher's batch enters the layers."""

    handler: ClassVar[str] = "on_submit"
    batch: Batch


class SubmitAck(msgspec.Struct, gc=False):
    """Every subscriber of the batch has it in its outbox."""

    handler: ClassVar[str] = "on_submit_ack"
    publisher: str
    last: int


class Publish(msgspec.Struct, gc=False):
    """To every Matcher: which of your subscriptions does this batch satisfy? Tell that Exit Point."""

    handler: ClassVar[str] = "on_publish"
    access_point: str
    stream: int
    epoch: int
    sequence: int
    batch: Batch
    exit_point: str


class Body(msgspec.Struct, gc=False):
    """To the Exit Point, once: the notifications themselves."""

    handler: ClassVar[str] = "on_body"
    access_point: str
    stream: int
    epoch: int
    sequence: int
    batch: Batch


class Partial(msgspec.Struct, gc=False):
    """One Matcher's answer: notification i satisfies the subscriptions `ids[offsets[i]:offsets[i + 1]]`."""

    handler: ClassVar[str] = "on_partial"
    access_point: str
    stream: int
    epoch: int
    sequence: int
    matcher: str
    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]


class Deliver(msgspec.Struct, gc=False):
    """The joined answer, to each Connection Point with a subscriber in it."""

    handler: ClassVar[str] = "on_deliver"
    access_point: str
    stream: int
    sequence: int
    batch: Batch
    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]


class DeliverAck(msgspec.Struct, gc=False):
    """It is in the outboxes (not: the subscriber has read it)."""

    handler: ClassVar[str] = "on_deliver_ack"
    access_point: str
    stream: int
    sequence: int


class Ack(msgspec.Struct, gc=False):
    """All Connection Points have acknowledged this batch. One batch each, not cumulative: a subscriber that blocks
    holds back only the publishers it listens to."""

    handler: ClassVar[str] = "on_ack"
    stream: int
    sequence: int


class Fill(msgspec.Struct, gc=False):
    """To the queue feeder: these messages belong into that queue."""

    handler: ClassVar[str] = "on_fill"
    queue: str
    messages: list[NewMessage]
    ticket: int


class Filled(msgspec.Struct, gc=False):
    """They are there, durably."""

    handler: ClassVar[str] = "on_filled"
    ticket: int


class Change(msgspec.Struct, gc=False):
    """A subscription begins or gets another filter, as the index packs it, or ends (None). Versions of one go up."""

    handler: ClassVar[str] = "on_change"
    subscription: int
    version: int
    filter: bytes | None


class ChangeOk(msgspec.Struct, gc=False):
    handler: ClassVar[str] = "on_change_ok"
    subscription: int
    version: int


class ChangeRefused(msgspec.Struct, gc=False):
    """A Matcher cannot take a subscription; nothing holds it."""

    handler: ClassVar[str] = "on_change_refused"
    subscription: int
    version: int
    error: TidegateError


class PublishAcknowledged(msgspec.Struct, gc=False):
    """To a session: its publisher is acknowledged up to here."""

    handler: ClassVar[str] = "on_publish_acknowledged"
    publisher: str
    sequence: int


class SubscriptionReady(msgspec.Struct, gc=False):
    """To a session: from now on every acknowledged publish reaches this subscription."""

    handler: ClassVar[str] = "on_subscription_ready"
    client_id: int


class SubscriptionRebound(msgspec.Struct, gc=False):
    """To a session: from now on every acknowledged publish is matched by the subscription's other filter."""

    handler: ClassVar[str] = "on_subscription_rebound"
    client_id: int


class SubscriptionRefused(msgspec.Struct, gc=False):
    """To a session: the subscription does not exist, for this reason."""

    handler: ClassVar[str] = "on_subscription_refused"
    client_id: int
    error: TidegateError


class SubscriptionEnded(msgspec.Struct, gc=False):
    handler: ClassVar[str] = "on_subscription_ended"
    client_id: int


class DeliveriesWait(msgspec.Struct, gc=False):
    """To a session: something is in its outboxes; take it when you can write."""

    handler: ClassVar[str] = "on_deliveries_wait"


class SessionEnded(msgspec.Struct, gc=False):
    """To a session: the Connection Point has closed it, for this reason."""

    handler: ClassVar[str] = "on_session_ended"
    error: TidegateError


class Load(msgspec.Struct, frozen=True):
    """Counters of one slice. `delays` has how many batches took how long (`load.DELAYS_S`) from their Connection Point
    to their subscribers' outboxes; `address` is where clients reach the broker of a Connection Point."""

    handler: ClassVar[str] = "on_load"
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


class AskLoads(msgspec.Struct, frozen=True):
    """To the coordinator: send me the last of everybody. Who is no slice says where."""

    handler: ClassVar[str] = "on_ask_loads"
    endpoint: str = ""


class Loads(msgspec.Struct, frozen=True):
    handler: ClassVar[str] = "on_loads"
    loads: dict[str, Load]


LayerFrame: TypeAlias = (
    Submit
    | SubmitAck
    | Publish
    | Body
    | Partial
    | Deliver
    | DeliverAck
    | Ack
    | Fill
    | Filled
    | Change
    | ChangeOk
    | ChangeRefused
    | PublishAcknowledged
    | SubscriptionReady
    | SubscriptionRebound
    | SubscriptionRefused
    | SubscriptionEnded
    | DeliveriesWait
    | SessionEnded
    | Command
    | Reply
    | Marker
    | Share
    | ReadShare
    | GoOn
    | Buried
    | Suspect
    | Load
    | AskLoads
    | Loads
)
Outputs: TypeAlias = list[tuple[Address, LayerFrame]]
