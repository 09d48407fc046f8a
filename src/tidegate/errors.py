"""All errors, as one tree. Every error has a stable code, names the wrong value, and proposes a remedy.

    TidegateError
    ├── BadInput                the request is invalid; sending it again will not help
    │   ├── FilterError         F1xx  the text of a filter
    │   ├── NotificationError   N2xx  an attribute, a value, a size
    │   ├── ProtocolError       P3xx  a frame or a request that violates its protocol
    │   │   └── ForeignFrame    P340  a frame between slices that no slice would send
    │   ├── ConfigError         C4xx  a setting
    │   ├── QueueError          Q9xx  a queue, a message, a receipt
    │   │   ├── NoSuchQueue
    │   │   └── ConflictingQueue
    │   ├── KnowledgeError      K1xx  a triple, a query, an update, a message of SSAP
    │   └── (itself)            D8xx  a file: readings, subscriptions, a saved index
    ├── NotAllowed              A5xx  a missing or wrong token, a foreign origin
    ├── Overloaded              L6xx  a limit is reached; retry after `retry_after_s`
    └── Unavailable             U7xx  the broker cannot be reached, or is shutting down
        └── FencedWriter        U720  a slice that was declared dead

The codes are the contract: every protocol carries `code`, `message`, `remedy` and, for filters, `column`.
A code never changes its meaning; docs/protocols.md lists them all.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar


class TidegateError(Exception):
    """An error that a person can act on. `str()` reads as one sentence with code, value and remedy."""

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
        """Returns the body of `{"error": …}`, the same in every protocol."""
        body: dict[str, Any] = {"code": self.code, "message": self.message, "remedy": self.remedy}
        if self.column is not None:
            body["column"] = self.column
        return body


class BadInput(TidegateError):
    """The request is invalid; sending it again will not help."""

    status = 400


class FilterError(BadInput):
    """The text of a filter is invalid. `column` counts from 1."""


class NotificationError(BadInput):
    """A notification breaks the rules of docs/filters.md: a name, a type, a range or a size."""

    status = 422


class ProtocolError(BadInput):
    """Bytes or a request that violate the protocol of their connection."""


class ForeignFrame(ProtocolError):
    """A frame between slices that no slice of this version would send here. Its channel is closed."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "P340",
            f"invalid frame between slices: {why}",
            "run the same version everywhere; let only slices connect here",
        )


class ConfigError(BadInput):
    """A setting that is unknown, of the wrong type, or unsafe."""


class QueueError(BadInput):
    """A queue's name or setting, a message, a receipt or a range that breaks the rules of docs/queues.md."""

    status = 422


class NoSuchQueue(QueueError):
    """No queue or named subscription has that name."""

    status = 404


class ConflictingQueue(QueueError):
    """A queue or named subscription of that name exists with other settings."""

    status = 409


class KnowledgeError(BadInput):
    """A triple, a query, an update or a message that breaks the rules of docs/knowledge.md."""


class NotAllowed(TidegateError):
    """No token, a wrong token, or a page of another origin."""

    status = 401


class Overloaded(TidegateError):
    """A limit is reached. Nothing was accepted; retry after `retry_after_s`."""

    status = 429

    def __init__(self, code: str, message: str, remedy: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(code, message, remedy)
        self.retry_after_s = retry_after_s


class Unavailable(TidegateError):
    """The broker cannot be reached, is shutting down, or did not answer in time."""

    status = 503


class FencedWriter(Unavailable):
    """A slice that was declared dead tried to write to the registry. The registry rejects all its writes, because
    other slices have replaced it."""


class Refusals:
    """Counts requests that were refused because of a limit, by error code, and keeps the last message of each code.

    The code that enforces a limit notes the refusal here and raises it. `GET /metrics` reports the counts as
    `tidegate_refused_total` with the label `code`. The broker logs summaries: a log line for each refusal would let one
    client fill the disk. Codes are few, so memory is bounded.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._recent: dict[str, tuple[int, str]] = {}

    def note(self, error: TidegateError) -> TidegateError:
        """Counts a refusal and returns it, so that the caller can raise it."""
        self.counts[error.code] += 1
        refused, _message = self._recent.get(error.code, (0, ""))
        self._recent[error.code] = (refused + 1, error.message)
        return error

    def take_recent(self) -> dict[str, tuple[int, str]]:
        """Returns, by code, the number of refusals since the last call and the last message."""
        recent, self._recent = self._recent, {}
        return recent
