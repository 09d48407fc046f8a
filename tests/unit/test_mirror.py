"""Mirrors compared with a dictionary: the graph has the latest values, and each added value is published once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import values

from tidegate import config as settings
from tidegate.broker.knowledge import ChangePublisher
from tidegate.broker.mirror import TEXT_CHARACTERS_MAX, XSD, GraphMirror, NotificationMirror, literal_of, value_of
from tidegate.config import Mirror
from tidegate.errors import Overloaded, TidegateError
from tidegate.filters import Filter
from tidegate.hosts.embedded_host import EmbeddedHost
from tidegate.hosts.session import Session
from tidegate.knowledge.graph import Delta, Graph
from tidegate.knowledge.knowledge_base import ChangeJob, KnowledgeBase
from tidegate.knowledge.terms import Literal, Mask, Triple, Uri
from tidegate.layers.batch import BatchReader
from tidegate.layers.connection_point import Bounds
from tidegate.layers.session_events import SessionEvent
from tidegate.notification import Value

RULES = (
    Mirror(to="graph", subject="station", attributes=("NO2", "name")),
    Mirror(to="graph", subject="room", attributes=("t",), filter="t>10"),
    Mirror(to="notifications", subject="lamp", attributes=("wanted", "colour")),
)

notifications = st.dictionaries(
    st.sampled_from(["station", "room", "NO2", "name", "t", "other"]),
    st.sampled_from(["a", "b", 9, 11, 12.5, True]),
    min_size=1,
)


class World:
    """A broker without its listeners."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.host = EmbeddedHost(Bounds(), lambda: 0.0, self.failures.append)
        self.graph = Graph()
        self.is_full = False
        publisher = ChangePublisher(self.host, "own", NotificationMirror(RULES))
        self.knowledge = KnowledgeBase(self.graph, publish=publisher.publish, check_room=self._check_room)
        self.mirror = GraphMirror(RULES, self.host, self.knowledge, "own")
        self.sensor = Session(self.host, self)
        self.sensor.open()
        self.sensor.attach_publisher("sensor")
        self._sent = 0

    def on_event(self, event: SessionEvent) -> None:
        pass

    def _check_room(self) -> None:
        if self.is_full:
            raise Overloaded("L654", "there is no room", "wait", retry_after_s=0.01)

    def publish(self, *some: dict[str, Value]) -> None:
        batch = BatchReader().read_array("sensor", self._sent + 1, msgspec.msgpack.encode(some))
        self._sent = batch.last
        self.sensor.submit([batch], batch.last)

    async def settle(self) -> None:
        """Waits a few turns of the event loop, in which everything here completes."""
        for _ in range(20):
            await asyncio.sleep(0)
        assert self.failures == []

    def facts(self) -> dict[tuple[str, str], Any]:
        return {(t.subject.text, t.predicate.text): value_of(t.object) for t in self.graph.triples([Mask()])}


def mirrored(some: list[dict[str, Value]]) -> dict[tuple[str, str], Any]:
    facts: dict[tuple[str, str], Any] = {}
    for notification in some:
        for rule in RULES[:2]:
            if rule.subject in notification and Filter.parse(rule.filter).matches(notification):
                subject = literal_of(notification[rule.subject]).text
                facts |= {(subject, name): notification[name] for name in rule.attributes if name in notification}
    return facts


@given(st.lists(st.lists(notifications, min_size=1, max_size=4), max_size=6), st.data())
def test_the_graph_has_the_latest_of_every_attribute(parts: list[list[dict[str, Value]]], data: st.DataObject) -> None:
    async def scenario() -> None:
        world = World()
        await world.mirror.start()
        for part in parts:
            world.publish(*part)
            if data.draw(st.booleans(), "settle"):
                await world.settle()
        await world.settle()
        assert world.facts() == mirrored([each for part in parts for each in part])

    asyncio.run(scenario())


def test_what_comes_together_is_one_change() -> None:
    async def scenario() -> None:
        world = World()
        await world.mirror.start()
        some: list[dict[str, Value]] = [{"station": "a", "NO2": number} for number in range(1000)]
        world.publish(*some)
        await world.settle()
        assert world.facts() == {("a", "NO2"): 999}
        assert world.knowledge.queries.statistics().deltas == 1

    asyncio.run(scenario())


