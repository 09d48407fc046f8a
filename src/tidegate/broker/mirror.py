"""Mirrors: rules that copy attributes of notifications into the graph, and added triples into notifications.

A rule names the attribute that holds the subject of a notification, and the attributes to mirror.

`to = "graph"`: for each notification that matches the rule's filter, `(subject, attribute, value)` replaces all triples
with that subject and predicate. The graph thus holds the latest readings. Notifications that arrive together become one
change, in which the last value wins.

`to = "notifications"`: added triples with these predicates are published as one notification per subject.

There are no loops: no attribute may be mirrored both ways, and notifications from the knowledge base are not mirrored
back.

What may go wrong: if the graph is slower than the publishers, the oldest notifications are not mirrored, which is
logged. If the broker is killed, the last acknowledged notifications may not have been mirrored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeAlias

from tidegate.config import Mirror
from tidegate.errors import Overloaded, TidegateError
from tidegate.filters import Filter
from tidegate.frames import HEADER, HEADER_BYTES, Delivered, Gap, Kind, decode_body, decode_deliver
from tidegate.hosts.embedded_host import BrokerHost
from tidegate.hosts.session import Session
from tidegate.knowledge.graph import Delta
from tidegate.knowledge.knowledge_base import ChangeJob, KnowledgeBase
from tidegate.knowledge.terms import Literal, Mask, Triple, Uri
from tidegate.layers.outbox import Policy
from tidegate.layers.session_events import DeliveriesWait, SessionEvent, SubscriptionReady, SubscriptionRefused
from tidegate.notification import INTEGER_MAX, Value

log = logging.getLogger(__name__)

KP: Final = "mirror"
TAKE_BYTES: Final = 256 * 1024
# With texts of this length, a notification with all attributes that a rule may have stays within its bounds. Longer
# texts are truncated.
TEXT_CHARACTERS_MAX: Final = 1000
XSD: Final = "http://www.w3.org/2001/XMLSchema#"

_Latest: TypeAlias = dict[tuple[str, str], Literal]  # by subject and predicate


class GraphMirror:
    """A subscriber inside the broker that writes its notifications to the graph, one change at a time."""

    def __init__(self, rules: Iterable[Mirror], host: BrokerHost, knowledge: KnowledgeBase, own_publisher: str) -> None:
        self._rules = [rule for rule in rules if rule.to == "graph"]
        self._session = Session(host, self)
        self._knowledge = knowledge
        self._own_publisher = own_publisher
        self._loop = asyncio.get_running_loop()
        self._unready = len(self._rules)
        self._is_ready: asyncio.Future[None] = self._loop.create_future()
        self._is_busy = False

    async def start(self) -> None:
        """Subscribes with the filter of each rule, and waits until the layers have confirmed all of them."""
        if not self._rules:
            return
        self._session.open()
        for number, rule in enumerate(self._rules):
            self._session.subscribe(number, Filter.parse(rule.filter), Policy.DROP_OLDEST)
        await self._is_ready

    def on_event(self, event: SessionEvent) -> None:
        if isinstance(event, SubscriptionReady):
            self._unready -= 1
            if not self._unready:
                self._is_ready.set_result(None)
        elif isinstance(event, SubscriptionRefused) and not self._is_ready.done():
            self._is_ready.set_exception(event.error)
        elif isinstance(event, DeliveriesWait):
            # Deferred, because the Connection Point calls this in the middle of a delivery.
            self._loop.call_soon(self._take)

    def _take(self) -> None:
        if self._is_busy:
            return
        frames: list[bytes] = []
        if self._session.take(TAKE_BYTES, frames.extend):
            self._is_busy = True
            self._submit(_job(self._latest(frames)))

    def _submit(self, job: ChangeJob) -> None:
        def on_answer(answer: Any, _load: Any) -> None:
            if isinstance(answer, Overloaded):
                self._loop.call_later(answer.retry_after_s, self._submit, job)
                return
            if isinstance(answer, TidegateError):
                log.warning("notifications were not mirrored: %s", answer)
            self._is_busy = False
            self._loop.call_soon(self._take)

        self._knowledge.submit(KP, job, on_answer)

    def _latest(self, frames: list[bytes]) -> _Latest:
        latest: _Latest = {}
        for frame in frames:
            body = memoryview(frame)[HEADER_BYTES:]
            if HEADER.unpack_from(frame)[1] == Kind.GAP:
                gap: Gap = decode_body(body, Gap)
                log.warning("the mirror is too slow: %d notifications were not mirrored", sum(gap.dropped.values()))
                continue
            publisher, deliveries = decode_deliver(body)
            if publisher != self._own_publisher:
                for each in deliveries:
                    latest |= self._triples(each)
        return latest

    def _triples(self, delivered: Delivered) -> _Latest:
        numbers, notification = delivered.subscriptions, delivered.notification
        found: _Latest = {}
        for number in (numbers,) if isinstance(numbers, int) else numbers:
            rule = self._rules[number]
            if rule.subject in notification:
                subject = literal_of(notification[rule.subject]).text
                found |= {
                    (subject, name): literal_of(notification[name]) for name in rule.attributes if name in notification
                }
        return found


class NotificationMirror:
    """Derives notifications from the added triples of a delta, by the rules with `to = "notifications"`."""

    def __init__(self, rules: Iterable[Mirror]) -> None:
        self._rules = [(rule, Filter.parse(rule.filter)) for rule in rules if rule.to == "notifications"]

    def notifications(self, delta: Delta) -> Iterator[dict[str, Value]]:
        for rule, wanted in self._rules:
            for notification in _by_subject(rule, delta.added):
                if wanted.matches(notification):
                    yield notification


def literal_of(value: Value) -> Literal:
    if isinstance(value, bool):
        return Literal(str(value).lower(), XSD + "boolean")
    if isinstance(value, str):
        return Literal(value)
    return Literal(repr(value), XSD + ("integer" if isinstance(value, int) else "double"))


def value_of(term: Uri | Literal) -> Value:
    """Returns a number or boolean if a notification can hold it, otherwise the text, truncated if it is too long."""
    if isinstance(term, Literal):
        with contextlib.suppress(ValueError):
            match term.datatype.removeprefix(XSD):
                case "boolean":
                    return term.text in ("true", "1")
                case "integer" if -INTEGER_MAX <= (whole := int(term.text)) <= INTEGER_MAX:
                    return whole
                case "decimal" | "double" | "float" if math.isfinite(real := float(term.text)):
                    return real
    return term.text[:TEXT_CHARACTERS_MAX]


def _job(latest: _Latest) -> ChangeJob:
    return ChangeJob(
        tuple(Mask(Uri(subject), Uri(name)) for subject, name in latest),
        tuple(Triple(Uri(subject), Uri(name), literal) for (subject, name), literal in latest.items()),
    )


def _by_subject(rule: Mirror, added: Iterable[Triple]) -> Iterator[dict[str, Value]]:
    """Yields one notification per subject, and another one for each further value of the same attribute."""
    gathered: dict[str, dict[str, Value]] = {}
    for triple in added:
        subject, name = triple.subject.text, triple.predicate.text
        if name not in rule.attributes or triple.graph:
            continue
        if name in gathered.get(subject, ()):
            yield gathered.pop(subject)
        gathered.setdefault(subject, {rule.subject: subject[:TEXT_CHARACTERS_MAX]})[name] = value_of(triple.object)
    yield from gathered.values()
