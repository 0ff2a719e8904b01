"""Clauses 7.13 to 7.16 of docs/semantics.md: slots in which the origin says what a caller may do."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from botocore.auth import HmacV1QueryAuth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from gateway.core.errors import S3Error
from gateway.core.model import ObjectKey
from gateway.edge.access import ConfiguredKeyring, Key, OriginKeyring
from gateway.operations.writeback import past_the_buffer
from gateway.origin.client import KeyPair, OriginRequest
from gateway.policy.remembered_rights import REFUSAL_SECONDS, RememberedRights
from gateway.policy.slots import EVERYTHING, Prefix
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import Operation
from gateway.telemetry.metrics import AUTHORIZATIONS
from tests.support.asgi import HOST, Answer, call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.faults import Answer as Failure
from tests.support.memory_origin.faults import Hold, Unreachable, on
from tests.support.policies import Policy
from tests.support.set_clock import SetClock
from tests.support.slots import Slot, slot_with
from tests.support.snapshots import freeze

SECRET = b"only-its-readers-know-this"
META = {"x-amz-meta-of": "a-secret-attribute"}
KEY = "own/report"
PATH = f"/bucket/{KEY}"
TTL_SECONDS = 60.0
CONSISTENCIES = ("strict", "ttl", "immutable", "snapshot")


def slot(consistency: str = "ttl", ttl_seconds: float = TTL_SECONDS, prefix: str = "s3://bucket/own/") -> Slot:
    return Slot(
        "own",
        Prefix.parse(prefix),
        "read-only" if consistency == "snapshot" else "read-write",
        consistency,
        snapshot="v1" if consistency == "snapshot" else "",
        authorization="origin",
        authorization_ttl_seconds=ttl_seconds,
    )


@dataclass
class Tenants:
    """A gateway with callers of every grant: what they may do, the origin says."""

    gateway: GatewayApp
    clock: SetClock
    policies: dict[str, Policy]

    async def ask(
        self,
        who: str,
        method: str = "GET",
        target: str = PATH,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Answer:
        return await call(
            self.gateway.app, method, target, headers, body, access_key_id=who, secret_access_key=f"{who}-secret"
        )

    async def settled(self) -> None:
        await self.gateway.catalog.settle()
        await self.gateway.blocks.settle()

    def questions(self, since: int = 0) -> list[tuple[str, str | None]]:
        """What the origin was asked in callers' own names: method, key."""
        return [(one.method, one.key) for one in self.gateway.origin.calls[since:] if one.signed_by is not None]

    @property
    def calls(self) -> int:
        return len(self.gateway.origin.calls)


@asynccontextmanager
async def tenants(directory: Path, *slots: Slot, writeback: bool = False) -> AsyncIterator[Tenants]:
    clock, names = SetClock(), ("READER", "WRITER", "NOBODY")
    keyring = ConfiguredKeyring([Key(name, f"{name}-secret", None, EVERYTHING) for name in names])
    policies = {
        "READER": Policy(read=["own/"], list=["own/"]),
        "WRITER": Policy(read=[""], write=[""], list=[""]),
        "NOBODY": Policy(read=["open/"], write=["open/"], list=["open/"]),
    }
    async with gateway_app(directory, slots=slots, clock=clock, keyring=keyring, writeback=writeback) as gateway:
        origin = gateway.origin
        origin.put("bucket", KEY, SECRET, {**META, "content-type": "text/plain"})
        origin.put("bucket", "open/readme", b"for everybody")
        origin.policies = dict(policies)
        if any(one.consistency == "snapshot" for one in slots):
            await freeze(gateway, "v1", "s3://bucket/own/")
        yield Tenants(gateway, clock, policies)


def presigned(who: str, method: str, target: str, version: int) -> str:
    request = AWSRequest(method, f"http://{HOST}{target}")
    credentials = Credentials(who, f"{who}-secret")
    signer = S3SigV4QueryAuth(credentials, "s3", "us-east-1", 600) if version == 4 else HmacV1QueryAuth(credentials)
    signer.add_auth(request)
    return str(request.url).partition(HOST)[2]


DELETE = b"<Delete><Object><Key>own/report</Key></Object><Object><Key>open/readme</Key></Object></Delete>"


def md5_of(body: bytes) -> dict[str, str]:
    return {"content-md5": base64.b64encode(hashlib.md5(body).digest()).decode()}


