"""The tree of the index: where a filter is filed, and how it moves when a node grows too large.

The root has a child for every value, cell or pattern that some filter has as its most selective constraint; a node
with over `SPLIT_ENTRIES` files its entries further by their next constraint. Children are found through one hash
table by (parent, kind of route, attribute, value). A notification walks to the children that its own attributes name,
so it meets only filters whose path it satisfies. Two different keys with one hash share a node, harmlessly: every
candidate is verified in full.

Routes of a constraint: an equality goes to its value; a one-of list to each of its values (a notification has one value
an attribute, so it meets the filter once); an interval to one or two cells, of the finest level at which it spans no
more; a one-sided bound, at the root, to a bucket by its bound; a prefix or suffix to its hash; a text to be contained
to its first letters; anything else to the attribute's presence.

Numbers are placed by `quantise`: sign, six bits of exponent, nine of mantissa. It is monotone and the same for all
attributes, so cells never have to be learned again: 0.2 % resolution from 5e-10 to 8e9, coarser beyond.
"""

from __future__ import annotations

import numpy as np

from tidegate.layers.index import tables as t
from tidegate.layers.index.program_kernel import (
    K_ABSENT,
    K_BOOLEAN,
    K_CONTAINS,
    K_INTERVAL,
    K_NUMBER,
    K_ONE_OF,
    K_PREFIX,
    K_STRING,
    attribute_in,
    is_last,
    kind_in,
    payload_in,
    words_in,
)
from tidegate.layers.index.storage_kernel import (
    allocate,
    byte_at,
    hash_start,
    hash_step,
    inlined,
    kernel,
    mix,
    release,
)

U = np.uint64

SPLIT_ENTRIES = 256
# A list is filed under each of its values at the root only, and no node deeper than this splits: so a filter is in at
# most (values of its list) x 2^DEPTH_MAX nodes, and an insertion needs a bounded number of new ones.
DEPTH_MAX = 3
LEAVES_PER_ROUTE = 1 << DEPTH_MAX
ROUTES_MAX = 260
LEVEL_BITS = 2
LEVELS = 9
BUCKET_SHIFT = 6
PATTERN_BYTES_MAX = 62
GRAM_BYTES = 3

R_ANY = 0
R_NUMBER = 1
R_STRING = 2
R_BOOLEAN = 3
R_ABOVE = 4
R_BELOW = 5
R_PREFIX = 6
R_SUFFIX = 7
R_GRAM = 8  # and 9, 10: grams of one, two and three bytes
R_CELL = 11  # and one more for each level

GUARD_ALWAYS = U(0xFFFF) << U(16)


@inlined
def quantise(number, cast):
    """A monotone map of doubles to 0..65535."""
    cast.doubles[0] = abs(number)
    bits = cast.integers[0]
    exponent = (bits >> 52) - (1023 - 31)
    if exponent < 0:
        magnitude = np.int64(0)
    elif exponent > 63:
        magnitude = np.int64(0x7FFF)
    else:
        magnitude = (exponent << 9) | ((bits >> 43) & 0x1FF)
    return 0x8000 + magnitude if number >= 0.0 else 0x7FFF - magnitude


@inlined
def route_key(parent, kind, about, value):
    return mix(U(value) * U(0x9E3779B97F4A7C15) + mix(U(parent) << U(24) ^ U(kind) << U(16) ^ U(about))) | U(1)


@kernel
def find_node(route_keys, route_nodes, key):
    mask = route_keys.shape[0] - 1
    position = np.int64(key & U(mask))
    while True:
        found = route_keys[position]
        if found == key:
            return np.int64(route_nodes[position])
        if found == U(0):
            return np.int64(-1)
        position = (position + 1) & mask


@kernel
def string_hash(tables, string, first, length):
    """The hash of a part of an interned string, byte by byte; backwards for a negative length."""
    offset = np.int64(tables.strings[string, 0])
    value = hash_start()
    if length >= 0:
        for k in range(first, first + length):
            value = hash_step(value, byte_at(tables.bytes, offset, k))
    else:
        for k in range(first, first + length, -1):
            value = hash_step(value, byte_at(tables.bytes, offset, k))
    return value


