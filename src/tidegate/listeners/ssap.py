"""The SSAP listener: knowledge processors (KPs) over TCP, as Smart-M3 libraries open and close their connections.

Most libraries open a connection for each request. Some close their sending side and then read until the broker closes,
so the broker answers after the end of input and closes at once. Others read to the end of the message.

A SUBSCRIBE keeps its connection open for indications. The broker sends a blank on it from time to time, which shows
the client that the broker is up, and the broker that the client still is. An UNSUBSCRIBE arrives on a connection of its
own, which many clients never read, so its confirm is sent on both connections; then the subscription's connection is
closed. LEAVE ends all subscriptions of its KP.

The requests of one connection are answered in order. Consecutive INSERTs are committed together, and confirmed when all
of them are in the graph. What may go wrong:
- A malformed message: answered if its sender is known. If the rest cannot be parsed, the connection is closed.
- A client sends faster than it is answered: its connection is not read meanwhile.
- A subscriber does not read: its indications are merged, and it is cut off when nothing moves for `STALLED_S`.
- An idle peer: its connection is closed after `hello_timeout_s` or `idle_timeout_s`. A subscriber may be idle; TCP
  keep-alive detects those that are gone.

Until a KP has joined from an address, messages from there must be small, since anybody could send them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import ssl
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

import msgspec

from tidegate.errors import NotAllowed, Overloaded, TidegateError
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
from tidegate.listeners.acceptor import Acceptor
from tidegate.listeners.connections import Connections
from tidegate.listeners.gate import check_token
from tidegate.listeners.peer_transport import PeerTransport

log = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 10.0
STALLED_S: Final = 60.0
LINGER_S: Final = 1.0  # for clients to read the last messages when the broker stops
# Requests of a connection that wait for those before them. Beyond this the connection is not read.
REQUESTS_WAITING_MAX: Final = 64
# The largest message from an address where no KP has joined.
UNJOINED_BYTES_MAX: Final = 64 * 1024
REQUESTS_WAITING_BYTES_MAX: Final = 1024 * 1024
INSERTS_TOGETHER_MAX: Final = 64
MEMBERS_MAX: Final = 100_000
CONNECTIONS_MAX: Final = 10_000
HELLO_TIMEOUT_S: Final = 10.0
IDLE_TIMEOUT_S: Final = 60.0
WRITE_BYTES: Final = 256 * 1024
_Write: TypeAlias = Callable[[Any], dict[str, str]]  # turns an answer into the parameters of its confirm
_NO_SOLUTIONS: Final = ssap.write_solutions((), ())


class SsapListener:
    """Accepts and owns all SSAP connections of a broker."""

    def __init__(
        self,
        knowledge: KnowledgeBase,
        token: str | None = None,
        connections_max: int = CONNECTIONS_MAX,
        keep_alive_s: float = KEEP_ALIVE_S,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        self.knowledge = knowledge
        self.places = Connections(connections_max)
        self.keep_alive_s = keep_alive_s
        self.hello_timeout_s = hello_timeout_s
        self.idle_timeout_s = idle_timeout_s
        self.members = Members(token)
        self.connections: set[SsapConnection] = set()
        self._has_lost = asyncio.Event()
        self.subscribers: dict[str, SsapConnection] = {}
        self._acceptor = Acceptor(self.places, hello_timeout_s, lambda: SsapConnection(self))

    async def start(self, bind: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Starts listening and returns the port."""
        return await self._acceptor.listen(bind, port, tls)

    def tick(self, now_s: float) -> None:
        """Sends subscribers a blank, cuts off those that do not read, and closes idle connections. A timer calls this
        about once a second."""
        self.knowledge.tick()
        for connection in list(self.connections):
            connection.keep_alive(now_s)
            connection.close_if_idle(now_s)

    def end_subscription(self, subscription_id: str, status: Status, confirm: bytes = b"") -> None:
        """Ends a subscription. Its connection receives `confirm`, or without one an indication with the status."""
        self.knowledge.unsubscribe(subscription_id)
        if (connection := self.subscribers.pop(subscription_id, None)) is not None:
            connection.end_subscription(subscription_id, status, confirm)

    def forget(self, connection: SsapConnection) -> None:
        self.connections.discard(connection)
        self._has_lost.set()

    async def stop(self) -> None:
        """Stops accepting, tells subscribers that the broker is closing, and gives them `LINGER_S` to read that."""
        self._acceptor.close()
        for subscription_id in list(self.subscribers):
            self.end_subscription(subscription_id, Status.CLOSING)
        for connection in list(self.connections):
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while self.connections:
                    self._has_lost.clear()
                    await self._has_lost.wait()
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)


