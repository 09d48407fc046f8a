"""The commands, from outside: their output for people and for programs, their exit codes, and their help texts."""

from __future__ import annotations

import argparse
import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from broker_checks import WAIT_S
from broker_process import BrokerProcess
from command import TIMEOUT_S, Outcome, Running, command_line, tidegate

from tidegate import connect_sync
from tidegate.commands.cli import command_parser, main

HOURS = [f"{hour:02}" for hour in range(1, 25)]
CSV_HEADER = "provincia;municipio;estacion;magnitud;punto_muestreo;ano;mes;dia;" + ";".join(f"h{h};v{h}" for h in HOURS)


def pub(broker: BrokerProcess, *arguments: str, stdin: str = "") -> Outcome:
    return tidegate("pub", *arguments, "--address", broker.native, stdin=stdin)


def publish_and_read(broker: BrokerProcess, *arguments: str, stdin: str = "", count: int = 1) -> list[dict[str, Any]]:
    """Runs `tidegate pub`, and returns what a subscriber to everything receives."""
    with connect_sync(broker.native) as connection, connection.subscribe("*") as subscription:
        done = pub(broker, *arguments, stdin=stdin)
        assert (done.code, done.lines) == (0, [{"accepted": count}]), done.err
        taken: list[dict[str, Any]] = []
        while len(taken) < count:
            taken += [delivery.notification for delivery in subscription.take(WAIT_S)]
        return taken


class TestPub:
    @pytest.mark.parametrize(
        ("attributes", "notification"),
        [
            (["NO2=212", "station=28079004"], {"NO2": 212, "station": 28079004}),
            (["x=1.5", "y=-2", "z=1e3"], {"x": 1.5, "y": -2, "z": 1000.0}),
            (["open=true", "shut=false"], {"open": True, "shut": False}),
            (["post=08001"], {"post": "08001"}),
            (["room='12'", "open='true'", "it='it''s'"], {"room": "12", "open": "true", "it": "it's"}),
            (["name=San Martín", "formula=a=b"], {"name": "San Martín", "formula": "a=b"}),
        ],
        ids=["whole numbers", "fractions", "booleans", "a leading zero", "quotes", "bare words"],
    )  # fmt: skip
    def test_gives_values_the_type_they_look_like(
        self, broker: BrokerProcess, attributes: list[str], notification: dict[str, Any]
    ) -> None:
        assert publish_and_read(broker, *attributes) == [notification]

    def test_a_number_still_has_a_prefix(self, broker: BrokerProcess) -> None:
        with connect_sync(broker.native) as connection, connection.subscribe("station^=2807") as subscription:
            pub(broker, "station=28079004")
            assert subscription.take(WAIT_S)[0].notification == {"station": 28079004}

    def test_carries_a_payload(self, broker: BrokerProcess, tmp_path: Path) -> None:
        (tmp_path / "image").write_bytes(b"\x00\xff")
        (got,) = publish_and_read(broker, "camera=1", "--payload", str(tmp_path / "image"))
        assert got == {"camera": 1, "$payload": b"\x00\xff"}

    def test_reads_json_lines(self, broker: BrokerProcess) -> None:
        lines = ['{"n": 1, "name": "é"}', "", '{"n": 2.5, "open": true}\r', '{"n": 3, "$payload": "AP8="}']
        assert publish_and_read(broker, "-", stdin="\n".join(lines), count=3) == [
            {"n": 1, "name": "é"},
            {"n": 2.5, "open": True},
            {"n": 3, "$payload": b"\x00\xff"},
        ]

    def test_publishes_a_line_when_it_comes_not_when_the_input_ends(self, broker: BrokerProcess) -> None:
        with (
            connect_sync(broker.native) as connection,
            connection.subscribe("live") as subscription,
            Running("pub", "-", "--address", broker.native) as running,
        ):
            for n in range(3):
                running.write(json.dumps({"live": n}) + "\n")
                assert subscription.take(WAIT_S)[0].notification == {"live": n}
            assert running.finish().lines == [{"accepted": 3}]

    @pytest.mark.parametrize(
        ("arguments", "stdin", "code", "words"),
        [
            (["NO2"], "", "N213", "write NAME=VALUE, such as NO2=212"),
            (["=3"], "", "N213", "'=3'"),
            (["a=1", "a=2"], "", "N210", "a is given twice"),
            (["a=1e999"], "", "N208", "not a finite number"),
            (["a=123456789012345678901"], "", "N207", "send large integers as strings"),
            (["$x=1"], "", "N204", "reserved"),
            (["a=1", "--payload", "/nonexistent"], "", "N214", "name a readable file"),
            (["-"], '{"a": 1}\n{"a": ', "P314", "line 2 is not JSON"),
            (["-"], "[1]", "P315", "line 1 is not an object"),
            (["-"], '{"a": 1}\n{"a": 1, "a": 2}', "N210", "line 2: a name is given twice"),
            (["-"], '\n{"a": null}', "N205", "line 2: 'a' is null"),
            (["-"], '{"a": 1, "$payload": "?"}', "N209", "line 1: the payload is not base64"),
        ],
    )
    def test_refuses_with_code_and_cure(
        self, broker: BrokerProcess, arguments: list[str], stdin: str, code: str, words: str
    ) -> None:
        done = pub(broker, *arguments, stdin=stdin)
        assert (done.code, done.out) == (2, "")
        assert code in done.err
        assert words in done.err
        assert "Traceback" not in done.err

    def test_tells_a_person_how_it_went(self, broker: BrokerProcess) -> None:
        with Running("pub", "a=1", "--address", broker.native, on_terminal=True) as running:
            done = running.finish()
        assert (done.code, done.out) == (0, "")
        assert "published 1 notification, all acknowledged" in done.err


