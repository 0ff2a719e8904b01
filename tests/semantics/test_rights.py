"""Clause 7 of docs/semantics.md: what is forwarded, and who may ask."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from pathlib import Path
from typing import Any

import pytest

from gateway.edge.access import OriginKeyring
from gateway.origin.client import KeyPair
from gateway.policy.slots import Grant, Prefix
from gateway.s3.requests import Operation
from tests.support.asgi import SECRET_ACCESS_KEY, call
from tests.support.gateway_app import INSTANCE_ID, gateway_app
from tests.support.memory_origin.faults import Answer as OriginAnswer
from tests.support.memory_origin.faults import on
from tests.support.slots import Slot

JOB = Grant((Prefix("bucket", "job/"),))
READER = Grant((Prefix("bucket"),), read_only=True)


async def test_7_1_what_forebay_does_not_know_is_forwarded_with_all_its_headers(tmp_path: Path) -> None:
    """7.1 A sub-resource goes to the origin as it came, unknown headers too, signature aside."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", b"x")
        headers = {"x-amz-new-feature": "on", "x-other": "a,b"}
        answer = await call(gateway.app, "GET", "/bucket/k?tagging", headers)
        assert answer.headers["x-forebay-cache"] == "forwarded"
        seen = gateway.origin.calls[-1]
        assert list(seen.query) == [("tagging", None)]
        assert (seen.headers["x-amz-new-feature"], seen.headers["x-other"]) == ("on", "a,b")
        assert "authorization" not in seen.headers


async def test_7_2_errors_of_the_origin_arrive_as_they_are(tmp_path: Path) -> None:
    """7.2 Status, code and message of the origin's refusal reach the client."""
    async with gateway_app(tmp_path) as gateway:
        refusal = b"<Error><Code>Teapot</Code><Message>short and stout</Message></Error>"
        gateway.origin.inject(on(Operation.LIST_OBJECTS_V2), OriginAnswer(418, "Teapot", body=refusal))
        answer = await call(gateway.app, "GET", "/bucket?list-type=2")
        assert (answer.status, answer.body) == (418, refusal)


def test_7_3_an_unsigned_request_is_refused(tmp_path: Path) -> None:
    """7.3 Requests without a signature get 403 unless the configuration lets them in."""

    async def scenario(*, allowed: bool) -> int:
        async with gateway_app(tmp_path, allow_unsigned=allowed) as gateway:
            gateway.origin.put("bucket", "k", b"x")
            return (await call(gateway.app, "GET", "/bucket/k", sign=False)).status

    assert asyncio.run(scenario(allowed=False)) == 403
    assert asyncio.run(scenario(allowed=True)) == 200


async def test_7_3_a_form_that_signs_itself_is_refused(tmp_path: Path) -> None:
    """7.3 501, which says what to do instead; the origin hears nothing of it."""
    async with gateway_app(tmp_path) as gateway:
        form = {"content-type": "multipart/form-data; boundary=x", "origin": "https://page.example"}
        answer = await call(gateway.app, "POST", "/bucket", form, b"--x--", sign=False)
        assert (answer.status, len(gateway.origin.calls)) == (501, 0)
        assert b"presigned PUT" in answer.body
        assert (await call(gateway.app, "POST", "/bucket", {}, b"--x--", sign=False)).status == 403


@pytest.mark.parametrize(
    "target", ["/bucket/k", "/bucket", "/bucket/k?X-Amz-Signature=of-a-PUT&partNumber=1&uploadId=u"]
)
@pytest.mark.parametrize("slot", [Slot("s", Prefix("bucket")), Slot("s", Prefix("bucket"), authorization="origin")])
async def test_7_3_a_preflight_is_the_origins_to_answer(tmp_path: Path, target: str, slot: Slot) -> None:
    """7.3 Browsers cannot sign it. Of what it says, only what it is about goes to the origin, whose rules decide."""
    headers = {
        "origin": "https://page.example",
        "access-control-request-method": "PUT",
        "access-control-request-headers": "content-type",
    }
    async with gateway_app(tmp_path, slots=[slot]) as gateway:
        told = OriginAnswer(200, headers={"access-control-allow-origin": "https://page.example"}, body=b"")
        gateway.origin.inject(lambda one: one.method == "OPTIONS", told, times=None)
        extra = {"x-amz-copy-source": "/bucket/secret", "cookie": "c"}
        answer = await call(gateway.app, "OPTIONS", target, {**headers, **extra}, sign=False)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://page.example")
        [asked] = gateway.origin.calls
        assert (asked.query, asked.headers, asked.signed_by) == ([], headers, None)
        for left_out in ("origin", "access-control-request-method"):
            fewer = {name: value for name, value in headers.items() if name != left_out}
            assert (await call(gateway.app, "OPTIONS", "/bucket/k", fewer, sign=False)).status == 403
        assert (await call(gateway.app, "GET", "/bucket/k", headers, sign=False)).status == 403


