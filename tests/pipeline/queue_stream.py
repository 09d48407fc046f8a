"""A program that streams a queue into a directory, batch by batch, for tests that kill it at any moment.

    python queue_stream.py ADDRESS QUEUE DIRECTORY [MASTER]

Every batch becomes a directory named after it, which a replay overwrites. The program ends when the queue is empty.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import DataFrame

from tidegate.pipeline.session import spark_session

ROWS_PER_TRIGGER = 300


def main(address: str, queue: str, directory: str, master: str = "local[2,4]") -> None:
    spark = spark_session(master, name="queue-stream", spark__driver__memory="512m")
    base = Path(directory)

    def write(batch: DataFrame, number: int) -> None:
        batch.write.mode("overwrite").parquet(str(base / "batches" / f"batch={number}"))

    source = spark.readStream.format("tidegate").option("address", address).option("queue", queue)
    frame = source.option("schema", "n long").option("maxRowsPerTrigger", str(ROWS_PER_TRIGGER)).load()
    query = (
        frame.writeStream.foreachBatch(write)
        .option("checkpointLocation", str(base / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    print("started", flush=True)
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
