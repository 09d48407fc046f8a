"""A filter as a record: who wants it, and a program of a few words a constraint, the most selective first.

    owner   the id of its one subscription; or, with the top bit, the first place in the list of its subscriptions
    meta    words of the record (16 bits) · generation of the tree that it is filed in (1) · is empty (1) · hash (32)
    then, for each constraint,
    header  attribute (16 bits) · kind (4) · is last (1) · operand words (10) · at 32: a string's id, a boolean, counts
    operands of that kind

A program says exactly what `Filter.matches` says; match_kernel runs it. It is made of a packed filter (packing.py),
which is MessagePack: [[name, operator, operand, …], …]. Two intervals on one attribute become one; filters with the
same constraints, in any order, share a record: the hash is a sum over the constraints.
"""

from __future__ import annotations

import numpy as np

from tidegate.layers.index import tables as t
from tidegate.layers.index.intrinsic_kernel import double_of, word_of
from tidegate.layers.index.memory_kernel import (
    Bytes,
    U,
    allocate,
    big_endian_word,
    inlined,
    kernel,
    mix,
)
from tidegate.layers.index.vocabulary_kernel import forget_attribute, forget_string, intern, use_attribute
from tidegate.layers.scan_kernel import big_endian, length_of

# Operators of a packed filter, in the order of packing.OPERATORS.
EQUAL, NOT_EQUAL, BELOW, AT_MOST, ABOVE, AT_LEAST, RANGE, PREFIX, SUFFIX, CONTAINS, EXISTS, ABSENT = range(12)

# Kinds of constraints in a program.
K_INTERVAL = 0  # between the two operands, inclusive; strict bounds are the next double; a number is low = high
K_STRING = 1  # payload: its token, which is its id
K_BOOLEAN = 2  # payload: its token
K_EXISTS = 3
K_ABSENT = 4
K_ONE_OF = 5  # numbers, then ids of strings; payload: how many of each (10 bits), two bits for booleans
K_NONE_OF = 6
K_TEXT_RANGE = 7  # two operands: ids of strings + 1, or 0 for no bound; payload: 1 the lower is strict, 2 the upper
K_PREFIX = 8
K_SUFFIX = 9
K_CONTAINS = 10

CONSTRAINTS_MAX = 32
PROGRAM_WORDS_MAX = 1024
HEAD_WORDS = 2
OWNER = 0
META = 1
SHARED = U(1) << U(63)
FALSE_TOKEN = -4  # of the value false, and -3 of true
IS_EMPTY = U(1) << U(17)
LAST = U(1) << U(20)


@inlined
def header(about: int, kind: int, words: int, payload: int) -> int:
    return U(about) | U(kind) << U(16) | U(words) << U(21) | U(payload) << U(32)


@inlined
def attribute_in(word: int) -> int:
    return np.int64(word & U(0xFFFF))


@inlined
def kind_in(word: int) -> int:
    return np.int64((word >> U(16)) & U(0xF))


@inlined
def is_last(word: int) -> bool:
    return word & LAST != U(0)


@inlined
def words_in(word: int) -> int:
    return np.int64((word >> U(21)) & U(0x3FF))


@inlined
def payload_in(word: int) -> int:
    return np.int64(word >> U(32))


@inlined
def boolean_in(word: int) -> int:
    """The value of a K_BOOLEAN, 0 or 1."""
    return np.int64(np.int32(word >> U(32))) - FALSE_TOKEN


@inlined
def is_point(code: t.U64, at: int) -> bool:
    """Is the K_INTERVAL one number?"""
    return code[at + 1] == code[at + 2]


@inlined
def words_of_record(code: t.U64, record: int) -> int:
    return np.int64(code[record + META] & U(0xFFFF))


@inlined
def has_constraints(code: t.U64, record: int) -> bool:
    return code[record + META] & IS_EMPTY == U(0)


@inlined
def hash_of_record(code: t.U64, record: int) -> int:
    return code[record + META] >> U(32)