class TestSub:
    def test_prints_json_lines_to_a_program(self, broker: BrokerProcess) -> None:
        with Running("sub", "n", "--count", "2", "--address", broker.native) as running:
            running.wait_for_note("subscribed to n")
            with connect_sync(broker.native, name="sensor") as connection:
                connection.publish([{"n": 1, "name": "é"}, {"m": 0}, {"n": 2, "$payload": b"\x00\xff"}])
            done = running.finish()
        assert done.code == 0
        assert [line["notification"] for line in done.lines] == [{"n": 1, "name": "é"}, {"n": 2, "$payload": "AP8="}]
        assert [line["sequence"] for line in done.lines] == [1, 3]
        assert all(line["publisher"].startswith("sensor-") for line in done.lines)

    def test_prints_attributes_to_a_person(self, broker: BrokerProcess) -> None:
        with Running("sub", "n", "--count", "1", "--address", broker.native, on_terminal=True) as running:
            running.wait_for_note("press Ctrl-C to stop\n")
            with connect_sync(broker.native) as connection:
                connection.publish({"n": 1, "name": "San Martín", "id": "12", "open": True, "$payload": b"123"})
            done = running.finish()
        assert done.out == "n=1 name='San Martín' id='12' open=true (3 bytes of payload)\r\n"

    def test_does_not_let_a_publisher_steer_the_terminal(self, broker: BrokerProcess) -> None:
        with Running("sub", "n", "--count", "1", "--address", broker.native, on_terminal=True) as running:
            running.wait_for_note("press Ctrl-C to stop\n")
            with connect_sync(broker.native) as connection:
                connection.publish({"n": 1, "\x1b[2J": "\x1b]0;owned\x07"})
            done = running.finish()
        assert "\x1b" not in done.out
        assert "\x07" not in done.out

    @pytest.mark.parametrize("on_terminal", [False, True], ids=["on a pipe", "on a terminal"])
    def test_ends_quietly_with_ctrl_c(self, broker: BrokerProcess, on_terminal: bool) -> None:
        with Running("sub", "n", "--address", broker.native, on_terminal=on_terminal) as running:
            running.wait_for_note("press Ctrl-C to stop\n")
            running.interrupt()
            assert running.finish() == (130, "", "")

    def test_ends_with_ctrl_c_though_the_broker_has_gone(self) -> None:
        with BrokerProcess() as mortal, Running("sub", "n", "--address", mortal.native) as running:
            running.wait_for_note("press Ctrl-C to stop\n")
            mortal.kill()
            running.interrupt()
            assert running.finish() == (130, "", "")

    def test_ends_quietly_when_its_reader_goes(self, broker: BrokerProcess) -> None:
        with (
            Running("sub", "n", "--address", broker.native) as running,
            connect_sync(broker.native) as connection,
        ):
            running.wait_for_note("press Ctrl-C to stop\n")
            connection.publish({"n": 1})
            running.wait_for('"n":1')
            running.close_output()
            connection.publish({"n": 2})
            done = running.finish()
        assert (done.code, done.err) == (0, "")

    def test_a_bad_filter_is_an_error_with_its_column(self) -> None:
        done = tidegate("sub", "NO2 = 200")
        assert done.code == 2
        assert "at column 5" in done.err
        assert "==" in done.err


