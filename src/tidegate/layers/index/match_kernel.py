"""Matching: a notification's bytes in, the ids of the subscriptions that it satisfies out; no Python object between.

Four steps for each notification. *Read*: its attributes, as far as any filter names them, go into a row each.
*Collect*: their values, cells and patterns lead to nodes of the tree, and split nodes lead on. *Scan*: each entry of
these nodes has a guard, one word that rules out most of what does not match. *Verify*: the programs of what passes are
run. The context belongs to one thread; the tables are only read, but for counts of what was seen.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidegate.layers.index import tables as t
from tidegate.layers.index.estimate_kernel import BUCKET_SHIFT, SAMPLED
from tidegate.layers.index.intrinsic_kernel import double_of, lowest_bit, prefetch, word_of
from tidegate.layers.index.memory_kernel import (
    ALL,
    Bytes,
    U,
    first_bytes,
    inlined,
    kernel,
    mix,
    short_word,
)
from tidegate.layers.index.record_kernel import (
    FALSE_TOKEN,
    HEAD_WORDS,
    K_ABSENT,
    K_BOOLEAN,
    K_EXISTS,
    K_INTERVAL,
    K_ONE_OF,
    K_PREFIX,
    K_SUFFIX,
    K_TEXT_RANGE,
    OWNER,
    SHARED,
    array_at,
    attribute_in,
    has_constraints,
    is_boolean,
    is_last,
    is_text,
    kind_in,
    payload_in,
    read_number,
    text_bounds,
    words_in,
)
from tidegate.layers.index.tree_kernel import (
    GRAM_BITS,
    GRAM_MAX,
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
from tidegate.layers.index.vocabulary_kernel import find_text, stored_bytes, string_length
from tidegate.layers.scan_kernel import FRAME_HEADER

ABSENT = U(0x7FF8000000000000)  # a NaN: no number compares with it
NO_TOKEN = -1
UNKNOWN_TOKEN = -2

# columns of `Context.values`, a row an attribute
NUMBER = 0  # bits of a double, or ABSENT
TOKEN = 1  # id of a string, or one of the constants above
TEXT_START = 2  # of a string in the data, -1 for none, or -2 - the place of a whole number's digits in `digits`
TEXT_STOP = 3
PLACE = 4  # of the number, quantised to 16 bits
VALUE_COLUMNS = 8  # a line of the cache

ATTRIBUTES_MAX = 64
DIGITS = 20
CANDIDATES = 1024
LINE_WORDS = 8  # of the cache

# places in `Context.counters`
NOTIFICATIONS = 0
VISITED = 1
SCANNED = 2
VERIFIED = 3


class Context(NamedTuple):
    """What one thread needs to match. Between two notifications every row of `values` is absent and every `quantised`
    -1 but the first, which lets an entry without a guard pass."""

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
def payload_end(data: Bytes, position: int) -> int:
    """The end of a `bin`, the one value that no filter looks at."""
    width = 1 << np.int64(data[position] - 0xC4)
    length = np.int64(0)
    for k in range(width):
        length = length << 8 | np.int64(data[position + 1 + k])
    return position + 1 + width + length


@inlined
def map_at(data: Bytes, position: int) -> tuple[int, int]:
    """(attributes, position of the first) of a notification."""
    tag = data[position]
    if tag & 0xF0 == 0x80:
        return np.int64(tag & 15), position + 1
    count = np.int64(data[position + 1]) << 8 | np.int64(data[position + 2])
    if tag == 0xDE:
        return count, position + 3
    return count << 16 | np.int64(data[position + 3]) << 8 | np.int64(data[position + 4]), position + 5


@inlined
def read_map(
    vocabulary: t.Vocabulary, tree: t.Tree, context: Context, data: Bytes, position: int, is_sampled: bool
) -> tuple[int, int, int]:
    """Reads one notification, which the door has checked, into the context, and collects the nodes that the root has
    for its values: (attributes known, nodes, where it ends)."""
    count, position = map_at(data, position)
    known, nodes = np.int64(0), np.int64(1)
    context.nodes[0] = 0
    for _ in range(count):
        start, stop = text_bounds(data, position)
        name = find_text(vocabulary, 0, data, start, stop)
        about = np.int64(vocabulary.strings[name, t.ATTRIBUTE]) if name >= 0 else np.int64(0)
        tag = data[stop]
        if about == 0 or (tag >= 0xC4 and tag <= 0xC6):
            position = skip_value(data, stop)
            continue
        context.present[known] = about
        if is_sampled:
            vocabulary.attribute_seen[about] += 1
        nodes = visit(tree, context, np.int64(tree.roots[about, t.ANY]), nodes)
        if is_text(tag):
            position = read_text(vocabulary, context, data, stop, about, is_sampled)
            nodes = collect_text(tree, context, data, about, nodes)
        elif is_boolean(tag):
            value = np.int64(tag) - 0xC2
            context.values[about, TOKEN] = FALSE_TOKEN + value
            context.quantised[about] = (FALSE_TOKEN + value) & 2047
            nodes = visit(tree, context, np.int64(tree.roots[about, t.FALSE + value]), nodes)
            position = stop + 1
        else:
            position = read_numeral(vocabulary, tree, context, data, stop, about, known, is_sampled)
            nodes = collect_number(tree, context, about, nodes)
        known += 1
    return known, nodes, position


@inlined
def skip_value(data: Bytes, position: int) -> int:
    tag = data[position]
    if is_text(tag):
        _start, stop = text_bounds(data, position)
        return stop
    if tag < 0x80 or tag >= 0xE0 or tag == 0xC2 or tag == 0xC3:
        return position + 1
    if tag >= 0xC4 and tag <= 0xC6:
        return payload_end(data, position)
    if tag == 0xCA:
        return position + 5
    if tag == 0xCB:
        return position + 9
    return position + 1 + (1 << np.int64((tag - 0xCC) & 3))


@inlined
def read_text(
    vocabulary: t.Vocabulary, context: Context, data: Bytes, position: int, about: int, is_sampled: bool
) -> int:
    start, stop = text_bounds(data, position)
    token = find_text(vocabulary, about, data, start, stop)
    if token >= 0 and is_sampled:
        vocabulary.string_seen[token] += 1
    context.quantised[about] = max(token, 0) & 2047
    context.values[about, TOKEN] = token if token >= 0 else UNKNOWN_TOKEN
    context.values[about, TEXT_START] = start
    context.values[about, TEXT_STOP] = stop
    return stop


@inlined
def read_numeral(
    vocabulary: t.Vocabulary,
    tree: t.Tree,
    context: Context,
    data: Bytes,
    position: int,
    about: int,
    known: int,
    is_sampled: bool,
) -> int:
    number, position = read_number(data, position)
    place = quantise(tree.domains, about, number)
    context.quantised[about] = place >> 5
    context.values[about, NUMBER] = np.int64(word_of(number + 0.0))
    context.values[about, PLACE] = place
    if is_sampled:
        tree.histogram[about, place >> BUCKET_SHIFT] += 1
    if vocabulary.attributes[about, t.PATTERNS] > 0:
        write_digits(context, about, known, number)
    return position


@kernel
def write_digits(context: Context, about: int, known: int, number: float) -> None:
    """The decimal digits of a whole number, which patterns look at."""
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
    context.values[about, TEXT_START] = -2 - start
    context.values[about, TEXT_STOP] = stop


@inlined
def clear(context: Context, known: int) -> None:
    for k in range(known):
        about = context.present[k]
        context.values[about, NUMBER] = np.int64(ABSENT)
        context.values[about, TOKEN] = NO_TOKEN
        context.values[about, TEXT_START] = -1
        context.quantised[about] = -1


@inlined
def visit(tree: t.Tree, context: Context, node: int, count: int) -> int:
    """One more node to look into, unless it is 0."""
    context.nodes[count] = node
    prefetch(tree.nodes, node)
    return count + (node != 0)


@inlined
def collect_number(tree: t.Tree, context: Context, about: int, count: int) -> int:
    kinds = np.int64(tree.roots[about, t.ROUTE_KINDS])
    if kinds & (1 << R_NUMBER):
        key = route_key(0, R_NUMBER, about, U(context.values[about, NUMBER]))
        count = visit(tree, context, find_route(tree.routes, key), count)
    if kinds >> R_CELL:
        row = np.int64(tree.roots[about, t.CELLS]) - 1
        place = context.values[about, PLACE]
        base = np.int64(0)
        for level in range(t.LEVELS):
            cell = base + (place >> (16 - 2 * level))
            count = visit(tree, context, np.int64(tree.cells[row, cell]), count)
            base = 4 * base + 1
        if kinds >> R_SIDE:
            count = collect_sides(tree, context, row, place >> SIDE_SHIFT, count)
    if kinds & ((1 << R_PREFIX) | (1 << R_SUFFIX) | (1 << R_GRAM)) and context.values[about, TEXT_START] <= -2:
        start = -2 - context.values[about, TEXT_START]
        count = collect_digits(tree, context, start, context.values[about, TEXT_STOP], about, count)
    return count


@inlined
def collect_sides(tree: t.Tree, context: Context, row: int, bucket: int, count: int) -> int:
    """The one-sided intervals: those that go up from a bucket at or below the number's, down from one at or above."""
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
def collect_digits(tree: t.Tree, context: Context, start: int, stop: int, about: int, count: int) -> int:
    """The patterns of a number: too rare to be compiled into the caller."""
    return collect_patterns(tree, context, context.digits, start, stop, about, count)


