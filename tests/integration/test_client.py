"""The client, as a program uses it: its promises in edge cases, and errors that name their remedy."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from broker_checks import WAIT_S, run, take, take_until, wait_load
from broker_process import BrokerProcess, clean_environment
from raw_client import RawClient

from tidegate import (
    ConfigError,
    Connection,
    FilterError,
    NotAllowed,
    NotificationError,
    NumberedPublisher,
    Overloaded,
    ProtocolError,
    TidegateError,
    Unavailable,
    connect,
    connect_sync,
)
from tidegate.filters import Filter

TOKEN = "a token of some length"
NOWHERE = "tidegate://127.0.0.1:1"


class TestErrorsNameTheirCure:
    def test_no_broker_at_the_address(self) -> None:
        async def scenario() -> None:
            async with connect(NOWHERE, connect_timeout_s=0.3) as connection:
                await connection.publish({"a": 1})

        with pytest.raises(Unavailable, match=r"U701.*127\.0\.0\.1:1 .*start one with: tidegate serve"):
            run(scenario())

    def test_no_broker_for_several_at_once(self) -> None:
        async def scenario() -> list[Any]:
            async with connect(NOWHERE, connect_timeout_s=0.2) as connection:
                calls: list[Coroutine[Any, Any, Any]] = [connection.status(), connection.publish({"a": 1})]
                calls += [connection.subscribe("a").__aenter__() for _ in range(3)]
                return await asyncio.gather(*calls, return_exceptions=True)

        assert [type(outcome) for outcome in run(scenario())] == [Unavailable] * 5

    def test_a_broker_that_accepts_and_says_nothing(self) -> None:
        async def scenario(port: int) -> None:
            async with connect(f"tidegate://127.0.0.1:{port}", connect_timeout_s=0.2) as connection:
                await connection.publish({"a": 1})

        with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(Unavailable, match="U701"):
            run(scenario(mute.getsockname()[1]))

    @pytest.mark.parametrize(
        "address", ["", "127.0.0.1:7270", "http://127.0.0.1:7270", "tidegate://", "tidegate://h:port", "tidegate://h/x"]
    )
    @pytest.mark.parametrize("connecting", [connect, connect_sync])
    def test_a_bad_address(self, connecting: Callable[[str], Any], address: str) -> None:
        with pytest.raises(ConfigError, match=r"C411.*write it as tidegate://"):
            connecting(address)

    def test_a_bad_filter_needs_no_broker(self) -> None:
        async def scenario() -> None:
            async with connect(NOWHERE) as connection:
                connection.subscribe("NO2 > 200 and station == 4")

        with pytest.raises(FilterError) as caught:
            run(scenario())
        assert caught.value.column == 11
        assert "put ; between" in caught.value.remedy

    def test_a_policy_that_does_not_exist(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection, connection.subscribe("a", policy="sometimes"):
                pass

        with pytest.raises(TidegateError, match=r"P311.*drop-oldest"):
            run(scenario())

    @pytest.mark.parametrize(
        ("notification", "code"),
        [
            ({"a": object()}, "N205"),
            ({"a": {1, 2}}, "N205"),
            ({"a": 2**70}, "N207"),
            ({"a": "\ud800"}, "N212"),
            ({"a": 1, "$payload": bytes(2_000_000)}, "N211"),
            ({}, "N201"),
            (["no", "notification"], "N215"),
            ("a=1", "N215"),
            ([{"a": 1}, None], "N215"),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_what_is_no_notification_does_not_disturb_the_connection(
        self, broker: BrokerProcess, notification: Any, code: str
    ) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection, connection.subscribe("after") as subscription:
                with pytest.raises(NotificationError, match=code):
                    await connection.publish(notification)
                await connection.publish({"after": 1})
                await take(subscription, 1)

        run(scenario())


USES: list[Callable[[Connection], Coroutine[Any, Any, Any]]] = [
    lambda connection: connection.publish({"a": 1}),
    lambda connection: connection.publish_soon({"a": 1}),
    lambda connection: connection.flush(),
    lambda connection: connection.status(),
    lambda connection: subscribe(connection),
]


async def subscribe(connection: Connection) -> None:
    async with connection.subscribe("a"):
        pass


class TestOutsideItsBlock:
    @pytest.mark.parametrize("use", USES)
    def test_a_connection_is_not_open(self, broker: BrokerProcess, use: Callable[[Connection], Any]) -> None:
        async def before() -> None:
            await use(connect(broker.native))

        async def after() -> None:
            async with connect(broker.native) as connection:
                await connection.publish({"a": 1})
                await subscribe(connection)
            await use(connection)

        for scenario in (before, after):
            with pytest.raises(Unavailable, match=r"U706.*async with connect"):
                run(scenario())

    def test_a_synchronous_connection_is_not_open(self, broker: BrokerProcess) -> None:
        with connect_sync(broker.native) as connection:
            subscription = connection.subscribe("a")
        for use in (lambda: connection.publish({"a": 1}), connection.status, lambda: connection.subscribe("a")):
            with pytest.raises(Unavailable, match="U706"):
                use()
        subscription.close()
        with pytest.raises(Unavailable, match="U706"):
            connect_sync(broker.native).flush()

    def test_a_call_that_still_waits_is_told(self, broker: BrokerProcess) -> None:
        """A call does not wait forever after another task has left the block."""

        async def scenario() -> None:
            wall = {"wall": 1, "$payload": bytes(200_000)}
            with RawClient(broker.native_port, receive_bytes=65_536) as slow:
                slow.hello()
                slow.subscribe(1, "wall", "block")
                with contextlib.suppress(ZeroDivisionError):
                    async with connect(broker.native) as connection:
                        publishing = asyncio.create_task(connection.publish([wall] * 1000))
                        await wait_load(connection, lambda load: bool(load["blocked_outboxes"]))
                        raise ZeroDivisionError
                with pytest.raises(Unavailable, match="U706"):
                    await publishing

        run(scenario())


class TestTheBlock:
    def test_waits_at_its_end_for_the_acknowledgements(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as reader, reader.subscribe("n") as subscription:
                async with connect(broker.native) as connection:
                    for n in range(1000):
                        await connection.publish_soon({"n": n})
                statistics = connection.statistics()
                assert statistics is not None
                assert statistics.acknowledged == 1000
                assert [d.notification["n"] for d in await take(subscription, 1000)] == list(range(1000))

        run(scenario())

    def test_lets_an_error_out_as_itself(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection, connection.subscribe("a"):
                await connection.publish({"a": 1})
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run(scenario())

    def test_lets_a_cancellation_out(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection:
                async for _ in connection.subscribe("never"):
                    pass

        with pytest.raises(TimeoutError):
            run(scenario(), timeout_s=0.2)

    def test_of_a_synchronous_connection_lets_an_error_out_as_itself(self, broker: BrokerProcess) -> None:
        def scenario() -> None:
            with connect_sync(broker.native) as connection:
                connection.publish_soon({"a": 1})
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            scenario()


class TestSubscriptions:
    def test_end_when_they_are_closed(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection:
                subscription = connection.subscribe("n")
                async with subscription:
                    await connection.publish([{"n": 1}, {"n": 2}])
                    await anext(subscription)
                    while subscription.statistics().waiting == 0:
                        await asyncio.sleep(0.01)
                assert [d.notification async for d in subscription] == [{"n": 2}]

        run(scenario())

    def test_may_be_closed_by_another_task(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection, connection.subscribe("never") as subscription:
                asyncio.get_running_loop().call_later(0.05, subscription.close)
                assert [d async for d in subscription] == []

        run(scenario())

    def test_end_when_their_loop_is_left(self, broker: BrokerProcess) -> None:
        async def take_one(connection: Connection) -> None:
            async for delivery in connection.subscribe("n"):
                assert delivery.notification == {"n": 1}
                return

        async def scenario() -> None:
            async with connect(broker.native) as connection:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(take_one(connection))
                    await wait_load(connection, lambda counts: bool(counts["subscriptions"] == 1))
                    await connection.publish({"n": 1})
                await wait_load(connection, lambda counts: bool(counts["subscriptions"] == 0))

        run(scenario())

    def test_take_a_parsed_filter_too(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection, connection.subscribe(Filter.parse("n>1")) as subscription:
                await connection.publish([{"n": 1}, {"n": 2}])
                assert (await anext(subscription)).notification == {"n": 2}

        run(scenario())

    def test_carry_a_payload(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native) as connection, connection.subscribe("n") as subscription:
                await connection.publish([{"n": 1, "$payload": b"\x00\xff"}, {"n": 2}])
                assert [d.payload for d in await take(subscription, 2)] == [b"\x00\xff", None]

        run(scenario())


@pytest.mark.parametrize(
    "notification",
    [types.MappingProxyType({"a": 1.5}), {"a": np.float64(1.5)}],
    ids=["any mapping", "floats of numpy"],
)
@pytest.mark.parametrize("as_list", [False, True])
def test_notifications_may_be(broker: BrokerProcess, notification: Any, as_list: bool) -> None:
    async def scenario() -> None:
        async with connect(broker.native) as connection, connection.subscribe("a") as subscription:
            await connection.publish([notification] if as_list else notification)
            assert (await anext(subscription)).notification == {"a": 1.5}

    run(scenario())


@pytest.fixture(scope="module")
def guarded() -> Iterator[BrokerProcess]:
    with BrokerProcess(environment={"TIDEGATE_TOKEN": TOKEN}) as process:
        yield process


class TestTokens:
    @pytest.mark.parametrize(("token", "code"), [("", "A501"), ("a wrong token of some length", "A502")])
    def test_without_the_right_one_nothing_is_allowed(self, guarded: BrokerProcess, token: str, code: str) -> None:
        async def scenario(is_publisher: bool) -> None:
            async with connect(guarded.native, token=token) as connection:
                if is_publisher:
                    await connection.publish({"a": 1})
                else:
                    await connection.subscribe("a").__aenter__()

        for is_publisher in (True, False):
            with pytest.raises(NotAllowed, match=code):
                run(scenario(is_publisher))

    def test_with_it_all_is_as_ever(self, guarded: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        with connect_sync(guarded.native, token=TOKEN) as connection:
            connection.publish({"a": 1})
        monkeypatch.setenv("TIDEGATE_TOKEN", TOKEN)
        with connect_sync(guarded.native) as connection:
            connection.publish({"a": 1})


class TestTheSynchronousFace:
    def test_serves_two_threads(self, broker: BrokerProcess) -> None:
        got: list[int] = []
        with connect_sync(broker.native) as connection, connection.subscribe("n") as subscription:

            def read() -> None:
                for delivery in subscription:
                    got.append(delivery.notification["n"])
                    if len(got) == 400:
                        return

            def write(numbers: range) -> None:
                for n in numbers:
                    connection.publish({"n": n})

            threads = [threading.Thread(target=read, daemon=True)]
            threads += [threading.Thread(target=write, args=(range(at, 400, 2),), daemon=True) for at in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
        assert sorted(got) == list(range(400))
        assert [n for n in got if n % 2] == list(range(1, 400, 2))

    def test_says_when_nothing_comes_in_time(self, broker: BrokerProcess) -> None:
        with connect_sync(broker.native) as connection, connection.subscribe("never") as subscription:
            with pytest.raises(TimeoutError):
                subscription.take(0.05)
            connection.publish({"never": 1})
            assert len(subscription.take(WAIT_S)) == 1

    def test_ends_an_iteration_when_another_thread_closes_it(self, broker: BrokerProcess) -> None:
        with connect_sync(broker.native) as connection, connection.subscribe("never") as subscription:
            timer = threading.Timer(0.05, subscription.close)
            timer.start()
            assert list(subscription) == []
            timer.join()

    def test_raises_what_the_asynchronous_one_raises(self, broker: BrokerProcess) -> None:
        with connect_sync(broker.native) as connection:
            with pytest.raises(NotificationError, match="N208"):
                connection.publish({"a": float("nan")})
            with pytest.raises(FilterError):
                connection.subscribe("a >")


def encoded(*numbers: int) -> list[bytes]:
    return [msgspec.msgpack.encode({"n": number}) for number in numbers]


class TestANumberedPublisher:
    def test_publishes_a_number_once_whoever_repeats_it(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            name = f"job-{secrets.token_hex(6)}"
            async with connect(broker.native) as connection, connection.subscribe("n") as subscription:
                async with connection.numbered_publisher(name) as publisher:
                    assert await publisher.publish(1, encoded(*range(300))) == 300
                    assert await publisher.publish(1 << 20, encoded(*range(300, 1300))) == 1000
                async with connect(broker.native) as other, other.numbered_publisher(name) as publisher:
                    assert await publisher.publish(1, encoded(*range(300))) == 0
                    assert await publisher.publish((1 << 20) + 900, encoded(*range(1200, 1500))) == 200
                    assert await publisher.publish(1 << 40, []) == 0
                    assert await publisher.publish(1 << 60, encoded(1500)) == 1
                deliveries = await take(subscription, 1501)
                assert [delivery.notification["n"] for delivery in deliveries] == list(range(1501))
                assert {delivery.publisher for delivery in deliveries} == {name}
                assert deliveries[-1].sequence == 1 << 60

        run(scenario())

    def test_counts_upwards(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            name = f"job-{secrets.token_hex(6)}"
            async with connect(broker.native) as connection, connection.numbered_publisher(name) as publisher:
                await publisher.publish(1, encoded(1, 2))
                with pytest.raises(ProtocolError, match=r"P332.*up to 2.*publish 2"):
                    await publisher.publish(2, encoded(3))
                with pytest.raises(NotificationError, match="N208"):
                    await publisher.publish(3, [msgspec.msgpack.encode({"n": float("nan")})])
                with pytest.raises(NotificationError, match="N211"):
                    await publisher.publish(4, [bytes(2_000_000)])
                assert await publisher.publish(5, encoded(3)) == 1

        run(scenario())

    def test_is_ended_by_another_of_its_name_and_by_its_connection(self, broker: BrokerProcess) -> None:
        async def publish_for_ever(publisher: NumberedPublisher) -> None:
            for number in itertools.count(2):
                await publisher.publish(number, encoded(number))

        async def scenario() -> None:
            name = f"job-{secrets.token_hex(6)}"
            async with connect(broker.native) as connection:
                first = await connection.numbered_publisher(name).__aenter__()
                await first.publish(1, encoded(1))
                async with connection.numbered_publisher(name) as second:
                    with pytest.raises(NotAllowed, match="A504"):
                        await publish_for_ever(first)
                    assert await second.publish(1 << 40, encoded(2)) == 1
                last = await connection.numbered_publisher(name).__aenter__()
            with pytest.raises(Unavailable, match="U706"):
                await last.publish(1 << 41, encoded(3))

        run(scenario())

    def test_without_a_broker_leaves_nothing_behind(self) -> None:
        async def scenario() -> None:
            async with connect(NOWHERE, connect_timeout_s=0.1) as connection:
                with pytest.raises(Unavailable, match="U701"):
                    await connection.numbered_publisher("job").__aenter__()

        run(scenario())


class TestAfterAFinalError:
    def test_a_publisher_stays_failed_and_subscribing_goes_on(
        self, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = "the-key-of-the-twin-too"
        monkeypatch.setattr("tidegate.client.connection.make_key", lambda: key)

        async def publish_for_ever(connection: Connection) -> None:
            while True:
                await connection.publish({"n": 2})

        async def scenario() -> None:
            async with connect(broker.native) as connection, connection.subscribe("n") as subscription:
                await connection.publish({"n": 1})
                name = (await anext(subscription)).publisher.partition("~")[0]
                with RawClient(broker.native_port) as twin:
                    await asyncio.to_thread(twin.hello, name, key=key)
                    for _ in range(2):
                        with pytest.raises(NotAllowed, match="A504"):
                            await publish_for_ever(connection)
                async with connect(broker.native) as other:
                    await other.publish({"n": 4})
                await take_until(subscription, lambda delivery: delivery.notification["n"] == 4)

        with contextlib.suppress(NotAllowed):  # at the end of the block, if a call was pending
            run(scenario())

    def test_a_publisher_with_an_impossible_name_learns_why(self, broker: BrokerProcess) -> None:
        async def scenario() -> None:
            async with connect(broker.native, name="x" * 200) as connection:
                await connection.publish({"n": 1})

        with pytest.raises(TidegateError, match="P310"):
            run(scenario())


def run_python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        env=clean_environment(),
        check=False,
    )


def test_the_client_imports_nothing_of_the_server() -> None:
    heavy = ["numpy", "numba", "starlette", "uvicorn", "prometheus_client"]
    done = run_python(f"import sys, tidegate; print([name for name in {heavy} if name in sys.modules])")
    assert done.stdout.strip() == "[]"


SCRIPTS = {
    "asynchronous": """
