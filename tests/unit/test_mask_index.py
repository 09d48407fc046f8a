"""The index of masks compared with testing each mask."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.knowledge.mask_index import MaskIndex
from tidegate.knowledge.terms import ANY_CHANGE, Literal, Mask, Masks, Triple, Uri

texts = st.sampled_from(["", "a", "b", "x" * 1000, "x" * 1000 + "y"])
uris = texts.map(Uri)
terms = uris | texts.map(Literal)
triples = st.builds(Triple, uris, uris, terms, st.sampled_from(["", "", "g"]))
masks = st.builds(Mask, st.none() | uris, st.none() | uris, st.none() | terms)
filed = st.just(ANY_CHANGE) | st.lists(masks, max_size=3).map(lambda found: Masks(tuple(found)))


def by_texts(mask: Mask) -> Mask:
    return mask._replace(object=None if mask.object is None else Uri(mask.object.text))


@given(st.lists(st.tuples(filed, st.booleans()), max_size=12), st.lists(triples, max_size=6))
def test_finds_what_looking_at_each_mask_finds(entries: list[tuple[Masks, bool]], changed: list[Triple]) -> None:
    """Terms of the same text are not told apart, and a triple of a named graph finds what is filed under everything."""
    index = MaskIndex[int]()
    for key, (their_masks, _) in enumerate(entries):
        index.add(key, their_masks)
    for key, (their_masks, is_removed) in enumerate(entries):
        if is_removed:
            index.remove(key, their_masks)
    kept = {key: their_masks for key, (their_masks, is_removed) in enumerate(entries) if not is_removed}
    for triple in changed:
        plain = triple._replace(object=Uri(triple.object.text))
        wanted = {
            key
            for key, their_masks in kept.items()
            if their_masks.is_everything
            or any(by_texts(mask).matches(plain) for mask in their_masks.patterns)
            or (triple.graph and Mask() in their_masks.patterns)
        }
        found = list(index.find(triple))
        assert set(found) == wanted
        for key, their_masks in kept.items():
            assert key in found or not their_masks.match(triple)


def test_any_change_matches_named_graphs_which_the_open_mask_does_not() -> None:
    triple = Triple(Uri("s"), Uri("p"), Uri("o"))
    for masks, in_default, in_named in ((ANY_CHANGE, True, True), (Masks((Mask(),)), True, False)):
        assert masks.match(triple) is in_default
        assert masks.match(triple._replace(graph="g")) is in_named
    assert not Masks().match(triple)
