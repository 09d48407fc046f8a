"""A page of another origin, in a real browser, tries everything a page can: it reads nothing and changes nothing.

The tests use both an origin on another port of this machine (the same site) and another site.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from broker_process import BrokerProcess
from browser_page import open_browser
from http_client import open_client, publish
from playwright.sync_api import Browser

# Every attempt ends and reports its outcome. An image fails whatever the answer is, so the broker is asked afterwards.
ATTEMPTS = """
async (broker) => {
  const tag = (kind, path) => new Promise((done) => {
    const element = document.createElement(kind);
    element.onload = element.onerror = (event) => done(event.type);
    element[kind === "link" ? "href" : "src"] = broker + path;
    if (kind === "link") element.rel = "stylesheet";
    document.body.append(element);
  });
  const send = (path, options) => fetch(broker + path, options).then((answer) => answer.type, () => "refused");
  const socket = (path) => new Promise((done) => {
    const opened = new WebSocket(broker.replace("http", "ws") + path);
    opened.onopen = () => done("open");
    opened.onerror = () => done("refused");
  });
  const stream = (path) => new Promise((done) => {
    const events = new EventSource(broker + path);
    events.onopen = () => done("open");
    events.onerror = () => { events.close(); done("refused"); };
  });
  const name = "name=made-by-evil&filter=*";
  const simple = { method: "POST", mode: "no-cors", body: '{"evil": 1}' };
  return {
    image: await tag("img", `/v1/stream?${name}`),
    taking: await tag("img", "/v1/stream?name=kept"),
    script: await tag("script", "/v1/layers"),
    style: await tag("link", "/metrics"),
    query: await tag("img", `/v1/persistent?name=evil&query=ASK%7B%7D`),
    post: await send(`/v1/stream?${name}`, { method: "POST", mode: "no-cors" }),
    publish: await send("/v1/notifications", simple),
    subscribe: await send("/v1/subscriptions", { ...simple, body: '{"name": "evil", "filter": "*"}' }),
    read: await send("/v1/queues", {}),
    socket: await socket(`/v1/subscribe?${name}`),
    events: await stream("/v1/stream?filter=*"),
  };
}
"""


class _Evil(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>evil</title><body>")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is its base's
        pass


@contextmanager
def evil_server() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Evil) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_foreign_page_gets_nothing_and_changes_nothing(browser: Browser, host: str) -> None:
    with (
        BrokerProcess(has_knowledge=True) as broker,
        evil_server() as port,
        open_client(broker) as client,
        browser.new_context() as context,
    ):
        client.post("/v1/subscriptions", json={"name": "kept", "filter": "n"}).raise_for_status()
        publish(client, {"n": 1}).raise_for_status()
        page = context.new_page()
        page.goto(f"http://{host}:{port}/")
        said = page.evaluate(ATTEMPTS, broker.http)
        assert {said[each] for each in ("image", "taking", "script", "style", "query")} == {"error"}
        assert {said[each] for each in ("read", "socket", "events")} == {"refused"}
        (kept,) = client.get("/v1/subscriptions").json()["subscriptions"]
        assert (kept["name"], kept["messages"]) == ("kept", 1)
        assert client.get("/v1/persistent/named").json() == {"queries": []}
        publish(client, {"n": 2}).raise_for_status()
        assert client.get("/v1/subscriptions/kept").json()["messages"] == 2, "nothing was published meanwhile"
