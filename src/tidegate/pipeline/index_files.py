"""Index files: a table of subscriptions as saved indexes, one per partition, which executors map and match with.

    INDEX/version=5b3f…/partition-00000.index …     one SubscriptionIndex each
    INDEX/version=5b3f…/bad-00000.jsonl             filters that were skipped, each with its error
    INDEX/version=5b3f…/manifest.json               written last: a version without it is not used

A version is named after its content: a checksum of the ids and filters, the number of partitions, and the version of
the kernels that read it. So an unchanged table finds its index again, a changed table never gets a wrong one, and
concurrent builds of the same version write the same files. Building a version removes those not used for a week.

Rows are partitioned by a hash of their id, and one task parses and indexes each partition. A task does not fail on bad
rows, because Spark would retry it. It reports them, and the driver raises an error once all reports have arrived.
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
from tidegate.index import SubscriptionIndex
from tidegate.index.packing import pack
from tidegate.index.saved_index import SavedIndex, save_index
from tidegate.kernels.cache import kernel_version
from tidegate.pipeline.progress import spark_failures_as_errors

BadFilters = Literal["fail", "skip"]

ID: Final = "id"
ID_BITS: Final = 53  # exact as a number in any language; the upper bits hold a place in a chunk
FILTER: Final = "filter"
# Several indexes of this size match faster than one large index: more of each stays in the processor's cache.
SUBSCRIPTIONS_PER_PARTITION: Final = 250_000
PARTITIONS_MAX: Final = 10_000
UNUSED_S: Final = 7 * 86_400.0
MAPPED_MAX: Final = 1024  # indexes that a worker keeps mapped

_MANIFEST: Final = "manifest.json"
_REPORT: Final = pa.schema(
    [
        ("file", pa.string()),
        *((name, pa.int64()) for name in ("subscriptions", "size_bytes", "duplicate", "bad", "bad_id")),
        ("bad_error", pa.string()),
    ]
)


class Manifest(msgspec.Struct, frozen=True):
    files: tuple[str, ...]
    subscriptions: int
    bad_filters: int
    size_bytes: int


class IndexFiles(NamedTuple):
    """A complete version. `is_new` is true if it was built just now, and false if it already existed."""

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
    """Returns the index of a table with the columns `id` (unique, from 0 to below 2^53) and `filter`. Uses the one in
    the directory if it exists, and otherwise builds it there.

    The driver and all executors must see the directory under the same path."""
    _check_directory(directory)
    if partitions is not None and not 1 <= partitions <= PARTITIONS_MAX:
        raise ConfigError("C413", f"the number of partitions is {partitions}", f"use 1 to {PARTITIONS_MAX}")
    table = _subscriptions(subscriptions)
    surveyed = _survey(table)
    count = surveyed["subscriptions"]
    partitions = partitions or max(1, -(-count // SUBSCRIPTIONS_PER_PARTITION))
    identity = f"{count} {surveyed['checksum']} {partitions} {bad_filters} {kernel_version()}"
    version = directory / f"version={blake2b(identity.encode(), digest_size=8).hexdigest()}"
    if not rebuild and (found := _read_manifest(version)) is not None:
        with suppress(OSError):  # a read-only index is still usable
            version.touch()
        return IndexFiles(version, found, is_new=False)
    (version / _MANIFEST).unlink(missing_ok=True)
    build = partial(_build_partition, directory=str(version))
    with spark_failures_as_errors():
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
    """Returns the index at this path. A worker keeps it mapped for later tasks."""
    return SavedIndex(Path(path))


def _check_directory(directory: Path) -> None:
    if ":/" in str(directory):
        raise ConfigError(
            "C432",
            f"the index directory {str(directory)!r} is not on a file system",
            "use a path of a local or shared file system: indexes are memory-mapped",
        )


def _subscriptions(subscriptions: DataFrame) -> DataFrame:
    types = {field.name: field.dataType for field in subscriptions.schema.fields}
    for name, wanted, shown in ((ID, IntegralType, "long"), (FILTER, StringType, "string")):
        if not isinstance(types.get(name), wanted):
            found = f"has the type {types[name].simpleString()}" if name in types else "is missing"
            raise ConfigError(
                "C430",
                f"the column {name} of the subscriptions {found}",
                f"provide it as {shown}; the table has the columns {', '.join(types)}",
            )
    return subscriptions.select(F.col(ID).cast("long"), F.col(FILTER))


def _survey(table: DataFrame) -> Row:
    """Counts and checks the rows in one pass. The checksum does not depend on their order; ids are unique, so the
    exclusive or never cancels two equal rows."""
    surveyed = table.agg(
        F.count("*").alias("subscriptions"),
        F.bit_xor(F.xxhash64(ID, FILTER)).alias("checksum"),
        F.count_if(F.col(ID).isNull()).alias("no_id"),
        F.count_if(F.col(FILTER).isNull()).alias("no_filter"),
        F.count_if((F.col(ID) < 0) | (F.col(ID) >= 1 << ID_BITS)).alias("id_out_of_range"),
    ).collect()[0]
    faults = {
        "no_id": "have no id",
        "no_filter": "have no filter",
        "id_out_of_range": f"have an id below 0 or from 2^{ID_BITS} on",
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
    duplicates = [report["duplicate"] for report in reports if report["duplicate"] is not None]
    if duplicates:
        raise BadInput(
            "D818", f"subscription {min(duplicates)} is in the table twice", "give each subscription a unique id"
        )
    bad = sum(report["bad"] for report in reports)
    if bad and bad_filters == "fail":
        first = min((report for report in reports if report["bad"]), key=lambda report: report["bad_id"])
        raise BadInput(
            "D816",
            f"{bad:,} filters are invalid; the first, of subscription {first['bad_id']}: {first['bad_error']}",
            "correct them, or set them aside with --bad-filters skip",
        )


# On executors


def _build_partition(batches: Iterator[pa.RecordBatch], directory: str) -> Iterator[pa.RecordBatch]:
    """Reads, parses and indexes the rows of one partition, and yields one report."""
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
        "duplicate": _find_duplicate(np.concatenate([*all_ids, np.array([each["id"] for each in bad], np.int64)])),
        "bad": len(bad),
        "bad_id": first and first["id"],
        "bad_error": first and first["error"],
    }
    yield pa.RecordBatch.from_pylist([report], _REPORT)


def _pack_filters(batch: pa.RecordBatch) -> tuple[NDArray[np.int64], bytes, list[dict[str, Any]]]:
    """Returns the ids and packed filters of a batch, and the invalid rows."""
    ids, packed, bad = [], [], []
    for number, text in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
        try:
            packed.append(pack(Filter.parse(text)))
            ids.append(number)
        except FilterError as error:
            bad.append({"id": number, "filter": text, "error": str(error)})
    return np.array(ids, np.int64), b"".join(packed), bad


def _find_duplicate(ids: NDArray[np.int64]) -> int | None:
    """Returns the smallest duplicate id, if any. One partition is enough: all rows with the same id are in the same
    one."""
    ordered = np.sort(ids)
    duplicates = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(duplicates[0]) if len(duplicates) else None


# Files


def _read_manifest(version: Path) -> Manifest | None:
    try:
        return msgspec.json.decode((version / _MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None


def _write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically, also when Spark retries a task while its first attempt is still running."""
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.unfinished")
    unfinished.write_bytes(data)
    unfinished.replace(path)


def _remove_unused(directory: Path, now_s: float) -> None:
    for version in directory.glob("version=*"):
        if now_s - version.stat().st_mtime > UNUSED_S:
            shutil.rmtree(version, ignore_errors=True)
