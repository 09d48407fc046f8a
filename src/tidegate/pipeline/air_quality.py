"""Air quality: turns the messages of stations into readings, windows, an index and alerts.

These are functions from DataFrames to DataFrames; `air_quality_job` calls them once per micro-batch.

    messages ─► parse ─► readings ─► judge ─► windows ─► index
                  └► set_aside         │         └► exceedances ─► alerts, open_runs
                                       └► new, duplicate, late

A reading is one value of one pollutant; a message holds several. A reading is identified by (station, pollutant, time),
not by the message's device and number: a device that restarts sends the same reading under another number.

Windows are tumbling and aligned to 1970 in UTC. The watermark is the latest time seen, less a delay. A window closes
when the watermark reaches its end, and is computed then, once. Until then its readings are `open`. Every reading that
arrives is new, a duplicate of one in an open window (the first to arrive counts), or late because its window is closed.

All results depend only on the rows given, not on their order, so a batch that is repeated after a crash gives the same
result. What may go wrong: a device whose clock is ahead moves the watermark and makes all other readings late. Hence a
message whose time is more than `ahead_s` after its arrival is set aside.
"""

from __future__ import annotations

from functools import reduce
from typing import Final

import msgspec
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from tidegate.devices import MAGNITUDES
from tidegate.devices.air_quality_index import BAND_NAMES, BANDS

POLLUTANTS: Final = tuple(MAGNITUDES.values())
# The columns read from a message's body. A body that does not fit this schema has an _error.
BODY_SCHEMA: Final = "station string, name string, time timestamp, " + ", ".join(
    f"`{pollutant}` double" for pollutant in POLLUTANTS
)
READING_SCHEMA: Final = (
    "station string, name string, pollutant string, time timestamp, value double, queue int, sequence long"
)
WINDOW_SCHEMA: Final = (
    "station string, name string, pollutant string, start timestamp, end timestamp, mean double, maximum double, "
    "count long"
)
# A run is a series of consecutive windows above the threshold; the next window may still extend it.
RUN_SCHEMA: Final = (
    "station string, name string, pollutant string, threshold double, since timestamp, until timestamp, windows long, "
    "peak double"
)
ALERT_SCHEMA: Final = (
    "alert string, state string, station string, name string, since timestamp, until timestamp, windows long, "
    "peak double, threshold double"
)

_US_PER_S: Final = 1_000_000


class Settings(msgspec.Struct, frozen=True):
    """What the job computes. A pollutant exceeds its threshold when the mean of a window is above it. An episode is a
    series of at least this many `windows` above the threshold."""

    window_s: int = 3_600
    watermark_s: int = 7_200
    # None accepts any time, for readings whose times are simulated.
    ahead_s: int | None = 3_600
    # 180 ug/m3 of NO2 is Madrid's level of notice; the alert level of Directive 2008/50/EC is 400 for three hours.
    thresholds: dict[str, float] = msgspec.field(default_factory=lambda: {"NO2": 180.0})
    windows: int = 3


def parse(messages: DataFrame, settings: Settings) -> DataFrame:
    """Adds a column `reason` to the messages: why each is set aside, or null for valid messages."""
    values = [F.col(f"`{pollutant}`") for pollutant in POLLUTANTS]
    infinity = F.lit(float("inf"))
    reasons = [
        F.col("_error"),
        F.when(F.coalesce(F.col("station"), F.lit("")) == "", "it has no station"),
        F.when(F.col("time").isNull(), "it has no time"),
        F.when(F.coalesce(*values).isNull(), "it has no pollutant"),
        # Spark orders NaN above infinity, so this comparison finds both.
        *(
            F.when(F.abs(value) >= infinity, f"its {pollutant} is no number")
            for pollutant, value in zip(POLLUTANTS, values, strict=True)
        ),
    ]
    if settings.ahead_s is not None:
        is_ahead = F.col("time") > _later(F.col("_enqueued_at"), settings.ahead_s)
        reasons.append(F.when(is_ahead, f"its time is over {settings.ahead_s} s ahead of its arrival"))
    return messages.withColumn("reason", F.coalesce(*reasons))


