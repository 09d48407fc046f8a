"""`tidegate scale`, `replace`, `layers` and `autoscale`: show and change the number of slices while notifications flow.

`scale` and `replace` record the wanted configuration and then show the coordinator's progress. Interrupting them stops
only the display; the coordinator continues.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.commands import terminal
from tidegate.commands.cluster import LAYERS, add_coordinator, not_installed
from tidegate.commands.command_line import add_command, add_token_file, connect_to
from tidegate.errors import BadInput, TidegateError
from tidegate.layers.layer import Layer

if TYPE_CHECKING:
    from tidegate.cluster.directory import Directory
    from tidegate.cluster.planning import Wanted
    from tidegate.cluster.scaling import OpenProbe

# Reports of a broker that a probe waits for, if the coordinator knows of none yet.
REPORTS_AWAITED: Final = 4


def add_scale(commands: Any) -> None:
    parser = add_command(
        commands,
        "scale",
        _scale,
        "Change the number of slices of one or more layers, while notifications flow.",
        "tidegate scale matchers=4 exit-points=2 --coordinator zk://127.0.0.1:2181",
    )
    parser.add_argument("counts", nargs="+", metavar="LAYER=COUNT", help=f"layers: {', '.join(LAYERS)}")
    parser.add_argument(
        "--switch",
        choices=("epoch", "buffered"),
        help="how to change over; buffered holds notifications back, as in the paper (default: as before)",
    )
    _add_watching(parser)


def add_replace(commands: Any) -> None:
    parser = add_command(
        commands,
        "replace",
        _replace,
        "Replace a slice with another one; the replaced slice exits.",
        "tidegate replace matcher-3 --coordinator zk://127.0.0.1:2181",
    )
    parser.add_argument("name", metavar="SLICE", help="the slice to replace, such as matcher-3")
    _add_watching(parser)


def add_layers(commands: Any) -> None:
    parser = add_command(commands, "layers", _layers, "Show the slices, their load, and the phase of a change.")
    add_coordinator(parser)


def add_autoscale(commands: Any) -> None:
    parser = add_command(
        commands,
        "autoscale",
        _autoscale,
        "Watch the load, and scale the layers to keep a service level at the lowest cost.",
        "tidegate autoscale --p99-ms 50 --max-matchers 6 --coordinator zk://127.0.0.1:2181",
    )
    add_coordinator(parser)
    parser.add_argument(
        "--p99-ms",
        type=float,
        required=True,
        metavar="MS",
        help="service level: 99 of 100 batches are delivered within this time",
    )
    for layer in Layer:
        parser.add_argument(
            f"--min-{layer.plural}", type=int, default=1, metavar="COUNT", help=f"fewest {layer.spelled} (default: 1)"
        )
        parser.add_argument(
            f"--max-{layer.plural}", type=int, default=None, metavar="COUNT", help=f"most {layer.spelled} (default: 8)"
        )
    parser.add_argument(
        "--slice-cost",
        type=float,
        default=None,
        metavar="SHARE",
        help="cost of a slice, as a share of the value of keeping the service level (default: 0.02)",
    )
    parser.add_argument(
        "--busy",
        type=float,
        default=None,
        metavar="SHARE",
        help="how busy slices may be on average, as a share of a core (default: 0.7)",
    )
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="time between measurements (default: 2)"
    )
    parser.add_argument(
        "--grow-after",
        type=float,
        default=None,
        metavar="SECONDS",
        help="add slices after this long under high load (default: 10)",
    )
    parser.add_argument(
        "--shrink-after",
        type=float,
        default=None,
        metavar="SECONDS",
        help="remove slices after this long under low load (default: 180)",
    )
    parser.add_argument(
        "--rest",
        type=float,
        default=None,
        metavar="SECONDS",
        help="time without further changes after a change (default: 30)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print decisions, but do not act on them")


def _add_watching(parser: argparse.ArgumentParser) -> None:
    add_coordinator(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="stop waiting after this time; the coordinator continues (default: 60)",
    )
    parser.add_argument(
        "--no-probe", action="store_true", help="do not measure the effect of the change with probe notifications"
    )
    parser.add_argument(
        "--address", metavar="ADDRESS", help="broker for the probe (default: one that the coordinator knows)"
    )
    add_token_file(parser)


# scale, replace


def _scale(options: argparse.Namespace) -> int:
    counts = dict(_parse_count(text) for text in options.counts)
    if options.switch is not None:
        counts["is_buffered"] = options.switch == "buffered"

    def change(wanted: Wanted) -> Wanted:
        return msgspec.structs.replace(wanted, **counts)

    return _run(options, lambda directory: _change(options, directory, change))


def _replace(options: argparse.Namespace) -> int:
    def change(wanted: Wanted) -> Wanted:
        return msgspec.structs.replace(wanted, replaced=wanted.replaced | {options.name})

    async def work(directory: Directory) -> int:
        state = directory.state()
        if state is None or options.name not in state.current.slices:
            known = ", ".join(sorted(state.current.slices)) if state is not None else ""
            raise BadInput("P341", f"there is no active slice {options.name}", f"name one of: {known or 'none yet'}")
        return await _change(options, directory, change)

    return _run(options, work)


async def _change(options: argparse.Namespace, directory: Directory, change: Callable[[Wanted], Wanted]) -> int:
    from tidegate.cluster.cluster_layers import ClusterLayers
    from tidegate.cluster.scaling import Scaling

    open_probe = nullcontext if options.no_probe else await _prepare_probe(options, directory)
    began_s = time.monotonic()

    def show(phase: str) -> None:
        terminal.note(f"{time.monotonic() - began_s:6.2f} s  {phase}")

    outcome = await Scaling(ClusterLayers(directory), open_probe, options.timeout, show).change(change)
    terminal.print_json(outcome.to_dict())
    findings = outcome.findings
    return 0 if findings is None or not (findings.lost or findings.doubled or findings.disordered) else 1


async def _prepare_probe(options: argparse.Namespace, directory: Directory) -> OpenProbe:
    """Finds a broker for the probe. Without a reachable one, no probe watches, and the operator is told why."""
    from tidegate.cluster.probe import open_probe

    def explain(error: TidegateError) -> None:
        terminal.note(f"no probe: {error}")

    try:
        if options.address is None:
            options.address = await _known_broker(directory)
    except TidegateError as error:
        explain(error)
        return nullcontext
    if options.address is None:
        terminal.note("no probe: the coordinator knows of no broker yet; name one with --address")
        return nullcontext
    return lambda: open_probe(lambda: connect_to(options, "tidegate-probe"), explain)


async def _known_broker(directory: Directory) -> str | None:
    """Returns the address of a broker that the coordinator knows. Waits for the first report of a broker that has
    just started."""
    from tidegate.cluster.observer import Observer
    from tidegate.hosts.load import LOAD_S

    async with Observer(directory) as observer:
        for _ in range(REPORTS_AWAITED):
            for load in (await observer.loads()).values():
                if load.address:
                    return load.address
            await asyncio.sleep(LOAD_S)
    return None


def _parse_count(text: str) -> tuple[str, Any]:
    layer, _equals, count = text.partition("=")
    if layer not in LAYERS or not count.isdigit() or not int(count):
        raise BadInput(
            "P342", f"{text!r} is not LAYER=COUNT", f"layers are {', '.join(LAYERS)}; the count is 1 or more"
        )
    return LAYERS[layer], int(count)


# layers


def _layers(options: argparse.Namespace) -> int:
    from tidegate.hosts.load import LOAD_S, Rates
    from tidegate.layers.frames import Load

    def load_of(before: Load | None, after: Load | None) -> dict[str, Any] | None:
        if before is None or after is None or (rates := Rates.between(before, after)) is None:
            return None
        return {
            "busy_share": round(rates.busy_share, 3),
            "notifications_per_s": round(rates.notifications_per_s, 1),
            "subscriptions": after.subscriptions,
        }

    async def show(directory: Directory) -> int:
        from tidegate.cluster.observer import Observer

        async with Observer(directory) as observer:
            before = await observer.loads()
            await asyncio.sleep(2 * LOAD_S)
            after = await observer.loads()
        state, members = directory.state(), await directory.members()
        leader = directory.leader()
        serving = state.current.slices if state is not None else frozenset()

        def described(name: str) -> dict[str, Any]:
            return {"endpoint": members.get(name), "load": load_of(before.get(name), after.get(name))}

        terminal.print_json(
            {
                "epoch": state.current.epoch if state is not None else 0,
                "phase": state.phase if state is not None else None,
                "coordinator": leader.name if leader is not None else None,
                "slices": {name: described(name) for name in sorted(serving)},
                "spares": sorted(name for name in members if name not in serving and "connection-point" not in name),
                "connection_points": {name: described(name) for name in sorted(members) if "connection-point" in name},
            }
        )
        return 0

    return _run(options, show)


# autoscale


def _autoscale(options: argparse.Namespace) -> int:
    from tidegate.layers.autoscaler import Hold, ServiceLevel

    if not options.every > 0:
        raise BadInput("P343", f"--every is {options.every:g}", "use more than 0 seconds")
    default = ServiceLevel(options.p99_ms)

    def or_default(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    def hold(seconds: float | None, otherwise: Hold) -> Hold:
        """Requires no more measurements than fit into the time."""
        held_s = or_default(seconds, otherwise.seconds)
        return Hold(held_s, max(1, min(otherwise.measurements, int(held_s / options.every))))

    level = ServiceLevel(
        options.p99_ms,
        slices_min={layer: getattr(options, f"min_{layer.field}") for layer in Layer},
        slices_max={layer: most for layer in Layer if (most := getattr(options, f"max_{layer.field}")) is not None},
        slice_cost=or_default(options.slice_cost, default.slice_cost),
        busy_share_max=or_default(options.busy, default.busy_share_max),
        grow=hold(options.grow_after, default.grow),
        shrink=hold(options.shrink_after, default.shrink),
        rest_s=or_default(options.rest, default.rest_s),
    )

    async def work(directory: Directory) -> int:
        from tidegate.cluster.autoscaling import autoscale

        await autoscale(directory, level, options.every, is_dry=options.dry_run, show=_show_decision)
        return 0

    return _run(options, work)


def _show_decision(text: str, wanted: dict[str, int] | None) -> None:
    """Prints a decision as JSON, also for programs. Reasons for not changing anything go only to the terminal."""
    if wanted is None:
        terminal.note(text)
    else:
        terminal.print_json({"wanted": wanted, "why": text})


def _run(options: argparse.Namespace, work: Callable[[Directory], Awaitable[int]]) -> int:
    try:
        from tidegate.cluster.directory import Directory
    except ImportError as error:
        raise not_installed(error) from error

    async def main() -> int:
        directory = Directory(options.coordinator, lambda: None, lambda: None)
        await directory.open()
        try:
            return await work(directory)
        finally:
            await directory.close()

    return asyncio.run(main())
