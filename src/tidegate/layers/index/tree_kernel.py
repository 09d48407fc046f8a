"""The tree of the index: where a record is filed, and how it moves when a node grows too large.

The root files a record under its most selective constraint, by value: a string by its id, a number by its bits, an
interval by one or two cells, a prefix, suffix or part by some of its letters, anything else by the presence of the
attribute. A node that has grown too large files its entries on by their next constraint: first into a group for each
attribute, and from a group that has grown too large into nodes by value again. A notification walks only to what its
own attributes lead to, so it meets only records whose path it satisfies, each of them once: it has one value an
attribute, and one cell of each level.

Numbers are quantised to 16 bits, monotonously, by the domain that was learned from the bounds of filters on the
attribute, finer where there are more of them; until then by sign, six bits of exponent and nine of mantissa. Any
monotone map is right; a good one is fast.

Two different keys with one hash would share a node: every candidate is verified in full, so no filter is found wrongly.
"""

from __future__ import annotations

import numpy as np

from tidegate.layers.index import tables as t
from tidegate.layers.index.intrinsic_kernel import double_of, word_of
from tidegate.layers.index.memory_kernel import (
    GOLDEN,
    U,
    allocate,
    give_back,
    inlined,
    kernel,
    mix,
    release,
    size_class,
    take,
)
from tidegate.layers.index.record_kernel import (
    HEAD_WORDS,
    K_ABSENT,
    K_BOOLEAN,
    K_CONTAINS,
    K_EXISTS,
    K_INTERVAL,
    K_ONE_OF,
    K_PREFIX,
    K_STRING,
    attribute_in,
    boolean_in,
    has_constraints,
    is_last,
    is_point,
    kind_in,
    payload_in,
    words_in,
)
from tidegate.layers.index.vocabulary_kernel import close_hole, stored_bytes, string_length

SPLIT_ENTRIES = 96
GROUP_ENTRIES = 64
COARSEST_IN_GROUP = 2  # level of cells
# No node deeper than this splits, and a list is filed under each of its values at the root only: so a record is in at
# most (values of its list) x LEAVES_PER_ROUTE nodes, and an insertion needs a bounded number of new ones.
DEPTH_MAX = 3
LEAVES_PER_ROUTE = 1 << DEPTH_MAX
ROUTES_MAX = 260

# Kinds of routes that go through the hash table; bits of ROUTE_KINDS and KINDS.
R_NUMBER = 0
R_STRING = 1
R_BOOLEAN = 2
R_PREFIX = 3
R_SUFFIX = 4
R_GRAM = 5
R_CELL = 6  # and one more for each level, and one for buckets of one-sided intervals
R_SIDE = R_CELL + t.LEVELS
NARROW = 3  # level of cells from which on a one-sided interval is filed like any other
SIDE_SHIFT = 10

# Even keys say where a node is noted: type << 1 | index << 3.
AT_TOKEN = 0
AT_ROOT = 1
AT_CELL = 2
AT_GROUP = 3

LETTERS_MAX = 8  # of a prefix or suffix that are looked at to find it
GRAM_MAX = 4
SUFFIX_BITS = 8
GRAM_BITS = 16

GUARDED_ATTRIBUTES = 1 << 10
GUARD_ALWAYS = U(2047)


@inlined
def quantise(domains: t.F64, about: int, number: float) -> int:
    """A monotone map of doubles to 0..65535."""
    if domains[about, t.IS_LEARNED] == 0.0:
        return quantise_unlearned(number)
    segment = 8 * (number >= domains[about, t.SEGMENT_STARTS + 8])
    segment += 4 * (number >= domains[about, t.SEGMENT_STARTS + 4 + segment])
    segment += 2 * (number >= domains[about, t.SEGMENT_STARTS + 2 + segment])
    segment += 1 * (number >= domains[about, t.SEGMENT_STARTS + 1 + segment])
    place = (number - domains[about, t.SEGMENT_STARTS + segment]) * domains[about, t.SEGMENT_SCALES + segment]
    # Written so that it is 0 for the NaN of an infinite number in a segment without width.
    return t.SEGMENT_PLACES * segment + (np.int64(min(place, t.SEGMENT_PLACES - 1.0)) if place > 0.0 else 0)


