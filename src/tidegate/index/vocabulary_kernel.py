"""The vocabulary: interned strings and attribute names with reference counts, found by their bytes in a notification.

A string is freed with the last filter that refers to it, so endless churn with new strings does not grow the arrays.
Notifications only look strings up; they never add any.

The hash of up to eight bytes is a bijection. Short strings with the same hash, length and attribute are therefore
equal, and only longer ones are compared by their bytes. Each index seeds its hashes differently.
"""

from __future__ import annotations

import numpy as np

from tidegate.index import tables as t
from tidegate.index.hash_table_kernel import erase_pair, home_of, put_pair, slot_after
from tidegate.index.memory_kernel import GOLDEN, MIXER, allocate, fold, give_back, mix, release, take
from tidegate.kernels.bytes_kernel import ALL, LOWER_HALF, Bytes, U, load_word, short_word
from tidegate.kernels.cache import inlined, kernel

SHORT = 8  # strings of up to this many bytes are identified by their hash alone
# Shifts in an item of `slots`; the id of the string + 1 is in the lower half.
SLOT_ATTRIBUTE_SHIFT = 32
SLOT_LENGTH_SHIFT = 48


@inlined
def hash_seed(seed: int, attribute: int, length: int) -> int:
    return U(seed) ^ (U(attribute) * GOLDEN) ^ (U(length) * MIXER)


@inlined
def hash_text(seed: int, attribute: int, data: Bytes, start: int, stop: int) -> int:
    value = hash_seed(seed, attribute, stop - start)
    while stop - start > SHORT:
        value = fold(value ^ load_word(data, start))
        start += SHORT
    return mix(value ^ short_word(data, start, stop - start))


@inlined
def hash_string(vocabulary: t.Vocabulary, string: int, attribute: int) -> int:
    """Returns the hash of a stored string, equal to that of its bytes in `hash_text`."""
    offset, length = np.int64(vocabulary.strings[string, t.OFFSET]), np.int64(vocabulary.strings[string, t.LENGTH])
    value = hash_seed(vocabulary.state[t.SEED], attribute, length)
    while length > SHORT:
        value = fold(value ^ vocabulary.words[offset])
        offset += 1
        length -= SHORT
    return mix(value ^ vocabulary.words[offset])


@inlined
def slot_item(string: int, attribute: int, length: int) -> int:
    """Returns the item of a string in `slots`: its id + 1, its attribute, and its length, at most 9."""
    return U(string + 1) | U(attribute) << U(SLOT_ATTRIBUTE_SHIFT) | U(min(length, SHORT + 1)) << U(SLOT_LENGTH_SHIFT)


@inlined
def has_bytes(vocabulary: t.Vocabulary, string: int, data: Bytes, start: int, length: int) -> bool:
    """Returns whether a stored string of more than eight bytes has exactly these bytes."""
    if vocabulary.strings[string, t.LENGTH] != length:
        return False
    offset = np.int64(vocabulary.strings[string, t.OFFSET])
    while length > SHORT:
        if vocabulary.words[offset] != load_word(data, start):
            return False
        offset += 1
        start += SHORT
        length -= SHORT
    return vocabulary.words[offset] == short_word(data, start, length)


@inlined
def find_text(vocabulary: t.Vocabulary, attribute: int, data: Bytes, start: int, stop: int) -> int:
    """Returns the id of an attribute's string with these bytes, or -1. For attribute 0, the string is a name."""
    hashed = hash_text(vocabulary.state[t.SEED], attribute, data, start, stop)
    like = slot_item(0, attribute, stop - start)
    position = home_of(vocabulary.slots, hashed)
    while True:
        item = vocabulary.slots[position, 1]
        if item == U(0):
            return np.int64(-1)
        if vocabulary.slots[position, 0] == hashed and (item ^ like) >> U(SLOT_ATTRIBUTE_SHIFT) == U(0):
            string = np.int64(item & LOWER_HALF) - 1
            if stop - start <= SHORT or has_bytes(vocabulary, string, data, start, stop - start):
                return string
        position = slot_after(vocabulary.slots, position)


