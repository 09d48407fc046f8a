"""The address of a registry: `lmdb:DIRECTORY` for the processes of one machine, `redis://…` for those of several."""

from __future__ import annotations

from pathlib import Path

from tidegate.errors import ConfigError
from tidegate.layers.registry.lmdb_registry import LmdbRegistry
from tidegate.layers.registry.registry import Registry


def open_registry(address: str) -> Registry:
    """The registry of that address; its `open` is what reaches for it."""
    scheme, _, directory = address.partition(":")
    if scheme == "lmdb" and directory:
        return LmdbRegistry(Path(directory))
    if scheme in ("redis", "rediss"):
        from tidegate.layers.registry.redis_registry import RedisRegistry  # its client is an extra: tidegate[redis]

        return RedisRegistry(address)
    # Not the rest of it, where a password may stand.
    raise ConfigError(
        "C440",
        f"no address of a registry begins with {scheme!r}" if directory else f"{address!r} is no address of a registry",
        "give lmdb:DIRECTORY, or redis://[user:password@]host:port/database",
    )
