"""`tidegate cluster up` is a whole cluster: it serves, scales on request, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster_up import END_S, ClusterUp
from command import Outcome
from ssap_world import Kp, graph_of

from tidegate import connect_sync

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterUp]:
    started = ClusterUp(tmp_path / "data")
    yield started
    started.end()


def shown(done: Outcome) -> dict[str, Any]:
    assert done.code == 0, done.err
    printed: dict[str, Any] = json.loads(done.out)
    return printed


def test_it_serves_grows_and_leaves_nothing_behind(cluster: ClusterUp) -> None:
    with connect_sync(cluster.native) as broker:
        subscription = broker.subscribe("a>1")
        broker.publish([{"a": 1}, {"a": 2}])
        assert next(iter(subscription)).notification == {"a": 2}
        scaled = cluster.command("scale", "matchers=2", "exit-points=2")
        assert len(shown(scaled)["slices"]) == 5
        assert "epoch 2" in scaled.err
        replaced = shown(cluster.command("replace", "matcher-1"))
        assert "matcher-1" not in replaced["slices"]
        broker.publish({"a": 3})
        assert next(iter(subscription)).notification == {"a": 3}
        # The same through HTTP, as the page does it.
        answer = httpx.post(f"{cluster.http}/v1/scale", json={"matchers": 1}, timeout=END_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert sum(name.startswith("matcher-") for name in told["slices"]) == 1
        assert (told["lost"], told["doubled"], told["disordered"]) == (0, 0, 0)
        assert told["probes"] > 0
        broker.publish({"a": 4})
        assert next(iter(subscription)).notification == {"a": 4}
        with broker.subscribe("p==is;change==added") as changes, Kp(cluster) as kp:
            kp.ask("INSERT", graph_of("insert_graph", ("hall", "is", "warm")))
            assert next(iter(changes)).notification["o"] == "warm"
    assert cluster.end()[0] == 0
    gone = cluster.command("layers")
    assert gone.code == 2
    assert "U730" in gone.err
