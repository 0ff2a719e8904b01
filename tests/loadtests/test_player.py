from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from loadtests.harness import player, tools
from loadtests.harness.content import Family, load_object
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.reader import WrongAnswer

SMALL = Family("small/", 50, 100_000)
LARGE = Family("large/", 1, 9_000_000)

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")


@pytest.fixture(scope="module")
def origin() -> Iterator[LoadOrigin]:
    with LoadOrigin([SMALL, LARGE]) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("spin", [False, True])
def test_each_request_is_sent_once(origin: LoadOrigin, spin: bool) -> None:
    """Over more connections than the last requests need, asleep or spinning: each is answered in full, and counted."""
    before = origin.settled_counts()
    played = player.play(origin.port, player.whole(origin.address, SMALL), 8, spin=spin)
    after = origin.settled_counts()
    assert (played.requests, played.received_bytes) == (50, 50 * 100_000)
    assert (after.gets - before.gets, after.sent_bytes - before.sent_bytes) == (50, 50 * 100_000)
    assert 0 < played.p50_seconds <= played.p99_seconds <= played.seconds


def test_parts_make_up_the_object(origin: LoadOrigin) -> None:
    """The last one is shorter; one part may be all of it."""
    of = load_object(LARGE.path(0), LARGE.size_bytes)
    assert [size for _, size in player.parts(origin.address, of, 4_000_000)] == [4_000_000, 4_000_000, 1_000_000]
    for part_bytes in (4_000_000, of.size_bytes):
        requests = player.parts(origin.address, of, part_bytes)
        assert player.play(origin.port, requests, 2).received_bytes == of.size_bytes


def test_more_connections_than_requests_do_no_harm(origin: LoadOrigin) -> None:
    """Those without a request stay idle."""
    requests = player.whole(origin.address, SMALL)[:3]
    assert player.play(origin.port, requests, 8).requests == 3


def test_a_wrong_answer_gives_no_figure(origin: LoadOrigin) -> None:
    """Another length, another status: the run ends and shows the answer's head."""
    [(request, size_bytes)] = player.whole(origin.address, SMALL)[:1]
    with pytest.raises(WrongAnswer, match=r"a wrong answer after 0 of 1 answers: HTTP/1\.1 200"):
        player.play(origin.port, [(request, size_bytes - 1)], 1)
    with pytest.raises(WrongAnswer, match=r"HTTP/1\.1 404"):
        player.play(origin.port, [(request.replace(b"/small/", b"/other/"), size_bytes)], 1)


def test_a_lost_connection_gives_no_figure() -> None:
    """A server that ends within a body is not measured."""

    def answer_half() -> None:
        wire, _ = listener.accept()
        with wire:
            wire.recv(4096)
            wire.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as server:
        server.submit(answer_half)
        with pytest.raises(WrongAnswer, match="a connection is lost after 0 of 1 answers: within a body"):
            player.play(listener.getsockname()[1], [(b"GET / HTTP/1.1\r\n\r\n", 10)], 1)


def test_without_a_compiler_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lacks one is told how to install it."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    player._program.cache_clear()
    with pytest.raises(tools.Missing, match="cc is missing: apt-get install gcc"):
        player.play(1, [(b"GET", 0)], 1)
