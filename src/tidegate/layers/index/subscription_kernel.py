"""Subscriptions come and go: packed filters are translated, ordered by selectivity, shared when identical, and filed.

The order of a program's constraints is the order of its path in the tree, so it is chosen once, when the first
subscription with that filter comes, from what is known of notifications and of other filters by then. A wrong guess
costs time, never correctness.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tidegate.layers.index import tables as t
from tidegate.layers.index.program_kernel import (
    CONSTRAINTS_MAX,
    K_ABSENT,
    K_BOOLEAN,
    K_CONTAINS,
    K_INTERVAL,
    K_NUMBER,
    K_ONE_OF,
    K_PREFIX,
    K_STRING,
    LAST,
    Cast,
    Program,
    attribute_in,
    forget_program,
    hash_program,
    is_last,
    kind_in,
    make_cast,
    make_program,
    payload_in,
    same_program,
    store_program,
    translate,
    words_in,
)
from tidegate.layers.index.storage_kernel import erase, inlined, kernel, mix, put, release
from tidegate.layers.index.tree_kernel import (
    LEAVES_PER_ROUTE,
    ROUTES_MAX,
    SPLIT_ENTRIES,
    has_room,
    insert,
    remove,
    routes,
)

U = np.uint64

# What one filter may need of strings, of their bytes (in words) and of code, whatever it says.
STRINGS_MARGIN = 320
BYTES_MARGIN = 1 << 14
CODE_MARGIN = 1 << 12
NO_ROOM = -1
ENOUGH_EVENTS = 256


class Scratch(NamedTuple):
    """Room for one insertion or removal; used by the one writer of an index."""

    program: Program
    starts: t.I64
    order: t.I64
    estimates: t.F64
    stack: t.I64
    keys: t.U64
    kinds: t.I64
    cast: Cast


def make_scratch() -> Scratch:
    return Scratch(
        program=make_program(),
        starts=np.zeros(CONSTRAINTS_MAX + 1, np.int64),
        order=np.zeros(CONSTRAINTS_MAX, np.int64),
        estimates=np.zeros(CONSTRAINTS_MAX, np.float64),
        stack=np.zeros(ROUTES_MAX * LEAVES_PER_ROUTE, np.int64),
        keys=np.zeros(ROUTES_MAX, np.uint64),
        kinds=np.zeros(ROUTES_MAX, np.int64),
        cast=make_cast(),
    )


@kernel
def presence(tables, about):
    """The share of notifications that carry an attribute; guessed from the filters until enough are seen."""
    events = tables.state[t.EVENTS]
    if events >= ENOUGH_EVENTS:
        return (tables.attribute_seen[about] + 1.0) / (events + 2.0)
    return (tables.attributes[about, t.SUBSCRIBED] + 1.0) / (tables.state[t.FILTERS] + 2.0)


@kernel
def string_share(tables, about, string):
    """The share of notifications that carry this string."""
    events = tables.state[t.EVENTS]
    if events >= ENOUGH_EVENTS:
        return (tables.string_seen[string] + 0.5) / (events + 1.0)
    subscribed = tables.attributes[about, t.SUBSCRIBED]
    return presence(tables, about) * (tables.strings[string, 2] + 1.0) / (subscribed + 8.0)


@kernel
def interval_share(tables, about, low, high):
    """By width within the bounds that filters have on the attribute."""
    if low > high:
        return 0.0
    lowest, highest = tables.domains[about, 0], tables.domains[about, 1]
    if not highest > lowest:
        return 0.5 * presence(tables, about)
    share = (min(high, highest) - max(low, lowest)) / (highest - lowest)
    return presence(tables, about) * min(max(share, 0.004), 1.0)


@kernel
def estimate(tables, program, at):
    """The share of notifications that satisfy a constraint, roughly; above 1 where it cannot lead to a filter."""
    word = program.words[at]
    kind, about = kind_in(word), attribute_in(word)
    if kind == K_ABSENT:
        return 2.0
    if kind == K_STRING:
        return string_share(tables, about, payload_in(word))
    if kind == K_NUMBER:
        return 0.01 * presence(tables, about)
    if kind == K_BOOLEAN:
        return 0.5 * presence(tables, about)
    if kind == K_INTERVAL:
        return interval_share(tables, about, program.numbers[at + 1], program.numbers[at + 2])
    if kind == K_ONE_OF:
        numbers = payload_in(word) & 0x3FF
        share = 0.01 * numbers * presence(tables, about)
        for k in range(at + 1 + numbers, at + 1 + words_in(word)):
            share += string_share(tables, about, np.int64(program.words[k]))
        return share + (0.5 * presence(tables, about) if payload_in(word) >> 20 else 0.0)
    if kind >= K_PREFIX and kind <= K_CONTAINS:
        length = tables.strings[payload_in(word), 1]
        return presence(tables, about) * max(0.3 ** min(length, 4), 0.01)
    return presence(tables, about)


@kernel
def order_constraints(tables, scratch, count):
    """The most selective first; by insertion, since there are few."""
    for number in range(count):
        share = estimate(tables, scratch.program, scratch.starts[number])
        place = number
        while place > 0 and scratch.estimates[place - 1] > share:
            scratch.estimates[place] = scratch.estimates[place - 1]
            scratch.order[place] = scratch.order[place - 1]
            place -= 1
        scratch.estimates[place] = share
        scratch.order[place] = number


@kernel
def find_filter(tables, scratch, count, hashed):
    mask = tables.filter_slots.shape[0] - 1
    position = np.int64(hashed & U(mask))
    while True:
        item = np.int64(tables.filter_slots[position]) - 1
        if item < 0:
            return np.int64(-1)
        if tables.filter_hashes[item] == hashed:
            offset, words = np.int64(tables.filters[item, t.CODE]), np.int64(tables.filters[item, t.WORDS])
            if count == 0 and words == 0:
                return item
            if words > 0 and same_program(tables.code, offset, words, scratch.program.words, scratch.starts, count):
                return item
        position = (position + 1) & mask


@kernel
def count_constraints(tables, offset, step):
    """Keeps count of how many filters look at each attribute, and of the range of their bounds."""
    at = offset
    while True:
        word = tables.code[at]
        about = attribute_in(word)
        tables.attributes[about, t.SUBSCRIBED] += step
        if kind_in(word) >= K_PREFIX:
            tables.attributes[about, t.PATTERNS] += step
        if kind_in(word) == K_INTERVAL:
            for k in range(1, 3):
                bound = tables.code_numbers[at + k]
                if np.isfinite(bound):
                    tables.domains[about, 0] = min(tables.domains[about, 0], bound)
                    tables.domains[about, 1] = max(tables.domains[about, 1], bound)
        if is_last(word):
            return
        at += 1 + words_in(word)


@kernel
def make_filter(tables, scratch, count, hashed):
    """A new filter, filed; or NO_ROOM, and nothing has changed."""
    order_constraints(tables, scratch, count)
    state = tables.state
    offset = np.int64(0)
    if count > 0:
        offset = store_program(tables, scratch.program.words, scratch.starts, scratch.order, count)
    keys = np.int64(1)
    if count > 0:
        keys += routes(tables, 0, offset, scratch.keys, scratch.kinds, scratch.cast)
    leaves = keys * LEAVES_PER_ROUTE
    if not has_room(tables, 2 * leaves, leaves * 2 * max(state[t.LARGEST], SPLIT_ENTRIES)):
        if count > 0:
            release(tables.code, state, t.CODE_HEADS, offset, scratch.starts[count])
        return np.int64(NO_ROOM)
    item = state[t.FILTER_FREE] - 1
    if item >= 0:
        state[t.FILTER_FREE] = tables.filters[item, t.CODE]
    else:
        item = state[t.FILTER_TOP]
        state[t.FILTER_TOP] += 1
    tables.filters[item, t.CODE] = offset
    tables.filters[item, t.WORDS] = scratch.starts[count]
    tables.filters[item, t.FIRST] = -1
    tables.filters[item, t.SUBSCRIBERS] = 0
    tables.filter_hashes[item] = hashed
    put(tables.filter_slots, hashed, item)
    state[t.FILTERS] += 1
    if count > 0:
        count_constraints(tables, offset, 1)
    insert(tables, item, scratch.stack, scratch.keys, scratch.kinds, scratch.cast)
    return item


@kernel
def free_filter(tables, scratch, item):
    state = tables.state
    remove(tables, item, scratch.stack, scratch.keys, scratch.kinds, scratch.cast)
    offset, words = np.int64(tables.filters[item, t.CODE]), np.int64(tables.filters[item, t.WORDS])
    if words > 0:
        count_constraints(tables, offset, -1)
        forget_program(tables, tables.code, offset)
        release(tables.code, state, t.CODE_HEADS, offset, words)
    erase(tables.filter_slots, tables.filter_hashes, tables.filter_hashes[item], item)
    tables.filters[item, t.CODE] = state[t.FILTER_FREE]
    state[t.FILTER_FREE] = item + 1
    state[t.FILTERS] -= 1


@inlined
def hash_id(subscription):
    return mix(U(subscription) + U(0x9E3779B97F4A7C15))


@kernel
def find_subscription(tables, subscription):
    """Its place, or -1."""
    mask = tables.subscription_slots.shape[0] - 1
    position = np.int64(hash_id(subscription) & U(mask))
    while True:
        place = np.int64(tables.subscription_slots[position]) - 1
        if place < 0 or tables.subscription_ids[place] == subscription:
            return place
        position = (position + 1) & mask


@kernel
def link(tables, item, subscription):
    """One more subscription of a filter."""
    state = tables.state
    place = state[t.SUBSCRIPTION_FREE] - 1
    if place >= 0:
        state[t.SUBSCRIPTION_FREE] = tables.subscriptions[place, 1]
    else:
        place = state[t.SUBSCRIPTION_TOP]
        state[t.SUBSCRIPTION_TOP] += 1
    first = np.int64(tables.filters[item, t.FIRST])
    tables.subscriptions[place, 0] = item
    tables.subscriptions[place, 1] = first
    tables.subscriptions[place, 2] = -1
    if first >= 0:
        tables.subscriptions[first, 2] = place
    tables.filters[item, t.FIRST] = place
    tables.filters[item, t.SUBSCRIBERS] += 1
    tables.subscription_ids[place] = subscription
    put(tables.subscription_slots, hash_id(subscription), place)
    state[t.SUBSCRIPTIONS] += 1


@kernel
def unlink(tables, place):
    """One subscription less; returns its filter."""
    state, subscriptions = tables.state, tables.subscriptions
    item, following, before = np.int64(subscriptions[place, 0]), subscriptions[place, 1], subscriptions[place, 2]
    if before >= 0:
        subscriptions[before, 1] = following
    else:
        tables.filters[item, t.FIRST] = following
    if following >= 0:
        subscriptions[following, 2] = before
    erase_subscription(tables, place)
    subscriptions[place, 1] = state[t.SUBSCRIPTION_FREE]
    state[t.SUBSCRIPTION_FREE] = place + 1
    tables.filters[item, t.SUBSCRIBERS] -= 1
    state[t.SUBSCRIPTIONS] -= 1
    return item


@kernel
def erase_subscription(tables, place):
    slots = tables.subscription_slots
    mask = slots.shape[0] - 1
    hole = np.int64(hash_id(tables.subscription_ids[place]) & U(mask))
    while slots[hole] != place + 1:
        hole = (hole + 1) & mask
    position = hole
    while True:
        position = (position + 1) & mask
        other = np.int64(slots[position]) - 1
        if other < 0:
            break
        home = np.int64(hash_id(tables.subscription_ids[other]) & U(mask))
        if ((position - home) & mask) >= ((position - hole) & mask):
            slots[hole] = slots[position]
            hole = position
    slots[hole] = 0


@kernel
def refill_subscriptions(tables, old):
    for k in range(old.shape[0]):
        place = np.int64(old[k]) - 1
        if place >= 0:
            put(tables.subscription_slots, hash_id(tables.subscription_ids[place]), place)


@kernel
def has_margins(tables):
    state = tables.state
    return (
        state[t.STRING_TOP] + STRINGS_MARGIN <= tables.strings.shape[0]
        and 2 * (state[t.STRINGS] + STRINGS_MARGIN) <= tables.string_slots.shape[0]
        and state[t.BYTES_TOP] + BYTES_MARGIN <= tables.bytes.shape[0]
        and state[t.CODE_TOP] + CODE_MARGIN <= tables.code.shape[0]
        and state[t.ATTRIBUTE_TOP] + CONSTRAINTS_MAX <= tables.attributes.shape[0]
        and state[t.FILTER_TOP] + 1 < tables.filters.shape[0]
        and 2 * (state[t.FILTERS] + 1) <= tables.filter_slots.shape[0]
        and state[t.SUBSCRIPTION_TOP] + 1 < tables.subscriptions.shape[0]
        and 2 * (state[t.SUBSCRIPTIONS] + 1) <= tables.subscription_slots.shape[0]
    )


@kernel
def add_subscriptions(tables, scratch, ids, begin, data, position):
    """Adds `ids[begin:]`, whose packed filters stand one after another from `position` on.

    Returns how far it came, (next id, position), and stops where the arrays have no room for what may come."""
    for k in range(begin, ids.shape[0]):
        if not has_margins(tables):
            return k, position
        known = find_subscription(tables, ids[k])
        if known >= 0:
            item = unlink(tables, known)
            if tables.filters[item, t.SUBSCRIBERS] == 0:
                free_filter(tables, scratch, item)
        count, _words, after = translate(
            tables, data, position, data.shape[0], scratch.program, scratch.starts, scratch.cast
        )
        hashed = hash_program(scratch.program.words, scratch.starts, count)
        item = find_filter(tables, scratch, count, hashed)
        is_new = item < 0
        if is_new:
            item = make_filter(tables, scratch, count, hashed)
        if (not is_new or item == NO_ROOM) and count > 0:
            scratch.program.words[scratch.starts[count - 1]] |= LAST
            forget_program(tables, scratch.program.words, 0)
        if item == NO_ROOM:
            return k, position
        link(tables, item, ids[k])
        position = after
    return ids.shape[0], position


@kernel
def remove_subscriptions(tables, scratch, ids):
    """Removes those that are there; how many were."""
    removed = 0
    for k in range(ids.shape[0]):
        place = find_subscription(tables, ids[k])
        if place >= 0:
            item = unlink(tables, place)
            if tables.filters[item, t.SUBSCRIBERS] == 0:
                free_filter(tables, scratch, item)
            removed += 1
    return removed
