"""Compiles the kernels of the simulations in advance, so that the first simulation need not wait half a minute."""

from __future__ import annotations

from tidegate.client.control import Control
from tidegate_lab.control import request_pool
from tidegate_lab.queues import message_queue


def warm_up() -> None:
    """Runs each model for a moment, which compiles its kernels."""
    message_queue.simulate(message_queue.Parameters(warm_up_s=0.01, measured_s=0.01), message_queue.Method.RDS, seed=1)
    request_pool.simulate(request_pool.Parameters(clients=4, warm_up_s=0.01, measured_s=0.01), Control(), seed=1)


if __name__ == "__main__":
    warm_up()
