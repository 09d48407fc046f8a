"""The two worlds of the fault series: real processes, their faults, and how an operator repairs them.

`OneBroker` is a broker on LMDB with a queue that a filter fills. `TwoBrokers` are two brokers on one Redis, with the
layers in separate processes and a named subscription. A world starts the processes under test, and `fault_series`
starts the publishers and the reader. Like a process manager, a repair restarts every process that has ended.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

import msgspec
import plain_native as native
from broker_process import BrokerProcess
from jumping_clock import Clock
from layer_processes import Cluster, SliceProcess
from redis_process import RedisProcess

LAYERS = ("access-point", "matcher", "exit-point")
PAUSE_S = (1.0, 3.0)
JUMP_S = 600.0
REPAIR_S = 90.0


class Fault(NamedTuple):
    kind: str  # kill, pause, restart, cut or clock
    role: str


class World(ABC):
    """A context manager that runs the processes under test. `faults` are the possible ones; the owner of the clients
    makes the cuts."""

    name: ClassVar[str]
    faults: ClassVar[tuple[Fault, ...]]
    queue: ClassVar[str]
    way: ClassVar[str]  # how it is read
    deep: ClassVar[float]  # share of its faults that happen in a whole burst; the others happen in a tenth of one

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.clock = Clock(directory)
        self.rng = rng
        self.brokers: list[BrokerProcess] = []
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self.begin()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{broker.native_port}" for broker in self.brokers)

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def process_id(self, role: str) -> int: ...

    @abstractmethod
    def repair(self) -> None:
        """Restarts every process that has ended."""

    def harm(self, fault: Fault) -> None:
        """Causes the fault, and returns when it is over. A process that has ended stays down until `repair`."""
        match fault.kind:
            case "kill":
                pid = self.process_id(fault.role)
                _kill(pid)
            case "pause":
                pid = self.process_id(fault.role)
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self.rng.uniform(*PAUSE_S))
                os.kill(pid, signal.SIGCONT)
            case "restart":
                self.rng.choice(self.brokers).terminate()
            case "clock":
                now_s = self.clock.jump(0.0)
                self.clock.jump(-JUMP_S if now_s > 0 else JUMP_S)
            case kind:
                raise ValueError(kind)

    def repair_brokers(self) -> None:
        for broker in self.brokers:
            deadline_s = time.monotonic() + REPAIR_S
            while not broker.is_up():
                try:
                    broker.start()
                except AssertionError:  # it cannot start yet, for example because its store is down
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.5)

    def call(self, action: str, name: str, arguments: dict[str, Any]) -> None:
        with native.connect(("127.0.0.1", self.brokers[0].native_port)) as connection:
            body = msgspec.msgpack.encode({"action": action, "name": name, "arguments": arguments})
            connection.sendall(native.frame(native.QUEUE_CALL, body, 1))
            kind, _number, answer = native.receive(connection)
            assert kind == native.REPLY, answer


class OneBroker(World):
    name = "one broker on LMDB"
    queue = "kept"
    way = "ranges"
    deep = 0.5
    faults = (
        Fault("kill", "broker"),
        Fault("pause", "broker"),
        Fault("restart", "broker"),
        Fault("cut", "publishers"),
        Fault("cut", "reader"),
        Fault("clock", "broker"),
    )

    def begin(self) -> None:
        self.brokers = [self._open.enter_context(BrokerProcess(environment=self.clock.environment))]
        self.call("define", self.queue, {"filter": "n", "physical_queues": 1, "max_deliveries": 0})

    def process_id(self, role: str) -> int:
        assert role == "broker"
        return self.brokers[0].pid

    def repair(self) -> None:
        self.repair_brokers()


class TwoBrokers(World):
    name = "two brokers on Redis, layers in processes"
    queue = "subscription.kept"
    way = "leases"
    deep = 0.2  # a Redis that syncs every write is slow
    faults = (
        *(Fault(kind, role) for kind in ("kill", "pause") for role in ("broker", *LAYERS, "coordinator", "redis")),
        Fault("pause", "broker"),
        Fault("restart", "broker"),
        Fault("cut", "publishers"),
        Fault("cut", "reader"),
        Fault("clock", "broker and redis"),
    )

    def begin(self) -> None:
        # Only a Redis that syncs before it answers keeps everything it has acknowledged when it is killed.
        self.redis = self._open.enter_context(RedisProcess(fsync="always", environment=self.clock.environment))
        self.cluster = self._open.enter_context(Cluster())
        self.cluster.add_coordinator()
        for layer in LAYERS:
            self.cluster.add(layer)
        flags = ("--queue-store", self.redis.url)
        self.brokers = [self.cluster.add_broker(*flags, environment=self.clock.environment) for _ in range(2)]
        self.call("subscribe", "kept", {"filter": "n"})

    def process_id(self, role: str) -> int:
        match role:
            case "broker":
                return self.rng.choice(self.brokers).pid
            case "redis":
                return self.redis.pid
            case "coordinator":
                return self.cluster.coordinators[0].pid  # the older one leads
        name = getattr(self.cluster.state().current, role.replace("-", "_") + "s")[0]
        return self.cluster.slices[name].pid

    def repair(self) -> None:
        """Restarts slices until each layer has an active one and a spare. The coordinator has a spare too."""
        if not _is_running(self.redis.pid):
            self.redis.kill()
            self.redis.start()
        self._bury(self.cluster.coordinators)
        while len(self.cluster.coordinators) < 2:
            self.cluster.add_coordinator()
        for name in [name for name, each in self.cluster.slices.items() if not each.is_up()]:
            self.cluster.slices.pop(name).wait()
        missing = [layer for layer in LAYERS if sum(name.startswith(layer) for name in self.cluster.slices) < 2]
        with ThreadPoolExecutor() as pool:
            brokers = pool.submit(self.repair_brokers)
            list(pool.map(self.cluster.add, missing))
            brokers.result()

    def _bury(self, processes: list[SliceProcess]) -> None:
        for each in [each for each in processes if not each.is_up()]:
            processes.remove(each)
            each.wait()


def _kill(pid: int) -> None:
    """Kills a process, and returns when it has ended, even if it is not a child of this one."""
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [])
    finally:
        os.close(process)


def _is_running(pid: int) -> bool:
    """Returns whether a child of this process is still running."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False
