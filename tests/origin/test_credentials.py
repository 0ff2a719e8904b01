"""The key pair towards the origin: where it comes from, how it rotates, and what happens without one."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.core.clock import SystemClock
from gateway.core.errors import CredentialsUnavailable, OriginUnreachable
from gateway.origin.client import KeyPair, OriginRequest, OriginSettings
from gateway.origin.s3 import S3Origin
from gateway.origin.signing import ChainCredentials, StaticCredentials
from gateway.origin.sts import AwsSession
from tests.origin.clocks import JumpingClock
from tests.support.connections import answering
from tests.support.manual_clock import ManualClock

VARIABLES = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_ROLE_ARN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
]


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment that names no credentials; the home directory is empty."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path


def test_static_pairs_are_known_at_once() -> None:
    """A pair from the configuration needs no look-up."""
    pair = KeyPair("AK", "secret", "token")
    credentials = StaticCredentials(pair)
    assert credentials.known() == (pair,)
    assert asyncio.run(credentials.current()) == pair


def test_a_pair_shows_no_secret() -> None:
    """Neither the secret nor the session token is in its repr."""
    assert repr(KeyPair("AK", "s3cret", "t0ken")) == "KeyPair(access_key_id='AK')"


async def test_the_environment_is_found_by_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """start() returns at once; what was found is known without waiting from then on."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    credentials = ChainCredentials(ManualClock())
    await credentials.start()
    assert credentials.known() == ()
    assert await credentials.current() == KeyPair("AKENV", "secret")
    assert credentials.known() == (KeyPair("AKENV", "secret"),)
    await credentials.aclose()


async def test_a_profile_is_found_by_its_name(bare: Path) -> None:
    """The profile of the configuration is looked up in the shared files."""
    (bare / "credentials").write_text("[job]\naws_access_key_id = AKJOB\naws_secret_access_key = s\n")
    assert (await ChainCredentials(ManualClock(), profile="job").current()).access_key_id == "AKJOB"


