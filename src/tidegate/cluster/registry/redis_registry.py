"""The registry of a cluster on several machines: subscriptions in one Redis, which all machines reach.

| key | type | holds |
|---|---|---|
| `{tidegate:registry}:subscriptions` | hash | id, 8 bytes big-endian: version, 8 bytes big-endian, and packed filter |
| `{tidegate:registry}:writers` | hash | name of a writer: the number of its last write, or `fenced` |
| `{tidegate:registry}:openings` | string | how often a registry was opened on it |

Every write is one script, so that it tests the fence atomically. One hash holds all subscriptions, not one for each
bucket of ids. A script then names the same two keys whatever it changes, and HSCAN reads in parts and finds everything
that exists from the beginning of the scan to its end. A read fetches the ids first, as one string, and then only the
filters that belong to the share, since every Matcher of the new configuration reads.

Writes are numbered. After its connection broke, a write may still be in a network's buffers. It may arrive after the
same changes were sent again, and after a later removal; it would then bring back a removed subscription. By then its
number is not above the writer's last, so the script refuses it.

Configure Redis with `appendonly yes` and `appendfsync always`. With less, the changes acknowledged in the last second
(or all of them, without a file) are lost when its machine fails, and a Matcher's successors miss them: opening logs a
warning. A failover to a replica has the same risk, since replicas lag behind the acknowledgement. Redis must not evict:
set `maxmemory-policy noeviction`.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tidegate.cluster.registry.registry import (
    PART_ENTRIES_MAX,
    fenced,
    ids_at,
    ids_of,
    in_parts,
    keys_of,
    newest,
    registry_failed,
    share_of,
)
from tidegate.errors import ConfigError
from tidegate.layers.control import Entry, Transaction
from tidegate.layers.frames import Change
from tidegate.queues.stores.redis_link import RedisLink
from tidegate.queues.stores.redis_scripts import Script

log = logging.getLogger(__name__)

SUBSCRIPTIONS: Final = "{tidegate:registry}:subscriptions"
WRITERS: Final = "{tidegate:registry}:writers"
OPENINGS: Final = "{tidegate:registry}:openings"
# Redis serves no other command while it scans this many.
IDS_AT_ONCE: Final = 4096
_VERSION: Final = struct.Struct(">Q")
# Lua numbers are exact up to 2^53: enough for two million openings with four thousand million writes each.
_OPENING_SHIFT: Final = 32
_WRITTEN: Final = 1
_FENCED: Final = 2

# Arguments: the writer, the number of the write, how many subscriptions are set; id and value of each of those; id and
# version of each subscription to remove.
_CHANGE: Final = Script(f"""
local writers, subscriptions = KEYS[1], KEYS[2]
local writer, number, begin_end = ARGV[1], ARGV[2], 3 + 2 * ARGV[3]
local last = redis.call('HGET', writers, writer)
if last == 'fenced' then return {_FENCED} end
if last and tonumber(number) <= tonumber(last) then return 0 end
redis.call('HSET', writers, writer, number)

local function is_newer(id, value)
  local kept = redis.call('HGET', subscriptions, id)
  return not kept or struct.unpack('>I8', value) > struct.unpack('>I8', kept)
end
for at = 4, begin_end, 2 do
  if is_newer(ARGV[at], ARGV[at + 1]) then redis.call('HSET', subscriptions, ARGV[at], ARGV[at + 1]) end
end
for at = begin_end + 1, #ARGV, 2 do
  if is_newer(ARGV[at], ARGV[at + 1]) then redis.call('HDEL', subscriptions, ARGV[at]) end
