"""Adds and removes subscriptions: translates packed filters, orders their constraints, shares and files their records.

The order of a record's constraints is its path in the tree. It is chosen when the first subscription with that filter
is added, from the notifications and filters known by then. It is chosen again when the index gets a new plan: then a
second tree takes over the records of the first, a few at a time. The generation of a record tells which of the two
trees it is filed in. While there is only one tree, the arguments `old` and `new` are both that tree.

What may go wrong: the arrays have too little room. A kernel checks this before it adds a record, stops, and is called
again after Python has grown the arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tidegate.index import tables as t
from tidegate.index.estimate_kernel import order_constraints
from tidegate.index.hash_table_kernel import erase_row, home_of, put_row, refill_rows, slot_after
from tidegate.index.memory_kernel import GOLDEN, give_back, mix, release, take
from tidegate.index.record_kernel import (
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
from tidegate.index.tree_kernel import LEAVES_PER_ROUTE, ROUTES_MAX, has_room_for, insert, remove
from tidegate.kernels.bytes_kernel import Bytes, U
from tidegate.kernels.cache import inlined, kernel
from tidegate.kernels.intrinsic_kernel import double_of, prefetch

# Upper bounds of what any single filter may need: strings, words for their bytes, and words of code.
STRINGS_MARGIN = 320
WORDS_MARGIN = 1 << 14
CODE_MARGIN = 1 << 12
NO_ROOM = -1


class Scratch(NamedTuple):
    """Working memory for one insertion or removal. It belongs to the single writer of an index."""

    program: t.U64
    starts: t.I64
    order: t.I64
    estimates: t.F64
    leaves: t.I64
    keys: t.U64


def make_scratch() -> Scratch:
    return Scratch(
        program=np.zeros(PROGRAM_WORDS_MAX, np.uint64),
        starts=np.zeros(CONSTRAINTS_MAX + 1, np.int64),
        order=np.zeros(CONSTRAINTS_MAX, np.int64),
        estimates=np.zeros(CONSTRAINTS_MAX, np.float64),
        leaves=np.zeros(ROUTES_MAX * LEAVES_PER_ROUTE, np.int64),
        keys=np.zeros(ROUTES_MAX, np.uint64),
    )


@inlined
def find_record(filters: t.Filters, scratch: Scratch, count: int, hashed: int) -> int:
    position = home_of(filters.slots, hashed)
    while True:
        record = np.int64(filters.slots[position]) - 1
        if record < 0:
            return np.int64(-1)
        if hash_of_record(filters.code, record) == hashed and is_same(
            filters.code, record, scratch.program, scratch.starts, count
        ):
            return record
        position = slot_after(filters.slots, position)


@kernel
def refill_records(slots: t.I32, old: t.I32, code: t.U64) -> None:
    refill_rows(slots, old, hash_of_record, code)


@kernel
def count_constraints(vocabulary: t.Vocabulary, filters: t.Filters, tree: t.Tree, record: int, step: int) -> None:
    """Adds `step` to the number of filters on each attribute, and counts new bounds that lie outside its domain."""
    if not has_constraints(filters.code, record):
        return
    at = record + HEAD_WORDS
    while True:
        word = filters.code[at]
        attribute = attribute_in(word)
        vocabulary.attributes[attribute, t.SUBSCRIBED] += step
        if kind_in(word) >= K_PREFIX:
            vocabulary.attributes[attribute, t.PATTERNS] += step
        if kind_in(word) == K_INTERVAL and step > 0:
            for k in range(1, 3):
                bound = double_of(filters.code[at + k])
                if np.isfinite(bound) and is_outside_domain(tree.domains, attribute, bound):
                    tree.state[t.BOUNDS_OUTSIDE_DOMAIN] += 1
        if is_last(word):
            return
        at += 1 + words_in(word)


@inlined
def is_outside_domain(domains: t.F64, attribute: int, bound: float) -> bool:
    """Returns whether a bound lies outside the learned domain of the attribute, or no domain was learned."""
    if domains[attribute, t.IS_LEARNED] == 0.0:
        return True
    return bound < domains[attribute, t.SEGMENT_STARTS] or bound > domains[attribute, t.HIGHEST]


@kernel
def make_filter(
    vocabulary: t.Vocabulary, filters: t.Filters, new: t.Tree, scratch: Scratch, count: int, hashed: int
) -> int:
    """Makes and files a new record. Returns NO_ROOM, and changes nothing, if the tree has no room for it."""
    if not has_room_for(new, most_routes(scratch.program, scratch.starts, count)):
        return np.int64(NO_ROOM)
    order_constraints(
        vocabulary, filters, new, scratch.program, scratch.starts, count, scratch.order, scratch.estimates
    )
    record = make_record(filters, scratch.program, scratch.starts, scratch.order, count, hashed)
    set_generation(filters.code, record, new.state[t.GENERATION])
    put_row(filters.slots, hashed, record)
    filters.state[t.COUNTED] += 1
    count_constraints(vocabulary, filters, new, record, 1)
    insert(new, vocabulary, filters.code, record, scratch.leaves, scratch.keys)
    return record


@inlined
def most_routes(program: t.U64, starts: t.I64, count: int) -> int:
    """Returns an upper bound of a filter's routes from the root: the words of its longest list, and two booleans."""
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
        remove(new, vocabulary, code, record, scratch.leaves, scratch.keys)
    else:
        remove(old, vocabulary, code, record, scratch.leaves, scratch.keys)
    count_constraints(vocabulary, filters, new, record, -1)
    erase_row(filters.slots, record, hash_of_record, code)
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


