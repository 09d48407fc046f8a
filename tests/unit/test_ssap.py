"""SSAP: messages as known clients write them, in whatever pieces they arrive; and answers that clients must read."""

from __future__ import annotations

import random
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import KnowledgeError, NotAllowed, Overloaded, Unavailable
from tidegate.knowledge import ssap
from tidegate.knowledge.question import Result, Row, Shape, SparqlQuery
from tidegate.knowledge.ssap import (
    ChangeBySparql,
    ChangeTriples,
    Envelope,
    Join,
    Leave,
    Malformed,
    MessageReader,
    Query,
    Request,
    Status,
    Subscribe,
    Unsubscribe,
)
from tidegate.knowledge.terms import Blank, Literal, Mask, Masks, NewTriple, Triple, Uri
from tidegate.knowledge.wql import WqlQuery, read_path

ANY = "http://www.nokia.com/NRC/M3/sib#any"


def spaced(kind: str, parameters: str = "") -> str:
    """Returns a message as the Python library writes it: a line each, spaces around the equals sign, a line first."""
    return f"""
<SSAP_message>
<node_id>KP1</node_id>
<space_id>X</space_id>
<transaction_type>{kind}</transaction_type>
<message_type>REQUEST</message_type>
<transaction_id>1</transaction_id>
{parameters}
</SSAP_message>"""


def dense(kind: str, parameters: str = "") -> str:
    """Returns a message as the Java library writes it: parameters in the middle, another order, a line at the end."""
    return (
        f"<SSAP_message><transaction_type>{kind}</transaction_type><message_type>REQUEST</message_type>{parameters}"
        "<transaction_id>1</transaction_id><node_id>KP1</node_id><space_id>X</space_id></SSAP_message>\n"
    )


def envelope(kind: str) -> Envelope:
    return Envelope(kind, "1", "X", "KP1")


def sent(kind: str, encoding: str, content: str) -> str:
    return f'<parameter name = "{kind}" encoding = "{encoding}">{content}</parameter>'


TRIPLE = (
    '<triple_list><triple><subject type = "URI"> Agent_X </subject><predicate>http://e/p q</predicate>'
    '<object type = "literal"><![CDATA[ 21.5 </SSAP_message> &amp; ]]></object></triple></triple_list>'
)
MASKS = (
    f"<triple_list><triple><subject>{ANY}</subject><predicate>p</predicate><object type='uri'>sib:any</object></triple>"
    "<triple><object type='LITERAL'></object><predicate> sib:any</predicate><subject type='uri'>s</subject></triple>"
    "<triple><subject type='bnode'>urn:b</subject><predicate>p</predicate><object type='URI'><![CDATA[o]]></object>"
    f"</triple><triple><subject>s</subject><predicate>p</predicate><object type='literal'><![CDATA[{ANY}]]></object>"
    "</triple></triple_list>"
)
BLANKS = (
    '<triple_list><triple><subject type="bnode">b1</subject><predicate>p</predicate>'
    '<object type="bnode">b2</object></triple></triple_list>'
)
RDF_XML = (
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns:e="http://e/">'
    '<rdf:Description rdf:about="s"><e:p>é &amp;</e:p></rdf:Description></rdf:RDF>'
)
ESCAPED_RDF_XML = RDF_XML.replace("&", "&amp;").replace("<", "&lt;")
THE_MASKS = (
    Mask(None, Uri("p"), None),
    Mask(Uri("s"), None, Literal("")),
    Mask(Uri("urn:b"), Uri("p"), Uri("o")),
    Mask(Uri("s"), Uri("p"), None),
)
THE_TRIPLE = NewTriple(Uri("Agent_X"), Uri("http://e/p q"), Literal(" 21.5 </SSAP_message> &amp; "))
FROM_RDF_XML = NewTriple(Uri("s"), Uri("http://e/p"), Literal("é &"))
SPARQL = "SELECT ?s WHERE { ?s ?p 'é' FILTER(?s < 5) }"
ESCAPED_SPARQL = SPARQL.replace("<", "&lt;")


