"""Matching: turns the bytes of a notification into the ids of the subscriptions that it satisfies, in four steps.

- *Read*: each attribute that a filter names is read into a row.
- *Collect*: values, cells and patterns lead to nodes of the tree, and split nodes lead to further nodes.
- *Scan*: each entry of these nodes carries three small guards, which rule out most records that do not match.
- *Verify*: the programs of the remaining records are run.

No Python object is made between input and output. Each thread has its own context. The tables are only read, except for
the counts of sampled notifications.

What may go wrong: the kernels check no bounds, so `scan_kernel` must have accepted every notification.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidegate.index import tables as t
from tidegate.index.estimate_kernel import BUCKET_SHIFT, SAMPLED
from tidegate.index.memory_kernel import mix
from tidegate.index.record_kernel import (
    FALSE_TOKEN,
    HEAD_WORDS,
    HIGH_IS_STRICT,
    K_ABSENT,
    K_BOOLEAN,
    K_EXISTS,
    K_INTERVAL,
    K_ONE_OF,
    K_PREFIX,
    K_SUFFIX,
    K_TEXT_RANGE,
    LOW_IS_STRICT,
    OWNER,
    PAYLOAD_SHIFT,
    SHARED,
    attribute_in,
    has_constraints,
    is_last,
    kind_in,
    list_counts,
    payload_in,
    words_in,
)
from tidegate.index.tree_kernel import (
    GRAM_BITS,
    GRAM_MAX,
    GUARD_ATTRIBUTE_SHIFT,
    GUARD_SHIFT,
    GUARD_VALUE_BITS,
    GUARD_VALUE_MASK,
    GUARDED_ATTRIBUTES,
    LETTERS_MAX,
    R_BOOLEAN,
    R_CELL,
    R_GRAM,
    R_NUMBER,
    R_PREFIX,
    R_SIDE,
    R_STRING,
    R_SUFFIX,
    SIDE_SHIFT,
    SUFFIX_BITS,
    find_route,
    pattern_bit,
    quantise,
    route_key,
)
from tidegate.index.vocabulary_kernel import find_text, stored_bytes, string_length
from tidegate.kernels.bytes_kernel import ALL, LOWER_HALF, Bytes, U, first_bytes, short_word
from tidegate.kernels.cache import inlined, kernel
from tidegate.kernels.intrinsic_kernel import double_of, lowest_bit, prefetch, word_of
from tidegate.kernels.msgpack_kernel import (
    FALSE,
    flat_end,
    head_at,
    is_boolean,
    is_bytes,
    is_text,
    read_number,
    text_bounds,
)
from tidegate.kernels.scan_kernel import FRAME_HEADER, frame_end

ABSENT = U(0x7FF8000000000000)  # a NaN: every comparison with it is false
NO_TOKEN = -1
UNKNOWN_TOKEN = -2

# columns of `Context.values`, one row per attribute
NUMBER = 0  # bits of a double, or ABSENT
TOKEN = 1  # id of a string, or one of the constants above
TEXT_START = 2  # start of a string in the data; -1 for none; -2 - place for the digits of a whole number in `digits`
TEXT_STOP = 3
PLACE = 4  # the number quantised to 16 bits
VALUE_COLUMNS = 8  # pads a row to a line of the cache

ATTRIBUTES_MAX = 64
DIGITS = 20
CANDIDATES = 1024  # records that are collected before they are verified
LINE_WORDS = 8  # words in a line of the cache

# places in `Context.counters`
NOTIFICATIONS = 0
VISITED = 1
SCANNED = 2
VERIFIED = 3


class Context(NamedTuple):
    """Working memory of one matching thread.

    Invariant between two notifications: every row of `values` is absent, and every item of `quantised` is -1. The
    exception is `quantised[0]`, which is 0, so that an unused guard lets its entry pass."""

    values: t.I64
    quantised: t.I32
    present: t.I64
    digits: NDArray[np.uint8]
    nodes: t.I32
    candidates: t.I64
    counters: t.I64


def make_context(vocabulary: t.Vocabulary, tree: t.Tree) -> Context:
    attributes = max(len(vocabulary.attributes), GUARDED_ATTRIBUTES)
    values = np.zeros((attributes, VALUE_COLUMNS), np.int64)
    values[:, :TEXT_STOP] = (int(ABSENT), NO_TOKEN, -1)
    quantised = np.full(attributes, -1, np.int32)
    quantised[0] = 0
    return Context(
        values=values,
        quantised=quantised,
        present=np.zeros(ATTRIBUTES_MAX, np.int64),
        digits=np.zeros(ATTRIBUTES_MAX * DIGITS, np.uint8),
        nodes=np.zeros(len(tree.nodes) + 1, np.int32),
        candidates=np.zeros(CANDIDATES, np.int64),
        counters=np.zeros(4, np.int64),
    )


@inlined
def read_map(
    vocabulary: t.Vocabulary, tree: t.Tree, context: Context, data: Bytes, position: int, is_sampled: bool
) -> tuple[int, int, int]:
    """Reads one notification into the context, and collects the nodes to which the root leads by its values.

    Returns (attributes that filters name, nodes, end of the notification). `scan_kernel` must have accepted it."""
    count, position = head_at(data, position)
    known, nodes = np.int64(0), np.int64(1)
    context.nodes[0] = 0
    for _ in range(count):
        start, stop = text_bounds(data, position)
        name = find_text(vocabulary, 0, data, start, stop)
        attribute = np.int64(vocabulary.strings[name, t.ATTRIBUTE]) if name >= 0 else np.int64(0)
        tag = data[stop]
        if attribute == 0 or is_bytes(tag):  # filters ignore bytes
            position = flat_end(data, stop)
            continue
        context.present[known] = attribute
        if is_sampled:
            vocabulary.attribute_seen[attribute] += 1
        nodes = visit(tree, context, np.int64(tree.roots[attribute, t.ANY]), nodes)
        if is_text(tag):
            position = read_text(vocabulary, context, data, stop, attribute, is_sampled)
            nodes = collect_text(tree, context, data, attribute, nodes)
        elif is_boolean(tag):
            value = np.int64(tag) - FALSE
            context.values[attribute, TOKEN] = FALSE_TOKEN + value
            context.quantised[attribute] = (FALSE_TOKEN + value) & GUARD_VALUE_MASK
            nodes = visit(tree, context, np.int64(tree.roots[attribute, t.FALSE + value]), nodes)
            position = stop + 1
        else:
            position = read_numeral(vocabulary, tree, context, data, stop, attribute, known, is_sampled)
            nodes = collect_number(tree, context, attribute, nodes)
        known += 1
    return known, nodes, position


@inlined
def read_text(
    vocabulary: t.Vocabulary, context: Context, data: Bytes, position: int, attribute: int, is_sampled: bool
) -> int:
    start, stop = text_bounds(data, position)
    token = find_text(vocabulary, attribute, data, start, stop)
    if token >= 0 and is_sampled:
        vocabulary.string_seen[token] += 1
    context.quantised[attribute] = max(token, 0) & GUARD_VALUE_MASK
    context.values[attribute, TOKEN] = token if token >= 0 else UNKNOWN_TOKEN
    context.values[attribute, TEXT_START] = start
    context.values[attribute, TEXT_STOP] = stop
    return stop


@inlined
def read_numeral(
    vocabulary: t.Vocabulary,
    tree: t.Tree,
    context: Context,
    data: Bytes,
    position: int,
    attribute: int,
    known: int,
    is_sampled: bool,
) -> int:
    number, position = read_number(data, position)
    place = quantise(tree.domains, attribute, number)
    context.quantised[attribute] = place >> GUARD_SHIFT
    context.values[attribute, NUMBER] = np.int64(word_of(number + 0.0))
    context.values[attribute, PLACE] = place
    if is_sampled:
        tree.histogram[attribute, place >> BUCKET_SHIFT] += 1
    if vocabulary.attributes[attribute, t.PATTERNS] > 0:
        write_digits(context, attribute, known, number)
    return position


@kernel
def write_digits(context: Context, attribute: int, known: int, number: float) -> None:
    """Writes the decimal digits of a whole number, which patterns are matched against."""
    if not (abs(number) <= 9007199254740992.0 and np.floor(number) == number):
        return
    value = np.int64(abs(number))
    stop = DIGITS * (known + 1)
    start = stop
    while True:
        start -= 1
        context.digits[start] = 48 + value % 10
        value //= 10
        if value == 0:
            break
    if number < 0.0:
        start -= 1
        context.digits[start] = 45
    context.values[attribute, TEXT_START] = -2 - start
    context.values[attribute, TEXT_STOP] = stop


@inlined
def clear(context: Context, known: int) -> None:
    for k in range(known):
        attribute = context.present[k]
        context.values[attribute, NUMBER] = np.int64(ABSENT)
        context.values[attribute, TOKEN] = NO_TOKEN
        context.values[attribute, TEXT_START] = -1
        context.quantised[attribute] = -1


@inlined
def visit(tree: t.Tree, context: Context, node: int, count: int) -> int:
    """Appends a node to those to be scanned, unless it is 0. Returns the new count.

    The node is always written, but counted only if it is not 0. This avoids a branch that is hard to predict."""
    context.nodes[count] = node
    prefetch(tree.nodes, node)
    return count + (node != 0)


@inlined
def collect_number(tree: t.Tree, context: Context, attribute: int, count: int) -> int:
    kinds = np.int64(tree.roots[attribute, t.ROUTE_KINDS])
    if kinds & (1 << R_NUMBER):
        key = route_key(0, R_NUMBER, attribute, U(context.values[attribute, NUMBER]))
        count = visit(tree, context, find_route(tree.routes, key), count)
    if kinds >> R_CELL:
        row = np.int64(tree.roots[attribute, t.CELLS]) - 1
        place = context.values[attribute, PLACE]
        if row < 0:
            count = collect_hashed_cells(tree, context, attribute, place, count)
        else:
            base = np.int64(0)
            for level in range(t.LEVELS):
                cell = base + (place >> (16 - 2 * level))
                count = visit(tree, context, np.int64(tree.cells[row, cell]), count)
                base = 4 * base + 1
            if kinds >> R_SIDE:
                count = collect_sides(tree, context, row, place >> SIDE_SHIFT, count)
    if kinds & ((1 << R_PREFIX) | (1 << R_SUFFIX) | (1 << R_GRAM)) and context.values[attribute, TEXT_START] <= -2:
        start = -2 - context.values[attribute, TEXT_START]
        count = collect_digits(tree, context, start, context.values[attribute, TEXT_STOP], attribute, count)
    return count


@inlined
def collect_sides(tree: t.Tree, context: Context, row: int, bucket: int, count: int) -> int:
    """Collects the nodes of one-sided intervals: those open above, from the number's bucket down, and those open below,
    from the number's bucket up."""
    bits = tree.sides[row, 0] & (ALL >> U(63 - bucket))
    while bits != U(0):
        count = visit(tree, context, np.int64(tree.cells[row, t.SIDES_BASE + lowest_bit(bits)]), count)
        bits &= bits - U(1)
    bits = tree.sides[row, 1] & (ALL << U(bucket))
    while bits != U(0):
        count = visit(tree, context, np.int64(tree.cells[row, t.SIDES_BASE + 64 + lowest_bit(bits)]), count)
        bits &= bits - U(1)
    return count


