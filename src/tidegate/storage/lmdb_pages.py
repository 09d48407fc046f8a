"""The pages of an LMDB file, read without LMDB: a damaged page must not crash or mislead the process that checks it.

LMDB has no page checksums and trusts what it maps. One wrong bit in a branch page hides thousands of records, one in a
free list makes LMDB overwrite live pages, and a wrong size ends the process by a signal. This module checks everything
that LMDB's own search depends on:

- Every page lies in the file, is of the right kind and is used once.
- Nodes lie within their page.
- Keys ascend, and lie between the separators of the branch above.
- Counts agree with what is reached.

The format is that of LMDB 0.9 (magic number BEEFC0DE, version 1) on a little-endian machine of 64 bits. A page that is
neither reached nor free is no problem, because LMDB never reads it; a repair searches it (`lost_leaves`).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from tidegate.kernels.cache import njit

MAGIC: Final = 0xBEEFC0DE
VERSION: Final = 1
NO_PAGE: Final = (1 << 64) - 1
PAGE_BYTES_USUAL: Final = 4096
FREE, MAIN = "free pages", "databases"
# The most problems of a tree that are listed; further ones are only counted.
NAMED_MAX: Final = 20

_HEADER_BYTES: Final = 16
_PAGE: Final = struct.Struct("<QHHHH")
_META: Final = struct.Struct("<IIQQ")
_DATABASE: Final = struct.Struct("<IHHQQQQQ")
_NODE: Final = struct.Struct("<HHHH")
_NUMBER: Final = struct.Struct("<Q")
_P_BRANCH, _P_LEAF, _P_OVERFLOW, _P_META = 1, 2, 4, 8
_F_BIG, _F_DATABASE = 1, 2
_INTEGER_KEYS: Final = 8
_KEY_BYTES_MAX: Final = 511
_DEPTH_MAX: Final = 32
_MAPPED_BYTES_MAX: Final = 1 << 47

PROBLEMS: Final = (
    "is sound",
    "lies beyond the end of the file",
    "lies beyond the last page in use",
    "is used twice",
    "has the wrong page number",
    "is of the wrong kind",
    "has impossible bounds",
    "has an entry outside its bounds",
    "has keys out of order",
    "has a key that belongs on another page",
    "has an entry of the wrong kind",
    "has a value whose pages are damaged",
)
_SOUND, _MISSING, _UNUSED, _TWICE, _NUMBER_WRONG, _KIND, _BOUNDS, _ENTRY, _ORDER, _ELSEWHERE, _FLAGS, _OVERFLOW = range(
    len(PROBLEMS)
)

Bytes: TypeAlias = npt.NDArray[np.uint8]
Numbers: TypeAlias = npt.NDArray[np.int64]

kernel = njit(cache=True, nogil=True)


@kernel
def _u16(data: Bytes, at: int) -> int:
    return np.int64(data[at]) | np.int64(data[at + 1]) << 8  # type: ignore[return-value]


@kernel
def _u32(data: Bytes, at: int) -> int:
    return _u16(data, at) | _u16(data, at + 2) << 16


@kernel
def _u64(data: Bytes, at: int) -> int:
    """Reads a number. Numbers of 2^63 and more become negative: no page or count is that large."""
    return _u32(data, at) | _u32(data, at + 4) << 32


@kernel
def _is_below(data: Bytes, a: int, a_bytes: int, b: int, b_bytes: int, is_integer: bool) -> bool:
    """Returns whether key `a` sorts before key `b`; both are (offset, size)."""
    if is_integer:
        return _u64(data, a) < _u64(data, b)
    for i in range(min(a_bytes, b_bytes)):
        if data[a + i] != data[b + i]:
            return bool(data[a + i] < data[b + i])
    return a_bytes < b_bytes


@kernel
def _check_header(data: Bytes, page_bytes: int, pages: int, page: int, kind: int) -> int:
    if page < 2 or page >= pages:
        return _UNUSED
    if (page + 1) * page_bytes > len(data):
        return _MISSING
    start = page * page_bytes
    if _u64(data, start) != page:
        return _NUMBER_WRONG
    if _u16(data, start + 10) != kind:
        return _KIND
    return _SOUND


@kernel
def _check_page(  # noqa: C901 - one list of checks, in the order of the page
    data: Bytes,
    page_bytes: int,
    pages: int,
    page: int,
    kind: int,
    is_integer: bool,
    is_main: bool,
    low: int,
    low_bytes: int,
    high: int,
    high_bytes: int,
) -> int:
    """Checks a branch or leaf whose keys must be from `low` to below `high`, each (offset, size), -1 for no bound."""
    problem = _check_header(data, page_bytes, pages, page, kind)
    if problem != _SOUND:
        return problem
    start = page * page_bytes
    lower, upper = _u16(data, start + 12), _u16(data, start + 14)
    count = (lower - _HEADER_BYTES) // 2
    is_branch = kind == _P_BRANCH
    least = 2 if is_branch and not is_integer else 1
    if lower & 1 or upper & 1 or lower > upper or upper > page_bytes or count < least:
        return _BOUNDS
    used = 0
    before, before_bytes = -1, 0
    for i in range(count):
        at = _u16(data, start + _HEADER_BYTES + 2 * i)
        if at & 1 or at < upper or at + 8 > page_bytes:
            return _ENTRY
        node = start + at
        flags, key_bytes = _u16(data, node + 4), _u16(data, node + 6)
        size = 8 + key_bytes
        if not is_branch:
            if is_main:
                if flags != _F_DATABASE:
                    return _FLAGS
            elif flags != 0 and flags != _F_BIG:
                return _FLAGS
            size += 8 if flags == _F_BIG else _u32(data, node)
        size += size & 1
        if at + size > page_bytes:
            return _ENTRY
        used += size
        if is_branch and i == 0:
            continue  # LMDB takes the first key of a branch for the lowest, whatever it is
        if key_bytes < 1 or key_bytes > _KEY_BYTES_MAX or (is_integer and key_bytes != 8):
            return _ENTRY
        key = node + 8
        if before >= 0 and not _is_below(data, before, before_bytes, key, key_bytes, is_integer):
            return _ORDER
        if low >= 0 and _is_below(data, key, key_bytes, low, low_bytes, is_integer):
            return _ELSEWHERE
        if high >= 0 and not _is_below(data, key, key_bytes, high, high_bytes, is_integer):
            return _ELSEWHERE
        before, before_bytes = key, key_bytes
    return _SOUND if used == page_bytes - upper else _BOUNDS


@kernel
def _mark_overflow(data: Bytes, page_bytes: int, pages: int, leaf: int, marks: Bytes, owner: int) -> tuple[int, int]:
    """Marks the pages of large values of a sound leaf. Returns how many, and the problem."""
    start, found = leaf * page_bytes, 0
    for i in range((_u16(data, start + 12) - _HEADER_BYTES) // 2):
        node = start + _u16(data, start + _HEADER_BYTES + 2 * i)
        if _u16(data, node + 4) != _F_BIG:
            continue
        first = _u64(data, node + 8 + _u16(data, node + 6))
        needed = (_HEADER_BYTES + _u32(data, node) + page_bytes - 1) // page_bytes
        if _check_header(data, page_bytes, pages, first, _P_OVERFLOW) != _SOUND:
            return found, _OVERFLOW
        count = _u32(data, first * page_bytes + 12)
        if count < needed or first + count > pages or (first + needed) * page_bytes > len(data):
            return found, _OVERFLOW
        for page in range(first, first + count):
            if marks[page]:
                return found, _TWICE
            marks[page] = owner
        found += count
    return found, _SOUND


@kernel
def _walk(  # noqa: C901 - a walk without recursion
    data: Bytes,
    page_bytes: int,
    pages: int,
    root: int,
    depth: int,
    is_integer: bool,
    is_main: bool,
    marks: Bytes,
    owner: int,
) -> tuple[Numbers, Numbers, int, int, int]:
    """Walks a tree in key order. Returns its sound leaves, its problems as alternating page and problem, and how many
    entries, branches and overflow pages it has. Everything below a damaged page is omitted."""
    leaves, problems = np.empty(256, np.int64), np.empty(16, np.int64)
    leaf_count = problem_count = entries = branches = overflow = 0
    path, place = np.empty(_DEPTH_MAX + 1, np.int64), np.zeros(_DEPTH_MAX + 1, np.int64)
    low, low_bytes = np.full(_DEPTH_MAX + 1, -1), np.zeros(_DEPTH_MAX + 1, np.int64)
    high, high_bytes = np.full(_DEPTH_MAX + 1, -1), np.zeros(_DEPTH_MAX + 1, np.int64)
    level, page = 0, root
    while True:
        # A new page, at `level` below the root.
        kind = _P_LEAF if level == depth - 1 else _P_BRANCH
        problem = _check_page(
            data,
            page_bytes,
            pages,
            page,
            kind,
            is_integer,
            is_main,
            low[level],
            low_bytes[level],
            high[level],
            high_bytes[level],
        )
        if problem == _SOUND and marks[page]:
            problem = _TWICE
        if problem == _SOUND:
            marks[page] = owner
            if kind == _P_LEAF:
                added, problem = _mark_overflow(data, page_bytes, pages, page, marks, owner)
                overflow += added
        if problem != _SOUND:
            if problem_count + 2 > len(problems):
                problems = np.concatenate((problems, np.empty_like(problems)))
            problems[problem_count], problems[problem_count + 1] = page, problem
            problem_count += 2
            level -= 1
        elif kind == _P_LEAF:
            if leaf_count == len(leaves):
                leaves = np.concatenate((leaves, np.empty_like(leaves)))
            leaves[leaf_count] = page
            leaf_count += 1
            entries += (_u16(data, page * page_bytes + 12) - _HEADER_BYTES) // 2
            level -= 1
        else:
            branches += 1
            path[level], place[level] = page, 0
        # The next child of the lowest branch that has one left.
        while level >= 0:
            start = path[level] * page_bytes
            count = (_u16(data, start + 12) - _HEADER_BYTES) // 2
            if place[level] < count:
                break
            level -= 1
        if level < 0:
            return leaves[:leaf_count], problems[:problem_count], entries, branches, overflow
        i = place[level]
        place[level] = i + 1
        node = start + _u16(data, start + _HEADER_BYTES + 2 * i)
        page = _u32(data, node) | _u16(data, node + 4) << 32
        below = level + 1
        # A child's keys lie between its own separator and the next one; the first and the last child inherit a bound.
        if i == 0:
            low[below], low_bytes[below] = low[level], low_bytes[level]
        else:
            low[below], low_bytes[below] = node + 8, _u16(data, node + 6)
        if i + 1 < count:
            node = start + _u16(data, start + _HEADER_BYTES + 2 * (i + 1))
            high[below], high_bytes[below] = node + 8, _u16(data, node + 6)
        else:
            high[below], high_bytes[below] = high[level], high_bytes[level]
        level = below


@kernel
def _runs(data: Bytes, page_bytes: int, leaves: Numbers, prefix_bytes: int, key_bytes: int) -> Numbers:
    """Summarizes sound leaves whose keys are a prefix and a number of 8 bytes. Returns a row for each prefix: the
    offset of its first key, its entries, their bytes, and the highest number. Keys of another length are skipped."""
    rows, count, first = np.empty((64, 4), np.int64), 0, -1
    for page in leaves:
        start = page * page_bytes
        for i in range((_u16(data, start + 12) - _HEADER_BYTES) // 2):
            node = start + _u16(data, start + _HEADER_BYTES + 2 * i)
            if _u16(data, node + 6) != key_bytes:
                continue
            key = node + 8
            is_same = first >= 0
            for j in range(prefix_bytes):
                if is_same and data[key + j] != data[first + j]:
                    is_same = False
            if not is_same:
                if count == len(rows):
                    rows = np.concatenate((rows, np.empty_like(rows)))
                first = key
                rows[count, 0], rows[count, 1], rows[count, 2] = key, 0, 0
                count += 1
            number = 0
            for j in range(8):
                number = number << 8 | np.int64(data[key + prefix_bytes + j])  # type: ignore[assignment]
            rows[count - 1, 1] += 1
            rows[count - 1, 2] += _u32(data, node)
            rows[count - 1, 3] = number
    return rows[:count]


def warm_up() -> None:
    """Loads the kernels by running them on pages of zeros."""
    data = np.zeros(4 * PAGE_BYTES_USUAL, np.uint8)
    data.flags.writeable = False  # as mapped files are
    leaves, *_rest = _walk(data, PAGE_BYTES_USUAL, 4, 2, 1, False, False, np.zeros(4, np.uint8), 1)
    _runs(data, PAGE_BYTES_USUAL, leaves, 6, 14)


class Database(NamedTuple):
    """A tree as LMDB describes it in a meta page or in the tree of databases."""

    padding: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflow: int
    entries: int
    root: int


class Meta(NamedTuple):
    """One of the two meta pages: the state of the file after a commit."""

    page_bytes: int
    mapped_bytes: int
    free: Database
    main: Database
    last_page: int
    transaction: int


class Run(NamedTuple):
    """The entries of one prefix: how many, their bytes, and the highest number after the prefix."""

    prefix: bytes
    entries: int
    size_bytes: int
    last: int


@dataclass
class Tree:
    """The reachable part of a database. `leaves` are its sound leaf pages in key order."""

    name: str
    described: Database
    leaves: Numbers
    entries: int
    problems: list[str] = field(default_factory=list)


@dataclass
class Structure:
    """The result of a check. `problems` concern the whole file; each tree has its own."""

    meta: Meta
    trees: dict[str, Tree] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    free_pages: int = 0
    marks: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))

    def all_problems(self) -> list[str]:
        return self.problems + [text for tree in self.trees.values() for text in tree.problems]


class PageFile:
    """A data file of LMDB, mapped for reading. Use it in `with`. Raises OSError if the file cannot be read, and
    ValueError if it is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data: Bytes = np.frombuffer(self._map, np.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: Any) -> None:
        self.data = np.zeros(0, np.uint8)
        self._map.close()

    def metas(self) -> tuple[list[Meta], list[str]]:
        """Returns the usable meta pages, and the problems of both."""
        first = self._meta(0, 0)
        page_bytes = first.page_bytes if first is not None else PAGE_BYTES_USUAL
        second = self._meta(1, page_bytes)
        problems = [f"meta page {i} is damaged" for i, meta in enumerate((first, second)) if meta is None]
        found = [meta for meta in (first, second) if meta is not None]
        if first is not None and second is not None and first.page_bytes != second.page_bytes:
            problems.append("the meta pages have different page sizes")
        return found, problems

    def check(self, meta: Meta) -> Structure:
        """Checks every tree as `meta` describes it."""
        found = Structure(meta, marks=np.zeros(max(0, meta.last_page + 1), np.uint8))
        if (meta.last_page + 1) * meta.page_bytes > _MAPPED_BYTES_MAX:
            found.problems.append(f"meta page {meta.transaction & 1} has an impossible last page, {meta.last_page}")
            return found
        free = self._walk(found, FREE, meta.free, _INTEGER_KEYS)
        main = self._walk(found, MAIN, meta.main, 0)
        for key, value, _flags in self.entries(meta.page_bytes, main.leaves):
            name = key.decode("utf-8", "replace")
            if len(value) != _DATABASE.size:
                main.problems.append(f"the description of {name} has the wrong size, {len(value)} bytes")
            else:
                self._walk(found, name, Database(*_DATABASE.unpack(value)), 0)
        self._check_free(found, free)
        return found

    def free_pages(self, meta: Meta) -> int:
        """Returns how many pages are free after the commit that `meta` describes."""
        found = Structure(meta, marks=np.zeros(meta.last_page + 1, np.uint8))
        leaves = self._walk(found, FREE, meta.free, _INTEGER_KEYS).leaves
        return sum(_NUMBER.unpack_from(value)[0] for _key, value, _flags in self.entries(meta.page_bytes, leaves))

    def entries(self, page_bytes: int, leaves: Numbers) -> Iterator[tuple[bytes, bytes, int]]:
        """Yields (key, value, flags) of all entries of sound leaves."""
        view = memoryview(self._map)
        try:
            for page in leaves.tolist():
                start = page * page_bytes
                lower = _PAGE.unpack_from(view, start)[3]
                for (at,) in struct.iter_unpack("<H", view[start + _HEADER_BYTES : start + lower]):
                    low, high, flags, key_bytes = _NODE.unpack_from(view, start + at)
                    size, value = low | high << 16, start + at + 8 + key_bytes
                    key = bytes(view[value - key_bytes : value])
                    if flags & _F_BIG:
                        value = _NUMBER.unpack_from(view, value)[0] * page_bytes + _HEADER_BYTES
                    yield key, bytes(view[value : value + size]), flags
        finally:
            view.release()

    def runs(self, page_bytes: int, leaves: Numbers, prefix_bytes: int) -> list[Run]:
        """Summarizes the entries by the prefix of their keys, which a number of 8 bytes follows."""
        rows = _runs(self.data, page_bytes, leaves, prefix_bytes, prefix_bytes + 8)
        return [
            Run(bytes(self._map[key : key + prefix_bytes]), entries, size_bytes, last)
            for key, entries, size_bytes, last in rows.tolist()
        ]

    def lost_leaves(self, found: Structure) -> Numbers:
        """Returns leaves that are neither reached nor free: they were below a damaged branch. Each is sound in
        itself."""
        pages, page_bytes = len(found.marks), found.meta.page_bytes
        lost = []
        for page in np.flatnonzero(found.marks == 0).tolist():
            problem = _check_page(self.data, page_bytes, pages, page, _P_LEAF, False, False, -1, 0, -1, 0)
            if problem == _SOUND:
                _count, problem = _mark_overflow(self.data, page_bytes, pages, page, found.marks, 255)
            if problem == _SOUND:
                lost.append(page)
        return np.array(lost, np.int64)

    def _meta(self, number: int, start: int) -> Meta | None:
        if start + _HEADER_BYTES + _META.size + 2 * _DATABASE.size + 16 > len(self.data):
            return None
        page, _padding, flags, _lower, _upper = _PAGE.unpack_from(self._map, start)
        at = start + _HEADER_BYTES
        magic, version, address, mapped_bytes = _META.unpack_from(self._map, at)
        at += _META.size
        free = Database(*_DATABASE.unpack_from(self._map, at))
        main = Database(*_DATABASE.unpack_from(self._map, at + _DATABASE.size))
        last_page, transaction = struct.unpack_from("<QQ", self._map, at + 2 * _DATABASE.size)
        page_bytes = free.padding
        is_sound = (
            (page, flags, magic, version, address) == (number, _P_META, MAGIC, VERSION, 0)
            and page_bytes in (512, 1024, 2048, 4096, 8192, 16384, 32768)
            and 0 < mapped_bytes < _MAPPED_BYTES_MAX
            and 1 <= last_page < _MAPPED_BYTES_MAX // page_bytes
            and (transaction & 1 == number or transaction == 0)
        )
        return Meta(page_bytes, mapped_bytes, free, main, last_page, transaction) if is_sound else None

    def _walk(self, found: Structure, name: str, described: Database, flags: int) -> Tree:
        tree = found.trees[name] = Tree(name, described, np.zeros(0, np.int64), 0)
        if described.flags != flags:
            tree.problems.append(f"{name}: flags {described.flags:#x} instead of {flags:#x}")
            return tree
        if described.root == NO_PAGE:
            if described.entries or described.depth:
                tree.problems.append(f"{name}: {described.entries} entries, but no page")
            return tree
        if not 1 <= described.depth <= _DEPTH_MAX or described.root >= 1 << 62:
            tree.problems.append(f"{name}: its root or its depth ({described.depth}) is impossible")
            return tree
        leaves, problems, entries, branches, overflow = _walk(
            self.data,
            found.meta.page_bytes,
            len(found.marks),
            described.root,
            described.depth,
            flags == _INTEGER_KEYS,
            name == MAIN,
            found.marks,
            min(len(found.trees), 250),
        )
        tree.leaves, tree.entries = leaves, entries
        pairs = problems.reshape(-1, 2).tolist()
        tree.problems += [f"{name}: page {page} {PROBLEMS[problem]}" for page, problem in pairs[:NAMED_MAX]]
        if len(pairs) > NAMED_MAX:
            tree.problems.append(f"{name}: {len(pairs) - NAMED_MAX} more damaged pages")
        reached = (branches, len(leaves), overflow, entries)
        counted = (described.branches, described.leaves, described.overflow, described.entries)
        if not pairs and reached != counted:
            tree.problems.append(f"{name}: {counted[3]} entries counted, {entries} reached")
        return tree

    def _check_free(self, found: Structure, free: Tree) -> None:
        """Checks that every free page is listed once and is not in use: LMDB will overwrite it."""
        marks = found.marks
        for key, value, _flags in self.entries(found.meta.page_bytes, free.leaves):
            pages = np.frombuffer(value[: len(value) & ~7], np.uint64)
            count = int(pages[0]) if len(pages) else -1
            if not 0 <= count < len(pages) or _NUMBER.unpack(key)[0] > found.meta.transaction:
                free.problems.append(f"{FREE}: a list has an impossible size or number")
                continue
            listed = pages[1 : count + 1]
            if count and (listed.min() < 2 or listed.max() >= len(marks) or np.any(listed[1:] >= listed[:-1])):
                free.problems.append(f"{FREE}: a list has impossible pages")
                continue
            places = listed.astype(np.int64)
            if np.any(marks[places]):
                free.problems.append(
                    f"{FREE}: {int(np.count_nonzero(marks[places]))} pages are in use, or listed twice"
                )
            marks[places] = 254
            found.free_pages += count
