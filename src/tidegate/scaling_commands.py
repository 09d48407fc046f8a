"""`tidegate scale`, `replace`, `layers` and `autoscale`: how many slices the layers have, while everything flows.

`scale` and `replace` write down what is wanted, and show how the coordinator gets there; whoever interrupts them
interrupts only the showing.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from tidegate import terminal
from tidegate.cluster_commands import LAYERS, add_coordinator, not_installed
from tidegate.command_line import add_command, add_token_file, connect_to
from tidegate.errors import BadInput, TidegateError

if TYPE_CHECKING:
    from tidegate.cluster.directory import Directory, Wanted
    from tidegate.cluster.probe import Probe


def add_scale(commands: Any) -> None:
    parser = add_command(
        commands,
        "scale",
        _scale,
        "Change how many slices the layers have, all of them at once, while everything flows.",
        "tidegate scale matchers=4 exit-points=2 --coordinator zk://127.0.0.1:2181",
    )
    parser.add_argument("counts", nargs="+", metavar="LAYER=COUNT", help=f"layers: {', '.join(LAYERS)}")
    parser.add_argument(
        "--switch", choices=("epoch", "buffered"), help="buffered holds notifications back, as the paper"
    )
    _add_watching(parser)


def add_replace(commands: Any) -> None:
    parser = add_command(
        commands,
        "replace",
        _replace,
        "Have another slice stand in for one, which then ends.",
        "tidegate replace matcher-3 --coordinator zk://127.0.0.1:2181",
    )
    parser.add_argument("name", metavar="SLICE")
    _add_watching(parser)


def add_layers(commands: Any) -> None:
    parser = add_command(commands, "layers", _layers, "Show who serves what, how busy, and what is under way.")
    add_coordinator(parser)


def add_autoscale(commands: Any) -> None:
    parser = add_command(
        commands,
        "autoscale",
        _autoscale,
        "Watch the load, and change the layers so that a service level is kept at the least cost.",
        "tidegate autoscale --p99-ms 50 --max-matchers 6 --coordinator zk://127.0.0.1:2181",
    )
    add_coordinator(parser)
    parser.add_argument(
        "--p99-ms", type=float, required=True, metavar="MS", help="99 of 100 batches shall be delivered within so many"
    )
    for layer in LAYERS:
        parser.add_argument(f"--min-{layer}", type=int, default=1, metavar="COUNT", help="(default: 1)")
        parser.add_argument(f"--max-{layer}", type=int, default=None, metavar="COUNT", help="(default: 8)")
    parser.add_argument(
        "--slice-cost",
        type=float,
        default=None,
        metavar="SHARE",
        help="what a slice costs, as a share of what keeping the service level is worth (default: 0.02)",
    )
    parser.add_argument(
        "--busy",
        type=float,
        default=None,
        metavar="SHARE",
        help="of a core, that slices may be busy on average (default: 0.7)",
    )
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="measure so often (default: 2)")
    parser.add_argument(
        "--grow-after", type=float, default=None, metavar="SECONDS", help="of too much load (default: 10)"
    )
    parser.add_argument(
        "--shrink-after", type=float, default=None, metavar="SECONDS", help="of little load (default: 180)"
    )
    parser.add_argument(
        "--rest", type=float, default=None, metavar="SECONDS", help="no change so long after one (default: 30)"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")


def _add_watching(parser: argparse.ArgumentParser) -> None:
    add_coordinator(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="give up waiting after so many; the coordinator goes on (default: 60)",
    )
    parser.add_argument("--no-probe", action="store_true", help="publish nothing to see what the change does")
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
            raise BadInput("P341", f"there is no slice {options.name} at work", f"name one of: {known or 'none yet'}")
        return await _change(options, directory, change)

    return _run(options, work)


async def _change(options: argparse.Namespace, directory: Directory, change: Callable[[Wanted], Wanted]) -> int:
    from tidegate.cluster.change import change_layers

    began_s = time.monotonic()

    def show(phase: str) -> None:
        terminal.note(f"{time.monotonic() - began_s:6.2f} s  {phase}")

    async with AsyncExitStack() as stack:
        probe = None if options.no_probe else await _begin_probe(options, directory, stack)
        began_s = time.monotonic()
        outcome = await change_layers(directory, change, probe, options.timeout, show)
    terminal.print_json(outcome.to_dict())
    findings = outcome.findings
    return 0 if findings is None or not (findings.lost or findings.doubled or findings.disordered) else 1


async def _begin_probe(options: argparse.Namespace, directory: Directory, stack: AsyncExitStack) -> Probe | None:
    """Without a broker that can be reached there is none, and the operator is told why."""
    from tidegate.cluster.observer import Observer
    from tidegate.cluster.probe import Probe

    try:
        if options.address is None:
            async with Observer(directory) as observer:
                loads = await observer.loads()
            options.address = next((load.address for load in loads.values() if load.address), None)
        if options.address is None:
            terminal.note("no probe: the coordinator knows of no broker yet; name one with --address")
            return None
        connection = await stack.enter_async_context(connect_to(options, "tidegate-probe"))
        return await stack.enter_async_context(Probe(connection))
    except TidegateError as error:
        terminal.note(f"no probe: {error}")
        return None


def _parse_count(text: str) -> tuple[str, Any]:
    layer, _equals, count = text.partition("=")
    if layer not in LAYERS or not count.isdigit() or not int(count):
        raise BadInput("P342", f"{text!r} is no LAYER=COUNT", f"layers: {', '.join(LAYERS)}; count from 1")
    return LAYERS[layer], int(count)


# layers


def _layers(options: argparse.Namespace) -> int:
    from tidegate.layers.frames import Load
    from tidegate.layers.load import LOAD_S, Rates

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
    from tidegate.layers.autoscaler import Hold, Layer, ServiceLevel

    if not options.every > 0:
        raise BadInput("P343", f"--every {options.every:g} is no time between measurements", "use more than 0 seconds")
    layers = dict(zip(LAYERS.values(), (Layer.ACCESS_POINT, Layer.MATCHER, Layer.EXIT_POINT), strict=True))
    default = ServiceLevel(options.p99_ms)

    def or_default(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    def hold(seconds: float | None, otherwise: Hold) -> Hold:
        """No more measurements than fit into the time."""
        held_s = or_default(seconds, otherwise.seconds)
        return Hold(held_s, max(1, min(otherwise.measurements, int(held_s / options.every))))

    level = ServiceLevel(
        options.p99_ms,
        slices_min={layer: getattr(options, f"min_{field}") for field, layer in layers.items()},
        slices_max={
            layer: most for field, layer in layers.items() if (most := getattr(options, f"max_{field}")) is not None
        },
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
    """What is decided is for programs too; why nothing is changed is only for whoever looks on."""
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
