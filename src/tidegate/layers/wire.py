"""The bytes of frames between slices in different processes.

A frame is the header of the native protocol (its kind numbers the layer frames) and a MessagePack array of the fields.
A batch travels as the bytes of its notifications, cut out of what was once read, with where each begins and ends;
numbers of the join as plain little-endian arrays. So a Matcher or an Exit Point decodes a batch of any size in a few
microseconds, and no notification becomes an object.

What may go wrong here: the peer is of another version, or no slice at all. Then ProtocolError, and the channel ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.errors import Overloaded, ProtocolError, TidegateError
from tidegate.frames import HEADER
from tidegate.layers import control, frames
from tidegate.layers.batch import Batch
from tidegate.layers.frames import LayerFrame

# Their place here is their number on the wire: new ones go to the end.
KINDS: Final[tuple[type[Any], ...]] = (
    frames.Submit,
    frames.SubmitAck,
    frames.Publish,
    frames.Body,
    frames.Partial,
    frames.Deliver,
    frames.DeliverAck,
    frames.Ack,
    frames.Change,
    frames.ChangeOk,
    frames.ChangeRefused,
    control.Fence,
    control.Prepare,
    control.Switch,
    control.Drain,
    control.Release,
    control.Strict,
    control.Go,
    control.End,
    control.Retire,
    control.Reply,
    control.Marker,
    control.Share,
    control.ReadShare,
    control.Buried,
    control.Suspect,
    frames.Load,
    frames.AskLoads,
    frames.Loads,
)


class _Batch(msgspec.Struct, array_like=True, gc=False):
    publisher: str
    first: int
    data: memoryview
    starts: memoryview
    stops: memoryview


class _Refusal(msgspec.Struct, array_like=True):
    code: str
    message: str
    remedy: str
    retry_after_s: float


def encode(frame: LayerFrame, route: int = 0) -> bytes:
    """One frame as it goes through a channel. The header says what route it takes."""
    codec = _CODECS[type(frame)]
    values = [getattr(frame, name) for name in codec.names]
    for place, (to_wire, _from_wire) in codec.conversions.items():
        values[place] = to_wire(values[place])
    body = _encode(values)
    return HEADER.pack(len(body), codec.number, 0, 0, route) + body


def decode(number: int, body: memoryview) -> LayerFrame:
    """The frame of this kind. Its arrays and its notifications are views of `body`."""
    if number >= len(KINDS):
        raise _not_a_frame(f"there is no kind {number}")
    codec = _CODECS[KINDS[number]]
    try:
        values = list(codec.decode(body))
        for place, (_to_wire, from_wire) in codec.conversions.items():
            values[place] = from_wire(values[place])
    except (msgspec.DecodeError, ValueError, RecursionError, UnicodeDecodeError) as error:
        raise _not_a_frame(f"{KINDS[number].__name__}: {error}") from error
    frame: LayerFrame = KINDS[number](*values)
    return frame


def _batch_to_wire(batch: Batch) -> _Batch:
    """Only the bytes from its first notification to its last: what it was read with may be much more."""
    begin, end = int(batch.starts[0]), int(batch.stops[-1])
    starts, stops = (batch.starts - begin).astype("<u4"), (batch.stops - begin).astype("<u4")
    data = memoryview(batch.data)[begin:end]
    return _Batch(batch.publisher, batch.first, data, _bytes(starts), _bytes(stops))


def _batch_from_wire(batch: _Batch) -> Batch:
    starts = np.frombuffer(batch.starts, "<u4").astype(np.int64)
    stops = np.frombuffer(batch.stops, "<u4").astype(np.int64)
    if len(starts) != len(stops) or not len(starts) or stops.max() > len(batch.data) or (starts > stops).any():
        raise ValueError("the notifications of a batch lie outside of its bytes")
    return Batch(batch.publisher, batch.first, batch.data, starts, stops)


def _numbers_to_wire(numbers: NDArray[np.int64]) -> memoryview:
    return _bytes(np.ascontiguousarray(numbers, "<i8"))


def _numbers_from_wire(data: memoryview) -> NDArray[np.int64]:
    return np.frombuffer(data, "<i8")


def _refusal_to_wire(error: TidegateError) -> _Refusal:
    return _Refusal(error.code, error.message, error.remedy, getattr(error, "retry_after_s", 0.0))


def _refusal_from_wire(refusal: _Refusal) -> Overloaded:
    """Matchers refuse for one reason only: they are full."""
    return Overloaded(refusal.code, refusal.message, refusal.remedy, retry_after_s=refusal.retry_after_s)


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.view(np.uint8).data


_Conversion: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any], Any]]
# How what MessagePack does not know travels: the type on the wire, and the way there and back.
_ON_THE_WIRE: Final[dict[Any, tuple[Any, _Conversion]]] = {
    Batch: (_Batch, (_batch_to_wire, _batch_from_wire)),
    NDArray[np.int64]: (memoryview, (_numbers_to_wire, _numbers_from_wire)),
    TidegateError: (_Refusal, (_refusal_to_wire, _refusal_from_wire)),
}


class _Codec:
    """How one kind of frame travels: an array of its fields."""

    def __init__(self, number: int, kind: type[Any]) -> None:
        self.number = number
        self.names: tuple[str, ...] = kind.__struct_fields__
        hints = get_type_hints(kind)
        types = [hints[name] for name in self.names]
        self.conversions = {place: _ON_THE_WIRE[field][1] for place, field in enumerate(types) if field in _ON_THE_WIRE}
        on_the_wire = tuple(_ON_THE_WIRE[field][0] if field in _ON_THE_WIRE else field for field in types)
        self.decode = msgspec.msgpack.Decoder(tuple[on_the_wire]).decode  # type: ignore[valid-type]


_encode = msgspec.msgpack.Encoder().encode
_CODECS: Final = {kind: _Codec(number, kind) for number, kind in enumerate(KINDS)}


def _not_a_frame(why: str) -> ProtocolError:
    return ProtocolError("P340", f"no frame between slices: {why}", "run the same version everywhere")
