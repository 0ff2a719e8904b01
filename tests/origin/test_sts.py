"""Key pairs that STS lends: asked for long before they end, never waited for while one is good, and no secret told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from gateway.core.errors import CredentialsUnavailable
from gateway.origin import sts as module
from gateway.origin.client import KeyPair
from gateway.origin.signing import ChainCredentials, StaticCredentials
from gateway.origin.sts import AwsSession, Role, RoleCredentials
from tests.support.connections import answering
from tests.support.manual_clock import ManualClock
from tests.support.sts import ToldSts, moto_sts, told_sts
from tests.support.waiting import until

ARN = "arn:aws:iam::123456789012:role/train"
OWN = StaticCredentials(KeyPair("AKOWN", "own-secret"))


@pytest.fixture(autouse=True)
def nowhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variable that sends clients to the gateway is there; nothing answers at it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ENDPOINT_URL_STS", "AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ROLE_ARN"):
        monkeypatch.delenv(name, raising=False)


class Clock(ManualClock):
    """Stands still, and notes for how long it is slept."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await super().sleep(seconds)


@asynccontextmanager
async def lent(sts: ToldSts, clock: Clock, **more: Any) -> AsyncIterator[RoleCredentials]:
    role = Role("train", ARN, "us-east-1", endpoint_url=sts.endpoint_url, **more)
    source = None if "token_file" in more else OWN
    credentials = RoleCredentials(role, source, clock, random.Random(1))
    await credentials.start()
    try:
        yield credentials
    finally:
        await credentials.aclose()


async def asked_again(sts: ToldSts, clock: Clock) -> None:
    """Let time pass until STS is asked again, and no longer."""
    times = len(sts.asked)
    await until(lambda: len(clock.slept) == times)
    await clock.advance(clock.slept[-1])
    await until(lambda: len(sts.asked) == times + 1)


async def test_a_role_is_assumed_with_what_the_configuration_says() -> None:
    """By the gateway's own key, with session name, external id and duration; the pair comes with its token."""
    clock = Clock()
    more = {"session_name": "node-7", "external_id": "ex-1", "duration_seconds": 1800.0}
    async with told_sts(clock.now) as sts, lent(sts, clock, **more) as credentials:
        assert await credentials.current() == KeyPair("ASIA1", "secret1", "token1")
        assert credentials.known() == (KeyPair("ASIA1", "secret1", "token1"),)
        asked = {name: sts.asked[0].get(name) for name in ("Action", "RoleArn", "RoleSessionName", "ExternalId")}
        assert asked == {
            "Action": "AssumeRole",
            "RoleArn": ARN,
            "RoleSessionName": "node-7",
            "ExternalId": "ex-1",
        }
        assert sts.asked[0]["DurationSeconds"] == "1800"
        assert "credential=akown/" in sts.authorizations[0]


async def test_a_web_identity_needs_no_key_and_its_token_is_read_each_time(tmp_path: Path) -> None:
    """Kubernetes writes another token into the file before the one of before ends."""
    clock, token = Clock(), tmp_path / "token"
    token.write_text("first")
    async with told_sts(clock.now) as sts, lent(sts, clock, token_file=token) as credentials:
        assert (await credentials.current()).access_key_id == "ASIA1"
        token.write_text("second")
        await asked_again(sts, clock)
        await until(lambda: credentials.known()[0].access_key_id == "ASIA2")
        assert [form["WebIdentityToken"] for form in sts.asked] == ["first", "second"]
        assert sts.asked[0]["Action"] == "AssumeRoleWithWebIdentity"
        assert sts.authorizations == ["", ""]


@pytest.mark.slow
def test_moto_lends_both_kinds(tmp_path: Path) -> None:
    """Another's STS than our own double."""

    async def scenario(url: str) -> None:
        token = tmp_path / "token"
        token.write_text("a.b.c")
        for more in ({"external_id": "ex-1"}, {"token_file": token}):
            role = Role("train", ARN, "us-east-1", endpoint_url=url, **more)
            credentials = RoleCredentials(role, OWN, ManualClock())
            pair = await credentials.current()
            assert pair.access_key_id.startswith("ASIA")
            assert pair.session_token
            await credentials.aclose()

    with moto_sts() as url:
        asyncio.run(scenario(url))


