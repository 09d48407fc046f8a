"""`/v1/sparql` of a real broker: the SPARQL 1.1 Protocol, its refusals, and the load that it reports."""

from __future__ import annotations

import random
from collections.abc import Iterator

import httpx
import pyoxigraph as ox
import pytest
from broker_process import BrokerProcess
from http_client import code_of, open_client
from openapi_spec_validator import validate
from ssap_world import Kp, masks, triples_of

from tidegate.listeners.http.sparql import FORM, LOAD_HEADERS

QUERY, UPDATE = "application/sparql-query", "application/sparql-update"
JSON = "application/sparql-results+json"
ROOMS = "SELECT ?room ?t WHERE { ?room <temperature> ?t } ORDER BY ?room"
BINDINGS = [
    {
        "room": {"type": "uri", "value": "hall"},
        "t": {"type": "literal", "value": "19.5", "datatype": "http://www.w3.org/2001/XMLSchema#decimal"},
    },
    {"room": {"type": "uri", "value": "room"}, "t": {"type": "literal", "value": "warm", "xml:lang": "en"}},
]


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(has_knowledge=True) as process:
        yield process


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with open_client(broker) as client:
        update(client, 'INSERT DATA { <hall> <temperature> 19.5 . <room> <temperature> "warm"@en }')
        yield client


def update(client: httpx.Client, text: str) -> tuple[int, int]:
    answer = client.post("/v1/sparql", data={"update": text}).raise_for_status().json()
    return answer["added"], answer["removed"]


