"""Heads that come in pieces are judged as those that come whole."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.edge.request_parsing import IncompleteHead


@given(
    st.lists(st.sampled_from([b"GET / HTTP/1.1", b"\r\n", b"\r", b"\n", b" ", b"Host: h", b"a: b", b"\x00", b"get"]))
)
def test_a_head_in_single_bytes_is_judged_as_one_that_comes_whole(words: list[bytes]) -> None:
    """It ends where the whole one ends; what is refused whole is refused by its last byte."""
    data = b"".join(words)
    if not data:
        return
    outcomes = [_outcome(data, [len(data)]), _outcome(data, range(1, len(data) + 1))]
    if data.find(b"\r\n\r\n") < 0:
        assert outcomes[0] == outcomes[1]
    else:  # the whole head is the parser's to judge
        assert outcomes[1] in (outcomes[0], "BadRequest")


def _outcome(data: bytes, sizes: Iterable[int]) -> int | str:
    incomplete, gathered = IncompleteHead(1000), bytearray()
    for size in sizes:
        gathered += data[len(gathered) : size]
        try:
            end = incomplete.find_end(gathered)
        except S3Error as error:
            return error.code
        if end >= 0:
            return end
    return -1
