"""Discrete-event models of parts of the broker: the same system without its machines, to compare methods by seed.

`message_queue` is the distributed message queue of M. Kinoshita et al., High Throughput Dequeuing Technique in
Distributed Message Queues for IoT, JIP 25, 2017, DOI 10.2197/ipsjjip.25.199. `request_pool` is a broker with many
clients under active control, after A. S. Vdovenko et al.
"""
