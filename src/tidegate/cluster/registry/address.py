"""The address of a registry: `lmdb:DIRECTORY` for the processes of one machine, `redis://…` for those of several."""

from __future__ import annotations

from pathlib import Path

from tidegate.cluster.registry.lmdb_registry import LmdbRegistry
from tidegate.cluster.registry.registry import Registry
from tidegate.errors import ConfigError


def open_registry(address: str, redis_password: str = "") -> Registry:
    """Returns the registry at this address. It connects only when its `open` is called."""
    scheme, _, directory = address.partition(":")
    if scheme == "lmdb" and directory:
        return LmdbRegistry(Path(directory))
    if scheme in ("redis", "rediss"):
        from tidegate.cluster.registry.redis_registry import RedisRegistry  # its client is an extra: tidegate[redis]

        return RedisRegistry(address, redis_password)
    # The message quotes only the scheme: the rest may contain a password.
    raise ConfigError(
        "C440",
        f"a registry address cannot begin with {scheme!r}" if directory else f"{address!r} is not a registry address",
        "use lmdb:DIRECTORY, redis://host:port/database or redis://user@host:port/database",
    )