async def test_no_request_waits_while_a_pair_is_good() -> None:
    """The next pair is asked for in the second half of the life of the first; STS may take its time over it."""
    clock = Clock()
    async with told_sts(clock.now) as sts, lent(sts, clock) as credentials:
        first = await credentials.current()
        await until(lambda: len(clock.slept) == 1)
        await clock.advance(3600 * 0.59)
        await asyncio.sleep(0.05)
        assert len(sts.asked) == 1
        sts.speaks.clear()
        await clock.advance(3600 * 0.22)
        await until(lambda: len(sts.asked) == 2)
        async with asyncio.timeout(1):
            assert await credentials.current() == first
        sts.speaks.set()
        await until(lambda: credentials.known()[0].access_key_id == "ASIA2")
        assert (await credentials.current()).access_key_id == "ASIA2"
        assert credentials.known()[1] == first


def test_processes_do_not_ask_at_the_same_moment() -> None:
    """When they ask again is spread out."""

    async def pauses() -> list[float]:
        clock = Clock()
        async with told_sts(clock.now) as sts:
            for seed in range(8):
                role = Role("train", ARN, "us-east-1", endpoint_url=sts.endpoint_url)
                credentials = RoleCredentials(role, OWN, clock, random.Random(seed))
                await credentials.current()
                await until(lambda seed=seed: len(clock.slept) > seed)  # type: ignore[misc]
                await credentials.aclose()
        return clock.slept

    found = asyncio.run(pauses())
    assert max(found) - min(found) > 60
    assert all(3600 * 0.6 - 1 <= one <= 3600 * 0.8 for one in found)


async def test_what_was_lent_before_holds_until_it_ends_and_then_nothing_does() -> None:
    """Refusals of STS are told by their code, and by nothing that it quotes; it is asked again, and is well one day."""
    clock = Clock()
    async with told_sts(clock.now) as sts, lent(sts, clock, external_id="very-secret-id") as credentials:
        first = await credentials.current()
        sts.refusal, sts.told = "AccessDenied", "very-secret-id secret1 token1 own-secret"
        with structlog.testing.capture_logs() as logged:
            await asked_again(sts, clock)
            await until(lambda: bool(logged))
            assert await credentials.current() == first
            assert credentials.problem == "STS refuses: AccessDenied (HTTP 403)"
            await until(lambda: len(clock.slept) == 2)
            await clock.advance(3600)
            with pytest.raises(CredentialsUnavailable, match="STS refuses: AccessDenied") as caught:
                await credentials.current()
        assert logged[0]["event"] == "STS lends no key pair; the last one is still good"
        for secret in ("very-secret-id", "secret1", "token1", "own-secret"):
            assert secret not in str(logged)
            assert secret not in str(caught.value)
        assert not caught.value.may_be_done
        await until(lambda: len(clock.slept) == 3)  # the question that was under way is answered
        sts.refusal = None
        await asked_again(sts, clock)
        await until(lambda: credentials.problem is None)
        assert (await credentials.current()) != first
        assert credentials.problem is None


@pytest.mark.parametrize("how", ["silent", "nobody", "no token"])
async def test_an_sts_that_is_dead_or_silent_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    """A request has its answer within the bound, and those behind it at once."""
    monkeypatch.setattr(module, "STS_SECONDS_MAX", 0.5)
    clock = Clock()
    more: dict[str, Any] = {"token_file": tmp_path / "missing"} if how == "no token" else {}
    async with told_sts(clock.now) as sts:
        if how == "silent":
            sts.speaks.clear()
        if how == "nobody":
            sts.endpoint_url = "http://127.0.0.1:9"
        async with lent(sts, clock, **more) as credentials:
            for bound_seconds in (5.0, 0.1):
                async with asyncio.timeout(bound_seconds):
                    with pytest.raises(CredentialsUnavailable, match="origin_credentials 'train'"):
                        await credentials.current()


@pytest.mark.parametrize("hours", [-2, 2])
async def test_a_wrong_wall_clock_makes_no_pair_bad(hours: float) -> None:
    """What was asked for holds then: the origin's time is learned from the origin."""
    clock = Clock()
    async with told_sts(lambda: clock.now() + hours * 3600) as sts, lent(sts, clock) as credentials:
        first = await credentials.current()
        await clock.advance(3600 * 0.55)
        assert await credentials.current() == first
        assert 3600 * 0.6 <= clock.slept[0] <= 3600 * 0.8


@pytest.mark.slow
@pytest.mark.parametrize("tells_time", [True, False])
@pytest.mark.parametrize("left_seconds", [0.0, -5.0, -7200.0])
async def test_a_pair_that_is_over_when_it_is_lent_is_none(left_seconds: float, *, tells_time: bool) -> None:
    """STS is asked again within seconds, and what it lends then is used."""
    clock = Clock()
    async with told_sts(clock.now) as sts:
        sts.lent_seconds, sts.tells_time = left_seconds, tells_time
        async with lent(sts, clock) as credentials:
            with pytest.raises(CredentialsUnavailable, match="expired already"):
                await credentials.current()
            for _ in range(5):
                await asked_again(sts, clock)
            await until(lambda: len(clock.slept) == 6)
            assert all(0.5 <= one <= 15 for one in clock.slept)
            sts.lent_seconds = 3600.0
            await asked_again(sts, clock)
            await until(lambda: credentials.problem is None)
            assert (await credentials.current()).access_key_id == "ASIA7"