@kernel
def collect_hashed_cells(tree: t.Tree, context: Context, attribute: int, place: int, count: int) -> int:
    """Collects the cells of an attribute without a row. This is too rare to be compiled into the caller."""
    kinds = np.int64(tree.roots[attribute, t.ROUTE_KINDS])
    for level in range(t.LEVELS):
        if kinds & (1 << (R_CELL + level)):
            key = route_key(0, R_CELL + level, attribute, place >> (16 - 2 * level))
            count = visit(tree, context, find_route(tree.routes, key), count)
    return count


@kernel
def collect_digits(tree: t.Tree, context: Context, start: int, stop: int, attribute: int, count: int) -> int:
    """Collects the patterns for the digits of a number. This is too rare to be compiled into the caller."""
    return collect_patterns(tree, context, context.digits, start, stop, attribute, count)


@inlined
def collect_text(tree: t.Tree, context: Context, data: Bytes, attribute: int, count: int) -> int:
    token = context.values[attribute, TOKEN]
    if token >= 0:
        count = visit(tree, context, np.int64(tree.token_nodes[token]), count)
    if tree.roots[attribute, t.PATTERN_SIZES]:
        start, stop = context.values[attribute, TEXT_START], context.values[attribute, TEXT_STOP]
        count = collect_patterns(tree, context, data, start, stop, attribute, count)
    return count