COPY = {"x-amz-copy-source": quote(PATH)}
DOORS: Sequence[tuple[str, str, Mapping[str, str], bytes]] = [
    ("GET", PATH, {}, b""),
    ("GET", PATH, {"range": "bytes=0-3"}, b""),
    ("GET", PATH, {"range": "bytes=0-1,3-4"}, b""),
    ("GET", PATH, {"if-none-match": '"none"'}, b""),
    ("GET", PATH, {"cache-control": "no-cache"}, b""),
    ("GET", PATH, {"origin": "http://page"}, b""),
    ("GET", PATH, {"x-amz-checksum-mode": "ENABLED"}, b""),
    ("GET", PATH, {"x-amz-request-payer": "requester"}, b""),
    ("GET", f"{PATH}?partNumber=1", {}, b""),
    ("GET", f"{PATH}?versionId=null", {}, b""),
    ("GET", f"{PATH}?response-content-type=text%2Fhtml", {}, b""),
    ("HEAD", PATH, {}, b""),
    ("HEAD", PATH, {"x-amz-checksum-mode": "ENABLED"}, b""),
    ("HEAD", f"{PATH}?versionId=null", {}, b""),
    ("GET", f"{PATH}?attributes", {"x-amz-object-attributes": "ETag"}, b""),
    ("GET", f"{PATH}?tagging", {}, b""),
    ("GET", f"{PATH}?acl", {}, b""),
    ("GET", f"{PATH}?torrent", {}, b""),
    ("GET", f"{PATH}?uploadId=u", {}, b""),
    ("POST", f"{PATH}?select&select-type=2", {}, b"<SelectObjectContentRequest/>"),
    ("POST", f"{PATH}?restore", {}, b"<RestoreRequest/>"),
    ("GET", "/bucket?list-type=2&prefix=own%2F", {}, b""),
    ("GET", "/bucket?list-type=2&prefix=ow", {}, b""),
    ("GET", "/bucket?list-type=2", {}, b""),
    ("GET", "/bucket?list-type=2&delimiter=%2F", {}, b""),
    ("GET", "/bucket?list-type=2&start-after=own%2Fa", {}, b""),
    ("GET", "/bucket?prefix=own%2F", {}, b""),
    ("GET", "/bucket?marker=own%2Fa", {}, b""),
    ("GET", "/bucket?uploads&prefix=own%2F", {}, b""),
    ("GET", "/bucket?uploads", {}, b""),
    ("GET", "/bucket?versions", {}, b""),
    ("GET", "/bucket?versions&prefix=own%2F", {}, b""),
    ("GET", "/bucket?versions&prefix=elsewhere%2F", {}, b""),
    ("GET", "/bucket?list-type=2&prefix=open%2F&prefix=", {}, b""),
    ("HEAD", "/bucket", {}, b""),
    ("GET", "/bucket?location", {}, b""),
    ("GET", "/bucket?policy", {}, b""),
    ("GET", "/bucket?session", {}, b""),
    ("PUT", PATH, {}, b"overwritten"),
    ("PUT", PATH, {"if-none-match": "*"}, b"overwritten"),
    ("PUT", f"{PATH}?tagging", {}, b"<Tagging/>"),
    ("PUT", f"{PATH}?acl", {}, b"<AccessControlPolicy/>"),
    ("DELETE", PATH, {}, b""),
    ("DELETE", f"{PATH}?versionId=null", {}, b""),
    ("POST", f"{PATH}?uploads", {}, b""),
    ("PUT", f"{PATH}?partNumber=1&uploadId=u", {}, b"part"),
    ("POST", f"{PATH}?uploadId=u", {}, b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>a</ETag>"
     b"</Part></CompleteMultipartUpload>"),
    ("DELETE", f"{PATH}?uploadId=u", {}, b""),
    ("PUT", "/bucket/open/copy", COPY, b""),
    ("PUT", "/bucket/open/copy", {"x-amz-copy-source": "bucket%2Fown/report?versionId=null"}, b""),
    ("PUT", "/bucket/open/copy?partNumber=1&uploadId=u", COPY, b""),
    ("PUT", "/bucket/open/copy?partNumber=1&uploadId=u", {**COPY, "x-amz-copy-source-range": "bytes=0-3"}, b""),
    ("PUT", "/bucket/open/copy", {"x-amz-copy-source": "arn:aws:s3:us-east-1:1:accesspoint/a/object/own/report"}, b""),
    ("PUT", "/bucket/own/copy", {"x-amz-copy-source": "/bucket/open/readme"}, b""),
    ("PUT", "/bucket/open/x?renameObject", {"x-amz-rename-source": "/bucket/own/report"}, b""),
    ("PUT", "/bucket/open/x", {"x-goog-copy-source": PATH}, b""),
    ("POST", "/bucket", {"content-type": "multipart/form-data; boundary=x"}, b"--x--"),
    ("POST", "/bucket/open/x?a", {"content-type": "multipart/form-data; boundary=x"}, b"--x--"),
    ("DELETE", "/bucket", {}, b""),
    ("PUT", "/bucket?lifecycle", {}, b"<LifecycleConfiguration/>"),
]  # fmt: skip


