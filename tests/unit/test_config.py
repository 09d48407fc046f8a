"""Settings: flags override the environment, the environment the file, and the file the defaults. Errors name the
invalid setting and the remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tidegate import config as settings
from tidegate.config import Config
from tidegate.errors import ConfigError


def write(path: Path, text: str) -> Path:
    file = path / "tidegate.toml"
    file.write_text(text)
    return file


def test_the_nearest_source_wins(tmp_path: Path) -> None:
    file = write(tmp_path, 'native_port = 1000\nhttp_port = 1001\nbind = "::1"\nblock_s = 2\n')
    environment = {"TIDEGATE_HTTP_PORT": "2001", "TIDEGATE_BIND": "127.0.0.2", "TIDEGATE_TOKEN": "x", "PATH": "/bin"}
    config, origins = settings.load(file, environment, {"bind": "localhost"})
    assert (config.native_port, config.http_port, config.bind, config.block_s) == (1000, 2001, "localhost", 2.0)
    sources = {name: origins[name].source for name in ("native_port", "http_port", "bind", "drain_s")}
    assert sources == {
        "native_port": str(file), "http_port": "TIDEGATE_HTTP_PORT", "bind": "--bind", "drain_s": "default",
    }  # fmt: skip


def test_lists_and_booleans_are_read_from_text() -> None:
    config, _origins = settings.load(
        None, {"TIDEGATE_ORIGINS": "https://a.example, https://b.example", "TIDEGATE_INSECURE": "true"}
    )
    assert config.origins == ("https://a.example", "https://b.example")
    assert config.insecure


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        ("native_prot = 1", "C403", "did you mean native_port?"),
        ("zzz = 1", "C403", "config check"),
        ("native_port = 70000", "C404", "native_port = 70000"),
        ('native_port = "7270"', "C404", "native_port"),
        ("block_s = 0", "C404", "block_s"),
        ('log_level = "loud"', "C404", "log_level"),
        ("native_port = ", "C402", "not TOML"),
        ('tls_cert = "a.pem"', "C408", "tls_key"),
        ('token = "in the file"', "C403", "token"),
    ],
)
def test_a_bad_file_is_an_error_with_its_cure(tmp_path: Path, text: str, code: str, named: str) -> None:
    with pytest.raises(ConfigError, match=code) as caught:
        settings.load(write(tmp_path, text))
    assert named in str(caught.value)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="C401"):
        settings.load(tmp_path / "missing.toml")


@pytest.mark.parametrize("bind", ["0.0.0.0", "192.0.2.1", "::", "broker.example"])
def test_beyond_loopback_a_token_is_made_up(bind: str) -> None:
    made_up = [settings.make_token(Config(bind=bind)) for _ in range(2)]
    assert made_up[0] != made_up[1]
    for token in made_up:
        assert token is not None
        # As strong as the remedy of C407 advises, and valid in the fragment of an address.
        assert re.fullmatch(r"[\w-]{43,}", token, re.ASCII)
        assert settings.read_token(Config(bind=bind), {"TIDEGATE_TOKEN": token}) == token
    assert settings.make_token(Config(bind=bind, insecure=True)) is None


def test_brokers_of_a_cluster_must_share_theirs() -> None:
    with pytest.raises(ConfigError, match="C405"):
        settings.make_token(Config(bind="0.0.0.0", coordinator="zk://127.0.0.1:2181"))
    assert settings.make_token(Config(coordinator="zk://127.0.0.1:2181")) is None


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_none_is(bind: str) -> None:
    assert settings.make_token(Config(bind=bind)) is None


def test_a_token_file_is_read_and_a_weak_or_missing_one_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a token of good length\n")
    assert settings.read_token(Config(token_file=str(file)), {}) == "a token of good length"
    file.write_text("short")
    with pytest.raises(ConfigError, match="C407"):
        settings.read_token(Config(token_file=str(file)), {})
    with pytest.raises(ConfigError, match="C406"):
        settings.read_token(Config(token_file=str(tmp_path / "missing")), {})


def test_every_setting_is_explained() -> None:
    assert all(text and not text.endswith(".") for text in settings.HELP.values())