def test_the_three_ways_to_ask(client: httpx.Client) -> None:
    for answer in (
        client.get("/v1/sparql", params={"query": ROOMS}),
        client.post("/v1/sparql", data={"query": ROOMS}),
        client.post("/v1/sparql", content=ROOMS, headers={"Content-Type": f"{QUERY}; charset=utf-8"}),
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"] == JSON
        assert answer.json() == {"head": {"vars": ["room", "t"]}, "results": {"bindings": BINDINGS}}


def test_both_ways_to_change(client: httpx.Client, broker: BrokerProcess) -> None:
    direct = client.post("/v1/sparql", content="INSERT DATA { <a> <way> 1, 2 }", headers={"Content-Type": UPDATE})
    assert (direct.json()["added"], direct.json()["removed"]) == (2, 0)
    assert update(client, "DELETE { ?a <way> ?o } INSERT { ?a <way> 3 } WHERE { ?a <way> ?o }") == (1, 2)
    assert update(client, "INSERT DATA { <a> <way> 3 }") == (0, 0)
    with Kp(broker) as kp:
        found = triples_of(kp.ask("QUERY", masks(("a", "way", "sib:any"))), "results")
    assert found == {("a", "way", "3")}, "SSAP sees the same graph"


@pytest.mark.parametrize(
    ("accept", "body"),
    [
        ("text/csv", "room,t\r\nhall,19.5\r\nroom,warm\r\n"),
        (
            "text/tab-separated-values",
            '?room\t?t\n<hall>\t"19.5"^^<http://www.w3.org/2001/XMLSchema#decimal>\n<room>\t"warm"@en\n',
        ),
    ],
)
def test_solutions_as_the_client_wants_them(client: httpx.Client, accept: str, body: str) -> None:
    wanted = {"Accept": f"image/png, {accept};q=0.5"}
    answer = client.get("/v1/sparql", params={"query": ROOMS}, headers=wanted)
    assert answer.headers["content-type"] == accept
    assert answer.text == body


def test_yes_or_no_and_triples(client: httpx.Client) -> None:
    ask = client.get("/v1/sparql", params={"query": "ASK { <hall> <temperature> ?t }"})
    assert ask.json() == {"head": {}, "boolean": True}
    query = "CONSTRUCT { ?r <http://e/is> ?t } WHERE { ?r <temperature> ?t }"
    for accept, kind in (("*/*", ox.RdfFormat.TURTLE), ("application/n-triples", ox.RdfFormat.N_TRIPLES)):
        answer = client.get("/v1/sparql", params={"query": query}, headers={"Accept": accept})
        assert answer.headers["content-type"] == (accept if kind == ox.RdfFormat.N_TRIPLES else "text/turtle")
        read = list(ox.parse(answer.content, kind, lenient=True, base_iri=None if "n-" in accept else "http://base/"))
        assert {str(each.object) for each in read} >= {'"warm"@en'}
    assert code_of(client.get("/v1/sparql", params={"query": query}, headers={"Accept": JSON})) == (406, "K121")


def test_a_large_result_is_written_whole(client: httpx.Client) -> None:
    update(client, "INSERT DATA {" + "".join(f"<many> <n> {number} ." for number in range(5000)) + "}")
    answer = client.get("/v1/sparql", params={"query": "SELECT ?n { <many> <n> ?n }"}, headers={"Accept": "text/csv"})
    assert sorted(answer.text.split()[1:], key=int) == [str(number) for number in range(5000)]


def test_the_load_is_told_with_every_answer(client: httpx.Client) -> None:
    asked = client.get("/v1/sparql", params={"query": ROOMS})
    changed = client.post("/v1/sparql", data={"update": "INSERT DATA { <load> <p> 1 }"})
    for answer in (asked, changed):
        told = {name: float(answer.headers[header]) for name, header in LOAD_HEADERS.items()}
        assert told["delay_s"] == pytest.approx(told["processing_s"] + told["waiting_s"], abs=2e-6)
        assert told["interval_s"] > 0
    assert {name: changed.json()[name] for name in LOAD_HEADERS} == pytest.approx(told)


@pytest.mark.parametrize(
    ("method", "options", "refusal"),
    [
        ("GET", {}, (400, "K119")),
        ("GET", {"params": [("query", "ASK {}"), ("query", "ASK {}")]}, (400, "K119")),
        ("GET", {"params": {"update": "INSERT DATA { <a> <b> 1 }"}}, (400, "K119")),
        ("GET", {"params": {"query": "INSERT DATA { <a> <b> 1 }"}}, (400, "K119")),
        ("GET", {"params": {"query": "SELECT"}}, (400, "K102")),
        ("GET", {"params": {"query": "SELECT * { SERVICE <http://e/> { ?s ?p ?o } }"}}, (400, "K103")),
        ("GET", {"params": {"query": "ASK {}", "default-graph-uri": "http://e/"}}, (400, "K119")),
        ("GET", {"params": {"query": "ASK {}"}, "headers": {"Accept": "image/png"}}, (406, "K121")),
        ("POST", {"data": {"query": "ASK {}", "update": "CLEAR ALL"}}, (400, "K119")),
        ("POST", {"data": {"q": "ASK {}"}}, (400, "K119")),
        ("POST", {"data": {"update": "ASK {}"}}, (400, "K102")),
        ("POST", {"data": {"update": "LOAD <http://e/>"}}, (400, "K103")),
        ("POST", {"data": {"update": "CLEAR ALL", "using-graph-uri": "http://e/"}}, (400, "K119")),
        ("POST", {"content": b"ASK {}"}, (415, "K120")),
        ("POST", {"json": {"query": "ASK {}"}}, (415, "K120")),
        ("POST", {"content": b"ASK { \xff }", "headers": {"Content-Type": QUERY}}, (400, "K119")),
        ("POST", {"content": "ASK {}", "params": {"query": "A"}, "headers": {"Content-Type": QUERY}}, (400, "K119")),
        ("POST", {"content": "&a" * 101, "headers": {"Content-Type": FORM}}, (400, "K119")),
        ("PUT", {"content": b"ASK {}"}, (405, "P318")),
    ],
)  # fmt: skip
def test_what_is_refused(
    client: httpx.Client, method: str, options: dict[str, object], refusal: tuple[int, str]
) -> None:
    assert code_of(client.request(method, "/v1/sparql", **options)) == refusal  # type: ignore[arg-type]
    assert client.get("/v1/sparql", params={"query": "ASK { <a> <b> 1 }"}).json()["boolean"] is False


@pytest.mark.parametrize(
    ("kind", "body", "refusal"),
    [
        ("text/turtle", b"<doc> <b> ", (400, "K123")),
        ("text/turtle", b"<doc> <b> '\xff' .", (400, "K123")),
        ("text/turtle", b"<doc> <b> 'x'@somethingelse .", (400, "K123")),
        ("application/n-quads", b"<< <a> <b> <c> >> <d> <e> .", (400, "K123")),
        ("application/json", b"{}", (415, "K120")),
        ("", b"<doc> <b> <c> .", (415, "K120")),
    ],
)
def test_documents_that_are_refused(client: httpx.Client, kind: str, body: bytes, refusal: tuple[int, str]) -> None:
    assert code_of(client.post("/v1/graph", content=body, headers={"Content-Type": kind})) == refusal


def test_whatever_is_sent_is_answered(client: httpx.Client) -> None:
    """The texts are cut, duplicated and damaged."""
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    texts = {
        QUERY: b"PREFIX e: <http://e/> SELECT ?s (COUNT(*) AS ?n) { ?s e:p 'x'@en ; !(a|^e:q)* ?o . FILTER(?o > 1e0) }",
        UPDATE: b"PREFIX e: <> DELETE { ?s <fuzz> ?o } INSERT { GRAPH <g> { ?s <fuzz> _:b } } WHERE { ?s <fuzz> ?o }",
        "text/turtle": b'@prefix e: <http://e/> . <fuzz> a e:B ; e:p ( 1 [ e:q \'x\' ] """y"""^^e:t ) .',
        "application/n-quads": b'<http://e/fuzz> <http://e/p> "x\\u0041"@en <http://e/g> .\n',
    }
    for _ in range(300):
        kind, text = chance.choice(list(texts.items()))
        body = bytearray(text)
        for _ in range(chance.randrange(1, 5)):
            at, length = chance.randrange(len(body) + 1), chance.randrange(12)
            other = bytes(chance.randrange(256) for _ in range(chance.randrange(3)))
            body[at : at + length] = chance.choice([b"", bytes(body[at : at + length]) * 2, other])
        path = "/v1/sparql" if kind in (QUERY, UPDATE) else "/v1/graph"
        answer = client.post(path, content=bytes(body), headers={"Content-Type": kind})
        assert answer.status_code in (200, 400), f"seed {seed}: {bytes(body)!r}"
        if answer.status_code == 400:
            code_of(answer)


def test_a_document_is_one_change(client: httpx.Client) -> None:
    """A document has the form of the answer to a CONSTRUCT, so an answer can be inserted again."""
    update(client, "INSERT DATA { <doc> <is> 'here', <there> }")
    query = {"query": "CONSTRUCT WHERE { <doc> <is> ?o }"}
    document = client.get("/v1/sparql", params=query, headers={"Accept": "application/n-triples"}).content
    assert update(client, "DELETE WHERE { <doc> ?p ?o }") == (0, 2)
    for added in (2, 0):
        answer = client.post("/v1/graph", content=document, headers={"Content-Type": "application/n-triples"})
        assert (answer.json()["added"], answer.json()["removed"]) == (added, 0)
        assert float(answer.headers["tidegate-interval-s"]) > 0


def test_rdf_xml_comes_in_and_goes_out(client: httpx.Client) -> None:
    document = (
        '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns:e="http://xml/">'
        '<rdf:Description rdf:about="http://xml/s"><e:p>gr\u00fcn &amp; blau</e:p><e:q rdf:nodeID="b"/>'
        "</rdf:Description></rdf:RDF>"
    )
    kind = {"Content-Type": "application/rdf+xml"}
    answer = client.post("/v1/graph", content=document.encode(), headers=kind)
    assert (answer.status_code, answer.json()["added"]) == (200, 2), answer.text
    wanted = {"query": "CONSTRUCT { <http://xml/s> ?p ?o } { <http://xml/s> ?p ?o }"}
    written = client.get("/v1/sparql", params=wanted, headers={"Accept": "application/rdf+xml"})
    assert written.headers["Content-Type"] == "application/rdf+xml"
    turtle = client.get("/v1/sparql", params=wanted, headers={"Accept": "text/turtle"})
    read = set(ox.parse(written.content, ox.RdfFormat.RDF_XML))
    assert len(read) == 2
    assert read == set(ox.parse(turtle.content, ox.RdfFormat.TURTLE))
    for body in (b"<rdf:RDF", b"\xff"):
        assert client.post("/v1/graph", content=body, headers=kind).status_code == 400


def test_a_broker_that_is_overloaded_says_when_to_come_back() -> None:
    with (
        BrokerProcess("--publisher-window-bytes", "1", "--outbox-notifications-max", "1", has_knowledge=True) as broker,
        open_client(broker) as client,
    ):
        client.put("/v1/queues/full", json={"filter": "s", "messages_max": 1}).raise_for_status()
        answers = [
            client.post("/v1/sparql", data={"update": f"INSERT DATA {{ <s> <p> {number} }}"}) for number in range(20)
        ]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert {code_of(answer) for answer in refused} == {(429, "L654")}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        count = client.get("/v1/sparql", params={"query": "SELECT (COUNT(*) AS ?n) { ?s ?p ?o }"})
        assert count.json()["results"]["bindings"][0]["n"]["value"] == str(20 - len(refused))


def test_a_token_is_needed_where_there_is_one() -> None:
    token = "a-token-that-is-long-enough"
    with (
        BrokerProcess(environment={"TIDEGATE_TOKEN": token}, has_knowledge=True) as broker,
        open_client(broker) as client,
    ):
        assert code_of(client.get("/v1/sparql", params={"query": "ASK {}"})) == (401, "A501")
        shown = {"Authorization": f"Bearer {token}"}
        assert client.get("/v1/sparql", params={"query": "ASK {}"}, headers=shown).status_code == 200


def test_openapi_lists_the_calls_where_there_is_a_knowledge_base(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    validate(document)
    assert {"/v1/sparql", "/v1/graph", "/v1/persistent", "/v1/persistent/named"} <= document["paths"].keys()
