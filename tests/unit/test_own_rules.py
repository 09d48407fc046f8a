"""The source keeps its own rules of concurrency, and each exception has a reason.

- Tasks live in task groups, which are named `tasks`.
- `except Exception` stands where a process is supervised.
- Code waits for events; a `sleep` in a loop is only for periodic work, for pauses between attempts, and for what
  happens in another process.

To keep a new exception, add it here with its reason; to remove one, delete its line.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "tidegate"

TASKS_OUTSIDE_GROUPS = {
    "cluster/channels.py": (1, "sending is synchronous; the channel cancels its connecting when it closes"),
    "cluster/probe.py": (2, "a probe that fails must not cancel the change that it watches"),
    "hosts/supervised_tasks.py": (1, "frames start them, and a failure must end the process in order"),
    "listeners/acceptor.py": (1, "a callback of the event loop starts a handshake, which fails alone"),
    "listeners/http/peer.py": (1, "a group would wrap the errors of the request"),
    "listeners/native_queues.py": (1, "frames start requests, which fail alone"),
    "queues/dequeue_controller.py": (1, "a request starts the checks and does not wait for them"),
    "queues/stores/group_commit.py": (1, "commits in the background, which nobody waits for; a store has no group"),
    "queues/stores/redis_link.py": (1, "a store has no group of its own"),
}

WIDE_EXCEPTS = {
    "hosts/carrier.py": (1, "a bug in a slice ends the process"),
    "hosts/supervised_tasks.py": (1, "a bug in a task that a frame started ends the process"),
    "knowledge/knowledge_base.py": (1, "a request that meets a bug is answered all the same"),
    "knowledge/notifier.py": (1, "a committed change is reported to all other subscribers"),
    "queues/stores/group_commit.py": (1, "the callers of a failed write are told, even of a bug"),
}

PERIODIC = "periodic"
RETRIES = "pauses between attempts"
ELSEWHERE = "waits for another process, which sends no event"
SLEEPS_IN_LOOPS = {
    "broker/assembly.py": (2, "the tick; and the queue point, a machine without events, has settled its bindings"),
    "client/consumer.py": (3, f"{PERIODIC} extension of leases; {RETRIES}"),
    "client/knowledge.py": (1, RETRIES),
    "client/link.py": (1, RETRIES),
    "client/queue.py": (1, RETRIES),
    "client/refusals.py": (1, RETRIES),
    "cluster/autoscaling.py": (1, PERIODIC),
    "cluster/probe.py": (1, PERIODIC),
    "cluster/registry/registry_point.py": (1, RETRIES),
    "cluster/slice_process.py": (1, PERIODIC),
    "cluster/zookeeper_server.py": (1, ELSEWHERE),
    "commands/scaling.py": (1, f"{ELSEWHERE}: the report of a broker that has just started"),
    "commands/top.py": (1, PERIODIC),
    "commands/cli.py": (1, "the pace of readings that are replayed"),
    "demo/main_job.py": (2, f"{PERIODIC} display; {ELSEWHERE}: Spark"),
    "demo/persistent_queries.py": (1, PERIODIC),
    "hosts/queue_feeder.py": (2, f"{RETRIES}; {ELSEWHERE}: the brokers that share a store"),
    "listeners/http/server.py": (1, "push sessions send their last events at a shutdown"),
    "listeners/native.py": (2, "connections send their last deliveries at a shutdown"),
    "queues/dequeue_controller.py": (1, PERIODIC),
    "queues/stores/redis_listener.py": (2, RETRIES),
    "queues/stores/redis_store.py": (1, RETRIES),
    "queues/upkeep.py": (1, PERIODIC),
}


def is_task_outside_group(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    match node.func:
        case ast.Attribute(ast.Name("tasks") | ast.Attribute(attr="tasks" | "_tasks"), "create_task"):
            return False
    return node.func.attr in {"create_task", "ensure_future"}


def is_wide_except(node: ast.AST) -> bool:
    return isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) == "Exception")


def sleeps_in(loop: ast.AST) -> Iterator[ast.Call]:
    """A sleep of 0 seconds only lets others run."""
    for node in ast.walk(loop):
        match node:
            case ast.Call(ast.Attribute(ast.Name("asyncio" | "time"), "sleep"), [ast.Constant(0)]):
                pass
            case ast.Call(ast.Attribute(ast.Name("asyncio" | "time"), "sleep")):
                yield node


def sleep_count(tree: ast.AST) -> int:
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.While | ast.For | ast.AsyncFor)]
    return len({sleep for loop in loops for sleep in sleeps_in(loop)})


def count(of: Callable[[ast.AST], bool]) -> Callable[[ast.AST], int]:
    return lambda tree: sum(map(of, ast.walk(tree)))


def found(count_in: Callable[[ast.AST], int]) -> dict[str, int]:
    paths = sorted(SOURCE.rglob("*.py"))
    counts = Counter({str(path.relative_to(SOURCE)): count_in(ast.parse(path.read_text())) for path in paths})
    return dict(+counts)


def allowed(exceptions: dict[str, tuple[int, str]]) -> dict[str, int]:
    return {path: many for path, (many, _reason) in exceptions.items()}


def test_tasks_live_in_task_groups() -> None:
    assert found(count(is_task_outside_group)) == allowed(TASKS_OUTSIDE_GROUPS)


def test_only_supervisors_catch_every_exception() -> None:
    assert found(count(is_wide_except)) == allowed(WIDE_EXCEPTS)


def test_code_waits_for_events() -> None:
    assert found(sleep_count) == allowed(SLEEPS_IN_LOOPS)


def test_the_rules_find_what_breaks_them() -> None:
    bad = ast.parse(
        "async def f(self, tasks):\n"
        "    tasks.create_task(f())\n"
        "    self._tasks.create_task(f())\n"
        "    asyncio.create_task(f())\n"
        "    self._loop.create_task(f())\n"
        "    asyncio.ensure_future(f())\n"
        "    while x:\n"
        "        for y in z:\n"
        "            await asyncio.sleep(0.1)\n"
        "        await asyncio.sleep(0)\n"
        "    await asyncio.sleep(1)\n"
        "    try: pass\n"
        "    except Exception as error: pass\n"
        "    except OSError: pass\n"
    )
    assert count(is_task_outside_group)(bad) == 3
    assert count(is_wide_except)(bad) == 1
    assert sleep_count(bad) == 1
