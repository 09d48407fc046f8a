"""`tidegate cluster up`, `slice`, `scale`, `replace` and `layers`: layers in processes of their own.

`scale` and `replace` write down what is wanted, and show how the coordinator gets there; whoever interrupts them
interrupts only the showing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate import terminal
from tidegate.command_line import add_command
from tidegate.errors import BadInput, ConfigError, Unavailable

if TYPE_CHECKING:
    from tidegate.cluster.directory import Directory, Wanted
    from tidegate.layers.reconfiguration import State

# As commands name them, and as configurations do.
_LAYERS: Final = {"access-points": "access_points", "matchers": "matchers", "exit-points": "exit_points"}
KINDS: Final = ("access-point", "matcher", "exit-point", "coordinator")


def add_slice(commands: Any) -> None:
    parser = add_command(
        commands,
        "slice",
        _slice,
        "Run one slice of a layer, or the coordinator of all, in this process.",
        "tidegate slice matcher --coordinator zk://127.0.0.1:2181 --registry redis://127.0.0.1:6379/0",
    )
    parser.add_argument("kind", choices=KINDS)
    _add_coordinator(parser)
    parser.add_argument(
        "--registry",
        required=True,
        metavar="ADDRESS",
        help="where subscriptions are kept: redis://…, or lmdb:DIRECTORY when all slices are on one machine",
    )
    parser.add_argument("--bind", default="127.0.0.1", help="where others reach it: a host, or unix:PATH")
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="(default: info)"
    )


def add_scale(commands: Any) -> None:
    parser = add_command(
        commands,
        "scale",
        _scale,
        "Change how many slices the layers have, all of them at once, while everything flows.",
        "tidegate scale matchers=4 exit-points=2 --coordinator zk://127.0.0.1:2181",
    )
    parser.add_argument("counts", nargs="+", metavar="LAYER=COUNT", help=f"layers: {', '.join(_LAYERS)}")
    parser.add_argument(
        "--switch", choices=("epoch", "buffered"), help="buffered holds notifications back, as the paper"
    )
    _add_waiting(parser)


def add_replace(commands: Any) -> None:
    parser = add_command(
        commands,
        "replace",
        _replace,
        "Have another slice stand in for one, which then ends.",
        "tidegate replace matcher-3 --coordinator zk://127.0.0.1:2181",
    )
    parser.add_argument("name", metavar="SLICE")
    _add_waiting(parser)


def add_layers(commands: Any) -> None:
    parser = add_command(commands, "layers", _layers, "Show who serves what, and what is under way.")
    _add_coordinator(parser)


def _add_coordinator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coordinator", required=True, metavar="ADDRESS", help="ZooKeeper: zk://host:port[/root]")


def _add_waiting(parser: argparse.ArgumentParser) -> None:
    _add_coordinator(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="give up waiting after so many; the coordinator goes on (default: 60)",
    )


def add_cluster(commands: Any) -> None:
    text = "Run all layers in processes of their own, on this machine."
    parser = commands.add_parser("cluster", help=text, description=text)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    up = add_command(
        actions,
        "up",
        _cluster_up,
        "Start a cluster and look after it until it is interrupted; `tidegate scale` changes it meanwhile.",
        "tidegate cluster up --matchers 2",
    )
    for layer, field in _LAYERS.items():
        up.add_argument(f"--{layer}", type=int, default=1, dest=field, metavar="COUNT", help="how many (default: 1)")
    up.add_argument(
        "--coordinator", metavar="ADDRESS", help="ZooKeeper: zk://host:port[/root] (default: one is started)"
    )
    up.add_argument("--registry", metavar="ADDRESS", help="redis://… (default: lmdb, in the data directory)")
    up.add_argument("--data", type=Path, default=Path("tidegate-data"), help="directory (default: tidegate-data)")
    up.add_argument("--native-port", type=int, default=7270, help="of the broker (default: 7270)")
    up.add_argument("--http-port", type=int, default=7271, help="of the broker (default: 7271)")


def _cluster_up(options: argparse.Namespace) -> int:
    try:
        from tidegate.broker import prepare_kernels
        from tidegate.cluster.directory import Wanted
        from tidegate.cluster.supervisor import Plan, Supervisor
        from tidegate.cluster.zookeeper_server import zookeeper_server
    except ImportError as error:
        raise _not_installed(error) from error
    wanted = Wanted(**{field: getattr(options, field) for field in _LAYERS.values()})
    _log(logging.INFO)
    prepare_kernels()  # once, not in every child at the same time

    async def run(coordinator: str) -> None:
        registry = options.registry or f"lmdb:{options.data / 'registry'}"
        plan = Plan(coordinator, registry, str(options.data), options.native_port, options.http_port)
        await Supervisor(plan, wanted, lambda ready: _show_cluster(coordinator, ready)).run()

    async def main() -> None:
        if options.coordinator is not None:
            await run(options.coordinator)
            return
        async with zookeeper_server(options.data / "zookeeper") as coordinator:
            await run(coordinator)

    asyncio.run(main())
    return 0


def _show_cluster(coordinator: str, ready: dict[str, str]) -> None:
    if terminal.is_for_people():
        print(
            f"the cluster is ready\n  native       {ready['native']}\n  HTTP         {ready['http']}\n"
            f"  coordinator  {coordinator}\ntry: tidegate scale matchers=3 --coordinator {coordinator}\nCtrl-C ends it",
            flush=True,
        )
    else:
        terminal.print_json({"ready": {**ready, "coordinator": coordinator}})


def _log(level: int) -> None:
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("kazoo").setLevel(logging.WARNING)


# slice


def _slice(options: argparse.Namespace) -> int:
    try:
        from tidegate.broker import prepare_kernels
        from tidegate.cluster.coordinator_process import CoordinatorProcess
        from tidegate.cluster.slice_process import SliceProcess
        from tidegate.layers.registry import open_registry
    except ImportError as error:
        raise _not_installed(error) from error
    _log(logging.getLevelNamesMapping()[options.log_level.upper()])
    registry = open_registry(options.registry)

    async def main() -> None:
        if options.kind == "coordinator":
            await CoordinatorProcess(options.coordinator, registry, options.bind).run()
        else:
            await SliceProcess(options.kind, options.coordinator, registry, options.bind).run()

    if options.kind == "matcher":
        prepare_kernels()
    asyncio.run(main())
    return 0


# scale, replace, layers


def _scale(options: argparse.Namespace) -> int:
    counts = dict(_parse_count(text) for text in options.counts)
    if options.switch is not None:
        counts["is_buffered"] = options.switch == "buffered"

    def change(wanted: Wanted) -> Wanted:
        return msgspec.structs.replace(wanted, **counts)

    return _run(options, lambda directory: _want(directory, change, options.timeout))


def _replace(options: argparse.Namespace) -> int:
    def change(wanted: Wanted) -> Wanted:
        return msgspec.structs.replace(wanted, replaced=wanted.replaced | {options.name})

    async def work(directory: Directory) -> int:
        state = await directory.state()
        if state is None or options.name not in state.current.slices:
            known = ", ".join(sorted(state.current.slices)) if state is not None else ""
            raise BadInput("P341", f"there is no slice {options.name} at work", f"name one of: {known or 'none yet'}")
        return await _want(directory, change, options.timeout)

    return _run(options, work)


def _layers(options: argparse.Namespace) -> int:
    async def show(directory: Directory) -> int:
        state, members = await directory.state(), await directory.members()
        leader = await directory.leader()
        serving = state.current.slices if state is not None else frozenset()
        shown = {
            "epoch": state.current.epoch if state is not None else 0,
            "phase": state.phase if state is not None else None,
            "coordinator": leader.name if leader is not None else None,
            "slices": {name: members.get(name) for name in sorted(serving)},
            "spares": sorted(name for name in members if name not in serving and "connection-point" not in name),
            "connection_points": sorted(name for name in members if "connection-point" in name),
        }
        print(json.dumps(shown))
        return 0

    return _run(options, show)


async def _want(directory: Directory, change: Callable[[Wanted], Wanted], timeout_s: float) -> int:
    """Shows each phase once, and what is missing; done when the layers are as wanted."""
    from tidegate.cluster.directory import Wanted

    wanted = change(await directory.wanted() or Wanted())
    await directory.want(wanted)
    began_s = time.monotonic()
    shown = ""
    while True:
        state = await directory.state()
        missing = _missing(state, wanted)
        if state is not None and state.transaction is None and not missing:
            break
        now = f"waits for {missing}" if state is None or state.transaction is None else _phase(state)
        if now != shown:
            shown = now
            print(f"{time.monotonic() - began_s:6.2f} s  {now}", file=sys.stderr, flush=True)
        if time.monotonic() - began_s > timeout_s:
            raise Unavailable(
                "U732",
                f"after {timeout_s:g} s the layers are not as wanted: {now}",
                "start what is missing with tidegate slice; it goes on as soon as it is there",
            )
        await asyncio.sleep(0.05)
    seconds = time.monotonic() - began_s
    print(
        json.dumps({"epoch": state.current.epoch, "slices": sorted(state.current.slices), "seconds": round(seconds, 2)})
    )
    return 0


def _phase(state: State) -> str:
    assert state.transaction is not None
    assert state.phase is not None
    return f"epoch {state.transaction.epoch}: {state.phase}"


def _missing(state: State | None, wanted: Wanted) -> str:
    """What the present configuration lacks, or has too much of."""
    if state is None:
        return "a coordinator"
    faults = [f"another slice for {name}" for name in sorted(wanted.replaced & state.current.slices)]
    for layer in _LAYERS.values():
        present, count = len(getattr(state.current, layer)), getattr(wanted, layer)
        if present != count:
            faults.append(f"{count} {layer.replace('_', '-')}, there are {present}")
    return "; ".join(faults)


def _parse_count(text: str) -> tuple[str, Any]:
    layer, _equals, count = text.partition("=")
    if layer not in _LAYERS or not count.isdigit() or not int(count):
        raise BadInput("P342", f"{text!r} is no LAYER=COUNT", f"layers: {', '.join(_LAYERS)}; count from 1")
    return _LAYERS[layer], int(count)


def _run(options: argparse.Namespace, work: Callable[[Directory], Awaitable[int]]) -> int:
    try:
        from tidegate.cluster.directory import Directory
    except ImportError as error:
        raise _not_installed(error) from error
    logging.getLogger("kazoo").setLevel(logging.CRITICAL)

    async def main() -> int:
        directory = Directory(options.coordinator, lambda: None, lambda: None)
        await directory.open()
        try:
            return await work(directory)
        finally:
            await directory.close()

    return asyncio.run(main())


def _not_installed(error: ImportError) -> ConfigError:
    return ConfigError(
        "C412", f"a cluster needs {error.name}, which is not installed", "pip install 'tidegate[server,cluster]'"
    )
