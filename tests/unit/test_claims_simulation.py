"""The claims of a queue point are true in every interleaving that a seed can produce.

A queue point claims that it has received every unacknowledged notification of a publisher that its filter matches, from
`since` on. Acknowledged notifications were stored by every queue point whose binding was in force, so none of them is
put for the first time. Layers scale, slices and brokers die, and publishers move.

Every subscription of the simulated world represents a bound queue. TIDEGATE_TEST_SEEDS=20000 tries more seeds.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import pytest
from elastic_world import ElasticWorld
from seeds import in_tiers

from tidegate.filters import Filter
from tidegate.layers.connection_point import ConnectionPoint
from tidegate.layers.frames import Deliver
from tidegate.layers.queue_point import Binding, since_of

SEEDS = int(os.environ.get("TIDEGATE_TEST_SEEDS", "200"))


class Claims:
    """Watches the deliveries to Connection Points, and checks each claim that a queue point would make from them."""

    def __init__(self, world: ElasticWorld) -> None:
        self._world = world
        self._bindings: dict[int, Binding] = {}
        self._had: defaultdict[tuple[int, str], set[int]] = defaultdict(set)
        self.claims = 0

    def on_deliver(self, point: ConnectionPoint, frame: Deliver) -> None:
        batch = frame.batch
        for subscription in sorted(set(frame.ids.tolist())):
            known = point._subscriptions.get(subscription)
            if known is None or known.has_ended:
                continue
            wanted = self._filter_of(point, known)
            numbers = [
                batch.first + index
                for index in range(len(batch))
                if subscription in frame.ids[frame.offsets[index] : frame.offsets[index + 1]]
            ]
            binding = self._bindings.setdefault(subscription, Binding(subscription, "q", wanted))
            had = self._had[subscription, batch.publisher]
            had |= set(numbers)
            since = since_of(binding, frame, numbers[0])
            self.claims += 1
            [publisher] = [each for each in self._world.publishers if each.name == batch.publisher]
            for number in range(since, numbers[-1] + 1):
                is_wanted = wanted.matches(publisher.notifications[number])
                is_had = number in had or self._is_settled(publisher, number)
                assert not is_wanted or is_had, f"{number}, claimed since {since} at {numbers[-1]}, was not had"

    def _is_settled(self, publisher: Any, number: int) -> bool:
        """Returns whether the publisher's Connection Point has sent a number and received its acknowledgement."""
        known = publisher.point._publishers.known(publisher.name)
        submits = (submit.batch for point in self._world.points for submit in point._uplink._submits.values())
        return (
            known is not None
            and number <= known.accepted
            and not any(batch.publisher == publisher.name and batch.first <= number <= batch.last for batch in submits)
        )

    def _filter_of(self, point: ConnectionPoint, known: Any) -> Filter:
        [subscriber] = [
            each for each in self._world.subscribers if each.point is point and each.session == known.session
        ]
        return subscriber.subscriptions[known.client_id].versions[0].filter


def run(seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs a simulation, and returns how many claims were checked."""
    world = ElasticWorld(seed, crashes=True, rebinds=False)
    claims = Claims(world)
    on_deliver = ConnectionPoint.on_deliver

    def watched(self: ConnectionPoint, source: str, frame: Deliver, now_s: float) -> Any:
        if frame.stream >= self._stream:
            claims.on_deliver(self, frame)
        return on_deliver(self, source, frame, now_s)

    with monkeypatch.context() as patch:
        patch.setattr(ConnectionPoint, "on_deliver", watched)
        world.run()
    return claims.claims


@pytest.mark.parametrize("seed", in_tiers(40, SEEDS))
def test_what_a_queue_point_claims_to_have_had_it_has_had(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run(seed, monkeypatch)