@inlined
def generation_of(code: t.U64, record: int) -> int:
    return np.int64((code[record + META] >> U(16)) & U(1))


@inlined
def set_generation(code: t.U64, record: int, generation: int) -> None:
    code[record + META] = (code[record + META] & ~(U(1) << U(16))) | U(generation) << U(16)


@inlined
def is_text(tag: int) -> bool:
    return tag & 0xE0 == 0xA0 or (tag >= 0xD9 and tag <= 0xDB)


@inlined
def is_boolean(tag: int) -> bool:
    return tag == 0xC2 or tag == 0xC3


@inlined
def text_bounds(data: Bytes, position: int) -> tuple[int, int]:
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
def single_of(bits: int) -> float:
    """The number with these bits as a 32-bit float."""
    sign, exponent, fraction = bits >> U(31), (bits >> U(23)) & U(0xFF), bits & U(0x7FFFFF)
    if exponent == U(0):
        number = np.float64(fraction) * 2.0**-149
        return -number if sign else number
    return double_of(sign << U(63) | (exponent + U(896)) << U(52) | fraction << U(29))


@inlined
def read_number(data: Bytes, position: int) -> tuple[float, int]:
    """(number, position after it) of a MessagePack int or float."""
    tag = data[position]
    if tag < 0x80:
        return np.float64(tag), position + 1
    if tag == 0xCB:
        return double_of(big_endian_word(data, position + 1)), position + 9
    return read_rarer_number(data, position)


@kernel
def read_rarer_number(data: Bytes, position: int) -> tuple[float, int]:
    tag = data[position]
    if tag >= 0xE0:
        return np.float64(np.int64(tag) - 256), position + 1
    if tag == 0xCA:
        return single_of(big_endian(data, position + 1, 4)), position + 5
    width = 1 << np.int64((tag - 0xCC) & 3)
    value = np.int64(big_endian(data, position + 1, width))
    if tag >= 0xD0 and width < 8 and value >> (8 * width - 1):
        value -= np.int64(1) << (8 * width)
    return np.float64(value), position + 1 + width


@inlined
def array_at(data: Bytes, position: int) -> tuple[int, int]:
    """(length, position of the first item) of a MessagePack array."""
    tag = data[position]
    if tag & 0xF0 == 0x90:
        return np.int64(tag & 15), position + 1
    width = 2 if tag == 0xDC else 4
    return length_of(data, position + 1, data.shape[0], width), position + 1 + width


@kernel
def translate(vocabulary: t.Vocabulary, data: Bytes, position: int, program: t.U64, starts: t.I64) -> tuple[int, int]:
    """Translates one packed filter into `program`, a constraint after another, `starts` saying where each begins.

    Returns (constraints, position after the filter). Every string and attribute in it is referred to."""
    count, position = array_at(data, position)
    number = np.int64(0)
    starts[0] = 0
    for _ in range(count):
        items, position = array_at(data, position)
        name_start, name_stop = text_bounds(data, position)
        about = use_attribute(vocabulary, data, name_start, name_stop)
        at = starts[number]
        words, position = translate_constraint(
            vocabulary, data, name_stop + 1, about, np.int64(data[name_stop]), items - 2, program, at
        )
        number += 1
        starts[number] = words
        if kind_in(program[at]) == K_INTERVAL and joins_interval(program, starts, number - 1):
            forget_attribute(vocabulary, about)
            number -= 1
    return number, position


@kernel
def joins_interval(program: t.U64, starts: t.I64, number: int) -> bool:
    """Narrows an earlier interval on the same attribute by this one, if there is one."""
    at = starts[number]
    for earlier in range(number):
        other = starts[earlier]
        if program[other] == program[at]:
            program[other + 1] = word_of(max(double_of(program[other + 1]), double_of(program[at + 1])))
            program[other + 2] = word_of(min(double_of(program[other + 2]), double_of(program[at + 2])))
            return True
    return False


