"""Whatever arrives on the native port, the broker reports the error, closes the connection and serves the others."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator

import pytest
from broker_checks import assert_healthy, broker_load, run, wait_until
from broker_process import BrokerProcess
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_client import RawClient, header_only, publish

from tidegate import connect
from tidegate.frames import (
    HEADER,
    ErrorBody,
    Hello,
    Kind,
    Subscribe,
    Unsubscribe,
    decode_body,
    encode_frame,
    publish_frame,
)

HELLO = encode_frame(Kind.HELLO, Hello(publisher="bad-input"))
GOOD = {"good": 1}
MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def others_are_served(broker: BrokerProcess) -> Iterator[None]:
    """Checks that an existing subscriber still receives what an existing publisher sends after the block."""
    with RawClient(broker.native_port) as subscriber, RawClient(broker.native_port) as publisher:
        subscriber.hello()
        subscriber.subscribe(1, "bystander")
        publisher.hello(secrets.token_hex(8))
        yield
        publisher.send(publish(1, {"bystander": 1}))
        publisher.wait_acknowledged(1)
        assert [d.notification for _, d in subscriber.take(1)] == [{"bystander": 1}]
    assert_healthy(broker)


def closing_code(broker: BrokerProcess, *data: bytes) -> str | None:
    """Sends bytes, and returns the code with which the broker closes the connection."""
    with RawClient(broker.native_port) as client:
        client.send(*data)
        error = client.wait_closed()
        return error.code if error is not None else None


BAD_INPUT = {
    "an HTTP request": (b"GET /v1/notifications HTTP/1.1\r\nHost: x\r\n\r\n", "P312"),
    "an HTTP POST": (b"POST / HTTP/1.1\r\nHost: x\r\n\r\n{}", "P312"),
    "TLS": (bytes.fromhex("16030100c8010000c40303") + bytes(200), "P301"),
    "zeros": (bytes(100), "P301"),
    "ones": (b"\xff" * 100, "P301"),
    "PUBLISH before HELLO": (publish(1, GOOD), "P301"),
    "SUBSCRIBE before HELLO": (encode_frame(Kind.SUBSCRIBE, Subscribe(1, "*")), "P301"),
    "another version": (encode_frame(Kind.HELLO, Hello(version=2)), "P309"),
    "a HELLO that is no map": (encode_frame(Kind.HELLO, [1, 2]), "P303"),
    "a HELLO of the wrong types": (encode_frame(Kind.HELLO, {"version": "one"}), "P303"),
    "a HELLO that is no MessagePack": (header_only(3, Kind.HELLO) + b"\xc1\xc1\xc1", "P303"),
    "a HELLO without a body": (header_only(0, Kind.HELLO), "P303"),
    "a HELLO as deep as it is long": (header_only(4096, Kind.HELLO) + b"\x91" * 4096, "P303"),
    "a HELLO that is too long": (header_only(4097, Kind.HELLO), "P302"),
    "a publisher with a long name": (encode_frame(Kind.HELLO, Hello(publisher="x" * 129)), "P310"),
    "a second HELLO": (HELLO + HELLO, "P310"),
    "a publish without a name": (encode_frame(Kind.HELLO, Hello()) + publish(1, GOOD), "P310"),
    "a frame that is too long": (HELLO + header_only(MIB + 1, Kind.PUBLISH, 1), "P302"),
    "a frame of 4 GiB": (HELLO + header_only(2**32 - 1, Kind.SUBSCRIBE), "P302"),
    "a kind of the broker": (HELLO + encode_frame(Kind.DELIVER, []), "P301"),
    "an unknown kind": (HELLO + header_only(0, 200), "P301"),
    "sequence zero": (HELLO + publish(0, GOOD), "P308"),
    "a sequence beyond all": (HELLO + publish(2**64 - 1, GOOD), "P308"),
    "a publish of a map": (HELLO + encode_frame(Kind.PUBLISH, GOOD, 1), "P304"),
    "a publish of numbers": (HELLO + publish(1, 1, 2), "P304"),
    "a publish of nothing": (HELLO + header_only(0, Kind.PUBLISH, 1), "P304"),
    "a publish of no MessagePack": (HELLO + publish_frame(1, b"\xc1"), "P304"),
    "a publish that ends early": (HELLO + publish_frame(1, b"\x93\x81\xa1a\x01"), "P304"),
    "a publish that ends late": (HELLO + publish_frame(1, b"\x91\x81\xa1a\x01\x01"), "P304"),
    "a publish that claims to be vast": (HELLO + publish_frame(1, b"\xdd\xff\xff\xff\xff"), "P304"),
    "a map that claims to be vast": (HELLO + publish_frame(1, b"\x91\xdf\xff\xff\xff\xff"), "P304"),
    "a value as deep as it is long": (HELLO + publish_frame(1, b"\x91\x81\xa1a" + b"\x91" * 100_000), "P304"),
    "a subscribe that is no map": (HELLO + encode_frame(Kind.SUBSCRIBE, 7), "P303"),
    "an unsubscribe of nothing": (HELLO + encode_frame(Kind.UNSUBSCRIBE, Unsubscribe(7)), "P307"),
}


@pytest.mark.parametrize(("data", "code"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_it_is_closed_with_a_code(broker: BrokerProcess, data: bytes, code: str) -> None:
    assert closing_code(broker, data) == code


@pytest.mark.parametrize(
    "bad",
    [b"\xc1", b"\x93\x81", b"\x91\x01", b"\x91\x81\xa1a\xc1"],
    ids=["no MessagePack", "cut short", "a number", "no value"],
)
def test_what_was_good_before_it_in_the_segment_is_delivered_first(broker: BrokerProcess, bad: bytes) -> None:
    with RawClient(broker.native_port) as subscriber, RawClient(broker.native_port) as publisher:
        subscriber.hello()
        subscriber.subscribe(1, "good")
        frames = [publish(1, GOOD, GOOD), publish(3, GOOD), publish_frame(4, bad), publish(5, {"good": "late"})]
        publisher.send(encode_frame(Kind.HELLO, Hello(publisher=f"half-{bad.hex()}")), *frames)
        assert [d.sequence for _, d in subscriber.take(3)] == [1, 2, 3]
        assert publisher.skip_to(Kind.ACKNOWLEDGE).sequence == 3
        error = publisher.wait_closed()
        assert error is not None
        assert error.code == "P304"


@pytest.mark.parametrize(
    ("subscribe", "code"),
    [
        (Subscribe(1, "NO2>"), "F102"),
        (Subscribe(1, "NO2>3", "sometimes"), "P311"),
        (Subscribe(-1, "NO2>3"), "P306"),
        (Subscribe(2**32, "NO2>3"), "P306"),
        (Subscribe(5, "NO2>3"), "P306"),
    ],
    ids=["filter", "policy", "negative id", "large id", "id in use"],
)
def test_a_bad_subscription_ends_itself_and_not_the_connection(
    broker: BrokerProcess, subscribe: Subscribe, code: str
) -> None:
    with RawClient(broker.native_port) as client:
        client.hello(secrets.token_hex(8))
        client.subscribe(5, "careless")
        client.send(encode_frame(Kind.SUBSCRIBE, subscribe))
        error: ErrorBody = decode_body(client.wait_for(Kind.ERROR).body, ErrorBody)
        assert (error.subscription, error.code) == (subscribe.id, code)
        client.send(publish(1, {"careless": 1}))
        assert [d.subscriptions for _, d in client.take(1)] == [5]


def test_the_error_reaches_one_who_has_sent_much_more(broker: BrokerProcess) -> None:
    """Unread bytes must not turn the broker's answer into a reset."""
    for _ in range(5):
        data = header_only(3 * MIB, Kind.PUBLISH, 1) + bytes(3 * MIB)
        assert closing_code(broker, HELLO + data) == "P302"


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 30])
def test_a_frame_that_ends_with_the_connection_is_nothing(broker: BrokerProcess, cut: int) -> None:
    before = broker_load(broker)["accepted"]
    with RawClient(broker.native_port) as client:
        client.hello(f"cut-{cut}")
        client.send(publish(1, {"cut": "a long text, so that all cuts are inside"})[:cut])
    assert broker_load(broker)["accepted"] == before


