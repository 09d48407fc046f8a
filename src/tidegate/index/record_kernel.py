"""Records: a filter as the subscriptions that share it, and a program of a few words per constraint.

    owner   the id of its only subscription; or, with the top bit set, the first place in the list of its subscriptions
    meta    words of the record (16 bits) · generation of the tree that it is filed in (1) · is empty (1) · hash (32)
    then, for each constraint, the most selective first,
    header  attribute (16 bits) · kind (4) · is last (1) · operand words (10) · at 32: a string's id, a boolean, counts
    operands of that kind

A program accepts exactly what `Filter.matches` accepts; match_kernel runs it. It is translated from a packed filter
(packing.py), which is MessagePack: [[name, operator, operand, …], …]. Two intervals on one attribute are merged into
one. Filters with the same constraints, in any order, share a record: the hash is a sum over the constraints.

What may go wrong: translation trusts its input. packed_kernel must have accepted the filter.
"""

from __future__ import annotations

import numpy as np

from tidegate.index import tables as t
from tidegate.index.memory_kernel import allocate, mix
from tidegate.index.vocabulary_kernel import forget_attribute, forget_string, intern, use_attribute
from tidegate.kernels.bytes_kernel import Bytes, U
from tidegate.kernels.cache import inlined, kernel
from tidegate.kernels.intrinsic_kernel import double_of, word_of
from tidegate.kernels.msgpack_kernel import FALSE, head_at, is_boolean, is_text, read_number, text_bounds

# Operators of a packed filter, in the order of packing.OPERATORS.
EQUAL, NOT_EQUAL, BELOW, AT_MOST, ABOVE, AT_LEAST, RANGE, PREFIX, SUFFIX, CONTAINS, EXISTS, ABSENT = range(12)

# Kinds of constraints in a program.
K_INTERVAL = 0  # two operands, both inclusive; a strict bound becomes the next double; one number is low = high
K_STRING = 1  # payload: its token, which is its id
K_BOOLEAN = 2  # payload: its token
K_EXISTS = 3
K_ABSENT = 4
K_ONE_OF = 5  # numbers, then ids of strings; payload: how many of each (10 bits), two bits for booleans
K_NONE_OF = 6
K_TEXT_RANGE = 7  # two operands: ids of strings + 1, or 0 for no bound; payload: 1 if the lower is strict, 2 the upper
K_PREFIX = 8
K_SUFFIX = 9
K_CONTAINS = 10

CONSTRAINTS_MAX = 32
PROGRAM_WORDS_MAX = 1024
HEAD_WORDS = 2
OWNER = 0
META = 1
SHARED = U(1) << U(63)
FALSE_TOKEN = -4  # token of the value false; that of true is -3

# The meta word of a record. The words of the record are in the lowest bits.
RECORD_WORDS_MASK = 0xFFFF
GENERATION_SHIFT = 16
IS_EMPTY = U(1) << U(17)
HASH_SHIFT = 32
HASH_BITS = 32

# The header of a constraint. The attribute is in the lowest bits.
ATTRIBUTE_MASK = 0xFFFF
KIND_SHIFT = 16
KIND_MASK = 0xF
LAST = U(1) << U(20)
WORDS_SHIFT = 21
WORDS_MASK = 0x3FF
PAYLOAD_SHIFT = 32

# The payload of a list: how many numbers, how many strings, and a bit for each boolean.
LIST_COUNT_MASK = 0x3FF
STRINGS_SHIFT = 10
BOOLEANS_SHIFT = 20
# Bits of the payload of a K_TEXT_RANGE.
LOW_IS_STRICT = 1
HIGH_IS_STRICT = 2


@inlined
def header(attribute: int, kind: int, words: int, payload: int) -> int:
    return U(attribute) | U(kind) << U(KIND_SHIFT) | U(words) << U(WORDS_SHIFT) | U(payload) << U(PAYLOAD_SHIFT)


@inlined
def attribute_in(word: int) -> int:
    return np.int64(word & U(ATTRIBUTE_MASK))


@inlined
def kind_in(word: int) -> int:
    return np.int64((word >> U(KIND_SHIFT)) & U(KIND_MASK))


@inlined
def is_last(word: int) -> bool:
    return word & LAST != U(0)


@inlined
def words_in(word: int) -> int:
    return np.int64((word >> U(WORDS_SHIFT)) & U(WORDS_MASK))


@inlined
def payload_in(word: int) -> int:
    return np.int64(word >> U(PAYLOAD_SHIFT))


