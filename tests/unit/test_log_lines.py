"""One event is one log line, whatever characters its names contain."""

from __future__ import annotations

import io
import logging

from hypothesis import given
from hypothesis import strategies as st

from tidegate.broker.log_lines import FORMAT, LineFormatter, one_line

FORGED = "sensor\n2026-01-01 00:00:00,000 CRITICAL tidegate.broker.assembly all is lost\x1b[2J\r"


def logged(name: str, error: Exception | None = None) -> str:
    stream = io.StringIO()
    logger = logging.Logger("tidegate.test")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(FORMAT))
    logger.addHandler(handler)
    logger.error("connection closed publisher=%s", name, exc_info=error)
    return stream.getvalue()


@given(st.text())
def test_a_message_is_one_line_without_controls(name: str) -> None:
    line = logged(name)
    assert line.endswith("\n")
    assert len(line.splitlines()) == 1
    assert not any(ord(each) < 32 or 127 <= ord(each) < 160 for each in line[:-1])


def test_what_is_harmless_stays_as_it_is() -> None:
    assert one_line("estación 28079004: 😀 \\n") == "estación 28079004: 😀 \\n"


def test_a_forged_line_is_seen_as_what_it_is() -> None:
    assert "sensor\\n2026-01-01" in logged(FORGED)
    assert "\\x1b[2J" in logged(FORGED)


def test_no_line_of_a_traceback_begins_like_one_of_ours() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        first, *others = logged("sensor", error).splitlines()
    assert "ERROR tidegate.test" in first
    assert any("all is lost" in line for line in others)
    assert all(line.startswith("  ") for line in others)
