from __future__ import annotations

import pytest

from tidegate.client.address import Address
from tidegate.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tidegate://127.0.0.1:7270", Address("127.0.0.1", 7270, False)),
        ("tidegate://broker.example", Address("broker.example", 7270, False)),
        ("tidegate+tls://[::1]:1", Address("::1", 1, True)),
    ],
)
def test_an_address_says_where_and_how(text: str, expected: Address) -> None:
    assert Address.parse(text) == expected
    assert Address.parse(str(expected)) == expected


def test_several_brokers_share_a_scheme() -> None:
    assert Address.parse_all("tidegate+tls://a:1,[::1]:2,c") == (
        Address("a", 1, True),
        Address("::1", 2, True),
        Address("c", 7270, True),
    )
    for text in ("tidegate://a:1,", "a:1,b:2", "tidegate://a:1,tidegate://b:2"):
        with pytest.raises(ConfigError, match="C411"):
            Address.parse_all(text)


@pytest.mark.parametrize(
    "text",
    ["", "127.0.0.1:7270", "http://127.0.0.1", "tidegate://", "tidegate://a:b", "tidegate://a:99999", "tidegate://a/b"],
)
def test_anything_else_is_an_error_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"C411.*tidegate://127\.0\.0\.1:7270"):
        Address.parse(text)