def set_aside(parsed: DataFrame) -> DataFrame:
    """Returns the messages that cannot be used: the original bytes, the reason, and their place in the queue."""
    return parsed.where("reason is not null").select(
        "reason",
        F.col("_queue").alias("queue"),
        F.col("_sequence").alias("sequence"),
        F.col("_enqueued_at").alias("enqueued_at"),
        F.col("_device").alias("device"),
        F.col("_body").alias("body"),
    )


def readings(parsed: DataFrame) -> DataFrame:
    """Returns one row (READING_SCHEMA) for each value of the valid messages."""
    good = parsed.where("reason is null").withColumnsRenamed({"_queue": "queue", "_sequence": "sequence"})
    return (
        good.unpivot(
            ["station", "name", "time", "queue", "sequence"],
            [F.col(f"`{pollutant}`") for pollutant in POLLUTANTS],
            "pollutant",
            "value",
        )
        .where("value is not null")
        .select("station", "name", "pollutant", "time", "value", "queue", "sequence")
    )


def judge(arrived: DataFrame, open_readings: DataFrame, watermark_us: int | None, settings: Settings) -> DataFrame:
    """Returns the readings that arrived and those of open windows, with a `verdict`: open, new, duplicate or late. The
    readings with the verdict open or new are the content of the windows that are open now."""
    both = open_readings.withColumn("is_open", F.lit(True)).unionByName(arrived.withColumn("is_open", F.lit(False)))
    # Readings of open windows sort first, then by place in the queue, so a repeated batch keeps the same one.
    same = Window.partitionBy("station", "pollutant", "time").orderBy(F.desc("is_open"), "queue", "sequence")
    is_late = is_closed(window_end(F.col("time"), settings), watermark_us)
    verdict = (
        F.when(F.col("is_open"), "open")
        .when(is_late, "late")
        .when(F.row_number().over(same) == 1, "new")
        .otherwise("duplicate")
    )
    return both.withColumn("verdict", verdict).drop("is_open")


def windows(open_readings: DataFrame, settings: Settings) -> DataFrame:
    """Returns mean, maximum and count (WINDOW_SCHEMA) for each station, pollutant and window."""
    return (
        open_readings.groupBy("station", "pollutant", window_end(F.col("time"), settings).alias("end"))
        .agg(
            F.max("name").alias("name"),
            F.avg("value").alias("mean"),
            F.max("value").alias("maximum"),
            F.count("value").alias("count"),
        )
        .withColumn("start", _later(F.col("end"), -settings.window_s))
        .select("station", "name", "pollutant", "start", "end", "mean", "maximum", "count")
    )


def index(closed: DataFrame) -> DataFrame:
    """Returns the European Air Quality Index of each station and window, from 1 (good) to 6 (extremely poor).

    The index of a station is that of its worst pollutant, which is named too (the first by name if several are equally
    bad). Pollutants outside BANDS have no index. The index is defined for hours; for windows of another width it is
    computed from their mean."""
    level = reduce(
        lambda levels, pollutant: levels.when(F.col("pollutant") == pollutant, _level(BANDS[pollutant])),
        BANDS,
        F.when(F.lit(False), 0),
    )
    # The minimum of (-level, pollutant): the highest level, and the first name among equals.
    worst = F.min(F.struct((-F.col("level")).alias("negative"), "pollutant"))
    names = F.array(*(F.lit(name) for name in BAND_NAMES))
    return (
        closed.withColumn("level", level)
        .where("level is not null")
        .groupBy("station", "start", "end")
        .agg(F.max("name").alias("name"), worst.alias("worst"))
        .withColumn("index", -F.col("worst.negative"))
        .select(
            "station",
            "name",
            "start",
            "end",
            "index",
            F.get(names, F.col("index") - 1).alias("band"),
            "worst.pollutant",
        )
    )


