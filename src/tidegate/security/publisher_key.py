"""A publisher's key: a secret that reserves the publisher's name and its sequence numbers.

The broker delivers each number of a publisher once. So a client that publishes the highest number under another
publisher's name would silence it: everything that publisher sends afterwards looks like a duplicate. A publisher that
presents a key is therefore known as `NAME~DIGEST`, where the digest is made of the name and the key. Everything that
remembers numbers (its broker, the other brokers of the cluster, queues on disk) stores them under this whole name.
Another key makes another publisher, and clients cannot send a whole name themselves. So no keys are stored, and a
restarted broker or another one needs to know nothing.

A publisher without a key is known by its plain name, which anyone may use.
"""

from __future__ import annotations

import base64
import re
import secrets
from hashlib import blake2b
from typing import Final

from tidegate.errors import NotAllowed, ProtocolError

NAME_CHARACTERS_MAX: Final = 128
# Subscribers see the digest in the name and could try keys against it: a short key would be found.
KEY_CHARACTERS_MIN: Final = 16
KEY_CHARACTERS_MAX: Final = 256
_KEY_BYTES: Final = 18
_DIGEST_BYTES: Final = 10
_KEYED: Final = re.compile(r".*~[a-z2-7]{16}", re.DOTALL)


class ForeignPublisher(NotAllowed):
    """A name that belongs to the holder of a key. A token does not help, hence 403 instead of 401."""

    status = 403


def make_key() -> str:
    """Returns a random key that cannot be guessed."""
    return secrets.token_urlsafe(_KEY_BYTES)


def whole_name(name: str, key: str) -> str:
    """Returns the name under which a publisher is known. With a key it ends in a digest.

    Raises P310 for a name or a key that is too long or too short, and A507 for a name that already ends like a
    digest."""
    if len(name) > NAME_CHARACTERS_MAX:
        raise ProtocolError(
            "P310",
            f"the publisher's name has {len(name)} characters",
            f"use at most {NAME_CHARACTERS_MAX}, unique for each start of a client",
        )
    if is_keyed(name):
        raise ForeignPublisher(
            "A507",
            f"{name[-40:]!r} is the name of a publisher with a key",
            "leave out ~ and what follows it, and give the key",
        )
    if not key:
        return name
    if not name or not KEY_CHARACTERS_MIN <= len(key) <= KEY_CHARACTERS_MAX:
        raise ProtocolError(
            "P310",
            f"the publisher's key has {len(key)} characters, and its name {len(name)}",
            f"give a name, and a secret key of {KEY_CHARACTERS_MIN} to {KEY_CHARACTERS_MAX} characters",
        )
    digest = blake2b(f"{name}~{key}".encode(), digest_size=_DIGEST_BYTES, person=b"tidegate-pub-key")
    return f"{name}~{base64.b32encode(digest.digest()).decode().lower()}"


def is_keyed(name: str) -> bool:
    """Returns whether a name ends in a digest, as only a key can produce it."""
    return "~" in name and _KEYED.fullmatch(name) is not None