import asyncio
from tidegate import connect
async def main():
    async with connect({address!r}) as broker, broker.subscribe("n") as subscription:
        await broker.publish([{{"n": 1}}, {{"n": 2}}])
        async for delivery in subscription:
            if delivery.notification["n"] == 2: break
        print((await broker.status())["epoch"])
asyncio.run(main())
""",
    "synchronous": """
from tidegate import connect_sync
with connect_sync({address!r}) as broker, broker.subscribe("n") as subscription:
    broker.publish({{"n": 1}})
    print(len(subscription.take(5)))
""",
    "never entered": """
from tidegate import connect, connect_sync
connect({address!r}), connect_sync({address!r})
print(1)
""",
    "interrupted": """
import asyncio
from tidegate import connect
async def main():
    async with connect({address!r}) as broker:
        await broker.publish({{"n": 1}})
        async for delivery in broker.subscribe("n"):
            pass
try:
    asyncio.run(asyncio.wait_for(main(), 0.3))
except TimeoutError:
    print(1)
""",
    "nobody there": """
import asyncio
from tidegate import connect, Unavailable
async def main():
    async with connect("tidegate://127.0.0.1:1", connect_timeout_s=0.1) as broker:
        await broker.publish({{"n": 1}})
try:
    asyncio.run(main())
except Unavailable:
    print(1)
""",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_program_ends_without_warnings(broker: BrokerProcess, script: str) -> None:
    done = run_python(script.format(address=broker.native), "-X", "dev", "-W", "error")
    # In this mode asyncio also reports callbacks that a busy machine has delayed.
    warnings = [line for line in done.stderr.splitlines() if not line.startswith("Executing <")]
    assert (done.stdout.strip(), warnings, done.returncode) == ("1", [], 0)


def test_errors_are_of_one_tree() -> None:
    for shape in (ConfigError, FilterError, NotAllowed, NotificationError, Overloaded, ProtocolError, Unavailable):
        assert issubclass(shape, TidegateError)