@inlined
def collect_text(tree: t.Tree, context: Context, data: Bytes, about: int, count: int) -> int:
    token = context.values[about, TOKEN]
    if token >= 0:
        count = visit(tree, context, np.int64(tree.token_nodes[token]), count)
    if tree.roots[about, t.PATTERN_SIZES]:
        start, stop = context.values[about, TEXT_START], context.values[about, TEXT_STOP]
        count = collect_patterns(tree, context, data, start, stop, about, count)
    return count


@inlined
def collect_patterns(tree: t.Tree, context: Context, text: Bytes, start: int, stop: int, about: int, count: int) -> int:
    """The nodes of prefixes, suffixes and parts. A text may have the same part twice: its node is taken once."""
    sizes = np.int64(tree.roots[about, t.PATTERN_SIZES])
    length = min(stop - start, LETTERS_MAX)
    if sizes & 0xFF:
        word = short_word(text, start, length)
        for size in range(1, length + 1):
            if (sizes >> (size - 1)) & 1:
                count = visit_pattern(tree, context, R_PREFIX, size, about, first_bytes(word, size), count, count)
    if (sizes >> SUFFIX_BITS) & 0xFF:
        word = short_word(text, stop - length, length)
        for size in range(1, length + 1):
            if (sizes >> (SUFFIX_BITS + size - 1)) & 1:
                letters = word >> U(8 * (length - size))
                count = visit_pattern(tree, context, R_SUFFIX, size, about, letters, count, count)
    first = count
    for size in range(1, GRAM_MAX + 1):
        if (sizes >> (GRAM_BITS + size - 1)) & 1:
            for at in range(start, stop - size + 1):
                count = visit_pattern(tree, context, R_GRAM, size, about, short_word(text, at, size), count, first)
    return count


