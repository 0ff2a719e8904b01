"""Who may share bytes: readers whose requests go to the origin with the same headers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def audience(headers: Mapping[str, str]) -> bytes:
    """16 bytes for the headers that go to the origin along with a request."""
    return _digest(headers) if headers else _EVERYBODY


def _digest(headers: Mapping[str, str]) -> bytes:
    state = hashlib.blake2b(digest_size=16, person=b"forebay fill 1")
    for name, value in sorted(headers.items()):
        for text in (name.encode(), value.encode("utf-8", "surrogatepass")):
            state.update(len(text).to_bytes(8, "little"))
            state.update(text)
    return state.digest()


_EVERYBODY = _digest({})
