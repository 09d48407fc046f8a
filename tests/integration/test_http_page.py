"""The page is served to everybody, completely, never stale, and with a policy that forbids foreign code."""

from __future__ import annotations

import base64
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from broker_process import BrokerProcess
from http_client import code_of, open_client
from websocket_client import Rejected, WebSocketClient

from tidegate.devices import STATIONS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "src" / "tidegate" / "page"
FILES = sorted(path.name for path in PAGE.iterdir() if path.is_file() and path.suffix != ".py")
TOKEN = "a token/with?odd+characters="


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with open_client(broker) as opened:
        yield opened


@pytest.fixture(scope="module")
def guarded() -> Iterator[BrokerProcess]:
    with BrokerProcess(environment={"TIDEGATE_TOKEN": TOKEN}) as process:
        yield process


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES)])
def test_a_file_comes_as_it_is_with_its_type_and_the_policy(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    name = path.rpartition("/")[2] or "index.html"
    assert response.status_code == 200
    assert response.content == (PAGE / name).read_bytes()
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert response.headers["content-type"].startswith(kinds[Path(name).suffix])
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy.pop("default-src") == policy.pop("frame-ancestors") == "'none'"
    assert set(policy.values()) <= {"'self'", "'none'"}
    assert response.headers["x-content-type-options"] == "nosniff"


def test_a_file_that_is_known_is_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f'"other", {tag}', f"W/{tag}"):
        again = client.get("/page/main.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get("/page/main.js", headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.get("/page/map.js").headers["etag"] != tag


@pytest.mark.parametrize(
    "path", ["/page/", "/page/nothing.js", "/page/__init__.py", "/page/../errors.py", "/page/%2e%2e"]
)
def test_nothing_else_is_served(client: httpx.Client, path: str) -> None:
    assert code_of(client.get(path))[0] == 404


def test_all_that_files_refer_to_is_there() -> None:
    html = (PAGE / "index.html").read_text()
    referred = set(re.findall(r'(?:src|href)="/page/([^"]+)"', html))
    for name in FILES:
        if name.endswith(".js"):
            referred |= set(re.findall(r'from "\./([^"]+)"', (PAGE / name).read_text()))
    assert referred | {"index.html"} == set(FILES)
    ids = set(re.findall(r'\bid="([^"]+)"', html))
    script = "\n".join((PAGE / name).read_text() for name in FILES if name.endswith(".js"))
    assert set(re.findall(r'byId\("([^"]+)"\)', script)) <= ids


def test_all_files_are_part_of_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tidegate"]
    packaged = {path.name for pattern in patterns for path in PAGE.parent.glob(pattern) if path.parent == PAGE}
    assert packaged == set(FILES)


def test_what_comes_from_outside_is_never_read_as_html() -> None:
    script = "\n".join((PAGE / name).read_text() for name in FILES if name.endswith(".js"))
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert unsafe not in script
    assert re.search(r"<script(?! type=\"module\" src=)|\bon\w+=|style=", (PAGE / "index.html").read_text()) is None


def test_the_region_has_all_stations(client: httpx.Client) -> None:
    region = client.get("/page/region.json").json()
    assert [each["code"] for each in region["stations"]] == [each.code for each in STATIONS]
    assert "CC BY 4.0" in region["attribution"]
    assert all(len(bounds) == len(region["band_names"]) - 1 for bounds in region["bands"].values())


def test_the_page_is_open_and_what_it_shows_is_not(guarded: BrokerProcess) -> None:
    with open_client(guarded) as stranger:
        assert [stranger.get(path).status_code for path in ("/", "/page/main.js", "/page/region.json")] == [200] * 3
        for path in ("/v1/layers", "/v1/queues", "/page/../v1/layers", "//v1/layers"):
            assert code_of(stranger.get(path)) in ((401, "A501"), (404, "P318")), path
        assert code_of(stranger.post("/v1/scale", json={"matchers": 2})) == (401, "A501")


def offer(token: str) -> tuple[str, str]:
    return "tidegate", f"tidegate-token.{base64.urlsafe_b64encode(token.encode()).decode().rstrip('=')}"


def test_a_websocket_may_show_its_token_as_a_subprotocol(guarded: BrokerProcess) -> None:
    with WebSocketClient(guarded.http, subprotocols=offer(TOKEN)) as client:
        assert client.subprotocol == "tidegate"


@pytest.mark.parametrize("offered", [offer("another token"), ("tidegate-token.a",), ("tidegate",)])
def test_a_wrong_one_is_refused(guarded: BrokerProcess, offered: tuple[str, ...]) -> None:
    with pytest.raises(Rejected) as refused, WebSocketClient(guarded.http, subprotocols=offered):
        pass
    assert refused.value.response.status_code == 401
