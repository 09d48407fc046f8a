"""The settings of a broker. Later sources override earlier ones: defaults, one TOML file, environment, flags.

Every setting has the same name everywhere: `native_port` in the file is `TIDEGATE_NATIVE_PORT` in the environment and
the flag `--native-port`. An unknown name in the file, an invalid value and an unsafe combination are errors before
anything starts. Unknown `TIDEGATE_…` variables are ignored.

The token is not a setting: it comes from a file or from `TIDEGATE_TOKEN`, and is never shown. A broker that listens
beyond loopback without a token generates one, prints it, and uses it until it stops. The password of Redis comes from a
file or from `TIDEGATE_REDIS_PASSWORD`. A password inside an address is shown as `***`.
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
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from tidegate.errors import ConfigError
from tidegate.filters import Filter
from tidegate.notification import NOTIFICATION_BYTES_MAX, check
from tidegate.security.credentials import REDIS_PASSWORD_VARIABLE, TOKEN_VARIABLE, masked, read_secret

ENVIRONMENT_PREFIX: Final = "TIDEGATE_"
TOKEN_CHARACTERS_MIN: Final = 16
# The token must fit into the first frame of a native connection, whose size is bounded.
TOKEN_CHARACTERS_MAX: Final = 2048
TOKEN_BYTES: Final = 32

MirrorTarget = Literal["graph", "notifications"]
MIRROR_TARGETS: Final = get_args(MirrorTarget)

Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Mirror(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rule of `tidegate.broker.mirror`, written as a table [[mirror]] in the file."""

    to: MirrorTarget
    subject: Annotated[str, msgspec.Meta(min_length=1)]
    attributes: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=32)]
    filter: str = "*"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One field per setting, with its default. `HELP` below describes each of them."""

    bind: str = "127.0.0.1"
    native_port: Port = 7270
    http_port: Port = 7271
    ssap_port: Annotated[int, msgspec.Meta(ge=-1, le=65_535)] = 10_010
    data: Annotated[str, msgspec.Meta(min_length=1)] = "tidegate-data"
    require_store: bool = False
    queue_store: Annotated[str, msgspec.Meta(pattern="^(lmdb|rediss?://.+)$")] = "lmdb"
    redis_password_file: str = ""
    mirror: tuple[Mirror, ...] = ()
    service_kps: tuple[str, ...] = ()
    knowledge_durability: Literal["fsync", "os"] = "fsync"
    knowledge_evaluation_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.25
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
    subscriptions_bytes_max: Count = 2 * 1024**3
    subscriptions_per_connection_bytes_max: Count = 1024**3
    attribute_names_per_connection_max: Count = 4096
    publishers_max: Count = 1_000_000
    publishers_bytes_max: Count = 512 * 1024 * 1024
    queues_bytes_max: Count = 512 * 1024 * 1024
    queue_publishers_bytes_max: Count = 512 * 1024 * 1024
    queue_attribute_names_max: Count = 16_384
    frame_bytes_max: Annotated[int, msgspec.Meta(ge=NOTIFICATION_BYTES_MAX + 1024)] = 1024 * 1024
    body_bytes_max: Count = 4 * 1024 * 1024
    rate_notifications_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    outbox_notifications_max: Count = 100_000
    outbox_bytes_max: Count = 64 * 1024 * 1024
    outboxes_bytes_max: Count = 1024**3
    publisher_window_bytes: Count = 4 * 1024 * 1024
    window_bytes: Count = 256 * 1024 * 1024

    block_s: Seconds = 5.0
    hello_timeout_s: Seconds = 10.0
    idle_timeout_s: Seconds = 60.0
    request_timeout_s: Seconds = 20.0
    drain_s: Seconds = 10.0


HELP: Final[dict[str, str]] = {
    "bind": "address to listen on, 0.0.0.0 for all; beyond loopback clients must present a token",
    "native_port": "port of the native protocol; 0 picks a free one and prints it",
    "http_port": "port of HTTP, WebSocket and server-sent events; 0 picks a free one and prints it",
    "ssap_port": "port of SSAP; 0 picks a free one and prints it, -1 turns off SSAP and the knowledge base",
    "data": "data directory for queues, their messages and the knowledge base; one broker at a time",
    "require_store": "refuse to start if the data directory has no queues yet, for example if a volume is not mounted",
    "queue_store": "queue store: lmdb (in the data directory) or the address of a Redis server, redis://host:port/0",
    "redis_password_file": f"file with the password of Redis (or {REDIS_PASSWORD_VARIABLE} in the environment)",
    "mirror": "rules that copy attributes into triples, or triples into attributes (tables in the file; as text: JSON)",
    "service_kps": "knowledge processors whose requests to the knowledge base go first: node ids (comma-separated)",
    "knowledge_durability": "what a confirmed change of the knowledge base survives: fsync (a power cut) or os "
    "(a crash of the broker)",
    "knowledge_evaluation_share": "share of each second in which one client's persistent queries may be evaluated",
    "coordinator": "join the cluster whose ZooKeeper is at zk://host:port; if empty, all layers run in this process",
    "token_file": f"file with the token that clients must present (or {TOKEN_VARIABLE} in the environment); without "
    "one, a broker beyond loopback generates and prints a token at each start",
    "insecure": "listen beyond loopback without a token: anyone who can reach the ports has full access",
    "tls_cert": "certificate (PEM) for TLS on every listener",
    "tls_key": "private key (PEM) of the certificate",
    "origins": "web origins, besides the broker's own, whose pages may use it (comma-separated)",
    "log_level": "debug, info, warning or error",
    "connections_max": "open connections of each listener (native, HTTP, SSAP), TLS handshakes included; more "
    "are refused",
    "subscriptions_max": "subscriptions in total; more are refused",
    "subscriptions_per_connection_max": "subscriptions of one connection; more are refused",
    "subscriptions_bytes_max": "bytes that the filters of all subscriptions may take; more are refused",
    "subscriptions_per_connection_bytes_max": "bytes that the filters of one connection may take; more are refused",
    "attribute_names_per_connection_max": "different attribute names in the filters of one connection; a subscription "
    "that would add more is refused",
    "publishers_max": "publishers remembered for deduplication; the longest idle is forgotten",
    "publishers_bytes_max": "bytes that remembered publishers may take; the longest idle is forgotten",
    "queues_bytes_max": "bytes that the definitions and idle physical queues of all queues may take in memory, without "
    "their messages; more queues are refused",
    "queue_publishers_bytes_max": "bytes that the publishers remembered by all queues may take, with the store lmdb; "
    "a queue with more than its share forgets those that published least recently",
    "queue_attribute_names_max": "different attribute names in the filters of all queues; a queue that would add "
    "more is refused",
    "frame_bytes_max": "bytes of a native frame; a longer one closes its connection",
    "body_bytes_max": "bytes of an HTTP body; a longer one gets 413",
    "rate_notifications_s": "notifications a second from one connection, 0 for no limit; native publishers are slowed, "
    "HTTP gets 429",
    "outbox_notifications_max": "notifications that wait for one slow subscriber before its policy applies",
    "outbox_bytes_max": "bytes that wait for one slow subscriber before its policy applies",
    "outboxes_bytes_max": "bytes that wait for all slow subscribers; above it, policies apply to those with most",
    "publisher_window_bytes": "unacknowledged bytes of one publisher before it is slowed",
    "window_bytes": "unacknowledged bytes in total before publishers are slowed and HTTP gets 429",
    "block_s": "how long a subscriber with the policy block may hold up its publishers before it is disconnected",
    "hello_timeout_s": "how long a new native or SSAP connection may take to send its first request, and a TLS "
    "handshake to complete",
    "idle_timeout_s": "how long a native connection may send nothing, not even a ping, and an SSAP connection "
    "without a subscription",
    "request_timeout_s": "how long an HTTP request may take to arrive or to be acknowledged, and how long its client "
    "may pause reading the answer",
    "drain_s": "how long a shutdown waits for subscribers to receive acknowledged notifications",
}
FIELDS: Final = {field.name: field for field in msgspec.structs.fields(Config)}
assert FIELDS.keys() == HELP.keys()


class Origin(msgspec.Struct, frozen=True):
    """The value of a setting and its source, for `tidegate config check`."""

    value: Any
    source: str


def load(
    file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> tuple[Config, dict[str, Origin]]:
    """Returns the configuration and the source of each value. Raises ConfigError with the setting and the remedy."""
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


def without_passwords(origins: Mapping[str, Origin]) -> dict[str, Origin]:
    """Returns the settings with their passwords masked, so that they may be shown."""
    return {
        name: Origin(masked(origin.value), origin.source) if isinstance(origin.value, str) else origin
        for name, origin in origins.items()
    }


def read_token(config: Config, environment: Mapping[str, str]) -> str | None:
    """Returns the token that clients must present, as the operator has set it, or None."""
    token = environment.get(TOKEN_VARIABLE)
    if config.token_file:
        token = read_secret(config.token_file, "C406", "token_file")
    is_long_enough = token is None or TOKEN_CHARACTERS_MIN <= len(token) <= TOKEN_CHARACTERS_MAX
    if token is not None and not (is_long_enough and token.isascii() and token.isprintable()):
        raise ConfigError(
            "C407",
            f"the token has {len(token)} characters, or contains some that are not printable ASCII",
            f"use {TOKEN_CHARACTERS_MIN} to {TOKEN_CHARACTERS_MAX} printable ones, such as from: openssl rand -hex 32",
        )
    return token


def make_token(config: Config) -> str | None:
    """Returns a random token for a broker that has none, or None where none is needed. It is valid until the broker
    stops. Raises C405 in a cluster, where all brokers must share one token."""
    if is_loopback(config.bind) or config.insecure:
        return None
    if config.coordinator:
        raise ConfigError(
            "C405",
            f"bind = {config.bind!r} is beyond loopback, and the brokers of the cluster share no token",
            f"give each the same --token-file or {TOKEN_VARIABLE}, or use --insecure to give everyone full access",
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
        raise ConfigError("C403", f"{source}: unknown setting {name!r}", remedy)
    return name


def _convert_text(name: str, text: str, source: str) -> Any:
    """Converts a value written as text, as in the environment. Lists are separated by commas, tables are JSON."""
    if name in ("origins", "service_kps"):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name == "mirror":
        with contextlib.suppress(msgspec.DecodeError):  # no JSON: rejected below as a value of the wrong type
            return _convert(name, msgspec.json.decode(text), source)
    return _convert(name, text, source, strict=False)


def _convert(name: str, value: Any, source: str, *, strict: bool = True) -> Any:
    _known(name, source)
    try:
        return msgspec.convert(value, FIELDS[name].type, strict=strict)
    except msgspec.ValidationError as error:
        shown = masked(value) if isinstance(value, str) else value
        wrong = _wrong(name, error)
        raise ConfigError("C404", f"{source}: {name} = {shown!r} {wrong}", f"{name}: {HELP[name]}") from error


def _wrong(name: str, error: msgspec.ValidationError) -> str:
    """Returns what is wrong with a value, without the types and patterns that msgspec's own message shows."""
    match msgspec.inspect.type_info(FIELDS[name].type):
        case msgspec.inspect.BoolType():
            return "is neither true nor false"
        case msgspec.inspect.IntType() as whole:
            return f"is not a whole number{_bounds(whole)}"
        case msgspec.inspect.FloatType() as number:
            return f"is not a number{_bounds(number)}"
        case msgspec.inspect.VarTupleType() if name == "mirror":
            return f"is not a list of rules: {error}"
        case msgspec.inspect.VarTupleType():
            return "is not a list of texts"
    return "is not allowed"


