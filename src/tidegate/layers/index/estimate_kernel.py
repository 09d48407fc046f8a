"""How selective is a constraint? The share of notifications that satisfy it, roughly, from what was seen of them.

One notification in `SAMPLED`, by chance, is counted: its attributes, its strings that filters name, and its numbers in
a histogram. Until enough are seen, filters stand in for them: what many ask for is taken to be frequent. A wrong guess
costs time, never correctness.
"""

from __future__ import annotations

import numpy as np

from tidegate.layers.index import tables as t
from tidegate.layers.index.intrinsic_kernel import double_of
from tidegate.layers.index.memory_kernel import inlined, kernel
from tidegate.layers.index.record_kernel import (
    K_ABSENT,
    K_BOOLEAN,
    K_CONTAINS,
    K_INTERVAL,
    K_ONE_OF,
    K_PREFIX,
    K_STRING,
    attribute_in,
    is_point,
    kind_in,
    payload_in,
    words_in,
)
from tidegate.layers.index.tree_kernel import quantise
from tidegate.layers.index.vocabulary_kernel import string_length

SAMPLED = 16
ENOUGH_EVENTS = 256
BUCKET_SHIFT = 10  # of quantised values, for the histogram


@inlined
def presence(vocabulary: t.Vocabulary, filters: t.Filters, about: int) -> float:
    """The share of notifications that carry an attribute."""
    events = vocabulary.state[t.EVENTS]
    if events >= ENOUGH_EVENTS:
        return (vocabulary.attribute_seen[about] + 1.0) / (events + 2.0)
    return (vocabulary.attributes[about, t.SUBSCRIBED] + 1.0) / (filters.state[t.COUNTED] + 2.0)


@inlined
def string_share(vocabulary: t.Vocabulary, filters: t.Filters, about: int, string: int) -> float:
    events = vocabulary.state[t.EVENTS]
    if events >= ENOUGH_EVENTS:
        return (vocabulary.string_seen[string] + 0.25) / (events + 1.0)
    named = vocabulary.strings[string, t.REFERENCES] + 1.0
    return presence(vocabulary, filters, about) * named / (vocabulary.attributes[about, t.SUBSCRIBED] + 8.0)


@kernel
def interval_share(tree: t.Tree, about: int, low: float, high: float) -> float:
    """The share of an attribute's numbers within an interval; by its width where few were seen."""
    if low > high:
        return 0.0
    if tree.domains[about, t.IS_LEARNED] == 0.0:
        return 0.1 if np.isfinite(low) and np.isfinite(high) else 0.5
    first, last = quantise(tree.domains, about, low), quantise(tree.domains, about, high)
    width = (last - first + 16) / 65552.0
    seen, total = 0.0, 0.0
    for bucket in range(t.HISTOGRAM_BUCKETS):
        count = tree.histogram[about, bucket]
        total += count
        start = bucket << BUCKET_SHIFT
        overlap = min(last, start + (1 << BUCKET_SHIFT) - 1) - max(first, start) + 1
        if overlap > 0:
            seen += count * overlap / (1 << BUCKET_SHIFT)
    return (seen + 64.0 * width) / (total + 64.0)


@kernel
def estimate(vocabulary: t.Vocabulary, filters: t.Filters, tree: t.Tree, program: t.U64, at: int) -> float:
    """Of the constraint at `program[at]`; above 1 where it cannot lead to a filter, 0 where nothing satisfies it."""
    word = program[at]
    kind, about = kind_in(word), attribute_in(word)
    if kind == K_ABSENT:
        return 2.0
    if kind == K_STRING:
        return string_share(vocabulary, filters, about, payload_in(word))
    carried = presence(vocabulary, filters, about)
    if kind == K_INTERVAL:
        share = interval_share(tree, about, double_of(program[at + 1]), double_of(program[at + 2]))
        return carried * (0.2 * share if is_point(program, at) else share)
    if kind == K_BOOLEAN:
        return 0.5 * carried
    if kind == K_ONE_OF:
        numbers = payload_in(word) & 0x3FF
        share = 0.01 * numbers * carried
        for k in range(at + 1 + numbers, at + 1 + words_in(word)):
            share += string_share(vocabulary, filters, about, np.int64(program[k]))
        return share + (0.5 * carried if payload_in(word) >> 20 else 0.0)
    if kind >= K_PREFIX and kind <= K_CONTAINS:
        return carried * max(0.3 ** min(string_length(vocabulary, payload_in(word)), 4), 0.01)
    return carried


@kernel
def order_constraints(
    vocabulary: t.Vocabulary,
    filters: t.Filters,
    tree: t.Tree,
    program: t.U64,
    starts: t.I64,
    count: int,
    order: t.I64,
    estimates: t.F64,
) -> None:
    """The most selective first; by insertion, since there are few."""
    for number in range(count):
        share = estimate(vocabulary, filters, tree, program, starts[number])
        place = number
        while place > 0 and estimates[place - 1] > share:
            estimates[place] = estimates[place - 1]
            order[place] = order[place - 1]
            place -= 1
        estimates[place] = share
        order[place] = number


@kernel
def carry_histograms(old: t.Tree, new: t.Tree, attributes: int) -> None:
    """Takes what was seen of numbers over to another tree, where they are quantised in another way."""
    for about in range(attributes):
        if old.domains[about, t.IS_LEARNED] == 0.0:
            continue
        for bucket in range(t.HISTOGRAM_BUCKETS):
            place = quantise(new.domains, about, middle_of(old.domains, about, bucket))
            new.histogram[about, place >> BUCKET_SHIFT] += old.histogram[about, bucket]


@inlined
def middle_of(domains: t.F64, about: int, bucket: int) -> float:
    """The number in the middle of a bucket of the histogram, by the attribute's domain."""
    place = (bucket << BUCKET_SHIFT) + (1 << BUCKET_SHIFT) // 2
    segment = place // t.SEGMENT_PLACES
    number, scale = domains[about, t.SEGMENT_STARTS + segment], domains[about, t.SEGMENT_SCALES + segment]
    return number + (place % t.SEGMENT_PLACES) / scale if scale > 0.0 else number
