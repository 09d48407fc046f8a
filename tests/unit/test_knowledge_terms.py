"""Terms: any text is read from the store as it was written, and SPARQL joins the names that clients write."""

from __future__ import annotations

import pyoxigraph
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidegate.errors import KnowledgeError
from tidegate.knowledge.terms import PRIVATE_SCHEME, Literal, Mask, Triple, Uri, private_iri, skolem, text_of

texts = st.text(st.characters(exclude_categories=["Cs"]))
local_names = st.text(st.sampled_from("abzAZ019_-éß温"), min_size=1)


@given(texts)
@example("")
@example("//host:port")
@example("/a//b")
@example("a#b#c?d")
@example("100%41")
@example("http://x/Empire Burlesque")
@example(PRIVATE_SCHEME + "a")
@example("\x00\x7f\u0080\ue000\ufffe\U0001ffff\U000e0001\U0010ffff")
def test_any_text_has_an_iri_that_the_store_takes_and_comes_back(text: str) -> None:
    iri = private_iri(text)
    assert pyoxigraph.NamedNode(iri).value == iri
    assert text_of(iri) == text


@given(texts, local_names)
def test_a_prefix_and_a_local_name_join_to_the_iri_of_the_joined_text(prefix: str, name: str) -> None:
    assert private_iri(prefix) + name == private_iri(prefix + name)


def test_an_iri_of_another_scheme_is_its_own_text() -> None:
    assert text_of("http://example.org/a%20b") == "http://example.org/a%20b"


def test_half_a_character_is_refused_by_its_code() -> None:
    with pytest.raises(KnowledgeError, match="K101"):
        private_iri("a\ud800")


def test_a_literal_in_a_mask_stands_for_its_lexical_form_and_for_no_uri() -> None:
    mask = Mask(object=Literal("5"))
    assert mask.matches(Triple(Uri("s"), Uri("p"), Literal("5", "http://www.w3.org/2001/XMLSchema#integer")))
    assert mask.matches(Triple(Uri("s"), Uri("p"), Literal("5", language="en")))
    assert not mask.matches(Triple(Uri("s"), Uri("p"), Literal("05")))
    assert not mask.matches(Triple(Uri("s"), Uri("p"), Uri("5")))
    assert not Mask().matches(Triple(Uri("s"), Uri("p"), Uri("5"), "g"))
    assert not Mask(object=Uri("5")).matches(Triple(Uri("s"), Uri("p"), Literal("5")))
    assert not Mask(predicate=Uri("q")).matches(Triple(Uri("s"), Uri("p"), Literal("5")))


def test_no_two_skolems_are_the_same() -> None:
    assert len({skolem() for _ in range(1000)}) == 1000
