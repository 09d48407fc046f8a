"""Queue requests over the native protocol, frame by frame: each gets one answer, and an error ends only one request.

A peer that has left, does not read, or requests more than exists neither loses nor keeps a message.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from broker_checks import assert_healthy, wait_until
from broker_process import BrokerProcess
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_client import Frame, RawClient, header_only

from tidegate.frames import HEADER, ErrorBody, Hello, Kind, decode_body, encode_frame
from tidegate.messages import Dequeue, Enqueue, Enqueued, Kept, Leased, NewMessage, QueueCall, Record, Settle, Settled

MIB = 1024 * 1024


class QueueClient(RawClient):
    """A client with one request at a time, and increasing numbers."""

    def __init__(self, broker: BrokerProcess, **options: Any) -> None:
        super().__init__(broker.native_port, **options)
        self.hello()
        self.number = 0

    def ask(self, kind: Kind, body: Any) -> int:
        self.number += 1
        self.send(encode_frame(kind, body, self.number))
        return self.number

    def answer(self, kind: Kind, body: Any) -> Frame:
        number = self.ask(kind, body)
        frame = self.receive()
        assert frame is not None
        assert frame.sequence == number
        return frame

    def reply(self, kind: Kind, body: Any, shape: Any) -> Any:
        frame = self.answer(kind, body)
        assert frame.kind == Kind.REPLY, frame.body
        return decode_body(frame.body, shape) if frame.body else None

    def call(self, action: str, name: str = "", **arguments: Any) -> Any:
        return self.reply(Kind.QUEUE_CALL, QueueCall(action, name, arguments), object)

    def put(self, queue: str, *bodies: Any, **fields: Any) -> Enqueued:
        messages = [NewMessage(msgspec.Raw(msgspec.msgpack.encode(body)), **fields) for body in bodies]
        enqueued: Enqueued = self.reply(Kind.ENQUEUE, Enqueue(queue, messages), Enqueued)
        return enqueued

    def take(self, queue: str, **limits: Any) -> list[Leased]:  # type: ignore[override]
        leased: list[Leased] = self.reply(Kind.DEQUEUE, Dequeue(queue, **limits), list[Leased])
        return leased

    def settle(self, queue: str, action: str, leased: list[Leased], **seconds: float) -> tuple[int, int]:
        body = Settle(queue, action, [message.receipt for message in leased], **seconds)
        settled: Settled = self.reply(Kind.SETTLE, body, Settled)
        return settled.done, settled.stale

    def failure(self, kind: Kind, body: Any) -> ErrorBody:
        frame = self.answer(kind, body)
        assert frame.kind == Kind.FAILED
        error: ErrorBody = decode_body(frame.body, ErrorBody)
        return error


def record(message: Leased | Kept) -> Record:
    return msgspec.msgpack.decode(message.record, type=Record)


def bodies(messages: list[Leased] | list[Kept]) -> list[Any]:
    return [msgspec.msgpack.decode(record(message).body) for message in messages]


def parked(client: QueueClient, queue: str) -> int:
    count: int = client.call("stats", queue)["parked"]
    return count


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[QueueClient]:
    with QueueClient(broker) as client:
        yield client


@pytest.fixture
def other(broker: BrokerProcess) -> Iterator[QueueClient]:
    with QueueClient(broker) as client:
        yield client


@pytest.fixture
def queue(client: QueueClient) -> str:
    name = f"q-{secrets.token_hex(6)}"
    client.call("define", name, physical_queues=1, durability="os")
    return name


class TestTheConversation:
    def test_what_is_put_is_taken_as_it_was_and_then_deleted(self, client: QueueClient, queue: str) -> None:
        put = client.put(queue, {"NO2": 212}, b"bytes", group="g", device="d", sequence=7, headers={"kind": "alert"})
        assert (put.accepted, put.duplicates, put.durability) == (2, 1, "os")
        (leased,) = client.take(queue)
        got = record(leased)
        assert (leased.delivery, leased.queue, leased.sequence) == (1, 0, 1)
        assert (got.group, got.device, got.sequence, got.headers) == ("g", "d", 7, {"kind": "alert"})
        assert abs(got.enqueued_at - time.time()) < 60
        assert bodies([leased]) == [{"NO2": 212}]
        assert client.settle(queue, "delete", [leased]) == (1, 0)
        assert client.settle(queue, "delete", [leased]) == (0, 1)
        assert client.take(queue, wait_s=0) == []

    def test_extend_release_and_return(self, client: QueueClient, queue: str) -> None:
        client.put(queue, 1)
        first = client.take(queue)
        assert client.settle(queue, "extend", first, visibility_s=60) == (1, 0)
        assert client.settle(queue, "return", first) == (1, 0)
        second = client.take(queue)
        assert second[0].delivery == 1
        assert client.settle(queue, "release", second, delay_s=0.05) == (1, 0)
        assert client.take(queue, wait_s=0) == []
        assert client.take(queue)[0].delivery == 2

    def test_calls(self, client: QueueClient, queue: str) -> None:
        assert client.call("describe", queue)["physical_queues"] == 1
        assert queue in [definition["name"] for definition in client.call("list")]
        assert not any("." in definition["name"] for definition in client.call("list"))
        client.put(queue, *range(10))
        looked = client.call("levels", queue)
        (level,) = looked["levels"]
        assert (level["first"], level["next"], level["messages"]) == (1, 11, 10)
        reading = QueueCall("read", queue, {"physical": 0, "from": 3, "to": 9, "max": 4})
        kept: list[Kept] = client.reply(Kind.QUEUE_CALL, reading, list[Kept])
        assert [(each.sequence, *bodies([each])) for each in kept] == [(3, 2), (4, 3), (5, 4), (6, 5)]
        assert client.call("delete_below", queue, physical=0, sequence=9) == 8
        assert client.call("delete_below", queue, physical=0, sequence=9) == 0
        assert client.call("stats", queue)["messages"] == 2
        assert client.call("drop", queue) is None
        assert client.failure(Kind.DEQUEUE, Dequeue(queue)).code == "Q901"

    def test_dead_letters_are_driven_back(self, client: QueueClient, queue: str) -> None:
        client.call("define", queue, physical_queues=1, max_deliveries=1)
        client.put(queue, "poison")
        client.settle(queue, "release", client.take(queue))
        assert client.take(queue, wait_s=0) == []
        wait_until(lambda: bool(client.call("stats", queue)["dead_letters"] == 1))
        assert client.call("redrive", queue) == 1
        assert bodies(client.take(queue)) == ["poison"]

    def test_named_subscriptions(self, client: QueueClient) -> None:
        name = secrets.token_hex(6)
        made = client.call("subscribe", name, filter="NO2>200")
        assert (made["filter"], made["policy"], made["physical_queues"]) == ("NO2>200", "block", 1)
        [listed] = [each for each in client.call("subscriptions") if each["name"] == name]
        assert listed.items() >= {"filter": "NO2>200", "policy": "block"}.items()
        assert listed["expires_at"] == pytest.approx(listed["last_read_at"] + 7 * 86_400)
        client.call("unsubscribe", name)
        assert name not in [each["name"] for each in client.call("subscriptions")]

    def test_requests_overtake_a_dequeue_that_is_held(self, client: QueueClient, queue: str) -> None:
        held = client.ask(Kind.DEQUEUE, Dequeue(queue))
        put = client.ask(Kind.ENQUEUE, Enqueue(queue, [NewMessage(msgspec.Raw(b"\x01"))]))
        answers = {frame.sequence: frame for frame in (client.wait_for(Kind.REPLY), client.wait_for(Kind.REPLY))}
        assert decode_body(answers[put].body, Enqueued).accepted == 1
        assert bodies(decode_body(answers[held].body, list[Leased])) == [1]

    def test_a_large_read_comes_in_replies_that_a_client_can_take(self, client: QueueClient, queue: str) -> None:
        for _ in range(20):
            client.put(queue, *[bytes(250_000)] * 3)
        start, seen = 1, 0
        while True:
            reading = QueueCall("read", queue, {"physical": 0, "from": start, "to": 1000})
            frame = client.answer(Kind.QUEUE_CALL, reading)
            assert len(frame.body) < 5 * MIB
            kept: list[Kept] = decode_body(frame.body, list[Kept])
            if not kept:
                break
            seen, start = seen + len(kept), kept[-1].sequence + 1
        assert seen == 60

    def test_large_reads_may_be_asked_for_at_once(self, client: QueueClient, queue: str) -> None:
        for _ in range(20):
            client.put(queue, bytes(250_000))
        reading = QueueCall("read", queue, {"physical": 0, "from": 1, "to": 1000})
        asked = [client.ask(Kind.QUEUE_CALL, reading) for _ in range(10)]
        assert [client.wait_for(Kind.REPLY).sequence for _ in asked] == asked


class TestErrorsEndOneRequest:
    @pytest.mark.parametrize(
        ("kind", "body", "code"),
        [
            (Kind.ENQUEUE, Enqueue("nowhere", []), "Q901"),
            (Kind.ENQUEUE, {"queue": "nowhere"}, "P303"),
            (Kind.ENQUEUE, [1, 2, 3], "P303"),
            (Kind.DEQUEUE, Dequeue("nowhere"), "Q901"),
            (Kind.DEQUEUE, {"queue": 7}, "P303"),
            (Kind.SETTLE, Settle("nowhere", "delete", []), "Q901"),
            (Kind.SETTLE, None, "P303"),
            (Kind.QUEUE_CALL, QueueCall("explode", "q"), "P331"),
            (Kind.QUEUE_CALL, QueueCall("stats", "nowhere"), "Q901"),
            (Kind.QUEUE_CALL, QueueCall("define", "dots.are.ours"), "Q902"),
            (Kind.QUEUE_CALL, QueueCall("define", "q", {"method": "magic"}), "Q903"),
            (Kind.QUEUE_CALL, QueueCall("define", "q", {"filter": "NO2>"}), "F102"),
            (Kind.QUEUE_CALL, QueueCall("subscribe", "q"), "P303"),
            (Kind.QUEUE_CALL, QueueCall("read", "q", {"physical": "zero"}), "P303"),
        ],
    )
    def test_with_a_code_and_the_connection_stays(self, client: QueueClient, kind: Kind, body: Any, code: str) -> None:
        error = client.failure(kind, body)
        assert error.code == code
        assert error.remedy
        client.send(encode_frame(Kind.PING))
        client.wait_for(Kind.PONG)

    @pytest.mark.parametrize(
        ("make", "code"),
        [
            (lambda queue: (Kind.DEQUEUE, Dequeue(queue, max=0)), "Q908"),
            (lambda queue: (Kind.DEQUEUE, Dequeue(queue, min=200)), "Q908"),
            (lambda queue: (Kind.DEQUEUE, Dequeue(queue, wait_s=float("nan"))), "Q908"),
            (lambda queue: (Kind.DEQUEUE, Dequeue(queue, visibility_s=-1)), "Q908"),
            (lambda queue: (Kind.SETTLE, Settle(queue, "explode", [])), "Q909"),
            (lambda queue: (Kind.SETTLE, Settle(queue, "delete", ["mine"])), "Q907"),
            (lambda queue: (Kind.SETTLE, Settle(queue, "release", [], delay_s=-1)), "Q908"),
            (lambda queue: (Kind.ENQUEUE, Enqueue(queue, [NewMessage(msgspec.Raw(b"\x01"), sequence=-1)])), "Q905"),
            (lambda queue: (Kind.QUEUE_CALL, QueueCall("define", queue, {"physical_queues": 3})), "Q904"),
            (lambda queue: (Kind.QUEUE_CALL, QueueCall("delete_below", queue, {"physical": 9, "sequence": 1})), "Q908"),
        ],
    )
    def test_about_a_queue_that_is_there(self, client: QueueClient, queue: str, make: Any, code: str) -> None:
        assert client.failure(*make(queue)).code == code
        assert client.put(queue, 1).accepted == 1

    def test_a_queue_that_is_full_says_when_to_come_back(self, client: QueueClient, queue: str) -> None:
        client.call("define", queue, physical_queues=1, messages_max=2)
        client.put(queue, 1, 2)
        error = client.failure(Kind.ENQUEUE, Enqueue(queue, [NewMessage(msgspec.Raw(b"\x03"))]))
        assert error.code.startswith("L6")
        assert error.retry_after_s

    def test_a_number_that_is_in_use(self, client: QueueClient, queue: str) -> None:
        number = client.ask(Kind.DEQUEUE, Dequeue(queue))
        client.send(encode_frame(Kind.DEQUEUE, Dequeue(queue), number))
        assert decode_body(client.wait_for(Kind.FAILED).body, ErrorBody).code == "P330"
        client.send(encode_frame(Kind.CANCEL, sequence=number))
        assert client.wait_for(Kind.REPLY).sequence == number


class TestCancel:
    def test_is_answered_with_nothing_and_leaves_nothing_leased(self, client: QueueClient, queue: str) -> None:
        number = client.ask(Kind.DEQUEUE, Dequeue(queue))
        client.send(encode_frame(Kind.CANCEL, sequence=number))
        frame = client.wait_for(Kind.REPLY)
        assert (frame.sequence, decode_body(frame.body, list)) == (number, [])
        client.put(queue, 1)
        assert parked(client, queue) == 0
        assert bodies(client.take(queue)) == [1]

    def test_in_the_same_segment_as_the_request(self, client: QueueClient, queue: str) -> None:
        client.put(queue, 1)
        client.send(encode_frame(Kind.DEQUEUE, Dequeue(queue), 77), encode_frame(Kind.CANCEL, sequence=77))
        frame = client.wait_for(Kind.REPLY)
        leased: list[Leased] = decode_body(frame.body, list[Leased])
        client.settle(queue, "return", leased)
        assert bodies(client.take(queue)) == [1]

    def test_of_what_is_no_open_dequeue_is_nothing(self, client: QueueClient, queue: str) -> None:
        client.send(encode_frame(Kind.CANCEL, sequence=12_345))
        put = client.ask(Kind.ENQUEUE, Enqueue(queue, [NewMessage(msgspec.Raw(b"\x01"))]))
        client.send(encode_frame(Kind.CANCEL, sequence=put))
        assert client.wait_for(Kind.REPLY).sequence == put
        assert bodies(client.take(queue)) == [1]


class TestAPeerThatGoes:
    def test_while_its_request_is_held_leaves_the_message_to_the_next(
        self, broker: BrokerProcess, client: QueueClient, other: QueueClient, queue: str
    ) -> None:
        with QueueClient(broker) as leaving:
            leaving.ask(Kind.DEQUEUE, Dequeue(queue))
            wait_until(lambda: parked(client, queue) == 1)
        wait_until(lambda: parked(client, queue) == 0)
        other.ask(Kind.DEQUEUE, Dequeue(queue))
        client.put(queue, "for the next")
        leased: list[Leased] = decode_body(other.wait_for(Kind.REPLY).body, list[Leased])
        assert bodies(leased) == ["for the next"]
        assert leased[0].delivery == 1

    def test_with_messages_of_a_queue_may_settle_them_by_another_connection(
        self, broker: BrokerProcess, client: QueueClient, queue: str
    ) -> None:
        client.put(queue, 1)
        with QueueClient(broker) as leaving:
            leased = leaving.take(queue)
        assert client.take(queue, wait_s=0.2) == []
        assert client.settle(queue, "delete", leased) == (1, 0)

    def test_with_messages_of_a_subscription_gives_them_back_in_order(
        self, broker: BrokerProcess, client: QueueClient
    ) -> None:
        name = secrets.token_hex(6)
        client.call("subscribe", name, filter="nothing")
        queue = f"subscription.{name}"
        client.put(queue, *range(10))
        with QueueClient(broker) as leaving:
            leased = leaving.take(queue)
            leaving.settle(queue, "delete", leased[:3])
        assert bodies(client.take(queue)) == [3, 4, 5, 6, 7, 8, 9]

    def test_tidily_with_goodbye(self, broker: BrokerProcess, client: QueueClient, queue: str) -> None:
        with QueueClient(broker) as leaving:
            leaving.ask(Kind.DEQUEUE, Dequeue(queue))
            leaving.send(encode_frame(Kind.GOODBYE))
            assert leaving.wait_closed() is None
        assert parked(client, queue) == 0


def resident_bytes(broker: BrokerProcess) -> int:
    pages = int(Path(f"/proc/{broker.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def misses(client: QueueClient, queue: str) -> int:
    """Returns how often a request has found nothing in the store."""
    return int(client.call("stats", queue)["misses"])


class TestMany:
    def test_ten_thousand_parked_requests_cost_little_memory_and_ask_nothing(
        self, broker: BrokerProcess, client: QueueClient, queue: str
    ) -> None:
        before_bytes = resident_bytes(broker)
        with contextlib.ExitStack() as stack:
            waiting = [stack.enter_context(QueueClient(broker)) for _ in range(4)]
            for each in waiting:
                each.send(*[encode_frame(Kind.DEQUEUE, Dequeue(queue, wait_s=60), n) for n in range(2500)])
            wait_until(lambda: parked(client, queue) == 10_000)
            assert resident_bytes(broker) - before_bytes < 120 * MIB
            before = misses(client, queue)
            time.sleep(1)
            assert misses(client, queue) == before, "requests that wait ask the store again and again"
            client.put(queue, *range(5))
            answered = 0
            while answered < 5:
                for each in waiting:
                    each.socket.settimeout(0.1)
                    with contextlib.suppress(TimeoutError):
                        answered += len(decode_body(each.wait_for(Kind.REPLY).body, list[Leased]))
        wait_until(lambda: parked(client, queue) == 0)

    def test_more_than_a_connection_may_have_are_refused(self, client: QueueClient, queue: str) -> None:
        client.send(*[encode_frame(Kind.DEQUEUE, Dequeue(queue, wait_s=60), n) for n in range(1000, 11_003)])
        for n in range(11_000, 11_003):
            frame = client.wait_for(Kind.FAILED)
            error: ErrorBody = decode_body(frame.body, ErrorBody)
            assert (frame.sequence, error.code) == (n, "L610")
            assert error.retry_after_s


class TestAPeerThatDoesNotRead:
    def test_gets_no_more_leases_than_its_connection_can_carry(
        self, broker: BrokerProcess, client: QueueClient, queue: str
    ) -> None:
        """It requests much more than it reads, and others receive the rest. Once it reads, it receives all it asked
        for."""
        for _ in range(40):
            client.put(queue, *[bytes(250_000)] * 4)
        before_bytes = resident_bytes(broker)
        with QueueClient(broker, receive_bytes=16_384) as deaf:
            for n in range(100, 260):
                deaf.send(encode_frame(Kind.DEQUEUE, Dequeue(queue, max=1, wait_s=60), n))
            wait_until(lambda: bool(client.call("stats", queue)["leased"] > 0))
            time.sleep(0.5)
            assert client.call("stats", queue)["leased"] < 80
            assert resident_bytes(broker) - before_bytes < 40 * MIB
            taken = [deaf.wait_for(Kind.REPLY).sequence for _ in range(160)]
            assert sorted(taken) == list(range(100, 260))
        assert client.call("stats", queue)["given_back"] < 1000

    def test_gives_back_what_requests_bring_that_were_parked_before(
        self, broker: BrokerProcess, client: QueueClient, queue: str
    ) -> None:
        with QueueClient(broker, receive_bytes=16_384) as deaf:
            for n in range(100, 300):
                deaf.send(encode_frame(Kind.DEQUEUE, Dequeue(queue, max=1, wait_s=60), n))
            wait_until(lambda: parked(client, queue) == 200)
            for _ in range(50):
                client.put(queue, *[bytes(250_000)] * 4)
            assert client.call("stats", queue)["leased"] < 100
            assert bodies(client.take(queue, max=1)) == [bytes(250_000)]
            assert deaf.wait_for(Kind.REPLY)
        wait_until(lambda: parked(client, queue) == 0)

    def test_is_not_read_while_its_messages_wait_for_the_disk(self, broker: BrokerProcess, queue: str) -> None:
        """Everything that it sends without waiting is accepted in the end."""
        with QueueClient(broker) as hasty:
            frame = Enqueue(queue, [NewMessage(msgspec.Raw(msgspec.msgpack.encode(bytes(200_000))))] * 5)
            for n in range(100, 140):
                hasty.send(encode_frame(Kind.ENQUEUE, frame, n))
            assert sorted(hasty.wait_for(Kind.REPLY).sequence for _ in range(40)) == list(range(100, 140))


QUEUE_KINDS = (Kind.ENQUEUE, Kind.DEQUEUE, Kind.SETTLE, Kind.QUEUE_CALL, Kind.CANCEL)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
near_misses = st.fixed_dictionaries(
    {"queue": st.sampled_from(["fuzz", "subscription.fuzz", "fuzz.dead", ""]) | values},
    optional={
        "messages": st.lists(st.lists(values, max_size=6) | values, max_size=3),
        "action": st.sampled_from(["delete", "extend", "release", "return", "define", "read", "stats"]) | values,
        "receipts": st.lists(st.sampled_from(["0.1.1.x", "9.9.9.9", "..."]) | st.text(max_size=9), max_size=3),
        "max": st.integers() | values,
        "min": values,
        "wait_s": st.just(0) | values,
        "visibility_s": values,
        "delay_s": values,
        "name": st.just("fuzz") | values,
        "arguments": st.dictionaries(st.sampled_from(["physical", "from", "to", "max", "filter", "sleep"]), values),
    },
)


def packed(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return b"\xc1"


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(st.sampled_from(QUEUE_KINDS), (values | near_misses).map(packed) | st.binary(max_size=60)), max_size=8
    )
)
def test_noise_in_requests_is_answered_request_by_request(
    broker: BrokerProcess, noise: list[tuple[Kind, bytes]]
) -> None:
    """Every request gets an answer, whatever its body. None closes the connection, and none is an internal error."""
    with RawClient(broker.native_port) as client:
        client.hello()
        client.send(*[HEADER.pack(len(body), kind, 0, 0, n) + body for n, (kind, body) in enumerate(noise)])
        expected = {n for n, (kind, _body) in enumerate(noise) if kind != Kind.CANCEL}
        client.send(*[encode_frame(Kind.CANCEL, sequence=n) for n in expected])
        while expected:
            frame = client.receive()
            assert frame is not None
            expected.remove(frame.sequence)
            if frame.kind == Kind.FAILED:
                assert decode_body(frame.body, ErrorBody).code != "U709", frame.body
            else:
                assert frame.kind == Kind.REPLY


def test_requests_before_hello_and_frames_that_end_early(broker: BrokerProcess) -> None:
    with RawClient(broker.native_port) as client:
        client.send(encode_frame(Kind.DEQUEUE, Dequeue("q")))
        error = client.wait_closed()
        assert error is not None
        assert error.code == "P301"
    with RawClient(broker.native_port) as client:
        client.send(encode_frame(Kind.HELLO, Hello()), header_only(1000, Kind.ENQUEUE, 1))
    assert_healthy(broker)
