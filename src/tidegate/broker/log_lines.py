"""Log lines: exactly one line per event, whatever characters the logged names contain.

Clients choose the names of publishers and queues, paths, and parts of error texts. A line break in one of them could
forge a log line, and an escape sequence could repaint an operator's terminal. The formatter therefore writes control
characters as escapes in every line, and indents the lines of a traceback.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any, Final

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
# Control characters of ASCII and Latin-1, line and paragraph separators, marks that change the direction of text, and
# lone surrogates.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def log_to_stderr(level: int | str) -> None:
    """Sends log records of this level and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(FORMAT))
    logging.basicConfig(handlers=[handler], level=level)


def one_line(text: str) -> str:
    """Returns the text with control characters written as escapes, such as `\\n`."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class LineFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name is logging's
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - the name is logging's
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"  {one_line(line)}" for line in text.splitlines())
