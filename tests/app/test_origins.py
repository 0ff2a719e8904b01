"""Whose key signs which request, and to which home it goes, by what the settings say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trustme

from gateway.app.origins import OriginKeys, Replicas, routed_origin
from gateway.config import Settings
from gateway.config.loading import load_settings
from gateway.core.clock import SystemClock
from gateway.core.errors import OriginUnreachable
from gateway.core.model import Homes
from gateway.origin.client import OriginRequest, OriginResponse, OriginSettings
from gateway.origin.request_body import NO_BODY
from gateway.origin.s3 import S3Origin
from gateway.origin.signing import CredentialsOf, RequestSigner, Target
from gateway.origin.sts import RoleCredentials
from tests.support.gateway_process import to_toml
from tests.support.manual_clock import ManualClock
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.sts import ToldSts, told_sts
from tests.support.waiting import until

ORIGIN = {"endpoint_url": "http://main.example", "access_key_id": "OWN", "secret_access_key": "s"}


def pair(name: str, key: str | None = None, secret: str = "s") -> dict[str, str]:
    return {"name": name, "access_key_id": key or name.upper(), "secret_access_key": secret}


def settings_of(tmp_path: Path, **tables: Any) -> Settings:
    document: Mapping[str, Any] = {"origin": ORIGIN, "cache": {"directory": str(tmp_path / "c")}, **tables}
    path = tmp_path / "forebay.toml"
    path.write_text(to_toml(document))
    return load_settings(path, {}).settings


SLOTS = [
    {"name": "x", "prefix": "s3://b/x/", "origin_credentials": "outer"},
    {"name": "plain", "prefix": "s3://b/x/plain/"},
    {"name": "y", "prefix": "s3://b/x/y/", "origin_credentials": "inner"},
    {"name": "all", "prefix": "s3://", "origin_credentials": "all"},
    {"name": "whole", "prefix": "s3://d/", "origin_credentials": "inner"},
]
BUCKETS = [
    {"name": "b", "origin_credentials": "bucket"},
    {"name": "d", "origin_credentials": "bucket"},
    {"name": "e", "endpoint_url": "http://e.example"},
]
NAMED = [pair(name) for name in ("outer", "inner", "bucket", "all", "unused")]


@pytest.mark.parametrize(
    ("request_", "signer"),
    [
        (OriginRequest("GET", None), "OWN"),
        (OriginRequest("GET", "b", "x/y/k"), "INNER"),
        (OriginRequest("PUT", "b", "x/k"), "OUTER"),
        (OriginRequest("GET", "b", "x/plain/k"), "OUTER"),
        (OriginRequest("GET", "b", "x"), "BUCKET"),
        (OriginRequest("GET", "b", "k"), "BUCKET"),
        (OriginRequest("GET", "d", "k"), "INNER"),
        (OriginRequest("GET", "e", "k"), "ALL"),
        (OriginRequest("GET", "b", query=[("list-type", "2"), ("prefix", "x/y/")]), "INNER"),
        (OriginRequest("GET", "b", query=[("uploads", None), ("prefix", "x/y")]), "OUTER"),
        (OriginRequest("GET", "b", query=[("list-type", "2"), ("prefix", "")]), "BUCKET"),
        (OriginRequest("GET", "b", query=[("list-type", "2")]), "BUCKET"),
        (OriginRequest("HEAD", "b"), "BUCKET"),
        (OriginRequest("GET", "b", query=[("location", None)]), "BUCKET"),
        (OriginRequest("POST", "b", query=[("delete", None)], keys=["x/y/1", "x/y/2"]), "INNER"),
        (OriginRequest("POST", "b", query=[("delete", None)], keys=["x/y/1", "x/2"]), "BUCKET"),
        (OriginRequest("POST", "b", query=[("delete", None), ("prefix", "x/y/")]), "BUCKET"),
    ],
    ids=str,
)
def test_the_most_specific_key_signs(tmp_path: Path, request_: OriginRequest, signer: str) -> None:
    """Slot over bucket over origin; of slots, the one with the longest prefix that has a key. One for every bucket
    comes after the bucket."""

    async def scenario() -> str:
        settings = settings_of(tmp_path, slots=SLOTS, buckets=BUCKETS, origin_credentials=NAMED)
        keys = OriginKeys(settings, ManualClock())
        await keys.start()
        found = (await keys.of(request_).current()).access_key_id
        await keys.aclose()
        return found

    assert asyncio.run(scenario()) == signer


def test_what_has_changed_is_begun_anew_and_nothing_else(tmp_path: Path) -> None:
    """A pair follows where it is; a role that stays is not asked for again; what nobody names any more is closed."""

    async def scenario() -> None:
        token = tmp_path / "token"
        token.write_text("t")
        role = {"name": "role", "role_arn": "arn:aws:iam::1:role/x", "web_identity_token_file": str(token)}
        role |= {"sts_endpoint_url": "http://127.0.0.1:9"}
        buckets = [{"name": "a", "origin_credentials": "pair"}, {"name": "r", "origin_credentials": "role"}]
        keys = OriginKeys(
            settings_of(tmp_path, buckets=buckets, origin_credentials=[pair("pair", "FIRST"), role]), ManualClock()
        )
        await keys.start()
        of_pair, of_role = (keys.of(OriginRequest("GET", bucket, "k")) for bucket in ("a", "r"))
        assert isinstance(of_role, RoleCredentials)
        named = [pair("pair", "SECOND"), role]
        await keys.apply_settings(settings_of(tmp_path, buckets=buckets, origin_credentials=named))
        assert keys.of(OriginRequest("GET", "a", "k")) is of_pair
        assert (await of_pair.current()).access_key_id == "SECOND"
        assert keys.of(OriginRequest("GET", "r", "k")) is of_role
        named = [pair("pair", "SECOND"), {**role, "role_duration": "30m"}]
        await keys.apply_settings(settings_of(tmp_path, buckets=buckets, origin_credentials=named))
        assert keys.of(OriginRequest("GET", "r", "k")) is not of_role
        assert of_role.is_closed
        last = keys.of(OriginRequest("GET", "r", "k"))
        await keys.apply_settings(settings_of(tmp_path, buckets=buckets[:1], origin_credentials=named))
        assert keys.of(OriginRequest("GET", "r", "k")) is keys.own
        assert isinstance(last, RoleCredentials)
        assert last.is_closed
        await keys.aclose()

    asyncio.run(scenario())


def test_a_role_whose_settings_change_goes_on_with_its_pair(tmp_path: Path) -> None:
    """Until STS lends the next: another duration or session makes a good pair no worse. Another role has another."""

    def settings(sts: ToldSts, **more: object) -> Settings:
        role = {"name": "role", "role_arn": "arn:aws:iam::1:role/x", "sts_endpoint_url": sts.endpoint_url, **more}
        origin = {"access_key_id": "AKOWN", "secret_access_key": "s"}
        buckets = [{"name": "r", "origin_credentials": "role"}]
        return settings_of(tmp_path, origin=origin, buckets=buckets, origin_credentials=[role])

    async def scenario() -> None:
        async with told_sts() as sts:
            keys = OriginKeys(settings(sts), SystemClock())
            await keys.start()
            request = OriginRequest("GET", "r", "k")
            first = await keys.of(request).current()
            sts.speaks.clear()
            for more in ({"role_duration": "30m"}, {"role_session_name": "other"}, {"external_id": "ex"}):
                await keys.apply_settings(settings(sts, **more))
                async with asyncio.timeout(1):
                    assert await keys.of(request).current() == first
            await keys.apply_settings(settings(sts, role_arn="arn:aws:iam::1:role/y"))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await keys.of(request).current()
            await keys.aclose()

    asyncio.run(scenario())


def test_who_waits_for_a_key_while_settings_change_has_that_of_the_new_ones(tmp_path: Path) -> None:
    """A question to STS that nobody asks any more, or a look-up that has ended, fails no request."""

    def settings(sts: ToldSts, **more: object) -> Settings:
        role = {"name": "role", "role_arn": "arn:aws:iam::1:role/x", "sts_endpoint_url": sts.endpoint_url, **more}
        origin = {"access_key_id": "AKOWN", "secret_access_key": "s"}
        buckets = [{"name": "r", "origin_credentials": "role"}]
        return settings_of(tmp_path, origin=origin, buckets=buckets, origin_credentials=[role])

    async def scenario() -> None:
        async with told_sts() as sts:
            sts.speaks.clear()
            keys = OriginKeys(settings(sts), SystemClock())
            await keys.start()
            signer, request = RequestSigner(keys.of, "us-east-1", SystemClock(), "here"), OriginRequest("GET", "r", "k")
            target = Target("http", "127.0.0.1", "/r/k", "")
            waiting = asyncio.create_task(signer.headers(request, target, NO_BODY))
            await until(lambda: len(sts.asked) == 1)
            await keys.apply_settings(settings(sts, role_duration="30m"))
            await until(lambda: len(sts.asked) == 2)
            assert not waiting.done()
            sts.speaks.set()
            assert "Credential=ASIA" in (await waiting)["authorization"]
            await keys.aclose()

    asyncio.run(scenario())


@dataclass
class _Home:
    settings: OriginSettings
    closed: int = 0
    sent: list[str | None] = field(default_factory=list)

    async def send(self, request: OriginRequest) -> OriginResponse:
        self.sent.append(request.bucket)
        raise LookupError("nothing is answered here")

    async def aclose(self) -> None:
        self.closed += 1


def test_buckets_that_are_reached_alike_share_a_home(tmp_path: Path) -> None:
    """Its connections, its retry budget, what is known of its clock. Each home is closed once."""
    made: list[_Home] = []

    def connect(settings: OriginSettings, signs: CredentialsOf | None) -> _Home:
        made.append(_Home(settings))
        return made[-1]

    settings = settings_of(
        tmp_path,
        origin={**ORIGIN, "region": "eu-west-1", "connect_timeout": "2s"},
        origin_credentials=[pair("k")],
        buckets=[
            {"name": "a", "endpoint_url": "http://a.example"},
            {"name": "b", "endpoint_url": "http://a.example/", "origin_credentials": "k"},
            {"name": "c", "endpoint_url": "http://a.example", "region": "auto", "addressing_style": "virtual"},
            {"name": "d", "origin_credentials": "k"},
        ],
    )
    keys = OriginKeys(settings, SystemClock())
    origin = routed_origin(settings, connect, Replicas(settings, keys, SystemClock()))

    async def scenario() -> None:
        for bucket in (None, "a", "b", "c", "d", "other"):
            with pytest.raises(LookupError):
                await origin.send(OriginRequest("GET", bucket))
        await origin.aclose()

    asyncio.run(scenario())
    assert [one.sent for one in made] == [[None, "d", "other"], ["a", "b"], ["c"]]
    assert [one.closed for one in made] == [1, 1, 1]
    main, first, other = (one.settings for one in made)
    assert (first.endpoint_url, first.region, first.connect_timeout_seconds) == ("http://a.example", "eu-west-1", 2.0)
    assert (other.region, other.addressing_style) == ("auto", "virtual")
    assert main.endpoint_url == "http://main.example"
    assert settings.homes == Homes("http://main.example", dict.fromkeys("abc", "http://a.example"))


def test_a_bucket_has_certificates_of_its_own(tmp_path: Path) -> None:
    """Those of its home, whatever is trusted for the origin; and where it says nothing, those of the system alone."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "pair.pem")

    async def status(settings: Settings) -> int:
        clock = SystemClock()
        keys = OriginKeys(settings, clock)
        origin = routed_origin(
            settings,
            lambda one, signs: S3Origin(one, keys.own, clock, instance_id="x", credentials_of=signs or keys.of),
            Replicas(settings, keys, clock),
        )
        try:
            async with await origin.send(OriginRequest("GET", "far")) as response:
                return response.status
        finally:
            await origin.aclose()
            await keys.aclose()

    pem = str(tmp_path / "pair.pem")
    with StrictOrigin() as main, StrictOrigin(certificate_file=pem, key_file=pem) as far:
        far.model.create_bucket("far")
        own = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY, "max_attempts": 1}
        bucket = {"name": "far", "endpoint_url": far.endpoint_url}
        for more, of_origin, is_trusted in (
            ({"ca_bundle": str(tmp_path / "ca.pem")}, None, True),
            ({}, str(tmp_path / "ca.pem"), False),
        ):
            origin = {"endpoint_url": main.endpoint_url, "ca_bundle": of_origin, **own}
            settings = settings_of(tmp_path, origin=origin, buckets=[{**bucket, **more}])
            if is_trusted:
                assert asyncio.run(status(settings)) == 200
            else:
                with pytest.raises(OriginUnreachable):
                    asyncio.run(status(settings))


