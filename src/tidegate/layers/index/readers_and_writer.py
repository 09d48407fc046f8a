"""A lock for one writer and several readers: readers share it, the writer has it alone and goes first when it waits.

    with lock.reading: …        with lock.writing: …

There is one writer: a second one must not come while the first writes.
"""

from __future__ import annotations

from threading import Condition
from typing import Final


class ReadersAndWriter:
    def __init__(self) -> None:
        self.changed: Final = Condition()
        self.readers = 0
        self.writers = 0  # that write or wait to
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
