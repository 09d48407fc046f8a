"""`tidegate cluster up` and `slice`: layers in processes of their own. `scaling_commands` changes them."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import Any, Final

from tidegate import terminal
from tidegate.command_line import add_command
from tidegate.errors import ConfigError

# As commands name them, and as configurations do.
LAYERS: Final = {"access-points": "access_points", "matchers": "matchers", "exit-points": "exit_points"}
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
    add_coordinator(parser)
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


def add_coordinator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coordinator", required=True, metavar="ADDRESS", help="ZooKeeper: zk://host:port[/root]")


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
    for layer, field in LAYERS.items():
        up.add_argument(f"--{layer}", type=int, default=1, dest=field, metavar="COUNT", help="how many (default: 1)")
    up.add_argument(
        "--coordinator", metavar="ADDRESS", help="ZooKeeper: zk://host:port[/root] (default: one is started)"
    )
    up.add_argument("--registry", metavar="ADDRESS", help="redis://… (default: lmdb, in the data directory)")
    up.add_argument("--data", type=Path, default=Path("tidegate-data"), help="directory (default: tidegate-data)")
    up.add_argument("--native-port", type=int, default=7270, help="of the broker (default: 7270)")
    up.add_argument("--http-port", type=int, default=7271, help="of the broker (default: 7271)")
    up.add_argument("--ssap-port", type=int, default=10_010, help="of its knowledge base (default: 10010; -1: none)")


def _cluster_up(options: argparse.Namespace) -> int:
    try:
        from tidegate.broker import prepare_kernels
        from tidegate.cluster.directory import Wanted
        from tidegate.cluster.supervisor import Plan, Supervisor
        from tidegate.cluster.zookeeper_server import zookeeper_server
    except ImportError as error:
        raise not_installed(error) from error
    wanted = Wanted(**{field: getattr(options, field) for field in LAYERS.values()})
    _log(logging.INFO)
    prepare_kernels()  # once, not in every child at the same time

    async def run(coordinator: str) -> None:
        registry = options.registry or f"lmdb:{options.data / 'registry'}"
        ports = (options.native_port, options.http_port, options.ssap_port)
        plan = Plan(coordinator, registry, str(options.data), *ports)
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
        ssap = f"  SSAP         {ready['ssap']}\n" if ready["ssap"] else ""
        print(
            f"the cluster is ready\n  native       {ready['native']}\n  HTTP         {ready['http']}\n{ssap}"
            f"  coordinator  {coordinator}\ntry: tidegate scale matchers=3 --coordinator {coordinator}\nCtrl-C ends it",
            flush=True,
        )
    else:
        terminal.print_json({"ready": {**ready, "coordinator": coordinator}})


def _log(level: int) -> None:
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s")


# slice


def _slice(options: argparse.Namespace) -> int:
    try:
        from tidegate.broker import prepare_kernels
        from tidegate.cluster.coordinator_process import CoordinatorProcess
        from tidegate.cluster.slice_process import SliceProcess
        from tidegate.layers.registry import open_registry
    except ImportError as error:
        raise not_installed(error) from error
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


def not_installed(error: ImportError) -> ConfigError:
    return ConfigError(
        "C412", f"a cluster needs {error.name}, which is not installed", "pip install 'tidegate[server,cluster]'"
    )
