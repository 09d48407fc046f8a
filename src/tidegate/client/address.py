"""The address of a broker: `tidegate://host:port` or `tidegate+tls://host:port`.

An address may list several brokers of a cluster, `tidegate://host:port,host:port`; a client may use any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from tidegate.errors import ConfigError

DEFAULT_ADDRESS: Final = "tidegate://127.0.0.1:7270"
DEFAULT_PORT: Final = 7270


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    is_tls: bool

    @classmethod
    def parse(cls, text: str) -> Address:
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise _bad_address(text) from error
        if parts.scheme not in ("tidegate", "tidegate+tls") or not parts.hostname or parts.username or parts.path:
            raise _bad_address(text)
        return cls(parts.hostname, port if port is not None else DEFAULT_PORT, parts.scheme == "tidegate+tls")

    @classmethod
    def parse_all(cls, text: str) -> tuple[Address, ...]:
        scheme, _, places = text.partition("://")
        return tuple(cls.parse(f"{scheme}://{place}") for place in places.split(","))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tidegate+tls' if self.is_tls else 'tidegate'}://{host}:{self.port}"


def _bad_address(text: str) -> ConfigError:
    return ConfigError("C411", f"{text!r} is not the address of a broker", f"write it as {DEFAULT_ADDRESS}")
