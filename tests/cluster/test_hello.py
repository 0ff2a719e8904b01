"""The document by which a node says who it is."""

from __future__ import annotations

import orjson
import pytest

from gateway.cluster.hello import HELLO_BYTES_MAX, SILENT_TOLD, SLOTS_TOLD, Hello, block_sizes_of
from gateway.origin.peer_protocol import VERSION

HELLO = Hello(name="gpu-1", address="10.0.0.1:9002", version="1.0", caches=True, age_seconds=7.5, at=1e9)


def test_a_hello_is_read_as_it_was_written() -> None:
    assert Hello.read(HELLO.content()) == HELLO
    assert HELLO.protocol == VERSION


def test_fields_of_a_later_version_do_not_matter() -> None:
    assert Hello.read(orjson.dumps({**orjson.loads(HELLO.content()), "racks": ["r1"]})) == HELLO


@pytest.mark.parametrize(
    "changed",
    [{"weight": 0}, {"weight": 10**9}, {"age_seconds": -1}, {"zone": "x" * 1000}, {"caches": "perhaps"}, {"at": None}],
)
def test_what_cannot_be_is_refused(changed: dict[str, object]) -> None:
    """A peer with the secret may still be broken."""
    with pytest.raises(ValueError):
        Hello.read(orjson.dumps({**orjson.loads(HELLO.content()), **changed}))


def test_a_hello_of_many_slots_is_short_enough() -> None:
    """However long their prefixes are: what is too much is left out."""
    sizes = block_sizes_of((f"s3://bucket/{'x' * 1000}{number}/", 64 << 20) for number in range(2 * SLOTS_TOLD))
    told = HELLO.model_copy(update={"block_sizes": sizes, "silent": ("x" * 256,) * SILENT_TOLD})
    assert len(Hello.read(told.content()).block_sizes) == SLOTS_TOLD


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b" " * (HELLO_BYTES_MAX + 1)])
def test_what_is_no_hello_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):
        Hello.read(content)