@inlined
def collect_patterns(
    tree: t.Tree, context: Context, text: Bytes, start: int, stop: int, attribute: int, count: int
) -> int:
    """Collects the nodes of prefixes, suffixes and substrings. A gram may occur twice, but its node is taken once."""
    sizes = np.int64(tree.roots[attribute, t.PATTERN_SIZES])
    length = min(stop - start, LETTERS_MAX)
    if sizes & 0xFF:
        word = short_word(text, start, length)
        for size in range(1, length + 1):
            if (sizes >> (size - 1)) & 1:
                count = visit_pattern(tree, context, R_PREFIX, size, attribute, first_bytes(word, size), count, count)
    if (sizes >> SUFFIX_BITS) & 0xFF:
        word = short_word(text, stop - length, length)
        for size in range(1, length + 1):
            if (sizes >> (SUFFIX_BITS + size - 1)) & 1:
                letters = word >> U(8 * (length - size))
                count = visit_pattern(tree, context, R_SUFFIX, size, attribute, letters, count, count)
    first = count
    for size in range(1, GRAM_MAX + 1):
        if (sizes >> (GRAM_BITS + size - 1)) & 1:
            for at in range(start, stop - size + 1):
                count = visit_pattern(tree, context, R_GRAM, size, attribute, short_word(text, at, size), count, first)
    return count


