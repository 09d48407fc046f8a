"""How a broker paces its clients: mean service times, the load of notifications, appointments, and spread fetches.

The laws are functions of plain numbers. The request pool calls them, and so does the laboratory's broker of known
speed. The laboratory also compiles them into its simulation (decision 037), so this module imports only `math`.
"""

from __future__ import annotations

import math
from typing import Final

# The share of a lane's time that it offers as appointments, and the minimum that remains when notifications are busy.
LOAD_WANTED: Final = 0.8
LOAD_LEFT_MIN: Final = 0.1
NOTIFYING_S: Final = 10.0  # the time constant over which the load of notifications is averaged
SMOOTHING: Final = 0.05  # the weight of a new sample in the mean processing and waiting times


def learn_mean_s(mean_s: float, sample_s: float, weight: float) -> float:
    """Returns a mean time with a new sample."""
    return mean_s + weight * (sample_s - mean_s)


def fade_load(load: float, since_s: float, forgetting_s: float) -> float:
    """Returns what remains of a load after this time."""
    return load * math.exp(-since_s / forgetting_s)


def serve_all_s(clients: int, mean_s: float, workers: int, load_share: float) -> float:
    """Returns the time in which the workers serve each client once, with this share of their time.

    It is the pace that the broker asks of each client, and the spread of clients that fetch after one notification."""
    return clients * mean_s / (workers * load_share)


def next_slot_at_s(
    last_at_s: float, now_s: float, backlog_s: float, mean_s: float, workers: int, load_share: float, notify_load: float
) -> float:
    """Returns the time of a new appointment, after the last one given away and after the backlog.

    Appointments fill `load_share` of the workers' time, minus the share that notifications use."""
    gap_s = mean_s / (workers * max(LOAD_LEFT_MIN, load_share - notify_load))
    return max(last_at_s, now_s + backlog_s) + gap_s
