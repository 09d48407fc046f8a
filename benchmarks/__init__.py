"""Benchmarks: what a notification costs from its publisher's process to its subscriber's, beside named peers.

Nothing here is asserted by a test: figures depend on the machine. README.md says how to run and how to read them.
"""
