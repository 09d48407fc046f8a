"""Estimates how selective a constraint is: roughly, the share of notifications that satisfy it.

One notification in `SAMPLED`, chosen at random, is counted: its attributes, those of its strings that filters name, and
its numbers in a histogram. Until enough notifications have been sampled, the filters are used instead: an attribute or
string that many filters name is assumed to be frequent. A wrong estimate costs time, never correctness.
"""

from __future__ import annotations

import numpy as np

from tidegate.index import tables as t
from tidegate.index.record_kernel import (
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
    list_counts,
    payload_in,
    words_in,
)
from tidegate.index.tree_kernel import quantise
from tidegate.index.vocabulary_kernel import string_length
from tidegate.kernels.cache import inlined, kernel
from tidegate.kernels.intrinsic_kernel import double_of

SAMPLED = 16
ENOUGH_EVENTS = 256
BUCKET_SHIFT = 10  # from a quantised value to its bucket of the histogram


@inlined
def presence(vocabulary: t.Vocabulary, filters: t.Filters, attribute: int) -> float:
    """Returns the share of notifications that carry an attribute."""
    events = vocabulary.state[t.EVENTS]
    if events >= ENOUGH_EVENTS:
        return (vocabulary.attribute_seen[attribute] + 1.0) / (events + 2.0)
    return (vocabulary.attributes[attribute, t.SUBSCRIBED] + 1.0) / (filters.state[t.COUNTED] + 2.0)


@inlined
def string_share(vocabulary: t.Vocabulary, filters: t.Filters, attribute: int, string: int) -> float:
    events = vocabulary.state[t.EVENTS]
    if events >= ENOUGH_EVENTS:
        return (vocabulary.string_seen[string] + 0.25) / (events + 1.0)
    named = vocabulary.strings[string, t.REFERENCES] + 1.0
    return presence(vocabulary, filters, attribute) * named / (vocabulary.attributes[attribute, t.SUBSCRIBED] + 8.0)


@kernel
def interval_share(tree: t.Tree, attribute: int, low: float, high: float) -> float:
    """Returns the share of an attribute's numbers that lie in an interval; estimates it by width if few were seen."""
    if low > high:
        return 0.0
    if tree.domains[attribute, t.IS_LEARNED] == 0.0:
        return 0.1 if np.isfinite(low) and np.isfinite(high) else 0.5
    first, last = quantise(tree.domains, attribute, low), quantise(tree.domains, attribute, high)
    width = (last - first + 16) / 65552.0
    # The width counts like 64 sampled numbers, so that it decides until the histogram holds more than that.
    seen, total = 0.0, 0.0
    for bucket in range(t.HISTOGRAM_BUCKETS):
        count = tree.histogram[attribute, bucket]
        total += count
        start = bucket << BUCKET_SHIFT
        overlap = min(last, start + (1 << BUCKET_SHIFT) - 1) - max(first, start) + 1
        if overlap > 0:
            seen += count * overlap / (1 << BUCKET_SHIFT)
    return (seen + 64.0 * width) / (total + 64.0)


@kernel
def estimate(vocabulary: t.Vocabulary, filters: t.Filters, tree: t.Tree, program: t.U64, at: int) -> float:
    """Returns the estimated share for the constraint at `program[at]`.

    The share is above 1 if no route can lead to the constraint, and 0 if no notification can satisfy it."""
    word = program[at]
    kind, attribute = kind_in(word), attribute_in(word)
    if kind == K_ABSENT:
        return 2.0
    if kind == K_STRING:
        return string_share(vocabulary, filters, attribute, payload_in(word))
    carried = presence(vocabulary, filters, attribute)
    if kind == K_INTERVAL:
        share = interval_share(tree, attribute, double_of(program[at + 1]), double_of(program[at + 2]))
        return carried * (0.2 * share if is_point(program, at) else share)
    if kind == K_BOOLEAN:
        return 0.5 * carried
    if kind == K_ONE_OF:
        numbers, _strings, booleans = list_counts(word)
        share = 0.01 * numbers * carried
        for k in range(at + 1 + numbers, at + 1 + words_in(word)):
            share += string_share(vocabulary, filters, attribute, np.int64(program[k]))
        return share + (0.5 * carried if booleans else 0.0)
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
    """Writes the order of the constraints, most selective first. Insertion sort, since there are few."""
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
    """Copies the histograms to another tree, whose domains quantise numbers differently."""
    for attribute in range(attributes):
        if old.domains[attribute, t.IS_LEARNED] == 0.0:
            continue
        for bucket in range(t.HISTOGRAM_BUCKETS):
            place = quantise(new.domains, attribute, middle_of(old.domains, attribute, bucket))
            new.histogram[attribute, place >> BUCKET_SHIFT] += old.histogram[attribute, bucket]


@inlined
def middle_of(domains: t.F64, attribute: int, bucket: int) -> float:
    """Returns the number in the middle of a bucket of the histogram, by the attribute's domain."""
    place = (bucket << BUCKET_SHIFT) + (1 << BUCKET_SHIFT) // 2
    segment = place // t.SEGMENT_PLACES
    number, scale = domains[attribute, t.SEGMENT_STARTS + segment], domains[attribute, t.SEGMENT_SCALES + segment]
    return number + (place % t.SEGMENT_PLACES) / scale if scale > 0.0 else number