@pytest.mark.parametrize("writeback", [False, True], ids=["", "with a buffer"])
@pytest.mark.parametrize("consistency", CONSISTENCIES)
async def test_7_13_who_may_not_at_the_origin_may_not_here(
    tmp_path: Path, consistency: str, *, writeback: bool
) -> None:
    """7.13 By no door: what is cached, indexed, frozen or forwarded; nothing of an object is told, and none changed."""
    async with tenants(tmp_path, slot(consistency), writeback=writeback) as both:
        for _ in range(3):
            for method in ("GET", "HEAD"):
                assert (await both.ask("READER", method)).status == 200
            assert KEY.encode() in (await both.ask("READER", target="/bucket?list-type=2&prefix=own%2F")).body
            await both.settled()
        stored = both.gateway.origin.buckets["bucket"].objects
        before = {key: stored[key].etag for key in stored}
        for method, target, headers, body in DOORS:
            door = method, target, headers
            answer = await both.ask("NOBODY", method, target, headers, body)
            is_unread = "arn:" in headers.get("x-amz-copy-source", "")
            refusals = {400, 403, 501} if consistency == "snapshot" or is_unread else {403}
            assert answer.status in refusals, (door, answer.status)
            if answer.status == 403 and method != "HEAD":
                is_ours = consistency == "snapshot" and b"is read-only" in answer.body
                assert is_ours or b"the policy of the bucket says no" in answer.body, (door, answer.body)
            said = answer.body + repr(sorted(answer.headers.items())).encode()
            for secret in (SECRET[:8], b"a-secret-attribute", before[KEY].strip('"').encode()):
                assert secret not in said, (door, said)
        assert {key: stored[key].etag for key in stored} == before


@pytest.mark.parametrize("version", [2, 4])
async def test_7_13_a_presigned_request_is_of_who_has_signed_it(tmp_path: Path, version: int) -> None:
    """7.13 Whoever sends it."""
    async with tenants(tmp_path, slot()) as both:
        for who, expected in (("READER", 200), ("NOBODY", 403), ("READER", 200)):
            target = presigned(who, "GET", PATH, version)
            assert (await call(both.gateway.app, "GET", target, sign=False)).status == expected


@pytest.mark.parametrize("consistency", ["strict", "ttl", "immutable"])
async def test_7_13_deletions_are_judged_key_by_key(tmp_path: Path, consistency: str) -> None:
    """7.13 A DeleteObjects that names one such key goes in the caller's own name."""
    async with tenants(tmp_path, slot(consistency)) as both:

        def of_nobody(request: OriginRequest) -> S3Error | None:
            return s3_error("AccessDenied", "the policy of the bucket says no")

        origin = both.gateway.origin
        assert origin.policies is not None
        origin.policies["NOBODY"] = of_nobody
        answer = await both.ask("NOBODY", "POST", "/bucket?delete", md5_of(DELETE), DELETE)
        assert (answer.status, origin.calls[-1].signed_by) == (403, "NOBODY")
        assert origin.data("bucket", KEY) == SECRET
        other = b"<Delete><Object><Key>open/readme</Key></Object></Delete>"
        answer = await both.ask("NOBODY", "POST", "/bucket?delete", md5_of(other), other)
        assert (answer.status, origin.calls[-1].signed_by) == (200, None)
        answer = await both.ask("WRITER", "POST", "/bucket?delete", md5_of(DELETE), DELETE)
        assert (answer.status, origin.calls[-1].signed_by) == (200, "WRITER")
        assert KEY not in origin.buckets["bucket"].objects


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["strict", "ttl", "immutable"])
def test_7_13_who_may_is_answered_as_ever(tmp_path: Path, consistency: str) -> None:
    """7.13 Every door, for who may: as in a slot that the gateway alone judges."""

    async def said(directory: Path, kept: Slot) -> list[tuple[int, bytes]]:
        answers = []
        async with tenants(directory, kept) as both:
            for method, target, headers, body in DOORS:
                both.gateway.origin.put("bucket", KEY, SECRET, META)
                for _ in range(2):
                    if "arn:" in headers.get("x-amz-copy-source", ""):
                        continue  # a policy here knows no access points
                    answer = await both.ask("WRITER", method, target, headers, body)
                    of_one = answer.status != 200 or b"<LastModified>" in answer.body or b"<UploadId>" in answer.body
                    answers.append((answer.status, b"" if of_one else answer.body))
        return answers

    judged = slot(consistency)
    asked = asyncio.run(said(tmp_path / "origin", judged))
    plain = asyncio.run(said(tmp_path / "gateway", slot_with(judged, authorization="gateway")))
    for number, (one, other) in enumerate(zip(asked, plain, strict=True)):
        assert one == other, number


