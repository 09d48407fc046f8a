"""Typed access to LMDB cursors. The transactions here return bytes, not views."""

from __future__ import annotations

from typing import cast

import lmdb


def delete_here(cursor: lmdb.Cursor) -> bool:
    """Deletes the entry at the cursor and moves to the next one. Returns false after the last entry, where `delete`
    returns true."""
    return cursor.delete() and bool(cursor.key())


def key_of(cursor: lmdb.Cursor) -> bytes:
    return cast(bytes, cursor.key())


def value_of(cursor: lmdb.Cursor) -> bytes:
    return cast(bytes, cursor.value())
