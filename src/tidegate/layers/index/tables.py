"""The arrays of an index, what each column means, and how they grow. Invariants are written here, once.

Everything that the kernels touch is a flat array, in three tuples: the `Vocabulary` (strings and attribute names), the
`Filters` (programs, and who wants them) and the `Tree` (where a filter is filed). Offsets are kept in int32 where a
million subscriptions need many of them. A kernel stops before it could run out of room, and Python grows the arrays.
Attribute 0 does not exist: its place in the guards lets every notification pass.
"""

from __future__ import annotations

import mmap
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]

# columns of `Vocabulary.strings`; free ones are linked by the first
OFFSET: Final = 0  # of its bytes, in words of eight
LENGTH: Final = 1
REFERENCES: Final = 2
ATTRIBUTE: Final = 3  # of which it is the name; 0 for none
STRING_COLUMNS: Final = 4

# columns of `Vocabulary.attributes`; free ones are linked by the first
USES: Final = 0
NAME: Final = 1  # its string
SUBSCRIBED: Final = 2  # filters with a constraint on it
PATTERNS: Final = 3  # filters with a pattern on it: only then are the digits of numbers written down
ATTRIBUTE_COLUMNS: Final = 4

# columns of `Filters.subscriptions`; free ones are linked by the second
RECORD: Final = 0
NEXT: Final = 1
PREVIOUS: Final = 2

# columns of `Tree.nodes`; free ones are linked by the first
START: Final = 0  # of its entries
COUNT: Final = 1
CAPACITY: Final = 2  # 0 or the size of a block
SPLIT: Final = 3  # 1 when entries that can be filed further have been
DIMENSIONS: Final = 4  # head of its list in `dimensions`, or -1
CHILDREN: Final = 5
DEPTH: Final = 6  # how many constraints of an entry its path has used
PARENT: Final = 7
NODE_COLUMNS: Final = 8

# columns of `Tree.entries`
GUARDS: Final = 0  # two conservative tests, 32 bits each
FILED: Final = 1  # offset of the record (32 bits), a third test

# columns of `Tree.dimensions`: the attributes by which a split node files its entries
ABOUT: Final = 0
GROUP: Final = 1  # node with the entries on this attribute
KINDS: Final = 2  # bits: the kinds of routes from the group on to nodes by value
FOLLOWING: Final = 3
DIMENSION_COLUMNS: Final = 4

# columns of `Tree.roots`: what the root knows of an attribute, each a node or 0 but for the last three
ANY: Final = 0  # filed by its presence
FALSE: Final = 1
TRUE: Final = 2
CELLS: Final = 3  # row in `cells` + 1, or 0
ROUTE_KINDS: Final = 4  # bits: which hashed routes, and which levels of cells, there are
PATTERN_SIZES: Final = 5  # bits: lengths of prefixes (0-7), of suffixes (8-15), of grams (16-19), each less one
ROOT_COLUMNS: Final = 6

# columns of `Tree.domains`: sixteen segments of 4096 places each, that hold equally many bounds of filters
IS_LEARNED: Final = 0
SEGMENT_STARTS: Final = 1
SEGMENT_SCALES: Final = 17  # places a unit, 0 for a segment that is one number
HIGHEST: Final = 33
DOMAIN_COLUMNS: Final = 34
SEGMENTS: Final = 16
SEGMENT_PLACES: Final = 4096

# Cells of an attribute's quantised values: seven levels, each four times as fine as the one before.
LEVELS: Final = 7
# Behind them, buckets for one-sided intervals by their bound: 64 for those that go up, 64 for those that go down.
SIDES_BASE: Final = 5461
CELLS_PER_ATTRIBUTE: Final = SIDES_BASE + 128
CELL_BITS: Final = 13
HISTOGRAM_BUCKETS: Final = 64
ATTRIBUTES_MAX: Final = 1 << 16  # a record has 16 bits for one
PATTERN_WORDS: Final = 1024
OWN_PAGES: Final = 1 << 20

# places in `state` of each tuple; free lists of blocks by size class stand from HEADS on
TOP: Final = 0  # strings, records (in words of code), nodes
FREE: Final = 1
COUNTED: Final = 2  # how many there are
SEED: Final = 3
HEADS: Final = 32
STATE_SIZE: Final = 96
# Vocabulary
WORDS_TOP: Final = 4
ATTRIBUTE_TOP: Final = 5
ATTRIBUTE_FREE: Final = 6
ATTRIBUTES: Final = 7
EVENTS: Final = 8  # notifications sampled for the estimate of selectivity
# Filters
SUBSCRIPTION_TOP: Final = 4
SUBSCRIPTION_FREE: Final = 5
SUBSCRIPTIONS: Final = 6
# Tree
GENERATION: Final = 3  # 0 or 1: the records filed in this tree bear the same
ENTRY_TOP: Final = 4
ENTRIES: Final = 5
DIMENSION_TOP: Final = 6
DIMENSION_FREE: Final = 7
ROUTES: Final = 8
CELLS_TOP: Final = 9
LARGEST: Final = 10  # entries of the largest node ever, which bounds what one insertion may need
WANTED_NODES: Final = 11  # room that an insertion or a split has missed
WANTED_ENTRIES: Final = 12
STRANGE_BOUNDS: Final = 13  # bounds of filters outside the domain that was learned
NODES_FREED: Final = 14