def test_what_the_environment_says(tmp_path: Path) -> None:
    """Buckets and keys by their variables; STS by its own, and never by AWS_ENDPOINT_URL."""
    variables = {
        "AWS_ENDPOINT_URL": "http://gateway.example",
        "AWS_ENDPOINT_URL_STS": "http://sts.example",
        "FOREBAY_ORIGIN__ENDPOINT_URL": "http://main.example",
        "FOREBAY_CACHE__DIRECTORY": str(tmp_path),
        "FOREBAY_ORIGIN_CREDENTIALS__0__NAME": "role",
        "FOREBAY_ORIGIN_CREDENTIALS__0__ROLE_ARN": "arn:aws:iam::1:role/x",
        "FOREBAY_BUCKETS": '[{"name": "far", "endpoint_url": "http://far.example", "origin_credentials": "role"}]',
    }
    settings = load_settings(None, variables).settings
    assert settings.homes == Homes("http://main.example", {"far": "http://far.example"})
    assert settings.origin_credentials[0].sts_endpoint_url == "http://sts.example"
    del variables["AWS_ENDPOINT_URL_STS"]
    assert load_settings(None, variables).settings.origin_credentials[0].sts_endpoint_url is None


def test_a_bucket_in_another_region_of_aws_is_at_its_endpoint(tmp_path: Path) -> None:
    """Where the origin is AWS's own, the region says where a bucket is; elsewhere it says nothing of that."""
    buckets = [{"name": "b", "region": "eu-west-1"}]
    of_aws = settings_of(tmp_path, origin={"region": "us-east-1"}, buckets=buckets)
    assert of_aws.homes.of("b") == "https://s3.eu-west-1.amazonaws.com"
    assert settings_of(tmp_path, buckets=buckets).homes.by_bucket == {}


@pytest.mark.parametrize(
    "homes", [Homes("http://m"), Homes("http://m", {"b": "http://b", "a": "http://a:1"}), Homes("")], ids=str
)
def test_homes_are_written_down_and_read(homes: Homes) -> None:
    """As the catalog and the write-back buffer keep them; without homes of buckets it is the endpoint alone."""
    assert Homes.from_text(homes.to_text()) == homes
    assert Homes("http://m").to_text() == "http://m"