@kernel
def intern(vocabulary: t.Vocabulary, attribute: int, data: Bytes, start: int, stop: int) -> int:
    """Returns the id of a string, storing it if it is new, and adds a reference to it."""
    string = find_text(vocabulary, attribute, data, start, stop)
    if string >= 0:
        vocabulary.strings[string, t.REFERENCES] += 1
        return string
    state, strings = vocabulary.state, vocabulary.strings
    string = take(strings, state, t.TOP, t.FREE, t.OFFSET)
    length = stop - start
    units = max((length + 7) >> 3, 1)
    offset = allocate(vocabulary.words, state, t.WORDS_TOP, units)
    for unit in range(units):
        vocabulary.words[offset + unit] = short_word(data, start + 8 * unit, min(8, length - 8 * unit))
    strings[string, t.OFFSET] = offset
    strings[string, t.LENGTH] = length
    strings[string, t.REFERENCES] = 1
    strings[string, t.ATTRIBUTE] = 0
    vocabulary.string_seen[string] = 0
    put_pair(vocabulary.slots, hash_string(vocabulary, string, attribute), slot_item(string, attribute, length))
    state[t.COUNTED] += 1
    return string


@kernel
def forget_string(vocabulary: t.Vocabulary, attribute: int, string: int) -> None:
    """Drops a reference to a string, and frees the string with the last one."""
    vocabulary.strings[string, t.REFERENCES] -= 1
    if vocabulary.strings[string, t.REFERENCES] > 0:
        return
    state, length = vocabulary.state, string_length(vocabulary, string)
    erase_pair(vocabulary.slots, hash_string(vocabulary, string, attribute), slot_item(string, attribute, length))
    units = max((length + 7) >> 3, 1)
    release(vocabulary.words, state, np.int64(vocabulary.strings[string, t.OFFSET]), units)
    give_back(vocabulary.strings, state, t.FREE, t.OFFSET, string)
    state[t.COUNTED] -= 1


@kernel
def use_attribute(vocabulary: t.Vocabulary, data: Bytes, start: int, stop: int) -> int:
    """Returns the number of the attribute with this name, assigning one if it is new, and adds a reference to both."""
    string = intern(vocabulary, 0, data, start, stop)
    number = np.int64(vocabulary.strings[string, t.ATTRIBUTE])
    if number == 0:
        state, attributes = vocabulary.state, vocabulary.attributes
        number = take(attributes, state, t.ATTRIBUTE_TOP, t.ATTRIBUTE_FREE, t.USES)
        attributes[number, t.USES] = 0
        attributes[number, t.NAME] = string
        attributes[number, t.SUBSCRIBED] = 0
        attributes[number, t.PATTERNS] = 0
        vocabulary.attribute_seen[number] = 0
        vocabulary.strings[string, t.ATTRIBUTE] = number
        state[t.ATTRIBUTES] += 1
    vocabulary.attributes[number, t.USES] += 1
    return number


@kernel
def forget_attribute(vocabulary: t.Vocabulary, number: int) -> None:
    """Drops a reference to an attribute and to its name. An attribute without references is freed."""
    string = np.int64(vocabulary.attributes[number, t.NAME])
    vocabulary.attributes[number, t.USES] -= 1
    if vocabulary.attributes[number, t.USES] == 0:
        vocabulary.strings[string, t.ATTRIBUTE] = 0
        give_back(vocabulary.attributes, vocabulary.state, t.ATTRIBUTE_FREE, t.USES, number)
        vocabulary.state[t.ATTRIBUTES] -= 1
    forget_string(vocabulary, 0, string)


@inlined
def string_length(vocabulary: t.Vocabulary, string: int) -> int:
    return np.int64(vocabulary.strings[string, t.LENGTH])


@inlined
def stored_bytes(vocabulary: t.Vocabulary, string: int, start: int, count: int) -> int:
    """Returns up to eight bytes of a stored string, from `start` on, as a word."""
    offset = np.int64(vocabulary.strings[string, t.OFFSET]) + (start >> 3)
    shift = 8 * (start & 7)
    word = vocabulary.words[offset] >> U(shift)
    if shift + 8 * count > 64:
        word |= vocabulary.words[offset + 1] << U(64 - shift)
    return word & (ALL >> U(64 - 8 * count))