def _bounds(number: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    if number.ge is not None:
        return f" of {number.ge} or more" if number.le is None else f" from {number.ge} to {number.le}"
    above = "" if number.gt is None else f" above {number.gt}"
    return above if number.le is None else f"{above} and up to {number.le}"


def _check_mirrors(config: Config) -> None:
    """Checks the filters and names of all rules. An attribute that is mirrored both ways would loop forever."""
    for rule in config.mirror:
        Filter.parse(rule.filter)
        check(dict.fromkeys((rule.subject, *rule.attributes), True))
        if rule.subject in rule.attributes:
            raise ConfigError(
                "C404", f"mirror: {rule.subject!r} is both subject and attribute", "remove it from attributes"
            )
    mirrored = [{name for rule in config.mirror if rule.to == to for name in rule.attributes} for to in MIRROR_TARGETS]
    if both := set.intersection(*mirrored):
        names = ", ".join(sorted(both))
        raise ConfigError("C404", f"mirror: {names} is mirrored both ways", "choose one direction for each attribute")
    if config.mirror and config.ssap_port < 0:
        raise ConfigError("C404", "mirror needs the knowledge base", "set ssap_port; 0 picks a free port")


def _check_tls(config: Config) -> None:
    if bool(config.tls_cert) != bool(config.tls_key):
        given, missing = ("tls_cert", "tls_key") if config.tls_cert else ("tls_key", "tls_cert")
        raise ConfigError("C408", f"{given} is given without {missing}", "give both for TLS, or neither")