@inlined
def list_counts(word: int) -> tuple[int, int, int]:
    """Returns (numbers, strings, bits of booleans) of a K_ONE_OF or a K_NONE_OF."""
    payload = payload_in(word)
    strings = (payload >> STRINGS_SHIFT) & LIST_COUNT_MASK
    return payload & LIST_COUNT_MASK, strings, payload >> BOOLEANS_SHIFT


@inlined
def boolean_in(word: int) -> int:
    """Returns the value of a K_BOOLEAN, 0 or 1."""
    return np.int64(np.int32(word >> U(PAYLOAD_SHIFT))) - FALSE_TOKEN


@inlined
def is_point(code: t.U64, at: int) -> bool:
    """Returns whether a K_INTERVAL is a single number."""
    return code[at + 1] == code[at + 2]


@inlined
def words_of_record(code: t.U64, record: int) -> int:
    return np.int64(code[record + META] & U(RECORD_WORDS_MASK))


@inlined
def has_constraints(code: t.U64, record: int) -> bool:
    return code[record + META] & IS_EMPTY == U(0)


@inlined
def hash_of_record(code: t.U64, record: int) -> int:
    return code[record + META] >> U(HASH_SHIFT)


@inlined
def generation_of(code: t.U64, record: int) -> int:
    return np.int64((code[record + META] >> U(GENERATION_SHIFT)) & U(1))


@inlined
def set_generation(code: t.U64, record: int, generation: int) -> None:
    code[record + META] = (code[record + META] & ~(U(1) << U(GENERATION_SHIFT))) | U(generation) << U(GENERATION_SHIFT)


@kernel
def translate(vocabulary: t.Vocabulary, data: Bytes, position: int, program: t.U64, starts: t.I64) -> tuple[int, int]:
    """Translates one packed filter into `program`, constraint by constraint; `starts` receives where each begins.

    Returns (constraints, position after the filter). Adds a reference to each string and attribute of the filter; the
    caller gives them back if it does not keep the program."""
    count, position = head_at(data, position)
    number = np.int64(0)
    starts[0] = 0
    for _ in range(count):
        items, position = head_at(data, position)
        name_start, name_stop = text_bounds(data, position)
        attribute = use_attribute(vocabulary, data, name_start, name_stop)
        at = starts[number]
        words, position = translate_constraint(
            vocabulary, data, name_stop + 1, attribute, np.int64(data[name_stop]), items - 2, program, at
        )
        number += 1
        starts[number] = words
        if kind_in(program[at]) == K_INTERVAL and joins_interval(program, starts, number - 1):
            forget_attribute(vocabulary, attribute)
            number -= 1
    return number, position


@kernel
def joins_interval(program: t.U64, starts: t.I64, number: int) -> bool:
    """Merges an interval into an earlier one on the same attribute. Returns whether there was one."""
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
    attribute: int,
    operator: int,
    operands: int,
    program: t.U64,
    at: int,
) -> tuple[int, int]:
    """Writes one constraint at `program[at:]`. Returns (end in the program, end in the data)."""
    if operator == EXISTS or operator == ABSENT:
        program[at] = header(attribute, K_EXISTS if operator == EXISTS else K_ABSENT, 0, 0)
        return at + 1, position
    tag = data[position]
    if operator >= PREFIX and operator <= CONTAINS:
        start, stop = text_bounds(data, position)
        kind = K_PREFIX + (operator - PREFIX)
        program[at] = header(attribute, kind, 0, intern(vocabulary, attribute, data, start, stop))
        return at + 1, stop
    if operator == NOT_EQUAL or (operator == EQUAL and operands > 1):
        kind = K_ONE_OF if operator == EQUAL else K_NONE_OF
        return translate_list(vocabulary, data, position, attribute, kind, operands, program, at)
    if operator == EQUAL:
        if is_text(tag):
            start, stop = text_bounds(data, position)
            program[at] = header(attribute, K_STRING, 0, intern(vocabulary, attribute, data, start, stop))
            return at + 1, stop
        if is_boolean(tag):
            program[at] = header(attribute, K_BOOLEAN, 0, FALSE_TOKEN + (np.int64(tag) - FALSE))
            return at + 1, position + 1
        number, position = read_number(data, position)
        return write_interval(attribute, number, number, program, at), position
    if is_text(tag):
        return translate_text_range(vocabulary, data, position, attribute, operator, program, at)
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
    return write_interval(attribute, low, high, program, at), position


