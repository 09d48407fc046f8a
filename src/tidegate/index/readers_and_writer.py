"""A lock for one writer and several readers.

    with lock.reading: …        with lock.writing: …

Readers share the lock; the writer holds it alone. A waiting writer goes first: new readers wait until it has finished,
so that a steady flow of readers cannot starve it.

The lock does not protect writers from each other: its user must make sure that only one thread writes.
"""

from __future__ import annotations

from threading import Condition
from typing import Final


class ReadersAndWriter:
    def __init__(self) -> None:
        self.changed: Final = Condition()
        self.readers = 0
        self.writers = 0  # writing or waiting to write
        self.reading: Final = _Reading(self)
        self.writing: Final = _Writing(self)


class _Reading:
    def __init__(self, lock: ReadersAndWriter) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        lock = self._lock
        with lock.changed:
            while lock.writers:
                lock.changed.wait()
            lock.readers += 1

    def __exit__(self, *_error: object) -> None:
        lock = self._lock
        with lock.changed:
            lock.readers -= 1
            if lock.writers and not lock.readers:
                lock.changed.notify_all()


class _Writing:
    def __init__(self, lock: ReadersAndWriter) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        lock = self._lock
        with lock.changed:
            lock.writers += 1
            while lock.readers:
                lock.changed.wait()

    def __exit__(self, *_error: object) -> None:
        lock = self._lock
        with lock.changed:
            lock.writers -= 1
            lock.changed.notify_all()