def query(kind: str, content: str) -> str:
    return f'<parameter name = "type">{kind}</parameter><parameter name = "query">{content}</parameter>'


def wql(*nodes: str, path: str = "") -> str:
    return f"<wql_query>{''.join(nodes)}<path_expression>{path}</path_expression></wql_query>"


START = '<node name = "start" type = "URI">a</node>'
END = '<node name = "end" type = "literal"> b</node>'

GOLDEN: list[tuple[str, Request]] = [
    (spaced("JOIN", '<parameter name = "credentials">XYZZY</parameter>'), Join(envelope("JOIN"), "XYZZY")),
    (dense("join"), Join(envelope("JOIN"), "")),
    (spaced("LEAVE", "<icv>17</icv>"), Leave(envelope("LEAVE"))),
    (
        spaced("INSERT", sent("insert_graph", "RDF-M3", TRIPLE) + '<parameter name = "confirm">TRUE</parameter>'),
        ChangeTriples(envelope("INSERT"), (), (THE_TRIPLE,), True),
    ),
    (
        dense("INSERT", sent("insert_graph", "rdf-m3", BLANKS) + '<parameter name="confirm">false</parameter>'),
        ChangeTriples(envelope("INSERT"), (), (NewTriple(Blank("b1"), Uri("p"), Blank("b2")),), False),
    ),
    (
        spaced("INSERT", sent("insert_graph", "RDF-XML", ESCAPED_RDF_XML)),
        ChangeTriples(envelope("INSERT"), (), (FROM_RDF_XML,), True),
    ),
    (
        dense("INSERT", sent("insert_graph", "RDF-XML", f"<![CDATA[{RDF_XML}]]>")),
        ChangeTriples(envelope("INSERT"), (), (FROM_RDF_XML,), True),
    ),
    (
        spaced("REMOVE", sent("remove_graph", "RDF-M3", MASKS)),
        ChangeTriples(envelope("REMOVE"), THE_MASKS, (), True),
    ),
    (
        dense("UPDATE", sent("insert_graph", "RDF-M3", TRIPLE) + sent("remove_graph", "RDF-XML", ESCAPED_RDF_XML)),
        ChangeTriples(envelope("UPDATE"), (Mask(*FROM_RDF_XML),), (THE_TRIPLE,), True),  # type: ignore[arg-type]
    ),
    (
        dense("UPDATE", sent("insert_graph", "SPARQL-UPDATE", "CLEAR ALL")),
        ChangeBySparql(envelope("UPDATE"), "CLEAR ALL", True),
    ),
    (spaced("QUERY", query("RDF-M3", MASKS)), Query(envelope("QUERY"), Masks(THE_MASKS))),
    (dense("QUERY", query("Sparql", ESCAPED_SPARQL)), Query(envelope("QUERY"), SparqlQuery(SPARQL))),
    (
        spaced("QUERY", query("WQL-VALUES", wql(START, path="['seq', 'p', ['inv', 'q']]"))),
        Query(
            envelope("QUERY"),
            WqlQuery(
                Uri("a"),
                read_path("(seq p (inv q))"),
                None,
                Masks((Mask(predicate=Uri("p")), Mask(predicate=Uri("q")))),
            ),
        ),
    ),
    (
        dense("QUERY", query("wql-related", wql(START, END, path="p"))),
        Query(envelope("QUERY"), WqlQuery(Uri("a"), Uri("p"), Literal(" b"), Masks((Mask(predicate=Uri("p")),)))),
    ),
    (spaced("SUBSCRIBE", query("RDF-M3", MASKS)), Subscribe(envelope("SUBSCRIBE"), Masks(THE_MASKS), "", 0)),
    (
        dense(
            "SUBSCRIBE",
            query("sparql", f"<![CDATA[{SPARQL}]]>")
            + '<parameter name="subscription_id">S1</parameter><parameter name="ind_sequence"> 7</parameter>',
        ),
        Subscribe(envelope("SUBSCRIBE"), SparqlQuery(SPARQL), "S1", 7),
    ),
    (
        spaced("UNSUBSCRIBE", '<parameter name = "subscription_id">S1</parameter>'),
        Unsubscribe(envelope("UNSUBSCRIBE"), "S1"),
    ),
]