def exceedances(closed: DataFrame, runs: DataFrame, settings: Settings) -> DataFrame:
    """Returns the earlier runs and the closed windows above their threshold, each with the number of its `run`.

    Each row also has the length and the peak of its run so far. A window that is missing or not above the threshold
    leaves a gap, and a gap ends a run."""
    thresholds = F.create_map(*(F.lit(part) for pair in settings.thresholds.items() for part in pair))
    above = (
        closed.withColumn("threshold", thresholds[F.col("pollutant")])
        .where("mean > threshold")
        .select(
            "station",
            "name",
            "pollutant",
            "threshold",
            F.col("start").alias("since"),
            F.col("end").alias("until"),
            F.lit(1).cast("long").alias("windows"),
            F.col("mean").alias("peak"),
            F.lit(False).alias("is_known"),
        )
    )
    in_order = Window.partitionBy("station", "pollutant").orderBy("since")
    so_far = Window.partitionBy("station", "pollutant", "run").orderBy("since")
    is_first = F.coalesce(F.lag("until").over(in_order) != F.col("since"), F.lit(True))
    return (
        runs.withColumn("is_known", F.lit(True))
        .unionByName(above)
        .withColumn("is_first", is_first.cast("int"))
        .withColumn("run", F.sum("is_first").over(in_order))
        .withColumns(
            {
                "since": F.min("since").over(so_far),
                "windows": F.sum("windows").over(so_far),
                "peak": F.max("peak").over(so_far),
            }
        )
        .drop("is_first")
    )


def alerts(exceeding: DataFrame, watermark_us: int, settings: Settings) -> DataFrame:
    """Returns an alert (ALERT_SCHEMA) for each run that becomes long enough to be an episode, and for each episode that
    ends. The alerts do not depend on how the closed windows were divided into batches."""
    # A run that was known before has already been announced when it reached this length.
    begins = exceeding.where(~F.col("is_known") & (F.col("windows") == settings.windows))
    ends = _whole_runs(exceeding).where(_is_over(watermark_us, settings) & (F.col("windows") >= settings.windows))
    return (
        begins.withColumn("state", F.lit("begins"))
        .unionByName(ends.withColumn("state", F.lit("ends")), allowMissingColumns=True)
        .select(
            F.col("pollutant").alias("alert"),
            "state",
            "station",
            "name",
            "since",
            "until",
            "windows",
            "peak",
            "threshold",
        )
    )


def open_runs(exceeding: DataFrame, watermark_us: int, settings: Settings) -> DataFrame:
    """Returns the runs (RUN_SCHEMA) that the next window may extend."""
    return _whole_runs(exceeding).where(~_is_over(watermark_us, settings))


def window_end(time: Column, settings: Settings) -> Column:
    width_us = settings.window_s * _US_PER_S
    time_us = F.unix_micros(time)
    return F.timestamp_micros(time_us - F.pmod(time_us, F.lit(width_us)) + width_us)


def is_closed(end: Column, watermark_us: int | None) -> Column:
    """Returns whether a window is closed. Before the first reading there is no watermark, and all windows are open."""
    return F.lit(False) if watermark_us is None else F.unix_micros(end) <= watermark_us


def _level(bounds: tuple[float, ...]) -> Column:
    return reduce(lambda level, bound: level + (F.col("mean") > bound).cast("int"), bounds, F.lit(1))


def _whole_runs(exceeding: DataFrame) -> DataFrame:
    return (
        exceeding.groupBy("station", "pollutant", "run")
        .agg(
            F.max("name").alias("name"),
            F.max("threshold").alias("threshold"),
            F.min("since").alias("since"),
            F.max("until").alias("until"),
            F.max("windows").alias("windows"),
            F.max("peak").alias("peak"),
        )
        .select("station", "name", "pollutant", "threshold", "since", "until", "windows", "peak")
    )


def _is_over(watermark_us: int, settings: Settings) -> Column:
    """Returns whether a run has ended: the next window is closed, and it did not extend the run."""
    return is_closed(_later(F.col("until"), settings.window_s), watermark_us)


def _later(time: Column, seconds: int) -> Column:
    return F.timestamp_micros(F.unix_micros(time) + seconds * _US_PER_S)