@kernel
def translate_constraint(
    vocabulary: t.Vocabulary,
    data: Bytes,
    position: int,
    about: int,
    operator: int,
    operands: int,
    program: t.U64,
    at: int,
) -> tuple[int, int]:
    """Writes one constraint at `program[at:]`: (end in the program, end in the data)."""
    if operator == EXISTS or operator == ABSENT:
        program[at] = header(about, K_EXISTS if operator == EXISTS else K_ABSENT, 0, 0)
        return at + 1, position
    tag = data[position]
    if operator >= PREFIX and operator <= CONTAINS:
        start, stop = text_bounds(data, position)
        kind = K_PREFIX + (operator - PREFIX)
        program[at] = header(about, kind, 0, intern(vocabulary, about, data, start, stop))
        return at + 1, stop
    if operator == NOT_EQUAL or (operator == EQUAL and operands > 1):
        kind = K_ONE_OF if operator == EQUAL else K_NONE_OF
        return translate_list(vocabulary, data, position, about, kind, operands, program, at)
    if operator == EQUAL:
        if is_text(tag):
            start, stop = text_bounds(data, position)
            program[at] = header(about, K_STRING, 0, intern(vocabulary, about, data, start, stop))
            return at + 1, stop
        if is_boolean(tag):
            program[at] = header(about, K_BOOLEAN, 0, FALSE_TOKEN + (np.int64(tag) - 0xC2))
            return at + 1, position + 1
        number, position = read_number(data, position)
        return write_interval(about, number, number, program, at), position
    if is_text(tag):
        return translate_text_range(vocabulary, data, position, about, operator, program, at)
    low, high = -np.inf, np.inf
    number, position = read_number(data, position)
    if operator == BELOW:
        high = np.nextafter(number, -np.inf)
    elif operator == AT_MOST:
        high = number
    elif operator == ABOVE:
        low = np.nextafter(number, np.inf)
    elif operator == AT_LEAST:
        low = number
    else:
        low = number
        high, position = read_number(data, position)
    return write_interval(about, low, high, program, at), position


@inlined
def write_interval(about: int, low: float, high: float, program: t.U64, at: int) -> int:
    program[at] = header(about, K_INTERVAL, 2, 0)
    program[at + 1] = word_of(low + 0.0)
    program[at + 2] = word_of(high + 0.0)
    return at + 3


@kernel
def translate_list(
    vocabulary: t.Vocabulary, data: Bytes, position: int, about: int, kind: int, operands: int, program: t.U64, at: int
) -> tuple[int, int]:
    """The packed operands are sorted by class: boolean, number, string."""
    numbers, strings, booleans = np.int64(0), np.int64(0), np.int64(0)
    write = at + 1
    for _ in range(operands):
        tag = data[position]
        if is_boolean(tag):
            booleans |= 1 << (np.int64(tag) - 0xC2)
            position += 1
        elif is_text(tag):
            start, position = text_bounds(data, position)
            program[write] = U(intern(vocabulary, about, data, start, position))
            write += 1
            strings += 1
        else:
            number, position = read_number(data, position)
            program[write] = word_of(number + 0.0)
            write += 1
            numbers += 1
    program[at] = header(about, kind, write - at - 1, numbers | strings << 10 | booleans << 20)
    return write, position


@kernel
def translate_text_range(
    vocabulary: t.Vocabulary, data: Bytes, position: int, about: int, operator: int, program: t.U64, at: int
) -> tuple[int, int]:
    start, stop = text_bounds(data, position)
    first = U(intern(vocabulary, about, data, start, stop)) + U(1)
    low, high, strict = U(0), U(0), 0
    if operator == BELOW:
        high, strict = first, 2
    elif operator == AT_MOST:
        high = first
    elif operator == ABOVE:
        low, strict = first, 1
    elif operator == AT_LEAST:
        low = first
    else:
        low = first
        start, stop = text_bounds(data, stop)
        high = U(intern(vocabulary, about, data, start, stop)) + U(1)
    program[at] = header(about, K_TEXT_RANGE, 2, strict)
    program[at + 1] = low
    program[at + 2] = high
    return at + 3, stop


