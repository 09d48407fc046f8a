from __future__ import annotations

from collections.abc import Iterator

import pytest
from broker_process import BrokerProcess


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    """A broker with the default configuration, shared by the tests of a module."""
    with BrokerProcess() as process:
        yield process
