"""The tree of the index: where a record is filed, and how records move when a node grows too large.

The root files a record under its most selective constraint, by value: a string by its id, a number by its bits, an
interval by one or two cells, a prefix, suffix or substring by some of its letters. All other constraints are filed by
the presence of their attribute.

A node that grows too large files its entries by their next constraint: first into one group per attribute. A group that
grows too large files its entries into nodes by value. A notification visits only nodes that its own attributes lead to,
so it meets only records whose path it satisfies. It meets each of them once, since it has one value per attribute, and
that value lies in one cell of each level.

Numbers are quantised to 16 bits by a monotone map. The map follows the domain learned from the bounds of the
attribute's filters, and is finer where there are more bounds. Without a learned domain it uses the sign, six bits of
the exponent and nine of the mantissa. Any monotone map gives correct results; a good one is fast.

Two different keys with the same hash would share a node. This is harmless, since every candidate is verified in full.
"""

from __future__ import annotations

import numpy as np

from tidegate.index import tables as t
from tidegate.index.hash_table_kernel import erase_pair, home_of, put_pair, slot_after
from tidegate.index.memory_kernel import GOLDEN, MIXER, allocate, give_back, mix, release, size_class, take
from tidegate.index.record_kernel import (
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
    list_counts,
    payload_in,
    words_in,
)
from tidegate.index.vocabulary_kernel import stored_bytes, string_length
from tidegate.kernels.bytes_kernel import LOWER_HALF, U
from tidegate.kernels.cache import inlined, kernel
from tidegate.kernels.intrinsic_kernel import double_of, word_of

SPLIT_ENTRIES = 96  # a node with this many entries is split
GROUP_ENTRIES = 64  # a group with this many entries is split
COARSEST_IN_GROUP = 2  # level of cells; broader intervals stay in the group
# Nodes at this depth do not split, and only the root files a list under each of its values. So a record is in at most
# (values of its list) x LEAVES_PER_ROUTE nodes, and an insertion needs a bounded number of new nodes.
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
R_CELL = 6  # the first of one kind per level; the kind after them is for buckets of one-sided intervals
R_SIDE = R_CELL + t.LEVELS
NARROW = 3  # from this level of cells on, a one-sided interval is filed like any other
SIDE_SHIFT = 10  # from a quantised bound to its bucket

# Even keys name the array and the place that hold the number of a node: type << KEY_TYPE_SHIFT | index <<
# KEY_INDEX_SHIFT. The index of a root's route is attribute << ROOT_BITS | column.
KEY_TYPE_SHIFT = 1
KEY_INDEX_SHIFT = 3
KEY_TYPE_MASK = 7  # of the type and the lowest bit, which is 0
ROOT_BITS = 3
ROOT_MASK = (1 << ROOT_BITS) - 1
CELL_MASK = (1 << t.CELL_BITS) - 1
AT_TOKEN = 0
AT_ROOT = 1
AT_CELL = 2
AT_GROUP = 3

LETTERS_MAX = 8  # bytes of a prefix or suffix that its route depends on
GRAM_MAX = 4
SUFFIX_BITS = 8
GRAM_BITS = 16

# A guard has 32 bits: attribute (10) · lowest value that passes (11) · how many of the values after it pass too (11).
GUARD_VALUE_BITS = 11
GUARD_VALUE_MASK = (1 << GUARD_VALUE_BITS) - 1
GUARD_ATTRIBUTE_SHIFT = 2 * GUARD_VALUE_BITS
GUARDED_ATTRIBUTES = 1 << 10
GUARD_SHIFT = 5  # from a quantised value to the value that a guard tests
GUARD_ALWAYS = U(GUARD_VALUE_MASK)


@inlined
def quantise(domains: t.F64, attribute: int, number: float) -> int:
    """Maps a double to 0..65535, monotonically."""
    if domains[attribute, t.IS_LEARNED] == 0.0:
        return quantise_unlearned(number)
    segment = 8 * (number >= domains[attribute, t.SEGMENT_STARTS + 8])
    segment += 4 * (number >= domains[attribute, t.SEGMENT_STARTS + 4 + segment])
    segment += 2 * (number >= domains[attribute, t.SEGMENT_STARTS + 2 + segment])
    segment += 1 * (number >= domains[attribute, t.SEGMENT_STARTS + 1 + segment])
    place = (number - domains[attribute, t.SEGMENT_STARTS + segment]) * domains[attribute, t.SEGMENT_SCALES + segment]
    # The comparison also gives 0 for NaN, which results from an infinite number in a segment without width.
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
def route_key(parent: int, kind: int, attribute: int, value: int) -> int:
    # The lowest bit makes the key odd: it differs from the keys of `noted_key`, and from 0, which marks an empty slot.
    return mix(U(value) * GOLDEN + (U(parent) << U(24) ^ U(attribute) << U(8) ^ U(kind)) * MIXER) | U(1)


