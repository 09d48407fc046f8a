"""The knowledge base of a real broker: SSAP from outside, its changes as notifications, shutdown and restart."""

from __future__ import annotations

import random
import signal
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from broker_checks import WAIT_S, run, take
from broker_process import BrokerProcess
from http_client import lane_metrics, metrics, open_client
from raw_client import RawClient
from ssap_world import Kp, graph_of, masks, parameter, replaced, sparql, status, text_of, triples_of

from tidegate import connect, connect_sync

ANY = "http://www.nokia.com/NRC/M3/sib#any"
EVERYTHING = masks((ANY, ANY, ANY))
SUCCESS = "m3:Success"
BUSY = "m3:SIB.Failure.OutOfResources"
TOKEN = "a-token-that-is-long-enough"


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(has_knowledge=True) as process:
        yield process


@pytest.fixture
def mortal() -> Iterator[BrokerProcess]:
    with BrokerProcess(has_knowledge=True) as process:
        yield process


def insert(kp: Kp, *triples: tuple[str, str, str]) -> None:
    assert status(kp.ask("INSERT", graph_of("insert_graph", *triples))) == SUCCESS


def test_every_transaction_of_a_kp(broker: BrokerProcess) -> None:
    with Kp(broker, "writer") as kp, Kp(broker, "reader") as reader:
        assert status(kp.ask("JOIN", '<parameter name = "credentials">XYZZY</parameter>')) == SUCCESS
        insert(kp, ("room", "temperature", "21"))
        confirm = reader.ask("SUBSCRIBE", masks(("room", "temperature", ANY)))
        assert triples_of(confirm, "results") == {("room", "temperature", "21")}
        change = graph_of("insert_graph", ("room", "temperature", "22"))
        change += graph_of("remove_graph", ("room", "temperature", "21"))
        assert status(kp.ask("UPDATE", change)) == SUCCESS
        indication = reader.read()
        assert triples_of(indication, "new_results") == {("room", "temperature", "22")}
        assert triples_of(indication, "obsolete_results") == {("room", "temperature", "21")}
        answer = kp.ask("QUERY", sparql("SELECT ?t WHERE { <room> <temperature> ?t }"))
        assert [each.text for each in parameter(answer, "results").iter() if each.tag.endswith("literal")] == ["22"]
        assert float(text_of(answer, "delay_s")) >= 0
        assert status(kp.ask("REMOVE", graph_of("remove_graph", ("room", ANY, ANY), kind="uri"))) == SUCCESS
        assert triples_of(reader.read(), "obsolete_results") == {("room", "temperature", "22")}
        assert status(reader.ask("LEAVE")) == SUCCESS