@inlined
def quantise_unlearned(number: float) -> int:
    bits = np.int64(word_of(abs(number)))
    exponent = (bits >> 52) - (1023 - 31)
    if exponent < 0:
        magnitude = np.int64(0)
    elif exponent > 63:
        magnitude = np.int64(0x7FFF)
    else:
        magnitude = (exponent << 9) | ((bits >> 43) & 0x1FF)
    return 0x8000 + magnitude if number >= 0.0 else 0x7FFF - magnitude


@inlined
def route_key(parent: int, kind: int, about: int, value: int) -> int:
    return mix(U(value) * GOLDEN + (U(parent) << U(24) ^ U(about) << U(8) ^ U(kind)) * U(0xD6E8FEB86659FD93)) | U(1)


@inlined
def noted_key(where: int, index: int) -> int:
    return U(where) << U(1) | U(index) << U(3)


@inlined
def find_route(routes: t.U64, key: int) -> int:
    """The node of a key, or 0."""
    mask = routes.shape[0] - 1
    position = np.int64(key & U(mask))
    while True:
        found = routes[position, 0]
        if found == key:
            return np.int64(routes[position, 1])
        if found == U(0):
            return np.int64(0)
        position = (position + 1) & mask


@inlined
def node_of(tree: t.Tree, key: int) -> int:
    """The node that a key leads to, or 0."""
    if key & U(1):
        return find_route(tree.routes, key)
    where, index = np.int64(key >> U(1)) & 3, np.int64(key >> U(3))
    if where == AT_TOKEN:
        return np.int64(tree.token_nodes[index])
    if where == AT_ROOT:
        return np.int64(tree.roots[index >> 3, index & 7])
    return np.int64(tree.cells[index >> t.CELL_BITS, index & ((1 << t.CELL_BITS) - 1)])


@inlined
def note_node(tree: t.Tree, key: int, node: int) -> None:
    """Makes a key lead to a node, or to none with 0."""
    if key & U(1):
        if node == 0:
            erase_route(tree.routes, key)
            tree.state[t.ROUTES] -= 1
        else:
            put_route(tree.routes, key, node)
            tree.state[t.ROUTES] += 1
        return
    where, index = np.int64(key >> U(1)) & 3, np.int64(key >> U(3))
    if where == AT_TOKEN:
        tree.token_nodes[index] = node
    elif where == AT_ROOT:
        tree.roots[index >> 3, index & 7] = node
    elif where == AT_CELL:
        row, cell = index >> t.CELL_BITS, index & ((1 << t.CELL_BITS) - 1)
        tree.cells[row, cell] = node
        if cell >= t.SIDES_BASE:
            note_side(tree.sides, row, cell - t.SIDES_BASE, node != 0)
    elif node == 0:
        drop_dimension(tree, index)


@inlined
def note_side(sides: t.U64, row: int, bucket: int, has_node: bool) -> None:
    bit = U(1) << U(bucket & 63)
    if has_node:
        sides[row, bucket >> 6] |= bit
    else:
        sides[row, bucket >> 6] &= ~bit


@kernel
def put_route(routes: t.U64, key: int, node: int) -> None:
    mask = routes.shape[0] - 1
    position = np.int64(key & U(mask))
    while routes[position, 1] != U(0):
        position = (position + 1) & mask
    routes[position, 0] = key
    routes[position, 1] = U(node)


@kernel
def erase_route(routes: t.U64, key: int) -> None:
    mask = routes.shape[0] - 1
    hole = np.int64(key & U(mask))
    while routes[hole, 0] != key:
        hole = (hole + 1) & mask
    close_hole(routes, hole)


@kernel
def refill_routes(routes: t.U64, old: t.U64) -> None:
    for k in range(old.shape[0]):
        if old[k, 1] != U(0):
            put_route(routes, old[k, 0], np.int64(old[k, 1]))


@inlined
def pattern_bit(about: int, kind: int, size: int, letters: int) -> int:
    """Where a pattern is noted in `pattern_bits`."""
    return np.int64(((letters ^ U(about << 8 | kind << 4 | size) * U(0xD6E8FEB86659FD93)) * GOLDEN) >> U(48))


@inlined
def gram_of(vocabulary: t.Vocabulary, string: int) -> tuple[int, int]:
    """(size, letters) of the part of a string that it is filed by: one of its grams that is the same every time, and
    seldom the first, which many strings share."""
    length = string_length(vocabulary, string)
    size = min(length, GRAM_MAX)
    chosen = stored_bytes(vocabulary, string, 0, size)
    for start in range(1, length - size + 1):
        gram = stored_bytes(vocabulary, string, start, size)
        if mix(gram) < mix(chosen):
            chosen = gram
    return size, chosen


