"""A lock for one writer and several readers: readers share it, the writer has it alone and goes first when it waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class ReadersAndWriter:
    def __init__(self) -> None:
        self._changed = Condition()
        self._readers = 0
        self._writers = 0  # that write or wait to

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._changed:
            while self._writers:
                self._changed.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                if not self._readers and self._writers:
                    self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """There is one writer: a second one must not come while the first writes."""
        with self._changed:
            self._writers += 1
            while self._readers:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._writers -= 1
                self._changed.notify_all()