@inlined
def visit_pattern(
    tree: t.Tree, context: Context, kind: int, size: int, about: int, letters: int, count: int, first: int
) -> int:
    """Looks a pattern up, unless a bit says that it is not there; skips a node that was taken since `first`."""
    bit = pattern_bit(about, kind, size, letters)
    if (tree.pattern_bits[bit >> 6] >> U(bit & 63)) & U(1) == U(0):
        return count
    node = find_route(tree.routes, route_key(size, kind, about, letters))
    for k in range(first, count):
        if context.nodes[k] == node:
            return count
    return visit(tree, context, node, count)


@inlined
def collect_below(tree: t.Tree, context: Context, count: int) -> int:
    """The groups, and nodes by value, that the split ones among the nodes lead on to."""
    k = np.int64(1)
    while k < count:
        node = np.int64(context.nodes[k])
        k += 1
        start = np.int64(tree.nodes[node, t.START])
        for line in range(3):
            prefetch(tree.entries, start + line * (LINE_WORDS // 2))
        place = np.int64(tree.nodes[node, t.DIMENSIONS])
        while place >= 0:
            about = np.int64(tree.dimensions[place, t.ABOUT])
            if context.quantised[about] >= 0:
                group, kinds = np.int64(tree.dimensions[place, t.GROUP]), np.int64(tree.dimensions[place, t.KINDS])
                count = visit(tree, context, group, count)
                if kinds:
                    count = collect_values(tree, context, group, about, kinds, count)
            place = np.int64(tree.dimensions[place, t.FOLLOWING])
    return count


@inlined
def collect_values(tree: t.Tree, context: Context, group: int, about: int, kinds: int, count: int) -> int:
    token = context.values[about, TOKEN]
    if token == NO_TOKEN:
        if kinds & (1 << R_NUMBER):
            key = route_key(group, R_NUMBER, about, U(context.values[about, NUMBER]))
            count = visit(tree, context, find_route(tree.routes, key), count)
        levels = kinds >> R_CELL
        shift = 16
        level = 0
        while levels:
            if levels & 1:
                key = route_key(group, R_CELL + level, about, context.values[about, PLACE] >> shift)
                count = visit(tree, context, find_route(tree.routes, key), count)
            levels >>= 1
            level += 1
            shift -= 2
    elif token >= 0:
        if kinds & (1 << R_STRING):
            count = visit(tree, context, find_route(tree.routes, route_key(group, R_STRING, about, token)), count)
    elif token != UNKNOWN_TOKEN and kinds & (1 << R_BOOLEAN):
        key = route_key(group, R_BOOLEAN, about, token - FALSE_TOKEN)
        count = visit(tree, context, find_route(tree.routes, key), count)
    return count


@kernel
def compare_text(vocabulary: t.Vocabulary, string: int, text: Bytes, start: int, stop: int) -> int:
    """-1, 0 or 1: how a text of the notification stands to an interned string, by code point."""
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
    """The same for the digits of a number: too rare to be compiled into the caller."""
    return fits_pattern(vocabulary, kind, string, digits, start, stop)


@inlined
def is_listed(code: t.U64, context: Context, at: int) -> tuple[bool, bool]:
    """(is the value's class named in the list, is the value in it)."""
    word = code[at]
    about, counts = attribute_in(word), payload_in(word)
    numbers, strings, booleans = counts & 0x3FF, (counts >> 10) & 0x3FF, counts >> 20
    token = context.values[about, TOKEN]
    if token == NO_TOKEN:
        if context.quantised[about] < 0:
            return False, False
        number = double_of(U(context.values[about, NUMBER]))
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
def holds_rarely(vocabulary: t.Vocabulary, code: t.U64, context: Context, data: Bytes, at: int) -> bool:
    """The kinds of constraints that are not worth a place in the inner loop."""
    word = code[at]
    kind, about = kind_in(word), attribute_in(word)
    start, stop = context.values[about, TEXT_START], context.values[about, TEXT_STOP]
    if kind == K_TEXT_RANGE:
        if start < 0:
            return False
        strict = payload_in(word)
        low, high = np.int64(code[at + 1]) - 1, np.int64(code[at + 2]) - 1
        if low >= 0 and compare_text(vocabulary, low, data, start, stop) < (1 if strict & 1 else 0):
            return False
        return not (high >= 0 and compare_text(vocabulary, high, data, start, stop) > (-1 if strict & 2 else 0))
    if kind >= K_PREFIX:
        if start >= 0:
            return fits_pattern(vocabulary, kind, payload_in(word), data, start, stop)
        if start == -1:
            return False
        return digits_fit(vocabulary, kind, payload_in(word), context.digits, -2 - start, stop)
    named, found = is_listed(code, context, at)
    return found if kind == K_ONE_OF else named and not found


@inlined
def satisfies(vocabulary: t.Vocabulary, code: t.U64, context: Context, data: Bytes, record: int) -> bool:
    """Does the notification satisfy the program of a record?"""
    at = record + HEAD_WORDS
    while True:
        word = code[at]
        kind, about = kind_in(word), attribute_in(word)
        if kind == K_INTERVAL:
            number = double_of(U(context.values[about, NUMBER]))
            holds = (number >= double_of(code[at + 1])) & (number <= double_of(code[at + 2]))
        elif kind <= K_BOOLEAN:
            holds = U(context.values[about, TOKEN]) << U(32) == (word >> U(32)) << U(32)
        elif kind <= K_ABSENT:
            holds = (context.quantised[about] >= 0) == (kind == K_EXISTS)
        else:
            holds = holds_rarely(vocabulary, code, context, data, at)
        if not holds:
            return False
        if is_last(word):
            return True
        at += 1 + words_in(word)


@inlined
def emit(filters: t.Filters, record: int, out: t.I64, found: int) -> int:
    """The ids of everyone who wants a record; counts on when there is no room, so that the caller knows how much."""
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
    """Negative when the value of a guard's attribute is outside of its bounds. Arithmetic, since nobody can foresee the
    outcome: a branch for each test would mostly be guessed wrongly."""
    value = np.int64(quantised[(guard >> U(22)) & U(1023)])
    above = value - np.int64((guard >> U(11)) & U(2047))
    return above | (np.int64(guard & U(2047)) - above)


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
                record = np.int64(filed & U(0xFFFFFFFF))
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
    """(how many ids there are in `out` after this notification, where it ends)."""
    context.counters[NOTIFICATIONS] += 1
    # By chance, not every so many: devices take turns, and one that is always skipped would seem not to exist.
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
    """Matches the notifications from `begin` on: notification i satisfies `out[offsets[i]:offsets[i + 1]]`. One whose
    start is -1 follows the one before it, and the start is written down.

    Returns (the first that did not fit into `out` any more, room that it needs in `out` from its offset on)."""
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
    """How many notifications the PUBLISH frames in `data` hold."""
    count, position = np.int64(0), np.int64(0)
    while position < data.shape[0]:
        items, _first = array_at(data, position + FRAME_HEADER)
        count += items
        position = frame_end(data, position)
    return count


@kernel
def find_in_frames(data: Bytes, starts: t.I64) -> None:
    """Writes where the first notification of each frame starts, and -1 for those that follow it."""
    number, position = np.int64(0), np.int64(0)
    while position < data.shape[0]:
        items, first = array_at(data, position + FRAME_HEADER)
        for k in range(items):
            starts[number + k] = first if k == 0 else -1
        number += items
        position = frame_end(data, position)


@inlined
def frame_end(data: Bytes, position: int) -> int:
    return position + FRAME_HEADER + np.int64(short_word(data, position, 4))


@kernel
def join_matches(
    offsets: t.I64, ids: t.I64, other_offsets: t.I64, other_ids: t.I64, joined_offsets: t.I64, joined: t.I64
) -> None:
    """Puts the ids that two trees have found for each notification together."""
    found = np.int64(0)
    for i in range(offsets.shape[0] - 1):
        for k in range(offsets[i], offsets[i + 1]):
            joined[found] = ids[k]
            found += 1
        for k in range(other_offsets[i], other_offsets[i + 1]):
            joined[found] = other_ids[k]
            found += 1
        joined_offsets[i + 1] = found