class TestWhy:
    @pytest.mark.parametrize(("value", "code"), [("212", 0), ("150", 1)])
    def test_exits_by_the_verdict(self, value: str, code: int) -> None:
        done = tidegate("why", "NO2>200;station^=2807", f"NO2={value}", "station=28079004")
        assert done.code == code
        (explanation,) = done.lines
        assert explanation["matches"] is (code == 0)
        assert [constraint["holds"] for constraint in explanation["constraints"]] == [code == 0, True]

    def test_shows_a_person_each_constraint(self) -> None:
        with Running("why", "NO2>200;open", "NO2=150", on_terminal=True) as running:
            done = running.finish()
        assert done.code == 1
        assert done.out.splitlines() == [
            "✗ NO2>200                  NO2 is 150, not above 200",
            "✗ open                     open is absent",
            "does not match",
        ]


class TestTop:
    def test_prints_json_lines_to_a_program(self, broker: BrokerProcess) -> None:
        done = tidegate("top", "--interval", "0.1", "--count", "2", "--address", broker.native)
        assert done.code == 0
        assert len(done.lines) == 2
        for look in done.lines:
            assert look["rates"].keys() >= {"accepted", "delivered", "dropped"}
            assert look["load"]["connection_point"]["sessions"] >= 1

    def test_shows_a_person_a_table(self, broker: BrokerProcess) -> None:
        with Running("top", "--interval", "0.1", "--address", broker.native, on_terminal=True) as running:
            shown = running.wait_for("blocked outboxes")
            running.interrupt()
            assert running.finish().code == 130
        assert "accepted" in shown
        assert "epoch 1" in shown

    def test_looks_at_most_ten_times_a_second(self) -> None:
        assert_refused(tidegate("top", "--interval", "0.01"), "C413")


def assert_refused(done: Outcome, *words: str) -> None:
    """Checks for an error: exit code 2, and a message on standard error without a traceback."""
    assert (done.code, done.out) == (2, "")
    for word in words:
        assert word in done.err
    assert "Traceback" not in done.err


class TestReplay:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        """Returns a file with two hours of one station."""
        cells = ";".join({1: "41;V", 2: "212;T"}.get(hour, ";N") for hour in range(1, 25))
        path = tmp_path / "day.csv"
        path.write_text(f"{CSV_HEADER}\n28;65;14;8;28065014_8_8;2026;05;13;{cells}\n", encoding="utf-8")
        return path

    @pytest.mark.parametrize("pace", [[], ["--hours-per-second", "10"]], ids=["at once", "paced"])
    def test_publishes_the_readings_in_order(self, broker: BrokerProcess, file: Path, pace: list[str]) -> None:
        with connect_sync(broker.native) as connection, connection.subscribe("NO2") as subscription:
            done = tidegate("replay", str(file), *pace, "--address", broker.native)
            assert (done.code, done.lines) == (0, [{"accepted": 2}])
            taken = subscription.take(WAIT_S)
            while len(taken) < 2:
                taken += subscription.take(WAIT_S)
            assert [(d.notification["time"], d.notification["NO2"]) for d in taken] == [
                ("2026-05-13T01:00:00", 41),
                ("2026-05-13T02:00:00", 212),
            ]

    def test_refuses_another_file(self, tmp_path: Path) -> None:
        (tmp_path / "other.csv").write_text("a;b\n1;2\n")
        assert_refused(tidegate("replay", str(tmp_path / "other.csv")), "D802")
        assert_refused(tidegate("replay", str(tmp_path / "absent.csv")), "D801")
        assert_refused(tidegate("replay", "x.csv", "--hours-per-second", "-1"), "C413")


