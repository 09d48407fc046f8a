"""A filter as a program: a few words a constraint, the most selective constraint first.

A packed filter (`pack` in packing.py) is MessagePack: [[name, operator, operand, …], …]. It is translated to

    header  attribute (16 bits) · kind (4) · last (1) · operand words (10) · at 32: a string's id, a boolean, counts
    operands of that kind

A program says exactly what `Filter.matches` says; `run` in match_kernel executes it. Two filters with the same
constraints, in any order, share one program: its hash is a sum over the constraints.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidegate.layers.index import tables as t
from tidegate.layers.index.storage_kernel import (
    allocate,
    attribute,
    forget_attribute,
    forget_string,
    inlined,
    intern,
    kernel,
    mix,
)
from tidegate.layers.scan_kernel import big_endian, length_of, text_at

U = np.uint64

# Operators of a packed filter, in the order of packing.OPERATORS.
EQUAL, NOT_EQUAL, BELOW, AT_MOST, ABOVE, AT_LEAST, RANGE, PREFIX, SUFFIX, CONTAINS, EXISTS, ABSENT = range(12)

# Kinds of constraints in a program.
K_EXISTS = 0
K_ABSENT = 1
K_NUMBER = 2  # equals the one operand
K_INTERVAL = 3  # between the two operands, inclusive; strict bounds are the next double
K_STRING = 4
K_BOOLEAN = 5
K_ONE_OF = 6
K_NONE_OF = 7
K_TEXT_RANGE = 8  # two operands: ids of strings + 1, or 0 for no bound; at 32: 1 the lower is strict, 2 the upper
K_PREFIX = 9
K_SUFFIX = 10
K_CONTAINS = 11

CONSTRAINTS_MAX = 32
PROGRAM_WORDS_MAX = 1024


class Cast(NamedTuple):
    """One word of memory under several types, to turn bits into numbers."""

    words: t.U64
    integers: t.I64
    doubles: t.F64
    singles: NDArray[np.float32]


class Program(NamedTuple):
    """A program that is being translated, as words and as numbers in the same memory."""

    words: t.U64
    numbers: t.F64


def make_cast() -> Cast:
    words = np.zeros(1, np.uint64)
    return Cast(words, words.view(np.int64), words.view(np.float64), words.view(np.float32))


def make_program() -> Program:
    words = np.zeros(PROGRAM_WORDS_MAX, np.uint64)
    return Program(words, words.view(np.float64))


@inlined
def header(attribute_number, kind, words, payload):
    return U(attribute_number) | U(kind) << U(16) | U(words) << U(21) | U(payload) << U(32)


@inlined
def attribute_in(word):
    return np.int64(word & U(0xFFFF))


@inlined
def kind_in(word):
    return np.int64((word >> U(16)) & U(0xF))


@inlined
def is_last(word):
    return (word >> U(20)) & U(1) != U(0)


@inlined
def words_in(word):
    return np.int64((word >> U(21)) & U(0x3FF))


@inlined
def payload_in(word):
    return np.int64(word >> U(32))


LAST = U(1) << U(20)


@kernel
def read_number(data, position, cast):
    """(number, position after it) of a MessagePack int or float."""
    tag = data[position]
    if tag < 0x80:
        return np.float64(tag), position + 1
    if tag >= 0xE0:
        return np.float64(np.int64(tag) - 256), position + 1
    if tag == 0xCB:
        cast.words[0] = big_endian(data, position + 1, 8)
        return cast.doubles[0], position + 9
    if tag == 0xCA:
        cast.words[0] = big_endian(data, position + 1, 4)
        return np.float64(cast.singles[0]), position + 5
    width = 1 << np.int64((tag - 0xCC) & 3)
    value = np.int64(big_endian(data, position + 1, width))
    if tag >= 0xD0 and width < 8 and value >> (8 * width - 1):
        value -= np.int64(1) << (8 * width)
    return np.float64(value), position + 1 + width


@inlined
def is_text(tag):
    return tag & 0xE0 == 0xA0 or (tag >= 0xD9 and tag <= 0xDB)


@inlined
def is_boolean(tag):
    return tag == 0xC2 or tag == 0xC3


@kernel
def array_at(data, position, end):
    """(length, position of the first item) of a MessagePack array."""
    tag = data[position]
    if tag & 0xF0 == 0x90:
        return np.int64(tag & 15), position + 1
    width = 2 if tag == 0xDC else 4
    return length_of(data, position + 1, end, width), position + 1 + width


@kernel
def translate(tables, data, position, end, program, starts, cast):
    """Translates one packed filter into `program`, a constraint after another, `starts` saying where each begins.

    Returns (constraints, words, position after the filter). Every string and attribute in it is referred to."""
    count, position = array_at(data, position, end)
    words = np.int64(0)
    for number in range(count):
        items, position = array_at(data, position, end)
        name_start, name_stop = text_at(data, position, end)
        about = attribute(tables, data, name_start, name_stop)
        operator = np.int64(data[name_stop])
        starts[number] = words
        words, position = translate_constraint(
            tables, data, name_stop + 1, end, about, operator, items - 2, program, words, cast
        )
    starts[count] = words
    return count, words, position


@kernel
def translate_constraint(tables, data, position, end, about, operator, operands, program, at, cast):
    """Writes one constraint at `program[at:]`: (end in the program, end in the data)."""
    if operator == EXISTS or operator == ABSENT:
        program.words[at] = header(about, K_EXISTS if operator == EXISTS else K_ABSENT, 0, 0)
        return at + 1, position
    tag = data[position]
    if operator >= PREFIX and operator <= CONTAINS:
        start, stop = text_at(data, position, end)
        kind = K_PREFIX + (operator - PREFIX)
        program.words[at] = header(about, kind, 0, intern(tables, data, start, stop))
        return at + 1, stop
    if operator == NOT_EQUAL or (operator == EQUAL and operands > 1):
        kind = K_ONE_OF if operator == EQUAL else K_NONE_OF
        return translate_list(tables, data, position, end, about, kind, operands, program, at, cast)
    if operator == EQUAL:
        if is_text(tag):
            start, stop = text_at(data, position, end)
            program.words[at] = header(about, K_STRING, 0, intern(tables, data, start, stop))
            return at + 1, stop
        if is_boolean(tag):
            program.words[at] = header(about, K_BOOLEAN, 0, np.int64(tag) - 0xC2)
            return at + 1, position + 1
        number, position = read_number(data, position, cast)
        program.words[at] = header(about, K_NUMBER, 1, 0)
        program.numbers[at + 1] = number + 0.0
        return at + 2, position
    if is_text(tag):
        return translate_text_range(tables, data, position, end, about, operator, program, at)
    low, high = -np.inf, np.inf
    number, position = read_number(data, position, cast)
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
        high, position = read_number(data, position, cast)
    program.words[at] = header(about, K_INTERVAL, 2, 0)
    program.numbers[at + 1] = low + 0.0
    program.numbers[at + 2] = high + 0.0
    return at + 3, position


@kernel
def translate_list(tables, data, position, end, about, kind, operands, program, at, cast):
    """Numbers first, then ids of strings, one a word; the header counts both and has two bits for booleans. The packed
    operands are sorted by class: boolean, number, string."""
    numbers, strings, booleans = np.int64(0), np.int64(0), np.int64(0)
    write = at + 1
    for _ in range(operands):
        tag = data[position]
        if is_boolean(tag):
            booleans |= 1 << (np.int64(tag) - 0xC2)
            position += 1
        elif is_text(tag):
            start, position = text_at(data, position, end)
            program.words[write] = U(intern(tables, data, start, position))
            write += 1
            strings += 1
        else:
            number, position = read_number(data, position, cast)
            program.numbers[write] = number + 0.0
            write += 1
            numbers += 1
    program.words[at] = header(about, kind, write - at - 1, numbers | strings << 10 | booleans << 20)
    return write, position


@kernel
def translate_text_range(tables, data, position, end, about, operator, program, at):
    start, stop = text_at(data, position, end)
    first = U(intern(tables, data, start, stop)) + U(1)
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
        start, stop = text_at(data, stop, end)
        high = U(intern(tables, data, start, stop)) + U(1)
    program.words[at] = header(about, K_TEXT_RANGE, 2, strict)
    program.words[at + 1] = low
    program.words[at + 2] = high
    return at + 3, stop


@kernel
def forget_program(tables, program, start):
    """Gives back every reference of a program."""
    at = start
    while True:
        word = program[at]
        forget_operands(tables, program, at)
        forget_attribute(tables, attribute_in(word))
        if is_last(word):
            return
        at += 1 + words_in(word)


@kernel
def forget_operands(tables, program, at):
    word = program[at]
    kind = kind_in(word)
    if kind == K_STRING or kind >= K_PREFIX:
        forget_string(tables, payload_in(word))
    elif kind == K_ONE_OF or kind == K_NONE_OF:
        numbers = payload_in(word) & 0x3FF
        for k in range(at + 1 + numbers, at + 1 + words_in(word)):
            forget_string(tables, np.int64(program[k]))
    elif kind == K_TEXT_RANGE:
        for k in range(at + 1, at + 3):
            if program[k] != U(0):
                forget_string(tables, np.int64(program[k]) - 1)


@kernel
def hash_constraint(program, start, stop):
    value = mix(program[start] & ~LAST)
    for k in range(start + 1, stop):
        value = mix(value ^ program[k])
    return value


@kernel
def hash_program(program, starts, count):
    """The same for any order of the constraints; never 0."""
    value = U(count)
    for number in range(count):
        value += hash_constraint(program, starts[number], starts[number + 1])
    return mix(value) | U(1)


@kernel
def same_program(code, offset, words, program, starts, count):
    """Are the programs equal but for the order of their constraints? Both have distinct constraints."""
    if starts[count] != words:
        return False
    at = offset
    while True:
        word = code[at]
        length = 1 + words_in(word)
        if not has_constraint(program, starts, count, code, at, length):
            return False
        if is_last(word):
            return True
        at += length


@kernel
def has_constraint(program, starts, count, code, at, length):
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
def store_program(tables, program, starts, order, count):
    """Copies a program, its constraints in the given order, to a block of `code`; its offset."""
    words = starts[count]
    offset = allocate(tables.code, tables.state, t.CODE_TOP, t.CODE_HEADS, max(words, 1))
    at = offset
    for number in range(count):
        chosen = order[number]
        for k in range(starts[chosen], starts[chosen + 1]):
            tables.code[at + k - starts[chosen]] = program[k]
        if number == count - 1:
            tables.code[at] |= LAST
        at += starts[chosen + 1] - starts[chosen]
    return offset