@pytest.mark.parametrize(("text", "request_"), GOLDEN)
def test_a_message_of_a_known_client_is_understood(text: str, request_: Request) -> None:
    assert MessageReader().feed(text.encode()) == [request_]


def test_messages_may_come_in_any_pieces() -> None:
    stream = "  ".join(text for text, _ in GOLDEN).encode()
    requests = [request for _, request in GOLDEN]
    assert MessageReader().feed(stream) == requests
    reader = MessageReader()
    assert [request for byte in stream for request in reader.feed(bytes([byte]))] == requests
    for seed in range(20):
        rng, reader, at, read = random.Random(seed), MessageReader(), 0, []
        while at < len(stream):
            size = rng.choice((1, 3, 50, 1000))
            read += reader.feed(stream[at : at + size])
            at += size
        assert read == requests, seed


@pytest.mark.parametrize(
    "beginning", ['<?xml version="1.0" encoding="UTF-8"?>\n', " \r\n", "\ufeff<?xml version='1.0'?>"]
)
def test_a_connection_may_begin_with_a_declaration(beginning: str) -> None:
    data = (beginning + GOLDEN[0][0] + GOLDEN[3][0]).encode()
    requests = [GOLDEN[0][1], GOLDEN[3][1]]
    assert MessageReader().feed(data) == requests
    reader, first = MessageReader(), data.index(b"<")
    read = reader.feed(data[: first + 1])
    assert [*read, *(request for byte in data[first + 1 :] for request in reader.feed(bytes([byte])))] == requests


def test_a_message_ends_with_its_last_byte() -> None:
    """A client that waits for an answer sends nothing further."""
    for text, request in GOLDEN:
        data, reader = text.strip().encode(), MessageReader()
        assert reader.feed(data[:-1]) == []
        assert not reader.is_between_messages
        assert reader.feed(data[-1:]) == [request]
        assert reader.is_between_messages


BAD = [
    (spaced("INSERT"), "K113", Status.INCOMPLETE),
    (spaced("UNSUBSCRIBE"), "K113", Status.INCOMPLETE),
    (spaced("QUERY", '<parameter name="type">sparql</parameter>'), "K113", Status.INCOMPLETE),
    (spaced("QUERY", query("RDF-M3", "<triple_list><triple></triple></triple_list>")), "K113", Status.INCOMPLETE),
    (spaced("QUERY", query("WQL-VALUES", wql(path="p"))), "K113", Status.INCOMPLETE),
    (spaced("QUERY", query("WQL-VALUES", wql(START, path="(seq"))), "K115", Status.BAD_REQUEST),
    (spaced("QUERY", query("SQL", "SELECT 1")), "K114", Status.BAD_REQUEST),
    (spaced("REGISTER"), "K114", Status.BAD_REQUEST),
    (spaced("JOIN").replace("REQUEST", "CONFIRM"), "K114", Status.BAD_REQUEST),
    (spaced("JOIN").replace("<space_id>X</space_id>", ""), "K113", Status.INCOMPLETE),
    (spaced("INSERT", sent("insert_graph", "RDF-M3", MASKS)), "K114", Status.BAD_REQUEST),
    (spaced("INSERT", sent("insert_graph", "N3", TRIPLE)), "K114", Status.BAD_REQUEST),
    (spaced("INSERT", sent("insert_graph", "RDF-XML", "&lt;rdf")), "K106", Status.BAD_REQUEST),
    (
        spaced("INSERT", sent("insert_graph", "RDF-M3", TRIPLE.replace('type = "URI"', 'type="literal"'))),
        "K114",
        Status.BAD_REQUEST,
    ),
    (
        spaced("SUBSCRIBE", query("sparql", "ASK {}") + '<parameter name="ind_sequence">-1</parameter>'),
        "K114",
        Status.BAD_REQUEST,
    ),
]


