"""Persistent queries over SSAP, the protocol of Smart-M3: SUBSCRIBE opens one, QUERY on the same connection checks it.

A check sends the query again and compares results, so it finds losses at every SSAP broker. Tidegate's broker also
sends the number of the last indication and its load, and resumes a subscription whose connection was lost.

What may go wrong: nothing answers (U701), the connection is lost or the peer does not speak SSAP (U704), or the broker
refuses. A refusal has the broker's own code if it sends one. Otherwise it is K161 for an overloaded broker, else K160.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import ssl
from typing import Any, Final
from urllib.parse import urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tidegate.client.control import Hints
from tidegate.client.link import to_exception
from tidegate.client.persistent_transport import Checked, Heard, Indicated, Opened, Refused, Row
from tidegate.client.websocket import lost
from tidegate.errors import ConfigError, KnowledgeError, Overloaded, TidegateError, Unavailable
from tidegate.frames import ErrorBody

MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
DEFAULT_PORT: Final = 10010
RETRY_AFTER_S: Final = 1.0  # for brokers that do not send it
SPACE: Final = "X"
_END: Final = b"</SSAP_message>"
_DECLARATIONS: Final = b"<!DOCTYPE"
_SPARQL: Final = "{http://www.w3.org/2005/sparql-results#}"
_LANGUAGE: Final = "{http://www.w3.org/XML/1998/namespace}lang"
_SUCCESS: Final = "m3:Success"
_RESET: Final = "m3:SIB.Notification.Reset"
_OUT_OF_RESOURCES: Final = "m3:SIB.Failure.OutOfResources"
_NO_SUBSCRIPTION: Final = "K117"


class SsapTransport:
    """Connects to `ssap://host:port`. If there is a token, it is sent as the credentials of a JOIN."""

    is_resumable = True

    def __init__(self, address: str, question: str, token: str, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(address)
        if parts.scheme != "ssap" or not parts.hostname or parts.path:
            raise ConfigError("C411", f"{address!r} is not an SSAP address", f"write ssap://127.0.0.1:{DEFAULT_PORT}")
        self._address = address
        self._host, self._port = parts.hostname, parts.port or DEFAULT_PORT
        self._question = question
        self._token = token
        self._tls = tls
        self._node = f"tidegate-{secrets.token_hex(6)}"

    async def open(self, subscription: str, sequence: int) -> SsapLink:
        try:
            return await self._open(subscription, sequence)
        except KnowledgeError as error:
            if not subscription or error.code != _NO_SUBSCRIPTION:
                raise
        return await self._open("", 0)

    async def _open(self, subscription: str, sequence: int) -> SsapLink:
        try:
            reader, writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls, limit=MESSAGE_BYTES_MAX
            )
        except OSError as error:
            raise Unavailable(
                "U701", f"no broker answers at {self._address} ({error})", "start one with: tidegate serve"
            ) from error
        link = SsapLink(reader, writer, self._node, self._question)
        try:
            if self._token:
                link.join(self._token)
                await link.confirmed()
            link.subscribe(subscription, sequence)
            await link.confirm_subscription(sequence)
        except BaseException:
            link.close(is_final=False)
            raise
        return link


class SsapLink:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, node: str, question: str) -> None:
        self.opened = Opened("", 0)
        self._reader = reader
        self._writer = writer
        self._node = node
        self._question = f'<parameter name="type">sparql</parameter>{_parameter("query", question)}'

    def join(self, token: str) -> None:
        self._send("JOIN", 0, _parameter("credentials", token))

    def subscribe(self, subscription: str, sequence: int) -> None:
        resuming = _parameter("subscription_id", subscription) + _parameter("ind_sequence", str(sequence))
        self._send("SUBSCRIBE", 0, self._question + (resuming if subscription else ""))

    async def confirmed(self) -> _Message:
        message = await self._read()
        message.raise_if_refused()
        return message

    async def confirm_subscription(self, sequence: int) -> None:
        message = await self.confirmed()
        is_resumed = message.sequence is not None and message.status == _SUCCESS
        self.opened = Opened(
            message.text("subscription_id"),
            message.sequence or 0,
            None if is_resumed else message.rows("results"),
            message.hints,
        )

    def ask(self, check: int) -> None:
        self._send("QUERY", check, self._question)

    async def read(self) -> Heard:
        while True:
            message = await self._read()
            match message.kind, message.transaction:
                case "CONFIRM", "QUERY":
                    try:
                        message.raise_if_refused()
                    except Overloaded as error:
                        return Refused(message.check, error)
                    return Checked(message.check, message.sequence, message.rows("results"), message.hints)
                case "INDICATION", "SUBSCRIBE":
                    return Indicated(
                        message.sequence or 0,
                        message.rows("new_results"),
                        message.rows("obsolete_results"),
                        int(message.number("merged") or 0),
                        message.number("spread_s"),
                    )
                case "INDICATION", "UNSUBSCRIBE":
                    raise lost(f"the broker ended the subscription: {message.status}")

    def close(self, *, is_final: bool) -> None:
        if is_final and not self._writer.is_closing():
            self._send("UNSUBSCRIBE", 0, _parameter("subscription_id", self.opened.subscription))
            self._writer.close()
        else:
            self._writer.transport.abort()

    def _send(self, transaction: str, number: int, parameters: str) -> None:
        self._writer.write(
            f"<SSAP_message><node_id>{self._node}</node_id><space_id>{SPACE}</space_id>"
            f"<transaction_type>{transaction}</transaction_type><message_type>REQUEST</message_type>"
            f"<transaction_id>{number}</transaction_id>{parameters}</SSAP_message>".encode()
        )

    async def _read(self) -> _Message:
        try:
            text = (await self._reader.readuntil(_END)).lstrip()
            # A document type may declare entities that expand to gigabytes.
            if _DECLARATIONS in text:
                raise lost("the broker sent a document type, which is not allowed")
            return _Message(ElementTree.fromstring(text))  # noqa: S314
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise lost(str(error)) from error
        except ElementTree.ParseError as error:
            raise lost(f"the broker's message is not SSAP: {error}") from error


class _Message:
    """A CONFIRM or an INDICATION of the broker."""

    def __init__(self, element: ElementTree.Element) -> None:
        self.kind = element.findtext("message_type", "")
        self.transaction = element.findtext("transaction_type", "")
        number = element.findtext("transaction_id", "")
        self.check = int(number) if number.isdecimal() else 0
        self._parameters = {each.get("name", ""): each for each in element.iter("parameter")}

    @property
    def status(self) -> str:
        return self.text("status")

    @property
    def sequence(self) -> int | None:
        number = self.number("ind_sequence")
        return None if number is None else int(number)

    @property
    def hints(self) -> Hints:
        return Hints(
            processing_s=self.number("processing_s"),
            delay_s=self.number("delay_s_max"),
            slot_s=self.number("interval_s"),
        )

    def text(self, name: str) -> str:
        return ((self._parameters[name].text or "") if name in self._parameters else "").strip()

    def number(self, name: str) -> float | None:
        try:
            return float(self.text(name))
        except ValueError:
            return None

    def rows(self, name: str) -> list[Row]:
        if name not in self._parameters:
            return []
        found = self._parameters[name]
        truths: list[Row] = [each.text == "true" for each in found.iter(f"{_SPARQL}boolean")]
        return truths + [_row(each) for each in found.iter(f"{_SPARQL}result")]

    def raise_if_refused(self) -> None:
        if self.status not in (_SUCCESS, _RESET):
            raise self._error()

    def _error(self) -> TidegateError:
        why = self.text("error") or self.status
        code = re.search(r"\b[A-Z][0-9]{3}\b", why)
        if self.status == _OUT_OF_RESOURCES and (code is None or code[0].startswith("L")):
            return Overloaded(
                code[0] if code else "K161",
                f"the broker refused: {why}",
                "retry later",
                retry_after_s=self.number("retry_after_s") or RETRY_AFTER_S,
            )
        if code is not None and code[0].startswith("K"):
            return KnowledgeError(code[0], f"the broker refused: {why}", "see the broker's reason")
        if code is not None:
            return to_exception(ErrorBody(code[0], f"the broker refused: {why}", "see the broker's reason"))
        return KnowledgeError("K160", f"the SSAP broker refused: {why or 'no reason given'}", "see the broker's log")


def _row(result: ElementTree.Element) -> dict[str, Any]:
    """Returns a result row in the form of SPARQL's JSON."""
    return {binding.get("name", ""): _term(binding[0]) for binding in result.iter(f"{_SPARQL}binding") if len(binding)}


def _term(element: ElementTree.Element) -> dict[str, str]:
    given = {"datatype": element.get("datatype"), "xml:lang": element.get(_LANGUAGE)}
    term = {"type": element.tag.removeprefix(_SPARQL), "value": element.text or ""}
    return term | {name: value for name, value in given.items() if value is not None}


def _parameter(name: str, text: str) -> str:
    return f'<parameter name="{name}">{escape(text)}</parameter>'