@inlined
def noted_key(where: int, index: int) -> int:
    return U(where) << U(KEY_TYPE_SHIFT) | U(index) << U(KEY_INDEX_SHIFT)


@inlined
def root_key(attribute: int, column: int) -> int:
    return noted_key(AT_ROOT, attribute << ROOT_BITS | column)


@inlined
def place_in(key: int) -> tuple[int, int]:
    """Returns (type, index) of an even key."""
    return np.int64(key & U(KEY_TYPE_MASK)) >> KEY_TYPE_SHIFT, np.int64(key >> U(KEY_INDEX_SHIFT))


@inlined
def find_route(routes: t.U64, key: int) -> int:
    """Returns the node of a key in the hash table, or 0."""
    position = home_of(routes, key)
    while True:
        found = routes[position, 0]
        if found == key:
            return np.int64(routes[position, 1])
        if found == U(0):
            return np.int64(0)
        position = slot_after(routes, position)


@inlined
def node_of(tree: t.Tree, key: int) -> int:
    """Returns the node that a key of either kind leads to, or 0."""
    if key & U(1):
        return find_route(tree.routes, key)
    where, index = place_in(key)
    if where == AT_TOKEN:
        return np.int64(tree.token_nodes[index])
    if where == AT_ROOT:
        return np.int64(tree.roots[index >> ROOT_BITS, index & ROOT_MASK])
    return np.int64(tree.cells[index >> t.CELL_BITS, index & CELL_MASK])


@inlined
def note_node(tree: t.Tree, key: int, node: int) -> None:
    """Makes a key lead to a node, or to no node if `node` is 0."""
    if key & U(1):
        if node == 0:
            erase_pair(tree.routes, key, U(find_route(tree.routes, key)))
            tree.state[t.ROUTES] -= 1
        else:
            put_pair(tree.routes, key, U(node))
            tree.state[t.ROUTES] += 1
        return
    where, index = place_in(key)
    if where == AT_TOKEN:
        tree.token_nodes[index] = node
    elif where == AT_ROOT:
        tree.roots[index >> ROOT_BITS, index & ROOT_MASK] = node
    elif where == AT_CELL:
        row, cell = index >> t.CELL_BITS, index & CELL_MASK
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


@inlined
def pattern_bit(attribute: int, kind: int, size: int, letters: int) -> int:
    """Returns the position of a pattern's bit in `pattern_bits`."""
    return np.int64(((letters ^ U(attribute << 8 | kind << 4 | size) * MIXER) * GOLDEN) >> U(48))


@inlined
def gram_of(vocabulary: t.Vocabulary, string: int) -> tuple[int, int]:
    """Returns (size, letters) of the gram by which a substring pattern is filed.

    It is the gram with the smallest hash: always the same one, but seldom the first, which many strings share."""
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
    """Writes the keys of the nodes in which the root files the constraint at `code[at]`. Returns how many there are.

    Returns 0 if no route leads to the constraint: the record then stays in the root. Also sets the bits by which
    matching knows that a route of this kind exists."""
    word = code[at]
    kind, attribute = kind_in(word), attribute_in(word)
    roots = tree.roots
    if kind == K_STRING:
        keys[0] = noted_key(AT_TOKEN, payload_in(word))
        return 1
    if kind == K_INTERVAL:
        if not is_point(code, at):
            return cell_routes(tree, code, at, keys)
        roots[attribute, t.ROUTE_KINDS] |= 1 << R_NUMBER
        keys[0] = route_key(0, R_NUMBER, attribute, code[at + 1])
        return 1
    if kind == K_BOOLEAN:
        keys[0] = root_key(attribute, t.FALSE + boolean_in(word))
        return 1
    if kind == K_ONE_OF:
        return list_routes(tree, code, at, keys)
    if kind == K_ABSENT:
        return 0
    if kind >= K_PREFIX and string_length(vocabulary, payload_in(word)) > 0:
        keys[0] = pattern_route(tree, vocabulary, kind, attribute, payload_in(word))
        return 1
    keys[0] = root_key(attribute, t.ANY)
    return 1


@inlined
def pattern_route(tree: t.Tree, vocabulary: t.Vocabulary, kind: int, attribute: int, string: int) -> int:
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
    tree.roots[attribute, t.ROUTE_KINDS] |= 1 << route
    tree.roots[attribute, t.PATTERN_SIZES] |= 1 << bits
    bit = pattern_bit(attribute, route, size, letters)
    tree.pattern_bits[bit >> 6] |= U(1) << U(bit & 63)
    return route_key(size, route, attribute, letters)


