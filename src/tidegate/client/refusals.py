"""Retries a blocking call while an overloaded broker refuses it, with the backoff of active control.

What may go wrong: the broker stays overloaded for longer than the caller will wait. Then its refusal is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tidegate.client.control import RetryPace
from tidegate.errors import Overloaded

T = TypeVar("T")


def until_accepted(call: Callable[[], T], wait_s: float) -> T:
    """Returns the result of `call`, and retries it for up to `wait_s` if it is refused; 0 means no retry. A refused
    call must have had no effect."""
    pace, deadline_s = RetryPace(), time.monotonic() + wait_s
    while True:
        try:
            return call()
        except Overloaded as error:
            pause_s = pace.on_refusal(error.retry_after_s)
            if time.monotonic() + pause_s > deadline_s:
                raise
            time.sleep(pause_s)