async def test_7_13_the_gateways_own_rules_hold_besides(tmp_path: Path) -> None:
    """7.13 Both must allow; who is refused here is asked about nowhere."""
    async with tenants(tmp_path, slot_with(slot(), mode="read-only")) as both:
        before = both.calls
        assert (await both.ask("WRITER", "PUT", PATH, body=b"x")).status == 403
        assert both.calls == before


async def test_7_14_a_yes_counts_for_its_time_and_its_key_alone(tmp_path: Path) -> None:
    """7.14 One question for each object, caller and `authorization_ttl`; a sibling that is denied stays so."""
    async with tenants(tmp_path, slot()) as both:
        both.policies["READER"].deny.add("own/other")
        both.gateway.origin.put("bucket", "own/other", b"denied to one")
        assert [(await both.ask("READER")).status for _ in range(5)] == [200] * 5
        assert both.questions() == [("HEAD", KEY)]
        assert (await both.ask("READER", target="/bucket/own/other")).status == 403
        assert (await both.ask("WRITER", target="/bucket/own/other")).status == 200
        since = both.calls
        both.clock.ahead_seconds = TTL_SECONDS + 1
        both.policies["READER"].deny.add(KEY)
        assert [(await both.ask("READER")).status for _ in range(2)] == [403] * 2
        assert both.questions(since)[0] == ("HEAD", KEY)
        both.policies["READER"].deny.clear()
        assert (await both.ask("READER")).status == 200  # at once


@pytest.mark.parametrize(("consistency", "calls"), [("strict", 1), ("immutable", 1)])
async def test_7_14_with_a_time_of_nothing_each_request_is_asked_about(
    tmp_path: Path, consistency: str, calls: int
) -> None:
    """7.14 `authorization_ttl = "0s"`; of what is cached, one request to the origin is enough, in a strict slot too."""
    async with tenants(tmp_path, slot(consistency, ttl_seconds=0.0)) as both:
        for _ in range(2):
            assert (await both.ask("READER")).status == 200
            await both.settled()
        for _ in range(3):
            before = both.calls
            assert (await both.ask("READER")).body == SECRET
            assert both.questions(before) == [("HEAD", KEY)] * calls
            assert both.calls - before == calls
        both.policies["READER"].deny.add(KEY)
        assert (await both.ask("READER")).status == 403


async def test_7_14_a_listing_is_judged_by_its_own_words(tmp_path: Path) -> None:
    """7.14 Prefix, delimiter and limit: policies may go by each. The index answers who may; a no lasts a second."""
    async with tenants(tmp_path, slot("immutable")) as both:
        limited = "/bucket?list-type=2&prefix=own%2F&max-keys=2"
        both.clock.stop()
        both.policies["READER"].limit_max = 2
        for _ in range(2):
            assert (await both.ask("READER", target=limited)).status == 200
        since = both.calls
        assert (await both.ask("READER", target="/bucket?list-type=2&prefix=own%2F")).status == 403
        assert (await both.ask("READER", target="/bucket?list-type=2&prefix=own%2F&max-keys=3")).status == 403
        assert (await both.ask("READER", target="/bucket?list-type=2&prefix=own%2F&max-keys=3")).status == 403
        assert len(both.questions(since)) == 2
        both.policies["READER"].limit_max = None
        both.clock.ahead_seconds = REFUSAL_SECONDS
        assert (await both.ask("READER", target="/bucket?list-type=2&prefix=own%2F&max-keys=3")).status == 200
        await both.gateway.catalog.settle()  # what was just listed is learned behind the answer
        since = both.calls
        assert (await both.ask("READER", target=limited)).headers["x-forebay-cache"] == "hit"
        assert both.calls == since


async def test_7_14_without_an_answer_no_right_is_made_up(tmp_path: Path) -> None:
    """7.14 A remembered yes counts to its end, then it is 503 until the origin answers; a 5xx is no answer."""
    async with tenants(tmp_path, slot("immutable")) as both:
        assert (await both.ask("READER")).status == 200
        await both.settled()
        of_readers = on(Operation.HEAD_OBJECT, key=KEY)
        for effect in (Unreachable(), Failure(500), Failure(503, "SlowDown")):
            fault = both.gateway.origin.inject(of_readers, effect, times=None)
            assert (await both.ask("READER")).status == 200
            both.clock.ahead_seconds += TTL_SECONDS + 1
            answer = await both.ask("READER")
            assert (answer.status, SECRET in answer.body) == (503, False)
            assert (await both.ask("NOBODY")).status == 503
            fault.times = 0
            assert (await both.ask("READER")).status == 200


