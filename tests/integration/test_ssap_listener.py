"""The SSAP listener over real sockets, used as the libraries of Smart-M3 use it."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest
from ssap_world import (
    TIMEOUT_S,
    Kp,
    SsapWorld,
    graph_of,
    masks,
    parameter,
    replaced,
    sparql,
    status,
    text_of,
    triples_of,
)

from tidegate.knowledge.request_pool import PoolSettings
from tidegate.knowledge.sparql_workers import SparqlLimits

ANY = "http://www.nokia.com/NRC/M3/sib#any"
EVERYTHING = masks((ANY, ANY, ANY))
SUCCESS = "m3:Success"


@pytest.fixture
def world() -> Iterator[SsapWorld]:
    with SsapWorld() as world:
        yield world


def test_a_connection_for_each_operation(world: SsapWorld) -> None:
    """The Python library works like this: send, read to the end tag, close."""
    for kind, parameters in [
        ("JOIN", '<parameter name = "credentials">XYZZY</parameter>'),
        ("INSERT", graph_of("insert_graph", ("Agent X", "rdf:type", "a &amp; b"), ("s", "p", "  5 "))),
        ("REMOVE", graph_of("remove_graph", ("s", ANY, "sib:any"), kind="uri")),
        ("UPDATE", graph_of("insert_graph", ("s", "p", "6")) + graph_of("remove_graph", ("s", "p", "5"))),
    ]:
        with Kp(world) as kp:
            message = kp.ask(kind, parameters)
            assert status(message) == SUCCESS
            assert message.findtext("transaction_type") == kind
            if kind in ("INSERT", "UPDATE"):
                assert parameter(message, "bnodes").find("urilist") is not None
    with Kp(world) as kp:
        assert triples_of(kp.ask("QUERY", EVERYTHING), "results") == {
            ("Agent X", "rdf:type", "a & b"),
            ("s", "p", "6"),
        }
        assert status(kp.ask("LEAVE")) == SUCCESS


def test_a_client_that_closes_its_side_and_reads_to_the_end(world: SsapWorld) -> None:
    """The Java library works like this. The broker answers the requests before the end, then closes too."""
    with Kp(world) as kp:
        kp.send("INSERT", graph_of("insert_graph", ("s", "p", "o")))
        kp.send("QUERY", sparql("SELECT ?o WHERE { <s> <p> ?o }"))
        kp.socket.shutdown(socket.SHUT_WR)
        answers = kp.read_to_end()
    assert answers.count(b"m3:Success") == 2
    assert answers.endswith(b"</SSAP_message>")
    assert b"<literal>o</literal>" in answers


def test_requests_one_after_another_on_one_connection_are_answered_in_order(world: SsapWorld) -> None:
    with Kp(world) as kp:
        query = sparql("SELECT ?o WHERE { <s> <p> ?o }")
        stream = b" ".join(
            kp.message("UPDATE", replaced(str(number)), transaction_id=number)
            if number % 2
            else kp.message("QUERY", query, transaction_id=number)
            for number in range(200)
        )
        sender = threading.Thread(target=kp.socket.sendall, args=(stream,))
        sender.start()
        for number in range(200):
            message = kp.read()
            assert message.findtext("transaction_id") == str(number)
            if number and number % 2 == 0:
                values = [each.text for each in message.iter() if each.tag.endswith("literal")]
                assert values == [str(number - 1)], "a query sees the change that was sent before it"
        sender.join(TIMEOUT_S)


@pytest.mark.parametrize("question", [masks(("s", "p", ANY)), sparql("SELECT ?o WHERE { <s> <p> ?o }")])
def test_inserts_that_come_together_are_each_confirmed_and_indicated(world: SsapWorld, question: str) -> None:
    """Every third insert already exists, every fifth wants no confirmation, and an UPDATE comes between some."""
    with Kp(world) as subscriber, Kp(world, "KP2") as writer:
        assert status(subscriber.ask("SUBSCRIBE", question)) == SUCCESS
        no_confirm = '<parameter name="confirm">FALSE</parameter>'
        stream, confirmed, told = b"", [], []
        for number in range(150):
            value = str(number - 1 if number % 3 == 2 else number)
            is_confirmed, is_update = number % 5 != 0, number == 70
            inserted = graph_of("insert_graph", ("s", "p", value))
            removed = graph_of("remove_graph", ("s", "p", "0")) if is_update else ""
            stream += writer.message(
                "UPDATE" if is_update else "INSERT",
                inserted + removed + ("" if is_confirmed else no_confirm),
                transaction_id=number,
            )
            confirmed += [str(number)] * is_confirmed
            told += [value] * (number % 3 != 2)
        writer.socket.sendall(stream)
        for transaction_id in confirmed:
            confirm = writer.read()
            assert (confirm.findtext("transaction_id"), status(confirm)) == (transaction_id, SUCCESS)
        is_mask, sequence = question == masks(("s", "p", ANY)), 0
        rows: list[str | None] = []
        while rows != told[1:]:  # the UPDATE has removed the first
            indication = subscriber.read()
            sequence += 1
            assert text_of(indication, "ind_sequence") == str(sequence)
            new, obsolete = (_values(indication, f"{which}_results") for which in ("new", "obsolete"))
            # A mask gets an indication per change. An evaluation of a query covers all changes before it.
            assert not is_mask or (new, obsolete) == ([told[sequence - 1]], ["0"] if new == ["70"] else [])
            rows = sorted({*rows, *new} - {*obsolete}, key=lambda row: int(row or 0))


def _values(indication: ElementTree.Element, name: str) -> list[str | None]:
    return [
        each.text
        for each in parameter(indication, name).iter()
        if each.tag == "object" or each.tag.endswith("}literal")
    ]


def test_a_subscription_is_told_and_ended_on_both_connections(world: SsapWorld) -> None:
    with Kp(world) as subscriber, Kp(world, "KP2") as writer:
        writer.ask("INSERT", graph_of("insert_graph", ("s", "p", "1")))
        confirm = subscriber.ask("SUBSCRIBE", masks(("s", "p", ANY)))
        assert triples_of(confirm, "results") == {("s", "p", "1")}
        subscription_id = text_of(confirm, "subscription_id")
        writer.ask("INSERT", graph_of("insert_graph", ("other", "p", "1")))
        writer.ask("INSERT", graph_of("insert_graph", ("s", "p", "1")))
        for number in (2, 3):
            writer.ask("UPDATE", replaced(str(number)))
            indication = subscriber.read()
            assert indication.findtext("message_type") == "INDICATION"
            assert text_of(indication, "ind_sequence") == str(number - 1)
            assert text_of(indication, "subscription_id") == subscription_id
            assert triples_of(indication, "new_results") == {("s", "p", str(number))}
            assert triples_of(indication, "obsolete_results") == {("s", "p", str(number - 1))}
        with Kp(world) as other:
            ended = other.ask("UNSUBSCRIBE", f'<parameter name="subscription_id">{subscription_id}</parameter>')
            assert status(ended) == SUCCESS
        last = subscriber.read()
        assert (last.findtext("transaction_type"), last.findtext("message_type")) == ("UNSUBSCRIBE", "CONFIRM")
        assert subscriber.read_to_end() == b""
        with Kp(world) as other:
            again = other.ask("UNSUBSCRIBE", f'<parameter name="subscription_id">{subscription_id}</parameter>')
            assert status(again) == "m3:KP.Error.Request"


def test_leaving_ends_the_subscriptions_of_a_kp_and_of_no_other(world: SsapWorld) -> None:
    with Kp(world) as subscriber, Kp(world, "KP2") as another, Kp(world) as leaving:
        subscriber.ask("SUBSCRIBE", EVERYTHING)
        another.ask("SUBSCRIBE", EVERYTHING)
        assert status(leaving.ask("LEAVE")) == SUCCESS
        last = subscriber.read()
        assert (last.findtext("transaction_type"), last.findtext("message_type")) == ("UNSUBSCRIBE", "INDICATION")
        assert subscriber.read_to_end() == b""
        leaving.ask("INSERT", graph_of("insert_graph", ("s", "p", "1")))
        assert triples_of(another.read(), "new_results") == {("s", "p", "1")}


def test_a_sparql_subscription_is_told_of_updates_that_are_sent_as_queries(world: SsapWorld) -> None:
    with Kp(world) as subscriber, Kp(world, "KP2") as writer:
        confirm = subscriber.ask("SUBSCRIBE", sparql("SELECT (COUNT(*) AS ?n) WHERE { ?s <p> ?o }"))
        assert [each.text for each in confirm.iter() if each.tag.endswith("literal")] == ["0"]
        message = writer.ask("QUERY", sparql("INSERT DATA { <a> <p> 1, 2 . <a> <q> 3 }"))
        assert status(message) == SUCCESS
        indication = subscriber.read()
        for name, value in (("new_results", "2"), ("obsolete_results", "0")):
            found = [each.text for each in parameter(indication, name).iter() if each.tag.endswith("literal")]
            assert found == [value]


def test_who_wants_no_confirm_gets_none(world: SsapWorld) -> None:
    with Kp(world) as kp:
        no_confirm = '<parameter name="confirm">FALSE</parameter>'
        kp.send("INSERT", graph_of("insert_graph", ("s", "p", "1")), no_confirm)
        message = kp.ask("QUERY", EVERYTHING)
        assert message.findtext("transaction_type") == "QUERY"
        assert triples_of(message, "results") == {("s", "p", "1")}


def test_every_answer_tells_the_load(world: SsapWorld) -> None:
    with Kp(world) as kp:
        message = kp.ask("QUERY", sparql("ASK { ?s ?p ?o }"))
        processing_s, waiting_s, delay_s, interval_s = (
            float(text_of(message, name)) for name in ("processing_s", "waiting_s", "delay_s", "interval_s")
        )
        assert abs(delay_s - processing_s - waiting_s) < 1e-5
        assert interval_s > 0


def test_who_asks_the_question_of_its_subscription_is_told_the_last_number(world: SsapWorld) -> None:
    question = sparql("SELECT ?o { <s> <p> ?o }")
    with Kp(world, "one") as one, Kp(world, "two") as two, Kp(world) as writer:
        one.ask("SUBSCRIBE", question)
        assert text_of(one.ask("QUERY", question), "ind_sequence") == "0"
        for number in (1, 2):
            writer.ask("INSERT", graph_of("insert_graph", ("s", "p", str(number))))
            assert text_of(one.read(), "ind_sequence") == str(number)
        assert text_of(one.ask("QUERY", question), "ind_sequence") == "2"
        for asked in (one.ask("QUERY", sparql("ASK {}")), two.ask("QUERY", question)):
            assert "ind_sequence" not in [each.get("name") for each in asked.iter("parameter")]


def test_an_indication_to_many_tells_them_to_spread(world: SsapWorld) -> None:
    with Kp(world, "one") as one, Kp(world, "two") as two, Kp(world, "three") as three, Kp(world) as writer:
        one.ask("SUBSCRIBE", EVERYTHING)
        writer.ask("INSERT", graph_of("insert_graph", ("s", "p", "1")))
        assert "spread_s" not in [each.get("name") for each in one.read().iter("parameter")]
        two.ask("SUBSCRIBE", EVERYTHING)
        three.ask("SUBSCRIBE", EVERYTHING)
        writer.ask("INSERT", graph_of("insert_graph", ("s", "p", "2")))
        assert all(float(text_of(kp.read(), "spread_s")) > 0 for kp in (one, two, three))


def test_a_subscriber_that_stops_reading_costs_the_others_nothing_and_catches_up(world: SsapWorld) -> None:
    with Kp(world, "slow", receive_bytes=4096) as slow, Kp(world, "quick") as quick, Kp(world, "KP2") as writer:
        slow.ask("SUBSCRIBE", masks(("s", "p", ANY)))
        quick.ask("SUBSCRIBE", masks(("s", "p", ANY)))
        filler = "x" * 20_000
        for number in range(400):
            writer.ask("UPDATE", replaced(f"{number} {filler}"))
            assert triples_of(quick.read(), "new_results") == {("s", "p", f"{number} {filler}")}
        state: set[tuple[str, str, str]] = set()
        sequence = changes = 0
        while changes < 400:
            indication = slow.read()
            sequence += 1
            assert text_of(indication, "ind_sequence") == str(sequence)
            merged = [each.text for each in indication.iter("parameter") if each.get("name") == "merged"]
            changes += 1 + sum(int(each or 0) for each in merged)
            obsolete = triples_of(indication, "obsolete_results")
            assert obsolete <= state
            state = (state - obsolete) | triples_of(indication, "new_results")
        assert changes == 400
        assert sequence < 400, "nothing was merged: the subscriber was never behind"
        assert state == {("s", "p", f"399 {filler}")}


def test_a_subscriber_that_comes_back_gets_what_it_missed(world: SsapWorld) -> None:
    with Kp(world, "KP2") as writer:
        with Kp(world) as subscriber:
            subscription_id = text_of(subscriber.ask("SUBSCRIBE", EVERYTHING), "subscription_id")
            writer.ask("INSERT", graph_of("insert_graph", ("s", "p", "1")))
            assert text_of(subscriber.read(), "ind_sequence") == "1"
            # The connection is cut, not closed, so data sent meanwhile is lost.
            subscriber.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.ask("INSERT", graph_of("insert_graph", ("s", "p", "2")))
        writer.ask("UPDATE", graph_of("insert_graph", ("s", "p", "3")) + graph_of("remove_graph", ("s", "p", "1")))
        resume = f'<parameter name="subscription_id">{subscription_id}</parameter><parameter name="ind_sequence">'
        with Kp(world) as subscriber:
            confirm = subscriber.ask("SUBSCRIBE", EVERYTHING, resume + "1</parameter>")
            assert status(confirm) == SUCCESS
            missed = subscriber.read()
            assert text_of(missed, "ind_sequence") == "2"
            assert triples_of(missed, "new_results") == {("s", "p", "2"), ("s", "p", "3")}
            assert triples_of(missed, "obsolete_results") == {("s", "p", "1")}
            writer.ask("INSERT", graph_of("insert_graph", ("s", "p", "4")))
            assert text_of(subscriber.read(), "ind_sequence") == "3"
            with Kp(world) as elsewhere:
                confirm = elsewhere.ask("SUBSCRIBE", EVERYTHING, resume + "99</parameter>")
                assert status(confirm) == "m3:SIB.Notification.Reset"
                assert triples_of(confirm, "results") == {("s", "p", "2"), ("s", "p", "3"), ("s", "p", "4")}
                assert status(subscriber.read()) == "m3:SIB.Notification.Reset"
                assert subscriber.read_to_end() == b""


def test_a_subscription_whose_result_grows_too_large_is_reset() -> None:
    with SsapWorld(rows_max=2) as world, Kp(world) as subscriber, Kp(world, "KP2") as writer:
        subscriber.ask("SUBSCRIBE", sparql("SELECT * WHERE { ?s ?p ?o }"))
        for number in (1, 2):
            assert status(writer.ask("INSERT", graph_of("insert_graph", (str(number), "p", "o")))) == SUCCESS
            assert text_of(subscriber.read(), "ind_sequence") == str(number)
        assert status(writer.ask("INSERT", graph_of("insert_graph", ("3", "p", "o")))) == SUCCESS
        last = subscriber.read()
        assert status(last) == "m3:SIB.Notification.Reset"
        assert "K109" in text_of(last, "error")
        assert subscriber.read_to_end() == b""
        assert status(writer.ask("QUERY", EVERYTHING)) == "m3:SIB.Failure.OutOfResources"


def test_sparql_that_never_ends_is_refused_and_ends_a_subscription() -> None:
    endless = "{ <http://e/on> <http://e/p> ?x . ?a ?b ?c . ?d ?e ?f . ?g ?h ?i . ?j ?k ?l }"
    count = f"SELECT (COUNT(*) AS ?n) {endless}"
    with SsapWorld(limits=SparqlLimits(time_max_s=1.0, open_time_max_s=1.0)) as world, Kp(world) as subscriber:
        assert status(subscriber.ask("SUBSCRIBE", sparql(count))) == "m3:Success"
        with Kp(world) as kp:
            triples = [(f"http://e/{number}", "http://e/p", "x") for number in range(300)]
            assert status(kp.ask("INSERT", graph_of("insert_graph", *triples))) == "m3:Success"
            assert (
                status(kp.ask("INSERT", graph_of("insert_graph", ("http://e/on", "http://e/p", "x")))) == "m3:Success"
            )
            ended = subscriber.read()
            assert ended.findtext("transaction_type") == "UNSUBSCRIBE"
            assert status(ended) == "m3:SIB.Notification.Reset"
            for kind, text in (
                ("QUERY", count),
                ("SUBSCRIBE", count),
                ("QUERY", f"INSERT {{ ?a ?b ?l }} WHERE {endless}"),
            ):
                refused = kp.ask(kind, sparql(text))
                assert status(refused) == "m3:SIB.Failure.OutOfResources"
                assert "K140" in text_of(refused, "error")
            assert status(kp.ask("QUERY", sparql("SELECT * { ?s ?p 'x' }"))) == "m3:Success"
    assert len(world.graph) == 301


def test_the_dead_are_cleaned_away() -> None:
    with SsapWorld(resume_s=0.0) as world:
        with Kp(world) as subscriber:
            subscriber.ask("SUBSCRIBE", EVERYTHING)
            subscriber.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with Kp(world, "KP2") as writer:
            for number in range(1000):
                writer.ask("INSERT", graph_of("insert_graph", ("s", "p", str(number))))
                world.tick(0.0)
                if world.call(world.knowledge.queries.statistics).subscriptions == 0:
                    break
        assert world.call(world.knowledge.queries.statistics).subscriptions == 0
        assert world.listener.subscribers == {}


def test_a_quiet_subscription_is_kept_alive_by_blanks(world: SsapWorld) -> None:
    with Kp(world) as subscriber:
        subscriber.ask("SUBSCRIBE", EVERYTHING)
        world.tick(1.0)
        world.tick(11.0)
        assert subscriber.socket.recv(100) == b" "
        world.tick(22.0)
        with Kp(world, "KP2") as writer:
            writer.ask("INSERT", graph_of("insert_graph", ("s", "p", "1")))
        assert triples_of(subscriber.read(), "new_results") == {("s", "p", "1")}


def test_subscribers_are_told_that_the_broker_closes(world: SsapWorld) -> None:
    with Kp(world) as subscriber:
        subscriber.ask("SUBSCRIBE", EVERYTHING)
        world.stop_listener()
        assert status(subscriber.read()) == "m3:SIB.Notification.Closing"
        assert subscriber.read_to_end() == b""


def test_a_malformed_message_is_answered_and_ends_its_connection(world: SsapWorld) -> None:
    with Kp(world) as kp:
        kp.socket.sendall(kp.message("QUERY").replace(b"</SSAP_message>", b"<<"))
        assert status(kp.read()) == "m3:KP.Error.Message.Syntax"
        assert kp.read_to_end() == b""
    with Kp(world) as kp:
        assert status(kp.ask("QUERY", sparql("SELECT"))) == "m3:KP.Error.Request"
        assert status(kp.ask("QUERY")) == "m3:KP.Error.Message.Incomplete"
        assert status(kp.ask("JOIN")) == SUCCESS


def test_more_than_a_kp_may_ask_is_refused_at_once() -> None:
    with SsapWorld(PoolSettings(query_workers=1, requests_per_kp_max=1)) as world:
        slow = sparql(
            "SELECT (COUNT(*) AS ?n) WHERE { ?a ?b ?c . ?d ?e ?f . ?g ?h ?i . ?j ?k ?l . FILTER(RAND() < 2) }"
        )
        with Kp(world, "busy") as kp, Kp(world, "busy") as greedy, Kp(world, "KP2") as other:
            triples = [("s", "p", str(number)) for number in range(40)]
            other.ask("INSERT", graph_of("insert_graph", *triples))
            kp.send("QUERY", slow)
            # There is room until the slow one has arrived.
            refusal = [greedy.ask("QUERY", EVERYTHING) for _ in range(20)][-1]
            assert status(refusal) == "m3:SIB.Failure.OutOfResources"
            assert float(text_of(refusal, "retry_after_s")) > 0
            assert status(other.ask("INSERT", graph_of("insert_graph", ("s", "p", "x")))) == SUCCESS
            assert status(kp.read()) == SUCCESS
            assert status(greedy.ask("QUERY", EVERYTHING)) == SUCCESS


def test_a_kp_that_sends_large_requests_while_one_is_answered_is_not_read() -> None:
    """The broker answers one request per connection at a time. The bytes that wait meanwhile are bounded too."""
    with SsapWorld(limits=SparqlLimits(time_max_s=6.0)) as world, Kp(world) as kp, Kp(world, "KP2") as other:
        assert status(kp.ask("JOIN")) == SUCCESS  # without it, the broker reads no large message
        other.ask("INSERT", graph_of("insert_graph", *(("s", "p", str(number)) for number in range(40))))
        kp.send("QUERY", sparql("SELECT (COUNT(*) AS ?n) { ?a ?b ?c . ?d ?e ?f . ?g ?h ?i . ?j ?k ?l . ?m ?n ?o }"))
        large = kp.message("INSERT", graph_of("insert_graph", ("s", "p", "x" * 1_000_000)))
        kp.socket.settimeout(2)
        sent = 0
        with contextlib.suppress(TimeoutError):
            for _ in range(60):
                kp.socket.sendall(large)
                sent += 1
        assert sent < 30
        assert status(other.ask("INSERT", graph_of("insert_graph", ("s", "p", "y")))) == SUCCESS


def test_random_bytes_do_no_harm(world: SsapWorld) -> None:
    rng = random.Random(7)
    for _ in range(50):
        with Kp(world) as kp:
            message = bytearray(kp.message("INSERT", graph_of("insert_graph", ("s", "p", "o"))))
            for _ in range(rng.randint(1, 5)):
                message[rng.randrange(len(message))] = rng.randrange(256)
            kp.socket.sendall(bytes(message))
            kp.socket.shutdown(socket.SHUT_WR)
            kp.read_to_end()
    with Kp(world) as kp:
        assert status(kp.ask("JOIN")) == SUCCESS
