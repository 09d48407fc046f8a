"""Matching: a notification's bytes in, the ids of the subscriptions that it satisfies out; no Python object between.

Three steps for each notification. *Read*: its attributes, as far as any filter names them, go into arrays by attribute.
*Collect*: every value, cell, bucket and pattern of theirs leads to nodes of the tree; split nodes lead on. *Scan*: each
entry of these nodes has a guard, one word that rules out most of what does not match; what passes is verified by
running its program. The context belongs to one thread; the tables are only read, but for counts of what was seen.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidegate.layers.index import tables as t
from tidegate.layers.index.program_kernel import (
    K_ABSENT,
    K_BOOLEAN,
    K_EXISTS,
    K_INTERVAL,
    K_NUMBER,
    K_ONE_OF,
    K_PREFIX,
    K_STRING,
    K_SUFFIX,
    K_TEXT_RANGE,
    Cast,
    attribute_in,
    is_last,
    kind_in,
    make_cast,
    payload_in,
    read_number,
    words_in,
)
from tidegate.layers.index.storage_kernel import (
    byte_at,
    find_string,
    hash_start,
    hash_step,
    inlined,
    kernel,
)
from tidegate.layers.index.tree_kernel import (
    BUCKET_SHIFT,
    GRAM_BYTES,
    LEVEL_BITS,
    R_ABOVE,
    R_ANY,
    R_BELOW,
    R_BOOLEAN,
    R_CELL,
    R_GRAM,
    R_NUMBER,
    R_PREFIX,
    R_STRING,
    R_SUFFIX,
    find_node,
    quantise,
    route_key,
)

U = np.uint64

IS_ABSENT = 0
IS_NUMBER = 1
IS_STRING = 2
IS_BOOLEAN = 3
DIGITS = 20
PATTERN_KINDS = (1 << R_PREFIX) | (1 << R_SUFFIX) | (7 << R_GRAM)

VISITED = 0
SCANNED = 1
VERIFIED = 2
STAMP = 3


class Context(NamedTuple):
    """What one thread needs to match. Between two notifications `classes` is all absent and `places` all -1 but the
    first, which lets an entry without a guard pass."""

    classes: NDArray[np.int8]
    numbers: t.F64
    strings: t.I64
    text_starts: t.I64
    text_stops: t.I64
    has_digits: NDArray[np.int8]
    places: t.I32
    present: t.I64
    digits: NDArray[np.uint8]
    nodes: t.I32
    stamps: t.I64
    cast: Cast
    counters: t.I64


def make_context(tables: t.Tables) -> Context:
    attributes, nodes = len(tables.attributes), len(tables.nodes)
    places = np.full(3 * attributes + 1, -1, np.int32)
    places[0] = 0
    return Context(
        classes=np.zeros(attributes, np.int8),
        numbers=np.zeros(attributes, np.float64),
        strings=np.zeros(attributes, np.int64),
        text_starts=np.zeros(attributes, np.int64),
        text_stops=np.zeros(attributes, np.int64),
        has_digits=np.zeros(attributes, np.int8),
        places=places,
        present=np.zeros(64, np.int64),
        digits=np.zeros(64 * DIGITS, np.uint8),
        nodes=np.zeros(nodes + 1, np.int32),
        stamps=np.zeros(nodes, np.int64),
        cast=make_cast(),
        counters=np.zeros(4, np.int64),
    )


@inlined
def text_bounds(data, position):
    """(start, stop) of a string that is known to be well-formed."""
    tag = data[position]
    if tag & 0xE0 == 0xA0:
        return position + 1, position + 1 + np.int64(tag & 0x1F)
    if tag == 0xD9:
        return position + 2, position + 2 + np.int64(data[position + 1])
    length = np.int64(data[position + 1]) << 8 | np.int64(data[position + 2])
    if tag == 0xDA:
        return position + 3, position + 3 + length
    length = length << 16 | np.int64(data[position + 3]) << 8 | np.int64(data[position + 4])
    return position + 5, position + 5 + length


@inlined
def payload_end(data, position):
    """The end of a `bin`, the one value that no filter looks at."""
    width = 1 << np.int64(data[position] - 0xC4)
    length = np.int64(0)
    for k in range(width):
        length = length << 8 | np.int64(data[position + 1 + k])
    return position + 1 + width + length


@inlined
def read_map(tables, context, data, position):
    """Reads one notification, which the door has checked, into the context; how many of its attributes are known."""
    tag = data[position]
    if tag & 0xF0 == 0x80:
        count = np.int64(tag & 15)
        position += 1
    else:
        count = np.int64(data[position + 1]) << 8 | np.int64(data[position + 2])
        position += 3
        if tag == 0xDF:
            count = count << 16 | np.int64(data[position]) << 8 | np.int64(data[position + 1])
            position += 2
    known = np.int64(0)
    for _ in range(count):
        start, stop = text_bounds(data, position)
        name = find_string(tables.string_slots, tables.string_hashes, tables.strings, tables.bytes, data, start, stop)
        about = np.int64(tables.attribute_of[name]) if name >= 0 else np.int64(-1)
        position = read_value(tables, context, data, stop, about, known)
        if about >= 0:
            context.present[known] = about
            tables.attribute_seen[about] += 1
            known += 1
    return known


@inlined
def read_value(tables, context, data, position, about, known):
    """Reads one value; keeps it when a filter names its attribute. Returns where it ends."""
    tag = data[position]
    if tag & 0xE0 == 0xA0 or (tag >= 0xD9 and tag <= 0xDB):
        start, stop = text_bounds(data, position)
        if about >= 0:
            string = find_string(
                tables.string_slots, tables.string_hashes, tables.strings, tables.bytes, data, start, stop
            )
            if string >= 0:
                tables.string_seen[string] += 1
                context.places[3 * about + 2] = string & 0xFFFF
            context.classes[about] = IS_STRING
            context.strings[about] = string
            context.text_starts[about] = start
            context.text_stops[about] = stop
            context.has_digits[about] = 0
        return stop
    if tag == 0xC2 or tag == 0xC3:
        if about >= 0:
            context.classes[about] = IS_BOOLEAN
            context.strings[about] = np.int64(tag) - 0xC2
            context.places[3 * about + 3] = np.int64(tag) - 0xC2
        return position + 1
    if tag >= 0xC4 and tag <= 0xC6:
        return payload_end(data, position)
    number, position = read_number(data, position, context.cast)
    if about >= 0:
        context.classes[about] = IS_NUMBER
        context.numbers[about] = number + 0.0
        context.places[3 * about + 1] = quantise(number, context.cast)
        context.text_starts[about] = -1
        if tables.attributes[about, t.PATTERNS]:
            write_digits(context, about, known, number)
    return position


@inlined
def write_digits(context, about, known, number):
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
    context.text_starts[about] = start
    context.text_stops[about] = stop
    context.has_digits[about] = 1


@inlined
def clear(context, known):
    for k in range(known):
        about = context.present[k]
        context.classes[about] = IS_ABSENT
        context.places[3 * about + 1] = -1
        context.places[3 * about + 2] = -1
        context.places[3 * about + 3] = -1


@inlined
def visit(tables, context, key, count):
    node = find_node(tables.route_keys, tables.route_nodes, key)
    if node < 0:
        return count
    context.nodes[count] = node
    return count + 1


@inlined
def collect(tables, context, data, known):
    """The nodes that a notification leads to: the root, the routes of each attribute, and their children."""
    context.nodes[0] = 0
    count = np.int64(1)
    present = U(0)
    for k in range(known):
        about = context.present[k]
        present |= U(1) << U(about & 15)
        kinds = tables.attributes[about, t.KINDS]
        if kinds & (1 << R_ANY):
            count = visit(tables, context, route_key(0, R_ANY, about, 0), count)
        group = context.classes[about]
        if group == IS_NUMBER:
            count = collect_number(tables, context, 0, about, kinds, count)
            count = collect_bounds(tables, context, about, kinds, count)
        elif group == IS_STRING:
            if kinds & (1 << R_STRING) and context.strings[about] >= 0:
                count = visit(tables, context, route_key(0, R_STRING, about, context.strings[about]), count)
        elif kinds & (1 << R_BOOLEAN):
            count = visit(tables, context, route_key(0, R_BOOLEAN, about, context.strings[about]), count)
        if kinds & PATTERN_KINDS and group != IS_BOOLEAN and context.text_starts[about] >= 0:
            if context.has_digits[about]:
                count = collect_patterns(tables, context, context.digits, about, kinds, count)
            else:
                count = collect_patterns(tables, context, data, about, kinds, count)
    place = np.int64(1)
    while place < count:
        node = np.int64(context.nodes[place])
        place += 1
        if tables.nodes[node, t.SPLIT]:
            count = collect_children(tables, context, node, count)
    return count, present


@inlined
def collect_number(tables, context, node, about, kinds, count):
    if kinds & (1 << R_NUMBER):
        context.cast.doubles[0] = context.numbers[about]
        word = context.cast.words[0]
        count = visit(tables, context, route_key(node, R_NUMBER, about, word), count)
    levels = kinds >> R_CELL
    value = np.int64(context.places[3 * about + 1])
    level = 0
    while levels:
        if levels & 1:
            key = route_key(node, R_CELL + level, about, value >> (LEVEL_BITS * level))
            count = visit(tables, context, key, count)
        levels >>= 1
        level += 1
    return count


@inlined
def collect_bounds(tables, context, about, kinds, count):
    """The buckets of one-sided bounds: `a>b` for all b up to the value, `a<b` for all from it on."""
    bucket = np.int64(context.places[3 * about + 1]) >> BUCKET_SHIFT
    if kinds & (1 << R_ABOVE):
        for word in range((bucket >> 6) + 1):
            bits = tables.buckets[about, 0, word]
            if bits == U(0):
                continue
            if word == bucket >> 6 and bucket & 63 != 63:
                bits &= (U(1) << U((bucket & 63) + 1)) - U(1)
            count = collect_buckets(tables, context, R_ABOVE, about, word, bits, count)
    if kinds & (1 << R_BELOW):
        for word in range(bucket >> 6, t.BUCKET_WORDS):
            bits = tables.buckets[about, 1, word]
            if bits == U(0):
                continue
            if word == bucket >> 6:
                bits &= ~((U(1) << U(bucket & 63)) - U(1))
            count = collect_buckets(tables, context, R_BELOW, about, word, bits, count)
    return count


@inlined
def collect_buckets(tables, context, kind, about, word, bits, count):
    bit = 0
    while bits != U(0):
        if bits & U(1):
            count = visit(tables, context, route_key(0, kind, about, 64 * word + bit), count)
        bits >>= U(1)
        bit += 1
    return count


@inlined
def collect_patterns(tables, context, text, about, kinds, count):
    start, stop = context.text_starts[about], context.text_stops[about]
    length = stop - start
    if kinds & (1 << R_PREFIX):
        wanted = tables.attributes[about, t.PREFIXES] >> 1
        value = hash_start()
        k = start
        while wanted and k < stop:
            value = hash_step(value, text[k])
            k += 1
            if wanted & 1:
                count = visit(tables, context, route_key(0, R_PREFIX, about, value), count)
            wanted >>= 1
    if kinds & (1 << R_SUFFIX):
        wanted = tables.attributes[about, t.SUFFIXES] >> 1
        value = hash_start()
        k = stop - 1
        while wanted and k >= start:
            value = hash_step(value, text[k])
            k -= 1
            if wanted & 1:
                count = visit(tables, context, route_key(0, R_SUFFIX, about, value), count)
            wanted >>= 1
    grams = (kinds >> R_GRAM) & 7
    if grams:
        context.counters[STAMP] += 1
        for k in range(length):
            count = collect_grams(tables, context, text, start + k, stop, about, grams, count)
    return count


@inlined
def collect_grams(tables, context, text, at, stop, about, grams, count):
    """A text has the same letters in several places, so a node is taken once a text."""
    value = hash_start()
    for size in range(min(GRAM_BYTES, stop - at)):
        value = hash_step(value, text[at + size])
        if (grams >> size) & 1:
            node = find_node(tables.route_keys, tables.route_nodes, route_key(0, R_GRAM + size, about, value))
            if node >= 0 and context.stamps[node] != context.counters[STAMP]:
                context.stamps[node] = context.counters[STAMP]
                context.nodes[count] = node
                count += 1
    return count


@inlined
def collect_children(tables, context, node, count):
    place = np.int64(tables.nodes[node, t.DIMENSIONS])
    while place >= 0:
        about = np.int64(tables.dimensions[place, 0])
        kinds = np.int64(tables.dimensions[place, 1])
        group = context.classes[about]
        if group == IS_NUMBER:
            count = collect_number(tables, context, node, about, kinds, count)
        elif group == IS_STRING:
            if kinds & (1 << R_STRING) and context.strings[about] >= 0:
                count = visit(tables, context, route_key(node, R_STRING, about, context.strings[about]), count)
        elif group == IS_BOOLEAN and kinds & (1 << R_BOOLEAN):
            count = visit(tables, context, route_key(node, R_BOOLEAN, about, context.strings[about]), count)
        place = np.int64(tables.dimensions[place, 2])
    return count


@kernel
def compare_text(tables, string, text, start, stop):
    """-1, 0 or 1: how a text of the notification stands to an interned string, by code point."""
    offset, length = np.int64(tables.strings[string, 0]), np.int64(tables.strings[string, 1])
    for k in range(min(length, stop - start)):
        ours, theirs = text[start + k], byte_at(tables.bytes, offset, k)
        if ours != theirs:
            return -1 if ours < theirs else 1
    if stop - start == length:
        return 0
    return -1 if stop - start < length else 1


@inlined
def has_text_at(tables, string, text, at):
    offset, length = np.int64(tables.strings[string, 0]), np.int64(tables.strings[string, 1])
    for k in range(length):
        if text[at + k] != byte_at(tables.bytes, offset, k):
            return False
    return True


@kernel
def fits_pattern(tables, kind, string, text, start, stop):
    length = np.int64(tables.strings[string, 1])
    if length > stop - start:
        return False
    if kind == K_PREFIX:
        return has_text_at(tables, string, text, start)
    if kind == K_SUFFIX:
        return has_text_at(tables, string, text, stop - length)
    for at in range(start, stop - length + 1):
        if has_text_at(tables, string, text, at):
            return True
    return False


@kernel
def is_listed(tables, context, at, about):
    """(is the value's class named in the list, is the value in it)."""
    word = tables.code[at]
    counts = payload_in(word)
    numbers, strings, booleans = counts & 0x3FF, (counts >> 10) & 0x3FF, counts >> 20
    group = context.classes[about]
    if group == IS_NUMBER:
        for k in range(at + 1, at + 1 + numbers):
            if tables.code_numbers[k] == context.numbers[about]:
                return True, True
        return numbers > 0, False
    if group == IS_STRING:
        for k in range(at + 1 + numbers, at + 1 + numbers + strings):
            if np.int64(tables.code[k]) == context.strings[about]:
                return True, True
        return strings > 0, False
    if group == IS_BOOLEAN:
        return booleans > 0, (booleans >> context.strings[about]) & 1 == 1
    return False, False


@kernel
def holds_rarely(tables, context, data, at):
    """The kinds of constraints that are not worth a place in the inner loop."""
    word = tables.code[at]
    kind, about = kind_in(word), attribute_in(word)
    group = context.classes[about]
    if kind == K_TEXT_RANGE:
        if group != IS_STRING:
            return False
        start, stop, strict = context.text_starts[about], context.text_stops[about], payload_in(word)
        low, high = np.int64(tables.code[at + 1]) - 1, np.int64(tables.code[at + 2]) - 1
        if low >= 0 and compare_text(tables, low, data, start, stop) < (1 if strict & 1 else 0):
            return False
        return not (high >= 0 and compare_text(tables, high, data, start, stop) > (-1 if strict & 2 else 0))
    if kind >= K_PREFIX:
        if (group != IS_STRING and group != IS_NUMBER) or context.text_starts[about] < 0:
            return False
        start, stop = context.text_starts[about], context.text_stops[about]
        if context.has_digits[about]:
            return fits_pattern(tables, kind, payload_in(word), context.digits, start, stop)
        return fits_pattern(tables, kind, payload_in(word), data, start, stop)
    named, found = is_listed(tables, context, at, about)
    return found if kind == K_ONE_OF else named and not found


@inlined
def run(tables, context, data, offset):
    """Does the notification satisfy the program at `code[offset]`?"""
    at = offset
    while True:
        word = tables.code[at]
        kind, about = kind_in(word), attribute_in(word)
        group = context.classes[about]
        if kind == K_INTERVAL:
            number = context.numbers[about]
            holds = (
                group == IS_NUMBER and number >= tables.code_numbers[at + 1] and number <= tables.code_numbers[at + 2]
            )
        elif kind == K_STRING:
            holds = group == IS_STRING and context.strings[about] == payload_in(word)
        elif kind == K_NUMBER:
            holds = group == IS_NUMBER and context.numbers[about] == tables.code_numbers[at + 1]
        elif kind == K_EXISTS:
            holds = group != IS_ABSENT
        elif kind == K_ABSENT:
            holds = group == IS_ABSENT
        elif kind == K_BOOLEAN:
            holds = group == IS_BOOLEAN and context.strings[about] == payload_in(word)
        else:
            holds = holds_rarely(tables, context, data, at)
        if not holds:
            return False
        if is_last(word):
            return True
        at += 1 + words_in(word)


@inlined
def emit(tables, item, out, found):
    """The ids of everyone who wants a filter; counts on when there is no room, so that the caller knows how much."""
    place = np.int64(tables.filters[item, t.FIRST])
    while place >= 0:
        if found < out.shape[0]:
            out[found] = tables.subscription_ids[place]
        found += 1
        place = np.int64(tables.subscriptions[place, 1])
    return found


@inlined
def scan(tables, context, data, nodes, present, out, found):
    missing = ~present & U(0xFFFF)
    for k in range(nodes):
        node = np.int64(context.nodes[k])
        start, count = np.int64(tables.nodes[node, t.START]), np.int64(tables.nodes[node, t.COUNT])
        context.counters[SCANNED] += count
        for place in range(start, start + count):
            guard = tables.guards[place]
            if guard & missing:
                continue
            value = np.int64(context.places[np.int64(guard >> U(48))])
            if value < np.int64((guard >> U(32)) & U(0xFFFF)) or value > np.int64((guard >> U(16)) & U(0xFFFF)):
                continue
            context.counters[VERIFIED] += 1
            item = np.int64(tables.entries[place])
            if tables.filters[item, t.WORDS] == 0 or run(tables, context, data, np.int64(tables.filters[item, t.CODE])):
                found = emit(tables, item, out, found)
    return found


@kernel
def match_maps(tables, context, data, starts, begin, offsets, out):
    """Matches the notifications from `begin` on: notification i satisfies `out[offsets[i]:offsets[i + 1]]`.

    Returns (the first that did not fit into `out` any more, room that it needs in `out` from its offset on)."""
    found = offsets[begin]
    for i in range(begin, starts.shape[0]):
        tables.state[t.EVENTS] += 1
        known = read_map(tables, context, data, starts[i])
        nodes, present = collect(tables, context, data, known)
        context.counters[VISITED] += nodes
        after = scan(tables, context, data, nodes, present, out, found)
        clear(context, known)
        if after > out.shape[0]:
            return i, after
        found = after
        offsets[i + 1] = found
    return starts.shape[0], found