@kernel
def forget_constraint(vocabulary: t.Vocabulary, code: t.U64, at: int) -> None:
    """Gives back every reference of a constraint."""
    word = code[at]
    kind, about = kind_in(word), attribute_in(word)
    if kind == K_STRING or kind >= K_PREFIX:
        forget_string(vocabulary, about, payload_in(word))
    elif kind == K_ONE_OF or kind == K_NONE_OF:
        numbers = payload_in(word) & 0x3FF
        for k in range(at + 1 + numbers, at + 1 + words_in(word)):
            forget_string(vocabulary, about, np.int64(code[k]))
    elif kind == K_TEXT_RANGE:
        for k in range(at + 1, at + 3):
            if code[k] != U(0):
                forget_string(vocabulary, about, np.int64(code[k]) - 1)
    forget_attribute(vocabulary, about)


@inlined
def hash_constraint(program: t.U64, start: int, stop: int) -> int:
    value = mix(program[start] & ~LAST)
    for k in range(start + 1, stop):
        value = mix(value ^ program[k])
    return value


@inlined
def hash_program(program: t.U64, starts: t.I64, count: int) -> int:
    """32 bits, the same for any order of the constraints."""
    value = U(count)
    for number in range(count):
        value += hash_constraint(program, starts[number], starts[number + 1])
    return mix(value) >> U(32)


@kernel
def is_same(code: t.U64, record: int, program: t.U64, starts: t.I64, count: int) -> bool:
    """Has the record the constraints of the program, in any order? Both have distinct constraints."""
    if starts[count] + HEAD_WORDS != words_of_record(code, record):
        return False
    if count == 0:
        return True
    at = record + HEAD_WORDS
    while True:
        word = code[at]
        length = 1 + words_in(word)
        if not has_constraint(program, starts, count, code, at, length):
            return False
        if is_last(word):
            return True
        at += length


@inlined
def has_constraint(program: t.U64, starts: t.I64, count: int, code: t.U64, at: int, length: int) -> bool:
    for number in range(count):
        start = starts[number]
        if starts[number + 1] - start == length and (program[start] ^ code[at]) & ~LAST == U(0):
            same = True
            for k in range(1, length):
                if program[start + k] != code[at + k]:
                    same = False
                    break
            if same:
                return True
    return False


@kernel
def write_program(code: t.U64, record: int, program: t.U64, starts: t.I64, order: t.I64, count: int) -> None:
    """Writes constraints in the given order into a record."""
    at = record + HEAD_WORDS
    for number in range(count):
        chosen = order[number]
        start, stop = starts[chosen], starts[chosen + 1]
        for k in range(start, stop):
            code[at + k - start] = program[k]
        if number == count - 1:
            code[at] |= LAST
        else:
            code[at] &= ~LAST
        at += stop - start


@kernel
def read_program(code: t.U64, record: int, program: t.U64, starts: t.I64) -> int:
    """Copies the constraints of a record out again: how many."""
    words = words_of_record(code, record) - HEAD_WORDS
    count = np.int64(0)
    at = np.int64(0)
    starts[0] = 0
    while at < words:
        length = 1 + words_in(code[record + HEAD_WORDS + at])
        for k in range(length):
            program[at + k] = code[record + HEAD_WORDS + at + k]
        program[at] &= ~LAST
        at += length
        count += 1
        starts[count] = at
    return count


@kernel
def make_record(filters: t.Filters, program: t.U64, starts: t.I64, order: t.I64, count: int, hashed: int) -> int:
    """A record that nobody owns yet; its offset."""
    words = starts[count] + HEAD_WORDS
    record = allocate(filters.code, filters.state, t.TOP, words)
    filters.code[record + META] = U(words) | (IS_EMPTY if count == 0 else U(0)) | hashed << U(32)
    write_program(filters.code, record, program, starts, order, count)
    return record
