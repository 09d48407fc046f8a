"""The SSAP listener: knowledge processors over TCP, as Smart-M3 libraries open and close their connections.

Most libraries open a connection for each request. Some close their sending side first and read until the broker closes
(so it answers after the end of input, and closes at once), some read to the end of the message. A SUBSCRIBE keeps its
connection: indications follow on it, a blank now and then shows that the broker is there, and whoever has left is found
by it. An UNSUBSCRIBE comes on a connection of its own, which nobody reads; its confirm goes to both, as the reader of
the subscription waits for it there, and then the subscription's connection is closed. LEAVE ends all subscriptions of
its KP.

Requests of one connection are answered in their order. INSERTs that follow each other are committed together, and
confirmed when all of them are in the graph. What may go wrong: a malformed message (answered if its sender
is known; the connection is closed if what follows cannot be read), a client that sends faster than it is answered (not
read meanwhile), a subscriber that does not read (its indications are merged, and it is cut off when nothing moves for
`STALLED_S`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

import msgspec

from tidegate.errors import KnowledgeError, NotAllowed, Overloaded, TidegateError
from tidegate.knowledge import ssap
from tidegate.knowledge.graph import Delta
from tidegate.knowledge.knowledge_base import (
    AskJob,
    ChangeJob,
    InsertsJob,
    Job,
    KnowledgeBase,
    Subscribed,
    SubscribeJob,
    UpdateJob,
)
from tidegate.knowledge.persistent_query import Indication
from tidegate.knowledge.question import Question, Result, SparqlQuery
from tidegate.knowledge.request_pool import Load
from tidegate.knowledge.sparql import is_update
from tidegate.knowledge.ssap import Envelope, Status
from tidegate.listeners.gate import check_token

log = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 10.0
STALLED_S: Final = 60.0
LINGER_S: Final = 1.0  # for what was written, when the broker closes
# Requests of a connection that wait for those before them; more are left in the socket.
REQUESTS_WAITING_MAX: Final = 64
INSERTS_TOGETHER_MAX: Final = 64
MEMBERS_MAX: Final = 100_000
CONNECTIONS_MAX: Final = 10_000
WRITE_BYTES: Final = 256 * 1024
_Write: TypeAlias = Callable[[Any], dict[str, str]]  # from an answer to the parameters of its confirm
_NO_SOLUTIONS: Final = ssap.write_solutions((), ())


class SsapListener:
    """All SSAP connections of a broker."""

    def __init__(
        self,
        knowledge: KnowledgeBase,
        token: str | None = None,
        connections_max: int = CONNECTIONS_MAX,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.knowledge = knowledge
        self.connections_max = connections_max
        self.keep_alive_s = keep_alive_s
        self.members = Members(token)
        self.connections: set[SsapConnection] = set()
        self.subscribers: dict[str, SsapConnection] = {}
        self._server: asyncio.Server | None = None

    async def start(self, bind: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listens; returns the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: SsapConnection(self), bind, port, backlog=1024, ssl=tls)
        return int(self._server.sockets[0].getsockname()[1])

    def tick(self, now_s: float) -> None:
        """Wakes subscribers with a blank, and cuts off those that do not read; for a timer, once a second or so."""
        self.knowledge.tick()
        for connection in list(self.connections):
            connection.keep_alive(now_s)

    def end_subscription(self, subscription_id: str, status: Status, confirm: bytes = b"") -> None:
        """Ends a subscription. Its connection is told by a confirm, or by an indication with the status."""
        self.knowledge.unsubscribe(subscription_id)
        if (connection := self.subscribers.pop(subscription_id, None)) is not None:
            connection.end_subscription(subscription_id, status, confirm)

    async def stop(self) -> None:
        """Takes no more; subscribers are told that the broker closes, and have a moment to read it."""
        if self._server is not None:
            self._server.close()
        for subscription_id in list(self.subscribers):
            self.end_subscription(subscription_id, Status.CLOSING)
        for connection in list(self.connections):
            connection.close()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + LINGER_S
        while self.connections and loop.time() < deadline_s:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)


class Members:
    """Where there is a token: the KPs that have joined with it, each from its address. Libraries show their credentials
    once, in JOIN, and open other connections for what follows. The one that was quiet for longest must join again when
    there are too many."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._joined: OrderedDict[tuple[str, str], None] = OrderedDict()

    def join(self, address: str, kp: str, credentials: str) -> None:
        check_token(credentials, self._token)
        if self._token is not None:
            self._joined[address, kp] = None
            if len(self._joined) > MEMBERS_MAX:
                self._joined.popitem(last=False)

    def check(self, address: str, kp: str) -> None:
        if self._token is None:
            return
        if (address, kp) not in self._joined:
            raise NotAllowed("A501", "a token is needed", "JOIN first, with the token as credentials")
        self._joined.move_to_end((address, kp))

    def leave(self, address: str, kp: str) -> None:
        self._joined.pop((address, kp), None)