@kernel
def routes(tables, node, at, keys, kinds, cast):
    """The keys of the children of `node` for the constraint at `code[at]`; 0 when it cannot be routed from there."""
    word = tables.code[at]
    kind, about = kind_in(word), attribute_in(word)
    if kind == K_NUMBER:
        keys[0] = route_key(node, R_NUMBER, about, tables.code[at + 1])
        kinds[0] = R_NUMBER
        return 1
    if kind == K_STRING:
        keys[0] = route_key(node, R_STRING, about, payload_in(word))
        kinds[0] = R_STRING
        return 1
    if kind == K_BOOLEAN:
        keys[0] = route_key(node, R_BOOLEAN, about, payload_in(word))
        kinds[0] = R_BOOLEAN
        return 1
    if kind == K_ONE_OF and node == 0:
        return list_routes(tables, at, keys, kinds)
    if kind == K_INTERVAL:
        return interval_routes(tables, node, at, keys, kinds, cast)
    if node != 0 or kind == K_ABSENT:
        return 0
    return root_routes(tables, at, keys, kinds)


@kernel
def list_routes(tables, at, keys, kinds):
    word = tables.code[at]
    about, numbers = attribute_in(word), payload_in(word) & 0x3FF
    count = words_in(word)
    for k in range(count):
        kinds[k] = R_NUMBER if k < numbers else R_STRING
        keys[k] = route_key(0, kinds[k], about, tables.code[at + 1 + k])
    for value in range(2):
        if (payload_in(word) >> (20 + value)) & 1:
            keys[count] = route_key(0, R_BOOLEAN, about, value)
            kinds[count] = R_BOOLEAN
            count += 1
    return count


@kernel
def interval_routes(tables, node, at, keys, kinds, cast):
    about = attribute_in(tables.code[at])
    low, high = tables.code_numbers[at + 1], tables.code_numbers[at + 2]
    if low > high:  # nothing satisfies it: it needs no place in the tree
        return 0
    if node == 0 and (low == -np.inf or high == np.inf) and low != high:
        if low == -np.inf and high == np.inf:
            keys[0], kinds[0] = route_key(0, R_ANY, about, 0), R_ANY
        elif high == np.inf:
            keys[0], kinds[0] = route_key(0, R_ABOVE, about, quantise(low, cast) >> BUCKET_SHIFT), R_ABOVE
        else:
            keys[0], kinds[0] = route_key(0, R_BELOW, about, quantise(high, cast) >> BUCKET_SHIFT), R_BELOW
        return 1
    first, last = quantise(low, cast), quantise(high, cast)
    level = 0
    while (last >> (LEVEL_BITS * level)) - (first >> (LEVEL_BITS * level)) > 1:
        level += 1
    if node != 0 and level >= LEVELS - 2:  # nearly everything: filing it further tells nothing
        return 0
    first, last = first >> (LEVEL_BITS * level), last >> (LEVEL_BITS * level)
    keys[0], kinds[0] = route_key(node, R_CELL + level, about, first), R_CELL + level
    if first == last:
        return 1
    keys[1], kinds[1] = route_key(node, R_CELL + level, about, last), R_CELL + level
    return 2


@kernel
def root_routes(tables, at, keys, kinds):
    """Patterns, and what can only be filed under the attribute's presence."""
    word = tables.code[at]
    kind, about = kind_in(word), attribute_in(word)
    keys[0], kinds[0] = route_key(0, R_ANY, about, 0), R_ANY
    if kind < K_PREFIX:
        return 1
    string = payload_in(word)
    length = np.int64(tables.strings[string, 1])
    if length == 0:
        return 1
    if kind == K_CONTAINS:
        grams = min(length, GRAM_BYTES)
        kinds[0] = R_GRAM + grams - 1
        keys[0] = route_key(0, kinds[0], about, string_hash(tables, string, 0, grams))
        return 1
    length = min(length, PATTERN_BYTES_MAX)
    if kind == K_PREFIX:
        keys[0], kinds[0] = route_key(0, R_PREFIX, about, string_hash(tables, string, 0, length)), R_PREFIX
    else:
        whole = np.int64(tables.strings[string, 1])
        keys[0], kinds[0] = route_key(0, R_SUFFIX, about, string_hash(tables, string, whole - 1, -length)), R_SUFFIX
    return 1


