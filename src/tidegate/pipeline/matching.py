"""Matching at scale: which subscriptions of a large table does each notification of a table or stream satisfy?

Spark tasks do the work of the broker's layers. They check notifications with the broker's own reader (Access Point),
match them in chunks with saved indexes (Matcher), and join the answers for each chunk (Exit Point).

    notifications ─► chunks ─► matched with the whole index ─► rows                     an index of up to 4 GiB
    notifications ─► chunks ─┬► share 0 ─┬► joined by chunk ─► rows                     a larger one, cut into shares
                             └► share 1 ─┘

Every task maps the whole index if it fits into the memory of a machine. Nothing is shuffled or joined then, so a
micro-batch costs one narrow stage. With a larger index a task maps one share. Chunks are copied to all shares and the
answers are joined again, both as a few large binary values instead of rows. Neither the notifications nor the index
ever pass through the driver.

What may go wrong: an executor does not see the index files (D819); a notification breaks the rules of docs/filters.md.
Such a notification stays in the result, with the reason in `error` and no subscribers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import starmap
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    LongType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from tidegate.errors import ConfigError
from tidegate.frames import HEADER_BYTES, Refusal, join_maps, publish_frame
from tidegate.layers.batch import BatchReader
from tidegate.pipeline.index_files import ID_BITS, IndexFiles, mapped
from tidegate.pipeline.progress import spark_failures_as_errors
from tidegate.pipeline.python_worker import freeze_loaded_objects
from tidegate.pipeline.rows import map_shape, times_as_text

SUBSCRIBERS: Final = "subscribers"
ERROR: Final = "error"
# The notifications that are matched at once. Their answer is held in memory: 8 bytes for every subscriber of each
# notification. A place in a chunk takes ten bits, so that a place and an id together fit one 64-bit number.
CHUNK_NOTIFICATIONS: Final = 1024
SHARE_BYTES_MAX: Final = 4 << 30

_CHUNKS: Final = pa.schema(
    [("chunk", pa.string()), *((name, pa.binary()) for name in ("keys", "data", "starts", "places"))]
)
_ANSWERS: Final = pa.schema(
    [("chunk", pa.string()), ("share", pa.int32()), *((name, pa.binary()) for name in ("keys", "answer"))]
)
_IDS: Final = pa.list_(pa.field("element", pa.int64(), nullable=False))

Integers = NDArray[np.int64]


def match(
    notifications: DataFrame,
    index: IndexFiles,
    *,
    keys: Sequence[str] = ("id",),
    body: str | None = None,
    is_counted: bool = False,
    shares: int | None = None,
) -> DataFrame:
    """Returns a row for every notification: its `keys`, its `subscribers` as a sorted array of ids (empty if none
    match), and an `error`. With `is_counted`, `subscribers` is their number.

    All columns except the keys are attributes, and nulls are left out; or the column `body` holds them as a map in
    MessagePack. Spark runs one task per partition of the notifications, so give it as many partitions as cores. By
    default the index has as many `shares` as keep each below 4 GiB."""
    fields = _check_keys(notifications, keys)
    attributes = _attributes(notifications, keys, body)
    # Columns get our own names here: Spark would read a dot in an attribute's name as the path of a field.
    numbered = [_column(key).alias(f"key{n}") for n, key in enumerate(keys)]
    chosen = notifications.select(
        *numbered, *(each.alias(f"attribute{n}") for n, each in enumerate(attributes.values()))
    )
    result = StructType(
        [
            *(StructField(f"key{n}", field.dataType) for n, field in enumerate(fields)),
            StructField(SUBSCRIBERS, LongType() if is_counted else ArrayType(LongType(), containsNull=False)),
            StructField(ERROR, StringType()),
        ]
    )
    read = partial(_read_chunks, keys=len(keys), names=None if body else tuple(attributes))
    if shares is None:
        shares = -(-index.manifest.size_bytes // SHARE_BYTES_MAX)
    if shares <= 1:
        found = chosen.mapInArrow(partial(_match_whole, read=read, paths=index.paths, is_counted=is_counted), result)
    else:
        found = _match_shares(chosen, read, index.paths, shares, is_counted, result)
    return found.toDF(*keys, SUBSCRIBERS, ERROR)


def match_stream(
    notifications: DataFrame,
    index: IndexFiles,
    handle: Callable[[DataFrame, int], None],
    *,
    keys: Sequence[str] = ("id",),
    body: str | None = None,
    is_counted: bool = False,
) -> DataStreamWriter:
    """Matches every micro-batch of a stream and passes the result and the number of the batch to `handle`, on the
    driver.

    After a crash Spark repeats the last batch with the same number, so `handle` must be idempotent. Give the writer a
    checkpoint and start it."""

    def on_batch(batch: DataFrame, number: int) -> None:
        with spark_failures_as_errors():
            handle(match(batch, index, keys=keys, body=body, is_counted=is_counted), number)

    return notifications.writeStream.foreachBatch(on_batch)


def _check_keys(notifications: DataFrame, keys: Sequence[str]) -> list[StructField]:
    fields = {field.name: field for field in notifications.schema.fields}
    for key in keys:
        if key not in fields or key in (SUBSCRIBERS, ERROR):
            fault = "is reserved for the result" if key in fields else "is missing"
            raise ConfigError(
                "C431",
                f"the key column {key} of the notifications {fault}",
                f"choose columns that identify a notification, from: {', '.join(fields)}",
            )
    return [fields[key] for key in keys]


def _attributes(notifications: DataFrame, keys: Sequence[str], body: str | None) -> dict[str, Column]:
    fields = [field for field in notifications.schema.fields if field.name not in keys]
    if body is None:
        return {field.name: _as_value(field.name, field.dataType) for field in fields}
    found = next((field for field in fields if field.name == body), None)
    if found is None or not isinstance(found.dataType, BinaryType):
        raise ConfigError("C431", f"there is no binary column {body}", "name the column that holds MessagePack maps")
    return {body: _column(body)}


def _as_value(name: str, kind: DataType) -> Column:
    match kind:
        case DecimalType():
            return _column(name).cast("double")
        case DateType():
            return _column(name).cast("string")
        case StringType() | BooleanType() | NumericType() | TimestampType() | TimestampNTZType():
            return _column(name)
    raise ConfigError(
        "C431",
        f"the column {name} has the type {kind.simpleString()}, which no filter can compare",
        "attributes are strings, numbers, booleans and times: flatten it, drop it, or make it a key",
    )


def _column(name: str) -> Column:
    return F.col("`" + name.replace("`", "``") + "`")


def _match_shares(
    chosen: DataFrame,
    read: Callable[..., Iterator[Chunk]],
    paths: Sequence[str],
    shares: int,
    is_counted: bool,
    result: StructType,
) -> DataFrame:
    """Matches each chunk with every share and joins the answers. Tasks of one share run one after another, so that only
    one or two shares are mapped at a time."""
    cores = chosen.sparkSession.sparkContext.defaultParallelism
    tasks = max(1, -(-cores // shares))
    copies = (
        chosen.mapInArrow(partial(_write_chunks, read=read), from_arrow_schema(_CHUNKS))
        .withColumn("share", F.explode(F.sequence(F.lit(0), F.lit(shares - 1))))
        .withColumn("keys", F.when(F.col("share") == 0, F.col("keys")))
        .repartitionById(shares * tasks, (F.col("share") * tasks + F.pmod(F.hash("chunk"), F.lit(tasks))).cast("int"))
    )
    parts = [paths[share::shares] for share in range(shares)]
    answers = copies.mapInArrow(partial(_match_share, parts=parts, is_counted=is_counted), from_arrow_schema(_ANSWERS))

    def join_chunk(answers: pa.Table) -> pa.Table:
        return _join_shares(answers, shares, is_counted)

    return answers.groupBy("chunk").applyInArrow(join_chunk, result)


# On executors


class Chunk(NamedTuple):
    """Some notifications. Those at `places` are valid, and their maps start at `starts` in `data`. `keys` has the key
    columns of all of them, and the errors of the invalid ones."""

    keys: pa.RecordBatch
    data: bytes
    starts: Integers
    places: Integers


def _match_whole(
    batches: Iterator[pa.RecordBatch],
    read: Callable[[Iterable[pa.RecordBatch]], Iterator[Chunk]],
    paths: Sequence[str],
    is_counted: bool,
) -> Iterator[pa.RecordBatch]:
    for chunk in read(batches):
        answer = _answer(chunk.data, chunk.starts, chunk.places, paths, is_counted)
        yield _result(chunk.keys, answer, is_counted)
    freeze_loaded_objects()


def _write_chunks(
    batches: Iterator[pa.RecordBatch], read: Callable[[Iterable[pa.RecordBatch]], Iterator[Chunk]]
) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None
    for number, chunk in enumerate(read(batches)):
        keys = _to_stream(chunk.keys)
        row = {
            # The checksum tells attempts apart: Spark may repeat this task with its rows in another order, and answers
            # to the two attempts must not be joined.
            "chunk": f"{context.partitionId()}-{number}-{crc32(chunk.data, crc32(keys)):08x}",
            "keys": keys,
            "data": chunk.data,
            "starts": chunk.starts.tobytes(),
            "places": chunk.places.tobytes(),
        }
        yield pa.RecordBatch.from_pylist([row], _CHUNKS)


def _match_share(
    batches: Iterator[pa.RecordBatch], parts: Sequence[Sequence[str]], is_counted: bool
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for row in batch.to_pylist():
            starts, places = _integers(row["starts"]), _integers(row["places"])
            answer = _answer(row["data"], starts, places, parts[row["share"]], is_counted)
            answered = {name: row[name] for name in ("chunk", "share", "keys")} | {"answer": answer.tobytes()}
            yield pa.RecordBatch.from_pylist([answered], _ANSWERS)
    freeze_loaded_objects()


def _join_shares(answers: pa.Table, shares: int, is_counted: bool) -> pa.Table:
    """Joins the answers of all shares to one chunk. Asserts that each share answered exactly once."""
    rows = sorted(answers.to_pylist(), key=lambda row: row["share"])
    assert [row["share"] for row in rows] == list(range(shares)), (rows[0]["chunk"], [row["share"] for row in rows])
    answers_of_all = [_integers(row["answer"]) for row in rows]
    answer = np.sum(answers_of_all, axis=0) if is_counted else np.concatenate(answers_of_all)
    keys = pa.ipc.open_stream(rows[0]["keys"]).read_next_batch()
    return pa.Table.from_batches([_result(keys, answer, is_counted)])


def _answer(data: bytes, starts: Integers, places: Integers, paths: Sequence[str], is_counted: bool) -> Integers:
    """Returns what the indexes at these paths find for a chunk.

    If counted: a count at each place. Otherwise: the matches in any order, each one number with the place in its upper
    bits and the id in its lower bits. So answers are joined by adding them, or by concatenating and sorting them."""
    found = (mapped(path).match_maps(data, starts) for path in paths)
    if is_counted:
        counts = np.zeros(CHUNK_NOTIFICATIONS, np.int64)
        for offsets, _ids in found:
            counts[places] += np.diff(offsets)
        return counts
    matches = [np.repeat(places << ID_BITS, np.diff(offsets)) | ids for offsets, ids in found]
    return np.concatenate([*matches, np.empty(0, np.int64)])


def _result(keys: pa.RecordBatch, answer: Integers, is_counted: bool) -> pa.RecordBatch:
    """Returns the rows of a chunk. Refused notifications have null subscribers, not an empty array."""
    *columns, errors = keys.columns
    was_refused = errors.is_valid()
    if is_counted:
        counts = answer[: keys.num_rows]
        subscribers = pa.array(counts, pa.int64(), mask=was_refused.to_numpy(zero_copy_only=False))
    else:
        matches = np.sort(answer)
        offsets = np.append(np.searchsorted(matches, np.arange(keys.num_rows) << ID_BITS), len(matches))
        ids = matches & ((1 << ID_BITS) - 1)
        subscribers = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), ids, type=_IDS, mask=was_refused)
    names = [*keys.schema.names[:-1], SUBSCRIBERS, ERROR]
    return pa.RecordBatch.from_arrays([*columns, subscribers, errors], names)


def _read_chunks(batches: Iterable[pa.RecordBatch], keys: int, names: tuple[str, ...] | None) -> Iterator[Chunk]:
    """Cuts batches into chunks. The columns after the keys are attributes with these names, or the first of them is the
    body."""
    reader = BatchReader()
    for batch in batches:
        for start in range(0, batch.num_rows, CHUNK_NOTIFICATIONS):
            some = batch.slice(start, CHUNK_NOTIFICATIONS)
            values = some.columns[keys:]
            frames = _frames_of_bodies(values[0]) if names is None else _frame_of_rows(names, values, some.num_rows)
            yield _check_notifications(reader, frames, some.select([*range(keys)]))


def _frame_of_rows(names: tuple[str, ...], columns: Sequence[pa.Array], count: int) -> bytes:
    """Encodes all notifications into one frame."""
    shape = map_shape(names)
    rows = starmap(shape, zip(*map(_values, columns), strict=True)) if columns else [shape()] * count
    return publish_frame(1, _encode([*rows]))


def _frames_of_bodies(bodies: pa.Array) -> bytes:
    """Encodes each body into its own frame, so that a malformed one is refused without its neighbours."""
    return b"".join(publish_frame(n, join_maps([each or b""])) for n, each in enumerate(bodies.to_pylist(), 1))


def _check_notifications(reader: BatchReader, data: bytes, keys: pa.RecordBatch) -> Chunk:
    """Checks notifications by the broker's own rules. Sequences count the rows of the chunk from 1."""
    batches, refusals, position, done = [], list[Refusal](), 0, 0
    while position < len(data):
        read = reader.read_frames("", data, position, done + 1)
        batches += read.batches
        refusals += read.refusals
        position, done = read.position, read.through
        if read.error is not None:
            done += 1
            refusals.append(
                Refusal(done, "P304", "the body is not a MessagePack map", "encode each notification as a map")
            )
            position += HEADER_BYTES + int.from_bytes(data[position : position + 4], "little")
    errors: list[str | None] = [None] * keys.num_rows
    for each in refusals:
        errors[each.sequence - 1] = f"{each.code}: {each.message}; {each.remedy}"
    none = [np.empty(0, np.int64)]
    return Chunk(
        keys=keys.append_column(ERROR, pa.array(errors, pa.string())),
        data=data,
        starts=np.concatenate([*(batch.starts for batch in batches), *none]),
        places=np.concatenate([*(np.arange(batch.first - 1, batch.last) for batch in batches), *none]),
    )


def _values(column: pa.Array) -> list[Any]:
    """Returns the values as Python objects, with times as text. Uses numpy where the result is the same, which is
    several times faster."""
    if pa.types.is_timestamp(column.type):
        return times_as_text(column)
    if column.null_count and not pa.types.is_string(column.type):
        return list(column.to_pylist())
    return list(column.to_numpy(zero_copy_only=False).tolist())


def _integers(data: bytes) -> Integers:
    """Returns a copy, which is writable: the kernels would be compiled a second time for the type of a read-only
    array."""
    return np.frombuffer(data, np.int64).copy()


def _to_stream(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())


_encode: Final = msgspec.msgpack.Encoder().encode