class TestServe:
    def test_tells_a_program_where_it_listens(self, broker: BrokerProcess) -> None:
        assert broker.native == f"tidegate://127.0.0.1:{broker.native_port}"
        assert broker.http == f"http://127.0.0.1:{broker.http_port}"

    def test_tells_a_person_where_it_listens(self, tmp_path: Path) -> None:
        flags = ("--native-port", "0", "--http-port", "0", "--ssap-port", "0", "--data", str(tmp_path))
        with Running("serve", *flags, on_terminal=True) as running:
            shown = running.wait_for("press Ctrl-C to stop")
            running.interrupt()
            assert running.finish().code == 0
        assert "tidegate is ready" in shown
        assert "tidegate://127.0.0.1:" in shown
        assert "http://127.0.0.1:" in shown

    def test_tells_a_person_the_token_that_it_made_up(self, tmp_path: Path) -> None:
        flags = ("--native-port", "0", "--http-port", "0", "--ssap-port", "-1", "--data", str(tmp_path))
        with Running("serve", "--bind", "0.0.0.0", *flags, on_terminal=True) as running:
            shown = running.wait_for("press Ctrl-C to stop")
            running.interrupt()
            done = running.finish()
        assert done.code == 0
        (token,) = re.findall(r"token   (\S+)", shown)
        (page,) = re.findall(r"page    (\S+)", shown)
        assert re.fullmatch(rf"http://{re.escape(socket.gethostname())}:\d+/#token={token}", page)
        assert "use --tls-cert and --tls-key" in shown
        assert token not in done.err

    def test_refuses_a_port_that_is_taken(self, broker: BrokerProcess, tmp_path: Path) -> None:
        flags = ("--native-port", str(broker.native_port), "--http-port", "0", "--data", str(tmp_path))
        done = tidegate("serve", *flags)
        assert_refused(done, "C409", str(broker.native_port), "is another broker already running?")

    @pytest.mark.parametrize(
        ("flags", "code"),
        [
            (["--native-port", "70000"], "C404"),
            (["--drain-s", "soon"], "C404"),
            (["--bind", "0.0.0.0", "--coordinator", "zk://127.0.0.1:1"], "C405"),
            (["--token-file", "/nonexistent"], "C406"),
            (["--tls-cert", "cert.pem"], "C408"),
            (["--config", "/nonexistent.toml"], "C401"),
        ],
    )
    def test_refuses_a_setting_before_it_starts(self, flags: list[str], code: str) -> None:
        assert_refused(tidegate("serve", *flags), code)


class TestConfigCheck:
    def test_shows_every_setting_and_where_it_is_from(self, tmp_path: Path) -> None:
        file = tmp_path / "tidegate.toml"
        file.write_text('native_port = 8000\nlog_level = "debug"\n')
        done = tidegate("config", "check", str(file), environment={"TIDEGATE_NATIVE_PORT": "9000"})
        assert done.code == 0
        (shown,) = done.lines
        assert shown["token"] == "none"
        assert shown["settings"]["native_port"] == {"value": 9000, "source": "TIDEGATE_NATIVE_PORT"}
        assert shown["settings"]["log_level"] == {"value": "debug", "source": str(file)}
        assert shown["settings"]["http_port"] == {"value": 7271, "source": "default"}

    def test_shows_a_person_a_table_and_never_the_token(self) -> None:
        with Running("config", "check", on_terminal=True) as running:
            done = running.finish()
        assert done.code == 0
        assert ["native_port", "7270", "default"] in [line.split() for line in done.out.splitlines()]
        secret = "a very secret token"
        done = tidegate("config", "check", environment={"TIDEGATE_TOKEN": secret})
        assert done.lines[0]["token"] == "set"
        assert secret not in done.out
        assert tidegate("config", "check", environment={"TIDEGATE_BIND": "::"}).lines[0]["token"] == (
            "generated at each start"
        )

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("native_prot = 7270", ["C403", "native_prot", "did you mean native_port?"]),
            ("colour = 3", ["C403", "colour", "config check lists them all"]),
            ('native_port = "7270"', ["C404", "native_port", "port of the native protocol"]),
            ("native_port = 70000", ["C404", "65535"]),
            ("drain_s = 0", ["C404"]),
            ("native_port 7270", ["C402"]),
        ],
    )
    def test_refuses_what_is_wrong(self, tmp_path: Path, text: str, words: list[str]) -> None:
        file = tmp_path / "tidegate.toml"
        file.write_text(text)
        assert_refused(tidegate("config", "check", str(file)), str(file), *words)

    def test_refuses_a_wrong_variable(self) -> None:
        done = tidegate("config", "check", environment={"TIDEGATE_HTTP_PORT": "high"})
        assert_refused(done, "C404", "TIDEGATE_HTTP_PORT")