async def test_a_profile_without_a_key_is_not_signed_for_with_the_nodes(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the node may do is another key, which nobody has named."""
    served: list[int] = []
    async with answering(lambda reader, writer: _serve_rotating_credentials(reader, writer, served)) as port:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{port}/")
        (bare / "config").write_text("[profile lonely]\nregion = eu-west-1\n")
        with pytest.raises(OriginUnreachable, match="the profile 'lonely' has no key"):
            await ChainCredentials(ManualClock(), profile="lonely").current()
        assert served == []
        assert (await ChainCredentials(ManualClock()).current()).access_key_id.startswith("AK")


async def test_keys_in_files_that_are_rotated_are_read_again(bare: Path) -> None:
    """Where a home refuses the pair, or settings change: every 15 seconds at most. A file that says nothing any more
    takes no pair away."""

    def write(name: str) -> None:
        (bare / "credentials").write_text(f"[job]\naws_access_key_id = {name}\naws_secret_access_key = s\n")

    clock = JumpingClock()
    credentials = ChainCredentials(clock, profile="job")

    async def renewed() -> str:
        for _ in range(5):
            credentials.renew()
        async with asyncio.timeout(20):
            while credentials._lookup is not None:  # noqa: ASYNC110 - nobody else waits for it
                await asyncio.sleep(0.005)
        return (await credentials.current()).access_key_id

    write("AK1")
    assert (await credentials.current()).access_key_id == "AK1"
    write("AK2")
    assert (await credentials.current()).access_key_id == "AK1"
    assert await renewed() == "AK2"
    assert [pair.access_key_id for pair in credentials.known()] == ["AK2", "AK1"]
    write("AK3")
    assert await renewed() == "AK2"
    clock.jump(15)
    assert await renewed() == "AK3"
    (bare / "credentials").write_text("")
    clock.jump(15)
    assert await renewed() == "AK3"
    await credentials.aclose()


async def test_a_source_of_keys_that_fails_is_named(bare: Path) -> None:
    """Before the first key, and after the last one: who reads it looks there, and is not told to set a key. What the
    source itself says is not repeated."""
    lent, document = bare / "lent", {"Version": 1, "AccessKeyId": "AKLENT", "SecretAccessKey": "s"}
    (bare / "config").write_text(f"[default]\ncredential_process = /bin/cat {lent}\n")
    told = r"custom-process failed \(CredentialRetrievalError\)$"
    clock = ManualClock()
    credentials = ChainCredentials(clock)
    with pytest.raises(CredentialsUnavailable, match=f"no credentials for the origin: {told}"):
        await credentials.current()
    until = datetime.now(UTC) + timedelta(minutes=5)
    lent.write_text(json.dumps(document | {"Expiration": until.isoformat(timespec="seconds")}))
    await clock.advance(60.0)
    assert (await credentials.current()).access_key_id == "AKLENT"
    lent.unlink()
    with pytest.raises(CredentialsUnavailable, match=f"could not be refreshed: {told}"):
        await credentials.current()


async def test_without_credentials_only_the_origin_is_out_of_reach(bare: Path) -> None:
    """Start-up works; a request fails and says what to set; a pair that appears later is found after a pause."""
    clock = JumpingClock()
    credentials = ChainCredentials(clock)
    await credentials.start()
    origin = S3Origin(OriginSettings(endpoint_url="http://127.0.0.1:9"), credentials, clock, instance_id="x")
    with pytest.raises(OriginUnreachable, match="AWS_ACCESS_KEY_ID"):
        await origin.send(OriginRequest("GET", "bucket", "key"))
    assert credentials.known() == ()
    (bare / "credentials").write_text("[default]\naws_access_key_id = AKLATE\naws_secret_access_key = s\n")
    with pytest.raises(OriginUnreachable):
        await credentials.current()
    clock.jump(60)
    assert (await credentials.current()).access_key_id == "AKLATE"
    await origin.aclose()
    await credentials.aclose()


async def test_a_look_up_that_is_ended_ends_nobody_who_waits_for_it(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings name another source by then. Who waits is told that there is no pair here, and is not cancelled."""
    is_looked_up = asyncio.Event()

    async def hang(_session: AwsSession) -> None:
        is_looked_up.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(AwsSession, "get_credentials", hang)
    credentials = ChainCredentials(SystemClock())
    waiting = asyncio.create_task(credentials.current())
    await is_looked_up.wait()
    await credentials.aclose()
    with pytest.raises(CredentialsUnavailable):
        await waiting


async def _serve_rotating_credentials(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, served: list[int]
) -> None:
    """A container credentials endpoint whose pairs are about to expire when they are given out."""
    await reader.readuntil(b"\r\n\r\n")
    served.append(len(served) + 1)
    body = json.dumps(
        {
            "AccessKeyId": f"AK{len(served)}",
            "SecretAccessKey": "s",
            "Token": f"t{len(served)}",
            "Expiration": "2099-01-01T00:00:00Z" if len(served) == 3 else _soon(),
        }
    ).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
    await writer.drain()


def _soon() -> str:
    """Within botocore's advisory refresh window of 15 minutes, not yet expired."""

    return (datetime.now(UTC) + timedelta(minutes=12)).strftime("%Y-%m-%dT%H:%M:%SZ")


async def test_rotating_pairs_are_refreshed_and_the_previous_one_stays_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers who signed with the pair of a moment ago are still recognised; the one before that is forgotten."""
    served: list[int] = []
    async with answering(lambda reader, writer: _serve_rotating_credentials(reader, writer, served)) as port:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{port}/")
        credentials = ChainCredentials(ManualClock())
        seen = [(await credentials.current()).access_key_id for _ in range(3)]
        assert seen[-1] == "AK3"
        assert [pair.access_key_id for pair in credentials.known()] == ["AK3", "AK2"]
        assert (await credentials.current()).session_token == "t3"
        await credentials.aclose()