def test_bytes_may_come_one_at_a_time(broker: BrokerProcess) -> None:
    with RawClient(broker.native_port) as client:
        data = encode_frame(Kind.HELLO, Hello(publisher="trickle")) + encode_frame(Kind.SUBSCRIBE, Subscribe(1, "*"))
        for byte in data + publish(1, {"slow": 1}, {"slow": 2}) + publish(3, {"slow": 3}):
            client.send(bytes((byte,)))
        client.wait_for(Kind.WELCOME)
        assert [d.sequence for _, d in client.take(3)] == [1, 2, 3]


def test_a_large_frame_may_come_in_small_pieces(broker: BrokerProcess) -> None:
    notifications = [{"n": n, "$payload": bytes(1000)} for n in range(900)]
    with RawClient(broker.native_port) as client:
        client.hello("pieces")
        client.subscribe(1, "n>=899")
        data = publish(1, *notifications) + publish(901, {"n": 901})
        for start in range(0, len(data), 997):
            client.send(data[start : start + 997])
        assert [d.sequence for _, d in client.take(2)] == [900, 901]


def test_flags_that_are_not_known_yet_do_not_matter(broker: BrokerProcess) -> None:
    with RawClient(broker.native_port) as client:
        client.hello("flags")
        client.send(HEADER.pack(0, Kind.PING, 255, 65_535, 2**64 - 1))
        client.wait_for(Kind.PONG)


