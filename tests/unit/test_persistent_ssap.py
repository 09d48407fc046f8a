"""How a persistent query over SSAP interprets the refusals of Tidegate's broker and of others."""

from __future__ import annotations

import asyncio

import pytest

from tidegate.client.persistent_ssap import RETRY_AFTER_S, SsapLink
from tidegate.errors import Overloaded, TidegateError
from tidegate.knowledge.ssap import Envelope, Status, confirm


def refused(status: Status, parameters: dict[str, str]) -> TidegateError:
    """Returns the error that a confirm with these parameters raises."""

    async def read() -> TidegateError:
        reader = asyncio.StreamReader()
        reader.feed_data(confirm(Envelope("SUBSCRIBE", "0", "X", "KP"), status, parameters))
        link = SsapLink(reader, None, "KP", "ASK {}")  # type: ignore[arg-type]  # nothing is sent
        with pytest.raises(TidegateError) as caught:
            await link.confirmed()
        return caught.value

    return asyncio.run(read())


def test_a_broker_that_has_too_much_to_do_says_when_to_come_back() -> None:
    told = {
        "error": "L652: 10000 requests with 9 bytes are already waiting in lane sparql",
        "retry_after_s": "12.500000",
    }
    error = refused(Status.OUT_OF_RESOURCES, told)
    assert isinstance(error, Overloaded)
    assert (error.code, error.retry_after_s) == ("L652", 12.5)


@pytest.mark.parametrize("told", [{}, {"retry_after_s": "soon"}])
def test_one_that_does_not_say_it_is_asked_again_soon(told: dict[str, str]) -> None:
    error = refused(Status.OUT_OF_RESOURCES, told)
    assert isinstance(error, Overloaded)
    assert (error.code, error.retry_after_s) == ("K161", RETRY_AFTER_S)
