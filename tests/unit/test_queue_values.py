"""Records, receipts, settings and costs of queues: values survive a round trip, and errors name a remedy."""

from __future__ import annotations

import asyncio
import contextlib
from zlib import crc32

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import ConflictingQueue, FilterError, QueueError
from tidegate.messages import NewMessage, Record
from tidegate.queues.costs import Costs, Timed
from tidegate.queues.dead_letters import DELIVERIES, REASON, from_dead_letter, to_dead_letter
from tidegate.queues.definition import (
    FED_BYTES_MIN,
    FIELDS,
    HELP,
    Definition,
    QueueSettings,
    check_change,
    check_name,
    parse_settings,
)
from tidegate.queues.enqueue_controller import identity
from tidegate.queues.records import decode_record, group_of, seal, unseal
from tidegate.queues.store import Receipt, is_alone

TEXTS = st.text(max_size=40)
HEADERS = st.dictionaries(st.text(min_size=1, max_size=10), TEXTS, max_size=3)
RECORDS = st.builds(
    Record,
    group=TEXTS,
    enqueued_at=st.floats(0, 1e12),
    body=st.recursive(st.none() | st.integers(-(2**63), 2**63 - 1) | TEXTS, st.lists, max_leaves=5).map(
        lambda body: msgspec.Raw(msgspec.msgpack.encode(body))
    ),
    device=TEXTS,
    sequence=st.integers(0, 2**63 - 1),
    headers=HEADERS,
)


@given(RECORDS)
def test_a_sealed_record_comes_out_as_it_went_in(record: Record) -> None:
    sealed = seal(record)
    body = unseal(sealed)
    assert body is not None
    assert decode_record(body) == record
    assert group_of(sealed) == record.group


@given(RECORDS, st.data())
def test_a_record_that_was_spoilt_is_noticed(record: Record, data: st.DataObject) -> None:
    sealed = bytearray(seal(record))
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= data.draw(st.integers(1, 255))
    assert unseal(bytes(sealed)) is None
    group_of(bytes(sealed))
    assert unseal(bytes(sealed[:place])) is None


@given(st.binary(max_size=60))
def test_any_bytes_are_sound_only_with_their_checksum(sealed: bytes) -> None:
    is_sound = len(sealed) > 4 and int.from_bytes(sealed[:4], "little") == crc32(sealed[4:])
    assert (unseal(sealed) is not None) == is_sound
    assert isinstance(group_of(sealed), str), "bytes that are no record have no group, and do not crash the reader"


@given(RECORDS)
def test_a_dead_letter_tells_its_history_and_comes_back_as_it_was(record: Record) -> None:
    dead = to_dead_letter(seal(record), "alerts", 7, 5, 1000.0)
    body = unseal(dead)
    assert body is not None
    headers = decode_record(body).headers
    assert headers[DELIVERIES] == "5"
    assert "5 times" in headers[REASON]
    assert from_dead_letter(dead) == seal(record)


@given(st.text(max_size=30))
def test_a_text_is_a_receipt_or_refused(text: str) -> None:
    with contextlib.suppress(QueueError):
        assert Receipt.parse(text).physical == int(text.split(".")[0])


@given(st.text(max_size=20), st.integers(0, 2**63), st.text(max_size=20), st.integers(0, 2**63))
def test_different_messages_have_different_identities(a: str, i: int, b: str, j: int) -> None:
    assert (identity(a, i) == identity(b, j)) == ((a, i) == (b, j))