@kernel
def announce(tables, node, at, kind, cast):
    """Lets notifications know that there is a route of this kind, so that they look for it."""
    word = tables.code[at]
    about = attribute_in(word)
    if node != 0:
        add_dimension(tables, node, about, kind)
        return
    attributes = tables.attributes
    attributes[about, t.KINDS] |= 1 << kind
    if kind == R_PREFIX or kind == R_SUFFIX:
        length = min(np.int64(tables.strings[payload_in(word), 1]), PATTERN_BYTES_MAX)
        attributes[about, t.PREFIXES if kind == R_PREFIX else t.SUFFIXES] |= 1 << length
    elif kind == R_ABOVE or kind == R_BELOW:
        bound = tables.code_numbers[at + (1 if kind == R_ABOVE else 2)]
        bucket = quantise(bound, cast) >> BUCKET_SHIFT
        tables.buckets[about, kind - R_ABOVE, bucket >> 6] |= U(1) << U(bucket & 63)


@kernel
def add_dimension(tables, node, about, kind):
    place = np.int64(tables.nodes[node, t.DIMENSIONS])
    while place >= 0:
        if tables.dimensions[place, 0] == about:
            tables.dimensions[place, 1] |= 1 << kind
            return
        place = np.int64(tables.dimensions[place, 2])
    state = tables.state
    place = state[t.DIMENSION_FREE] - 1
    if place >= 0:
        state[t.DIMENSION_FREE] = tables.dimensions[place, 2]
    else:
        place = state[t.DIMENSION_TOP]
        state[t.DIMENSION_TOP] += 1
    tables.dimensions[place, 0] = about
    tables.dimensions[place, 1] = 1 << kind
    tables.dimensions[place, 2] = tables.nodes[node, t.DIMENSIONS]
    tables.nodes[node, t.DIMENSIONS] = place


@kernel
def make_node(tables, parent, key):
    state = tables.state
    node = state[t.NODE_FREE] - 1
    if node >= 0:
        state[t.NODE_FREE] = tables.nodes[node, t.START]
    else:
        node = state[t.NODE_TOP]
        state[t.NODE_TOP] += 1
    nodes = tables.nodes
    nodes[node, t.START] = 0
    nodes[node, t.COUNT] = 0
    nodes[node, t.CAPACITY] = 0
    nodes[node, t.SPLIT] = 0
    nodes[node, t.DIMENSIONS] = -1
    nodes[node, t.CHILDREN] = 0
    nodes[node, t.DEPTH] = nodes[parent, t.DEPTH] + 1
    nodes[node, t.PARENT] = parent
    nodes[parent, t.CHILDREN] += 1
    tables.node_keys[node] = key
    mask = tables.route_keys.shape[0] - 1
    position = np.int64(key & U(mask))
    while tables.route_keys[position] != U(0):
        position = (position + 1) & mask
    tables.route_keys[position] = key
    tables.route_nodes[position] = node
    state[t.ROUTES] += 1
    state[t.NODES] += 1
    return node


@kernel
def free_nodes(tables, node):
    """Frees a node that has neither entries nor children, and its parents that are so after it."""
    nodes, state = tables.nodes, tables.state
    while node != 0 and nodes[node, t.COUNT] == 0 and nodes[node, t.CHILDREN] == 0:
        if nodes[node, t.CAPACITY] > 0:
            release(
                tables.guards, state, t.ENTRY_HEADS, np.int64(nodes[node, t.START]), np.int64(nodes[node, t.CAPACITY])
            )
        place = np.int64(nodes[node, t.DIMENSIONS])
        while place >= 0:
            following = np.int64(tables.dimensions[place, 2])
            tables.dimensions[place, 2] = state[t.DIMENSION_FREE]
            state[t.DIMENSION_FREE] = place + 1
            place = following
        erase_route(tables, tables.node_keys[node])
        parent = np.int64(nodes[node, t.PARENT])
        nodes[parent, t.CHILDREN] -= 1
        nodes[node, t.START] = state[t.NODE_FREE]
        state[t.NODE_FREE] = node + 1
        state[t.NODES] -= 1
        node = parent


