"""Options of the data source "tidegate", as users write them. Names and values are checked before any work starts.

Spark passes every option as text, in upper or lower case, together with some of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

from tidegate.client.address import DEFAULT_ADDRESS, Address
from tidegate.errors import ConfigError

Mode = Literal["permissive", "failfast"]

_SHARED: Final = {
    "address": "address of the broker, such as tidegate://127.0.0.1:7270",
    "queue": "the logical queue",
    "tokenFile": "file with the broker's token; by default the driver's environment variable TIDEGATE_TOKEN",
    "retryTimeoutS": "seconds to retry while the broker does not answer; 60 by default",
}
SOURCE_HELP: Final = _SHARED | {
    "schema": "columns of the body, such as 'station string, NO2 double'; the message columns follow them",
    "maxRowsPerTrigger": "maximum rows of a micro-batch; 100000 by default, 0 for all available",
    "failOnDataLoss": "true (default): fail if messages were deleted before they were read; false: continue",
    "mode": "permissive (default): a body that does not fit the schema gives nulls and an _error; failfast: an error",
    "delete": "true (default): delete messages when their batch is done; false: keep them",
}
SINK_HELP: Final = _SHARED | {"queue": "the logical queue to enqueue into; without it rows are published"}
# Options that Spark adds.
_SPARK_OPTIONS: Final = frozenset({"path", "checkpointlocation", "queryname", "outputmode"})

ROWS_PER_TRIGGER: Final = 100_000
RETRY_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class BrokerOptions:
    """How to reach the broker. Sent to the executors, with the token that the driver has read."""

    address: str
    token: str
    retry_timeout_s: float


@dataclass(frozen=True)
class SourceOptions:
    broker: BrokerOptions
    queue: str
    schema: str
    rows_per_trigger: int
    is_loss_fatal: bool
    mode: Mode
    deletes: bool


@dataclass(frozen=True)
class SinkOptions:
    """`queue` is empty if rows are published."""

    broker: BrokerOptions
    queue: str


def parse_source_options(given: Mapping[str, str]) -> SourceOptions:
    options = _Options(given, SOURCE_HELP)
    if not options.text("queue"):
        raise ConfigError("C419", "the source has no queue", 'name one: .option("queue", "air")')
    return SourceOptions(
        broker=options.broker(),
        queue=options.text("queue"),
        schema=options.text("schema"),
        rows_per_trigger=options.count("maxRowsPerTrigger", ROWS_PER_TRIGGER),
        is_loss_fatal=options.flag("failOnDataLoss"),
        mode=cast(Mode, options.choice("mode", ("permissive", "failfast"))),
        deletes=options.flag("delete"),
    )


def parse_sink_options(given: Mapping[str, str]) -> SinkOptions:
    options = _Options(given, SINK_HELP)
    return SinkOptions(options.broker(), options.text("queue"))


class _Options:
    def __init__(self, given: Mapping[str, str], known: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        for name in self._given.keys() - {name.lower() for name in known} - _SPARK_OPTIONS:
            raise ConfigError("C419", f"{name!r} is not an option of tidegate", f"use one of: {', '.join(known)}")

    def text(self, name: str, default: str = "") -> str:
        return self._given.get(name.lower(), default)

    def broker(self) -> BrokerOptions:
        address = self.text("address", DEFAULT_ADDRESS)
        Address.parse_all(address)
        return BrokerOptions(address, self._token(), self._seconds("retryTimeoutS", RETRY_TIMEOUT_S))

    def count(self, name: str, default: int) -> int:
        value = self.text(name, str(default))
        if not value.isdecimal():
            raise ConfigError("C419", f"{name} is {value!r}", "give a whole number, such as 100000")
        return int(value)

    def flag(self, name: str) -> bool:
        return self.choice(name, ("true", "false")) == "true"

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self.text(name, choices[0]).lower()
        if value not in choices:
            raise ConfigError("C419", f"{name} is {value!r}", f"choose one of: {', '.join(choices)}")
        return value

    def _seconds(self, name: str, default: float) -> float:
        try:
            value = float(self.text(name, str(default)))
        except ValueError:
            value = 0.0
        if not 0 < value <= 86_400:
            raise ConfigError("C419", f"{name} is {self.text(name)!r}", "give seconds, such as 60")
        return value

    def _token(self) -> str:
        path = self.text("tokenFile")
        if not path:
            return os.environ.get("TIDEGATE_TOKEN", "")
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().strip()
        except OSError as error:
            raise ConfigError(
                "C419", f"the tokenFile {path!r} cannot be read: {error.strerror}", "name a readable file"
            ) from error