@inlined
def visit_pattern(
    tree: t.Tree, context: Context, kind: int, size: int, attribute: int, letters: int, count: int, first: int
) -> int:
    """Looks up a pattern, unless its bit shows that it does not exist. Skips nodes collected since `first`."""
    bit = pattern_bit(attribute, kind, size, letters)
    if (tree.pattern_bits[bit >> 6] >> U(bit & 63)) & U(1) == U(0):
        return count
    node = find_route(tree.routes, route_key(size, kind, attribute, letters))
    for k in range(first, count):
        if context.nodes[k] == node:
            return count
    return visit(tree, context, node, count)


@inlined
def collect_below(tree: t.Tree, context: Context, count: int) -> int:
    """Collects the groups and the nodes by value to which split nodes lead."""
    k = np.int64(1)
    while k < count:
        node = np.int64(context.nodes[k])
        k += 1
        start = np.int64(tree.nodes[node, t.START])
        for line in range(3):
            prefetch(tree.entries, start + line * (LINE_WORDS // 2))
        place = np.int64(tree.nodes[node, t.DIMENSIONS])
        while place >= 0:
            attribute = np.int64(tree.dimensions[place, t.BY_ATTRIBUTE])
            if context.quantised[attribute] >= 0:
                group, kinds = np.int64(tree.dimensions[place, t.GROUP]), np.int64(tree.dimensions[place, t.KINDS])
                count = visit(tree, context, group, count)
                if kinds:
                    count = collect_values(tree, context, group, attribute, kinds, count)
            place = np.int64(tree.dimensions[place, t.FOLLOWING])
    return count


@inlined
def collect_values(tree: t.Tree, context: Context, group: int, attribute: int, kinds: int, count: int) -> int:
    token = context.values[attribute, TOKEN]
    if token == NO_TOKEN:
        if kinds & (1 << R_NUMBER):
            key = route_key(group, R_NUMBER, attribute, U(context.values[attribute, NUMBER]))
            count = visit(tree, context, find_route(tree.routes, key), count)
        levels = kinds >> R_CELL
        shift = 16
        level = 0
        while levels:
            if levels & 1:
                key = route_key(group, R_CELL + level, attribute, context.values[attribute, PLACE] >> shift)
                count = visit(tree, context, find_route(tree.routes, key), count)
            levels >>= 1
            level += 1
            shift -= 2
    elif token >= 0:
        if kinds & (1 << R_STRING):
            count = visit(tree, context, find_route(tree.routes, route_key(group, R_STRING, attribute, token)), count)
    elif token != UNKNOWN_TOKEN and kinds & (1 << R_BOOLEAN):
        key = route_key(group, R_BOOLEAN, attribute, token - FALSE_TOKEN)
        count = visit(tree, context, find_route(tree.routes, key), count)
    return count


@kernel
def compare_text(vocabulary: t.Vocabulary, string: int, text: Bytes, start: int, stop: int) -> int:
    """Returns -1, 0 or 1: how a text of the notification compares with an interned string, by code points."""
    length = string_length(vocabulary, string)
    for k in range(min(length, stop - start)):
        ours, theirs = U(text[start + k]), stored_bytes(vocabulary, string, k, 1)
        if ours != theirs:
            return -1 if ours < theirs else 1
    if stop - start == length:
        return 0
    return -1 if stop - start < length else 1


@inlined
def has_text_at(vocabulary: t.Vocabulary, string: int, length: int, text: Bytes, at: int) -> bool:
    done = np.int64(0)
    while done < length:
        size = min(length - done, 8)
        if short_word(text, at + done, size) != stored_bytes(vocabulary, string, done, size):
            return False
        done += size
    return True


@inlined
def fits_pattern(vocabulary: t.Vocabulary, kind: int, string: int, text: Bytes, start: int, stop: int) -> bool:
    length = string_length(vocabulary, string)
    if length > stop - start:
        return False
    if kind == K_PREFIX:
        return has_text_at(vocabulary, string, length, text, start)
    if kind == K_SUFFIX:
        return has_text_at(vocabulary, string, length, text, stop - length)
    for at in range(start, stop - length + 1):
        if has_text_at(vocabulary, string, length, text, at):
            return True
    return False


@kernel
def digits_fit(vocabulary: t.Vocabulary, kind: int, string: int, digits: Bytes, start: int, stop: int) -> bool:
    """Does the same for the digits of a number. This is too rare to be compiled into the caller."""
    return fits_pattern(vocabulary, kind, string, digits, start, stop)


@inlined
def is_listed(code: t.U64, context: Context, at: int) -> tuple[bool, bool]:
    """Returns (whether the list has a value of the same class, whether it has this value)."""
    word = code[at]
    attribute = attribute_in(word)
    numbers, strings, booleans = list_counts(word)
    token = context.values[attribute, TOKEN]
    if token == NO_TOKEN:
        if context.quantised[attribute] < 0:
            return False, False
        number = double_of(U(context.values[attribute, NUMBER]))
        for k in range(at + 1, at + 1 + numbers):
            if double_of(code[k]) == number:
                return True, True
        return numbers > 0, False
    if token >= UNKNOWN_TOKEN:
        for k in range(at + 1 + numbers, at + 1 + numbers + strings):
            if np.int64(code[k]) == token:
                return True, True
        return strings > 0, False
    return booleans > 0, (booleans >> (token - FALSE_TOKEN)) & 1 == 1


@inlined
def satisfies_rare_kind(vocabulary: t.Vocabulary, code: t.U64, context: Context, data: Bytes, at: int) -> bool:
    """Returns whether a constraint holds, for the kinds that are too rare for the inner loop of `satisfies`."""
    word = code[at]
    kind, attribute = kind_in(word), attribute_in(word)
    start, stop = context.values[attribute, TEXT_START], context.values[attribute, TEXT_STOP]
    if kind == K_TEXT_RANGE:
        if start < 0:
            return False
        strict = payload_in(word)
        low, high = np.int64(code[at + 1]) - 1, np.int64(code[at + 2]) - 1
        if low >= 0 and compare_text(vocabulary, low, data, start, stop) < (1 if strict & LOW_IS_STRICT else 0):
            return False
        return not (
            high >= 0 and compare_text(vocabulary, high, data, start, stop) > (-1 if strict & HIGH_IS_STRICT else 0)
        )
    if kind >= K_PREFIX:
        if start >= 0:
            return fits_pattern(vocabulary, kind, payload_in(word), data, start, stop)
        if start == -1:
            return False
        return digits_fit(vocabulary, kind, payload_in(word), context.digits, -2 - start, stop)
    # If the list names no value of the same class, the two are not comparable: neither kind of list is satisfied.
    named, found = is_listed(code, context, at)
    return found if kind == K_ONE_OF else named and not found


@inlined
def satisfies(vocabulary: t.Vocabulary, code: t.U64, context: Context, data: Bytes, record: int) -> bool:
    """Returns whether the notification in the context satisfies the program of a record."""
    at = record + HEAD_WORDS
    while True:
        word = code[at]
        kind, attribute = kind_in(word), attribute_in(word)
        if kind == K_INTERVAL:
            number = double_of(U(context.values[attribute, NUMBER]))
            holds = (number >= double_of(code[at + 1])) & (number <= double_of(code[at + 2]))
        elif kind <= K_BOOLEAN:
            # Tokens are compared by their lowest 32 bits, all that a header has room for.
            holds = U(context.values[attribute, TOKEN]) << U(32) == (word >> U(PAYLOAD_SHIFT)) << U(32)
        elif kind <= K_ABSENT:
            holds = (context.quantised[attribute] >= 0) == (kind == K_EXISTS)
        else:
            holds = satisfies_rare_kind(vocabulary, code, context, data, at)
        if not holds:
            return False
        if is_last(word):
            return True
        at += 1 + words_in(word)


@inlined
def emit(filters: t.Filters, record: int, out: t.I64, found: int) -> int:
    """Writes the ids of a record's subscriptions, and returns the new count.

    It keeps counting when `out` is full, so that the caller learns how much room is needed."""
    owner = filters.code[record + OWNER]
    if owner & SHARED == U(0):
        if found < out.shape[0]:
            out[found] = np.int64(owner)
        return found + 1
    place = np.int64(owner & ~SHARED)
    while place >= 0:
        if found < out.shape[0]:
            out[found] = filters.ids[place]
        found += 1
        place = np.int64(filters.subscriptions[place, t.NEXT])
    return found


@inlined
def verify(
    vocabulary: t.Vocabulary, filters: t.Filters, context: Context, data: Bytes, candidates: int, out: t.I64, found: int
) -> int:
    context.counters[VERIFIED] += candidates
    for k in range(candidates):
        record = context.candidates[k]
        if not has_constraints(filters.code, record) or satisfies(vocabulary, filters.code, context, data, record):
            found = emit(filters, record, out, found)
    return found


@inlined
def misses(quantised: t.I32, guard: int) -> int:
    """Returns a negative number if the value of a guard's attribute is outside the guard's bounds.

    This is arithmetic because the outcome is unpredictable: a branch for each test would often be mispredicted."""
    value = np.int64(quantised[(guard >> U(GUARD_ATTRIBUTE_SHIFT)) & U(GUARDED_ATTRIBUTES - 1)])
    above = value - np.int64((guard >> U(GUARD_VALUE_BITS)) & U(GUARD_VALUE_MASK))
    return above | (np.int64(guard & U(GUARD_VALUE_MASK)) - above)


@inlined
def scan(
    vocabulary: t.Vocabulary,
    filters: t.Filters,
    tree: t.Tree,
    context: Context,
    data: Bytes,
    nodes: int,
    out: t.I64,
    found: int,
) -> int:
    candidates, quantised = 0, context.quantised
    for k in range(nodes):
        node = np.int64(context.nodes[k])
        start, count = np.int64(tree.nodes[node, t.START]), np.int64(tree.nodes[node, t.COUNT])
        context.counters[SCANNED] += count
        for place in range(U(start), U(start + count)):
            guards, filed = tree.entries[place, t.GUARDS], tree.entries[place, t.FILED]
            missed = misses(quantised, guards) | misses(quantised, guards >> U(32)) | misses(quantised, filed >> U(32))
            if missed >= 0:
                record = np.int64(filed & LOWER_HALF)
                prefetch(filters.code, record)
                prefetch(filters.code, record + LINE_WORDS - 1)
                context.candidates[candidates] = record
                candidates += 1
                if candidates == CANDIDATES:
                    found = verify(vocabulary, filters, context, data, candidates, out, found)
                    candidates = 0
    return verify(vocabulary, filters, context, data, candidates, out, found)


@inlined
def match_one(
    vocabulary: t.Vocabulary,
    filters: t.Filters,
    tree: t.Tree,
    context: Context,
    data: Bytes,
    position: int,
    out: t.I64,
    found: int,
) -> tuple[int, int]:
    """Matches one notification. Returns (ids in `out` after it, end of the notification)."""
    context.counters[NOTIFICATIONS] += 1
    # Samples at random, not every 16th: if devices take turns, a fixed step could miss some of them for ever.
    is_sampled = mix(U(context.counters[NOTIFICATIONS])) % U(SAMPLED) == U(0)
    if is_sampled:
        vocabulary.state[t.EVENTS] += 1
    known, nodes, position = read_map(vocabulary, tree, context, data, position, is_sampled)
    nodes = collect_below(tree, context, nodes)
    context.counters[VISITED] += nodes
    found = scan(vocabulary, filters, tree, context, data, nodes, out, found)
    clear(context, known)
    return found, position


@kernel
def match_maps(
    vocabulary: t.Vocabulary,
    filters: t.Filters,
    tree: t.Tree,
    context: Context,
    data: Bytes,
    starts: t.I64,
    begin: int,
    offsets: t.I64,
    out: t.I64,
) -> tuple[int, int]:
    """Matches the notifications from `begin` on: notification i satisfies `out[offsets[i]:offsets[i + 1]]`.

    A start of -1 means that the notification follows the previous one; its actual start is then written to `starts`.
    Stops at the first notification whose ids do not fit into `out`. Returns (its index, the size of `out` that it
    needs); after the last notification, (their number, ids found)."""
    found = offsets[begin]
    for i in range(begin, starts.shape[0]):
        after, end = match_one(vocabulary, filters, tree, context, data, starts[i], out, found)
        if after > out.shape[0]:
            return i, after
        found = after
        offsets[i + 1] = found
        if i + 1 < starts.shape[0] and starts[i + 1] < 0:
            starts[i + 1] = end
    return starts.shape[0], found


@kernel
def count_in_frames(data: Bytes) -> int:
    """Returns how many notifications the PUBLISH frames in `data` hold."""
    count, position = np.int64(0), np.int64(0)
    while position < data.shape[0]:
        items, _first = head_at(data, position + FRAME_HEADER)
        count += items
        position = frame_end(data, position)
    return count


@kernel
def find_in_frames(data: Bytes, starts: t.I64) -> None:
    """Writes the start of the first notification of each frame, and -1 for the notifications that follow it."""
    number, position = np.int64(0), np.int64(0)
    while position < data.shape[0]:
        items, first = head_at(data, position + FRAME_HEADER)
        for k in range(items):
            starts[number + k] = first if k == 0 else -1
        number += items
        position = frame_end(data, position)


@kernel
def join_matches(
    offsets: t.I64, ids: t.I64, other_offsets: t.I64, other_ids: t.I64, joined_offsets: t.I64, joined: t.I64
) -> None:
    """Joins the ids that two trees have found for each notification."""
    found = np.int64(0)
    for i in range(offsets.shape[0] - 1):
        for k in range(offsets[i], offsets[i + 1]):
            joined[found] = ids[k]
            found += 1
        for k in range(other_offsets[i], other_offsets[i + 1]):
            joined[found] = other_ids[k]
            found += 1
        joined_offsets[i + 1] = found
