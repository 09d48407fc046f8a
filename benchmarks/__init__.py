"""Benchmarks: the cost of a notification from its publisher's process to its subscriber's, compared with named peers.

No test asserts a figure from here, because figures depend on the machine. README.md explains how to run and read them.
"""
