"""What can go wrong, as one tree. Every error has a stable code, names the value, and proposes a cure.

    TidegateError
    ├── BadInput                what was sent is wrong; sending it again will not help
    │   ├── FilterError         F1xx  the text of a filter
    │   ├── NotificationError   N2xx  an attribute, a value, a size
    │   ├── ProtocolError       P3xx  a frame or a request that breaks its protocol
    │   ├── ConfigError         C4xx  a setting
    │   ├── QueueError          Q9xx  a queue, a message, a receipt
    │   │   ├── NoSuchQueue
    │   │   └── ConflictingQueue
    │   ├── KnowledgeError      K1xx  a triple, a query, an update, a message of SSAP
    │   └── (itself)            D8xx  a file: readings, subscriptions, a saved index
    ├── NotAllowed              A5xx  no or a wrong token, a foreign origin
    ├── Overloaded              L6xx  a limit is reached; `retry_after_s` says when to come back
    └── Unavailable             U7xx  the broker cannot be reached, or is shutting down
        └── FencedWriter        U720  a slice that was declared dead

The codes are the contract: every protocol carries `code`, `message`, `remedy` and, for filters, `column`.
A code is never given a second meaning; docs/protocols.md lists them all.
"""

from __future__ import annotations

from typing import Any, ClassVar


class TidegateError(Exception):
    """An error that a person can act on. `str()` reads as one sentence with code, value and cure."""

    status: ClassVar[int] = 500

    def __init__(self, code: str, message: str, remedy: str, *, column: int | None = None) -> None:
        super().__init__(code, message, remedy)
        self.code = code
        self.message = message
        self.remedy = remedy
        self.column = column

    def __str__(self) -> str:
        place = f" at column {self.column}" if self.column is not None else ""
        return f"{type(self).__name__} {self.code}{place}: {self.message}; {self.remedy}"

    def to_dict(self) -> dict[str, Any]:
        """The body of `{"error": …}` in every protocol."""
        body: dict[str, Any] = {"code": self.code, "message": self.message, "remedy": self.remedy}
        if self.column is not None:
            body["column"] = self.column
        return body


class BadInput(TidegateError):
    """What was sent is wrong; sending it again will not help."""

    status = 400


class FilterError(BadInput):
    """The text of a filter does not say what to match. `column` counts from 1."""


class NotificationError(BadInput):
    """A notification breaks the rules of docs/filters.md: a name, a type, a range or a size."""

    status = 422


class ProtocolError(BadInput):
    """Bytes or a request that break the protocol they came in by."""


class ConfigError(BadInput):
    """A setting that is unknown, of the wrong type, or unsafe."""


class QueueError(BadInput):
    """A queue's name or setting, a message, a receipt or a range that breaks the rules of docs/queues.md."""

    status = 422


class NoSuchQueue(QueueError):
    """There is no queue or named subscription of that name."""

    status = 404


class ConflictingQueue(QueueError):
    """It exists, and is not what is asked for."""

    status = 409


class KnowledgeError(BadInput):
    """A triple, a query, an update or a message that breaks the rules of docs/knowledge.md."""


class NotAllowed(TidegateError):
    """No token, a wrong token, or a page of another origin."""

    status = 401


class Overloaded(TidegateError):
    """A limit is reached. Nothing was accepted; come back after `retry_after_s`."""

    status = 429

    def __init__(self, code: str, message: str, remedy: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(code, message, remedy)
        self.retry_after_s = retry_after_s


class Unavailable(TidegateError):
    """The broker cannot be reached, is shutting down, or did not answer in time."""

    status = 503


class FencedWriter(Unavailable):
    """A slice that was declared dead writes to the registry. Nothing was taken, and nothing will be: it has
    successors."""
