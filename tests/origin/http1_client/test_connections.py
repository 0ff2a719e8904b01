"""Small and odd answers over one connection. Large bodies: ../test_direct_bodies.py."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.origin.http1_client import response_stream as answers
from gateway.origin.http1_client.client import Claim
from gateway.origin.http1_client.connection import Connection, Supervision
from gateway.origin.http1_client.response_stream import HEAD_BYTES_MAX, ResponseBroken, ResponseHead, ResponseParser
from tests.origin.http1_client.raw_origin import REQUEST, Exchange, client, pieces, saying
from tests.support.waiting import until

BODY = bytes(range(256)) * 4
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nETag: x\r\n\r\n" % len(BODY)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, len(HEAD + BODY) - 1), max_size=6, unique=True))
def test_an_answer_is_the_same_however_it_is_cut(cuts: list[int]) -> None:
    """Head and body may come in any pieces; the connection takes the next request."""
    places = [0, *sorted(cuts), len(HEAD + BODY)]
    parts = [(HEAD + BODY)[start:stop] for start, stop in pairwise(places)]

    async def scenario() -> None:
        async with client(saying(*parts)) as one:
            for _ in range(2):
                found = await one.ask()
                assert (found.head.status, found.head.headers["etag"]) == (200, "x")
                assert bytes(found.whole() or b"") == BODY
                found.close()
            assert one.origin.connections == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("parts", "body", "kept"),
    [
        ([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n", HEAD, BODY], BODY, True),
        ([b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n", b"0\r\n\r\n"], b"abc", True),
        ([HEAD, BODY, b"HTTP/1.1 200 OK\r\n\r\n"], BODY, False),
        ([HEAD.replace(b"ETag: x", b"Connection: close"), BODY], BODY, False),
    ],
    ids=["interim", "chunked", "excess", "told to close"],
)
async def test_framings_that_are_seldom(parts: list[bytes], body: bytes, kept: bool) -> None:
    """The bytes are right, and a connection on which anything else may come is not used again."""
    async with client(saying(b"".join(parts))) as one:
        assert await one.body() == body
        assert await one.body() == body
        assert one.origin.connections == (1 if kept else 2)


@pytest.mark.parametrize("parts", [[HEAD], [HEAD.replace(b"1024", b"0000")]])
async def test_the_answer_to_head_has_no_body(parts: list[bytes]) -> None:
    """Whatever length it tells: the next answer comes right behind it."""
    async with client(saying(*parts)) as one:
        assert [await one.body(bodiless=True) for _ in range(3)] == [b""] * 3
        assert one.origin.connections == 1


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    """As HTTP/1.0 has it."""
    async with client(saying(b"HTTP/1.0 200 OK\r\n\r\n", BODY, then_close=True)) as one:
        assert await one.body() == BODY


@pytest.mark.parametrize("came", [0, 1, len(BODY) - 1])
async def test_a_small_body_that_breaks_off_is_never_whole(came: int) -> None:
    """What came is given, then the failure; `whole` gives nothing."""
    async with client(saying(HEAD + BODY[:came], then_close=True)) as one:
        found = await one.ask()
        assert found.whole() is None
        received = bytearray()
        with pytest.raises(ResponseBroken, match="closed"):
            received += b"".join([piece async for piece in pieces(found)])
        found.close()
        if came:
            found = await one.ask()
            assert await found.piece() == BODY[:came]
            found.close()


def holding(begin: bytes, rest: bytes) -> tuple[Exchange, asyncio.Event]:
    """An exchange that says the rest when the event is set."""
    go = asyncio.Event()

    async def exchange(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        await go.wait()
        writer.write(rest)

    return exchange, go


async def test_a_head_does_not_wait_for_ever_for_a_small_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow origin's bytes are passed on as they come."""
    monkeypatch.setattr(answers, "WHOLE_SECONDS_MAX", 0.02)
    exchange, go = holding(HEAD + BODY[:10], BODY[10:])
    async with client(exchange) as one:
        found = await one.ask()
        assert found.whole() is None
        assert await found.piece() == BODY[:10]
        go.set()
        assert b"".join([piece async for piece in pieces(found)]) == BODY[10:]
        found.close()
        assert found.whole() is None
        assert await one.body() == BODY
        assert one.origin.connections == 1


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200", HEAD, HEAD + BODY[:5]])
async def test_silence_ends_an_answer(begin: bytes) -> None:
    """Before the head there is no answer, behind it a body that broke off; the connection is of no use."""
    exchange, _ = holding(begin, b"")
    async with client(exchange, silence_seconds_max=0.15) as one:
        with pytest.raises(ResponseBroken, match="nothing came"):
            await one.body()


