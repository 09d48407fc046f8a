"""A saved index matches like the original, cannot be changed, and is used only if it is complete and compatible."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import filters, notifications

from tidegate.errors import BadInput
from tidegate.filters import Filter
from tidegate.index import SubscriptionIndex
from tidegate.index.saved_index import START, Head, SavedIndex, save_index

SOME = ("a==1", "a==1,2,true", "a!=1", "a<5", "a>=2", "a==1..3", "b^=x", "b$=y", "b*=z", "b", "!a", "*", "b=='x'..'y'")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    index = SubscriptionIndex()
    for number, text in enumerate(SOME):
        index.add(number, Filter.parse(text))
    path = tmp_path / "deeper" / "some.index"
    size_bytes = save_index(index, path)
    assert path.stat().st_size == size_bytes
    assert list(path.parent.iterdir()) == [path], "nothing unfinished is left"
    return path


@settings(max_examples=50)
@given(st.data())
def test_it_finds_what_brute_force_finds(data: st.DataObject) -> None:
    asked = data.draw(st.lists(notifications(), min_size=1, max_size=3))
    many = data.draw(st.lists(filters(about=asked[0]), max_size=20))
    index = SubscriptionIndex()
    for number, each in enumerate(many):
        index.add(number, each)
    with TemporaryDirectory() as directory:
        save_index(index, Path(directory) / "index")
        loaded = SavedIndex(Path(directory) / "index")
        assert len(loaded) == len(many)
        found = [sorted(ids) for ids in loaded.match(asked)]
    assert found == [[n for n, each in enumerate(many) if each.matches(one)] for one in asked]


def test_it_is_as_good_with_thousands_of_filters_and_the_saved_one_goes_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    texts = [
        f"site==s{site};t=={low:.2f}..{low + 9:.2f}"
        for site, low in zip(rng.integers(0, 40, 9000).tolist(), (rng.random(9000) * 90).tolist(), strict=True)
    ]
    index = SubscriptionIndex()
    for number, text in enumerate(texts):
        index.add(number, Filter.parse(text))
    save_index(index, tmp_path / "index")
    asked = [{"site": f"s{n % 40}", "t": n * 0.7} for n in range(140)]
    found = [sorted(ids) for ids in SavedIndex(tmp_path / "index").match(asked)]
    assert found == [sorted(ids) for ids in index.match(asked)]
    assert sum(map(len, found)) > 1000
    index.remove(found[70][0])
    assert sorted(index.match(asked)[70]) == found[70][1:]


def test_matching_leaves_the_file_alone_and_nobody_can_add(saved: Path) -> None:
    before = saved.read_bytes()
    loaded = SavedIndex(saved)
    for _ in range(100):
        loaded.match([{"a": 2, "b": "xyz"}])
    assert loaded.vocabulary.state.flags.writeable, "the kernels count what they see, each process for itself"
    assert saved.read_bytes() == before
    assert not hasattr(loaded, "add")
    assert not hasattr(loaded, "remove")


@pytest.mark.parametrize("kept", [0, 5, 40, 5000, -1])
def test_a_file_that_is_cut_off_is_refused(saved: Path, kept: int) -> None:
    saved.write_bytes(saved.read_bytes()[:kept])
    with pytest.raises(BadInput, match=r"D819.*build the index again"):
        SavedIndex(saved)


def test_foreign_and_missing_files_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"PAR1" * 1000)
    with pytest.raises(BadInput, match=r"D819.*is not a saved index"):
        SavedIndex(foreign)
    with pytest.raises(BadInput, match=r"D819.*No such file"):
        SavedIndex(tmp_path / "missing")


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"kernels": "0123456789abcdef"}, "another version"),
        ({"byte_order": "big" if sys.byteorder == "little" else "little"}, "endian"),
        ({"arrays_bytes": 64}, "bytes instead of"),
    ],
)
def test_an_index_of_another_kind_is_refused(saved: Path, changed: dict[str, object], fault: str) -> None:
    data = saved.read_bytes()
    magic, length, _checksum = START.unpack_from(data)
    head = msgspec.msgpack.decode(data[START.size : START.size + length], type=Head)
    for name, value in changed.items():
        setattr(head, name, value)
    written = msgspec.msgpack.encode(head)
    saved.write_bytes(START.pack(magic, len(written), crc32(written)) + written + data[START.size + length :])
    with pytest.raises(BadInput, match=f"D819.*{fault}"):
        SavedIndex(saved)


def test_a_head_with_a_wrong_bit_is_refused(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[START.size + 20] ^= 1
    saved.write_bytes(data)
    with pytest.raises(BadInput, match=r"D819.*is damaged"):
        SavedIndex(saved)


def test_a_wrong_bit_anywhere_is_refused(saved: Path) -> None:
    data = saved.read_bytes()
    rng = np.random.default_rng(19)
    for place in [len(data) - 1, *rng.integers(START.size, len(data), 40).tolist()]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(8))
        saved.write_bytes(damaged)
        with pytest.raises(BadInput, match="D819"):
            SavedIndex(saved)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("tree.nodes", {"offset": 1 << 40}),
        ("tree.nodes", {"offset": -64}),
        ("tree.nodes", {"offset": 1}),
        ("tree.nodes", {"shape": (1 << 40, 8)}),
        ("tree.nodes", {"shape": (1024, 2)}),
        ("tree.nodes", {"shape": (0, 8)}),
        ("tree.nodes", {"shape": (8192,)}),
        ("tree.nodes", {"dtype": "<i8"}),
        ("tree.node_keys", {"shape": (8,)}),
        ("vocabulary.slots", {"shape": (1000, 2)}),
        ("filters.state", {"shape": (10,)}),
        ("filters.ids", {"shape": (1,)}),
        ("tree.entries", None),
    ],
)
def test_arrays_of_another_shape_or_place_are_refused(
    saved: Path, name: str, changed: dict[str, object] | None
) -> None:
    """They are refused even if the checksum of the head is right."""
    data = saved.read_bytes()
    magic, length, _checksum = START.unpack_from(data)
    head = msgspec.msgpack.decode(data[START.size : START.size + length], type=Head)
    if changed is None:
        del head.arrays[name]
    else:
        head.arrays[name] = msgspec.structs.replace(head.arrays[name], **changed)
    written = msgspec.msgpack.encode(head)
    base, new_base = (-(-(START.size + size) // 64) * 64 for size in (length, len(written)))
    start = START.pack(magic, len(written), crc32(written)) + written
    saved.write_bytes(start.ljust(new_base, b"\0") + data[base:])
    with pytest.raises(BadInput, match=r"D819.*array"):
        SavedIndex(saved)


def test_a_head_that_is_no_head_is_refused(saved: Path) -> None:
    written = msgspec.msgpack.encode({"kernels": 1})
    saved.write_bytes(START.pack(b"TGINDEX2", len(written), crc32(written)) + written)
    with pytest.raises(BadInput, match=r"D819.*malformed header"):
        SavedIndex(saved)
