"""Queues as a user's program sees them over HTTP."""

from __future__ import annotations

import json
import socket
import uuid
from typing import Any

import httpx
from http_client import WAIT_S


class QueueClient:
    """One queue, created with the given settings and by default with a unique name."""

    def __init__(self, client: httpx.Client, name: str = "", **settings: Any) -> None:
        self.client = client
        self.name = name or f"q-{uuid.uuid4().hex[:12]}"
        self.path = f"/v1/queues/{self.name}"
        client.put(self.path, json=settings).raise_for_status()

    def enqueue(self, *bodies: Any) -> None:
        answer = self.post("messages", [{"body": body} for body in bodies]).raise_for_status().json()
        assert answer["accepted"] == len(bodies)

    def dequeue(self, **wanted: Any) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = (
            self.post("dequeue", {"wait_s": 5} | wanted).raise_for_status().json()["messages"]
        )
        return messages

    def take_all(self) -> list[Any]:
        """Takes and deletes everything available now, and returns it in any order."""
        bodies = []
        while messages := self.dequeue(wait_s=0):
            bodies += [message["body"] for message in messages]
            self.delete(messages)
        return bodies

    def delete(self, messages: list[dict[str, Any]]) -> dict[str, int]:
        return self.settle("delete", messages)

    def settle(self, action: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, int]:
        receipts = [message["receipt"] for message in messages]
        answer: dict[str, int] = self.post(action, {"receipts": receipts} | more).raise_for_status().json()
        return answer

    def post(self, action: str, body: Any) -> httpx.Response:
        return self.client.post(f"{self.path}/{action}", content=json.dumps(body))

    def statistics(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.client.get(f"{self.path}/stats").raise_for_status().json()
        return shown


def post_bytes(path: str, body: Any) -> bytes:
    """Returns a request as bytes on the wire."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def send_dequeue(port: int, queue: str, **wanted: Any) -> socket.socket:
    """Sends a dequeue request on a new connection, and returns the connection without reading the answer."""
    connection = socket.create_connection(("127.0.0.1", port), WAIT_S)
    connection.sendall(post_bytes(f"/v1/queues/{queue}/dequeue", wanted))
    return connection