class TestDefinitions:
    def test_every_setting_is_explained(self) -> None:
        assert FIELDS.keys() == HELP.keys()

    @pytest.mark.parametrize("name", ["", "a b", "a.b", "ü", "x" * 101, "a/b", "{a}"])
    def test_a_bad_name_is_refused(self, name: str) -> None:
        with pytest.raises(QueueError, match="Q902"):
            check_name(name)

    @pytest.mark.parametrize(
        "settings",
        [
            {"colour": "red"},
            {"physical_queues": 0},
            {"physical_queues": 65},
            {"method": "magic"},
            {"durability": "paper"},
            {"max_deliveries": -1},
            {"messages_max": 0},
            {"bytes_max": -5},
            {"linger_s": -1},
            {"sleep_s": 0},
            {"policy": "disconnect"},
            [],
            "wakeup",
        ],
        ids=str,
    )
    def test_a_bad_setting_is_refused(self, settings: object) -> None:
        with pytest.raises(QueueError, match="Q903"):
            parse_settings(settings)

    def test_a_bad_setting_is_named_with_its_value_and_what_it_may_be(self) -> None:
        for settings, words in (
            ({"physical_queues": 65}, "physical_queues cannot be 65.*from 1 to 64"),
            ({"sleep_s": "long"}, "sleep_s cannot be 'long'.*above 0 to 86,400"),
            ({"method": "magic"}, "method cannot be 'magic'.*wakeup, rds, pms or conventional"),
            ({"colour": "red"}, "no queue setting 'colour'.*physical_queues"),
        ):
            with pytest.raises(QueueError, match=words):
                parse_settings(settings)

    def test_a_bad_filter_is_refused_at_its_column(self) -> None:
        with pytest.raises(FilterError):
            parse_settings({"filter": "NO2>>3"})

    def test_a_queue_that_a_filter_fills_has_room_for_the_largest_notification(self) -> None:
        least = 3 * FED_BYTES_MIN
        with pytest.raises(QueueError, match=f"Q903.*{least}"):
            parse_settings({"filter": "*", "physical_queues": 3, "bytes_max": least - 1})
        assert parse_settings({"filter": "*", "physical_queues": 3, "bytes_max": least}).bytes_max == least
        assert parse_settings({"bytes_max": 1}).bytes_max == 1

    def test_what_would_move_messages_cannot_be_changed(self) -> None:
        before = Definition("a", QueueSettings(durability="fsync"))
        check_change(before, QueueSettings(durability="fsync", method="rds", messages_max=5))
        for after in (QueueSettings(durability="fsync", physical_queues=5), QueueSettings(durability="memory")):
            with pytest.raises(ConflictingQueue, match="Q904"):
                check_change(before, after)


class TestSuspects:
    """Whatever the bound is, the last delivery of a failing message contains no other message."""

    @pytest.mark.parametrize("max_deliveries", range(2, 12))
    def test_the_last_delivery_is_alone_and_the_first_is_not(self, max_deliveries: int) -> None:
        assert is_alone(max_deliveries, max_deliveries)
        assert not is_alone(1, max_deliveries)

    def test_without_a_bound_what_failed_twice_is_alone(self) -> None:
        assert [is_alone(delivery, 0) for delivery in (1, 2, 3, 4)] == [False, False, True, True]


def test_unit_costs_are_found_again_from_what_was_measured() -> None:
    costs = Costs()
    for count in [1, 5, 20, 100] * 50:
        costs.hit(count, 0.002 + 0.0001 * count)
        costs.missed(0.003)
        costs.enqueued(count, 0.00005 * count)
        costs.monitored(10, 0.01)
    units = costs.units()
    assert units.hit_s == pytest.approx(0.002, rel=1e-6)
    assert units.hit_message_s == pytest.approx(0.0001, rel=1e-6)
    assert (units.miss_s, units.enqueue_s, units.monitor_s) == pytest.approx((0.003, 0.00005, 0.001))
    predicted = units.predict(enqueued=4000, hits=200, messages=4000, misses=50, monitored=20)
    assert predicted == pytest.approx(4000 * 0.00005 + 200 * 0.002 + 4000 * 0.0001 + 50 * 0.003 + 20 * 0.001)


@pytest.mark.parametrize("outcome", ["done", ValueError("failed"), asyncio.CancelledError()], ids=repr)
def test_only_work_is_timed_and_whatever_happens_is_passed_on(
    outcome: str | BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock here moves while a task works, or when all wait."""
    now_s = [0.0]
    monkeypatch.setattr("tidegate.queues.costs.time.perf_counter", lambda: now_s[0])

    async def work(waits_for: asyncio.Future[str]) -> str:
        now_s[0] += 1.0
        try:
            return await waits_for
        finally:
            now_s[0] += 2.0

    async def scenario() -> None:
        waits_for: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        timed = Timed(work(waits_for))

        async def wait() -> str:
            return await timed

        task = asyncio.get_running_loop().create_task(wait())
        await asyncio.sleep(0)
        now_s[0] += 100.0
        if isinstance(outcome, str):
            waits_for.set_result(outcome)
            assert await task == outcome
        else:
            if isinstance(outcome, asyncio.CancelledError):
                task.cancel()
            else:
                waits_for.set_exception(outcome)
            with pytest.raises(type(outcome)):
                await task
        assert timed.seconds == 3.0

    asyncio.run(scenario())


def test_costs_of_nothing_are_nothing() -> None:
    assert Costs().units().predict(1, 1, 1, 1, 1) == 0


def test_a_message_without_a_body_is_another_thing_than_one_with_null() -> None:
    assert NewMessage(msgspec.Raw(msgspec.msgpack.encode(None))).body
