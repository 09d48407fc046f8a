"""Subscriptions come and go: packed filters are translated, ordered by selectivity, shared when identical, and filed.

The order of a record's constraints is its path in the tree. It is chosen when the first subscription with that filter
comes, from what is known of notifications and of other filters by then, and chosen again when the index is planned
anew: then a second tree grows beside the first, and records move over, some at a time. A record says by its generation
which of the two it is filed in; while there is one tree, both arguments `old` and `new` are that one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tidegate.layers.index import tables as t
from tidegate.layers.index.estimate_kernel import order_constraints
from tidegate.layers.index.intrinsic_kernel import double_of, prefetch
from tidegate.layers.index.memory_kernel import (
    GOLDEN,
    Bytes,
    U,
    give_back,
    inlined,
    kernel,
    mix,
    release,
    take,
)
from tidegate.layers.index.record_kernel import (
    CONSTRAINTS_MAX,
    HEAD_WORDS,
    K_INTERVAL,
    K_PREFIX,
    OWNER,
    PROGRAM_WORDS_MAX,
    SHARED,
    attribute_in,
    forget_constraint,
    generation_of,
    has_constraints,
    hash_of_record,
    hash_program,
    is_last,
    is_same,
    kind_in,
    make_record,
    read_program,
    set_generation,
    translate,
    words_in,
    words_of_record,
    write_program,
)
from tidegate.layers.index.tree_kernel import LEAVES_PER_ROUTE, ROUTES_MAX, has_room_for, insert, remove

# What one filter may need of strings, of their bytes (in words) and of code, whatever it says.
STRINGS_MARGIN = 320
WORDS_MARGIN = 1 << 14
CODE_MARGIN = 1 << 12
NO_ROOM = -1


class Scratch(NamedTuple):
    """Room for one insertion or removal; used by the one writer of an index."""

    program: t.U64
    starts: t.I64
    order: t.I64
    estimates: t.F64
    stack: t.I64
    keys: t.U64


def make_scratch() -> Scratch:
    return Scratch(
        program=np.zeros(PROGRAM_WORDS_MAX, np.uint64),
        starts=np.zeros(CONSTRAINTS_MAX + 1, np.int64),
        order=np.zeros(CONSTRAINTS_MAX, np.int64),
        estimates=np.zeros(CONSTRAINTS_MAX, np.float64),
        stack=np.zeros(ROUTES_MAX * LEAVES_PER_ROUTE, np.int64),
        keys=np.zeros(ROUTES_MAX, np.uint64),
    )


@inlined
def find_record(filters: t.Filters, scratch: Scratch, count: int, hashed: int) -> int:
    mask = filters.slots.shape[0] - 1
    position = np.int64(hashed & U(mask))
    while True:
        record = np.int64(filters.slots[position]) - 1
        if record < 0:
            return np.int64(-1)
        if hash_of_record(filters.code, record) == hashed and is_same(
            filters.code, record, scratch.program, scratch.starts, count
        ):
            return record
        position = (position + 1) & mask


@kernel
def put_record(slots: t.I32, hashed: int, record: int) -> None:
    mask = slots.shape[0] - 1
    position = np.int64(hashed & U(mask))
    while slots[position] != 0:
        position = (position + 1) & mask
    slots[position] = record + 1


@kernel
def refill_records(slots: t.I32, old: t.I32, code: t.U64) -> None:
    """Fills a larger table with the records of an old one."""
    for k in range(old.shape[0]):
        if old[k] != 0:
            put_record(slots, hash_of_record(code, np.int64(old[k]) - 1), np.int64(old[k]) - 1)


@kernel
def erase_record(slots: t.I32, code: t.U64, record: int) -> None:
    mask = slots.shape[0] - 1
    hole = np.int64(hash_of_record(code, record) & U(mask))
    while slots[hole] != record + 1:
        hole = (hole + 1) & mask
    position = hole
    while True:
        position = (position + 1) & mask
        if slots[position] == 0:
            break
        home = np.int64(hash_of_record(code, np.int64(slots[position]) - 1) & U(mask))
        if ((position - home) & mask) >= ((position - hole) & mask):
            slots[hole] = slots[position]
            hole = position
    slots[hole] = 0


@kernel
def count_constraints(vocabulary: t.Vocabulary, filters: t.Filters, tree: t.Tree, record: int, step: int) -> None:
    """Keeps count of how many filters look at each attribute, and of bounds that its domain does not cover."""
    if not has_constraints(filters.code, record):
        return
    at = record + HEAD_WORDS
    while True:
        word = filters.code[at]
        about = attribute_in(word)
        vocabulary.attributes[about, t.SUBSCRIBED] += step
        if kind_in(word) >= K_PREFIX:
            vocabulary.attributes[about, t.PATTERNS] += step
        if kind_in(word) == K_INTERVAL and step > 0:
            for k in range(1, 3):
                bound = double_of(filters.code[at + k])
                if np.isfinite(bound) and is_strange(tree.domains, about, bound):
                    tree.state[t.STRANGE_BOUNDS] += 1
        if is_last(word):
            return
        at += 1 + words_in(word)


@inlined
def is_strange(domains: t.F64, about: int, bound: float) -> bool:
    """Does a bound lie outside of what was learned of the attribute?"""
    if domains[about, t.IS_LEARNED] == 0.0:
        return True
    return bound < domains[about, t.SEGMENT_STARTS] or bound > domains[about, t.HIGHEST]


@kernel
def make_filter(
    vocabulary: t.Vocabulary, filters: t.Filters, new: t.Tree, scratch: Scratch, count: int, hashed: int
) -> int:
    """A new record, filed; or NO_ROOM, and nothing has changed."""
    if not has_room_for(new, most_routes(scratch.program, scratch.starts, count)):
        return np.int64(NO_ROOM)
    order_constraints(
        vocabulary, filters, new, scratch.program, scratch.starts, count, scratch.order, scratch.estimates
    )
    record = make_record(filters, scratch.program, scratch.starts, scratch.order, count, hashed)
    set_generation(filters.code, record, new.state[t.GENERATION])
    put_record(filters.slots, hashed, record)
    filters.state[t.COUNTED] += 1
    count_constraints(vocabulary, filters, new, record, 1)
    insert(new, vocabulary, filters.code, record, scratch.stack, scratch.keys)
    return record


@inlined
def most_routes(program: t.U64, starts: t.I64, count: int) -> int:
    """How many routes from the root a filter can have: as many as its longest list has values."""
    most = 2
    for number in range(count):
        most = max(most, words_in(program[starts[number]]) + 2)
    return most


@kernel
def free_filter(
    vocabulary: t.Vocabulary, filters: t.Filters, old: t.Tree, new: t.Tree, scratch: Scratch, record: int
) -> None:
    code = filters.code
    if generation_of(code, record) == new.state[t.GENERATION]:
        remove(new, vocabulary, code, record, scratch.stack, scratch.keys)
    else:
        remove(old, vocabulary, code, record, scratch.stack, scratch.keys)
    count_constraints(vocabulary, filters, new, record, -1)
    erase_record(filters.slots, code, record)
    if has_constraints(code, record):
        at = record + HEAD_WORDS
        while True:
            forget_constraint(vocabulary, code, at)
            if is_last(code[at]):
                break
            at += 1 + words_in(code[at])
    release(code, filters.state, record, words_of_record(code, record))
    filters.state[t.COUNTED] -= 1


@inlined
def hash_id(subscription: int) -> int:
    return mix(U(subscription) + GOLDEN)


@kernel
def find_subscription(filters: t.Filters, subscription: int) -> int:
    """Its place, or -1."""
    mask = filters.subscription_slots.shape[0] - 1
    position = np.int64(hash_id(subscription) & U(mask))
    while True:
        place = np.int64(filters.subscription_slots[position]) - 1
        if place < 0 or filters.ids[place] == subscription:
            return place
        position = (position + 1) & mask


@kernel
def put_subscription(slots: t.I32, ids: t.I64, place: int) -> None:
    mask = slots.shape[0] - 1
    position = np.int64(hash_id(ids[place]) & U(mask))
    while slots[position] != 0:
        position = (position + 1) & mask
    slots[position] = place + 1


@kernel
def refill_subscriptions(slots: t.I32, old: t.I32, ids: t.I64) -> None:
    for k in range(old.shape[0]):
        if old[k] != 0:
            put_subscription(slots, ids, np.int64(old[k]) - 1)


@kernel
def erase_subscription(slots: t.I32, ids: t.I64, place: int) -> None:
    mask = slots.shape[0] - 1
    hole = np.int64(hash_id(ids[place]) & U(mask))
    while slots[hole] != place + 1:
        hole = (hole + 1) & mask
    position = hole
    while True:
        position = (position + 1) & mask
        if slots[position] == 0:
            break
        home = np.int64(hash_id(ids[np.int64(slots[position]) - 1]) & U(mask))
        if ((position - home) & mask) >= ((position - hole) & mask):
            slots[hole] = slots[position]
            hole = position
    slots[hole] = 0


@kernel
def link(filters: t.Filters, record: int, subscription: int, is_first: bool) -> None:
    """One more subscription of a record."""
    state, subscriptions = filters.state, filters.subscriptions
    place = take(subscriptions, state, t.SUBSCRIPTION_TOP, t.SUBSCRIPTION_FREE, t.NEXT)
    subscriptions[place, t.RECORD] = record
    subscriptions[place, t.NEXT] = -1
    subscriptions[place, t.PREVIOUS] = -1
    filters.ids[place] = subscription
    if is_first:
        filters.code[record + OWNER] = U(subscription)
    else:
        head = first_place(filters, record)
        subscriptions[place, t.NEXT] = head
        subscriptions[head, t.PREVIOUS] = place
        filters.code[record + OWNER] = SHARED | U(place)
    put_subscription(filters.subscription_slots, filters.ids, place)
    state[t.SUBSCRIPTIONS] += 1


@inlined
def first_place(filters: t.Filters, record: int) -> int:
    """Of the list of its subscriptions; a list of one is not written at the owner, which names the subscription."""
    owner = filters.code[record + OWNER]
    if owner & SHARED:
        return np.int64(owner & ~SHARED)
    return find_subscription(filters, np.int64(owner))


@kernel
def unlink(filters: t.Filters, place: int) -> tuple[int, int]:
    """One subscription less: (its record, has that none now)."""
    state, subscriptions = filters.state, filters.subscriptions
    record = np.int64(subscriptions[place, t.RECORD])
    following, before = np.int64(subscriptions[place, t.NEXT]), np.int64(subscriptions[place, t.PREVIOUS])
    is_last_one = following < 0 and before < 0
    if before >= 0:
        subscriptions[before, t.NEXT] = following
    if following >= 0:
        subscriptions[following, t.PREVIOUS] = before
    if not is_last_one:
        head = following if before < 0 else np.int64(filters.code[record + OWNER] & ~SHARED)
        is_single = subscriptions[head, t.NEXT] < 0
        filters.code[record + OWNER] = U(filters.ids[head]) if is_single else SHARED | U(head)
    erase_subscription(filters.subscription_slots, filters.ids, place)
    give_back(subscriptions, state, t.SUBSCRIPTION_FREE, t.NEXT, place)
    state[t.SUBSCRIPTIONS] -= 1
    return record, is_last_one


@inlined
def has_margins(vocabulary: t.Vocabulary, filters: t.Filters) -> bool:
    words, records = vocabulary.state, filters.state
    return (
        words[t.TOP] + STRINGS_MARGIN <= vocabulary.strings.shape[0]
        and 2 * (words[t.COUNTED] + STRINGS_MARGIN) <= vocabulary.slots.shape[0]
        and words[t.WORDS_TOP] + WORDS_MARGIN <= vocabulary.words.shape[0]
        and words[t.ATTRIBUTE_TOP] + CONSTRAINTS_MAX <= vocabulary.attributes.shape[0]
        and words[t.ATTRIBUTES] + CONSTRAINTS_MAX < t.ATTRIBUTES_MAX
        and records[t.TOP] + CODE_MARGIN <= filters.code.shape[0]
        and 2 * (records[t.COUNTED] + 1) <= filters.slots.shape[0]
        and records[t.SUBSCRIPTION_TOP] + 1 < filters.subscriptions.shape[0]
        and 2 * (records[t.SUBSCRIPTIONS] + 1) <= filters.subscription_slots.shape[0]
    )


@kernel
def add_subscriptions(
    vocabulary: t.Vocabulary,
    filters: t.Filters,
    old: t.Tree,
    new: t.Tree,
    scratch: Scratch,
    ids: t.I64,
    begin: int,
    data: Bytes,
    position: int,
) -> tuple[int, int]:
    """Adds `ids[begin:]`, whose packed filters stand one after another from `position` on.

    Returns how far it came, (next id, position), and stops where the arrays have no room for what may come."""
    for k in range(begin, ids.shape[0]):
        if not has_margins(vocabulary, filters):
            return k, position
        known = find_subscription(filters, ids[k])
        if known >= 0:
            record, is_free = unlink(filters, known)
            if is_free:
                free_filter(vocabulary, filters, old, new, scratch, record)
        count, after = translate(vocabulary, data, position, scratch.program, scratch.starts)
        hashed = hash_program(scratch.program, scratch.starts, count)
        record = find_record(filters, scratch, count, hashed)
        is_new = record < 0
        if is_new:
            record = make_filter(vocabulary, filters, new, scratch, count, hashed)
        if not is_new or record == NO_ROOM:
            for number in range(count):
                forget_constraint(vocabulary, scratch.program, scratch.starts[number])
        if record == NO_ROOM:
            return k, position
        link(filters, record, ids[k], is_new)
        position = after
    return ids.shape[0], position


@kernel
def remove_subscriptions(
    vocabulary: t.Vocabulary, filters: t.Filters, old: t.Tree, new: t.Tree, scratch: Scratch, ids: t.I64
) -> int:
    """Removes those that are there; how many were."""
    removed = 0
    mask = filters.subscription_slots.shape[0] - 1
    for k in range(ids.shape[0]):
        if k + 8 < ids.shape[0]:
            prefetch(filters.subscription_slots, np.int64(hash_id(ids[k + 8]) & U(mask)))
        place = find_subscription(filters, ids[k])
        if place >= 0:
            record, is_free = unlink(filters, place)
            if is_free:
                free_filter(vocabulary, filters, old, new, scratch, record)
            removed += 1
    return removed


@kernel
def move_records(
    vocabulary: t.Vocabulary, filters: t.Filters, old: t.Tree, new: t.Tree, scratch: Scratch, begin: int, most: int
) -> int:
    """Files up to `most` of the records that are still in the old tree anew, looking for them from slot `begin` on.

    Returns the slot to go on with; it stops early where the new tree has no room."""
    slots, code = filters.slots, filters.code
    moved = 0
    for position in range(begin, slots.shape[0]):
        record = np.int64(slots[position]) - 1
        if record < 0 or generation_of(code, record) == new.state[t.GENERATION]:
            continue
        if moved == most:
            return position
        count = read_program(code, record, scratch.program, scratch.starts)
        if not has_room_for(new, most_routes(scratch.program, scratch.starts, count)):
            return position
        remove(old, vocabulary, code, record, scratch.stack, scratch.keys)
        order_constraints(
            vocabulary, filters, new, scratch.program, scratch.starts, count, scratch.order, scratch.estimates
        )
        write_program(code, record, scratch.program, scratch.starts, scratch.order, count)
        set_generation(code, record, new.state[t.GENERATION])
        insert(new, vocabulary, code, record, scratch.stack, scratch.keys)
        moved += 1
    return slots.shape[0]


@kernel
def sample_bounds(filters: t.Filters, step: int, abouts: t.I64, bounds: t.F64) -> int:
    """The finite bounds of the intervals of every `step`-th slot's record, each with its attribute: how many."""
    found = 0
    for position in range(0, filters.slots.shape[0], step):
        record = np.int64(filters.slots[position]) - 1
        if record < 0 or not has_constraints(filters.code, record):
            continue
        at = record + HEAD_WORDS
        while True:
            word = filters.code[at]
            if kind_in(word) == K_INTERVAL:
                for k in range(1, 3):
                    bound = double_of(filters.code[at + k])
                    if np.isfinite(bound) and found < bounds.shape[0]:
                        abouts[found] = attribute_in(word)
                        bounds[found] = bound
                        found += 1
            if is_last(word):
                break
            at += 1 + words_in(word)
    return found
