"""The data pipeline on Spark: pull from queues, compute, match at scale, publish back. The only importers of pyspark.

    queue ─► source ─► DataFrame ─► air_quality, matching, or a job of one's own ─► sink ─► broker

`session` builds Spark, `source` and `sink` are the data source "tidegate", the others are jobs: functions from
DataFrames to DataFrames, and a thin command around each. Talks to the broker through its client only.
"""
