"""Access to a broker: nobody beyond loopback without a token, no page of a foreign origin; and TLS if configured."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import command
import httpx
import pytest
import trustme
from broker_process import BrokerProcess
from event_stream import EventStream
from http_client import code_of, exchange, open_client, parse_response, publish
from ssap_world import Kp, status
from websocket_client import Rejected, WebSocketClient

import tidegate
from tidegate.errors import NotAllowed, TidegateError, Unavailable

TOKEN = "a-token-that-is-long-enough"
FREE_PORTS = ("--native-port", "0", "--http-port", "0", "--ssap-port", "0")


def serve_and_fail(*flags: str, environment: dict[str, str] | None = None) -> command.Outcome:
    """Runs a broker that is expected not to start."""
    with tempfile.TemporaryDirectory(prefix="tidegate-test-") as data:
        return command.tidegate("serve", *FREE_PORTS, "--data", data, *flags, environment=environment)


def try_native(address: str, **options: Any) -> None:
    """Publishes and subscribes once, natively."""

    async def scenario() -> None:
        async with tidegate.connect(address, **options) as connection, connection.subscribe("*") as subscription:
            await connection.publish({"native": 1})
            assert (await anext(subscription)).notification == {"native": 1}

    asyncio.run(asyncio.wait_for(scenario(), 10))


def native_error(address: str, **options: Any) -> TidegateError:
    with pytest.raises((TidegateError, ExceptionGroup)) as raised:
        try_native(address, **options)
    error: BaseException = raised.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TidegateError)
    return error


def rejection(opening: AbstractContextManager[Any]) -> tuple[int, str]:
    with pytest.raises(Rejected) as refused, opening:
        pass
    return code_of(refused.value.response)


# Beyond loopback.


def test_beyond_loopback_every_port_wants_the_token_that_was_made_up(capfd: pytest.CaptureFixture[str]) -> None:
    with BrokerProcess("--bind", "0.0.0.0", "--log-level", "debug", has_knowledge=True) as broker:
        native, http = f"tidegate://127.0.0.1:{broker.native_port}", f"http://127.0.0.1:{broker.http_port}"
        assert native_error(native, token="").code == native_error(broker.native, token="").code == "A501"
        try_native(native, token=broker.token)
        assert code_of(httpx.post(f"{http}/v1/scale", json={"matchers": 2}, trust_env=False, timeout=60)) == (
            401,
            "A501",
        )
        shown = {"Authorization": f"Bearer {broker.token}"}
        assert httpx.post(
            f"{http}/v1/scale", json={"matchers": 2}, headers=shown, trust_env=False, timeout=60
        ).is_success
        assert broker.token not in httpx.get(f"{http}/v1/layers", headers=shown, trust_env=False, timeout=60).text
        with Kp(broker) as kp:
            assert status(kp.ask("JOIN")) == "m3:SIB.Error.AccessDenied"
        with Kp(broker) as kp:
            assert status(kp.ask("JOIN", f'<parameter name="credentials">{broker.token}</parameter>')) == "m3:Success"
        assert broker.terminate() == 0
        first = broker.token
        broker.start()
        assert broker.token not in ("", first)
        assert native_error(native, token=first).code == "A502"
    log = capfd.readouterr().err
    assert "stopped" in log
    assert first not in log


def test_brokers_of_a_cluster_do_not_make_up_one_each() -> None:
    ended = serve_and_fail("--bind", "0.0.0.0", "--coordinator", "zk://127.0.0.1:1")
    assert (ended.code, "C405" in ended.err, ended.out) == (2, True, "")


@pytest.mark.parametrize(
    ("flags", "environment"),
    [(("--insecure",), {}), ((), {"TIDEGATE_TOKEN": TOKEN})],
    ids=["insecure", "token"],
)
def test_beyond_loopback_it_starts_when_asked_or_with_a_token(
    flags: tuple[str, ...], environment: dict[str, str]
) -> None:
    with BrokerProcess("--bind", "0.0.0.0", *flags, environment=environment) as broker:
        assert broker.token == ""
        assert httpx.get(f"http://127.0.0.1:{broker.http_port}/healthz", trust_env=False, timeout=60).status_code == 200


def test_a_short_token_is_refused() -> None:
    ended = serve_and_fail(environment={"TIDEGATE_TOKEN": "short"})
    assert (ended.code, "C407" in ended.err) == (2, True)
    assert "short" not in ended.err


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    ended = serve_and_fail("--token-file", str(tmp_path / "missing"))
    assert (ended.code, "C406" in ended.err) == (2, True)


@pytest.mark.parametrize("port", ["native_port", "http_port"])
def test_a_port_in_use_is_named(broker: BrokerProcess, port: str) -> None:
    taken = {"native_port": broker.native_port, "http_port": broker.http_port}[port]
    ended = serve_and_fail(f"--{port.replace('_', '-')}", str(taken))
    assert ended.code == 2
    assert "C409" in ended.err
    assert port in ended.err
    assert "Traceback" not in ended.err


# Tokens.


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture(scope="module")
def guarded(token_file: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess("--token-file", str(token_file)) as process:
        yield process


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        (None, (401, "A501")),
        ("", (401, "A501")),
        ("Bearer", (401, "A501")),
        ("Basic " + TOKEN, (401, "A501")),
        ("Bearer wrong", (401, "A502")),
        ("Bearer " + TOKEN + "x", (401, "A502")),
        ("Bearer " + TOKEN[:-1], (401, "A502")),
        ("Bearer tökén", (401, "A502")),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/notifications"), ("GET", "/v1/stream?filter=*"), ("POST", "/v1/why"), ("GET", "/v1/layers"),
     ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/nowhere")],
)  # fmt: skip
def test_without_the_token_nothing_answers(
    guarded: BrokerProcess, method: str, path: str, authorization: str | None, expected: tuple[int, str]
) -> None:
    headers = [] if authorization is None else [(b"Authorization", authorization.encode("latin-1"))]
    with open_client(guarded) as client:
        response = client.request(method, path, headers=headers)
        assert code_of(response) == expected
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "Bearer  "])
def test_with_the_token_everything_does(guarded: BrokerProcess, scheme: str) -> None:
    with open_client(guarded, headers={"Authorization": f"{scheme} {TOKEN}"}) as client:
        assert publish(client, {"a": 1}).json() == {"accepted": 1}
        assert client.get("/v1/layers").status_code == 200


def test_health_is_open(guarded: BrokerProcess) -> None:
    with open_client(guarded) as client:
        assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200


def test_a_websocket_needs_the_token(guarded: BrokerProcess) -> None:
    assert rejection(WebSocketClient(guarded.http)) == (401, "A501")
    assert rejection(WebSocketClient(guarded.http, headers={"Authorization": "Bearer wrong"})) == (401, "A502")
    with WebSocketClient(guarded.http, "ws", headers={"Authorization": f"Bearer {TOKEN}"}) as reader:
        with open_client(guarded, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            publish(client, {"ws": 1})
        assert reader.receive()["notification"] == {"ws": 1}


def test_the_native_port_needs_the_token(guarded: BrokerProcess) -> None:
    assert native_error(guarded.native, token="").code == "A501"
    wrong = native_error(guarded.native, token="wrong")
    assert (type(wrong), wrong.code) == (NotAllowed, "A502")
    try_native(guarded.native, token=TOKEN)


def test_the_token_is_in_no_argument_and_no_log(token_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with BrokerProcess("--token-file", str(token_file), "--log-level", "debug") as broker:
        assert TOKEN.encode() not in Path(f"/proc/{broker.pid}/cmdline").read_bytes()
        with open_client(broker) as client:
            for header in (f"Bearer {TOKEN}", f"Bearer {TOKEN}x", TOKEN):
                assert TOKEN not in client.get("/v1/layers", headers={"Authorization": header}).text
        try_native(broker.native, token=TOKEN)
        assert native_error(broker.native, token=TOKEN + "x").code == "A502"
        assert broker.terminate() == 0
    log = capfd.readouterr().err
    assert "A502" in log
    assert TOKEN not in log


# Origins.

FOREIGN = ["http://evil.example", "https://127.0.0.1", "http://127.0.0.1:1", "null", "http://[", "file://", "x"]


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_page_of_a_foreign_origin_gets_nothing(broker: BrokerProcess, origin: str) -> None:
    with open_client(broker, headers={"Origin": origin}) as client:
        assert code_of(publish(client, {"a": 1})) == (403, "A503")
        assert code_of(client.get("/v1/stream?filter=*")) == (403, "A503")
        assert code_of(client.get("/healthz")) == (403, "A503")
    assert rejection(WebSocketClient(broker.http, headers={"Origin": origin})) == (403, "A503")


def test_an_origin_without_a_host_is_foreign(broker: BrokerProcess) -> None:
    answer = exchange(broker.http_port, b"GET /healthz HTTP/1.0\r\nOrigin: null\r\n\r\n")
    assert code_of(parse_response(answer)) == (403, "A503")


def test_the_brokers_own_pages_pass(broker: BrokerProcess) -> None:
    with open_client(broker, headers={"Origin": broker.http}) as client:
        assert publish(client, {"a": 1}).status_code == 200
    with WebSocketClient(broker.http, headers={"Origin": broker.http}):
        pass


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "[", "0x7f.1"])
def test_a_name_that_only_resolves_to_loopback_is_foreign(broker: BrokerProcess, host: str) -> None:
    """A page of evil.example whose name now points to 127.0.0.1 is of the same origin, as its browser sees it."""
    name = host.format(port=broker.http_port)
    for headers in ({"Host": name}, {"Host": name, "Origin": f"http://{name}"}):
        with open_client(broker, headers=headers) as client:
            assert code_of(publish(client, {"a": 1})) == (403, "A506")


@pytest.mark.parametrize("host", ["localhost", "localhost:{port}", "LOCALHOST", "127.0.0.1", "127.0.0.2:80", "[::1]:1"])
def test_every_name_of_loopback_is_its_own(broker: BrokerProcess, host: str) -> None:
    with open_client(broker, headers={"Host": host.format(port=broker.http_port)}) as client:
        assert publish(client, {"a": 1}).status_code == 200


def test_a_configured_origin_passes_as_browsers_ask_for_it() -> None:
    page = "https://dashboard.example"
    flags = ("--origins", f"{page},https://other.example")
    with BrokerProcess(*flags, environment={"TIDEGATE_TOKEN": TOKEN}) as broker, open_client(broker) as client:
        asked = client.options(
            "/v1/notifications",
            headers={
                "Origin": page,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type,tidegate-publisher,tidegate-sequence",
            },
        )
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, page)
        posted = client.post(
            "/v1/notifications", json={"a": 1}, headers={"Origin": page, "Authorization": f"Bearer {TOKEN}"}
        )
        assert (posted.status_code, posted.headers["access-control-allow-origin"]) == (200, page)
        assert code_of(client.post("/v1/notifications", json={}, headers={"Origin": page})) == (401, "A501")
        foreign = {"Origin": "https://evil.example", "Authorization": f"Bearer {TOKEN}"}
        refused = client.post("/v1/notifications", json={"a": 1}, headers=foreign)
        assert code_of(refused) == (403, "A503")
        assert "access-control-allow-origin" not in refused.headers
        with WebSocketClient(broker.http, headers={"Origin": page, "Authorization": f"Bearer {TOKEN}"}):
            pass


# TLS.


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture(scope="module")
def tls_broker(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("tls")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    for link in certificate.cert_chain_pems:
        link.write_to_path(folder / "certificate.pem", append=True)
    with BrokerProcess("--tls-cert", str(folder / "certificate.pem"), "--tls-key", str(folder / "key.pem")) as process:
        yield process


def test_https_works(tls_broker: BrokerProcess, trusting: ssl.SSLContext) -> None:
    assert tls_broker.http.startswith("https://")
    with open_client(tls_broker, verify=trusting) as client:
        assert publish(client, {"a": 1}).json() == {"accepted": 1}


def test_push_works_over_tls(tls_broker: BrokerProcess, trusting: ssl.SSLContext) -> None:
    with (
        open_client(tls_broker, verify=trusting) as client,
        EventStream(tls_broker.http, "tls", tls=trusting) as events,
        WebSocketClient(tls_broker.http, "tls", tls=trusting) as messages,
    ):
        publish(client, {"tls": 1})
        assert events.receive()["notification"] == messages.receive()["notification"] == {"tls": 1}


def test_native_tls_works(tls_broker: BrokerProcess, trusting: ssl.SSLContext) -> None:
    assert tls_broker.native.startswith("tidegate+tls://")
    try_native(tls_broker.native, tls=trusting)


def test_an_untrusted_certificate_is_refused_by_the_client(tls_broker: BrokerProcess) -> None:
    error = native_error(tls_broker.native, tls=ssl.create_default_context())
    assert (type(error), error.code) == (NotAllowed, "A505")
    with pytest.raises(httpx.ConnectError), open_client(tls_broker, verify=ssl.create_default_context()) as client:
        client.get("/healthz")


def test_plain_text_to_a_tls_port_fails_cleanly(tls_broker: BrokerProcess, trusting: ssl.SSLContext) -> None:
    assert b"HTTP/1.1 200" not in exchange(tls_broker.http_port, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    plain = f"tidegate://127.0.0.1:{tls_broker.native_port}"
    assert isinstance(native_error(plain, connect_timeout_s=1.0), Unavailable)
    assert_serves(tls_broker, trusting)


def test_tls_to_a_plain_port_fails_cleanly(broker: BrokerProcess, trusting: ssl.SSLContext) -> None:
    for port in (broker.http_port, broker.native_port):
        with (
            socket.create_connection(("127.0.0.1", port), 10) as connection,
            pytest.raises((ssl.SSLError, ConnectionResetError)),
        ):
            trusting.wrap_socket(connection, server_hostname="127.0.0.1")
    with open_client(broker) as client:
        assert client.get("/healthz").status_code == 200


def test_old_tls_is_refused(tls_broker: BrokerProcess, trusting: ssl.SSLContext) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    for port in (tls_broker.http_port, tls_broker.native_port):
        with socket.create_connection(("127.0.0.1", port), 10) as connection, pytest.raises(ssl.SSLError):
            old.wrap_socket(connection)
    assert_serves(tls_broker, trusting)


def assert_serves(broker: BrokerProcess, trusting: ssl.SSLContext) -> None:
    with open_client(broker, verify=trusting) as client:
        assert client.get("/healthz").status_code == 200
    try_native(broker.native, tls=trusting)


@pytest.mark.parametrize("given", ["cert", "key"])
def test_half_of_tls_is_refused(given: str, tmp_path: Path) -> None:
    ended = serve_and_fail(f"--tls-{given}", str(tmp_path / "there.pem"))
    assert (ended.code, "C408" in ended.err) == (2, True)


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("not a certificate")
    bad = str(tmp_path / "bad.pem")
    ended = serve_and_fail("--tls-cert", bad, "--tls-key", bad)
    assert (ended.code, "C410" in ended.err) == (2, True)
