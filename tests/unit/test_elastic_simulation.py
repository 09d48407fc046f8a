"""Layers that scale, lose slices and get new ones keep every promise, in every interleaving that a seed can produce.

`make simulate SEEDS=20000` tries more seeds. To repeat a failure, use the seed in the name of the test.
"""

from __future__ import annotations

import os

import pytest
from elastic_world import ElasticWorld
from seeds import in_tiers

SEEDS = int(os.environ.get("TIDEGATE_TEST_SEEDS", "500"))
CHOSEN = in_tiers(50, SEEDS)


@pytest.mark.parametrize("seed", CHOSEN)
def test_scaling_loses_nothing_doubles_nothing_and_keeps_order(seed: int) -> None:
    ElasticWorld(seed).run()


@pytest.mark.parametrize("seed", CHOSEN)
def test_crashes_of_slices_and_coordinators_lose_nothing_that_was_acknowledged(seed: int) -> None:
    ElasticWorld(seed, crashes=True).run()


@pytest.mark.parametrize("seed", CHOSEN)
@pytest.mark.parametrize("crashes", [False, True])
def test_the_buffered_switch_keeps_the_promises_too(seed: int, crashes: bool) -> None:
    ElasticWorld(seed, crashes=crashes, buffered=True).run()