@kernel
def routes_from_root(tree: t.Tree, vocabulary: t.Vocabulary, code: t.U64, at: int, keys: t.U64) -> int:
    """The keys of the nodes that the root files the constraint at `code[at]` by; 0 when it cannot be. Lets
    notifications know that there is a route of this kind, so that they look for it."""
    word = code[at]
    kind, about = kind_in(word), attribute_in(word)
    roots = tree.roots
    if kind == K_STRING:
        keys[0] = noted_key(AT_TOKEN, payload_in(word))
        return 1
    if kind == K_INTERVAL:
        if not is_point(code, at):
            return cell_routes(tree, code, at, keys)
        roots[about, t.ROUTE_KINDS] |= 1 << R_NUMBER
        keys[0] = route_key(0, R_NUMBER, about, code[at + 1])
        return 1
    if kind == K_BOOLEAN:
        keys[0] = noted_key(AT_ROOT, about * 8 + t.FALSE + boolean_in(word))
        return 1
    if kind == K_ONE_OF:
        return list_routes(tree, code, at, keys)
    if kind == K_ABSENT:
        return 0
    if kind >= K_PREFIX and string_length(vocabulary, payload_in(word)) > 0:
        keys[0] = pattern_route(tree, vocabulary, kind, about, payload_in(word))
        return 1
    keys[0] = noted_key(AT_ROOT, about * 8 + t.ANY)
    return 1


@inlined
def pattern_route(tree: t.Tree, vocabulary: t.Vocabulary, kind: int, about: int, string: int) -> int:
    length = string_length(vocabulary, string)
    size = min(length, LETTERS_MAX)
    if kind == K_PREFIX:
        route, letters, bits = R_PREFIX, stored_bytes(vocabulary, string, 0, size), size - 1
    elif kind == K_CONTAINS:
        size, letters = gram_of(vocabulary, string)
        route, bits = R_GRAM, GRAM_BITS + size - 1
    else:
        route, letters = R_SUFFIX, stored_bytes(vocabulary, string, length - size, size)
        bits = SUFFIX_BITS + size - 1
    tree.roots[about, t.ROUTE_KINDS] |= 1 << route
    tree.roots[about, t.PATTERN_SIZES] |= 1 << bits
    bit = pattern_bit(about, route, size, letters)
    tree.pattern_bits[bit >> 6] |= U(1) << U(bit & 63)
    return route_key(size, route, about, letters)


@inlined
def list_routes(tree: t.Tree, code: t.U64, at: int, keys: t.U64) -> int:
    word = code[at]
    about, numbers = attribute_in(word), payload_in(word) & 0x3FF
    count = words_in(word)
    if numbers > 0:
        tree.roots[about, t.ROUTE_KINDS] |= 1 << R_NUMBER
    for k in range(count):
        if k < numbers:
            keys[k] = route_key(0, R_NUMBER, about, code[at + 1 + k])
        else:
            keys[k] = noted_key(AT_TOKEN, code[at + 1 + k])
    for value in range(2):
        if (payload_in(word) >> (20 + value)) & 1:
            keys[count] = noted_key(AT_ROOT, about * 8 + t.FALSE + value)
            count += 1
    return count


@inlined
def cells_of(domains: t.F64, about: int, code: t.U64, at: int) -> tuple[int, int, int]:
    """(level, first, last) of one or two cells: of the finest level at which the interval spans no more."""
    first = quantise(domains, about, double_of(code[at + 1]))
    last = quantise(domains, about, double_of(code[at + 2]))
    level = t.LEVELS - 1
    shift = 16 - 2 * level
    while (last >> shift) - (first >> shift) > 1:
        level -= 1
        shift += 2
    return level, first >> shift, last >> shift


@inlined
def level_base(level: int) -> int:
    """The place of the first cell of a level: behind those of the coarser ones, of which there are 1, 4, 16, …"""
    return ((1 << (2 * level)) - 1) // 3


