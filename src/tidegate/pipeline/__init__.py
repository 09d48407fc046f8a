"""The data pipeline on Spark: pulls from queues, computes, matches at scale and publishes back.

    queue ─► source ─► DataFrame ─► air_quality, matching, or a job of your own ─► sink ─► broker

`session` builds Spark; `source` and `sink` are the data source "tidegate". The other modules are jobs: functions from
DataFrames to DataFrames, with a thin command around each. Only this package imports pyspark. It reaches the broker
through the client only.
"""
