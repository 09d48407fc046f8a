"""The connections of a process to its Redis: a bounded pool for short steps, and another pool for reads that block.

A step that was sent is always awaited to its end, even if its caller is cancelled. An interrupted command would leave
an answer that nobody reads, and possibly a lease that nobody knows. Steps are not repeated when a connection breaks,
because Redis may have executed them. The caller gets the error that the store has failed, and the next step reconnects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from tidegate.errors import ConfigError, Unavailable
from tidegate.queues.definition import Durability
from tidegate.queues.store import store_failed
from tidegate.queues.stores.redis_scripts import BLOCK_MS, Script
from tidegate.security.credentials import masked

try:
    from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import AuthenticationError, NoScriptError, RedisError, ResponseError
except ImportError as error:
    raise ConfigError(
        "C412", f"a store in Redis needs {error.name}, which is not installed", "pip install 'tidegate[redis]'"
    ) from error

log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 32
CONNECT_S: Final = 5.0
STEP_S: Final = 15.0
_SAFE_POLICY: Final = "noeviction"

# The keys and arguments of a script.
Call: TypeAlias = tuple[Sequence[str], Sequence[Any]]
T = TypeVar("T")


def bad_queue_store(what: str, why: str) -> ConfigError:
    return ConfigError(
        "C416",
        f"Redis cannot be used with {what}: {why}",
        "give --queue-store redis://[user@]host:port/database, and --redis-password-file if it needs a password",
    )


class RedisLink:
    """Guarantees: every Redis error is raised as the error that `failed` returns. Settings that cannot work are found
    when the link is made or opened, and raised as the error that `bad_url` returns."""

    def __init__(
        self,
        url: str,
        failed: Callable[[str], Unavailable] = store_failed,
        bad_url: Callable[[str, str], ConfigError] = bad_queue_store,
        password: str = "",
    ) -> None:
        self._failed = failed
        self._bad_url = bad_url
        self.background: set[asyncio.Task[Any]] = set()
        try:
            self._pool = _pool(
                BlockingConnectionPool, url, password, STEP_S, max_connections=CONNECTIONS_MAX, timeout=STEP_S
            )
            self._blocked_pool = _pool(ConnectionPool, url, password, BLOCK_MS / 1000 + STEP_S)
        except ValueError as error:
            raise bad_url(repr(masked(url)), str(error)) from error
        # The commands of redis-py are not typed.
        self._redis: Any = Redis(connection_pool=self._pool)
        self._blocked: Any = Redis(connection_pool=self._blocked_pool)

    async def open(self) -> Durability:
        """Connects, and returns the durability of an acknowledgement with this Redis's settings."""
        try:
            await self._redis.execute_command("PING")
        except AuthenticationError as error:
            raise self._bad_url("its password", str(error)) from error
        except (RedisError, OSError) as error:
            raise self._failed(f"Redis does not answer: {error}") from error
        try:
            settings = await self._redis.config_get("append*") | await self._redis.config_get("maxmemory-policy")
        except ResponseError:
            return "os"
        if settings.get("maxmemory-policy", _SAFE_POLICY) != _SAFE_POLICY:
            log.warning(
                "Redis may evict messages: set maxmemory-policy to noeviction, it is %s", settings["maxmemory-policy"]
            )
        if settings.get("appendonly") != "yes":
            return "memory"
        return "fsync" if settings.get("appendfsync") == "always" else "os"

    async def close(self) -> None:
        """Waits for the steps that were sent, and closes all connections."""
        while self.background:
            await asyncio.wait(self.background)
        await self._redis.aclose()
        await self._blocked.aclose()
        await self._pool.aclose()
        await self._blocked_pool.aclose()

    async def command(self, *arguments: Any) -> Any:
        return await self.run_to_end(self._command(arguments))

    async def run(self, script: Script, keys: Sequence[str], *arguments: Any) -> Any:
        return (await self.run_each(script, [(keys, arguments)]))[0]

    async def run_each(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        """Runs one script for several queues, in one round trip."""
        return await self.run_to_end(self._run_each(script, calls))

    async def read_blocked(self, stream: str, last: bytes, block_ms: int) -> Any:
        """Returns the next entry of a stream after `last`; None if none came in time. The call may be cancelled."""
        try:
            return await self._blocked.execute_command(
                "XREAD", "COUNT", 1, "BLOCK", max(1, block_ms), "STREAMS", stream, last
            )
        except (RedisError, OSError) as error:
            raise self._failed(str(error)) from error

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work to its end, even if the caller is cancelled."""
        return await asyncio.shield(self.start(work))

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self.background.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the waiting caller has received it

    async def _command(self, arguments: Sequence[Any]) -> Any:
        try:
            return await self._redis.execute_command(*arguments)
        except (RedisError, OSError) as error:
            raise self._failed(str(error)) from error

    async def _run_each(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        try:
            replies = await self._send(script, calls)
            missing = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            if missing:
                await self._redis.execute_command("SCRIPT LOAD", script.text)
                again = await self._send(script, [calls[index] for index in missing])
                for index, reply in zip(missing, again, strict=True):
                    replies[index] = reply
        except (RedisError, OSError) as error:
            raise self._failed(str(error)) from error
        for reply in replies:
            if isinstance(reply, RedisError):
                raise self._failed(str(reply)) from reply
        return replies

    async def _send(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        if len(calls) == 1:
            keys, arguments = calls[0]
            try:
                return [await self._redis.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments)]
            except NoScriptError as error:
                return [error]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for keys, arguments in calls:
                pipeline.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            return replies


def _pool(kind: type[ConnectionPool], url: str, password: str, answer_s: float, **settings: Any) -> ConnectionPool:
    """Makes a pool of connections. A password in the address takes precedence over `password`."""
    return kind.from_url(
        url,
        password=password or None,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_connect_timeout=CONNECT_S,
        socket_timeout=answer_s,
        **settings,
    )
