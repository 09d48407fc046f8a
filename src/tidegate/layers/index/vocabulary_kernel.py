"""The vocabulary: strings and attribute names, interned and counted, found by their bytes in a notification.

A string is gone with the last filter that refers to it: endless churn with ever-new strings does not grow the arrays.
Notifications only look strings up. The hash of up to eight bytes is a bijection of them, so equal hashes, lengths and
attributes are equal strings; of longer ones the bytes are compared. The hash is seeded, a seed for each index.
"""

from __future__ import annotations

import numpy as np

from tidegate.layers.index import tables as t
from tidegate.layers.index.memory_kernel import (
    GOLDEN,
    Bytes,
    U,
    allocate,
    fold,
    give_back,
    inlined,
    kernel,
    load_word,
    mix,
    release,
    short_word,
    take,
)

SHORT = 8  # bytes of a string that its hash alone tells apart
MIXER = U(0xD6E8FEB86659FD93)


@inlined
def hash_seed(seed: int, about: int, length: int) -> int:
    return U(seed) ^ (U(about) * GOLDEN) ^ (U(length) * MIXER)


@inlined
def hash_text(seed: int, about: int, data: Bytes, start: int, stop: int) -> int:
    value = hash_seed(seed, about, stop - start)
    while stop - start > SHORT:
        value = fold(value ^ load_word(data, start))
        start += SHORT
    return mix(value ^ short_word(data, start, stop - start))


@inlined
def hash_string(vocabulary: t.Vocabulary, string: int, about: int) -> int:
    """The same of a string that is stored."""
    offset, length = np.int64(vocabulary.strings[string, t.OFFSET]), np.int64(vocabulary.strings[string, t.LENGTH])
    value = hash_seed(vocabulary.state[t.SEED], about, length)
    while length > SHORT:
        value = fold(value ^ vocabulary.words[offset])
        offset += 1
        length -= SHORT
    return mix(value ^ vocabulary.words[offset])


@inlined
def slot_tag(about: int, length: int) -> int:
    """What a slot holds of a string beside its id."""
    return U(about) << U(32) | U(min(length, SHORT + 1)) << U(48)


@inlined
def has_bytes(vocabulary: t.Vocabulary, string: int, data: Bytes, start: int, length: int) -> bool:
    """Are the stored bytes, of which there are more than eight, these?"""
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
def find_text(vocabulary: t.Vocabulary, about: int, data: Bytes, start: int, stop: int) -> int:
    """The string of these bytes about an attribute (0: a name), or -1."""
    hashed = hash_text(vocabulary.state[t.SEED], about, data, start, stop)
    tag = slot_tag(about, stop - start)
    mask = vocabulary.slots.shape[0] - 1
    position = np.int64(hashed & U(mask))
    while True:
        word = vocabulary.slots[position, 1]
        if word == U(0):
            return np.int64(-1)
        if vocabulary.slots[position, 0] == hashed and (word ^ tag) >> U(32) == U(0):
            string = np.int64(word & U(0xFFFFFFFF)) - 1
            if stop - start <= SHORT or has_bytes(vocabulary, string, data, start, stop - start):
                return string
        position = (position + 1) & mask


@kernel
def intern(vocabulary: t.Vocabulary, about: int, data: Bytes, start: int, stop: int) -> int:
    """The id of a string, which has one more reference now."""
    string = find_text(vocabulary, about, data, start, stop)
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
    put_string(vocabulary.slots, hash_string(vocabulary, string, about), U(string + 1) | slot_tag(about, length))
    state[t.COUNTED] += 1
    return string


@kernel
def put_string(slots: t.U64, hashed: int, word: int) -> None:
    mask = slots.shape[0] - 1
    position = np.int64(hashed & U(mask))
    while slots[position, 1] != U(0):
        position = (position + 1) & mask
    slots[position, 0] = hashed
    slots[position, 1] = word


@kernel
def refill_strings(slots: t.U64, old: t.U64) -> None:
    """Fills a larger table with the strings of an old one."""
    for k in range(old.shape[0]):
        if old[k, 1] != U(0):
            put_string(slots, old[k, 0], old[k, 1])


@kernel
def forget_string(vocabulary: t.Vocabulary, about: int, string: int) -> None:
    """One reference less; the string goes with the last."""
    vocabulary.strings[string, t.REFERENCES] -= 1
    if vocabulary.strings[string, t.REFERENCES] > 0:
        return
    state = vocabulary.state
    erase_string(vocabulary.slots, hash_string(vocabulary, string, about), U(string + 1))
    units = max((np.int64(vocabulary.strings[string, t.LENGTH]) + 7) >> 3, 1)
    release(vocabulary.words, state, np.int64(vocabulary.strings[string, t.OFFSET]), units)
    give_back(vocabulary.strings, state, t.FREE, t.OFFSET, string)
    state[t.COUNTED] -= 1


@kernel
def erase_string(slots: t.U64, hashed: int, item: int) -> None:
    mask = slots.shape[0] - 1
    hole = np.int64(hashed & U(mask))
    while slots[hole, 1] & U(0xFFFFFFFF) != item:
        hole = (hole + 1) & mask
    close_hole(slots, hole)


@inlined
def close_hole(slots: t.U64, hole: int) -> None:
    """Empties a slot of a table of (hash, what) and moves back what probed past it."""
    mask = slots.shape[0] - 1
    position = hole
    while True:
        position = (position + 1) & mask
        if slots[position, 1] == U(0):
            break
        home = np.int64(slots[position, 0] & U(mask))
        # It may move back to the hole unless its home lies behind the hole, cyclically.
        if ((position - home) & mask) >= ((position - hole) & mask):
            slots[hole, 0] = slots[position, 0]
            slots[hole, 1] = slots[position, 1]
            hole = position
    slots[hole, 0] = U(0)
    slots[hole, 1] = U(0)


@kernel
def use_attribute(vocabulary: t.Vocabulary, data: Bytes, start: int, stop: int) -> int:
    """The number of an attribute by its name, which has one more reference now."""
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
    """One reference less; its name loses one as well, and an attribute that nobody names is gone."""
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
    """Up to eight bytes of a stored string as a word, from `start` on."""
    offset = np.int64(vocabulary.strings[string, t.OFFSET]) + (start >> 3)
    shift = 8 * (start & 7)
    word = vocabulary.words[offset] >> U(shift)
    if shift + 8 * count > 64:
        word |= vocabulary.words[offset + 1] << U(64 - shift)
    return word & (U(0xFFFFFFFFFFFFFFFF) >> U(64 - 8 * count))
