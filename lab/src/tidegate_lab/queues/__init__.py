"""Queues: compares four ways to dequeue, by simulation and on a real broker.

The model is the distributed message queue of M. Kinoshita et al., High Throughput Dequeuing Technique in Distributed
Message Queues for IoT, JIP 25, 2017, DOI 10.2197/ipsjjip.25.199.
"""
