"""Tidegate's laboratory: experiments on the product and simulations of its parts, apart from what users install.

Each experiment runs a part of the broker, or a model of it, against what is claimed of it, and writes a report:
Markdown with pictures, one Parquet file for each data set, and every claim stated as held or not held.
`tidegate evaluate` finds the laboratory through an entry point.
"""
