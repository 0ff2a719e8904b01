"""Whether the origin answers this gateway, asked by one signed question, and in words what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from gateway.admin.formatting import origin_text
from gateway.admin.origin_check import (
    REMEMBERED_FAILED_SECONDS,
    REMEMBERED_SECONDS,
    REMEMBERED_WELL_SECONDS,
    OriginCheck,
    OriginChecks,
    OriginFinding,
)
from gateway.api.documents import OriginStatus
from gateway.app.node import origin_for_checks
from gateway.config import OriginSettings, Settings
from gateway.config.live import LiveSettings
from gateway.core.clock import SystemClock
from gateway.core.errors import CredentialsUnavailable, OriginUnreachable
from gateway.origin.client import KeyPair, OriginRequest
from gateway.origin.client import OriginSettings as OriginEndpoint
from gateway.origin.retry import OriginHealth
from gateway.origin.s3 import S3Origin
from gateway.origin.signing import StaticCredentials, origin_name
from tests.support.admin_documents import filled
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import AlterHeaders, Answer, Unreachable, on
from tests.support.set_clock import SetClock
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin


@asynccontextmanager
async def checking(url: str, key: str = ACCESS_KEY_ID, secret: str = SECRET_ACCESS_KEY) -> AsyncIterator[OriginCheck]:
    origin = OriginSettings.model_validate(
        {"endpoint_url": url, "region": "us-east-1", "access_key_id": key, "secret_access_key": secret}
    )
    async with origin_for_checks(LiveSettings(Settings(origin=origin)), "feed") as (asked, _):
        yield OriginCheck(asked, url)


def found(url: str, key: str = ACCESS_KEY_ID, secret: str = SECRET_ACCESS_KEY) -> OriginFinding:
    async def run() -> OriginFinding:
        async with checking(url, key, secret) as check:
            return await check.finding()

    return asyncio.run(run())


def test_an_origin_that_answers_is_well() -> None:
    """One signed question."""
    with StrictOrigin() as origin:
        assert found(origin.endpoint_url) == OriginFinding("well")
        assert [line.split(b"?")[0] for line in origin.request_lines] == [b"GET /"]


def test_a_key_that_may_not_list_buckets_is_a_good_key() -> None:
    """Rights to one bucket are enough to serve it."""
    with StrictOrigin() as origin:
        origin.model.inject(lambda call: True, Answer(403, "AccessDenied"), times=None)
        assert found(origin.endpoint_url) == OriginFinding("well")


@pytest.mark.parametrize(
    ("key", "secret", "code"),
    [("AKIAUNKNOWN", SECRET_ACCESS_KEY, "InvalidAccessKeyId"), (ACCESS_KEY_ID, "wrong", "SignatureDoesNotMatch")],
)
def test_a_key_that_is_refused(key: str, secret: str, code: str) -> None:
    """The origin's own word for it, and whose key it is."""
    with StrictOrigin() as origin:
        finding = found(origin.endpoint_url, key, secret)
    assert (finding.state, finding.reachable) == ("refused", True)
    assert "refuses the gateway's own key" in (finding.problem or "")
    assert code in (finding.problem or "")


def test_a_clock_that_is_wrong() -> None:
    """The signature is put right by what the origin says; callers' signatures are judged by this clock."""
    clock = ManualClock()
    origin = MemoryOrigin(clock)
    origin.inject(lambda call: True, AlterHeaders({"date": "Thu, 01 Jan 2026 00:02:00 GMT"}), times=None)
    finding = asyncio.run(OriginCheck(origin, "http://origin", clock).finding())
    assert (finding.state, finding.reachable) == ("wrong clock", True)
    assert "clock is 120 seconds behind that of http://origin" in (finding.problem or "")


def test_a_host_name_that_nobody_knows() -> None:
    """It is said that it is the name."""
    finding = found("http://no-such-host.invalid:9")
    assert (finding.state, finding.reachable) == ("unreachable", False)
    assert "host name of http://no-such-host.invalid:9 is unknown" in (finding.problem or "")


def test_nobody_listens() -> None:
    """It is said that the connection was refused."""
    assert "nobody listens" in (found("http://127.0.0.1:1").problem or "")


def test_https_asked_of_one_that_speaks_http() -> None:
    """The wrong scheme, in words."""
    with StrictOrigin() as origin:
        finding = found(origin.endpoint_url.replace("http:", "https:"))
    assert finding.state == "unreachable"
    assert "does not speak https" in (finding.problem or "")


