"""The arrays of an index, and how they grow. What each column means is written here, once.

Everything that the kernels touch is a flat array, so that a match runs without the interpreter and a share of the
subscriptions could be sent to another slice as it lies. Offsets are kept in int32 where a million subscriptions need
many of them; the kernels stop, and Python grows the arrays, long before one could overflow.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]

# columns of `nodes`
START: Final = 0  # of its entries
COUNT: Final = 1
CAPACITY: Final = 2  # 0 or a power of two
SPLIT: Final = 3  # 1 when entries that can be routed further have gone to children
DIMENSIONS: Final = 4  # head of its list in `dimensions`, or -1
CHILDREN: Final = 5
DEPTH: Final = 6  # how many constraints of an entry its path has used
PARENT: Final = 7
NODE_COLUMNS: Final = 8

# columns of `filters`
CODE: Final = 0  # offset of its program in `code`
WORDS: Final = 1  # and its length
FIRST: Final = 2  # head of the list of its subscriptions, or -1
SUBSCRIBERS: Final = 3
FILTER_COLUMNS: Final = 4

# columns of `attributes`
REFERENCES: Final = 0
KINDS: Final = 1  # bits: which kinds of routes, and which levels of cells, the root has on it
PREFIXES: Final = 2  # bits: which lengths of prefixes
SUFFIXES: Final = 3
SUBSCRIBED: Final = 4  # filters with a constraint on it, for the estimate of selectivity
PATTERNS: Final = 5  # filters with a pattern on it: only then are the digits of numbers written down
ATTRIBUTE_COLUMNS: Final = 6

BUCKET_WORDS: Final = 16  # 1024 buckets for one-sided bounds

# places in `state`
CODE_TOP: Final = 0
ENTRY_TOP: Final = 1
BYTES_TOP: Final = 2
NODE_TOP: Final = 3
NODE_FREE: Final = 4
DIMENSION_TOP: Final = 5
DIMENSION_FREE: Final = 6
FILTER_TOP: Final = 7
FILTER_FREE: Final = 8
SUBSCRIPTION_TOP: Final = 9
SUBSCRIPTION_FREE: Final = 10
STRING_TOP: Final = 11
STRING_FREE: Final = 12
ATTRIBUTE_TOP: Final = 13
ATTRIBUTE_FREE: Final = 14
ROUTES: Final = 15
STRINGS: Final = 16
ATTRIBUTES: Final = 17
FILTERS: Final = 18
SUBSCRIPTIONS: Final = 19
ENTRIES: Final = 20
NODES: Final = 21
LARGEST: Final = 22  # entries of the largest node ever, which bounds what one insertion may need
EVENTS: Final = 23  # notifications matched, for the estimate of selectivity
WANTED_NODES: Final = 24  # room that an insertion or a split has missed
WANTED_ENTRIES: Final = 25
CODE_HEADS: Final = 64  # free blocks by size class, for `code`, `guards` and `bytes`
ENTRY_HEADS: Final = 128
BYTES_HEADS: Final = 192
STATE_SIZE: Final = 256


class Tables(NamedTuple):
    state: I64
    # strings, interned and counted: of constraints, and names of attributes
    string_slots: I32  # hash table of string ids + 1
    string_hashes: U64
    strings: I32  # [id, (offset in 8-byte units, length, references)]; free ones are linked by column 0
    bytes: U64  # their bytes
    # attributes
    attribute_of: I32  # attribute of a string that is a name, or -1
    attributes: I64
    buckets: U64  # [attribute, direction, word]
    domains: F64  # [attribute, (lowest, highest)] of the bounds seen
    names: I32  # string id of each attribute
    # how often notifications carried an attribute, a string: for the estimate of selectivity; races lose a count
    attribute_seen: I64
    string_seen: I32
    # filters: their programs, shared by identical ones, and who wants them
    filter_slots: I32  # hash table of filter ids + 1
    filter_hashes: U64
    filters: I32
    code: U64
    code_numbers: F64  # the same memory, read as doubles
    subscription_slots: I32  # hash table of places + 1
    subscriptions: I32  # [place, (filter, next, previous)]; free ones are linked by column 1
    subscription_ids: I64
    # the tree
    route_keys: U64
    route_nodes: I32
    nodes: I32
    node_keys: U64
    dimensions: I32  # [place, (attribute, kinds and levels, next)]
    guards: U64
    entries: I32  # filter ids, beside `guards`


def make_tables() -> Tables:
    """An empty index: a root and nothing else."""
    state = np.zeros(STATE_SIZE, np.int64)
    state[NODE_TOP] = 1
    nodes = np.zeros((1024, NODE_COLUMNS), np.int32)
    nodes[0, SPLIT] = 1
    nodes[0, DIMENSIONS] = -1
    return Tables(
        state=state,
        string_slots=np.zeros(1024, np.int32),
        string_hashes=np.zeros(512, np.uint64),
        strings=np.zeros((512, 3), np.int32),
        bytes=np.zeros(1 << 15, np.uint64),
        attribute_of=np.zeros(512, np.int32),
        attributes=np.zeros((64, ATTRIBUTE_COLUMNS), np.int64),
        buckets=np.zeros((64, 2, BUCKET_WORDS), np.uint64),
        domains=np.zeros((64, 2), np.float64),
        names=np.zeros(64, np.int32),
        attribute_seen=np.zeros(64, np.int64),
        string_seen=np.zeros(512, np.int32),
        filter_slots=np.zeros(512, np.int32),
        filter_hashes=np.zeros(256, np.uint64),
        filters=np.zeros((256, FILTER_COLUMNS), np.int32),
        code=(code := np.zeros(1 << 13, np.uint64)),
        code_numbers=code.view(np.float64),
        subscription_slots=np.zeros(512, np.int32),
        subscriptions=np.zeros((256, 3), np.int32),
        subscription_ids=np.zeros(256, np.int64),
        route_keys=np.zeros(2048, np.uint64),
        route_nodes=np.zeros(2048, np.int32),
        nodes=nodes,
        node_keys=np.zeros(1024, np.uint64),
        dimensions=np.zeros((1024, 3), np.int32),
        guards=np.zeros(1 << 14, np.uint64),
        entries=np.zeros(1 << 14, np.int32),
    )


def larger(array: Any, used: int, least: int) -> Any:
    """A copy with room for at least `least` rows, half as much again as it has. What is not used is not touched, so the
    system gives no memory for it yet."""
    copy = np.zeros((max(least, len(array) * 3 // 2), *array.shape[1:]), array.dtype)
    copy[:used] = array[:used]
    return copy
