"""A link with several brokers: it never asks a broker again before the time that the broker asked for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tidegate import Unavailable, connect
from tidegate.frames import ErrorBody, Kind, encode_frame

LONG_S = 20.0
CONNECT_S = 0.6
"""Enough for several rounds over the addresses, if only their backoff paces them."""


class RefusingBroker:
    """Refuses every connection with L601, and counts them."""

    def __init__(self, retry_after_s: float) -> None:
        self.connections = 0
        self._refusal = encode_frame(
            Kind.ERROR, ErrorBody("L601", "the broker is full", "retry later", retry_after_s=retry_after_s)
        )

    async def refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await reader.read(1)
        writer.write(self._refusal)
        writer.close()


@asynccontextmanager
async def refusing(broker: RefusingBroker) -> AsyncIterator[str]:
    async with await asyncio.start_server(broker.refuse, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def fail_to_connect(places: list[str]) -> None:
    async with connect(f"tidegate://{','.join(places)}", connect_timeout_s=CONNECT_S) as connection:
        with pytest.raises(Unavailable, match="U701"):
            await connection.status()


@pytest.mark.parametrize("is_refusal_last", [True, False])
def test_a_dead_address_does_not_shorten_the_time_that_a_broker_asks_for(is_refusal_last: bool) -> None:
    async def scenario() -> None:
        broker = RefusingBroker(LONG_S)
        with socket.socket() as dead:
            dead.bind(("127.0.0.1", 0))  # and never listens
            async with refusing(broker) as place:
                places = [place, f"127.0.0.1:{dead.getsockname()[1]}"]
                await fail_to_connect(places[::-1] if is_refusal_last else places)
        assert broker.connections == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("is_longest_last", [True, False])
def test_of_several_refusals_the_longest_time_counts(is_longest_last: bool) -> None:
    async def scenario() -> None:
        patient, quick = RefusingBroker(LONG_S), RefusingBroker(0.0)
        async with refusing(patient) as patient_place, refusing(quick) as quick_place:
            places = [patient_place, quick_place]
            await fail_to_connect(places[::-1] if is_longest_last else places)
        assert (patient.connections, quick.connections) == (1, 1)

    asyncio.run(scenario())


def test_brokers_that_ask_for_no_time_are_asked_again() -> None:
    async def scenario() -> None:
        brokers = RefusingBroker(0.0), RefusingBroker(0.0)
        async with refusing(brokers[0]) as first, refusing(brokers[1]) as second:
            await fail_to_connect([first, second])
        assert min(broker.connections for broker in brokers) > 1

    asyncio.run(scenario())