end
return {_WRITTEN}
""")

_FENCE: Final = Script("""
for _, writer in ipairs(ARGV) do redis.call('HSET', KEYS[1], writer, 'fenced') end
""")

# Returns the cursor for the next call, and the next ids as one string.
_SCAN: Final = Script(f"""
local found = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', {IDS_AT_ONCE})
local ids = {{}}
for at = 1, #found[2], 2 do ids[#ids + 1] = found[2][at] end
return {{found[1], table.concat(ids)}}
""")


class RedisRegistry:
    """Keeps the promises in `registry`, as far as its Redis keeps what it has acknowledged. Calls fail with U721 while
    Redis is unavailable, and work again when it returns."""

    def __init__(self, url: str, password: str = "") -> None:
        self._link = RedisLink(url, registry_failed, _bad_url, password)
        self._number = 0
        # Writes must reach Redis in the order of their numbers.
        self._writing = asyncio.Lock()

    async def open(self) -> None:
        durability = await self._link.open()
        if durability != "fsync":
            log.warning(
                "the registry's Redis may lose acknowledged subscriptions (durability = %s): "
                "set appendonly yes and appendfsync always in redis.conf",
                durability,
            )
        # Each opening has higher numbers than all openings before it, so a late write of an earlier process is refused.
        self._number = int(await self._link.command("INCR", OPENINGS)) << _OPENING_SHIFT

    async def close(self) -> None:
        await self._link.close()

    async def change(self, writer: str, changes: list[Change]) -> None:
        begin: list[bytes] = []
        end: list[bytes] = []
        for change in newest(changes):
            id_, version = change.subscription.to_bytes(8, "big"), _VERSION.pack(change.version)
            if change.filter is not None:
                begin += (id_, version + change.filter)
            else:
                end += (id_, version)
        async with self._writing:
            self._number += 1
            arguments = (writer, self._number, len(begin) // 2, *begin, *end)
            status: int = await self._link.run(_CHANGE, [WRITERS, SUBSCRIPTIONS], *arguments)
        if status == _FENCED:
            raise fenced(writer)
        if status != _WRITTEN:
            raise registry_failed(f"a later process writes as {writer!r}, and a name may be used only once")

    async def fence(self, dead: frozenset[str]) -> None:
        await self._link.run(_FENCE, [WRITERS], *sorted(dead))

    def read_share(self, transaction: Transaction, matcher: str) -> AsyncIterator[list[Entry]]:
        return in_parts(self._pages(transaction, matcher))

    async def forget(self, connection_point: int) -> None:
        async for ids in self._scan():
            if gone := keys_of(ids_at(ids_of(ids), connection_point)):
                await self._link.command("HDEL", SUBSCRIPTIONS, *gone)

    async def subscriptions(self) -> int:
        return int(await self._link.command("HLEN", SUBSCRIPTIONS))

    async def _pages(self, transaction: Transaction, matcher: str) -> AsyncIterator[list[Entry]]:
        async for ids in self._scan():
            mine = share_of(ids_of(ids), transaction, matcher)
            for start in range(0, len(mine), PART_ENTRIES_MAX):
                yield await self._entries(mine[start : start + PART_ENTRIES_MAX])

    async def _entries(self, ids: NDArray[np.int64]) -> list[Entry]:
        """Returns the entries of these ids, without those that were removed since the scan."""
        values: list[bytes | None] = await self._link.command("HMGET", SUBSCRIPTIONS, *keys_of(ids))
        return [
            Entry(subscription, _VERSION.unpack_from(value)[0], value[_VERSION.size :])
            for subscription, value in zip(ids.tolist(), values, strict=True)
            if value is not None
        ]

    async def _scan(self) -> AsyncIterator[bytes]:
        """Yields all ids, some at a time. An id that exists during the whole scan occurs at least once."""
        cursor = b"0"
        while True:
            cursor, ids = await self._link.run(_SCAN, [SUBSCRIPTIONS], cursor)
            yield ids
            if cursor == b"0":
                return


def _bad_url(what: str, why: str) -> ConfigError:
    return ConfigError(
        "C442",
        f"the registry's Redis cannot be used with {what}: {why}",
        "use redis://host:port/database or redis://user@host:port/database, and give the password in a file or "
        "TIDEGATE_REDIS_PASSWORD",
    )