@inlined
def list_routes(tree: t.Tree, code: t.U64, at: int, keys: t.U64) -> int:
    word = code[at]
    attribute, count = attribute_in(word), words_in(word)
    numbers, _strings, booleans = list_counts(word)
    if numbers > 0:
        tree.roots[attribute, t.ROUTE_KINDS] |= 1 << R_NUMBER
    for k in range(count):
        if k < numbers:
            keys[k] = route_key(0, R_NUMBER, attribute, code[at + 1 + k])
        else:
            keys[k] = noted_key(AT_TOKEN, code[at + 1 + k])
    for value in range(2):
        if (booleans >> value) & 1:
            keys[count] = root_key(attribute, t.FALSE + value)
            count += 1
    return count


@inlined
def cells_of(domains: t.F64, attribute: int, code: t.U64, at: int) -> tuple[int, int, int]:
    """Returns (level, first cell, last cell) for the finest level at which the interval spans at most two cells."""
    first = quantise(domains, attribute, double_of(code[at + 1]))
    last = quantise(domains, attribute, double_of(code[at + 2]))
    level = t.LEVELS - 1
    shift = 16 - 2 * level
    while (last >> shift) - (first >> shift) > 1:
        level -= 1
        shift += 2
    return level, first >> shift, last >> shift


@inlined
def level_base(level: int) -> int:
    """Returns the place of the first cell of a level. The coarser levels, with 1, 4, 16, … cells, come before it."""
    return ((1 << (2 * level)) - 1) // 3


@inlined
def hashed_cell_routes(tree: t.Tree, attribute: int, level: int, first: int, last: int, keys: t.U64) -> int:
    """Writes the keys of cells for an attribute without a row: slower to find, but empty cells take no memory."""
    tree.roots[attribute, t.ROUTE_KINDS] |= 1 << (R_CELL + level)
    keys[0] = route_key(0, R_CELL + level, attribute, first)
    keys[1] = route_key(0, R_CELL + level, attribute, last)
    return 1 if first == last else 2


@inlined
def cell_routes(tree: t.Tree, code: t.U64, at: int, keys: t.U64) -> int:
    attribute = attribute_in(code[at])
    level, first, last = cells_of(tree.domains, attribute, code, at)
    row = np.int64(tree.roots[attribute, t.CELLS]) - 1
    if row < 0:
        if tree.state[t.CELLS_TOP] >= t.CELL_ROWS_MAX:  # stays true for the lifetime of this tree
            return hashed_cell_routes(tree, attribute, level, first, last, keys)
        row = tree.state[t.CELLS_TOP]
        tree.state[t.CELLS_TOP] += 1
        tree.roots[attribute, t.CELLS] = row + 1
    is_up, is_down = double_of(code[at + 2]) == np.inf, double_of(code[at + 1]) == -np.inf
    if level < NARROW and (is_up or is_down):
        tree.roots[attribute, t.ROUTE_KINDS] |= 1 << R_SIDE
        bound = quantise(tree.domains, attribute, double_of(code[at + 1 if is_up else at + 2])) >> SIDE_SHIFT
        keys[0] = noted_key(AT_CELL, (row << t.CELL_BITS) + t.SIDES_BASE + (0 if is_up else 64) + bound)
        return 1
    tree.roots[attribute, t.ROUTE_KINDS] |= 1 << (R_CELL + level)
    base = (row << t.CELL_BITS) + level_base(level)
    keys[0] = noted_key(AT_CELL, base + first)
    keys[1] = noted_key(AT_CELL, base + last)
    return 1 if first == last else 2


@inlined
def routes_from_group(tree: t.Tree, group: int, code: t.U64, at: int, keys: t.U64) -> tuple[int, int]:
    """Writes the keys of the nodes by value in which a group files a constraint. Returns (how many, bit of KINDS).

    Returns 0 nodes for a constraint that stays in the group, such as a broad interval."""
    word = code[at]
    kind, attribute = kind_in(word), attribute_in(word)
    if kind == K_INTERVAL:
        if is_point(code, at):
            keys[0] = route_key(group, R_NUMBER, attribute, code[at + 1])
            return 1, 1 << R_NUMBER
        level, first, last = cells_of(tree.domains, attribute, code, at)
        if level < COARSEST_IN_GROUP:
            return 0, 0
        keys[0] = route_key(group, R_CELL + level, attribute, first)
        keys[1] = route_key(group, R_CELL + level, attribute, last)
        return (1 if first == last else 2), 1 << (R_CELL + level)
    if kind == K_STRING:
        keys[0] = route_key(group, R_STRING, attribute, payload_in(word))
        return 1, 1 << R_STRING
    if kind == K_BOOLEAN:
        keys[0] = route_key(group, R_BOOLEAN, attribute, boolean_in(word))
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
    """Frees a node that has neither entries nor children, and then each parent that is left without both."""
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
def find_dimension(tree: t.Tree, node: int, attribute: int) -> int:
    place = np.int64(tree.nodes[node, t.DIMENSIONS])
    while place >= 0 and tree.dimensions[place, t.BY_ATTRIBUTE] != attribute:
        place = np.int64(tree.dimensions[place, t.FOLLOWING])
    return place


