"""Hosts run the layers: they read the clock, carry frames from one slice to the next, and measure load.

    listener ─► session ─► embedded_host ─► carrier ─► the state machines of `layers`, all in this process
                                              └─► queue_feeder ─► logical queues

The hosts of a cluster are in `cluster`, and use the same carrier.
"""