async def test_7_14_what_is_not_there_is_not_remembered(tmp_path: Path) -> None:
    """7.14 Who may not list is told "denied" of what is not there: as soon as it is there, it is served."""
    async with tenants(tmp_path, slot("strict")) as both:
        for status in (404, 403):
            effect = Failure(status, "NoSuchKey" if status == 404 else "AccessDenied")
            fault = both.gateway.origin.inject(lambda one: one.key == "own/new", effect, times=None)
            answer = await both.ask("READER", target="/bucket/own/new")
            assert (answer.status, effect.code.encode() in answer.body) == (status, True)
            fault.times = 0
            both.gateway.origin.put("bucket", "own/new", b"new")
            assert (await both.ask("READER", target="/bucket/own/new")).body == b"new"
            both.gateway.app.services.rights.forget()


async def test_7_14_bytes_under_a_key_of_their_own_are_asked_for(tmp_path: Path) -> None:
    """7.14 HEAD needs no right to decrypt: of an object under a KMS key the first byte is asked for."""
    async with tenants(tmp_path, slot("immutable")) as both:
        origin, decrypts = both.gateway.origin, {"WRITER"}
        origin.put("bucket", KEY, SECRET, {"x-amz-server-side-encryption": "aws:kms"})
        assert origin.policies is not None

        def of_reader(request: OriginRequest) -> S3Error | None:
            is_plain_head = request.method == "HEAD" and "x-amz-checksum-mode" not in request.headers
            return None if is_plain_head else s3_error("AccessDenied", "not authorized to perform: kms:Decrypt")

        origin.policies["READER"] = of_reader
        assert decrypts
        for _ in range(2):
            assert (await both.ask("WRITER")).body == SECRET
            assert (await both.ask("READER", "HEAD")).status == 200
            answer = await both.ask("READER")
            assert (answer.status, b"kms:Decrypt" in answer.body) == (403, True)
            assert (await both.ask("READER", "HEAD", headers={"x-amz-checksum-mode": "ENABLED"})).status == 403
            await both.settled()


async def test_7_14_who_asks_at_once_asks_once(tmp_path: Path) -> None:
    """7.14 A crowd of one caller shares a question; another caller's yes is not theirs."""
    async with tenants(tmp_path, slot("immutable")) as both:
        hold = Hold(asyncio.Event(), asyncio.Event())
        both.gateway.origin.inject(on(Operation.HEAD_OBJECT, key=KEY), hold)
        crowd = [asyncio.create_task(both.ask("READER")) for _ in range(20)]
        assert hold.reached is not None
        await hold.reached.wait()
        crowd += [asyncio.create_task(both.ask("READER")) for _ in range(20)]
        crowd += [asyncio.create_task(both.ask("NOBODY"))]
        await asyncio.sleep(0)
        hold.until.set()
        answers = await asyncio.gather(*crowd)
        assert [one.status for one in answers] == [200] * 40 + [403]
        heads = [one for one in both.gateway.origin.calls if one.method == "HEAD"]
        assert len([one for one in heads if one.signed_by == "READER"]) <= 2


async def test_7_15_unsigned_requests_are_refused(tmp_path: Path) -> None:
    """7.15 Where the gateway lets them in: nobody can be asked about. The gateway's own key pair asks nothing."""

    class OwnPair:
        def known(self) -> list[KeyPair]:
            return [KeyPair("GATEWAY", "GATEWAY-secret")]

    keyring = OriginKeyring(OwnPair())
    async with gateway_app(tmp_path, slots=[slot()], keyring=keyring, allow_unsigned=True) as gateway:
        gateway.origin.put("bucket", KEY, SECRET)
        gateway.origin.put("bucket", "open/readme", b"x")
        gateway.origin.policies = {}
        for method, target, headers, body in [
            ("GET", PATH, {}, b""),
            ("GET", "/bucket?list-type=2", {}, b""),
            ("PUT", "/bucket/open/copy", COPY, b""),
            ("POST", "/bucket?delete", md5_of(DELETE), DELETE),
        ]:
            answer = await call(gateway.app, method, target, headers, body, sign=False)
            assert (answer.status, SECRET in answer.body) == (403, False), target
        assert (await call(gateway.app, "GET", "/bucket/open/readme", sign=False)).status == 200
        answer = await call(gateway.app, "GET", PATH, access_key_id="GATEWAY", secret_access_key="GATEWAY-secret")
        assert answer.body == SECRET
        assert all(one.signed_by is None for one in gateway.origin.calls)


