"""The settings of a broker: defaults, then one TOML file, then `TIDEGATE_<NAME>` in the environment, then flags.

Every setting has one name everywhere: `native_port` in the file is `TIDEGATE_NATIVE_PORT` and `--native-port`. A name
that does not exist, a value of the wrong type and an unsafe combination are errors before anything starts.

The token is no setting: it comes from a file or from `TIDEGATE_TOKEN`, and is never shown. A broker beyond loopback
that was given none makes one up, which lives and is printed as long as it runs.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import ipaddress
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from tidegate.errors import ConfigError
from tidegate.filters import Filter
from tidegate.notification import NOTIFICATION_BYTES_MAX, check

ENVIRONMENT_PREFIX: Final = "TIDEGATE_"
TOKEN_VARIABLE: Final = "TIDEGATE_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_CHARACTERS_MIN: Final = 16
TOKEN_BYTES: Final = 32
MIRROR_WAYS: Final = ("graph", "notifications")

Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Mirror(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rule of `tidegate.mirror`, as a table [[mirror]] in the file."""

    to: Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(MIRROR_WAYS)})$")]
    subject: Annotated[str, msgspec.Meta(min_length=1)]
    attributes: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=32)]
    filter: str = "*"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One field a setting, with its default. `HELP` below says what each means."""

    bind: str = "127.0.0.1"
    native_port: Port = 7270
    http_port: Port = 7271
    ssap_port: Annotated[int, msgspec.Meta(ge=-1, le=65_535)] = 10_010
    data: Annotated[str, msgspec.Meta(min_length=1)] = "tidegate-data"
    queue_store: Annotated[str, msgspec.Meta(pattern="^(lmdb|rediss?://.+)$")] = "lmdb"
    mirror: tuple[Mirror, ...] = ()
    service_kps: tuple[str, ...] = ()
    coordinator: Annotated[str, msgspec.Meta(pattern="^(|zk://.+)$")] = ""
    token_file: str = ""
    insecure: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    origins: tuple[str, ...] = ()
    log_level: Annotated[str, msgspec.Meta(pattern="^(debug|info|warning|error)$")] = "info"

    connections_max: Count = 10_000
    subscriptions_max: Count = 2_000_000
    subscriptions_per_connection_max: Count = 1_000_000
    publishers_max: Count = 1_000_000
    frame_bytes_max: Annotated[int, msgspec.Meta(ge=NOTIFICATION_BYTES_MAX + 1024)] = 1024 * 1024
    body_bytes_max: Count = 4 * 1024 * 1024
    rate_notifications_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    outbox_notifications_max: Count = 100_000
    outbox_bytes_max: Count = 64 * 1024 * 1024
    publisher_window_bytes: Count = 4 * 1024 * 1024
    window_bytes: Count = 256 * 1024 * 1024

    block_s: Seconds = 5.0
    hello_timeout_s: Seconds = 10.0
    idle_timeout_s: Seconds = 60.0
    request_timeout_s: Seconds = 20.0
    drain_s: Seconds = 10.0


HELP: Final[dict[str, str]] = {
    "bind": "address to listen on, 0.0.0.0 for all; beyond loopback clients must show a token",
    "native_port": "port of the native protocol; 0 picks a free one and prints it",
    "http_port": "port of HTTP, WebSocket and server-sent events; 0 picks a free one and prints it",
    "ssap_port": "port of SSAP; 0 picks a free one and prints it, -1 is for a broker without a knowledge base",
    "data": "directory of what is kept: queues and their messages, the knowledge base; one broker at a time",
    "queue_store": "where queues are kept: lmdb (in the data directory) or the address of a Redis, redis://host:port/0",
    "mirror": "rules by which attributes become triples, or triples attributes (tables in the file; as text: JSON)",
    "service_kps": "knowledge processors whose requests to the knowledge base come first: node ids (comma-separated)",
    "coordinator": "take part in a cluster, whose ZooKeeper is at zk://host:port; empty for all layers in this process",
    "token_file": f"file with the token that clients must show (or {TOKEN_VARIABLE} in the environment); beyond "
    "loopback one is made up and printed at each start if none is given",
    "insecure": "listen beyond loopback without a token: whoever reaches the ports may do everything",
    "tls_cert": "certificate (PEM) for TLS on every listener",
    "tls_key": "private key (PEM) of the certificate",
    "origins": "web origins, besides the broker's own, whose pages may use it (comma-separated)",
    "log_level": "debug, info, warning or error",
    "connections_max": "open connections; more are refused",
    "subscriptions_max": "subscriptions in all; more are refused",
    "subscriptions_per_connection_max": "subscriptions of one connection; more are refused",
    "publishers_max": "publishers remembered for deduplication; the longest idle is forgotten",
    "frame_bytes_max": "bytes of a native frame; a longer one closes its connection",
    "body_bytes_max": "bytes of an HTTP body; a longer one gets 413",
    "rate_notifications_s": "notifications a second from one connection, 0 for no limit; native publishers are slowed, "
    "HTTP gets 429",
    "outbox_notifications_max": "notifications that wait for one slow subscriber before its policy applies",
    "outbox_bytes_max": "bytes that wait for one slow subscriber before its policy applies",
    "publisher_window_bytes": "unacknowledged bytes of one publisher before it is slowed",
    "window_bytes": "unacknowledged bytes in all before publishers are slowed and HTTP gets 429",
    "block_s": "how long a subscriber with the policy block may hold up its publishers before it is disconnected",
    "hello_timeout_s": "how long a new native connection may stay silent",
    "idle_timeout_s": "how long a native connection may send nothing, not even a ping",
    "request_timeout_s": "how long an HTTP request may take to arrive, or to be acknowledged",
    "drain_s": "how long a shutdown waits for subscribers to take what was acknowledged",
}
FIELDS: Final = {field.name: field for field in msgspec.structs.fields(Config)}
assert FIELDS.keys() == HELP.keys()


class Origin(msgspec.Struct, frozen=True):
    """Where a value came from, for `tidegate config check`."""

    value: Any
    source: str


def load(
    file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> tuple[Config, dict[str, Origin]]:
    """The configuration, and where each value came from. ConfigError names the setting and the cure."""
    origins = {name: Origin(field.default, "default") for name, field in FIELDS.items()}
    if file is not None:
        for name, value in _read_file(file).items():
            origins[_known(name, str(file))] = Origin(_convert(name, value, str(file)), str(file))
    for variable, text in (environment or {}).items():
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if variable.startswith(ENVIRONMENT_PREFIX) and name in FIELDS:
            origins[name] = Origin(_convert_text(name, text, variable), variable)
    for name, value in (flags or {}).items():
        flag = "--" + name.replace("_", "-")
        origins[name] = Origin(_convert_text(name, value, flag) if isinstance(value, str) else value, flag)
    config = Config(**{name: origin.value for name, origin in origins.items()})
    _check_tls(config)
    _check_mirrors(config)
    return config, origins


def read_token(config: Config, environment: Mapping[str, str]) -> str | None:
    """The token that clients must show, as the operator has set it, or None."""
    token = environment.get(TOKEN_VARIABLE)
    if config.token_file:
        try:
            token = Path(config.token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "C406", f"token_file {config.token_file!r} cannot be read: {error}", "name a readable text file"
            ) from error
    if token is not None and not (len(token) >= TOKEN_CHARACTERS_MIN and token.isascii() and token.isprintable()):
        raise ConfigError(
            "C407",
            f"the token has {len(token)} characters, or some that are not printable ASCII",
            f"use at least {TOKEN_CHARACTERS_MIN} that are, such as from: openssl rand -hex 32",
        )
    return token


def make_token(config: Config) -> str | None:
    """A token for a broker that was given none, or None where none is needed. It is good until the broker ends."""
    if is_loopback(config.bind) or config.insecure:
        return None
    if config.coordinator:
        raise ConfigError(
            "C405",
            f"bind = {config.bind!r} is beyond loopback and there is no token that all brokers of the cluster want",
            f"give each the same --token-file or {TOKEN_VARIABLE}, or say --insecure if everyone may do everything",
        )
    return secrets.token_urlsafe(TOKEN_BYTES)


@functools.lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("C401", f"{file} cannot be read: {error}", "name a readable TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            "C402", f"{file} is not TOML: {error}", 'write settings as name = value, texts in ""'
        ) from error


def _known(name: str, source: str) -> str:
    if name not in FIELDS:
        near = difflib.get_close_matches(name, FIELDS, n=1)
        remedy = f"did you mean {near[0]}?" if near else "tidegate config check lists them all"
        raise ConfigError("C403", f"{source}: there is no setting {name!r}", remedy)
    return name


def _convert_text(name: str, text: str, source: str) -> Any:
    """A value written as text, as in the environment: lists are separated by commas, tables written in JSON."""
    if name in ("origins", "service_kps"):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name == "mirror":
        with contextlib.suppress(msgspec.DecodeError):  # then the text is a value of the wrong type
            return _convert(name, msgspec.json.decode(text), source)
    return _convert(name, text, source, strict=False)


def _convert(name: str, value: Any, source: str, *, strict: bool = True) -> Any:
    _known(name, source)
    try:
        return msgspec.convert(value, FIELDS[name].type, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError("C404", f"{source}: {name} = {value!r}: {error}", f"{name}: {HELP[name]}") from error


def _check_mirrors(config: Config) -> None:
    """Filters and names as they may be; what is mirrored both ways would go round in circles."""
    for rule in config.mirror:
        Filter.parse(rule.filter)
        check(dict.fromkeys((rule.subject, *rule.attributes), True))
        if rule.subject in rule.attributes:
            raise ConfigError("C404", f"mirror: {rule.subject!r} is its own subject", "take it from the attributes")
    ways = [{name for rule in config.mirror if rule.to == to for name in rule.attributes} for to in MIRROR_WAYS]
    if both := set.intersection(*ways):
        raise ConfigError("C404", f"mirror: {sorted(both)} is mirrored both ways", "choose one way for an attribute")
    if config.mirror and config.ssap_port < 0:
        raise ConfigError("C404", "mirror needs the knowledge base", "choose an ssap_port, 0 for any free one")


def _check_tls(config: Config) -> None:
    if bool(config.tls_cert) != bool(config.tls_key):
        given, missing = ("tls_cert", "tls_key") if config.tls_cert else ("tls_key", "tls_cert")
        raise ConfigError("C408", f"{given} is given without {missing}", "give both for TLS, or none")