@inlined
def cell_routes(tree: t.Tree, code: t.U64, at: int, keys: t.U64) -> int:
    about = attribute_in(code[at])
    level, first, last = cells_of(tree.domains, about, code, at)
    row = np.int64(tree.roots[about, t.CELLS]) - 1
    if row < 0:
        row = tree.state[t.CELLS_TOP]
        tree.state[t.CELLS_TOP] += 1
        tree.roots[about, t.CELLS] = row + 1
    is_up, is_down = double_of(code[at + 2]) == np.inf, double_of(code[at + 1]) == -np.inf
    if level < NARROW and (is_up or is_down):
        tree.roots[about, t.ROUTE_KINDS] |= 1 << R_SIDE
        bound = quantise(tree.domains, about, double_of(code[at + 1 if is_up else at + 2])) >> SIDE_SHIFT
        keys[0] = noted_key(AT_CELL, (row << t.CELL_BITS) + t.SIDES_BASE + (0 if is_up else 64) + bound)
        return 1
    tree.roots[about, t.ROUTE_KINDS] |= 1 << (R_CELL + level)
    base = (row << t.CELL_BITS) + level_base(level)
    keys[0] = noted_key(AT_CELL, base + first)
    keys[1] = noted_key(AT_CELL, base + last)
    return 1 if first == last else 2


@inlined
def routes_from_group(tree: t.Tree, group: int, code: t.U64, at: int, keys: t.U64) -> tuple[int, int]:
    """(how many, bit of KINDS) of the nodes by value that a group files a constraint in; 0 when it stays in the group,
    as a broad interval does."""
    word = code[at]
    kind, about = kind_in(word), attribute_in(word)
    if kind == K_INTERVAL:
        if is_point(code, at):
            keys[0] = route_key(group, R_NUMBER, about, code[at + 1])
            return 1, 1 << R_NUMBER
        level, first, last = cells_of(tree.domains, about, code, at)
        if level < COARSEST_IN_GROUP:
            return 0, 0
        keys[0] = route_key(group, R_CELL + level, about, first)
        keys[1] = route_key(group, R_CELL + level, about, last)
        return (1 if first == last else 2), 1 << (R_CELL + level)
    if kind == K_STRING:
        keys[0] = route_key(group, R_STRING, about, payload_in(word))
        return 1, 1 << R_STRING
    if kind == K_BOOLEAN:
        keys[0] = route_key(group, R_BOOLEAN, about, boolean_in(word))
        return 1, 1 << R_BOOLEAN
    return 0, 0


@kernel
def make_node(tree: t.Tree, parent: int, depth: int, key: int) -> int:
    state, nodes = tree.state, tree.nodes
    node = take(nodes, state, t.TOP, t.FREE, t.START)
    nodes[node, t.START] = 0
    nodes[node, t.COUNT] = 0
    nodes[node, t.CAPACITY] = 0
    nodes[node, t.SPLIT] = 0
    nodes[node, t.DIMENSIONS] = -1
    nodes[node, t.CHILDREN] = 0
    nodes[node, t.DEPTH] = depth
    nodes[node, t.PARENT] = parent
    nodes[parent, t.CHILDREN] += 1
    tree.node_keys[node] = key
    state[t.COUNTED] += 1
    note_node(tree, key, node)
    return node


@kernel
def free_nodes(tree: t.Tree, node: int) -> None:
    """Frees a node that has neither entries nor children, and its parents that are so after it."""
    nodes, state = tree.nodes, tree.state
    while node != 0 and nodes[node, t.COUNT] == 0 and nodes[node, t.CHILDREN] == 0:
        if nodes[node, t.CAPACITY] > 0:
            release(tree.entries[:, t.GUARDS], state, np.int64(nodes[node, t.START]), np.int64(nodes[node, t.CAPACITY]))
        note_node(tree, tree.node_keys[node], 0)
        parent = np.int64(nodes[node, t.PARENT])
        nodes[parent, t.CHILDREN] -= 1
        give_back(nodes, state, t.FREE, t.START, node)
        state[t.COUNTED] -= 1
        state[t.NODES_FREED] += 1
        node = parent


@inlined
def find_dimension(tree: t.Tree, node: int, about: int) -> int:
    place = np.int64(tree.nodes[node, t.DIMENSIONS])
    while place >= 0 and tree.dimensions[place, t.ABOUT] != about:
        place = np.int64(tree.dimensions[place, t.FOLLOWING])
    return place