async def test_7_15_a_temporary_key_goes_with_its_token(tmp_path: Path) -> None:
    """7.15 Callers send it, and the origin gets it; another one, or none, is refused."""
    keyring = ConfiguredKeyring([Key("ASIA", "secret", "token", EVERYTHING)])
    async with gateway_app(tmp_path, slots=[slot()], keyring=keyring) as gateway:
        gateway.origin.put("bucket", KEY, SECRET)
        seen: list[KeyPair | None] = []
        send = gateway.origin.send

        async def watched(request: OriginRequest) -> object:
            seen.append(request.signed_by)
            return await send(request)

        gateway.origin.send = watched  # type: ignore[method-assign, assignment]
        for token, status in (("token", 200), ("another", 400), (None, 400)):
            answer = await call(
                gateway.app, "GET", PATH, access_key_id="ASIA", secret_access_key="secret", session_token=token
            )
            assert answer.status == status
        assert KeyPair("ASIA", "secret", "token") in seen
        assert "token" not in repr(seen).replace("session_token", "")
        assert "secret" not in repr(seen)


async def test_7_15_what_is_asked_goes_by_who_asks(tmp_path: Path) -> None:
    """7.15 A key that the origin does not know is refused in the origin's words; the gateway's own is not meant."""
    async with tenants(tmp_path, slot()) as both:
        assert both.gateway.origin.policies is not None
        del both.gateway.origin.policies["NOBODY"]
        answer = await both.ask("NOBODY")
        assert (answer.status, b"<Code>InvalidAccessKeyId</Code>" in answer.body) == (403, True)


async def test_7_16_what_is_pending_goes_to_the_origin_first(tmp_path: Path) -> None:
    """7.16 What was acknowledged when the slot wrote back: nobody has it, deletes it or goes on with it unasked."""
    back = Slot("own", Prefix.parse("s3://bucket/own/"), write="back")
    async with tenants(tmp_path, back, writeback=True) as both:
        app, buffer = both.gateway.app, both.gateway.buffer
        assert buffer is not None
        created = await both.ask("WRITER", "POST", "/bucket/own/pending?uploads")
        upload_id = created.body.partition(b"<UploadId>")[2].partition(b"</UploadId>")[0].decode()
        await both.ask("WRITER", "PUT", "/bucket/own/pending", body=SECRET)  # teaches what the bucket can
        await both.ask("WRITER", "PUT", "/bucket/own/pending", body=SECRET)
        pending = buffer.pending(ObjectKey("bucket", "own/pending"))
        app.services.slots.apply_settings([slot("strict")])
        answers = [
            await both.ask("NOBODY", method, target, body=body)
            for method, target, body in [
                ("PUT", f"/bucket/own/pending?partNumber=1&uploadId={upload_id}", b"x"),
                ("GET", f"/bucket/own/pending?uploadId={upload_id}", b""),
                ("DELETE", f"/bucket/own/pending?uploadId={upload_id}", b""),
            ]
        ]
        assert [one.status for one in answers] == [403] * 3
        if pending is None:
            pytest.fail("nothing is pending")
        waiting = [
            asyncio.create_task(both.ask("WRITER", method, "/bucket/own/pending", headers))
            for method, headers in (("GET", {}), ("HEAD", {}), ("DELETE", {}), ("GET", {"range": "bytes=0-1,3-4"}))
        ]
        await asyncio.sleep(0.05)
        assert not any(one.done() for one in waiting)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert buffer.pending(ObjectKey("bucket", "own/pending")) == pending


DELETES = b"<Delete><Object><Key>%s</Key></Object><Object><Key>open/gone</Key></Object></Delete>"
DOORS_TO_ONE: Sequence[tuple[str, str, str, Mapping[str, str]]] = [
    ("GET", "/bucket/{}", "", {}),
    ("HEAD", "/bucket/{}", "", {}),
    ("GET", "/bucket/{}", "", {"range": "bytes=0-1,3-4"}),
    ("GET", "/bucket/{}?tagging", "", {}),
    ("GET", "/bucket/{}?versionId=null", "", {}),
    ("PUT", "/bucket/{}", "", {}),
    ("PUT", "/bucket/{}?tagging", "", {}),
    ("DELETE", "/bucket/{}", "", {}),
    ("PUT", "/bucket/{}", "", {"x-amz-copy-source": "/bucket/open/readme"}),
    ("PUT", "/bucket/open/copy", "/bucket/{}", {}),
    ("PUT", "/bucket/open/copy?partNumber=1&uploadId=u", "/bucket/{}", {}),
    ("GET", "/bucket?prefix={}&versions", "", {}),
]