@kernel
def erase_route(tables, key):
    keys, found = tables.route_keys, tables.route_nodes
    mask = keys.shape[0] - 1
    hole = np.int64(key & U(mask))
    while keys[hole] != key:
        hole = (hole + 1) & mask
    position = hole
    while True:
        position = (position + 1) & mask
        if keys[position] == U(0):
            break
        home = np.int64(keys[position] & U(mask))
        if ((position - home) & mask) >= ((position - hole) & mask):
            keys[hole] = keys[position]
            found[hole] = found[position]
            hole = position
    keys[hole] = U(0)
    tables.state[t.ROUTES] -= 1


@kernel
def refill_routes(keys, found, old_keys, old_found):
    mask = keys.shape[0] - 1
    for k in range(old_keys.shape[0]):
        key = old_keys[k]
        if key != U(0):
            position = np.int64(key & U(mask))
            while keys[position] != U(0):
                position = (position + 1) & mask
            keys[position] = key
            found[position] = old_found[k]


@kernel
def guard_of(tables, item, depth, cast):
    """A conservative test of an entry in one word: place of the quantised value (16 bits), lowest and highest that pass
    (16 each), and sixteen bits for the attributes that must be there."""
    guard = GUARD_ALWAYS
    is_chosen = False
    present = U(0)
    at = np.int64(tables.filters[item, t.CODE])
    number = 0
    while tables.filters[item, t.WORDS] > 0:
        word = tables.code[at]
        kind, about = kind_in(word), attribute_in(word)
        if kind != K_ABSENT:
            present |= U(1) << U(about & 15)
        if number >= depth and not is_chosen and about < 21_000:
            if kind == K_NUMBER or kind == K_INTERVAL:
                low = tables.code_numbers[at + 1]
                high = tables.code_numbers[at + 2] if kind == K_INTERVAL else low
                guard = guard_word(3 * about + 1, quantise(low, cast), quantise(high, cast))
                is_chosen = True
            elif kind == K_STRING or kind == K_BOOLEAN:
                value = payload_in(word) & 0xFFFF
                guard = guard_word(3 * about + (2 if kind == K_STRING else 3), value, value)
                is_chosen = True
        if is_last(word):
            break
        at += 1 + words_in(word)
        number += 1
    return guard | present


@inlined
def guard_word(place, low, high):
    return U(place) << U(48) | U(low) << U(32) | U(high) << U(16)


@kernel
def append(tables, node, item, cast):
    nodes, state = tables.nodes, tables.state
    count, capacity = np.int64(nodes[node, t.COUNT]), np.int64(nodes[node, t.CAPACITY])
    if count == capacity:
        larger = max(2 * capacity, 1)
        start = allocate(tables.guards, state, t.ENTRY_TOP, t.ENTRY_HEADS, larger)
        old = np.int64(nodes[node, t.START])
        for k in range(count):
            tables.guards[start + k] = tables.guards[old + k]
            tables.entries[start + k] = tables.entries[old + k]
        if capacity > 0:
            release(tables.guards, state, t.ENTRY_HEADS, old, capacity)
        nodes[node, t.START] = start
        nodes[node, t.CAPACITY] = larger
    place = np.int64(nodes[node, t.START]) + count
    tables.guards[place] = guard_of(tables, item, np.int64(nodes[node, t.DEPTH]), cast)
    tables.entries[place] = item
    nodes[node, t.COUNT] = count + 1
    state[t.ENTRIES] += 1
    state[t.LARGEST] = max(state[t.LARGEST], count + 1)


@kernel
def constraint_at(tables, item, depth):
    """Where the constraint number `depth` of a filter starts, or -1 when it has no more."""
    if tables.filters[item, t.WORDS] == 0:
        return np.int64(-1)
    at = np.int64(tables.filters[item, t.CODE])
    for _ in range(depth):
        if is_last(tables.code[at]):
            return np.int64(-1)
        at += 1 + words_in(tables.code[at])
    return at


@kernel
def children(tables, node, item, keys, kinds, cast):
    """(keys of the children that a filter goes to from a split node, where the constraint is); (0, …) if it stays."""
    at = constraint_at(tables, item, np.int64(tables.nodes[node, t.DEPTH]))
    if at < 0:
        return 0, at
    return routes(tables, node, at, keys, kinds, cast), at