class Vocabulary(NamedTuple):
    """Strings are stored once and counted; an operand is known by its attribute and its bytes, a name by its bytes."""

    state: I64
    slots: U64  # hash table: [slot, (hash, id + 1 | attribute << 32 | length, at most 9, << 48)]
    strings: I32
    words: U64  # their bytes, the last word filled up with zeros
    string_seen: I32  # how often sampled notifications carried it; races lose a count, harmlessly
    attributes: I32
    attribute_seen: I64


class Filters(NamedTuple):
    """Records of filters, shared by all subscriptions with the same constraints. See record_kernel for their layout."""

    state: I64
    slots: I32  # hash table of record offsets + 1
    code: U64
    subscription_slots: I32  # hash table of places + 1
    subscriptions: I32
    ids: I64


class Tree(NamedTuple):
    """Filed records. Invariant: a record is in exactly the nodes to which its constraints lead, in their order."""

    state: I64
    token_nodes: I32  # node of each string, or 0
    roots: I32
    cells: I32  # [row of an attribute, cell or bucket]: node, or 0
    sides: U64  # [row of an attribute, (up, down)]: a bit for each bucket that has a node
    domains: F64  # how the numbers of an attribute are quantised
    histogram: I32  # [attribute, bucket]: how often sampled notifications had a number there
    pattern_bits: U64  # which patterns may be there, a bit each
    routes: U64  # hash table: [slot, (key, node)]
    nodes: I32
    node_keys: U64  # how the node is reached: an odd key of `routes`, or an even one that says where it is noted
    dimensions: I32
    entries: U64


def make_vocabulary(seed: int) -> Vocabulary:
    state = np.zeros(STATE_SIZE, np.int64)
    state[SEED] = seed
    state[ATTRIBUTE_TOP] = 1
    return Vocabulary(
        state=state,
        slots=np.zeros((1024, 2), np.uint64),
        strings=np.zeros((512, STRING_COLUMNS), np.int32),
        words=np.zeros(1 << 15, np.uint64),
        string_seen=np.zeros(512, np.int32),
        attributes=np.zeros((64, ATTRIBUTE_COLUMNS), np.int32),
        attribute_seen=np.zeros(64, np.int64),
    )


def make_filters() -> Filters:
    return Filters(
        state=np.zeros(STATE_SIZE, np.int64),
        slots=np.zeros(512, np.int32),
        code=np.zeros(1 << 13, np.uint64),
        subscription_slots=np.zeros(512, np.int32),
        subscriptions=np.zeros((256, 3), np.int32),
        ids=np.zeros(256, np.int64),
    )


def make_tree(vocabulary: Vocabulary, generation: int) -> Tree:
    """A root and nothing else."""
    state = np.zeros(STATE_SIZE, np.int64)
    state[TOP] = 1
    state[GENERATION] = generation
    nodes = np.zeros((1024, NODE_COLUMNS), np.int32)
    nodes[0, DIMENSIONS] = -1
    attributes = len(vocabulary.attributes)
    return Tree(
        state=state,
        token_nodes=np.zeros(len(vocabulary.strings), np.int32),
        roots=np.zeros((attributes, ROOT_COLUMNS), np.int32),
        cells=np.zeros((4, CELLS_PER_ATTRIBUTE), np.int32),
        sides=np.zeros((4, 2), np.uint64),
        domains=np.zeros((attributes, DOMAIN_COLUMNS), np.float64),
        histogram=np.zeros((attributes, HISTOGRAM_BUCKETS), np.int32),
        pattern_bits=np.zeros(PATTERN_WORDS, np.uint64),
        routes=np.zeros((2048, 2), np.uint64),
        nodes=nodes,
        node_keys=np.zeros(1024, np.uint64),
        dimensions=np.zeros((1024, DIMENSION_COLUMNS), np.int32),
        entries=np.zeros((1 << 14, 2), np.uint64),
    )


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Large arrays have pages of their own, which the system takes back as soon as the array is gone."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if size < OWN_PAGES:
        return np.zeros(shape, dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype).reshape(shape)


def larger(array: Any, used: int, least: int) -> Any:
    """A copy with room for at least `least` rows, half as much again as it has. What is not used is not touched, so the
    system gives no memory for it yet."""
    copy = zeros((max(least, len(array) * 3 // 2), *array.shape[1:]), array.dtype)
    copy[:used] = array[:used]
    return copy
