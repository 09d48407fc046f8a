"""`tidegate cluster up` and `slice`: run layers in separate processes. `scaling` has the commands that change them."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path
from typing import Any, Final

from tidegate.broker.log_lines import log_to_stderr
from tidegate.commands import terminal
from tidegate.commands.command_line import add_command
from tidegate.errors import ConfigError
from tidegate.layers.layer import Layer
from tidegate.security.credentials import REDIS_PASSWORD_VARIABLE, read_redis_password
from tidegate.security.private_files import make_new_files_private

# Layers by their names in commands, with the names in configurations.
LAYERS: Final = {layer.plural: layer.field for layer in Layer}
KINDS: Final = (*map(str, Layer), "coordinator")


def add_slice(commands: Any) -> None:
    parser = add_command(
        commands,
        "slice",
        _slice,
        "Run one slice of a layer, or the coordinator, in this process.",
        "tidegate slice matcher --coordinator zk://127.0.0.1:2181 --registry redis://127.0.0.1:6379/0",
    )
    parser.add_argument("kind", choices=KINDS, help="what to run")
    add_coordinator(parser)
    parser.add_argument(
        "--registry",
        required=True,
        metavar="ADDRESS",
        help="where subscriptions are stored: redis://…, or lmdb:DIRECTORY if all slices run on one machine",
    )
    _add_redis_password(parser)
    parser.add_argument(
        "--bind", default="127.0.0.1", help="where it listens: a host, or unix:PATH (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="least severe level that is logged (default: info)",
    )


def _add_redis_password(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redis-password-file",
        default=os.environ.get("TIDEGATE_REDIS_PASSWORD_FILE", ""),
        metavar="FILE",
        help=f"file with the password of the registry's Redis (or {REDIS_PASSWORD_VARIABLE} in the environment)",
    )


def add_coordinator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coordinator", required=True, metavar="ADDRESS", help="ZooKeeper: zk://host:port[/root]")


def add_cluster(commands: Any) -> None:
    text = "Run each layer in its own processes, on this machine."
    parser = commands.add_parser("cluster", help=text, description=text)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    up = add_command(
        actions,
        "up",
        _cluster_up,
        "Start a cluster and supervise it until Ctrl-C; `tidegate scale` changes it while it runs.",
        "tidegate cluster up --matchers 2",
    )
    for layer in Layer:
        up.add_argument(
            f"--{layer.plural}",
            type=int,
            default=1,
            dest=layer.field,
            metavar="COUNT",
            help=f"how many {layer.spelled} (default: 1)",
        )
    up.add_argument("--coordinator", metavar="ADDRESS", help="ZooKeeper: zk://host:port[/root] (default: start one)")
    up.add_argument(
        "--registry", metavar="ADDRESS", help="where subscriptions are stored: redis://… (default: LMDB in --data)"
    )
    _add_redis_password(up)
    up.add_argument("--data", type=Path, default=Path("tidegate-data"), help="data directory (default: tidegate-data)")
    up.add_argument("--native-port", type=int, default=7270, help="port of the native protocol (default: 7270)")
    up.add_argument("--http-port", type=int, default=7271, help="port of HTTP and the page (default: 7271)")
    up.add_argument(
        "--ssap-port", type=int, default=10_010, help="port of the knowledge base (default: 10010; -1: none)"
    )


def _cluster_up(options: argparse.Namespace) -> int:
    try:
        from tidegate.broker.assembly import prepare_kernels
        from tidegate.cluster.planning import Wanted
        from tidegate.cluster.supervisor import Plan, Supervisor
        from tidegate.cluster.zookeeper_server import zookeeper_server
    except ImportError as error:
        raise not_installed(error) from error
    wanted = Wanted(**{layer.field: getattr(options, layer.field) for layer in Layer})
    _log(logging.INFO)
    make_new_files_private()
    prepare_kernels()  # once, not in every child at the same time

    async def run(coordinator: str) -> None:
        registry = options.registry or f"lmdb:{options.data / 'registry'}"
        ports = (options.native_port, options.http_port, options.ssap_port)
        plan = Plan(coordinator, registry, str(options.data), *ports, options.redis_password_file)
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
            f"  coordinator  {coordinator}\ntry: tidegate scale matchers=3 --coordinator {coordinator}\n"
            "press Ctrl-C to stop",
            flush=True,
        )
    else:
        terminal.print_json({"ready": {**ready, "coordinator": coordinator}})


def _log(level: int) -> None:
    log_to_stderr(level)


# slice


def _slice(options: argparse.Namespace) -> int:
    try:
        from tidegate.broker.assembly import prepare_kernels
        from tidegate.cluster.coordinator_process import CoordinatorProcess
        from tidegate.cluster.registry import open_registry
        from tidegate.cluster.slice_process import SliceProcess
    except ImportError as error:
        raise not_installed(error) from error
    _log(logging.getLevelNamesMapping()[options.log_level.upper()])
    make_new_files_private()
    registry = open_registry(options.registry, read_redis_password(options.redis_password_file, os.environ))

    async def main() -> None:
        if options.kind == "coordinator":
            await CoordinatorProcess(options.coordinator, registry, options.bind).run()
        else:
            await SliceProcess(Layer(options.kind), options.coordinator, registry, options.bind).run()

    if options.kind == "matcher":
        prepare_kernels()
    asyncio.run(main())
    return 0


def not_installed(error: ImportError) -> ConfigError:
    return ConfigError(
        "C412", f"a cluster needs {error.name}, which is not installed", "pip install 'tidegate[server,cluster]'"
    )