def test_a_certificate_that_is_not_trusted(tmp_path: Path) -> None:
    """Not the same as a wrong scheme."""
    certificate = trustme.CA().issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "c.pem")
    with StrictOrigin(certificate_file=str(tmp_path / "c.pem"), key_file=str(tmp_path / "c.pem")) as origin:
        assert "certificate that is not trusted" in (found(origin.endpoint_url).problem or "")


@pytest.mark.slow
def test_an_origin_that_accepts_and_says_nothing_is_not_waited_for() -> None:
    """A socket that opens is no origin that answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        finding = found(url)
    assert finding.state == "unreachable"
    assert "does not answer" in (finding.problem or "")


def test_the_finding_is_remembered_for_a_while() -> None:
    """However often a probe asks, the origin is bothered every few seconds at most."""

    async def run() -> None:
        clock = ManualClock()
        async with checking(origin.endpoint_url) as check:
            check._clock = clock
            origin.model.inject(on(), AlterHeaders({"date": None}), times=None)
            for _ in range(3):
                assert (await check.finding()).reachable
            assert len(origin.request_lines) == 1
            await clock.advance(REMEMBERED_WELL_SECONDS + 1)
            origin.model.inject(lambda call: True, Answer(500, "InternalError"), times=1)
            assert not (await check.finding()).reachable
            await clock.advance(REMEMBERED_SECONDS + 1)
            assert (await check.finding()).reachable
            assert len(origin.request_lines) == 3

    with contextlib.ExitStack() as stack:
        origin = stack.enter_context(StrictOrigin())
        asyncio.run(run())


def test_requests_that_fail_have_the_origin_asked_anew() -> None:
    """What was well half a second ago is asked again where any process has told since that a request has failed; not
    more than once a second, and not where none has failed."""

    async def run() -> None:
        clock, board = ManualClock(), OriginHealth()
        origin = MemoryOrigin(clock)
        failures = board.failures("origin")
        check = OriginCheck(origin, "http://origin", clock, failures=failures)
        await clock.advance(100.0)
        assert (await check.finding()).state == "well"
        await clock.advance(REMEMBERED_FAILED_SECONDS / 2)
        origin.inject(lambda call: True, Unreachable(), times=None)
        board.failures("another").tell(clock.monotonic())
        assert (await check.finding()).state == "well"
        failures.tell(clock.monotonic())
        assert (await check.finding()).state == "well"
        await clock.advance(REMEMBERED_FAILED_SECONDS)
        assert (await check.finding()).state == "unreachable"

    asyncio.run(run())


@pytest.mark.parametrize(
    "effect", [Answer(503, "InternalError"), Answer(403, "ExpiredToken"), None], ids=["5xx", "key", "no answer"]
)
def test_who_asks_an_origin_tells_the_others_that_it_has_failed(effect: Answer | None) -> None:
    """A 404, or a right that is lacking, is no failure of the origin."""

    async def run(url: str) -> None:
        clock, board = SystemClock(), OriginHealth()
        home = OriginEndpoint(endpoint_url=url, region="us-east-1", max_attempts=1)
        pair = StaticCredentials(KeyPair(ACCESS_KEY_ID, SECRET_ACCESS_KEY))
        asked = S3Origin(home, pair, clock, instance_id="feed", silence=board)
        failures = board.failures(origin_name(url))
        try:
            origin.model.inject(lambda call: True, Answer(403, "AccessDenied"), times=1)
            for _ in range(2):
                async with await asked.send(OriginRequest("GET", "none")):
                    pass
            assert failures.told_at() == 0.0
            if effect is None:
                origin.stop()
            else:
                origin.model.inject(lambda call: True, effect, times=None)
            with contextlib.suppress(OriginUnreachable):
                async with await asked.send(OriginRequest("GET", "none")):
                    pass
            assert failures.told_at() > 0.0
        finally:
            await asked.aclose()

    with StrictOrigin() as origin:
        asyncio.run(run(origin.endpoint_url))


class _NoKey:
    """A source that has no pair now."""

    async def current(self) -> KeyPair:
        raise CredentialsUnavailable("the token of the role has expired")


def test_no_key_to_ask_with_is_not_an_origin_that_does_not_answer() -> None:
    """It is told as what it is, to the other processes, too."""

    async def run(url: str) -> None:
        clock, board = SystemClock(), OriginHealth()
        home = OriginEndpoint(endpoint_url=url, region="us-east-1", max_attempts=1)
        asked = S3Origin(home, _NoKey(), clock, instance_id="feed", silence=board)
        try:
            finding = await OriginCheck(asked, url).finding()
        finally:
            await asked.aclose()
        assert finding == OriginFinding("no credentials", "the token of the role has expired")
        assert not finding.reachable
        assert origin_text(filled(OriginStatus, state=finding.state, problem=finding.problem)) == (
            "not asked, for want of a key: the token of the role has expired"
        )
        assert board.failures(origin_name(url)).told_at() > 0.0
        assert origin.request_lines == []

    with StrictOrigin() as origin:
        asyncio.run(run(origin.endpoint_url))


def test_changes_are_told_once() -> None:
    """For the log: what is found at first, and what has changed since."""

    async def run() -> None:
        clock = ManualClock()
        origin = MemoryOrigin(clock)
        told: list[tuple[str, str]] = []
        live = LiveSettings(Settings(origin=OriginSettings(endpoint_url="http://origin", region="us-east-1")))
        checks = OriginChecks(
            origin, live, clock=clock, on_change=lambda where, found: told.append((where, found.state))
        )
        for state in ("well", "well", "unreachable", "unreachable", "well"):
            origin.faults.clear()
            if state == "unreachable":
                origin.inject(lambda call: True, Unreachable(), times=None)
            await clock.advance(REMEMBERED_WELL_SECONDS + 1)
            await checks.findings()
        assert told == [("the origin", one) for one in ("well", "unreachable", "well")]

    asyncio.run(run())


@contextlib.contextmanager
def _saying(answer: bytes, *, reset: bool) -> Iterator[str]:
    """The address of a server that says the same to everybody, and closes, or resets, the connection."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = listening.accept()
                one.recv(65_536)
                one.sendall(answer)
                if reset:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