async def test_an_sts_that_gives_a_pair_until_it_is_over_is_not_asked_more_and_more_often() -> None:
    """As little as is left to it: a question a second at most, and none is taken for good when nothing is left."""
    clock = Clock()
    end = clock.now() + 8
    async with told_sts(clock.now) as sts:
        sts.lent_seconds = 8.0
        async with lent(sts, clock) as credentials:
            await credentials.current()
            while clock.now() < end:
                await until(lambda: len(clock.slept) == len(sts.asked))
                sts.lent_seconds = end - clock.now() - clock.slept[-1]
                assert clock.slept[-1] >= 1
                await asked_again(sts, clock)
            await until(lambda: credentials.problem is not None)
            with pytest.raises(CredentialsUnavailable, match="expired already"):
                await credentials.current()
            assert len(sts.asked) <= 9


async def test_an_sts_that_has_failed_is_not_waited_for_again() -> None:
    """The first question is waited for; then the answer is at once that there is no pair, until there is one."""
    clock = Clock()
    async with told_sts(clock.now) as sts:
        sts.refusal = "AccessDenied"
        async with lent(sts, clock) as credentials:
            with pytest.raises(CredentialsUnavailable, match="AccessDenied"):
                await credentials.current()
            sts.speaks.clear()
            await asked_again(sts, clock)
            async with asyncio.timeout(1):
                with pytest.raises(CredentialsUnavailable, match="AccessDenied"):
                    await credentials.current()


async def test_a_home_that_refuses_the_pair_has_sts_asked_at_once() -> None:
    """Long before the pair ends by what STS has said; every 15 seconds at most, however many refusals there are."""
    clock = Clock()
    async with told_sts(clock.now) as sts, lent(sts, clock) as credentials:
        first = await credentials.current()
        await until(lambda: len(clock.slept) == 1)
        credentials.renew()
        await clock.advance(14.9)
        assert len(sts.asked) == 1
        for number in range(2, 5):
            await clock.advance(15)
            for _ in range(100):
                credentials.renew()
            await until(lambda number=number: credentials.known()[0].access_key_id == f"ASIA{number}")  # type: ignore[misc]
            await until(lambda number=number: len(clock.slept) == number)  # type: ignore[misc]
            credentials.renew()
            await clock.advance(0)
            assert len(sts.asked) == number
        assert await credentials.current() != first


async def test_an_answer_without_an_end_is_not_read_to_it() -> None:
    """It takes no more memory than its bound, and is a failure as any other."""
    sent = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/xml\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            await writer.drain()
            sent += 0x10000

    async with answering(endless) as port:
        sts = ToldSts(endpoint_url=f"http://127.0.0.1:{port}")
        async with asyncio.timeout(module.STS_SECONDS_MAX / 2), lent(sts, Clock()) as credentials:
            with pytest.raises(CredentialsUnavailable, match="AnswerTooLong"):
                await credentials.current()
    assert sent < 64 * module.ANSWER_BYTES_MAX


def test_a_role_shows_no_secret() -> None:
    """Its external id is hidden, as secrets are."""
    assert "hidden-id" not in repr(Role("train", ARN, "us-east-1", external_id="hidden-id"))


async def test_the_gateway_is_never_asked_for_roles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AWS_ENDPOINT_URL sends clients to it; AWS_ENDPOINT_URL_STS says where STS is. So it is for profiles of roles."""

    async def endpoint() -> str:
        async with AwsSession().create_client("sts", region_name="eu-west-1") as client:
            return str(client.meta.endpoint_url)

    async def by_profile(url: str) -> KeyPair:
        return await ChainCredentials(ManualClock(), profile="role").current()

    assert await endpoint() == "https://sts.eu-west-1.amazonaws.com"
    async with told_sts() as sts:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.endpoint_url)
        assert await endpoint() == sts.endpoint_url
        (tmp_path / "credentials").write_text("[base]\naws_access_key_id = AKBASE\naws_secret_access_key = s\n")
        (tmp_path / "config").write_text(
            f"[profile role]\nrole_arn = {ARN}\nsource_profile = base\nregion = us-east-1\n"
        )
        assert (await by_profile(sts.endpoint_url)).access_key_id == "ASIA1"
