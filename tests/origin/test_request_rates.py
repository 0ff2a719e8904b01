"""An origin that says SlowDown: which requests are held back, what counts as one, and what clients are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.core.clock import Clock
from gateway.core.errors import OriginBusy
from gateway.origin.client import OriginRequest, OriginSettings, Purpose
from gateway.origin.retry import is_throttled
from gateway.origin.s3 import S3Origin
from gateway.origin.signing import StaticCredentials
from gateway.origin.traffic_meter import OriginMeter
from tests.origin.clocks import JumpingClock
from tests.origin.origins import STRICT_PAIR
from tests.support.memory_origin.faults import Answer, Fault, on
from tests.support.strict_origin import StrictOrigin


class Gate:
    """Tells what it is asked; holds back what comes while `is_closed`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.is_closed = False
        self.asked = list[str]()
        self.charged = list[str]()
        self.refusals = list[str]()
        self.waited = list[Purpose]()
        self.waited_before = list[float]()

    def passes(self, request: OriginRequest) -> bool:
        self.asked.append(request.method)
        return not self.is_closed

    async def wait(self, request: OriginRequest, waited_seconds: float = 0.0) -> None:
        self.waited.append(request.purpose)
        self.waited_before.append(waited_seconds)
        await self.clock.sleep(1.0)
        if request.key == "never":
            raise OriginBusy("too long")

    def charge(self, request: OriginRequest) -> None:
        self.charged.append(request.method)

    def refused(self, request: OriginRequest, sent_at: float) -> None:
        assert sent_at >= 0
        self.refusals.append(request.method)


Scenario = Callable[[S3Origin, Gate], Awaitable[None]]


def play(strict: StrictOrigin, scenario: Scenario) -> Gate:
    clock = JumpingClock()
    gate = Gate(clock)

    async def main() -> None:
        meter = OriginMeter(None, gate)
        settings = OriginSettings(endpoint_url=strict.endpoint_url, max_attempts=3)
        origin = S3Origin(settings, StaticCredentials(STRICT_PAIR), clock, instance_id="g", rates=meter)
        try:
            await scenario(origin, gate)
        finally:
            await origin.aclose()

    asyncio.run(main())
    return gate


async def status(origin: S3Origin, request: OriginRequest) -> int:
    async with await origin.send(request) as response:
        return response.status


@pytest.mark.parametrize("code", ["SlowDown", "ServiceUnavailable"])
def test_every_try_of_every_request_passes_and_each_refusal_is_told(code: str) -> None:
    """Whatever it asks for; an answer that cannot be hidden by trying again reaches the client as it is."""

    async def scenario(origin: S3Origin, gate: Gate) -> None:
        requests = [
            OriginRequest("GET", "bucket", "a"),
            OriginRequest("HEAD", "bucket", "a"),
            OriginRequest("GET", "bucket", None, [("list-type", "2")]),
            OriginRequest("PUT", "bucket", "b", body=b"x"),
            OriginRequest("DELETE", "bucket", "b"),
            OriginRequest("POST", "bucket", "c", [("uploads", None)]),
        ]
        for request in requests:
            strict.model.faults.append(Fault(lambda _: True, Answer(503, code, {"x-amz-request-id": "r"}), times=1))
            assert await status(origin, request) < 300
            assert (gate.asked, gate.refusals) == ([request.method] * 2, [request.method])
            gate.asked.clear()
            gate.refusals.clear()
        strict.model.faults.append(Fault(lambda _: True, Answer(503, code), times=3))
        async with await origin.send(requests[0]) as response:
            assert response.status == 503
            assert code.encode() in await response.read(10_000)
        assert len(gate.refusals) == 3

    with StrictOrigin() as strict:
        strict.model.put("bucket", "a", b"data")
        assert play(strict, scenario).charged == []


def test_what_waits_is_sent_afterwards_and_who_waits_in_vain_sends_nothing() -> None:
    """Bodies included."""

    async def scenario(origin: S3Origin, gate: Gate) -> None:
        gate.is_closed = True
        assert await status(origin, OriginRequest("PUT", "bucket", "b", body=b"x", purpose=Purpose.FLUSH)) == 200
        with pytest.raises(OriginBusy):
            await origin.send(OriginRequest("PUT", "bucket", "never", body=b"x"))
        assert gate.waited == [Purpose.FLUSH, Purpose.LIVE]
        assert [call.key for call in strict.model.calls] == ["b"]

    with StrictOrigin() as strict:
        strict.model.put("bucket", "a", b"data")
        play(strict, scenario)


def test_all_tries_of_a_request_wait_for_one_time() -> None:
    """Each is told for how long those before it have waited, and its caller before it."""

    async def scenario(origin: S3Origin, gate: Gate) -> None:
        gate.is_closed = True
        strict.model.faults.append(Fault(on(key="a"), Answer(503, "SlowDown"), times=2))
        assert await status(origin, OriginRequest("GET", "bucket", "a")) == 200
        assert gate.waited_before == pytest.approx([0.0, 1.0, 2.0])
        assert await status(origin, OriginRequest("GET", "bucket", "a", waited_seconds=7.0)) == 200
        assert gate.waited_before[3:] == [7.0]

    with StrictOrigin() as strict:
        strict.model.put("bucket", "a", b"data")
        play(strict, scenario)


def test_other_failures_are_no_refusals() -> None:
    """A server that fails, or a key that is refused, says nothing about the number of requests."""

    async def scenario(origin: S3Origin, gate: Gate) -> None:
        for answer in (Answer(500), Answer(503, body=b"<html>proxy</html>"), Answer(403, "AccessDenied")):
            strict.model.faults.append(Fault(on(key="a"), answer, times=1))
            await status(origin, OriginRequest("GET", "bucket", "a"))
        assert gate.refusals == []

    with StrictOrigin() as strict:
        strict.model.put("bucket", "a", b"data")
        play(strict, scenario)


@pytest.mark.parametrize(
    ("method", "code_of_http", "code", "headers", "is_one"),
    [
        ("GET", 503, "SlowDown", {}, True),
        ("PUT", 503, "ServiceUnavailable", {}, True),
        ("GET", 503, "InternalError", {}, False),
        ("HEAD", 503, None, {}, False),
        ("HEAD", 503, None, {"x-amz-request-id": "1"}, True),
        ("GET", 503, None, {"x-amz-request-id": "1"}, False),
        ("HEAD", 429, None, {}, True),
        ("GET", 429, "TooManyRequests", {}, True),
        ("GET", 500, "SlowDown", {}, False),
        ("GET", 200, None, {}, False),
    ],
)
def test_which_answers_are_for_the_number_of_requests(
    method: str, code_of_http: int, code: str | None, headers: dict[str, str], is_one: bool
) -> None:
    """S3's, and 429; not a proxy's 503, behind which there may be nobody."""
    assert is_throttled(method, code_of_http, code, headers) is is_one
