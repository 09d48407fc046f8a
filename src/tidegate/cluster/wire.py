"""Wire: encodes frames between slices in different processes.

A frame is the header of the native protocol, with the frame's `number` as its kind, and a MessagePack array of the
fields. A batch travels as the original bytes of its notifications, with the start and end of each. Offsets and ids of
matches travel as plain little-endian arrays. A Matcher or an Exit Point therefore decodes a batch of any size in a few
microseconds, and no notification becomes an object.

What may go wrong here: the peer runs another version, or is not a slice at all. Kernels check no bounds, so everything
that they trust is checked here, once for each batch: the ranges of notifications, the offsets of matches, whether
packed filters are complete, and that numbers are not negative and fit 64 bits. Where notifications enter the layers and
where a kernel reads them (Submit, Publish), they are checked by the same rules as on publishing; elsewhere they are
only copied. An invalid frame raises ForeignFrame, and the channel is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, TypeAlias, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.errors import ForeignFrame, Overloaded, TidegateError
from tidegate.frames import HEADER
from tidegate.index.packing import check_entries
from tidegate.kernels import scan_kernel
from tidegate.layers import control, frames
from tidegate.layers.batch import BATCH_NOTIFICATIONS_MAX, Batch
from tidegate.layers.frames import NUMBERED, LayerFrame
from tidegate.layers.subscription_table import is_connection_point
from tidegate.notification import ATTRIBUTES_MAX

# Numbers that slices assign. Kernels and arrays hold them in 64 bits.
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# A publisher's sequence. The bound leaves room for the length of a batch, which is added to its first sequence.
_Sequence = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Batch(msgspec.Struct, array_like=True, gc=False):
    publisher: str
    first: _Sequence
    data: memoryview
    starts: memoryview
    stops: memoryview


class _Refusal(msgspec.Struct, array_like=True):
    code: str
    message: str
    remedy: str
    retry_after_s: float


def encode(frame: LayerFrame, route: int = 0) -> bytes:
    """Encodes one frame for a channel. `route`, in the header, has the numbers of its source and destination."""
    codec = _CODECS[frame.number]
    values = [getattr(frame, name) for name in codec.names]
    for place, (to_wire, _from_wire) in codec.conversions.items():
        values[place] = to_wire(values[place])
    body = _encode(values)
    return HEADER.pack(len(body), frame.number, 0, 0, route) + body


def decode(number: int, body: memoryview) -> LayerFrame:
    """Decodes a frame of this kind. Its arrays and its notifications are views of `body`. Raises ForeignFrame if it is
    invalid."""
    codec = _CODECS.get(number)
    if codec is None:
        raise ForeignFrame(f"unknown kind {number}")
    try:
        values = list(codec.decode(body))
        for place, (_to_wire, from_wire) in codec.conversions.items():
            values[place] = from_wire(values[place])
    except (msgspec.DecodeError, ValueError, RecursionError, UnicodeDecodeError) as error:
        raise ForeignFrame(f"{codec.kind.__name__}: {error}") from error
    frame: LayerFrame = codec.kind(*values)
    if codec.check is not None:
        codec.check(frame)
    return frame


def _batch_to_wire(batch: Batch) -> _Batch:
    """Keeps only the bytes from the first notification to the last: the buffer may hold much more."""
    begin, end = int(batch.starts[0]), int(batch.stops[-1])
    starts, stops = (batch.starts - begin).astype("<u4"), (batch.stops - begin).astype("<u4")
    data = memoryview(batch.data)[begin:end]
    return _Batch(batch.publisher, batch.first, data, _bytes(starts), _bytes(stops))


def _batch_from_wire(batch: _Batch) -> Batch:
    starts = np.frombuffer(batch.starts, "<u4").astype(np.int64)
    stops = np.frombuffer(batch.stops, "<u4").astype(np.int64)
    if not 0 < len(starts) <= BATCH_NOTIFICATIONS_MAX or len(starts) != len(stops):
        raise ValueError(f"a batch has {len(starts)} starts and {len(stops)} stops")
    if stops[-1] > len(batch.data) or (starts > stops).any() or (starts[1:] < stops[:-1]).any():
        raise ValueError("the notifications of a batch lie outside of its bytes, or overlap")
    return Batch(batch.publisher, batch.first, batch.data, starts, stops)


def _numbers_to_wire(numbers: NDArray[np.int64]) -> memoryview:
    return _bytes(np.ascontiguousarray(numbers, "<i8"))


def _numbers_from_wire(data: memoryview) -> NDArray[np.int64]:
    return np.frombuffer(data, "<i8")


def _check_notifications(frame: frames.Submit | frames.Publish) -> None:
    """Raises ForeignFrame unless every notification of the batch passes the rules for publishing."""
    batch, names = frame.batch, np.empty((2, ATTRIBUTES_MAX), np.int64)
    wrong = scan_kernel.check_maps(scan_kernel.as_array(batch.data), batch.starts, batch.stops, names)
    if wrong >= 0:
        raise ForeignFrame(f"notification {wrong} of {len(batch)} is invalid")


def _check_matches(frame: frames.Partial | frames.Deliver) -> None:
    """Raises ForeignFrame unless the offsets cut the ids into one part for each notification."""
    offsets, ids = frame.offsets, frame.ids
    count = len(frame.batch) if isinstance(frame, frames.Deliver) else len(offsets) - 1
    if len(offsets) != count + 1 or not 0 < count <= BATCH_NOTIFICATIONS_MAX:
        raise ForeignFrame(f"{len(offsets)} offsets of matches for {count} notifications")
    if offsets[0] != 0 or offsets[-1] != len(ids) or (offsets[1:] < offsets[:-1]).any():
        raise ForeignFrame("the offsets of the matches do not fit their ids")


def _check_partial(frame: frames.Partial) -> None:
    """Checks the matches, and that no id is negative: an Exit Point reads the Connection Point in each id."""
    _check_matches(frame)
    if len(frame.ids) and frame.ids.min() < 0:
        raise ForeignFrame(f"{frame.ids.min()} is not a subscription id")


def _check_change(frame: frames.Change) -> None:
    if frame.filter is not None:
        check_entries([frame.filter])


def _check_share(frame: control.Share) -> None:
    for entry in frame.entries:
        if not 0 <= entry.subscription < 1 << 63:
            raise ForeignFrame(f"{entry.subscription} is not a subscription id")
    check_entries([entry.filter for entry in frame.entries])


def _check_buried(frame: control.Buried) -> None:
    if not is_connection_point(frame.connection_point):
        raise ForeignFrame(f"{frame.connection_point!r} is not a Connection Point")


# Checks that the types of the fields do not express.
_CHECKS: Final[dict[type[Any], Callable[[Any], None]]] = {
    frames.Submit: _check_notifications,
    frames.Publish: _check_notifications,
    frames.Partial: _check_partial,
    frames.Deliver: _check_matches,
    frames.Change: _check_change,
    control.Share: _check_share,
    control.Buried: _check_buried,
}


def _refusal_to_wire(error: TidegateError) -> _Refusal:
    return _Refusal(error.code, error.message, error.remedy, getattr(error, "retry_after_s", 0.0))


def _refusal_from_wire(refusal: _Refusal) -> Overloaded:
    """Returns the error as Overloaded: Matchers refuse a change for one reason only, that they are full."""
    return Overloaded(refusal.code, refusal.message, refusal.remedy, retry_after_s=refusal.retry_after_s)


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.view(np.uint8).data


_Conversion: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any], Any]]
# Types that MessagePack does not know: their type on the wire, and the conversions to it and back.
_ON_THE_WIRE: Final[dict[Any, tuple[Any, _Conversion]]] = {
    Batch: (_Batch, (_batch_to_wire, _batch_from_wire)),
    NDArray[np.int64]: (memoryview, (_numbers_to_wire, _numbers_from_wire)),
    TidegateError: (_Refusal, (_refusal_to_wire, _refusal_from_wire)),
}


# Types that travel unchanged, but within bounds.
_BOUNDED: Final[dict[Any, Any]] = {int: _Number}


class _Codec:
    """Encodes and decodes one kind of frame as an array of its fields."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        self.check = _CHECKS.get(kind)
        self.names: tuple[str, ...] = kind.__struct_fields__
        hints = get_type_hints(kind)
        types = [hints[name] for name in self.names]
        self.conversions = {place: _ON_THE_WIRE[field][1] for place, field in enumerate(types) if field in _ON_THE_WIRE}
        on_the_wire = tuple(
            _ON_THE_WIRE[field][0] if field in _ON_THE_WIRE else _BOUNDED.get(field, field) for field in types
        )
        self.decode = msgspec.msgpack.Decoder(tuple[on_the_wire]).decode  # type: ignore[valid-type]


_encode = msgspec.msgpack.Encoder().encode
_CODECS: Final = {number: _Codec(kind) for number, kind in NUMBERED.items()}