class TestDemo:
    def test_refuses_a_time_that_makes_no_sense(self) -> None:
        assert_refused(tidegate("demo", "--minutes", "0"), "C413")


def commands_of(parser: argparse.ArgumentParser, *before: str) -> Iterator[tuple[str, ...]]:
    """Yields every command and subcommand of the parser, as a sequence of words."""
    yield before
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands_of(child, *before, name)


EXAMPLES = {
    "": "tidegate sub 'NO2>200;station^=2807'",
    "pub": "tidegate pub NO2=212",
    "sub": "tidegate sub '*'",
    "why": "tidegate why 'NO2>200'",
    "query": "tidegate query 'SELECT ?room ?t { ?room <temperature> ?t }' --follow",
    "insert": "tidegate insert hall temperature 19.5",
    "knowledge dump": "tidegate knowledge dump facts.nq",
    "queue": "tidegate queue take alerts",
    "queue put": "tidegate queue put work 42",
    "queue take": "tidegate queue take work --follow",
}


@pytest.mark.parametrize("command", list(commands_of(command_parser())), ids=" ".join)
def test_every_command_has_a_help_text(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    out, err = capsys.readouterr()
    assert (exit_.value.code, err) == (0, "")
    assert out.startswith(" ".join(["usage: tidegate", *command]))
    assert len(out.split("\n\n")) > 2, "usage alone teaches nothing"


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_teaches_by_example(command: str) -> None:
    done = tidegate(*command.split(), "--help")
    assert (done.code, done.err) == (0, "")
    assert EXAMPLES[command] in done.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_command_ends_on_a_signal_that_its_parent_ignores(broker: BrokerProcess, number: signal.Signals) -> None:
    """A shell starts background jobs with SIGINT ignored, and a child inherits ignored signals."""
    with subprocess.Popen(
        command_line("sub", "*", "--address", broker.native),
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_IGN),
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline(), "it has not subscribed"
        process.send_signal(number)
        try:
            assert process.wait(TIMEOUT_S) in (130, -signal.SIGTERM)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "arguments",
    [[], ["dance"], ["pub"], ["queue"], ["queue", "take"], ["config"], ["serve", "--colour", "red"]],
    ids=str,
)
def test_a_wrong_command_line_is_an_error(arguments: list[str]) -> None:
    done = tidegate(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "usage: tidegate" in done.err


@pytest.mark.parametrize("command", [["pub", "a=1"], ["top"]], ids=lambda command: command[0])
def test_no_broker_is_an_error_with_its_cure(command: list[str]) -> None:
    assert_refused(tidegate(*command, "--address", "tidegate://127.0.0.1:1"), "U701", "start one with: tidegate serve")
    assert_refused(tidegate(*command, "--address", "127.0.0.1:1"), "C411")


def test_the_address_may_come_from_the_environment(broker: BrokerProcess) -> None:
    assert tidegate("pub", "a=1", environment={"TIDEGATE_ADDRESS": broker.native}).code == 0


def test_a_token_may_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    token = "a token of some length"
    (tmp_path / "token").write_text(token + "\n")
    with BrokerProcess("--token-file", str(tmp_path / "token")) as guarded:
        assert pub(guarded, "a=1", "--token-file", str(tmp_path / "token")).code == 0
        assert tidegate("pub", "a=1", "--address", guarded.native, environment={"TIDEGATE_TOKEN": token}).code == 0
        assert_refused(pub(guarded, "a=1"), "A501", "TIDEGATE_TOKEN")
