"""Index files: a table of subscriptions as saved indexes, one a partition, that executors map and match with.

    INDEX/version=5b3f…/partition-00000.index …     one SubscriptionIndex each
    INDEX/version=5b3f…/bad-00000.jsonl             filters that were skipped, with what is wrong with them
    INDEX/version=5b3f…/manifest.json               written last: without it nothing of the version is used

A version is named after what it holds: a checksum of the ids and filters, the number of partitions, and the version of
the kernels that read it. So the same table again finds its index, another table never gets a wrong one, and builds of
one version that overlap write the same. What nobody has used for a week is removed when another version is built.

Rows go to partitions by a hash of their id, and each partition is parsed and indexed by one task. Such a task does not
fail on bad rows, for Spark would try it again: it reports them, and the driver raises when all reports are there.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import IntegralType, StringType

from tidegate.errors import BadInput, ConfigError, FilterError
from tidegate.filters import Filter
from tidegate.layers.index import SubscriptionIndex
from tidegate.layers.index.packing import pack
from tidegate.layers.index.saved_index import SavedIndex, save_index
from tidegate.layers.kernel_cache import kernel_version
from tidegate.pipeline.progress import failures_in_short

BadFilters = Literal["fail", "skip"]

ID: Final = "id"
ID_BITS: Final = 53  # an id is exact as a number of any language, and has room for a place before it
FILTER: Final = "filter"
# Several indexes of this size are quicker than one that holds all: less of each is out of the processor's cache.
SUBSCRIPTIONS_PER_PARTITION: Final = 250_000
PARTITIONS_MAX: Final = 10_000
UNUSED_S: Final = 7 * 86_400.0
MAPPED_MAX: Final = 1024  # indexes that a worker keeps mapped

_MANIFEST: Final = "manifest.json"
_REPORT: Final = pa.schema(
    [
        ("file", pa.string()),
        *((name, pa.int64()) for name in ("subscriptions", "size_bytes", "twice", "bad", "bad_id")),
        ("bad_error", pa.string()),
    ]
)


class Manifest(msgspec.Struct, frozen=True):
    files: tuple[str, ...]
    subscriptions: int
    bad_filters: int
    size_bytes: int


class IndexFiles(NamedTuple):
    """A version that is complete. `is_new` says whether it was built just now, or was there."""

    directory: Path
    manifest: Manifest
    is_new: bool

    @property
    def paths(self) -> list[str]:
        return [str(self.directory / name) for name in self.manifest.files]


def build_index(
    subscriptions: DataFrame,
    directory: Path,
    *,
    partitions: int | None = None,
    bad_filters: BadFilters = "fail",
    rebuild: bool = False,
) -> IndexFiles:
    """The index of a table with the columns `id` (from 0 to below 2^53, once each) and `filter`: the one that is in the
    directory, or else built there. The driver and all executors must see the directory under the same path."""
    _check_directory(directory)
    if partitions is not None and not 1 <= partitions <= PARTITIONS_MAX:
        raise ConfigError("C413", f"the partitions are {partitions}", f"use 1 to {PARTITIONS_MAX}")
    table = _subscriptions(subscriptions)
    surveyed = _survey(table)
    count = surveyed["subscriptions"]
    partitions = partitions or max(1, -(-count // SUBSCRIPTIONS_PER_PARTITION))
    identity = f"{count} {surveyed['checksum']} {partitions} {bad_filters} {kernel_version()}"
    version = directory / f"version={blake2b(identity.encode(), digest_size=8).hexdigest()}"
    if not rebuild and (found := _read_manifest(version)) is not None:
        with suppress(OSError):  # whoever may only read it uses it all the same
            version.touch()
        return IndexFiles(version, found, is_new=False)
    (version / _MANIFEST).unlink(missing_ok=True)
    build = partial(_build_partition, directory=str(version))
    with failures_in_short():
        reports = table.repartition(partitions, ID).mapInArrow(build, from_arrow_schema(_REPORT)).collect()
    _check_reports(reports, bad_filters)
    manifest = Manifest(
        files=tuple(sorted(report["file"] for report in reports)),
        subscriptions=sum(report["subscriptions"] for report in reports),
        bad_filters=sum(report["bad"] for report in reports),
        size_bytes=sum(report["size_bytes"] for report in reports),
    )
    version.mkdir(parents=True, exist_ok=True)
    _write_whole(version / _MANIFEST, msgspec.json.encode(manifest))
    _remove_unused(directory, time.time())
    return IndexFiles(version, manifest, is_new=True)


@lru_cache(MAPPED_MAX)
def mapped(path: str) -> SavedIndex:
    """The index at this path, in a worker that may have used it before."""
    return SavedIndex(Path(path))


def _check_directory(directory: Path) -> None:
    if ":/" in str(directory):
        raise ConfigError(
            "C432",
            f"the index directory is {str(directory)!r}",
            "name a directory of the file system: indexes are mapped",
        )


def _subscriptions(subscriptions: DataFrame) -> DataFrame:
    types = {field.name: field.dataType for field in subscriptions.schema.fields}
    for name, wanted, shown in ((ID, IntegralType, "long"), (FILTER, StringType, "string")):
        if not isinstance(types.get(name), wanted):
            found = f"is {types[name].simpleString()}" if name in types else "is missing"
            raise ConfigError(
                "C430",
                f"the column {name} of the subscriptions {found}",
                f"give it, as {shown}; the table has {[*types]}",
            )
    return subscriptions.select(F.col(ID).cast("long"), F.col(FILTER))


def _survey(table: DataFrame) -> Row:
    """One pass over the table. A checksum of a set: ids differ, so exclusive or loses nothing."""
    surveyed = table.agg(
        F.count("*").alias("subscriptions"),
        F.bit_xor(F.xxhash64(ID, FILTER)).alias("checksum"),
        F.count_if(F.col(ID).isNull()).alias("no_id"),
        F.count_if(F.col(FILTER).isNull()).alias("no_filter"),
        F.count_if((F.col(ID) < 0) | (F.col(ID) >= 1 << ID_BITS)).alias("strange_id"),
    ).collect()[0]
    faults = {
        "no_id": "have no id",
        "no_filter": "have no filter",
        "strange_id": f"have an id below 0 or from 2^{ID_BITS} on",
    }
    for name, fault in faults.items():
        if surveyed[name]:
            raise BadInput(
                "D817",
                f"{surveyed[name]:,} of {surveyed['subscriptions']:,} subscriptions {fault}",
                f"give each a filter, which may be *, and an id from 0 to below 2^{ID_BITS}",
            )
    return surveyed


def _check_reports(reports: Sequence[Row], bad_filters: BadFilters) -> None:
    twice = [report["twice"] for report in reports if report["twice"] is not None]
    if twice:
        raise BadInput(
            "D818", f"subscription {min(twice)} is in the table twice", "give each subscription an id of its own"
        )
    bad = sum(report["bad"] for report in reports)
    if bad and bad_filters == "fail":
        first = min((report for report in reports if report["bad"]), key=lambda report: report["bad_id"])
        raise BadInput(
            "D816",
            f"{bad:,} filters of the table are bad; that of subscription {first['bad_id']}: {first['bad_error']}",
            "correct them, or set bad filters aside: --bad-filters skip",
        )


# On executors


def _build_partition(batches: Iterator[pa.RecordBatch], directory: str) -> Iterator[pa.RecordBatch]:
    """Reads, parses and indexes the rows of one partition, and reports."""
    context = TaskContext.get()
    assert context is not None
    number, index, count, bad = context.partitionId(), SubscriptionIndex(), 0, list[dict[str, Any]]()
    all_ids: list[NDArray[np.int64]] = []
    for batch in batches:
        ids, filters, refused = _pack_filters(batch)
        index.add_packed(ids, filters)
        all_ids.append(ids)
        bad += refused
        count += batch.num_rows
    if not count:
        return
    path = Path(directory) / f"partition-{number:05}.index"
    size_bytes = save_index(index, path)
    if bad:
        lines = b"".join(msgspec.json.encode(each) + b"\n" for each in bad)
        _write_whole(path.with_name(f"bad-{number:05}.jsonl"), lines)
    first = min(bad, key=lambda each: each["id"]) if bad else None
    report = {
        "file": path.name,
        "subscriptions": len(index),
        "size_bytes": size_bytes,
        "twice": _find_twice(np.concatenate([*all_ids, np.array([each["id"] for each in bad], np.int64)])),
        "bad": len(bad),
        "bad_id": first and first["id"],
        "bad_error": first and first["error"],
    }
    yield pa.RecordBatch.from_pylist([report], _REPORT)


def _pack_filters(batch: pa.RecordBatch) -> tuple[NDArray[np.int64], bytes, list[dict[str, Any]]]:
    """Ids and packed filters of a batch, and what is bad."""
    ids, packed, bad = [], [], []
    for number, text in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
        try:
            packed.append(pack(Filter.parse(text)))
            ids.append(number)
        except FilterError as error:
            bad.append({"id": number, "filter": text, "error": str(error)})
    return np.array(ids, np.int64), b"".join(packed), bad


def _find_twice(ids: NDArray[np.int64]) -> int | None:
    """All rows of an id are in one partition."""
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(twice[0]) if len(twice) else None


# Files


def _read_manifest(version: Path) -> Manifest | None:
    try:
        return msgspec.json.decode((version / _MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None


def _write_whole(path: Path, data: bytes) -> None:
    """The file is there as a whole or not at all, also for a task that is tried again beside a late first one."""
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.unfinished")
    unfinished.write_bytes(data)
    unfinished.replace(path)


def _remove_unused(directory: Path, now_s: float) -> None:
    for version in directory.glob("version=*"):
        if now_s - version.stat().st_mtime > UNUSED_S:
            shutil.rmtree(version, ignore_errors=True)