@pytest.mark.parametrize(("text", "code", "status"), BAD)
def test_a_message_that_is_wrong_is_answered_and_the_next_is_read(text: str, code: str, status: Status) -> None:
    (malformed, following) = MessageReader().feed((text + spaced("LEAVE")).encode())
    assert isinstance(malformed, Malformed)
    assert (malformed.error.code, malformed.is_fatal) == (code, False)
    answer = ssap.refusal(malformed)
    assert answer is not None
    assert f'<parameter name="status">{status}</parameter>'.encode() in answer
    assert following == Leave(envelope("LEAVE"))


FATAL = [
    ("<SSAP_message><node_id>a</SSAP_message>", "K110"),
    ("<SSAP_message>&undefined;</SSAP_message>", "K110"),
    ("<!DOCTYPE x [<!ENTITY a 'b'>]><SSAP_message/>", "K110"),
    ("<SSAP_message><!DOCTYPE x []></SSAP_message>", "K110"),
    ("</connection>", "K110"),
    ("</connection><!DOCTYPE x []>", "K110"),
    ("<?xml " + "a" * 9999, "K111"),
    ("<SSAP_message><?xml version='1.0'?>", "K110"),
    ("GET / HTTP/1.1\r\n\r\n", "K110"),
    ("{}", "K110"),
    ("<other/>", "K110"),
    ("\x00", "K110"),
    ("<SSAP_message>" + "<a>" * 100, "K111"),
    ("<SSAP_message>" + "".join(f"<a{number}/>" for number in range(1000)), "K111"),
    ("<SSAP_message " + "a" * 9999, "K111"),
    ("<!-- " + "a" * 9999, "K111"),
    ("<SSAP_message><node_id>" + "a" * 99_999, "K112"),
]


@pytest.mark.parametrize(("text", "code"), FATAL)
@pytest.mark.parametrize("piece", [1, 1000, 1_000_000])
def test_what_is_no_message_ends_the_connection(text: str, code: str, piece: int) -> None:
    reader, data = MessageReader(message_bytes_max=20_000), text.encode()
    for at in range(0, len(data), piece):
        if messages := reader.feed(data[at : at + piece]):
            break
    (malformed,) = messages
    assert isinstance(malformed, Malformed)
    assert malformed.is_fatal
    assert malformed.error.code == code


def test_a_message_that_breaks_is_answered_when_its_sender_is_known() -> None:
    (malformed,) = MessageReader().feed(spaced("QUERY").replace("</SSAP_message>", "<<").encode())
    assert isinstance(malformed, Malformed)
    answer = ssap.refusal(malformed)
    assert answer is not None
    assert b"m3:KP.Error.Message.Syntax" in answer
    (malformed,) = MessageReader().feed(b"<SSAP_message><<")
    assert isinstance(malformed, Malformed)
    assert ssap.refusal(malformed) is None


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 16))
def test_bytes_of_any_kind_do_no_harm(noise: bytes, at: int, which: int) -> None:
    """Random bytes are inserted into a good message. It is read or refused, or the reader waits for more."""
    good = GOLDEN[which][0].encode()
    reader = MessageReader()
    for message in reader.feed(good[:at] + noise + good[at:]):
        assert isinstance(message, Request | Malformed)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_of_xml_reads_as_it_was_written_in_ascii(text: str) -> None:
    wanted = "".join(
        sign if sign in "\t\n\r" or (sign >= " " and sign not in "\ufffe\uffff") else "\ufffd" for sign in text
    )
    message = ssap.confirm(
        envelope("QUERY"), Status.SUCCESS, {"results": ssap.write_triples([Triple(Uri("s"), Uri("p"), Literal(text))])}
    )
    assert message.isascii()
    assert ElementTree.fromstring(message).findtext(".//object") == wanted
    (request,) = MessageReader().feed(
        spaced(
            "INSERT", sent("insert_graph", "RDF-M3", ssap.write_triples([Triple(Uri("s"), Uri("p"), Literal(text))]))
        ).encode()
    )
    assert isinstance(request, ChangeTriples)
    assert request.inserted[0].object == Literal(wanted)


