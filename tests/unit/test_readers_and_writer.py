"""Readers share the lock, a writer holds it alone, and a waiting writer precedes later readers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

from tidegate.index.readers_and_writer import ReadersAndWriter


def test_readers_share_it_and_the_writer_waits_for_them_and_goes_first() -> None:
    lock, written, read = ReadersAndWriter(), Event(), Event()

    def write() -> bool:
        with lock.writing:
            written.set()
            return lock.readers == 0 and not read.is_set()

    def read_later() -> bool:
        with lock.reading:
            read.set()
            return written.is_set()

    with ThreadPoolExecutor(2) as threads:
        with lock.reading, lock.reading:
            writer = threads.submit(write)
            assert not written.wait(0.05)
            while not lock.writers:
                pass
            reader = threads.submit(read_later)
            assert not read.wait(0.05)
        assert writer.result(5)
        assert reader.result(5)
    with lock.writing:
        assert lock.readers == 0