@kernel
def make_dimension(tree: t.Tree, node: int, about: int) -> int:
    """A new group of a split node."""
    dimensions = tree.dimensions
    place = take(dimensions, tree.state, t.DIMENSION_TOP, t.DIMENSION_FREE, t.FOLLOWING)
    dimensions[place, t.ABOUT] = about
    dimensions[place, t.KINDS] = 0
    dimensions[place, t.FOLLOWING] = tree.nodes[node, t.DIMENSIONS]
    tree.nodes[node, t.DIMENSIONS] = place
    depth = np.int64(tree.nodes[node, t.DEPTH])
    dimensions[place, t.GROUP] = make_node(tree, node, depth, noted_key(AT_GROUP, place))
    return place


@kernel
def drop_dimension(tree: t.Tree, place: int) -> None:
    """The group is gone: so is its place in the list of its node."""
    dimensions = tree.dimensions
    node = np.int64(tree.nodes[dimensions[place, t.GROUP], t.PARENT])
    following = dimensions[place, t.FOLLOWING]
    other = np.int64(tree.nodes[node, t.DIMENSIONS])
    if other == place:
        tree.nodes[node, t.DIMENSIONS] = following
    else:
        while dimensions[other, t.FOLLOWING] != place:
            other = np.int64(dimensions[other, t.FOLLOWING])
        dimensions[other, t.FOLLOWING] = following
    give_back(dimensions, tree.state, t.DIMENSION_FREE, t.FOLLOWING, place)


@inlined
def constraint_at(code: t.U64, record: int, depth: int) -> int:
    """Where the constraint number `depth` of a record starts, or -1 when it has no more."""
    if not has_constraints(code, record):
        return np.int64(-1)
    at = record + HEAD_WORDS
    for _ in range(depth):
        if is_last(code[at]):
            return np.int64(-1)
        at += 1 + words_in(code[at])
    return at


@inlined
def guard_of(tree: t.Tree, code: t.U64, at: int) -> int:
    """A conservative test of a constraint in 32 bits: its attribute (10 bits), the lowest of the attribute's
    quantised values that may satisfy it (11), and how many follow that may too (11)."""
    word = code[at]
    kind, about = kind_in(word), attribute_in(word)
    low, high = np.int64(0), np.int64(2047)
    if kind == K_INTERVAL:
        low = quantise(tree.domains, about, double_of(code[at + 1])) >> 5
        high = quantise(tree.domains, about, double_of(code[at + 2])) >> 5
    elif kind == K_STRING or kind == K_BOOLEAN:
        low = payload_in(word) & 2047
        high = low
    return U(about << 22 | low << 11 | (high - low))


@kernel
def write_guards(tree: t.Tree, code: t.U64, record: int, depth: int, place: int) -> None:
    """Guards an entry by three of the constraints after its path: those that a guard tests by value come before those
    of which it tests the presence. An interval that led here by a cell comes first: the cell is broader."""
    first, second, third = GUARD_ALWAYS, GUARD_ALWAYS, GUARD_ALWAYS
    chosen = 0
    if depth > 0:
        at = constraint_at(code, record, depth - 1)
        if kind_in(code[at]) == K_INTERVAL and not is_point(code, at) and attribute_in(code[at]) < GUARDED_ATTRIBUTES:
            first = guard_of(tree, code, at)
            chosen = 1
    for is_by_value in range(1, -1, -1):
        at = constraint_at(code, record, depth)
        while at >= 0 and chosen < 3:
            word = code[at]
            kind = kind_in(word)
            if (kind <= K_EXISTS) == is_by_value and kind != K_ABSENT and attribute_in(word) < GUARDED_ATTRIBUTES:
                first, second, third = guard_of(tree, code, at), first, second
                chosen += 1
            if is_last(word):
                break
            at += 1 + words_in(word)
    if chosen == 3:
        first, third = third, first
    tree.entries[place, t.GUARDS] = first | second << U(32)
    tree.entries[place, t.FILED] = U(record) | third << U(32)


@inlined
def record_at(entries: t.U64, place: int) -> int:
    return np.int64(entries[place, t.FILED] & U(0xFFFFFFFF))


@inlined
def copy_entry(entries: t.U64, source: int, target: int) -> None:
    entries[target, t.GUARDS] = entries[source, t.GUARDS]
    entries[target, t.FILED] = entries[source, t.FILED]


