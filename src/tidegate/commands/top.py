"""`tidegate top`: shows the load of a broker live in the terminal, from its status. JSON lines if piped."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

from tidegate.client import Connection
from tidegate.commands.terminal import is_for_people, print_json

CLEAR: Final = "\x1b[2J\x1b[H"
QUEUES_SHOWN: Final = 20
# (label, statistic) of the Connection Point: first the counters shown as rates, then the levels.
RATES: Final = (
    ("accepted", "accepted"),
    ("delivered", "delivered"),
    ("dropped", "dropped"),
    ("refused", "refused"),
    ("duplicates", "duplicates"),
)
LEVELS: Final = (
    ("sessions", "sessions"),
    ("subscriptions", "subscriptions"),
    ("publishers", "publishers"),
    ("waiting in outboxes", "outbox_notifications"),
    ("bytes in outboxes", "outbox_bytes"),
    ("bytes in flight", "bytes_under_way"),
    ("blocked outboxes", "blocked_outboxes"),
)


async def watch(connection: Connection, interval_s: float, looks: int) -> int:
    """Shows the status every `interval_s`, `looks` times or until interrupted."""
    async with connection as broker:
        before = await broker.status()
        shown = 0
        while True:
            await asyncio.sleep(interval_s)
            now = await broker.status()
            rates = rates_between(before, now)
            if is_for_people():
                sys.stdout.write(CLEAR + table(now, rates))
                sys.stdout.flush()
            else:
                print_json(now | {"rates": rates})
            shown += 1
            if shown == looks:
                return 0
            before = now


def rates_between(before: dict[str, Any], now: dict[str, Any]) -> dict[str, float]:
    """Returns events per second; zeros if the broker was restarted in between."""
    passed_s = now["uptime_s"] - before["uptime_s"]
    if passed_s <= 0 or before["broker"] != now["broker"]:
        return {statistic: 0.0 for _shown, statistic in RATES}
    old, new = before["load"]["connection_point"], now["load"]["connection_point"]
    return {statistic: round((new[statistic] - old[statistic]) / passed_s, 1) for _shown, statistic in RATES}


def table(status: dict[str, Any], rates: dict[str, float]) -> str:
    point, configuration = status["load"]["connection_point"], status["configuration"]
    layers = ", ".join(_count_of(layer, len(names)) for layer, names in configuration.items())
    lines = [
        f"tidegate {status['broker']}   up {status['uptime_s']:.0f} s   epoch {status['epoch']}   {layers}",
        "",
        f"{'notifications':<22}{'per second':>14}{'total':>16}",
    ]
    lines += [f"{shown:<22}{rates[name]:>14,.0f}{point[name]:>16,}" for shown, name in RATES]
    lines.append("")
    lines += [f"{shown:<22}{point[name]:>14,}" for shown, name in LEVELS]
    if status["queues"]:
        lines += ["", f"{'queue':<30}{'parked':>10}{'hits':>12}{'misses':>12}{'delivered':>14}"]
    for name, queue in sorted(status["queues"].items())[:QUEUES_SHOWN]:
        counts = (queue["parked"], queue["hits"], queue["misses"], queue["delivered"])
        lines.append(f"{name:<30}{counts[0]:>10,}{counts[1]:>12,}{counts[2]:>12,}{counts[3]:>14,}")
    if status["queue_alarms"]:
        lines += ["", "queues that are nearly full"]
    for alarm in status["queue_alarms"][:QUEUES_SHOWN]:
        lines.append(f"{alarm['queue']:<30}{_alarm(alarm)}")
    return "\n".join(lines) + "\n"


def _alarm(alarm: dict[str, Any]) -> str:
    """Describes what a queue that is nearly full does to its publishers."""
    level = f"{100 * alarm['fill_ratio']:.0f} % full"
    if alarm["is_overflowing"]:
        counts = f"{alarm['notifications_refused']:,} refused, {alarm['notifications_dropped']:,} dropped"
        return f"{level}, no longer stores what does not fit: {counts}"
    return f"{level}, holds back its publishers" if alarm["holding_back_s"] else level


def _count_of(layer: str, count: int) -> str:
    """Returns `1 access point` or `4 matchers`."""
    plural = layer.replace("_", " ")
    return f"{count} {plural if count != 1 else plural.removesuffix('s')}"