@pytest.mark.parametrize(
    ("credentials", "code"),
    [
        ({"secret_access_key": "wrong"}, "SignatureDoesNotMatch"),
        ({"access_key_id": "AKIDUNKNOWN"}, "InvalidAccessKeyId"),
        ({"session_token": "token"}, "InvalidToken"),
    ],
)
async def test_7_3_a_signature_that_does_not_hold_is_refused(
    tmp_path: Path, credentials: dict[str, Any], code: str
) -> None:
    """7.3 A wrong secret, an unknown key and a token where none belongs are told apart."""
    async with gateway_app(tmp_path) as gateway:
        answer = await call(gateway.app, "GET", "/bucket/k", **credentials)
        assert f"<Code>{code}</Code>".encode() in answer.body
        assert SECRET_ACCESS_KEY.encode() not in answer.body


class RotatingPairs:
    """The gateway's own key pairs after a rotation."""

    def known(self) -> list[KeyPair]:
        return [KeyPair("NEW", "new-secret", "new-token"), KeyPair("OLD", "old-secret", "old-token")]


@pytest.mark.parametrize(
    ("access_key_id", "secret", "token", "expected"),
    [
        ("NEW", "new-secret", "new-token", 200),
        ("OLD", "old-secret", "old-token", 200),
        ("NEW", "new-secret", "other-token", 400),
        ("NEW", "new-secret", None, 400),
        ("OTHER", "secret", "token", 403),
    ],
)
async def test_7_3_without_credentials_callers_sign_with_the_gateways_own_pair(
    tmp_path: Path, access_key_id: str, secret: str, token: str | None, expected: int
) -> None:
    """7.3 The current pair and the one before are accepted; other roles are told to configure [[credentials]]."""
    async with gateway_app(tmp_path, keyring=OriginKeyring(RotatingPairs())) as gateway:
        gateway.origin.put("bucket", "k", b"x")
        answer = await call(
            gateway.app,
            "GET",
            "/bucket/k",
            access_key_id=access_key_id,
            secret_access_key=secret,
            session_token=token,
        )
        assert answer.status == expected
        assert expected == 200 or b"[[credentials]]" in answer.body


@pytest.mark.parametrize(
    ("method", "target", "headers", "allowed"),
    [
        ("GET", "/bucket/job/k", {}, True),
        ("GET", "/bucket/other", {}, False),
        ("GET", "/bucket/job/../other", {}, True),
        ("GET", "/bucket?list-type=2&prefix=job%2F", {}, True),
        ("GET", "/bucket?list-type=2&prefix=job", {}, False),
        ("GET", "/bucket?list-type=2", {}, False),
        ("GET", "/bucket?uploads&prefix=job%2F", {}, True),
        ("GET", "/bucket?uploads", {}, False),
        ("GET", "/bucket?list-type=2&prefix=job%2F&prefix=", {}, False),
        ("GET", "/bucket?location", {}, False),
        ("HEAD", "/bucket", {}, False),
        ("GET", "/", {}, False),
        ("PUT", "/bucket/job/copy", {"x-amz-copy-source": "/bucket/job/k"}, True),
        ("PUT", "/bucket/job/copy", {"x-amz-copy-source": "/bucket/other"}, False),
        ("PUT", "/bucket/job/copy", {"x-amz-copy-source": "bucket%2Fother"}, False),
        ("PUT", "/bucket/other", {"x-amz-copy-source": "/bucket/job/k"}, False),
    ],
)
async def test_7_4_a_credential_ends_at_its_prefixes(
    tmp_path: Path, method: str, target: str, headers: dict[str, str], *, allowed: bool
) -> None:
    """7.4 Keys, listings, copy sources and bucket operations outside the credential's prefixes are refused."""
    async with gateway_app(tmp_path, grant=JOB) as gateway:
        gateway.origin.put("bucket", "job/k", b"x")
        gateway.origin.put("bucket", "job/../other", b"x")
        gateway.origin.put("bucket", "other", b"x")
        answer = await call(gateway.app, method, target, headers)
        assert (answer.status != 403) == allowed, answer.body


