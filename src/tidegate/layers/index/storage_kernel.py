"""Storage for the index in plain arrays: blocks of words that are used again, strings that are counted.

A block of up to 16 words is kept for its exact size, a larger one for the next power of two; freed blocks of a class
are linked through their first word (offset + 1; 0 ends). A string is stored once, with a count of who refers to it, and
is gone with the last one: endless churn with ever-new strings does not grow the arrays. Hash tables use linear
probing and close the hole when an item leaves, so they have no tombstones.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tidegate.layers.index import tables as t

# Without reference counts (`_nrt`): the arrays come in a tuple, and counting would cost two atomic operations for every
# array that a kernel takes out of it (decision 008). So no kernel here may allocate.
kernel = njit(cache=True, nogil=True, _nrt=False)
inlined = njit(cache=True, nogil=True, _nrt=False, inline="always")

U = np.uint64


@inlined
def mix(value):
    """splitmix64's finaliser."""
    value = (value ^ (value >> U(30))) * U(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> U(27))) * U(0x94D049BB133111EB)
    return value ^ (value >> U(31))


@inlined
def hash_start():
    return U(0x9E3779B97F4A7C15)


@inlined
def hash_step(value, byte):
    return (value ^ U(byte)) * U(0x100000001B3)


@inlined
def hash_bytes(data, start, stop):
    value = hash_start()
    for k in range(start, stop):
        value = hash_step(value, data[k])
    return mix(value)


@kernel
def size_class(words):
    """(class, words of a block of that class)."""
    if words <= 16:
        return words, words
    size, number = 32, 17
    while size < words:
        size *= 2
        number += 1
    return number, size


@kernel
def allocate(words, state, top, heads, count):
    number, size = size_class(count)
    head = state[heads + number] - 1
    if head >= 0:
        state[heads + number] = np.int64(words[head])
        return head
    offset = state[top]
    state[top] = offset + size
    return offset


@kernel
def release(words, state, heads, offset, count):
    number, _size = size_class(count)
    words[offset] = U(state[heads + number])
    state[heads + number] = offset + 1


@inlined
def byte_at(words, offset, k):
    return np.uint8((words[offset + (k >> 3)] >> U(8 * (k & 7))) & U(0xFF))


@inlined
def same_text(strings, pool, string, data, start, length):
    if strings[string, 1] != length:
        return False
    offset = np.int64(strings[string, 0])
    for k in range(length):
        if byte_at(pool, offset, k) != data[start + k]:
            return False
    return True


@kernel
def find_string(slots, hashes, strings, pool, data, start, stop):
    """The id of a string, or -1."""
    hashed = hash_bytes(data, start, stop)
    mask = slots.shape[0] - 1
    position = np.int64(hashed & U(mask))
    while True:
        string = np.int64(slots[position]) - 1
        if string < 0:
            return np.int64(-1)
        if hashes[string] == hashed and same_text(strings, pool, string, data, start, stop - start):
            return string
        position = (position + 1) & mask


@kernel
def intern(tables, data, start, stop):
    """The id of a string, which has one more reference now."""
    hashed = hash_bytes(data, start, stop)
    string = find_string(tables.string_slots, tables.string_hashes, tables.strings, tables.bytes, data, start, stop)
    if string >= 0:
        tables.strings[string, 2] += 1
        return string
    state = tables.state
    string = state[t.STRING_FREE] - 1
    if string >= 0:
        state[t.STRING_FREE] = tables.strings[string, 0]
    else:
        string = state[t.STRING_TOP]
        state[t.STRING_TOP] += 1
    length = stop - start
    units = max((length + 7) >> 3, 1)
    offset = allocate(tables.bytes, state, t.BYTES_TOP, t.BYTES_HEADS, units)
    for unit in range(units):
        word = U(0)
        for k in range(min(8, length - 8 * unit)):
            word |= U(data[start + 8 * unit + k]) << U(8 * k)
        tables.bytes[offset + unit] = word
    tables.strings[string, 0] = offset
    tables.strings[string, 1] = length
    tables.strings[string, 2] = 1
    tables.string_hashes[string] = hashed
    tables.string_seen[string] = 0
    tables.attribute_of[string] = -1
    put(tables.string_slots, hashed, string)
    state[t.STRINGS] += 1
    return string