async def test_a_connection_that_was_silent_while_nothing_was_asked_is_as_good_as_before() -> None:
    """One timer serves many requests: between them it strikes nobody."""
    async with client(saying(HEAD + BODY), silence_seconds_max=0.1) as one:
        assert await one.body() == BODY
        await asyncio.sleep(0.25)
        assert await one.body() == BODY
        assert one.origin.connections == 1


EARLY = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"


@pytest.mark.parametrize(
    "begin",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * HEAD_BYTES_MAX,
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n",
        EARLY * 200,
        EARLY.replace(b"x", b"x" * 10_000) * 7,
    ],
    ids=["another protocol", "no end", "too long", "many interim heads", "long interim heads"],
)
async def test_what_is_no_answer_is_none(begin: bytes) -> None:
    """Another protocol, heads that are too long or never end, however they come, and interim ones without an end."""
    async with client(saying(begin)) as one:
        with pytest.raises(ResponseBroken, match="origin's answer"):
            await one.body()


async def test_a_flood_of_interim_heads_costs_no_more_than_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have come at once, few are read."""
    read: list[bytes] = []

    def counted(parser: ResponseParser, head: bytes, *, bodiless: bool) -> ResponseHead:
        read.append(head)
        return whole(parser, head, bodiless=bodiless)

    whole = ResponseParser.head
    monkeypatch.setattr(ResponseParser, "head", counted)
    async with client(saying(EARLY * 100_000)) as one:
        with pytest.raises(ResponseBroken):
            await one.body()
    assert 100 < len(read) < 200


async def test_some_interim_heads_are_no_flood() -> None:
    """A server may say more than once that it works on it."""
    async with client(saying(EARLY * 50, HEAD + BODY)) as one:
        assert await one.body() == BODY


@pytest.mark.parametrize("heard", [True, False])
async def test_a_process_that_stands_still_excuses_only_those_who_were_not_heard(heard: bool) -> None:
    """What keeps it busy has not been silent, and does not move its own deadline."""
    reasons: list[str] = []
    buffer = bytearray(1024)
    connection = Connection(buffer, lambda _: None, lambda _: None)
    connection.connection_made(MutedTransport())
    supervision = Supervision(8.0, 5.0, on_silence=lambda *_: reasons.append("silence"))
    stream = connection.ask(REQUEST, supervision, bodiless=False)
    asked_at = asyncio.get_running_loop().time()
    connection._heard_at = asked_at + 5.5 if heard else asked_at
    connection.excuse(asked_at + 6.0, 5.0)
    connection.check(asked_at + 9.0)
    assert stream.arrival.done() == heard
    connection.check(asked_at + 14.0)
    with pytest.raises(ResponseBroken, match="nothing came for 8 seconds"):
        await stream.begun()


class MutedTransport(asyncio.Transport):
    """Nothing comes of what is written."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def write(self, data: object) -> None: ...
    def abort(self) -> None: ...


async def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    """An answer to no request would be taken for that to the next one."""
    late = asyncio.Event()

    async def exchange(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + BODY)
        if not late.is_set():
            await late.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")

    async with client(exchange) as one:
        assert await one.body() == BODY
        late.set()
        await until(lambda: not one.pool._open)
        assert await one.body() == BODY
        assert one.origin.connections == 2


async def test_who_gives_up_waiting_leaves_no_connection_in_the_middle_of_an_answer() -> None:
    """The next request goes over another one."""
    exchange, go = holding(b"", HEAD + BODY)
    async with client(exchange) as one:
        connection = await one.pool.take(one.endpoint, Claim())
        answer = connection.ask(b"GET / HTTP/1.1\r\n\r\n", one.supervision, bodiless=False)
        waiting = asyncio.create_task(answer.begun())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        answer.close()
        go.set()
        assert await one.body() == BODY
        assert one.origin.connections == 2
