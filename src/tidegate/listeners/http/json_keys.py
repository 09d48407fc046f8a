"""Refuses JSON objects with a duplicate key (N210), as the native protocol refuses such notifications.

The parser keeps the last of two equal keys and drops the first, so two programs could read one body differently. A
dropped key shows in the number of colons, since a colon follows every key. Three checks, the fastest first:

1. Outside of strings, a colon follows the closing quote of a key. If the body has as many `":` pairs as the parsed flat
   objects have keys, none was dropped. A string that contains `":` can only make the count too large.
2. The body and its parsed value, encoded again, have equally many colons unless a key was dropped. That holds for
   nested objects too, but not for strings that escape a colon as `\\u003a`.
3. A parser that reports every pair decides the remaining cases, and names the key.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, Final

import msgspec
import numpy as np

from tidegate.errors import NotificationError

# From this size on, counting in an array is faster than counting in bytes.
ARRAY_BYTES: Final = 2048
_COLON, _QUOTE = ord(":"), ord('"')
_BLANK_MAX: Final = ord(" ")
_ESCAPE: Final = b"\\u"


def refuse_duplicate_keys(body: bytes, parsed: Any = msgspec.UNSET) -> None:
    """Raises N210 if an object in `body`, at any depth, has a duplicate key. `parsed` is the value that msgspec parsed
    from the body, if the caller has it."""
    # How deep these parsers can go depends on the caller's stack. Other checks refuse bodies that are nested so deeply.
    with contextlib.suppress(RecursionError):
        if not _has_all_keys(body, msgspec.json.decode(body) if parsed is msgspec.UNSET else parsed):
            json.loads(body, object_pairs_hook=_refuse_duplicates)


def _has_all_keys(body: bytes, parsed: Any) -> bool:
    """Returns True if counting proves that no key was dropped, False if counting cannot decide."""
    if len(body) >= ARRAY_BYTES and _count_quoted_colons(body) == _keys_of_flat(parsed):
        return True
    if _ESCAPE in body:
        return False
    colons = body.count(b":")
    return colons == _keys_of_flat(parsed) or colons == msgspec.json.encode(parsed).count(b":")


def _count_quoted_colons(body: bytes) -> int:
    """Counts the colons right after a quote. Returns -2, which no count equals, if a colon follows white space: it may
    belong to a key as well."""
    signs = np.frombuffer(body, np.uint8)
    before, is_colon = signs[:-1], signs[1:] == _COLON
    if np.any(is_colon & (before <= _BLANK_MAX)):
        return -2
    return int(np.count_nonzero(is_colon & (before == _QUOTE)))


def _keys_of_flat(parsed: Any) -> int:
    """Counts the top-level keys of an object or of a list of objects; returns -1 for anything else."""
    if type(parsed) is dict:
        return len(parsed)
    return sum(map(len, parsed)) if type(parsed) is list and set(map(type, parsed)) == {dict} else -1


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _value in pairs:
        if key in seen:
            raise NotificationError("N210", f"{key[:60]!r} is given twice in one object", "give each name one value")
        seen.add(key)
