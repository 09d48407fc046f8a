"""The whole path: one publisher process, one broker, one subscriber process, compared with MQTT and NATS brokers.

Measured: notifications per second, from the first publish to the last one that the subscriber decoded, and the CPU time
per notification of each process. Every broker also holds subscriptions of others that these notifications do not
satisfy: content filters in Tidegate, topics in the peers. Every notification matches one subscription.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from benchmarks import over_mosquitto, over_nats, over_tidegate
from benchmarks.batching_client import BatchingClient, publish_in_batches, take_all
from benchmarks.batching_mqtt import BatchingMqtt
from benchmarks.batching_nats import BatchingNats
from benchmarks.job import Contender, Effort, Measured, fitting_counts, middle, run_rounds
from benchmarks.tables import ratio, write_table
from benchmarks.workload import alerts, station_name

BATCHES: Final = (256, 64, 16, 1)
OTHERS: Final = 999
LISTS: Final = "Tidegate, lists of 256"
CALLS: Final = "Tidegate, publish_soon, a call each"

_HEAD: Final = (
    "contender", "notifications/s", "publisher us", "broker us", "subscriber us", "received",
    "lists of 256 / this", "a call each / this",
)  # fmt: skip
_NOTES: Final = (
    "medians of {rounds} interleaved rounds; CPU in us per notification; the last columns divide Tidegate by this row",
    "every rate includes decoding by the subscriber; most of the cost of stock clients is the client, not the server",
    "in Tidegate's favour: MessagePack, not JSON (about 0.2 us less to encode)",
    "in Tidegate's favour: lists, while stock clients take one message per call; compare those with the last column",
    "in the peers' favour: no acknowledgement (QoS 0), where Tidegate acknowledges every notification",
    "in the peers' favour: one wildcard topic matched by name, where Tidegate compares contents with 1000 filters",
    "in the peers' favour: nats-server uses several threads, Tidegate's broker one",
    "the batching clients were written for this benchmark, with 256 messages per write",
)


def run(effort: Effort) -> str:
    with ExitStack() as stack:
        contenders = [
            *stack.enter_context(_tidegate(OTHERS, BATCHES)),
            *stack.enter_context(_tidegate(effort.many_subscriptions, (256,))),
            *stack.enter_context(_nats()),
            *stack.enter_context(_mosquitto()),
        ]
        runs = run_rounds(contenders, effort.rounds, fitting_counts(contenders, effort.run_s))
    lists, calls = (middle(runs[name], _rate) for name in (LISTS, CALLS))
    rows = [_row(name, measured, lists, calls) for name, measured in runs.items()]
    return write_table("Whole path", _HEAD, rows, [note.format(rounds=effort.rounds) for note in _NOTES])


@contextmanager
def _tidegate(others: int, batches: Sequence[int]) -> Iterator[list[Contender]]:
    """Yields contenders with acknowledged lists of each size. With few other subscriptions, adds a call per
    notification."""
    suffix = "" if others == OTHERS else f", {others:,} subscriptions"
    with (
        over_tidegate.tidegate_broker() as broker,
        over_tidegate.subscribed(broker.native, alerts(others)),
    ):
        subscribe = over_tidegate.subscribe_by_content
        contenders = [
            Contender(
                f"Tidegate, {f'lists of {batch}' if batch > 1 else 'publish, a call each'}{suffix}",
                broker.native, broker.pid, over_tidegate.publish_batches, subscribe, (batch,),
            )
            for batch in batches
        ]  # fmt: skip
        if others == OTHERS:
            contenders.append(Contender(CALLS, broker.native, broker.pid, over_tidegate.publish_soon, subscribe))
        yield contenders


@contextmanager
def _nats() -> Iterator[list[Contender]]:
    with over_nats.nats_server() as (pid, port), _others(BatchingNats, port):
        address = f"nats://127.0.0.1:{port}"
        yield [
            Contender("NATS, nats-py", address, pid, over_nats.publish_stock, over_nats.subscribe_stock),
            _batching("NATS, batching client", port, pid, BatchingNats, over_nats.WANTED),
        ]


@contextmanager
def _mosquitto() -> Iterator[list[Contender]]:
    with over_mosquitto.mosquitto() as (pid, port), _others(BatchingMqtt, port):
        paho = (over_mosquitto.publish_paho, over_mosquitto.subscribe_paho)
        gmqtt = (over_mosquitto.publish_gmqtt, over_mosquitto.subscribe_gmqtt)
        yield [
            Contender("Mosquitto QoS 0, paho", str(port), pid, *paho),
            Contender("Mosquitto QoS 0, gmqtt", str(port), pid, *gmqtt),
            _batching("Mosquitto QoS 0, batching client", port, pid, BatchingMqtt, over_mosquitto.WANTED),
        ]


def _batching(name: str, port: int, pid: int, client: type[BatchingClient], wanted: str) -> Contender:
    return Contender(name, str(port), pid, publish_in_batches, take_all, (client, 256), (client, wanted))


@contextmanager
def _others(client_type: type[BatchingClient], port: int) -> Iterator[None]:
    """Holds as many other subscriptions as in Tidegate's broker, to topics that are never published."""
    with client_type(port) as client:
        client.subscribe([f"alert{client.separator}{station_name(number)}" for number in range(OTHERS)])
        yield


def _rate(measured: Measured) -> float:
    return measured.rate


def _row(name: str, runs: Sequence[Measured], lists: float, calls: float) -> list[str]:
    rate = middle(runs, _rate)
    received, sent = sum(run.received.count for run in runs), sum(run.sent for run in runs)
    return [
        name,
        f"{rate:,.0f}",
        f"{middle(runs, lambda run: run.publisher_us):.2f}",
        f"{middle(runs, lambda run: run.server_us):.2f}",
        f"{middle(runs, lambda run: run.subscriber_us):.2f}",
        f"{received:,}/{sent:,}",
        ratio(lists, rate),
        ratio(calls, rate),
    ]
