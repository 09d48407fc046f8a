"""How stale clients are, against a plain account of each moment."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.evaluation.control_load import States


@given(st.integers(), st.integers(1, 5), st.integers(0, 60))
def test_stale_time_is_the_sum_over_all_moments_and_processors(seed: int, processors: int, moments: int) -> None:
    rng = Random(seed)
    states = States(processors)
    newest, held, stale = 0, [0] * processors, 0
    for moment in range(moments):
        for _ in range(rng.randrange(3)):
            if rng.random() < 0.4:
                newest += 1
                states.publish(newest, float(moment))
            else:
                processor = rng.randrange(processors)
                held[processor] = rng.randint(held[processor], newest)
                states.hold(processor, held[processor], float(moment))
        stale += sum(version < newest for version in held)
    assert states.total_s(float(moments)) == pytest.approx(stale)