_GO = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"
_WELCOME = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\nconnection: close\r\n\r\n<html>"
_ALERT = b"\x15\x03\x01\x00\x02\x02\x46"


@pytest.mark.parametrize(
    ("scheme", "answer", "reset", "word"),
    [
        ("http", _GO, False, "speaks https"),
        ("http", _WELCOME, False, "not as S3 does"),
        ("http", _ALERT, False, "https"),
        ("http", b"", True, "want https?"),
        ("https", b"", True, "want http?"),
    ],
    ids=["Go", "a web server", "an alert", "a reset", "a reset of TLS"],
)
def test_what_is_no_s3_is_told_in_words(scheme: str, answer: bytes, reset: bool, word: str) -> None:
    """A socket that opens, and even an answer, is no S3."""
    with _saying(answer, reset=reset) as address:
        finding = found(f"{scheme}://{address}")
    assert finding.state == "unreachable"
    assert word in (finding.problem or "")


def test_a_clock_that_is_refused_though_no_answer_tells_of_it() -> None:
    """By its error code alone: the clock of this machine need not be to blame."""
    with StrictOrigin() as origin:
        origin.model.inject(lambda call: True, Answer(403, "RequestTimeTooSkewed"), times=None)
        finding = found(origin.endpoint_url)
    assert (finding.state, finding.is_refused) == ("wrong clock", True)
    assert "(RequestTimeTooSkewed), but its answers tell the time of this machine's clock" in (finding.problem or "")


@pytest.mark.parametrize(("ahead_seconds", "direction"), [(1200.0, "behind"), (-1200.0, "ahead of")])
def test_a_clock_that_differs_from_that_of_a_live_origin(ahead_seconds: float, direction: str) -> None:
    """By how much, and which one is ahead; whether what is signed by the origin's time is refused as well."""
    clock = SetClock()
    clock.ahead_seconds = ahead_seconds
    with StrictOrigin(clock=clock) as origin:
        corrected = found(origin.endpoint_url)
        origin.model.inject(lambda call: True, Answer(403, "RequestTimeTooSkewed"), times=None)
        refused = found(origin.endpoint_url)
    differ = f"this machine's clock is 1200 seconds {direction} that of {origin.endpoint_url}"
    assert (corrected.state, corrected.is_refused, refused.state, refused.is_refused) == (
        "wrong clock",
        False,
        "wrong clock",
        True,
    )
    assert (corrected.problem or "").startswith(f"{differ}: set it right")
    assert "refuses what Forebay signs, for its time (RequestTimeTooSkewed)" in (refused.problem or "")
    assert differ in (refused.problem or "")