def test_a_mirror_that_is_refused_tries_again() -> None:
    async def scenario() -> None:
        world = World()
        await world.mirror.start()
        world.is_full = True
        world.publish({"station": "a", "NO2": 1})
        await world.settle()
        world.publish({"station": "a", "NO2": 2})
        assert world.facts() == {}
        world.is_full = False
        async with asyncio.timeout(10):
            while not world.facts():
                await asyncio.sleep(0.01)
        await world.settle()
        assert world.facts() == {("a", "NO2"): 2}

    asyncio.run(scenario())


def test_added_triples_become_notifications_of_their_subjects() -> None:
    def triple(subject: str, predicate: str, found: Uri | Literal, graph: str = "") -> Triple:
        return Triple(Uri(subject), Uri(predicate), found, graph)

    added = (
        triple("l1", "wanted", Literal("21", XSD + "integer")),
        triple("l1", "colour", Uri("red")),
        triple("l2", "colour", Literal("x" * 2000)),
        triple("l1", "other", Literal("1")),
        triple("l3", "wanted", Literal("1"), "elsewhere"),
        triple("l2", "colour", Literal("blue")),
    )
    found = list(NotificationMirror(RULES).notifications(Delta(added, (triple("l4", "wanted", Uri("x")),))))
    assert sorted(found, key=str) == sorted(
        [
            {"lamp": "l1", "wanted": 21, "colour": "red"},
            {"lamp": "l2", "colour": "x" * TEXT_CHARACTERS_MAX},
            {"lamp": "l2", "colour": "blue"},
        ],
        key=str,
    )


def test_what_the_knowledge_base_publishes_is_not_mirrored_back() -> None:
    async def scenario() -> None:
        everything = Mirror(to="graph", subject="s", attributes=("o", "change"))
        world = World()
        world.mirror = GraphMirror([everything], world.host, world.knowledge, "own")
        await world.mirror.start()
        world.knowledge.submit("kp", ChangeJob((), (Triple(Uri("x"), Uri("y"), Literal("z")),)), lambda *_: None)
        await world.settle()
        assert world.facts() == {("x", "y"): "z"}

    asyncio.run(scenario())


@given(values)
def test_a_value_is_the_same_after_its_way_through_the_graph(value: Value) -> None:
    graph = Graph()
    graph.change(inserted=[Triple(Uri("s"), Uri("p"), literal_of(value))])
    (triple,) = graph.triples([Mask()])
    back = value_of(triple.object)
    assert back == value
    assert isinstance(back, bool) == isinstance(value, bool)
    assert isinstance(back, str) == isinstance(value, str)


@pytest.mark.parametrize(
    ("text", "datatype", "value"),
    [
        ("1" * 30, "integer", "1" * 30),
        ("many", "integer", "many"),
        ("INF", "double", "INF"),
        ("19.5", "decimal", 19.5),
        ("2026-11-16", "date", "2026-11-16"),
    ],
)
def test_what_a_notification_cannot_hold_is_text(text: str, datatype: str, value: Value) -> None:
    assert value_of(Literal(text, XSD + datatype)) == value


RULE = {"to": "graph", "subject": "station", "attributes": ["NO2"]}


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ([RULE | {"to": "moon"}], "C404"),
        ([RULE | {"attributes": []}], "C404"),
        ([RULE | {"colour": "red"}], "C404"),
        ([RULE | {"filter": "NO2>"}], "F1"),
        ([RULE | {"attributes": ["$payload"]}], "N2"),
        ([RULE | {"attributes": ["station"]}], "C404"),
        ([RULE, RULE | {"to": "notifications"}], "C404"),
        ("[", "C404"),
    ],
)
def test_rules_that_are_refused(rules: Any, code: str) -> None:
    text = rules if isinstance(rules, str) else msgspec.json.encode(rules).decode()
    with pytest.raises(TidegateError, match=code):
        settings.load(environment={"TIDEGATE_MIRROR": text})


def test_rules_need_a_knowledge_base() -> None:
    rules = msgspec.json.encode([RULE]).decode()
    loaded, _ = settings.load(environment={"TIDEGATE_MIRROR": rules})
    assert loaded.mirror == (Mirror(to="graph", subject="station", attributes=("NO2",)),)
    with pytest.raises(TidegateError, match="C404"):
        settings.load(environment={"TIDEGATE_MIRROR": rules, "TIDEGATE_SSAP_PORT": "-1"})
