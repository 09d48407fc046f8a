"""Logical queues: what is kept for back-end systems until they come and take it.

    producers ─► enqueue controller ─► physical queues in a store ─► dequeue controller ─► consumers
    Exit Point ─► queue point ──┘

A logical queue is one name over several physical queues (Kinoshita et al., High Throughput Dequeuing Technique in
Distributed Message Queues for IoT, 2017). Controllers keep nothing that matters: any may die, and several may work on
one store. A consumer leases messages, works, and deletes them; what it does not delete in time is delivered again, and
what keeps failing ends in the dead-letter queue. Four methods decide where a request looks and when: `conventional`,
`pms`, `rds` and `wakeup`.
"""

from tidegate.queues.logical_queues import LogicalQueues

__all__ = ["LogicalQueues"]
