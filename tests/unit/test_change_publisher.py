"""Changes of the graph as notifications: a subscriber receives every triple, in the order of the changes."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tidegate.broker.knowledge import TEXT_CHARACTERS_MAX, ChangePublisher
from tidegate.broker.mirror import NotificationMirror
from tidegate.filters import Filter
from tidegate.frames import HEADER_BYTES, decode_deliver
from tidegate.hosts.embedded_host import EmbeddedHost
from tidegate.hosts.session import Session
from tidegate.knowledge.graph import Delta
from tidegate.knowledge.terms import Literal, Triple, Uri
from tidegate.layers.connection_point import Bounds
from tidegate.layers.outbox import Policy
from tidegate.layers.session_events import SessionEvent
from tidegate.notification import Value

# A character of the maximum length in UTF-8, repeated more often than is published.
LONG = "\U0010ffff" * (TEXT_CHARACTERS_MAX + 1)
texts = st.sampled_from(["", "a", "it's", "\x00", "é;,", "21", LONG]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=20
)
triples = st.builds(Triple, st.builds(Uri, texts), st.builds(Uri, texts), st.builds(Literal, texts), texts)
deltas = st.builds(Delta, st.lists(triples, max_size=8).map(tuple), st.lists(triples, max_size=8).map(tuple))


class Subscriber:
    """A subscriber to everything that is published."""

    def __init__(self, host: EmbeddedHost) -> None:
        self._session = Session(host, self)
        self._session.open()
        self._session.subscribe(1, Filter.parse("change"), Policy.DISCONNECT)

    def on_event(self, event: SessionEvent) -> None:
        pass

    def take(self) -> list[tuple[int, dict[str, Value]]]:
        frames: list[bytes] = []
        while self._session.take(1 << 20, frames.extend):
            pass
        taken = []
        for frame in frames:
            _, deliveries = decode_deliver(memoryview(frame)[HEADER_BYTES:])
            taken += [(each.sequence, dict(each.notification)) for each in deliveries]
        return taken


def expected(triple: Triple, change: str) -> dict[str, Value]:
    s, p, o = triple.subject.text, triple.predicate.text, triple.object.text
    longest = TEXT_CHARACTERS_MAX
    return {"s": s[:longest], "p": p[:longest], "o": o[:longest], "change": change, "graph": triple.graph[:longest]}


@given(st.lists(deltas, max_size=3), st.booleans())
def test_every_change_arrives_in_order(changes: list[Delta], are_together: bool) -> None:
    failures: list[Exception] = []
    host = EmbeddedHost(Bounds(), lambda: 0.0, failures.append)
    publisher, subscriber = ChangePublisher(host, "knowledge-1", NotificationMirror([])), Subscriber(host)

    async def publish() -> None:
        for delta in changes:
            publisher.check_room()
            publisher.publish(delta)
            if not are_together:
                await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(publish())
    wanted = [
        expected(triple, change)
        for delta in changes
        for triples, change in ((delta.removed, "removed"), (delta.added, "added"))
        for triple in triples
    ]
    assert subscriber.take() == list(enumerate(wanted, 1))
    assert failures == []
