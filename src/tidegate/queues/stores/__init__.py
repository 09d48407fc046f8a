"""Stores of physical queues: LMDB in the broker's own process, Redis Streams for several brokers."""