class Members:
    """The KPs that have joined, each with its address.

    Membership is not tied to a connection: libraries send JOIN once, with their credentials, and open new connections
    for later requests. If a token is set, only members may send requests. Above `MEMBERS_MAX`, the KP that has been
    idle for longest is forgotten and must join again."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._joined: OrderedDict[bytes, str] = OrderedDict()  # member -> address; the longest idle first
        self._addresses: Counter[str] = Counter()

    def join(self, address: str, kp: str, credentials: str) -> None:
        check_token(credentials, self._token)
        member = _member(address, kp)
        if member not in self._joined:
            self._joined[member] = address
            self._addresses[address] += 1
            if len(self._joined) > MEMBERS_MAX:
                self._forget(next(iter(self._joined)))

    def check(self, address: str, kp: str) -> None:
        member = _member(address, kp)
        if member in self._joined:
            self._joined.move_to_end(member)
        elif self._token is not None:
            raise NotAllowed("A501", "a token is needed", "send JOIN first, with the token as credentials")

    def leave(self, address: str, kp: str) -> None:
        member = _member(address, kp)
        if member in self._joined:
            self._forget(member)

    def is_known(self, address: str) -> bool:
        """Returns whether any KP has joined from the address."""
        return address in self._addresses

    def _forget(self, member: bytes) -> None:
        address = self._joined.pop(member)
        self._addresses[address] -= 1
        if not self._addresses[address]:
            del self._addresses[address]


def _member(address: str, kp: str) -> bytes:
    """Returns a digest of a KP and its address. The KP's own name may be as long as a message, too long to store."""
    return hashlib.blake2b(f"{address} {kp}".encode(errors="replace"), digest_size=16).digest()


