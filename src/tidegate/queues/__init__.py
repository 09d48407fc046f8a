"""Logical queues: they store messages durably until back-end systems take them.

    producers ─► enqueue controller ─► physical queues in a store ─► dequeue controller ─► consumers
    Exit Point ─► queue point ──┘

A logical queue is one name over several physical queues (Kinoshita et al., High Throughput Dequeuing Technique in
Distributed Message Queues for IoT, 2017). Controllers hold no durable state: any of them may die, and several may work
on one store. A consumer leases messages, works, and deletes them. A message that is not deleted in time is delivered
again, and a message that keeps failing ends in the dead-letter queue. Four methods decide where a request looks and
when: `conventional`, `pms`, `rds` and `wakeup`.
"""

from tidegate.queues.logical_queues import LogicalQueues

__all__ = ["LogicalQueues"]