def _target(target: str, key: str) -> str:
    return target.format(quote(key, safe="") if "prefix=" in target else key)


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["strict", "ttl", "immutable"])
async def test_7_16_who_may_not_is_not_told_what_is_pending(tmp_path: Path, consistency: str) -> None:
    """7.5, 7.16 Neither by an answer nor by a wait: it is as of any other key, there or not. Who may waits."""

    async def said(both: Tenants, key: str, who: str = "NOBODY") -> list[tuple[int, bytes]]:
        answers = []
        for method, target, source, more in DOORS_TO_ONE:
            headers = {**more, "x-amz-copy-source": source.format(key)} if source else dict(more)
            async with asyncio.timeout(2):
                answer = await both.ask(who, method, _target(target, key), headers)
            of_none = answer.body.partition(b"<RequestId>")[0].replace(key.encode(), b"KEY")
            assert b"SignatureDoesNotMatch" not in of_none
            answers.append((answer.status, of_none))
        return answers

    back = Slot("own", Prefix.parse("s3://bucket/own/"), write="back")
    async with tenants(tmp_path, back, writeback=True) as both:
        buffer = both.gateway.buffer
        assert buffer is not None
        await both.ask("WRITER", "PUT", "/bucket/own/first", body=SECRET)  # teaches what the bucket can
        await both.ask("WRITER", "PUT", PATH, body=b"another")
        await both.ask("WRITER", "PUT", "/bucket/own/new", body=SECRET)
        pending = [ObjectKey("bucket", key) for key in (KEY, "own/new")]
        assert all(buffer.pending(key) is not None for key in pending)
        both.gateway.origin.put("bucket", "own/flushed", SECRET)
        both.gateway.app.services.slots.apply_settings([slot(consistency)])
        of_others = await said(both, "own/flushed")
        assert {status for status, _ in of_others} == {403}
        for key in ("own/none", *(one.key for one in pending)):
            assert await said(both, key) == of_others
        body = DELETES % KEY.encode()
        async with asyncio.timeout(2):
            answer = await both.ask("NOBODY", "POST", "/bucket?delete", md5_of(body), body)
        assert b"<Code>AccessDenied</Code>" in answer.body
        assert b"pending" not in answer.body
        for method, target, source, more in DOORS_TO_ONE:
            headers = {**more, "x-amz-copy-source": source.format(KEY)} if source else dict(more)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await both.ask("WRITER", method, _target(target, KEY), headers)
        assert all(buffer.pending(key) is not None for key in pending)