@kernel
def insert(tables, item, stack, keys, kinds, cast):
    """Files a filter."""
    stack[0] = 0
    depth = 1
    while depth > 0:
        depth -= 1
        node = stack[depth]
        if tables.nodes[node, t.SPLIT]:
            count, at = children(tables, node, item, keys, kinds, cast)
            for k in range(count):
                child = find_node(tables.route_keys, tables.route_nodes, keys[k])
                if child < 0:
                    child = make_node(tables, node, keys[k])
                announce(tables, node, at, kinds[k], cast)
                stack[depth] = child
                depth += 1
            if count > 0:
                continue
            if at >= 0 and is_never(tables, at):
                continue
        append(tables, node, item, cast)
        if tables.nodes[node, t.COUNT] >= SPLIT_ENTRIES and may_split(tables, node):
            split(tables, node, keys, kinds, cast)


@kernel
def may_split(tables, node):
    """Not twice, not too deep, and not before the arrays have room for all the children: then it is tried again."""
    if tables.nodes[node, t.SPLIT] or tables.nodes[node, t.DEPTH] > DEPTH_MAX:
        return False
    count = np.int64(tables.nodes[node, t.COUNT])
    return has_room(tables, 2 * count, 4 * count)


@kernel
def has_room(tables, nodes, entries):
    """Room for so many new nodes and entries in the arrays? What is wanted is noted, for Python to grow them."""
    state = tables.state
    if (
        state[t.NODE_TOP] + nodes <= tables.nodes.shape[0]
        and state[t.DIMENSION_TOP] + nodes <= tables.dimensions.shape[0]
        and state[t.ENTRY_TOP] + entries <= tables.guards.shape[0]
        and 2 * (state[t.ROUTES] + nodes) <= tables.route_keys.shape[0]
    ):
        return True
    state[t.WANTED_NODES] = max(state[t.WANTED_NODES], nodes)
    state[t.WANTED_ENTRIES] = max(state[t.WANTED_ENTRIES], entries)
    return False


@kernel
def is_never(tables, at):
    """An interval that nothing lies in: the filter never matches, and is filed nowhere."""
    if kind_in(tables.code[at]) != K_INTERVAL:
        return False
    return tables.code_numbers[at + 1] > tables.code_numbers[at + 2]


@kernel
def split(tables, node, keys, kinds, cast):
    """Files the entries of a node that has grown too large among its children, those that can be."""
    nodes = tables.nodes
    nodes[node, t.SPLIT] = 1
    start, count = np.int64(nodes[node, t.START]), np.int64(nodes[node, t.COUNT])
    kept = 0
    for k in range(count):
        item = np.int64(tables.entries[start + k])
        number, at = children(tables, node, item, keys, kinds, cast)
        if number == 0 and not (at >= 0 and is_never(tables, at)):
            tables.guards[start + kept] = tables.guards[start + k]
            tables.entries[start + kept] = tables.entries[start + k]
            kept += 1
            continue
        tables.state[t.ENTRIES] -= 1
        for j in range(number):
            child = find_node(tables.route_keys, tables.route_nodes, keys[j])
            if child < 0:
                child = make_node(tables, node, keys[j])
            announce(tables, node, at, kinds[j], cast)
            append(tables, child, item, cast)
    nodes[node, t.COUNT] = kept


@kernel
def remove(tables, item, stack, keys, kinds, cast):
    """Takes a filter out of every node that has it."""
    stack[0] = 0
    depth = 1
    while depth > 0:
        depth -= 1
        node = stack[depth]
        if tables.nodes[node, t.SPLIT]:
            count, _at = children(tables, node, item, keys, kinds, cast)
            for k in range(count):
                child = find_node(tables.route_keys, tables.route_nodes, keys[k])
                if child >= 0:
                    stack[depth] = child
                    depth += 1
            if count > 0:
                continue
        drop(tables, node, item)


@kernel
def drop(tables, node, item):
    nodes = tables.nodes
    start, count = np.int64(nodes[node, t.START]), np.int64(nodes[node, t.COUNT])
    for k in range(start, start + count):
        if tables.entries[k] == item:
            tables.guards[k] = tables.guards[start + count - 1]
            tables.entries[k] = tables.entries[start + count - 1]
            nodes[node, t.COUNT] = count - 1
            tables.state[t.ENTRIES] -= 1
            if count == 1:
                free_nodes(tables, node)
            return
