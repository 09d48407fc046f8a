"""Upkeep: periodic maintenance of queues, in small steps between other work.

Three steps run for each queue once a second:

- Its fill ratio is measured; `pressure` reports when it nears its bound.
- Messages older than its `lifetime_s` are removed.
- The queue is dropped if it was not read for its `expires_s`.

Brokers that share a store all do this; a step has no effect where another broker was faster.

What may go wrong: the store fails. Then this turn is skipped, and the next one tries again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from tidegate.errors import NoSuchQueue, TidegateError
from tidegate.queues.definition import DEAD
from tidegate.queues.logical_queues import LogicalQueues

log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
# Pause between two steps while a backlog of old messages is removed, so that other work gets its turn.
PAUSE_S: Final = 0.02


async def maintain_queues(queues: LogicalQueues) -> None:
    """Maintains all queues until it is cancelled."""
    while True:
        has_more = False
        for name in [definition.name for definition in queues.definitions() if not definition.name.endswith(DEAD)]:
            try:
                await queues.check_fill(name)
                has_more |= await queues.remove_old_messages(name)
                await queues.drop_if_unread(name)
            except NoSuchQueue:
                continue  # dropped meanwhile
            except TidegateError as error:
                log.debug("maintenance of queue %r failed, trying again: %s", name, error)
        await asyncio.sleep(PAUSE_S if has_more else PERIOD_S)