class SsapConnection(asyncio.Protocol):
    """One connection: requests in their order, and the indications of the subscriptions that were made on it."""

    def __init__(self, listener: SsapListener) -> None:
        self._listener = listener
        self._knowledge = listener.knowledge
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = ssap.MessageReader()
        self._requests: deque[ssap.Request | ssap.Malformed] = deque()
        self._subscriptions: dict[str, tuple[Envelope, Result]] = {}
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._is_answering = False
        self._is_pumping = False
        self._is_at_end = False
        self._is_broken = False
        self._is_writable = True
        self._moved_s = self._loop.time()
        self._address = ""
        self._can_half_close = True

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if len(self._listener.connections) >= self._listener.connections_max:
            log.warning("connections_max=%d: an SSAP connection is refused", self._listener.connections_max)
            cast(asyncio.Transport, transport).abort()
            return
        # uvloop's transports have the methods, not the class.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BYTES)
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        self._can_half_close = transport.get_extra_info("ssl_object") is None
        self._listener.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._is_at_end:
            return
        messages = self._reader.feed(data)
        self._requests.extend(messages)
        if messages and isinstance(messages[-1], ssap.Malformed) and messages[-1].is_fatal:
            self._is_at_end = self._is_broken = True
        self._pump()

    def eof_received(self) -> bool:
        self._is_at_end = True
        self._pump()
        return self._can_half_close

    def pause_writing(self) -> None:
        self._is_writable = False
        self._moved_s = self._loop.time()

    def resume_writing(self) -> None:
        self._is_writable = True
        self._moved_s = self._loop.time()
        for subscription_id in list(self._subscriptions):
            self._indicate(subscription_id)
        self._pump()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._listener.connections.discard(self)
        self._requests.clear()
        for subscription_id in self._subscriptions:
            del self._listener.subscribers[subscription_id]
            self._knowledge.detach(subscription_id)
        self._subscriptions.clear()

    # The listener calls these.

    def keep_alive(self, now_s: float) -> None:
        if not self._is_writable:
            if now_s - self._moved_s > STALLED_S:
                self.abort()
        elif self._subscriptions and now_s - self._moved_s >= self._listener.keep_alive_s:
            self._write(b" ")

    def end_subscription(self, subscription_id: str, status: Status, confirm: bytes) -> None:
        """The client reads its last words here, and then the end of the connection, unless it has asked here."""
        envelope, _ = self._subscriptions.pop(subscription_id)
        self._write(confirm or _ended(envelope, subscription_id, status))
        if not self._subscriptions and not self._is_pumping:
            self._is_at_end = True
            self._pump()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # Requests, one after another.

    def _pump(self) -> None:
        """Answers what can be answered. A job may call back at once: the loop goes on, it does not call itself."""
        if self._is_pumping:
            return
        self._is_pumping = True
        while self._requests and not self._is_answering and self._is_writable and self._transport is not None:
            self._handle(self._requests.popleft())
        self._is_pumping = False
        self._flush()
        self._read_or_not()
        is_done = self._is_at_end and not self._requests and not self._is_answering
        if is_done and (self._is_broken or not self._subscriptions):
            self.close()

    def _read_or_not(self) -> None:
        if self._transport is None or self._transport.is_closing() or self._is_at_end:
            return
        if len(self._requests) > REQUESTS_WAITING_MAX:
            self._transport.pause_reading()
        elif not self._requests:
            self._transport.resume_reading()

    def _handle(self, request: ssap.Request | ssap.Malformed) -> None:
        if isinstance(request, ssap.Malformed):
            log.info("malformed message of %r: %s", request.envelope.node_id, request.error)
            if (answer := ssap.refusal(request)) is not None:
                self._write(answer)
            return
        try:
            self._check(request)
        except NotAllowed as error:
            self._refuse(request.envelope, error)
        else:
            self._answer(request)

    def _check(self, request: ssap.Request) -> None:
        """Whether this KP may ask."""
        kp = _owner(request.envelope)
        if isinstance(request, ssap.Join):
            self._listener.members.join(self._address, kp, request.credentials)
        else:
            self._listener.members.check(self._address, kp)

    def _answer(self, request: ssap.Request) -> None:
        match request:
            case ssap.Join():
                self._write(ssap.confirm(request.envelope, Status.SUCCESS))
            case ssap.Leave():
                self._leave(request)
            case ssap.Subscribe():
                self._subscribe(request)
            case ssap.Unsubscribe():
                self._unsubscribe(request)
            case ssap.Query():
                job, write = _query_job(request.question)
                self._submit(request.envelope, job, lambda answer: write(answer) | self._numbered(request.question))
            case ssap.ChangeTriples(removed=()) if self._requests:
                self._insert(request)
            case _:
                self._submit(request.envelope, _change_job(request), _write_change if request.is_confirmed else None)

    def _numbered(self, question: Question) -> dict[str, str]:
        """For who checks a subscription of this connection by its own question: the last number that went before."""
        queries = self._knowledge.queries
        for subscription_id in self._subscriptions:
            with contextlib.suppress(KnowledgeError):  # one that is about to end
                if queries.question_of(subscription_id) == question:
                    return {"ind_sequence": str(self._knowledge.sequence_of(subscription_id))}
        return {}

    def _submit(self, envelope: Envelope, job: Job, write: _Write | None) -> None:
        """Gives a job to the knowledge base; `write` makes the parameters of the confirm, if one is wanted."""
        self._is_answering = True

        def on_answer(answer: Any, load: Load | None) -> None:
            self._is_answering = False
            if write is not None:
                self._confirm(envelope, answer, load, write)
            self._pump()

        self._knowledge.submit(_owner(envelope), job, on_answer)

    def _insert(self, first: ssap.ChangeTriples) -> None:
        """An insert, and those that came right behind it."""
        kp, together = _owner(first.envelope), [first]
        while self._requests and len(together) < INSERTS_TOGETHER_MAX and _is_insert_of(kp, self._requests[0]):
            together.append(cast(ssap.ChangeTriples, self._requests.popleft()))
        self._is_answering = True

        def on_answer(answer: Any, load: Load | None) -> None:
            self._is_answering = False
            answers = [answer] * len(together) if isinstance(answer, TidegateError) else answer
            for request, each in zip(together, answers, strict=True):
                if request.is_confirmed:
                    self._confirm(request.envelope, each, load, _write_change)
            self._pump()

        self._knowledge.submit(kp, InsertsJob(tuple(request.inserted for request in together)), on_answer)

    def _confirm(self, envelope: Envelope, answer: Any, load: Load | None, write: _Write) -> None:
        if isinstance(answer, TidegateError):
            self._refuse(envelope, answer)
        else:
            self._write(ssap.confirm(envelope, Status.SUCCESS, write(answer) | _told(load)))

    def _refuse(self, envelope: Envelope, error: TidegateError) -> None:
        parameters = {"error": ssap.write_text(str(error))}
        if isinstance(error, Overloaded):
            parameters["retry_after_s"] = f"{error.retry_after_s:.6f}"
        self._write(ssap.confirm(envelope, ssap.status_of(error), parameters))

    def _leave(self, request: ssap.Leave) -> None:
        self._write(ssap.confirm(request.envelope, Status.SUCCESS))
        self._listener.members.leave(self._address, _owner(request.envelope))
        for subscription_id in self._knowledge.queries.subscriptions_of(_owner(request.envelope)):
            self._listener.end_subscription(subscription_id, Status.SUCCESS)

    def _subscribe(self, request: ssap.Subscribe) -> None:
        if request.subscription_id:
            self._resume(request)
            return
        news = _News(self)

        def write(subscribed: Subscribed) -> dict[str, str]:
            news.subscription_id = subscribed.subscription_id
            self._attach(subscribed.subscription_id, request.envelope, subscribed.result)
            return {
                "subscription_id": ssap.write_text(subscribed.subscription_id),
                "results": ssap.write_result(subscribed.result),
            }

        self._submit(request.envelope, SubscribeJob(request.question, news), write)

    def _resume(self, request: ssap.Subscribe) -> None:
        news = _News(self)
        news.subscription_id = subscription_id = request.subscription_id
        if (connection := self._listener.subscribers.pop(subscription_id, None)) is not None:
            connection.end_subscription(subscription_id, Status.RESET, b"")
        try:
            resumption = self._knowledge.resume(subscription_id, request.last_sequence, news)
        except TidegateError as error:
            self._refuse(request.envelope, error)
            return
        whole = resumption.result
        head = whole or self._knowledge.queries.result_of(subscription_id)
        self._attach(subscription_id, request.envelope, head)
        parameters = {
            "subscription_id": ssap.write_text(subscription_id),
            "ind_sequence": str(resumption.sequence if whole is not None else request.last_sequence),
            "results": ssap.write_result(whole if whole is not None else head.with_rows([])),
        }
        self._write(ssap.confirm(request.envelope, Status.SUCCESS if whole is None else Status.RESET, parameters))
        if resumption.missed is not None:
            self._write(self._indication(subscription_id, resumption.missed))

    def _attach(self, subscription_id: str, envelope: Envelope, result: Result) -> None:
        if self._transport is None:
            self._knowledge.detach(subscription_id)
            return
        self._subscriptions[subscription_id] = (envelope, result.with_rows([]))
        self._listener.subscribers[subscription_id] = self

    def _unsubscribe(self, request: ssap.Unsubscribe) -> None:
        """Confirmed on both connections, or once if they are the same."""
        message = ssap.confirm(
            request.envelope, Status.SUCCESS, {"subscription_id": ssap.write_text(request.subscription_id)}
        )
        is_here = request.subscription_id in self._subscriptions
        try:
            self._listener.end_subscription(request.subscription_id, Status.SUCCESS, message)
        except TidegateError as error:
            self._refuse(request.envelope, error)
            return
        if not is_here:
            self._write(message)

    # Indications.

    def on_news(self, subscription_id: str) -> None:
        if subscription_id in self._subscriptions:
            self._indicate(subscription_id)

    def _indicate(self, subscription_id: str) -> None:
        """What waits goes out, unless the peer is behind: then it waits on, and is merged with what comes."""
        if not self._is_writable:
            return
        try:
            taken = self._knowledge.take(subscription_id)
        except KnowledgeError:  # its question can be answered no more
            del self._listener.subscribers[subscription_id]
            self.end_subscription(subscription_id, Status.RESET, b"")
            return
        if taken is not None:
            self._write(self._indication(subscription_id, taken))

    def _indication(self, subscription_id: str, taken: Indication) -> bytes:
        envelope, head = self._subscriptions[subscription_id]
        parameters = {
            "ind_sequence": str(taken.sequence),
            "subscription_id": ssap.write_text(subscription_id),
            "new_results": ssap.write_result(head.with_rows(list(taken.difference.added))),
            "obsolete_results": ssap.write_result(head.with_rows(list(taken.difference.removed))),
        }
        if taken.merged:
            parameters["merged"] = str(taken.merged)
        if self._knowledge.spread_s:
            parameters["spread_s"] = f"{self._knowledge.spread_s:.6f}"
        return ssap.indication(envelope, parameters)

    def _write(self, message: bytes) -> None:
        """The answers to requests that came together leave together."""
        self._unsent.append(message)
        self._unsent_bytes += len(message)
        if not self._is_pumping or self._unsent_bytes > WRITE_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
            self._moved_s = self._loop.time()
        self._unsent.clear()
        self._unsent_bytes = 0