def test_changes_are_notifications_for_ordinary_subscribers(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with (
            connect(broker.native) as connection,
            connection.subscribe("p=='height';change=='added'") as wanted,
            connection.subscribe("s==tree") as everything,
        ):
            with Kp(broker) as kp:
                insert(kp, ("tree", "height", "3"), ("tree", "colour", "green"))
                insert(kp, ("tree", "height", "3"))  # changes nothing
                change = graph_of("insert_graph", ("tree", "height", "4"))
                change += graph_of("remove_graph", ("tree", "height", ANY), kind="uri")
                kp.ask("UPDATE", change)
                kp.ask("QUERY", sparql("INSERT DATA { GRAPH <garden> { <tree> <height> 5 } }"))
            heights = [(each.notification["o"], each.notification["graph"]) for each in await take(wanted, 3)]
            assert heights == [("3", ""), ("4", ""), ("5", "garden")]
            seen = [delivery.notification for delivery in await take(everything, 5)]
            assert {(each["p"], each["o"]) for each in seen[:2]} == {("height", "3"), ("colour", "green")}
            assert seen[2] == {"s": "tree", "p": "height", "o": "3", "change": "removed", "graph": ""}
            assert seen[3] == {"s": "tree", "p": "height", "o": "4", "change": "added", "graph": ""}

    run(scenario())


def test_a_large_change_travels_in_several_batches_and_long_texts_are_cut(broker: BrokerProcess) -> None:
    """The change has more triples and more bytes than one batch may have."""
    long = "ü" * 30_000
    with connect_sync(broker.native) as connection, connection.subscribe("p==size") as subscription:
        with Kp(broker) as kp:
            assert status(kp.ask("JOIN")) == SUCCESS
            insert(kp, *((f"s{number}", "size", f"{number}") for number in range(5000)))
            insert(kp, *((f"t{number}", "size", f"{number}{long}") for number in range(50)))
        taken: list[dict[str, object]] = []
        while len(taken) < 5050:
            taken += [dict(delivery.notification) for delivery in subscription.take(WAIT_S)]
    assert {each["s"] for each in taken[:5000]} == {f"s{number}" for number in range(5000)}
    assert {each["o"] for each in taken[5000:]} == {f"{number}{long}"[:16_000] for number in range(50)}


def test_what_the_layers_count(broker: BrokerProcess) -> None:
    lanes = ("changes", "queries", "subscriptions")
    with open_client(broker) as client, Kp(broker, "counted") as kp:
        before, lanes_before = metrics(client), {lane: lane_metrics(client, lane) for lane in lanes}
        insert(kp, ("counted", "p", "1"), ("counted", "p", "2"))
        kp.ask("SUBSCRIBE", masks(("counted", "p", ANY)))
        for _ in range(2):
            kp.ask("QUERY", masks(("counted", "p", ANY)))
        after = metrics(client)
        for name, rise in (("triples", 2), ("subscriptions", 1), ("requests_cached_total", 1), ("changes_total", 1)):
            assert after[f"knowledge_{name}"] - before[f"knowledge_{name}"] == rise, name
        for lane, rise in zip(lanes, (1, 2, 1), strict=True):
            counted = lane_metrics(client, lane)
            assert counted["requests_total"] - lanes_before[lane]["requests_total"] == rise, lane
            assert counted["requests_refused_total"] == counted["requests_waiting"] == counted["requests_running"] == 0
        shown = client.get("/v1/layers").json()["knowledge"]
        assert shown["triples"] == after["knowledge_triples"]
        assert shown["pool"]["lanes"]["subscriptions"]["answered"] >= 1


def test_changes_are_refused_while_a_subscriber_blocks_the_layers() -> None:
    """A client that changes the graph does not wait, and a refused change was not made."""
    with BrokerProcess(
        "--publisher-window-bytes", "20000", "--outbox-notifications-max", "10", "--block-s", "2", has_knowledge=True
    ) as broker:
        with RawClient(broker.native_port, receive_bytes=65_536) as subscriber, Kp(broker) as kp:
            subscriber.hello()
            subscriber.subscribe(1, "s", "block")
            statuses = [
                status(kp.ask("INSERT", graph_of("insert_graph", (f"s{number}", "p", "x" * 9000))))
                for number in range(1500)
            ]
        confirmed = {f"s{number}" for number, each in enumerate(statuses) if each == SUCCESS}
        assert set(statuses) == {SUCCESS, BUSY}
        with Kp(broker) as kp:
            assert {s for s, _, _ in triples_of(kp.ask("QUERY", EVERYTHING), "results")} == confirmed


def test_nothing_confirmed_is_lost_by_kill(mortal: BrokerProcess) -> None:
    """KPs write while the broker is killed repeatedly. Each KP's last confirmed change, or the one sent after it, is in
    the graph."""
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    sent, confirmed = 0, 0
    for _ in range(3):
        until = sent + chance.randrange(20, 200)
        killer = threading.Timer(chance.random() * 0.3, mortal.kill)
        try:
            with Kp(mortal) as kp:
                while True:
                    if sent == until:
                        killer.start()
                    sent += 1
                    kp.ask("UPDATE", replaced(str(sent)))
                    confirmed = sent
        except (EOFError, ConnectionError):
            pass
        killer.join()
        mortal.start()
        with Kp(mortal) as kp:
            ((_, _, value),) = triples_of(kp.ask("QUERY", masks(("s", "p", ANY))), "results")
        assert confirmed <= int(value) <= sent, f"seed {seed}"
        sent = max(sent, int(value))


def test_an_orderly_end_tells_subscribers_and_keeps_everything(mortal: BrokerProcess) -> None:
    with Kp(mortal) as kp, Kp(mortal, "KP2") as subscriber:
        insert(kp, ("s", "p", "1"))
        subscriber.ask("SUBSCRIBE", EVERYTHING)
        mortal.send(signal.SIGTERM)
        assert status(subscriber.read()) == "m3:SIB.Notification.Closing"
        assert subscriber.read_to_end() == b""
        assert mortal.wait() == 0
    mortal.start()
    with Kp(mortal) as kp:
        assert triples_of(kp.ask("QUERY", EVERYTHING), "results") == {("s", "p", "1")}


def test_a_token_is_shown_by_joining() -> None:
    with BrokerProcess(environment={"TIDEGATE_TOKEN": TOKEN}, has_knowledge=True) as broker:
        right, wrong = (f'<parameter name="credentials">{each}</parameter>' for each in (TOKEN, "XYZZY"))
        denied = "m3:SIB.Error.AccessDenied"
        with Kp(broker, "A") as kp:
            for kind, parameters in [
                ("INSERT", graph_of("insert_graph", ("s", "p", "1"))),
                ("QUERY", EVERYTHING),
                ("SUBSCRIBE", EVERYTHING),
                ("LEAVE", ""),
                ("JOIN", wrong),
                ("JOIN", ""),
            ]:
                assert status(kp.ask(kind, parameters)) == denied
        with Kp(broker, "A") as kp:
            assert status(kp.ask("JOIN", right)) == SUCCESS
        with Kp(broker, "A") as kp, Kp(broker, "B") as other:
            insert(kp, ("s", "p", "1"))
            assert status(other.ask("QUERY", EVERYTHING)) == denied
            assert status(kp.ask("LEAVE")) == SUCCESS
            assert status(kp.ask("QUERY", EVERYTHING)) == denied


def test_ssap_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    certificate.private_key_and_cert_chain_pem.write_to_path(chain)
    certificate.private_key_pem.write_to_path(key)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with BrokerProcess("--tls-cert", str(chain), "--tls-key", str(key), has_knowledge=True) as broker:
        with Kp(broker, tls=context) as kp:
            insert(kp, ("s", "p", "1"))
            assert triples_of(kp.ask("QUERY", EVERYTHING), "results") == {("s", "p", "1")}
        with Kp(broker) as kp, pytest.raises((EOFError, ConnectionError)):
            kp.ask("JOIN")


def test_notifications_are_mirrored_into_the_graph_and_facts_out_of_it(tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text(
        '[[mirror]]\nto = "graph"\nsubject = "station"\nattributes = ["NO2"]\nfilter = "NO2>=0"\n'
        '[[mirror]]\nto = "notifications"\nsubject = "room"\nattributes = ["wanted"]\n'
    )
    with (
        BrokerProcess("--config", str(file), has_knowledge=True) as broker,
        open_client(broker) as client,
        connect_sync(broker.native) as connection,
        connection.subscribe("room") as subscription,
        Kp(broker) as kp,
    ):
        confirm = kp.ask("SUBSCRIBE", masks(("28079004", "NO2", ANY)))
        assert triples_of(confirm, "results") == set()
        connection.publish([{"station": "28079004", "NO2": 40}, {"station": "28079004", "NO2": -1}])
        assert triples_of(kp.read(), "new_results") == {("28079004", "NO2", "40")}
        connection.publish({"station": "28079004", "NO2": 41.5})
        told = kp.read()
        assert triples_of(told, "new_results") == {("28079004", "NO2", "41.5")}
        assert triples_of(told, "obsolete_results") == {("28079004", "NO2", "40")}
        client.post("/v1/sparql", data={"update": "INSERT DATA { <hall> <wanted> 21 ; <colour> 'red' }"})
        (delivery,) = subscription.take(WAIT_S)
        assert delivery.notification == {"room": "hall", "wanted": 21}