@kernel
def make_dimension(tree: t.Tree, node: int, attribute: int) -> int:
    """Makes a new group of a split node. Returns its place in `dimensions`."""
    dimensions = tree.dimensions
    place = take(dimensions, tree.state, t.DIMENSION_TOP, t.DIMENSION_FREE, t.FOLLOWING)
    dimensions[place, t.BY_ATTRIBUTE] = attribute
    dimensions[place, t.KINDS] = 0
    dimensions[place, t.FOLLOWING] = tree.nodes[node, t.DIMENSIONS]
    tree.nodes[node, t.DIMENSIONS] = place
    depth = np.int64(tree.nodes[node, t.DEPTH])
    dimensions[place, t.GROUP] = make_node(tree, node, depth, noted_key(AT_GROUP, place))
    return place


@kernel
def drop_dimension(tree: t.Tree, place: int) -> None:
    """Removes a freed group from the list of its node."""
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
    """Returns where constraint number `depth` of a record starts, or -1 if the record has fewer constraints."""
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
    """Returns a conservative test of a constraint."""
    word = code[at]
    kind, attribute = kind_in(word), attribute_in(word)
    low, high = np.int64(0), np.int64(GUARD_VALUE_MASK)
    if kind == K_INTERVAL:
        low = quantise(tree.domains, attribute, double_of(code[at + 1])) >> GUARD_SHIFT
        high = quantise(tree.domains, attribute, double_of(code[at + 2])) >> GUARD_SHIFT
    elif kind == K_STRING or kind == K_BOOLEAN:
        low = payload_in(word) & GUARD_VALUE_MASK
        high = low
    return U(attribute << GUARD_ATTRIBUTE_SHIFT | low << GUARD_VALUE_BITS | (high - low))


@kernel
def write_guards(tree: t.Tree, code: t.U64, record: int, depth: int, place: int) -> None:
    """Writes the guards of an entry, for up to three of the constraints after its path.

    Kinds up to K_EXISTS come first; of the other kinds a guard tests only whether the attribute is present. If the last
    step of the path was a cell, its interval is chosen before all others: the cell is broader than the interval."""
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
    return np.int64(entries[place, t.FILED] & LOWER_HALF)


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
def is_empty_interval(code: t.U64, at: int) -> bool:
    """Returns whether a constraint is an empty interval. Such a filter never matches, and is filed nowhere."""
    return kind_in(code[at]) == K_INTERVAL and double_of(code[at + 1]) > double_of(code[at + 2])


@inlined
def has_room(tree: t.Tree, nodes: int, entries: int) -> bool:
    """Returns whether the arrays have room for this many new nodes and entries. If not, records how much is wanted."""
    state = tree.state
    if (
        state[t.TOP] + nodes <= tree.nodes.shape[0]
        and state[t.DIMENSION_TOP] + nodes <= tree.dimensions.shape[0]
        and state[t.ENTRY_TOP] + entries <= tree.entries.shape[0]
        and 2 * (state[t.ROUTES] + nodes) <= tree.routes.shape[0]
        and (state[t.CELLS_TOP] < tree.cells.shape[0] or state[t.CELLS_TOP] >= t.CELL_ROWS_MAX)
    ):
        return True
    state[t.WANTED_NODES] = max(state[t.WANTED_NODES], nodes)
    state[t.WANTED_ENTRIES] = max(state[t.WANTED_ENTRIES], entries)
    return False


@kernel
def has_room_for(tree: t.Tree, routes: int) -> bool:
    """Returns whether the arrays have room to file a record with this many routes from the root."""
    leaves = max(routes, 1) * LEAVES_PER_ROUTE
    return has_room(tree, 3 * leaves, leaves * 2 * max(tree.state[t.LARGEST], SPLIT_ENTRIES))