@inlined
def hash_of_place(ids: t.I64, place: int) -> int:
    return hash_id(ids[place])


@kernel
def find_subscription(filters: t.Filters, subscription: int) -> int:
    """Returns the place of a subscription, or -1."""
    position = home_of(filters.subscription_slots, hash_id(subscription))
    while True:
        place = np.int64(filters.subscription_slots[position]) - 1
        if place < 0 or filters.ids[place] == subscription:
            return place
        position = slot_after(filters.subscription_slots, position)


@kernel
def refill_subscriptions(slots: t.I32, old: t.I32, ids: t.I64) -> None:
    refill_rows(slots, old, hash_of_place, ids)


@kernel
def link(filters: t.Filters, record: int, subscription: int, is_first: bool) -> None:
    """Adds a subscription to a record, at the head of its list."""
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
    put_row(filters.subscription_slots, hash_id(subscription), place)
    state[t.SUBSCRIPTIONS] += 1


@inlined
def first_place(filters: t.Filters, record: int) -> int:
    """Returns the first place in the list of a record's subscriptions.

    With a single subscription, the owner word holds its id instead of a place, so that matching need not follow it."""
    owner = filters.code[record + OWNER]
    if owner & SHARED:
        return np.int64(owner & ~SHARED)
    return find_subscription(filters, np.int64(owner))


@kernel
def unlink(filters: t.Filters, place: int) -> tuple[int, int]:
    """Removes a subscription from its record. Returns (record, whether the record has no subscription left)."""
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
    erase_row(filters.subscription_slots, place, hash_of_place, filters.ids)
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
    """Adds `ids[begin:]`, whose packed filters follow one another from `position` on.

    Stops where the arrays may lack room for the next one. Returns (index of the next id, position of its filter)."""
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
        # Translation has added references. An existing record holds its own, and a failed one holds none.
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
    """Removes those of the subscriptions that exist. Returns how many did."""
    removed = 0
    for k in range(ids.shape[0]):
        # The slot is seldom in the cache: it is fetched while the eight subscriptions before it are removed.
        if k + 8 < ids.shape[0]:
            prefetch(filters.subscription_slots, home_of(filters.subscription_slots, hash_id(ids[k + 8])))
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
    """Moves up to `most` records from the old tree to the new one, searching from slot `begin` on.

    Stops early if the new tree has no room. Returns the slot to continue with."""
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
        remove(old, vocabulary, code, record, scratch.leaves, scratch.keys)
        order_constraints(
            vocabulary, filters, new, scratch.program, scratch.starts, count, scratch.order, scratch.estimates
        )
        write_program(code, record, scratch.program, scratch.starts, scratch.order, count)
        set_generation(code, record, new.state[t.GENERATION])
        insert(new, vocabulary, code, record, scratch.leaves, scratch.keys)
        moved += 1
    return slots.shape[0]


@kernel
def sample_bounds(filters: t.Filters, step: int, bound_attributes: t.I64, bounds: t.F64) -> int:
    """Collects the finite bounds of intervals, with their attributes, from every `step`-th slot. Returns how many."""
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
                        bound_attributes[found] = attribute_in(word)
                        bounds[found] = bound
                        found += 1
            if is_last(word):
                break
            at += 1 + words_in(word)
    return found
