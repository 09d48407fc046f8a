"""A call that blocks, made again while the broker refuses it for lack of room: by the backoff of active control.

What may go wrong: the broker has no room for as long as the caller has patience. Then its refusal is raised.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from tidegate.client.control import RetryPace
from tidegate.errors import Overloaded

T = TypeVar("T")


def until_accepted(call: Callable[[], T], wait_s: float) -> T:
    """Nothing of a refused call may have been done. With a `wait_s` of 0 it is made once."""
    pace, deadline_s = RetryPace(random.random), time.monotonic() + wait_s
    while True:
        try:
            return call()
        except Overloaded as error:
            pause_s = pace.on_refusal(error.retry_after_s)
            if time.monotonic() + pause_s > deadline_s:
                raise
            time.sleep(pause_s)