class _News:
    """Called when a subscription has news; nothing can happen before its id is known."""

    def __init__(self, connection: SsapConnection) -> None:
        self.subscription_id = ""
        self._connection = connection

    def __call__(self) -> None:
        self._connection.on_news(self.subscription_id)


def _owner(envelope: Envelope) -> str:
    return f"{envelope.space_id}/{envelope.node_id}"


def _is_insert_of(kp: str, request: ssap.Request | ssap.Malformed) -> bool:
    return isinstance(request, ssap.ChangeTriples) and not request.removed and _owner(request.envelope) == kp


def _change_job(request: ssap.ChangeTriples | ssap.ChangeBySparql) -> Job:
    if isinstance(request, ssap.ChangeBySparql):
        return UpdateJob(request.text)
    return ChangeJob(request.removed, request.inserted)


def _write_change(delta: Delta) -> dict[str, str]:
    return {"bnodes": ssap.write_named(delta.named)}


def _query_job(question: Question) -> tuple[Job, _Write]:
    """Most clients send their SPARQL updates as queries; they get a result without solutions."""
    if isinstance(question, SparqlQuery) and is_update(question.text):
        return UpdateJob(question.text), lambda _: {"results": _NO_SOLUTIONS}
    return AskJob(question), lambda result: {"results": ssap.write_result(result)}


def _told(load: Load | None) -> dict[str, str]:
    """What the broker tells clients of its load; old ones do not look."""
    if load is None:
        return {}
    return {name: f"{value:.6f}" for name, value in msgspec.structs.asdict(load).items() if value is not None}


def _ended(envelope: Envelope, subscription_id: str, status: Status) -> bytes:
    ended = Envelope("UNSUBSCRIBE", envelope.transaction_id, envelope.space_id, envelope.node_id)
    return ssap.indication(ended, {"status": status, "subscription_id": ssap.write_text(subscription_id)})