@kernel
def append(tree: t.Tree, code: t.U64, node: int, record: int) -> None:
    nodes, state = tree.nodes, tree.state
    count, capacity = np.int64(nodes[node, t.COUNT]), np.int64(nodes[node, t.CAPACITY])
    if count == capacity:
        _class, larger = size_class(capacity + max(capacity // 2, 1))
        start = allocate(tree.entries[:, t.GUARDS], state, t.ENTRY_TOP, larger)
        old = np.int64(nodes[node, t.START])
        for k in range(count):
            copy_entry(tree.entries, old + k, start + k)
        if capacity > 0:
            release(tree.entries[:, t.GUARDS], state, old, capacity)
        nodes[node, t.START] = start
        nodes[node, t.CAPACITY] = larger
    place = np.int64(nodes[node, t.START]) + count
    write_guards(tree, code, record, np.int64(nodes[node, t.DEPTH]), place)
    nodes[node, t.COUNT] = count + 1
    state[t.ENTRIES] += 1
    state[t.LARGEST] = max(state[t.LARGEST], count + 1)


@inlined
def is_never(code: t.U64, at: int) -> bool:
    """An interval that nothing lies in: the filter never matches, and is filed nowhere."""
    return kind_in(code[at]) == K_INTERVAL and double_of(code[at + 1]) > double_of(code[at + 2])


@inlined
def has_room(tree: t.Tree, nodes: int, entries: int) -> bool:
    """Room for so many new nodes and entries in the arrays? What is wanted is noted, for Python to grow them."""
    state = tree.state
    if (
        state[t.TOP] + nodes <= tree.nodes.shape[0]
        and state[t.DIMENSION_TOP] + nodes <= tree.dimensions.shape[0]
        and state[t.ENTRY_TOP] + entries <= tree.entries.shape[0]
        and 2 * (state[t.ROUTES] + nodes) <= tree.routes.shape[0]
        and state[t.CELLS_TOP] < tree.cells.shape[0]
    ):
        return True
    state[t.WANTED_NODES] = max(state[t.WANTED_NODES], nodes)
    state[t.WANTED_ENTRIES] = max(state[t.WANTED_ENTRIES], entries)
    return False


@kernel
def has_room_for(tree: t.Tree, routes: int) -> bool:
    """Room to file a record with so many routes from the root."""
    leaves = max(routes, 1) * LEAVES_PER_ROUTE
    return has_room(tree, 3 * leaves, leaves * 2 * max(tree.state[t.LARGEST], SPLIT_ENTRIES))


@kernel
def insert(tree: t.Tree, vocabulary: t.Vocabulary, code: t.U64, record: int, stack: t.I64, keys: t.U64) -> None:
    """Files a record."""
    at = constraint_at(code, record, 0)
    if at >= 0 and is_never(code, at):
        return
    count = routes_from_root(tree, vocabulary, code, at, keys) if at >= 0 else 0
    if count == 0:
        append(tree, code, 0, record)
        return
    for k in range(count):
        node = node_of(tree, keys[k])
        if node == 0:
            node = make_node(tree, 0, 1, keys[k])
        stack[k] = node
    while count > 0:
        count -= 1
        node = stack[count]
        if tree.nodes[node, t.SPLIT]:
            place = group_of(tree, code, node, record, True)
            if place >= 0:
                group = np.int64(tree.dimensions[place, t.GROUP])
                if tree.nodes[group, t.SPLIT]:
                    at = constraint_at(code, record, np.int64(tree.nodes[group, t.DEPTH]))
                    found, kind = routes_from_group(tree, group, code, at, keys)
                    for k in range(found):
                        stack[count + k] = value_node(tree, place, kind, keys[k])
                    count += found
                    if found > 0:
                        continue
                append(tree, code, group, record)
                if tree.nodes[group, t.COUNT] >= GROUP_ENTRIES:
                    split_group(tree, code, place, keys)
                continue
        append(tree, code, node, record)
        if tree.nodes[node, t.COUNT] >= SPLIT_ENTRIES:
            split_node(tree, code, node, keys)


@inlined
def group_of(tree: t.Tree, code: t.U64, node: int, record: int, is_made: bool) -> int:
    """The place in `dimensions` of the group of a split node that a record belongs to, or -1 if it stays."""
    at = constraint_at(code, record, np.int64(tree.nodes[node, t.DEPTH]))
    if at < 0 or kind_in(code[at]) == K_ABSENT:
        return np.int64(-1)
    place = find_dimension(tree, node, attribute_in(code[at]))
    if place < 0 and is_made:
        place = make_dimension(tree, node, attribute_in(code[at]))
    return place


@inlined
def value_node(tree: t.Tree, place: int, kind: int, key: int) -> int:
    """The node by value that a group files a record in."""
    node = find_route(tree.routes, key)
    if node == 0:
        group = np.int64(tree.dimensions[place, t.GROUP])
        node = make_node(tree, group, np.int64(tree.nodes[group, t.DEPTH]) + 1, key)
        tree.dimensions[place, t.KINDS] |= kind
    return node


@kernel
def split_node(tree: t.Tree, code: t.U64, node: int, keys: t.U64) -> None:
    """Files the entries of a node that has grown too large into groups, those that can be."""
    nodes = tree.nodes
    count = np.int64(nodes[node, t.COUNT])
    if nodes[node, t.SPLIT] or nodes[node, t.DEPTH] >= DEPTH_MAX or not has_room(tree, 2 * count, 4 * count):
        return
    nodes[node, t.SPLIT] = 1
    start = np.int64(nodes[node, t.START])
    kept = 0
    for k in range(count):
        record = record_at(tree.entries, start + k)
        place = group_of(tree, code, node, record, True)
        if place >= 0:
            append(tree, code, np.int64(tree.dimensions[place, t.GROUP]), record)
            tree.state[t.ENTRIES] -= 1
        else:
            copy_entry(tree.entries, start + k, start + kept)
            kept += 1
    nodes[node, t.COUNT] = kept
    place = np.int64(nodes[node, t.DIMENSIONS])
    while place >= 0:
        if nodes[tree.dimensions[place, t.GROUP], t.COUNT] >= GROUP_ENTRIES:
            split_group(tree, code, place, keys)
        place = np.int64(tree.dimensions[place, t.FOLLOWING])


@kernel
def split_group(tree: t.Tree, code: t.U64, place: int, keys: t.U64) -> None:
    """Files the entries of a group that has grown too large into nodes by value, those that can be."""
    nodes = tree.nodes
    group = np.int64(tree.dimensions[place, t.GROUP])
    count = np.int64(nodes[group, t.COUNT])
    if nodes[group, t.SPLIT] or not has_room(tree, 2 * count, 4 * count):
        return
    nodes[group, t.SPLIT] = 1
    start = np.int64(nodes[group, t.START])
    kept = 0
    for k in range(count):
        record = record_at(tree.entries, start + k)
        at = constraint_at(code, record, np.int64(nodes[group, t.DEPTH]))
        found, kind = routes_from_group(tree, group, code, at, keys)
        for j in range(found):
            append(tree, code, value_node(tree, place, kind, keys[j]), record)
        if found > 0:
            tree.state[t.ENTRIES] -= 1
        else:
            copy_entry(tree.entries, start + k, start + kept)
            kept += 1
    nodes[group, t.COUNT] = kept


@kernel
def remove(tree: t.Tree, vocabulary: t.Vocabulary, code: t.U64, record: int, stack: t.I64, keys: t.U64) -> None:
    """Takes a record out of every node that has it."""
    at = constraint_at(code, record, 0)
    if at >= 0 and is_never(code, at):
        return
    count = routes_from_root(tree, vocabulary, code, at, keys) if at >= 0 else 0
    if count == 0:
        drop(tree, 0, record)
        return
    for k in range(count):
        stack[k] = node_of(tree, keys[k])
    while count > 0:
        count -= 1
        node = stack[count]
        if tree.nodes[node, t.SPLIT]:
            place = group_of(tree, code, node, record, False)
            if place >= 0:
                node = np.int64(tree.dimensions[place, t.GROUP])
                if tree.nodes[node, t.SPLIT]:
                    at = constraint_at(code, record, np.int64(tree.nodes[node, t.DEPTH]))
                    found, _kind = routes_from_group(tree, node, code, at, keys)
                    for k in range(found):
                        stack[count + k] = find_route(tree.routes, keys[k])
                    count += found
                    if found > 0:
                        continue
        drop(tree, node, record)


@kernel
def drop(tree: t.Tree, node: int, record: int) -> None:
    nodes = tree.nodes
    start, count = np.int64(nodes[node, t.START]), np.int64(nodes[node, t.COUNT])
    for k in range(start, start + count):
        if record_at(tree.entries, k) == record:
            copy_entry(tree.entries, start + count - 1, k)
            nodes[node, t.COUNT] = count - 1
            tree.state[t.ENTRIES] -= 1
            if count == 1:
                free_nodes(tree, node)
            return
