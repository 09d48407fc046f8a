"""`tidegate queue` and `tidegate sub --name`, from outside: their output, their effects, and their exit codes."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest
from broker_checks import wait_until
from broker_process import BrokerProcess
from command import Outcome, Running, tidegate

from tidegate import SyncQueue, connect_sync
from tidegate.queues.definition import FIELDS


def queue(broker: BrokerProcess, *arguments: str, stdin: str = "") -> Outcome:
    return tidegate("queue", *arguments, "--address", broker.native, stdin=stdin)


def sub(broker: BrokerProcess, *arguments: str) -> Outcome:
    return tidegate("sub", *arguments, "--address", broker.native)


@pytest.fixture
def name(broker: BrokerProcess) -> str:
    name = f"q-{secrets.token_hex(6)}"
    made = queue(broker, "create", name, "--physical-queues", "1", "--durability", "os")
    assert made.code == 0, made.err
    return name


def stats(broker: BrokerProcess, name: str) -> dict[str, Any]:
    (statistics,) = queue(broker, "stats", name).lines
    assert isinstance(statistics, dict)
    return statistics


class TestQueue:
    def test_create_takes_every_setting_and_shows_them(self, broker: BrokerProcess) -> None:
        name = f"q-{secrets.token_hex(6)}"
        flags = ("--filter", "NO2>200", "--method", "rds", "--sleep-s", "0.25", "--max-deliveries", "3")
        (made,) = queue(broker, "create", name, *flags).lines
        assert made["name"] == name
        chosen = {"filter": "NO2>200", "method": "rds", "sleep_s": 0.25, "max_deliveries": 3}
        assert made["settings"].items() >= chosen.items()
        text = tidegate("queue", "create", "--help").out
        assert all("--" + setting.replace("_", "-") in text for setting in FIELDS)

    def test_what_is_put_is_taken_and_gone(self, broker: BrokerProcess, name: str) -> None:
        put = queue(
            broker, "put", name, '{"NO2": 212}', "--group", "g", "--device", "d", "--sequence", "7", "--header", "k=v=w"
        )
        assert (put.code, put.lines) == (0, [{"accepted": 1}])
        assert "put 1 message, all acknowledged" in put.err
        (taken,) = queue(broker, "take", name).lines
        assert taken.pop("enqueued_at") > 0
        assert taken == {
            "body": {"NO2": 212},
            "delivery": 1,
            "queue": 0,
            "sequence": 1,
            "headers": {"k": "v=w"},
            "group": "g",
            "device": "d",
            "device_sequence": 7,
        }
        assert stats(broker, name)["messages"] == 0

    def test_what_is_put_again_under_its_name_is_kept_once(self, broker: BrokerProcess, name: str) -> None:
        for _ in range(2):
            put = queue(broker, "put", name, "-", "--device", "d", "--sequence", "1", stdin="1\n2\n3\n")
            assert put.lines == [{"accepted": 3}]
        assert "3 of them were duplicates" in put.err
        assert stats(broker, name)["messages"] == 3

    @pytest.mark.parametrize(
        ("value", "body"), [("42", 42), ("plain text", "plain text"), ('"42"', "42"), ("[1, null]", [1, None])]
    )
    def test_put_reads_json_and_takes_anything_else_as_text(
        self, broker: BrokerProcess, name: str, value: str, body: Any
    ) -> None:
        assert queue(broker, "put", name, value).code == 0
        assert [line["body"] for line in queue(broker, "take", name).lines] == [body]

    def test_put_reads_json_lines_as_they_come(self, broker: BrokerProcess, name: str) -> None:
        with (
            connect_sync(broker.native) as connection,
            Running("queue", "put", name, "-", "--address", broker.native) as running,
        ):
            for n in range(3):
                running.write(json.dumps({"live": n}) + "\n\n")
                messages = connection.queue(name).take()
                assert [message.body for message in messages] == [{"live": n}]
            assert running.finish().lines == [{"accepted": 3}]

    def test_put_takes_many_lines(self, broker: BrokerProcess, name: str) -> None:
        put = queue(broker, "put", name, "-", stdin="".join(f"{n}\n" for n in range(5000)))
        assert put.lines == [{"accepted": 5000}]
        taken = queue(broker, "take", name, "--max", "10000")
        assert [line["body"] for line in taken.lines] == list(range(5000))

    def test_put_waits_for_room(self, broker: BrokerProcess, name: str) -> None:
        queue(broker, "create", name, "--messages-max", "1", "--physical-queues", "1")
        queue(broker, "put", name, "1")
        refused = queue(broker, "put", name, "2")
        assert refused.code != 0
        assert "L608" in refused.err
        with Running("queue", "put", name, "2", "--wait", "60", "--address", broker.native) as running:
            assert [line["body"] for line in queue(broker, "take", name).lines] == [1]
            assert running.finish().lines == [{"accepted": 1}]
        assert [line["body"] for line in queue(broker, "take", name).lines] == [2]

    def test_take_keep_leaves_them(self, broker: BrokerProcess, name: str) -> None:
        queue(broker, "put", name, "-", stdin="1\n2\n")
        assert len(queue(broker, "take", name, "--keep").lines) == 2
        assert [line["delivery"] for line in queue(broker, "take", name).lines] == [2, 2]
        empty = queue(broker, "take", name, "--wait", "0.1")
        assert (empty.code, empty.out) == (0, "")
        assert "no message in" in empty.err

    def test_list_stats_redrive_and_drop(self, broker: BrokerProcess, name: str) -> None:
        queue(broker, "put", name, "1")
        assert {line["name"]: line["messages"] for line in queue(broker, "list").lines}[name] == 1
        assert stats(broker, name)["waiting"] == 1
        assert queue(broker, "redrive", name).lines == [{"moved": 0}]
        assert queue(broker, "drop", name).code == 0
        assert name not in [line["name"] for line in queue(broker, "list").lines]

    def test_people_get_tables(self, broker: BrokerProcess, name: str) -> None:
        queue(broker, "put", name, '{"escape": "\\u001b[2J"}')
        for arguments, words in (
            (("list",), "1 messages    0 % full   wakeup"),
            (("stats", name), "hit_rate"),
            (("take", name), '{"escape":"\\u001b[2J"}'),
        ):
            with Running("queue", *arguments, "--address", broker.native, on_terminal=True) as running:
                shown = running.finish().out
            assert words in shown
            assert "\x1b" not in shown

    @pytest.mark.parametrize(
        ("arguments", "code"),
        [
            (["take", "nowhere"], "Q901"),
            (["put", "nowhere", "1"], "Q901"),
            (["stats", "nowhere"], "Q901"),
            (["drop", "nowhere"], "Q901"),
            (["redrive", "nowhere"], "Q901"),
            (["create", "dots.are.ours"], "Q902"),
            (["create", "q", "--method", "magic"], "Q903"),
            (["create", "q", "--physical-queues", "many"], "Q903"),
            (["create", "q", "--filter", "NO2>"], "F102"),
            (["put", "q", "1", "--device", "d"], "Q905"),
            (["put", "q", "1", "--header", "k"], "C417"),
            (["put", "q", "-"], "P314"),
            (["take", "q", "--keep", "--follow"], "C417"),
            (["take", "q", "--max", "0"], "Q90"),
        ],
    )
    def test_errors_name_their_cure(self, broker: BrokerProcess, arguments: list[str], code: str) -> None:
        done = queue(broker, *arguments, stdin="{not json")
        assert (done.code, done.out) == (2, "")
        assert code in done.err
        assert "Traceback" not in done.err

    def test_no_broker(self) -> None:
        done = tidegate("queue", "list", "--address", "tidegate://127.0.0.1:1")
        assert done.code == 2
        assert "start one with: tidegate serve" in done.err


class TestTakeFollow:
    def test_deletes_what_it_printed_and_leaves_the_rest_when_interrupted(
        self, broker: BrokerProcess, name: str
    ) -> None:
        with (
            connect_sync(broker.native) as connection,
            Running("queue", "take", name, "--follow", "--address", broker.native) as running,
        ):
            mine: SyncQueue = connection.queue(name)
            mine.put(["first", "second"])
            running.wait_for("second")
            wait_until(lambda: bool(mine.stats()["messages"] == 0))
            running.interrupt()
            done = running.finish()
            assert (done.code, done.err) == (130, "")
            mine.put("third")
            assert mine.stats()["parked"] == 0
            assert [message.body for message in mine.take()] == ["third"]

    def test_whose_reader_has_gone_gives_back_what_it_did_not_print(self, broker: BrokerProcess, name: str) -> None:
        with (
            connect_sync(broker.native) as connection,
            Running("queue", "take", name, "--follow", "--address", broker.native) as running,
        ):
            mine = connection.queue(name)
            mine.put("first")
            running.wait_for("first")
            wait_until(lambda: bool(mine.stats()["messages"] == 0))
            running.close_output()
            mine.put(["second", "third"])
            assert running.process.wait(20) == 0
            wait_until(lambda: bool(mine.stats()["waiting"] == 2))


class TestSubByName:
    def test_goes_on_where_it_ended(self, broker: BrokerProcess) -> None:
        name = f"s-{secrets.token_hex(6)}"
        with Running("sub", "n", "--name", name, "--count", "1", "--address", broker.native) as running:
            running.wait_for_note("press Ctrl-C to stop\n")
            with connect_sync(broker.native) as connection:
                connection.publish([{"n": 1}, {"n": 2}, {"n": 3}])
            assert [line["notification"] for line in running.finish().lines] == [{"n": 1}]
        assert [line["notification"] for line in sub(broker, "--name", name, "--count", "2").lines] == [
            {"n": 2},
            {"n": 3},
        ]
        assert sub(broker, "--name", name, "--forget").code == 0
        for again in ((), ("--forget",)):
            gone = sub(broker, "--name", name, *again)
            assert gone.code == 2
            assert "there is no durable subscription" in gone.err

    def test_interrupted_has_what_it_printed_and_not_more(self, broker: BrokerProcess) -> None:
        name = f"s-{secrets.token_hex(6)}"
        with Running("sub", "n", "--name", name, "--address", broker.native) as running:
            running.wait_for_note("press Ctrl-C to stop\n")
            with connect_sync(broker.native) as connection:
                connection.publish([{"n": 1}, {"n": 2}])
                running.wait_for('{"n":2}')
                running.interrupt()
                done = running.finish()
                assert (done.code, done.err) == (130, "")
                connection.publish({"n": 3})
        assert [line["notification"] for line in sub(broker, "--name", name, "--count", "1").lines] == [{"n": 3}]

    @pytest.mark.parametrize("arguments", [[], ["--forget"], ["n", "--name", "s", "--forget"], ["n", "--forget"]])
    def test_says_what_goes_together(self, broker: BrokerProcess, arguments: list[str]) -> None:
        done = sub(broker, *arguments)
        assert done.code == 2
        assert "C417" in done.err