async def test_7_16_who_may_not_list_a_bucket_is_not_told_what_is_in_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7.16 Operations on all of it that cannot wait any longer: 403, and for who may, 503."""
    monkeypatch.setattr(past_the_buffer, "PATIENCE_SECONDS", 0.0)
    back = Slot("own", Prefix.parse("s3://bucket/own/"), write="back")
    async with tenants(tmp_path, back, writeback=True) as both:
        await both.ask("WRITER", "PUT", "/bucket/own/first", body=SECRET)  # teaches what the bucket can
        await both.ask("WRITER", "PUT", "/bucket/own/new", body=SECRET)
        both.gateway.app.services.slots.apply_settings([slot()])
        form = {"content-type": "multipart/form-data; boundary=x"}
        for method, target, headers in (
            ("GET", "/bucket?versions", {}),
            ("DELETE", "/bucket", {}),
            ("POST", "/bucket", form),
            ("PUT", "/bucket/open/x?renameObject", {"x-amz-rename-source": "/bucket/own/report"}),
        ):
            for who, status in (("NOBODY", 403), ("WRITER", 503)):
                answer = await both.ask(who, method, target, headers)
                assert (answer.status, b"own/new" in answer.body) == (status, status == 503), (who, method, target)


async def test_7_13_a_deletion_with_a_judged_key_buries_nothing_here(tmp_path: Path) -> None:
    """7.13 What is pending under its other keys goes to the origin, which then judges all of them."""
    back = Slot("back", Prefix.parse("s3://bucket/back/"), write="back")
    async with tenants(tmp_path, slot(), back, writeback=True) as both:
        buffer, key = both.gateway.buffer, ObjectKey("bucket", "back/pending")
        assert buffer is not None
        for _ in range(2):
            await both.ask("WRITER", "PUT", "/bucket/back/pending", body=SECRET)
        pending = buffer.pending(key)
        assert pending is not None
        body = b"<Delete><Object><Key>own/report</Key></Object><Object><Key>back/pending</Key></Object></Delete>"
        for who in ("NOBODY", "WRITER"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await both.ask(who, "POST", "/bucket?delete", md5_of(body), body)
            assert buffer.pending(key) == pending


async def test_7_13_a_copy_out_of_such_a_slot_goes_in_the_callers_name(tmp_path: Path) -> None:
    """7.13 Wherever its target is, of whatever headers: tags are copied, too, and have a right of their own."""
    back = Slot("back", Prefix.parse("s3://bucket/back/"), write="back")
    async with tenants(tmp_path, slot(), back, writeback=True) as both:
        origin = both.gateway.origin
        assert origin.policies is not None

        def without_tags(request: OriginRequest) -> S3Error | None:
            is_of_tags = request.method == "PUT" and request.headers.get("x-amz-tagging-directive") != "REPLACE"
            return s3_error("AccessDenied", "no s3:GetObjectTagging") if is_of_tags else None

        for target in ("/bucket/open/copy", "/bucket/back/copy"):
            origin.policies["READER"] = without_tags
            answer = await both.ask("READER", "PUT", target, COPY)
            assert (answer.status, b"no s3:GetObjectTagging" in answer.body) == (403, True)
            answer = await both.ask("READER", "PUT", target, {**COPY, "x-amz-tagging-directive": "REPLACE"})
            assert (answer.status, origin.calls[-1].signed_by) == (200, "READER")


OF_SOURCE = {
    "x-amz-request-payer": "x-amz-request-payer",
    "x-amz-source-expected-bucket-owner": "x-amz-expected-bucket-owner",
    "x-amz-copy-source-server-side-encryption-customer-key": "x-amz-server-side-encryption-customer-key",
}


@pytest.mark.parametrize("name", OF_SOURCE)
@pytest.mark.parametrize("version", ["", "?versionId=null"])
async def test_7_13_what_a_copy_says_of_its_source_is_asked_with_it(tmp_path: Path, name: str, version: str) -> None:
    """7.13 Who pays, whose bucket it must be, and the source's own key: what is granted with these is not without."""
    async with tenants(tmp_path, slot()) as both:
        origin = both.gateway.origin
        assert origin.policies is not None

        def only_with(request: OriginRequest) -> S3Error | None:
            of_read = request.method == "PUT" or request.headers.get(OF_SOURCE[name]) == "said"
            return None if of_read else s3_error("AccessDenied", "it must be said")

        origin.policies["READER"] = only_with
        source = {"x-amz-copy-source": f"{quote(PATH)}{version}"}
        for target in ("/bucket/open/copy", "/bucket/open/copy?partNumber=1&uploadId=u"):
            for _ in range(2):
                answer = await both.ask("READER", "PUT", target, {**source, name: "said"})
                assert (answer.status, b"it must be said" in answer.body) in ((200, False), (404, False))
                answer = await both.ask("READER", "PUT", target, source)
                assert (answer.status, b"it must be said" in answer.body) == (403, True)


async def test_questions_are_counted_by_outcome(tmp_path: Path) -> None:
    """Each question, and each answer from memory."""

    outcomes = ("allowed", "remembered", "denied", "other", "failed")
    before = [AUTHORIZATIONS.value("own", one) for one in outcomes]
    async with tenants(tmp_path, slot("immutable")) as both:
        await both.ask("READER")
        await both.ask("READER")
        await both.ask("NOBODY")
        await both.ask("READER", target="/bucket/own/none")
        both.gateway.origin.inject(on(Operation.HEAD_OBJECT), Failure(500))
        await both.ask("WRITER")
    after = [AUTHORIZATIONS.value("own", one) for one in outcomes]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 1, 1, 1]


def test_one_callers_rights_take_no_others_room() -> None:
    """What is remembered is bounded, and who has most gives room."""
    clock = ManualClock()
    rights = RememberedRights(clock, rights_max=100)
    of_small = [rights.right("small", "bytes", "bucket", f"k{number}") for number in range(20)]
    for right in of_small:
        rights.grant(right, clock.monotonic() + 60, rights.generation)
    for number in range(1000):
        rights.grant(rights.right("large", "bytes", "bucket", f"k{number}"), clock.monotonic() + 60, 0)
    assert all(rights.holds(right) for right in of_small)
    held = [rights.holds(rights.right("large", "bytes", "bucket", f"k{number}")) for number in range(1000)]
    assert held == [False] * 920 + [True] * 80
    generation = rights.generation
    rights.forget()
    rights.grant(of_small[0], clock.monotonic() + 60, generation)
    assert not any(rights.holds(right) for right in of_small)


def test_scopes_are_never_taken_for_one_another() -> None:
    """However keys are cut: none is made of another's parts."""
    rights, rng = RememberedRights(ManualClock()), random.Random(1)
    words: list[str | None] = ["", "a", "b", "ab", ", ", "', '", "\0", "/", None]
    seen: dict[bytes, tuple[object, ...]] = {}
    for _ in range(2000):
        scope = tuple(rng.choice(words) for _ in range(rng.randrange(1, 5)))
        digest = rights.right("key", "listing", *scope).scope
        assert seen.setdefault(digest, scope) == scope