def test_a_confirm_is_the_one_that_clients_expect() -> None:
    assert ssap.confirm(envelope("JOIN"), Status.SUCCESS) == (
        b"<SSAP_message><message_type>CONFIRM</message_type><transaction_type>JOIN</transaction_type>"
        b"<transaction_id>1</transaction_id><space_id>X</space_id><node_id>KP1</node_id>"
        b'<parameter name="status">m3:Success</parameter></SSAP_message>'
    )
    assert b'<parameter name="bnodes"><urilist><uri tag="b&quot;1">urn:x</uri></urilist></parameter>' in ssap.confirm(
        envelope("INSERT"), Status.SUCCESS, {"bnodes": ssap.write_named({'b"1': Uri("urn:x")})}
    )
    assert ssap.write_named({}) == "<urilist></urilist>"


def test_an_indication_is_the_one_that_clients_expect() -> None:
    triple = Triple(Uri("Agent X"), Uri("p"), Literal("Größe <&> 温度"))
    parameters = {
        "ind_sequence": "1",
        "subscription_id": "S1",
        "new_results": ssap.write_triples([triple]),
        "obsolete_results": ssap.write_triples([]),
    }
    assert ssap.indication(envelope("SUBSCRIBE"), parameters) == (
        b"<SSAP_message><message_type>INDICATION</message_type><transaction_type>SUBSCRIBE</transaction_type>"
        b"<space_id>X</space_id><node_id>KP1</node_id><transaction_id>1</transaction_id>"
        b'<parameter name="ind_sequence">1</parameter><parameter name="subscription_id">S1</parameter>'
        b'<parameter name="new_results"><triple_list><triple><subject type="uri">Agent X</subject>'
        b'<predicate>p</predicate><object type="literal">Gr&#246;&#223;e &lt;&amp;&gt; &#28201;&#24230;</object>'
        b'</triple></triple_list></parameter><parameter name="obsolete_results"><triple_list></triple_list></parameter>'
        b"</SSAP_message>"
    )


def test_answers_to_sparql_and_wql_are_those_that_clients_expect() -> None:
    head = '<sparql xmlns="http://www.w3.org/2005/sparql-results#"><head>'
    rows: list[Row] = [(Uri("a&b"), None), (Blank("x"), Literal("5", "http://e/int"))]
    assert ssap.write_result(Result(Shape.SOLUTIONS, rows, ("s", "o"))) == (
        head + '<variable name="s"/><variable name="o"/></head><results>'
        '<result><binding name="s"><uri>a&amp;b</uri></binding></result>'
        '<result><binding name="s"><bnode>x</bnode></binding>'
        '<binding name="o"><literal datatype="http://e/int">5</literal></binding></result></results></sparql>'
    )
    assert ssap.write_result(Result(Shape.TRUTH, [True])) == head + "</head><boolean>true</boolean></sparql>"
    assert (
        ssap.write_solutions(("l",), [(Literal("a", language="en"),)]).count('<literal xml:lang="en">a</literal>') == 1
    )
    assert ssap.write_result(Result(Shape.WQL_TRUTH, [False])) == "FALSE"
    nodes = Result(Shape.NODES, [Uri("a"), Literal("b")])
    assert ssap.write_result(nodes) == "<node_list><uri>a</uri><literal>b</literal></node_list>"
    assert ssap.write_result(Result(Shape.TRIPLES, [NewTriple(Blank("x"), Uri("p"), Uri("o"))])).startswith(
        '<triple_list><triple><subject type="bnode">x</subject>'
    )


def test_errors_have_the_status_of_their_kind() -> None:
    assert ssap.status_of(Overloaded("L650", "", "")) is Status.OUT_OF_RESOURCES
    assert ssap.status_of(NotAllowed("A501", "", "")) is Status.ACCESS_DENIED
    assert ssap.status_of(KnowledgeError("K102", "", "")) is Status.BAD_REQUEST
    assert ssap.status_of(KnowledgeError("K110", "", "")) is Status.BAD_SYNTAX
    assert ssap.status_of(Unavailable("U702", "", "")) is Status.ERROR