def test_a_clock_that_goes_wrong_is_told_soon_and_once() -> None:
    """Who asks the origin meets it first; the figure alone is no news."""
    board = OriginHealth()

    async def run(origin: StrictOrigin, clock: SetClock) -> None:
        settings = OriginSettings.model_validate(
            {
                "endpoint_url": origin.endpoint_url,
                "region": "us-east-1",
                "access_key_id": ACCESS_KEY_ID,
                "secret_access_key": SECRET_ACCESS_KEY,
            }
        )
        endpoint = OriginEndpoint(origin.endpoint_url, "us-east-1")
        pair = StaticCredentials(KeyPair(ACCESS_KEY_ID, SECRET_ACCESS_KEY))
        asking = S3Origin(endpoint, pair, SystemClock(), instance_id="a", silence=board)
        told: list[str] = []
        try:
            async with origin_for_checks(LiveSettings(Settings(origin=settings)), "feed") as (asked, _):
                checks = OriginChecks(
                    asked,
                    LiveSettings(Settings(origin=settings)),
                    board=board,
                    on_change=lambda _, finding: told.append(finding.state),
                )
                await checks.findings()
                clock.ahead_seconds = 1200.0
                before = board.failures(origin_name(origin.endpoint_url)).told_at()
                async with await asking.send(OriginRequest("GET", query=[("max-buckets", "1")])) as answer:
                    assert answer.status == 200
                assert board.failures(origin_name(origin.endpoint_url)).told_at() > before
                for ahead in (1200.0, 1300.0, 1450.0):
                    clock.ahead_seconds = ahead
                    checks._main._known = None  # as after the time for which it is remembered
                    await checks.findings()
                assert told == ["well", "wrong clock"]
                clock.ahead_seconds = 0.0
                checks._main._known = None
                await checks.findings()
                assert told == ["well", "wrong clock", "well"]
        finally:
            await asking.aclose()

    clock = SetClock()
    with StrictOrigin(clock=clock) as origin:
        asyncio.run(run(origin, clock))


def test_each_bucket_and_slot_that_differs_is_asked_for() -> None:
    """At its home, for a key under its prefix; a bucket that is not there, and a pair that is not renewed, are told;
    the summary names them all. What the settings do not name any more is not asked for."""

    async def scenario(main: str, far: str) -> None:
        pair = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
        settings = Settings.model_validate(
            {
                "origin": {"endpoint_url": main, "region": "us-east-1", **pair},
                "origin_credentials": [{"name": "k", **pair}, {"name": "late", **pair}],
                "buckets": [
                    {"name": "far", "endpoint_url": far, "region": "us-east-1"},
                    {"name": "none", "endpoint_url": far, "region": "us-east-1", "origin_credentials": "k"},
                ],
                "slots": [
                    {"name": "s", "prefix": "s3://far/s/", "origin_credentials": "late"},
                    {"name": "plain", "prefix": "s3://far/plain/"},
                ],
            }
        )
        live = LiveSettings(settings)
        async with origin_for_checks(live, "feed") as (asked, _):
            checks = OriginChecks(asked, live, lambda name: "STS refuses: X" if name == "late" else None)
            found, others = await checks.findings()
            assert found == OriginFinding("well")
            assert [(one.prefix, one.slot, one.credentials) for one, _ in others] == [
                ("s3://far/", None, "the key of [origin]"),
                ("s3://none/", None, f"k (key {ACCESS_KEY_ID})"),
                ("s3://far/s/", "s", f"late (key {ACCESS_KEY_ID})"),
            ]
            missing = f"{far} has no bucket 'none'"
            late = "the key pair is good still, and is not renewed: STS refuses: X"
            assert [finding.problem for _, finding in others] == [None, missing, late]
            assert [finding.is_key_not_renewed for _, finding in others] == [False, False, True]
            together = await checks.finding()
            assert (together.state, together.reachable) == ("refused", True)
            assert together.problem == f"s3://none/: {missing}; s3://far/s/: {late}"
            await live.change(settings.model_copy(update={"buckets": settings.buckets[:1], "slots": []}))
            assert await checks.finding() == OriginFinding("well")

    with StrictOrigin() as main, StrictOrigin() as far:
        far.model.create_bucket("far")
        asyncio.run(scenario(main.endpoint_url, far.endpoint_url))
        assert [line.split(b"?")[0] for line in main.request_lines] == [b"GET /"]
        asked = sorted(line.decode() for line in far.request_lines)
        assert [line.split(" ")[1] for line in asked] == [
            "/far?list-type=2&max-keys=1&prefix=",
            "/far?list-type=2&max-keys=1&prefix=s%2F",
            "/none?list-type=2&max-keys=1&prefix=",
        ]
