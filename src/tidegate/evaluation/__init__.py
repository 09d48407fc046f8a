"""Evaluations: each runs a part of the broker, or a model of it, against what is claimed of it, and writes a report.

A report is Markdown with pictures, one Parquet file a data set, and every claim stated as held or not held.
"""
