"""Mosquitto as a contender, QoS 0: with the stock clients paho and gmqtt.

There is one topic per station, and the subscriber subscribes to `air/+`. The server's queues are unbounded, so that
nothing is dropped.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import gmqtt
import msgspec
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from benchmarks.job import Received, wait_for_go
from benchmarks.processes import RUN_S, Line, Server, find_program, free_port
from benchmarks.workload import make_readings, rounds_of, topic

WANTED: Final = "air/+"
_CONFIGURATION: Final = (
    "listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\nlog_dest none\nset_tcp_nodelay true\n"
    "max_queued_messages 0\nmax_inflight_messages 0\n"
)
_GMQTT_BUFFER_BYTES: Final = 256 * 1024

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder().decode


@contextmanager
def mosquitto() -> Iterator[tuple[int, int]]:
    """Runs a mosquitto on loopback, and yields its (pid, port)."""
    port = free_port()
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = Path(folder, "mosquitto.conf")
        file.write_text(_CONFIGURATION.format(port=port))
        with Server([find_program("mosquitto"), "-c", str(file)]) as server:
            server.wait_listening(port)
            yield server.pid, port


def publish_paho(line: Line, address: str, count: int) -> int:
    """Publishes through paho and its thread, with a call per message."""
    readings = make_readings(seed=1)
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.connect("127.0.0.1", int(address))
    client.loop_start()
    wait_for_go(line)
    for part in rounds_of(readings, 64, count):
        for reading in part:
            sent = client.publish(topic(reading, "/"), encode(reading))
    sent.wait_for_publish(RUN_S)
    client.disconnect()
    client.loop_stop()
    return count


def subscribe_paho(line: Line, address: str, count: int) -> Received:
    counter = _Counter(count)
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.on_message = lambda _client, _data, message: counter.on_message(message.payload)
    is_live = threading.Event()
    client.on_subscribe = lambda *_: is_live.set()
    client.connect("127.0.0.1", int(address))
    client.loop_start()
    client.subscribe(WANTED)
    is_live.wait(RUN_S)
    line.ready()
    counter.is_done.wait(RUN_S)
    client.disconnect()
    client.loop_stop()
    return counter.received()


def publish_gmqtt(line: Line, address: str, count: int) -> int:
    """Publishes through gmqtt, which passes every message to the transport. Waits when much is buffered, as gmqtt
    recommends."""

    async def main() -> None:
        readings = make_readings(seed=1)
        client = gmqtt.Client(None)
        await client.connect("127.0.0.1", int(address), version=gmqtt.constants.MQTTv311)
        transport = client._connection._transport
        wait_for_go(line)
        for part in rounds_of(readings, 64, count):
            for reading in part:
                client.publish(topic(reading, "/"), encode(reading), qos=0)
            await asyncio.sleep(0)
            while transport.get_write_buffer_size() > _GMQTT_BUFFER_BYTES:
                await asyncio.sleep(0.001)
        while transport.get_write_buffer_size():
            await asyncio.sleep(0.001)
        await client.disconnect()

    asyncio.run(main())
    return count


def subscribe_gmqtt(line: Line, address: str, count: int) -> Received:
    counter = _Counter(count)

    async def main() -> None:
        client = gmqtt.Client(None)
        is_live = asyncio.Event()
        client.on_subscribe = lambda *_: is_live.set()
        client.on_message = lambda _client, _topic, payload, _qos, _properties: counter.on_message(payload)
        await client.connect("127.0.0.1", int(address), version=gmqtt.constants.MQTTv311)
        client.subscribe(WANTED, qos=0)
        await asyncio.wait_for(is_live.wait(), RUN_S)
        line.ready()
        deadline_s = time.monotonic() + RUN_S
        while not counter.is_done.is_set() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        await client.disconnect()

    asyncio.run(main())
    return counter.received()


class _Counter:
    """Decodes and counts messages one by one, as callbacks receive them."""

    def __init__(self, count: int) -> None:
        self.is_done = threading.Event()
        self._count = count
        self._received = 0
        self._last_s = time.monotonic()

    def on_message(self, payload: Any) -> None:
        decode(payload)
        self._received += 1
        if self._received % 64 == 0 or self._received >= self._count:
            self._last_s = time.monotonic()
        if self._received >= self._count:
            self.is_done.set()

    def received(self) -> Received:
        return Received(self._received, self._last_s)