@kernel
def find_leaves(tree: t.Tree, vocabulary: t.Vocabulary, code: t.U64, record: int, leaves: t.I64, keys: t.U64) -> int:
    """Writes the nodes to which the constraints of a record lead to `leaves`. Returns how many there are.

    Makes nodes that do not exist. For a record that is filed already, all of them exist: they hold it."""
    at = constraint_at(code, record, 0)
    if at >= 0 and is_empty_interval(code, at):
        return 0
    count = routes_from_root(tree, vocabulary, code, at, keys) if at >= 0 else 0
    if count == 0:
        leaves[0] = 0
        return 1
    for k in range(count):
        node = node_of(tree, keys[k])
        leaves[k] = node if node != 0 else make_node(tree, 0, 1, keys[k])
    k = 0
    while k < count:
        # A split node is replaced by the nodes to which it leads, unless the record stays in it.
        node, found = leaves[k], 0
        if tree.nodes[node, t.SPLIT]:
            place = place_of_group(tree, node)
            if place < 0:
                place = group_of(tree, code, node, record)
                if place >= 0:
                    found, leaves[k] = 1, tree.dimensions[place, t.GROUP]
            else:
                at = constraint_at(code, record, np.int64(tree.nodes[node, t.DEPTH]))
                found, kind = routes_from_group(tree, node, code, at, keys)
                for j in range(found):
                    leaves[k if j == 0 else count + j - 1] = value_node(tree, place, kind, keys[j])
        if found == 0:
            k += 1
        else:
            count += found - 1
    return count


@kernel
def insert(tree: t.Tree, vocabulary: t.Vocabulary, code: t.U64, record: int, leaves: t.I64, keys: t.U64) -> None:
    """Files a record in every node to which its constraints lead, and splits nodes that grow too large."""
    for k in range(find_leaves(tree, vocabulary, code, record, leaves, keys)):
        node = leaves[k]
        append(tree, code, node, record)
        place = place_of_group(tree, node)
        if place >= 0:
            if tree.nodes[node, t.COUNT] >= GROUP_ENTRIES:
                split_group(tree, code, place, keys)
        elif node != 0 and tree.nodes[node, t.COUNT] >= SPLIT_ENTRIES:
            split_node(tree, code, node, keys)


@kernel
def remove(tree: t.Tree, vocabulary: t.Vocabulary, code: t.U64, record: int, leaves: t.I64, keys: t.U64) -> None:
    """Removes a record from every node that holds it."""
    for k in range(find_leaves(tree, vocabulary, code, record, leaves, keys)):
        drop(tree, leaves[k], record)


@inlined
def group_of(tree: t.Tree, code: t.U64, node: int, record: int) -> int:
    """Returns the place in `dimensions` of the group that a record of a split node belongs to, or -1 if it stays."""
    at = constraint_at(code, record, np.int64(tree.nodes[node, t.DEPTH]))
    if at < 0 or kind_in(code[at]) == K_ABSENT:
        return np.int64(-1)
    place = find_dimension(tree, node, attribute_in(code[at]))
    return place if place >= 0 else make_dimension(tree, node, attribute_in(code[at]))


@inlined
def place_of_group(tree: t.Tree, node: int) -> int:
    """Returns the place in `dimensions` of a group, or -1 for a node by value and for the root."""
    key = tree.node_keys[node]
    return np.int64(key >> U(KEY_INDEX_SHIFT)) if key & U(KEY_TYPE_MASK) == noted_key(AT_GROUP, 0) else np.int64(-1)


@inlined
def value_node(tree: t.Tree, place: int, kind: int, key: int) -> int:
    """Returns the node by value for a key of a group, making it if it does not exist."""
    node = find_route(tree.routes, key)
    if node == 0:
        group = np.int64(tree.dimensions[place, t.GROUP])
        node = make_node(tree, group, np.int64(tree.nodes[group, t.DEPTH]) + 1, key)
        tree.dimensions[place, t.KINDS] |= kind
    return node


@kernel
def split_node(tree: t.Tree, code: t.U64, node: int, keys: t.U64) -> None:
    """Moves the entries of a node that has grown too large into groups, as far as possible."""
    nodes = tree.nodes
    count = np.int64(nodes[node, t.COUNT])
    if nodes[node, t.SPLIT] or nodes[node, t.DEPTH] >= DEPTH_MAX or not has_room(tree, 2 * count, 4 * count):
        return
    nodes[node, t.SPLIT] = 1
    start = np.int64(nodes[node, t.START])
    kept = 0
    for k in range(count):
        record = record_at(tree.entries, start + k)
        place = group_of(tree, code, node, record)
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
    """Moves the entries of a group that has grown too large into nodes by value, as far as possible."""
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
