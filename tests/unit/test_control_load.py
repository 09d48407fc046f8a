"""The staleness and age of the clients' state, compared with a plain count moment by moment."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_lab.control.load import States


@given(st.integers(), st.integers(1, 5), st.integers(0, 60), st.integers(0, 30))
def test_staleness_and_age_are_sums_over_all_moments_and_processors(
    seed: int, processors: int, moments: int, begun: int
) -> None:
    rng = Random(seed)
    states = States(processors)
    published, held = [-1], [0] * processors
    stale, age = [0] * processors, 0.0
    for moment in range(moments):
        if moment == begun:
            states.begin(float(moment))
            stale, age = [0] * processors, 0.0
        for _ in range(rng.randrange(3)):
            if rng.random() < 0.4:
                assert states.publish(float(moment)) == len(published)
                published.append(moment)
            else:
                processor = rng.randrange(processors)
                version = rng.randrange(len(published))
                held[processor] = max(held[processor], version)
                states.hold(processor, version, float(moment))
        for processor, version in enumerate(held):
            if version + 1 < len(published):
                stale[processor] += 1
                age += moment + 0.5 - published[version + 1]
    staleness = states.end(float(moments))
    states.hold(0, states.publish(float(moments)), float(moments + 1))  # after the end: not counted
    assert staleness.stale_s == pytest.approx(stale)
    assert staleness.age_s2 == pytest.approx(age)