class SsapConnection(asyncio.Protocol):
    """One connection: answers its requests in order, and sends the indications of the subscriptions made on it."""

    def __init__(self, listener: SsapListener) -> None:
        self._listener = listener
        self._knowledge = listener.knowledge
        self._loop = asyncio.get_running_loop()
        self._transport: PeerTransport | None = None
        self._reader = ssap.MessageReader(UNJOINED_BYTES_MAX)
        self._requests: deque[ssap.Request | ssap.Malformed] = deque()
        self._subscriptions: dict[str, tuple[Envelope, Result]] = {}
        self._waiting_bytes = 0  # received since the queue of requests was last empty
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._is_answering = False
        self._is_pumping = False
        self._is_at_end = False
        self._is_broken = False
        self._is_welcome = False
        self._is_writable = True
        self._moved_s = self._heard_s = self._loop.time()
        self._address = ""
        self._can_half_close = True

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(PeerTransport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BYTES)
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        self._can_half_close = transport.get_extra_info("ssl_object") is None
        self._listener.connections.add(self)
        if self._listener.members.is_known(self._address):
            self._welcome()
        if self._transport.is_surplus:  # SSAP has no message that could explain the refusal
            log.info("SSAP connection refused: connections_max=%d", self._listener.places.connections_max)
            self.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_at_end:
            return
        if self._is_welcome:
            self._heard_s = self._loop.time()
        messages = self._reader.feed(data)
        self._requests.extend(messages)
        self._waiting_bytes += len(data)
        if messages and isinstance(messages[-1], ssap.Malformed) and messages[-1].is_fatal:
            self._is_at_end = self._is_broken = True
        self._pump()

    def eof_received(self) -> bool:
        self._is_at_end = True
        self._pump()
        # True keeps the sending side open for answers that are pending. TLS transports cannot do that.
        return self._can_half_close

    def pause_writing(self) -> None:
        self._is_writable = False
        self._moved_s = self._loop.time()

    def resume_writing(self) -> None:
        self._is_writable = True
        self._moved_s = self._loop.time()
        self._loop.call_soon(self._continue_writing)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._transport.lost()
        self._transport = None
        self._listener.forget(self)
        self._requests.clear()
        for subscription_id in self._subscriptions:
            del self._listener.subscribers[subscription_id]
            self._knowledge.detach(subscription_id)
        self._subscriptions.clear()

    # The listener calls these.

    def keep_alive(self, now_s: float) -> None:
        if not self._is_writable:
            if now_s - self._moved_s > STALLED_S and self._transport is not None:
                self._transport.cut()
        elif self._subscriptions and now_s - self._moved_s >= self._listener.keep_alive_s:
            self._write(b" ")

    def close_if_idle(self, now_s: float) -> None:
        """Closes the connection if its peer has sent no request for too long and waits for no answer.

        Until the first request is complete its bytes do not count, so a peer cannot stay by sending one at a time."""
        if self._subscriptions or self._requests or self._is_answering or not self._is_writable:
            return
        allowed_s = self._listener.idle_timeout_s if self._is_welcome else self._listener.hello_timeout_s
        silent_s = now_s - (max(self._heard_s, self._moved_s) if self._is_welcome else self._heard_s)
        if silent_s > allowed_s and self._transport is not None and not self._transport.is_closing():
            log.info("SSAP connection closed: the peer sent nothing for %.0f s", silent_s)
            self._transport.cut()

    def end_subscription(self, subscription_id: str, status: Status, confirm: bytes) -> None:
        """Sends the last message of a subscription, and then closes the connection if no other subscription uses it.

        While `_pump` runs, the client ended the subscription on this connection: it stays open for more requests."""
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

    def _continue_writing(self) -> None:
        for subscription_id in list(self._subscriptions):
            self._indicate(subscription_id)
        self._pump()

    # Requests, one after another.

    def _pump(self) -> None:
        """Answers waiting requests in order, until one is pending or the peer is behind.

        The knowledge base may answer a job immediately, which calls this method again: the flag turns that recursion
        into the next round of the loop."""
        if self._is_pumping:
            return
        self._is_pumping = True
        while self._requests and not self._is_answering and self._is_writable and self._transport is not None:
            self._handle(self._requests.popleft())
        self._is_pumping = False
        self._flush()
        self._pause_or_resume_reading()
        is_done = self._is_at_end and not self._requests and not self._is_answering
        if is_done and (self._is_broken or not self._subscriptions):
            self.close()

    def _pause_or_resume_reading(self) -> None:
        if self._transport is None or self._transport.is_closing() or self._is_at_end:
            return
        if not self._requests:
            self._waiting_bytes = 0
            self._transport.resume_reading()
        elif len(self._requests) > REQUESTS_WAITING_MAX or self._waiting_bytes > REQUESTS_WAITING_BYTES_MAX:
            self._transport.pause_reading()

    def _handle(self, request: ssap.Request | ssap.Malformed) -> None:
        if isinstance(request, ssap.Malformed):
            log.info("malformed message from %r: %s", request.envelope.node_id, request.error)
            if (answer := ssap.refusal(request)) is not None:
                self._write(answer)
            return
        try:
            self._check(request)
        except NotAllowed as error:
            self._refuse(request.envelope, error)
        else:
            self._welcome()
            self._answer(request)

    def _welcome(self) -> None:
        """Replaces the hello timeout by the idle timeout. Allows large messages if a KP joined from the address."""
        if not self._is_welcome:
            self._is_welcome = True
            self._heard_s = self._loop.time()
        if self._listener.members.is_known(self._address):
            self._reader.message_bytes_max = ssap.MESSAGE_BYTES_MAX

    def _check(self, request: ssap.Request) -> None:
        """Raises NotAllowed unless this KP may send the request; a JOIN makes it a member."""
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
                self._submit(
                    request.envelope, job, lambda answer: write(answer) | self._last_sequence(request.question)
                )
            case ssap.ChangeTriples(removed=()) if self._requests:
                self._insert(request)
            case _:
                self._submit(request.envelope, _change_job(request), _write_change if request.is_confirmed else None)

    def _last_sequence(self, question: Question) -> dict[str, str]:
        """Returns the sequence of the last indication, if a subscription of this connection asks the same question.

        A client that repeats its question to check a subscription compares this number with the last one it got."""
        queries = self._knowledge.queries
        for subscription_id in self._subscriptions:
            with contextlib.suppress(TidegateError):  # the subscription is about to end
                if queries.question_of(subscription_id) == question:
                    return {"ind_sequence": str(self._knowledge.sequence_of(subscription_id))}
        return {}

    def _submit(self, envelope: Envelope, job: Job, write: _Write | None) -> None:
        """Submits a job to the knowledge base. `write` turns its answer into the parameters of the confirm; None sends
        no confirm."""
        self._is_answering = True

        def on_answer(answer: Any, load: Load | None) -> None:
            self._is_answering = False
            if write is not None:
                self._confirm(envelope, answer, load, write)
            self._pump()

        self._knowledge.submit(_owner(envelope), job, on_answer)

    def _insert(self, first: ssap.ChangeTriples) -> None:
        """Commits an INSERT together with the INSERTs of the same KP right behind it: one commit instead of many."""
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
            self._write(ssap.confirm(envelope, Status.SUCCESS, write(answer) | _load_parameters(load)))

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
        head = self._knowledge.queries.head_of(subscription_id)
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
        """Ends a subscription and confirms on both connections, or once if they are the same."""
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
        """Sends the pending changes of a subscription. While the peer is behind they stay in the knowledge base, which
        merges them with later ones."""
        if not self._is_writable:
            return
        try:
            taken = self._knowledge.take(subscription_id)
        except TidegateError as error:  # the query can no longer be answered
            del self._listener.subscribers[subscription_id]
            envelope, _ = self._subscriptions[subscription_id]
            self.end_subscription(
                subscription_id, Status.RESET, _ended(envelope, subscription_id, Status.RESET, str(error))
            )
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
        if taken.held_s:
            parameters["held_s"] = f"{taken.held_s:.6f}"
        if self._knowledge.spread_s:
            parameters["spread_s"] = f"{self._knowledge.spread_s:.6f}"
        return ssap.indication(envelope, parameters)

    def _write(self, message: bytes) -> None:
        """Queues a message. Answers to requests that arrived together are sent in one write."""
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
    """The callback for changes of a subscription. Its id is set before any change can be reported."""

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
    """Returns the job of a query and the writer of its answer. Most clients send SPARQL updates as queries; those get
    a result without solutions."""
    if isinstance(question, SparqlQuery) and is_update(question.text):
        return UpdateJob(question.text), lambda _: {"results": _NO_SOLUTIONS}
    return AskJob(question), lambda result: {"results": ssap.write_result(result)}


def _load_parameters(load: Load | None) -> dict[str, str]:
    """Returns the broker's load as parameters of a confirm; older clients ignore them."""
    if load is None:
        return {}
    return {name: f"{value:.6f}" for name, value in msgspec.structs.asdict(load).items() if value is not None}


def _ended(envelope: Envelope, subscription_id: str, status: Status, error: str = "") -> bytes:
    ended = Envelope("UNSUBSCRIBE", envelope.transaction_id, envelope.space_id, envelope.node_id)
    parameters = {"status": str(status), "subscription_id": ssap.write_text(subscription_id)}
    if error:
        parameters["error"] = ssap.write_text(error)
    return ssap.indication(ended, parameters)
