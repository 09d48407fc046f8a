"""The arrays of an index: what each column means, and how the arrays grow. The invariants are documented here.

All data that the kernels use lies in flat arrays, in three tuples: the `Vocabulary` (strings and attribute names), the
`Filters` (programs, and the subscriptions that share them) and the `Tree` (where a filter is filed). Offsets are int32
where a million subscriptions need many of them. A kernel stops before it could run out of room, and Python grows the
arrays. No attribute has the number 0: a guard on attribute 0 lets every notification pass.
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

# columns of `Vocabulary.strings`; free rows are linked through the first
OFFSET: Final = 0  # of its bytes, in words of eight bytes
LENGTH: Final = 1
REFERENCES: Final = 2
ATTRIBUTE: Final = 3  # the attribute whose name this string is; 0 for none
STRING_COLUMNS: Final = 4

# columns of `Vocabulary.attributes`; free rows are linked through the first
USES: Final = 0
NAME: Final = 1  # id of the string
SUBSCRIBED: Final = 2  # filters with a constraint on it
PATTERNS: Final = 3  # filters with a pattern on it; without any, matching does not write the digits of its numbers
ATTRIBUTE_COLUMNS: Final = 4

# columns of `Filters.subscriptions`; free rows are linked through the second
RECORD: Final = 0
NEXT: Final = 1
PREVIOUS: Final = 2

# columns of `Tree.nodes`; free rows are linked through the first
START: Final = 0  # of its entries in `entries`
COUNT: Final = 1
CAPACITY: Final = 2  # 0 or the size of a block
SPLIT: Final = 3  # 1 if all entries that can move to a child node have moved
DIMENSIONS: Final = 4  # head of its list in `dimensions`, or -1
CHILDREN: Final = 5
DEPTH: Final = 6  # how many constraints of its entries the path to this node has used
PARENT: Final = 7
NODE_COLUMNS: Final = 8

# columns of `Tree.entries`
GUARDS: Final = 0  # two conservative tests, 32 bits each
FILED: Final = 1  # offset of the record (32 bits), and a third test

# columns of `Tree.dimensions`: the attributes by which a split node files its entries
BY_ATTRIBUTE: Final = 0
GROUP: Final = 1  # node with the entries that have a constraint on this attribute
KINDS: Final = 2  # bits: the kinds of routes from the group to nodes by value
FOLLOWING: Final = 3
DIMENSION_COLUMNS: Final = 4

# columns of `Tree.roots`: the routes of the root for an attribute. The first three are nodes, or 0.
ANY: Final = 0  # filters filed by the presence of the attribute
FALSE: Final = 1
TRUE: Final = 2
CELLS: Final = 3  # row in `cells` + 1, or 0
ROUTE_KINDS: Final = 4  # bits: which kinds of hashed routes, and which levels of cells, exist
PATTERN_SIZES: Final = 5  # bits: lengths of prefixes (0-7), of suffixes (8-15), of grams (16-19), each minus one
ROOT_COLUMNS: Final = 6

# columns of `Tree.domains`: sixteen segments of 4096 places each. All segments hold equally many bounds of filters.
IS_LEARNED: Final = 0
SEGMENT_STARTS: Final = 1
SEGMENT_SCALES: Final = 17  # places per unit; 0 for a segment without width
HIGHEST: Final = 33
DOMAIN_COLUMNS: Final = 34
SEGMENTS: Final = 16
SEGMENT_PLACES: Final = 4096

# Cells of an attribute's quantised values: seven levels, each four times as fine as the previous one.
LEVELS: Final = 7
# After the cells, buckets for one-sided intervals by their bound: 64 for those open above, 64 for those open below.
SIDES_BASE: Final = 5461
CELLS_PER_ATTRIBUTE: Final = SIDES_BASE + 128
CELL_BITS: Final = 13
# A row of cells takes 22 KB. Once all rows are in use, intervals on further attributes are filed by hashed cells.
CELL_ROWS_MAX: Final = 1024
HISTOGRAM_BUCKETS: Final = 64
ATTRIBUTES_MAX: Final = 1 << 16  # a record has 16 bits for an attribute
PATTERN_WORDS: Final = 1024
OWN_PAGES: Final = 1 << 20  # bytes from which on an array gets its own memory pages

# Places in the `state` of each tuple. They are counted, so that no two can overlap: first those that all tuples have,
# then a tuple's own. From HEADS on follow the free lists of blocks by size class.
#
# TOP     end of what was ever used: strings, records (in words of code), nodes
# FREE    first free row + 1, or 0
# COUNTED strings, records or nodes in use
TOP, FREE, COUNTED = range(3)
_OWN: Final = 3
HEADS: Final = 32
STATE_SIZE: Final = 96
# EVENTS  notifications sampled for the estimate of selectivity
VOCABULARY_STATE: Final = range(_OWN, _OWN + 6)
SEED, WORDS_TOP, ATTRIBUTE_TOP, ATTRIBUTE_FREE, ATTRIBUTES, EVENTS = VOCABULARY_STATE
FILTERS_STATE: Final = range(_OWN, _OWN + 3)
SUBSCRIPTION_TOP, SUBSCRIPTION_FREE, SUBSCRIPTIONS = FILTERS_STATE
# GENERATION            0 or 1; records that are filed in this tree have the same generation
# LARGEST               most entries that a node has ever had; bounds the room that one insertion may need
# WANTED_…              room that an insertion or a split did not find
# BOUNDS_OUTSIDE_DOMAIN bounds of filters that lie outside the learned domain
TREE_STATE: Final = range(_OWN, _OWN + 12)
GENERATION, ENTRY_TOP, ENTRIES, DIMENSION_TOP, DIMENSION_FREE, ROUTES = TREE_STATE[:6]
CELLS_TOP, LARGEST, WANTED_NODES, WANTED_ENTRIES, BOUNDS_OUTSIDE_DOMAIN, NODES_FREED = TREE_STATE[6:]


class Vocabulary(NamedTuple):
    """Interned, counted strings. An operand is identified by its attribute and its bytes, a name by its bytes alone."""

    state: I64
    slots: U64  # hash table: [slot, (hash, id + 1 | attribute << 32 | length, at most 9, << 48)]
    strings: I32
    words: U64  # their bytes, the last word padded with zeros
    string_seen: I32  # how often sampled notifications carried it; readers race, and a lost count does no harm
    attributes: I32
    attribute_seen: I64


class Filters(NamedTuple):
    """Records of filters. Subscriptions with the same constraints share a record. See record_kernel for the layout."""

    state: I64
    slots: I32  # hash table of record offsets + 1
    code: U64
    subscription_slots: I32  # hash table of places + 1
    subscriptions: I32
    ids: I64


class Tree(NamedTuple):
    """Filed records. Invariant: a record is in exactly the nodes to which its constraints, in their order, lead."""

    state: I64
    token_nodes: I32  # the node of each string, or 0
    roots: I32
    cells: I32  # [row of an attribute, cell or bucket]: node, or 0
    sides: U64  # [row of an attribute, (up, down)]: a bit for each bucket that has a node
    domains: F64  # how the numbers of an attribute are quantised
    histogram: I32  # [attribute, bucket]: how often sampled notifications had a number there
    pattern_bits: U64  # a bit for each pattern that may exist; patterns can share a bit
    routes: U64  # hash table: [slot, (key, node)]
    nodes: I32
    node_keys: U64  # the key that leads to the node: odd for one in `routes`, even for a place in another array
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
    """Returns a tree that has only a root."""
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
    """Returns an array of zeros. A large one gets its own memory pages, which the system reclaims when it is freed."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if size < OWN_PAGES:
        return np.zeros(shape, dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype).reshape(shape)


def larger(array: Any, used: int, least: int) -> Any:
    """Returns a copy that is half as large again, with room for at least `least` rows.

    Only the used rows are written, so the system allocates no memory for the others yet."""
    copy = zeros((max(least, len(array) * 3 // 2), *array.shape[1:]), array.dtype)
    copy[:used] = array[:used]
    return copy
