"""Who gets a connection, and which."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence

import pytest
from aiohappyeyeballs import AddrInfoType

from gateway.origin.http1_client import client as client_module
from gateway.origin.http1_client.client import IDLE_SECONDS_MAX, KEPT_SECONDS, Claim, Endpoint, Pool, Resolver
from gateway.origin.http1_client.connection import Supervision
from gateway.origin.http1_client.response_stream import ResponseBroken
from tests.origin.http1_client.raw_origin import REQUEST, Client, client, saying
from tests.support.waiting import until

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def test_no_more_are_at_work_than_may_be() -> None:
    """Who comes when all are taken waits for one, in order, and gets one that is there already."""
    async with client(saying(ANSWER), connections_max=2) as one:
        assert await asyncio.gather(*(one.body() for _ in range(20))) == [b"ok"] * 20
        assert one.origin.connections == 2


async def test_the_turn_of_a_connection_that_breaks_goes_to_the_next() -> None:
    """However answers end, nobody waits for ever."""
    async with client(saying(b"HTTP/1.1 200 OK\r\n", then_close=True), connections_max=1) as one:
        ends = await asyncio.gather(*(one.body() for _ in range(5)), return_exceptions=True)
        assert [type(end).__name__ for end in ends] == ["ResponseBroken"] * 5
        assert one.pool._shares.granted == 0


async def test_who_is_cancelled_while_waiting_takes_no_turn() -> None:
    """Nor does a connection that could not be made."""
    async with client(saying(ANSWER), connections_max=1) as one:
        held = await one.pool.take(one.endpoint, Claim())
        waiting = asyncio.create_task(one.body())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        held.close()
        assert await one.body() == b"ok"


async def test_a_refused_connection_is_an_error_and_takes_no_turn() -> None:
    """The origin is away: everybody is told."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        endpoint = Endpoint("127.0.0.1", bound.getsockname()[1], tls=False)
        pool = Pool(1, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), connect_seconds_max=2.0, wait_seconds_max=2.0)
        for _ in range(3):
            with pytest.raises(ConnectionRefusedError):
                await pool.take(endpoint, Claim())
        await pool.aclose()


async def _idle(one: Client, count: int) -> None:
    connections = [await one.pool.take(one.endpoint, Claim()) for _ in range(count)]
    answers = [connection.ask(b"GET / HTTP/1.1\r\n\r\n", one.supervision, bodiless=False) for connection in connections]
    for answer in answers:
        await answer.begun()
        answer.close()
    assert one.origin.connections == count


async def test_connections_that_were_idle_for_long_are_not_trusted() -> None:
    """The origin may be closing them just now; they are closed, the one used last is taken first."""
    async with client(saying(ANSWER)) as one:
        await _idle(one, 3)
        [idle] = one.pool._idle.values()
        idle[0].idle_since -= IDLE_SECONDS_MAX
        idle[1].idle_since -= IDLE_SECONDS_MAX
        last = idle[2]
        one.pool._sweep()
        assert list(idle) == [last]
        last.idle_since -= IDLE_SECONDS_MAX
        assert await one.body() == b"ok"
        assert one.origin.connections == 4


async def test_what_the_origin_closed_is_not_used_again() -> None:
    """A connection lost while idle is forgotten at once."""
    async with client(saying(ANSWER, then_close=True)) as one:
        for number in range(1, 4):
            assert await one.body() == b"ok"
            await until(lambda: not one.pool._open)
            assert one.origin.connections == number


async def test_idle_connections_to_others_give_way() -> None:
    """The bound holds over all origins together: a bucket of its own host name must not starve."""
    async with client(saying(ANSWER), connections_max=2) as one, client(saying(ANSWER)) as other:
        await _idle(one, 2)
        both = Client(other.endpoint, one.pool, other.origin, one.supervision)
        assert await both.body() == b"ok"
        await until(lambda: len(one.pool._open) == 2)


async def test_names_are_looked_up_once_for_many_and_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many connections begin at once; a failure is nobody's answer but theirs who waited."""
    asked: list[str] = []
    found: Sequence[AddrInfoType] = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))]

    async def look_up(host: str, port: int) -> Sequence[AddrInfoType]:
        asked.append(host)
        await asyncio.sleep(0)
        if host == "unknown":
            raise socket.gaierror("no such host")
        return found

    monkeypatch.setattr(client_module, "_look_up", look_up)
    one = Resolver()
    assert await asyncio.gather(*(one.addresses("a", 80) for _ in range(5))) == [found] * 5
    assert asked == ["a"]
    one._found["a", 80] = one._found["a", 80][0] - KEPT_SECONDS - 1, one._found["a", 80][1]
    assert await one.addresses("a", 80) == found
    assert asked == ["a", "a"]
    for _ in range(2):
        with pytest.raises(OSError, match="no such host"):
            await one.addresses("unknown", 80)
    assert asked == ["a", "a", "unknown", "unknown"]


async def test_a_watch_that_fails_ends_its_own_request_and_no_other_watch() -> None:
    """Whatever a look at one connection raises: each request ends in its time, and the error is reported."""

    async def say_nothing(*_: object) -> None:
        await asyncio.Event().wait()

    def fail(*_: object) -> None:
        raise AttributeError("no such answer")

    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context.get("exception")))
    async with client(say_nothing, silence_seconds_max=0.5) as one:
        connections = [await one.pool.take(one.endpoint, Claim()) for _ in range(3)]
        failing = Supervision(60.0, 60.0, on_silence=fail)
        asked = [
            connection.ask(REQUEST, supervision, bodiless=False)
            for connection, supervision in zip(connections, (failing, one.supervision, failing), strict=True)
        ]
        ends = await asyncio.gather(*(answer.begun() for answer in asked), return_exceptions=True)
        assert [type(end) for end in ends] == [ResponseBroken] * 3
        assert [type(error) for error in reported] == [AttributeError] * 2
        assert one.pool._shares.granted == 0