@kernel
def forget_string(tables, string):
    """One reference less; the string goes with the last."""
    tables.strings[string, 2] -= 1
    if tables.strings[string, 2] > 0:
        return
    state = tables.state
    units = max((np.int64(tables.strings[string, 1]) + 7) >> 3, 1)
    release(tables.bytes, state, t.BYTES_HEADS, np.int64(tables.strings[string, 0]), units)
    erase(tables.string_slots, tables.string_hashes, tables.string_hashes[string], string)
    tables.strings[string, 0] = state[t.STRING_FREE]
    state[t.STRING_FREE] = string + 1
    state[t.STRINGS] -= 1


@kernel
def put(slots, hashed, item):
    """Puts an item that is not there into a hash table of items + 1."""
    mask = slots.shape[0] - 1
    position = np.int64(hashed & U(mask))
    while slots[position] != 0:
        position = (position + 1) & mask
    slots[position] = item + 1


@kernel
def erase(slots, hashes, hashed, item):
    """Takes an item out of a hash table of items + 1, and closes the hole."""
    mask = slots.shape[0] - 1
    hole = np.int64(hashed & U(mask))
    while slots[hole] != item + 1:
        hole = (hole + 1) & mask
    position = hole
    while True:
        position = (position + 1) & mask
        other = np.int64(slots[position]) - 1
        if other < 0:
            break
        home = np.int64(hashes[other] & U(mask))
        # An item may move back to the hole unless its home lies behind the hole, cyclically.
        if ((position - home) & mask) >= ((position - hole) & mask):
            slots[hole] = slots[position]
            hole = position
    slots[hole] = 0


@kernel
def refill(slots, hashes, old):
    """Fills a larger table with the items of an old one."""
    for k in range(old.shape[0]):
        item = np.int64(old[k]) - 1
        if item >= 0:
            put(slots, hashes[item], item)


@kernel
def attribute(tables, data, start, stop):
    """The id of an attribute by its name, which has one more reference now."""
    string = intern(tables, data, start, stop)
    number = np.int64(tables.attribute_of[string])
    if number >= 0:
        tables.attributes[number, t.REFERENCES] += 1
        return number
    state = tables.state
    number = state[t.ATTRIBUTE_FREE] - 1
    if number >= 0:
        state[t.ATTRIBUTE_FREE] = tables.attributes[number, t.KINDS]
    else:
        number = state[t.ATTRIBUTE_TOP]
        state[t.ATTRIBUTE_TOP] += 1
    tables.attributes[number, :] = 0
    tables.attributes[number, t.REFERENCES] = 1
    tables.buckets[number, :, :] = U(0)
    tables.domains[number, 0] = np.inf
    tables.domains[number, 1] = -np.inf
    tables.attribute_seen[number] = 0
    tables.names[number] = string
    tables.attribute_of[string] = number
    state[t.ATTRIBUTES] += 1
    return number


@kernel
def forget_attribute(tables, number):
    """One reference less; its name loses one as well, and an attribute that nobody names is gone."""
    string = np.int64(tables.names[number])
    tables.attributes[number, t.REFERENCES] -= 1
    if tables.attributes[number, t.REFERENCES] == 0:
        tables.attribute_of[string] = -1
        tables.attributes[number, t.KINDS] = tables.state[t.ATTRIBUTE_FREE]
        tables.state[t.ATTRIBUTE_FREE] = number + 1
        tables.state[t.ATTRIBUTES] -= 1
    forget_string(tables, string)