def test_an_empty_publish_is_no_mistake(broker: BrokerProcess) -> None:
    with RawClient(broker.native_port) as client:
        client.hello("empty")
        client.send(publish(1), publish(1, GOOD))
        client.wait_acknowledged(1)


def test_whoever_asks_and_does_not_read_is_cut_off(broker: BrokerProcess) -> None:
    """Answers to a peer wait in a bounded buffer. Here every few bytes cause a refusal."""
    with RawClient(broker.native_port) as client:
        client.hello("deaf")
        frame = publish(1, *[{}] * 4000)
        for _ in range(20_000):  # much more than the buffers of the sockets
            try:
                client.send(frame)
            except (ConnectionResetError, BrokenPipeError):
                return
        pytest.fail("eighty million answers are waiting")


frames_of_noise = st.builds(
    lambda kind, body, sequence: HEADER.pack(len(body), kind, 0, 0, sequence) + body,
    st.sampled_from([*Kind]) | st.integers(0, 255),
    st.binary(max_size=60) | st.sampled_from([b"", b"\x80", b"\x90", b"\x91\x80", b"\x91\x81\xa1a\x01"]),
    st.integers(0, 5) | st.integers(0, 2**64 - 1),
)


@settings(max_examples=60)
@given(st.booleans(), st.lists(st.binary(max_size=100) | frames_of_noise, max_size=12))
def test_noise_does_no_harm(broker: BrokerProcess, greets: bool, noise: list[bytes]) -> None:
    """The broker closes the connection or waits for more. It never fails, and keeps no session of a peer that left."""
    with RawClient(broker.native_port) as client, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        client.send(HELLO if greets else b"", *noise)
        client.socket.shutdown(socket.SHUT_WR)
        while client.socket.recv(65_536):
            pass


def test_no_session_is_left_of_those_who_have_gone(broker: BrokerProcess) -> None:
    """Only the two bystanders' sessions and the one that asks remain."""
    wait_until(lambda: bool(broker_load(broker)["sessions"] == 3))


@pytest.fixture(scope="module")
def impatient() -> Iterator[BrokerProcess]:
    flags = ("--hello-timeout-s", "1", "--idle-timeout-s", "1", "--rate-notifications-s", "400")
    with BrokerProcess(*flags) as process:
        yield process


class TestSilence:
    def test_before_hello_is_closed(self, impatient: BrokerProcess) -> None:
        assert closing_code(impatient) == "U705"

    def test_before_hello_is_closed_though_bytes_trickle_in(self, impatient: BrokerProcess) -> None:
        with RawClient(impatient.native_port) as client:
            client.socket.settimeout(0.2)
            for byte in header_only(1000, Kind.HELLO) + bytes(1000):
                with contextlib.suppress(TimeoutError):
                    frame = client.receive()
                    break
                client.send(bytes((byte,)))
            assert frame is not None
            assert frame.kind == Kind.ERROR

    def test_after_hello_is_closed_later(self, impatient: BrokerProcess) -> None:
        with RawClient(impatient.native_port) as client:
            client.hello("idle")
            error = client.wait_closed()
            assert error is not None
            assert (error.code, error.remedy) == ("U705", "send PING frames while idle")

    def test_is_not_held_against_a_publisher_that_the_broker_does_not_read(self, impatient: BrokerProcess) -> None:
        """At 400 per second its backlog takes longer than the idle timeout. It is slowed down, not closed."""

        async def scenario() -> None:
            async with connect(impatient.native) as connection:
                await connection.publish([{"n": n} for n in range(1000)])
                await connection.publish({"n": 1000})
                statistics = connection.statistics()
                assert statistics is not None
                assert (statistics.acknowledged, statistics.reconnections) == (1001, 0)

        run(scenario())