async def test_7_4_every_key_of_delete_objects_is_checked(tmp_path: Path) -> None:
    """7.4 Keys that the credential covers are deleted; the others come back as AccessDenied and stay."""
    async with gateway_app(tmp_path, grant=JOB) as gateway:
        gateway.origin.put("bucket", "job/k", b"x")
        gateway.origin.put("bucket", "other", b"x")
        body = b"<Delete><Object><Key>job/k</Key></Object><Object><Key>other</Key></Object></Delete>"
        digest = base64.b64encode(hashlib.md5(body).digest()).decode()
        answer = await call(gateway.app, "POST", "/bucket?delete", {"Content-MD5": digest}, body)
        assert answer.status == 200
        assert b"<Deleted><Key>job/k</Key>" in answer.body
        assert b"<Error><Key>other</Key><Code>AccessDenied</Code>" in answer.body
        assert gateway.origin.data("bucket", "other") == b"x"
        assert (await call(gateway.app, "HEAD", "/bucket/job/k")).status == 404


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("PUT", "/bucket/k"),
        ("DELETE", "/bucket/k"),
        ("POST", "/bucket/k?uploads"),
        ("PUT", "/bucket/k?tagging"),
        ("DELETE", "/bucket"),
    ],
)
def test_7_4_read_only_credentials_and_slots_refuse_every_non_read(tmp_path: Path, method: str, target: str) -> None:
    """7.4 A read-only credential, and a read-only slot under a full credential, refuse what changes anything."""

    async def scenario(*, by_slot: bool) -> None:
        slots = [Slot("frozen", Prefix("bucket"), "read-only")] if by_slot else []
        grant = Grant((Prefix(""),)) if by_slot else READER
        async with gateway_app(tmp_path, grant=grant, slots=slots) as gateway:
            gateway.origin.put("bucket", "k", b"x")
            assert (await call(gateway.app, method, target)).status == 403
            assert (await call(gateway.app, "GET", "/bucket/k")).status == 200

    asyncio.run(scenario(by_slot=False))
    asyncio.run(scenario(by_slot=True))


async def test_7_5_a_cached_answer_is_authorised_like_any_other(tmp_path: Path) -> None:
    """7.5 What one caller has warmed up is refused to a caller who may not read it."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "other", b"x")
        origin = gateway.origin
        await call(gateway.app, "GET", "/bucket/other")
    async with gateway_app(tmp_path, origin=origin, grant=JOB) as restricted:
        assert (await call(restricted.app, "GET", "/bucket/other")).status == 403


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("/bucket/k?versionId=null", {}),
        ("/bucket/k", {"x-amz-server-side-encryption-customer-algorithm": "AES256"}),
    ],
)
async def test_7_6_reads_with_customer_keys_and_of_versions_are_never_cached(
    tmp_path: Path, target: str, headers: dict[str, str]
) -> None:
    """7.6 They are read from the origin each time."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", b"x")
        for _ in range(2):
            answer = await call(gateway.app, "GET", target, headers)
            assert answer.headers["x-forebay-cache"] == "bypass"


async def test_7_7_a_request_that_comes_round_is_refused(tmp_path: Path) -> None:
    """7.7 The mark of this gateway on a request means that its origin leads back to itself: 508."""
    async with gateway_app(tmp_path) as gateway:
        answer = await call(gateway.app, "GET", "/bucket/k", {"x-forebay-hop": f"other, {INSTANCE_ID}"})
        assert (answer.status, b"<Code>LoopDetected</Code>" in answer.body) == (508, True)
        answer = await call(gateway.app, "GET", "/bucket/k", {"x-forebay-hop": "other"})
        assert answer.status == 404