@inlined
def write_interval(attribute: int, low: float, high: float, program: t.U64, at: int) -> int:
    program[at] = header(attribute, K_INTERVAL, 2, 0)
    # Adding 0.0 turns -0.0 into 0.0: equal numbers must have equal bits, for hashes and for routes.
    program[at + 1] = word_of(low + 0.0)
    program[at + 2] = word_of(high + 0.0)
    return at + 3


@kernel
def translate_list(
    vocabulary: t.Vocabulary,
    data: Bytes,
    position: int,
    attribute: int,
    kind: int,
    operands: int,
    program: t.U64,
    at: int,
) -> tuple[int, int]:
    """Writes a list of values. The packed operands are sorted by class: booleans, numbers, strings."""
    numbers, strings, booleans = np.int64(0), np.int64(0), np.int64(0)
    write = at + 1
    for _ in range(operands):
        tag = data[position]
        if is_boolean(tag):
            booleans |= 1 << (np.int64(tag) - FALSE)
            position += 1
        elif is_text(tag):
            start, position = text_bounds(data, position)
            program[write] = U(intern(vocabulary, attribute, data, start, position))
            write += 1
            strings += 1
        else:
            number, position = read_number(data, position)
            program[write] = word_of(number + 0.0)
            write += 1
            numbers += 1
    program[at] = header(
        attribute, kind, write - at - 1, numbers | strings << STRINGS_SHIFT | booleans << BOOLEANS_SHIFT
    )
    return write, position


@kernel
def translate_text_range(
    vocabulary: t.Vocabulary, data: Bytes, position: int, attribute: int, operator: int, program: t.U64, at: int
) -> tuple[int, int]:
    start, stop = text_bounds(data, position)
    first = U(intern(vocabulary, attribute, data, start, stop)) + U(1)
    low, high, strict = U(0), U(0), 0
    if operator == BELOW:
        high, strict = first, HIGH_IS_STRICT
    elif operator == AT_MOST:
        high = first
    elif operator == ABOVE:
        low, strict = first, LOW_IS_STRICT
    elif operator == AT_LEAST:
        low = first
    else:
        low = first
        start, stop = text_bounds(data, stop)
        high = U(intern(vocabulary, attribute, data, start, stop)) + U(1)
    program[at] = header(attribute, K_TEXT_RANGE, 2, strict)
    program[at + 1] = low
    program[at + 2] = high
    return at + 3, stop


@kernel
def forget_constraint(vocabulary: t.Vocabulary, code: t.U64, at: int) -> None:
    """Gives back every reference that a constraint holds."""
    word = code[at]
    kind, attribute = kind_in(word), attribute_in(word)
    if kind == K_STRING or kind >= K_PREFIX:
        forget_string(vocabulary, attribute, payload_in(word))
    elif kind == K_ONE_OF or kind == K_NONE_OF:
        numbers, _strings, _booleans = list_counts(word)
        for k in range(at + 1 + numbers, at + 1 + words_in(word)):
            forget_string(vocabulary, attribute, np.int64(code[k]))
    elif kind == K_TEXT_RANGE:
        for k in range(at + 1, at + 3):
            if code[k] != U(0):
                forget_string(vocabulary, attribute, np.int64(code[k]) - 1)
    forget_attribute(vocabulary, attribute)


@inlined
def hash_constraint(program: t.U64, start: int, stop: int) -> int:
    value = mix(program[start] & ~LAST)
    for k in range(start + 1, stop):
        value = mix(value ^ program[k])
    return value


@inlined
def hash_program(program: t.U64, starts: t.I64, count: int) -> int:
    """Returns a hash of 32 bits that does not depend on the order of the constraints."""
    value = U(count)
    for number in range(count):
        value += hash_constraint(program, starts[number], starts[number + 1])
    return mix(value) >> U(64 - HASH_BITS)


@kernel
def is_same(code: t.U64, record: int, program: t.U64, starts: t.I64, count: int) -> bool:
    """Returns whether a record and a program have the same constraints, in any order. Neither has duplicates."""
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
    """Writes the constraints into a record, in the given order."""
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
    """Copies the constraints of a record into `program`. Returns how many there are."""
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
    """Makes a record that has no subscription yet. Returns its offset."""
    words = starts[count] + HEAD_WORDS
    record = allocate(filters.code, filters.state, t.TOP, words)
    filters.code[record + META] = U(words) | (IS_EMPTY if count == 0 else U(0)) | hashed << U(HASH_SHIFT)
    write_program(filters.code, record, program, starts, order, count)
    return record
