"""A write that goes through where the slot writes back says why, to its client and to the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from gateway.operations.writeback.write_back_policy import Reason
from gateway.origin.client import OriginRequest
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from gateway.telemetry import metrics
from tests.support.asgi import Answer as Got
from tests.support.asgi import call
from tests.support.counting import on_count
from tests.support.gateway_app import GatewayApp, gateway_app, within
from tests.support.memory_origin.faults import AlterHeaders, Answer, Unreachable, on
from tests.support.slots import Slot
from tests.support.write_back_gateway import SLOTS, Client, with_a_client, with_client

HEADER = "x-forebay-not-absorbed"
KMS = {"x-amz-server-side-encryption": "aws:kms"}


REASONS: list[str] = []
"""The reasons that were counted for slot `back`."""


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    REASONS.clear()

    def told(_: float, slot: str, reason: str) -> None:
        assert slot == "back"
        REASONS.append(reason)

    on_count(monkeypatch, metrics.WRITEBACK_THROUGH, told)


def why(answer: Got) -> str:
    """Return the reason in the answer, which is the one that was counted last."""
    assert REASONS[-1] == answer.headers[HEADER]
    return answer.headers[HEADER]


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"If-None-Match": "*"}, Reason.CONDITION),
        ({"x-amz-tagging": "a=b"}, Reason.HEADER),
        ({"x-amz-storage-class": "GLACIER"}, Reason.HEADER),
        ({"x-unheard-of": "y"}, Reason.HEADER),
    ],
)
@with_a_client()
async def test_of_what_the_request_says(client: Client, headers: Mapping[str, str], reason: Reason) -> None:
    """PutObject and CopyObject: what only the origin can judge."""
    await client.learn()
    await client.ask("PUT", "back/source", b"pending")
    assert why(await client.ask("PUT", "back/elsewhere/put", b"x", headers)) == reason
    source = {"x-amz-copy-source": "/bucket/back/source"}
    async with client.flushing():
        assert why(await client.ask("PUT", "back/copy", headers={**source, **headers})) == reason


@pytest.mark.parametrize(
    ("name", "is_absorbed"), [("back/../../a", False), ("back/a/../b", True), ("back/../a", True), ("back/./a", True)]
)
@with_a_client()
async def test_of_a_key_that_s3_refuses(client: Client, name: str, *, is_absorbed: bool) -> None:
    """PutObject, CopyObject and CreateMultipartUpload: acknowledged, it could never be flushed."""
    await client.learn()
    await client.ask("PUT", "back/source", b"pending")
    source = {"x-amz-copy-source": "/bucket/back/source"}
    answers = [await client.ask("PUT", name, b"x"), await client.ask("POST", f"{name}?uploads")]
    async with client.flushing():
        answers.append(await client.ask("PUT", name, headers=source))
    expected = None if is_absorbed else Reason.KEY
    assert [answer.headers.get(HEADER) for answer in answers] == [expected] * 3


@pytest.mark.parametrize("said", ["response-content-type=a", "If-None-Match=%2A", "If-None-Match=", "unheard-of=1"])
@with_a_client()
async def test_of_parameters_that_are_not_known(client: Client, said: str) -> None:
    """Whatever would write an object or a part, an error too; not what changes something else of an object."""
    await client.learn()
    copy = {"x-amz-copy-source": "/bucket/back/first"}
    upload_id = await client.create("back/here")
    for method, target, headers in (
        ("PUT", "k?", {}),
        ("PUT", "copy?", copy),
        ("POST", "m?uploads&", {}),
        ("PUT", "m?partNumber=1&uploadId=x&", {}),
        ("PUT", "m?partNumber=1&uploadId=x&", copy),
        ("POST", "m?uploadId=x&", {}),
        ("PUT", f"here?partNumber=1&uploadId={upload_id}&", {}),
    ):
        answer = await call(client.gateway.app, method, f"/bucket/back/{target}{said}", headers, b"")
        assert (answer.status, why(answer)) == (501, Reason.HEADER), "as the origin answers it"
    for sub_resource in ("acl", "tagging", "legal-hold", "retention", "restore"):
        answer = await call(client.gateway.app, "PUT", f"/bucket/back/k?{sub_resource}&{said}", {}, b"")
        assert HEADER not in answer.headers


COLD = {"x-amz-storage-class": "STANDARD_IA"}


@with_a_client()
async def test_the_first_of_a_storage_class_goes_through(client: Client) -> None:
    """PutObject and CopyObject: once the bucket has taken one of it, they are absorbed; STANDARD each store has."""
    await client.learn()
    await client.ask("PUT", "back/source", b"pending")
    copy = {"x-amz-copy-source": "/bucket/back/source", **COLD}
    async with client.flushing():
        assert why(await client.ask("PUT", "back/copy", headers=copy)) == Reason.STORAGE_CLASS
    assert why(await client.ask("PUT", "back/a", b"x", COLD)) == Reason.STORAGE_CLASS
    for number in range(2):
        assert HEADER not in (await client.ask("PUT", f"back/{number}", b"x", COLD)).headers
    await client.ask("PUT", "back/source", b"pending")
    assert HEADER not in (await client.ask("PUT", "back/copy", headers=copy)).headers
    standard = {"x-amz-storage-class": "STANDARD"}
    assert HEADER not in (await client.ask("PUT", "back/b", b"x", standard)).headers
    other = {"x-amz-storage-class": "ONEZONE_IA"}
    assert why(await client.ask("PUT", "back/c", b"x", other)) == Reason.STORAGE_CLASS


@with_a_client()
async def test_a_storage_class_that_the_bucket_refuses_is_never_acknowledged(client: Client) -> None:
    """radosgw has those that its operator has made, and no other: each such write is refused as it comes."""
    await client.learn()
    client.origin.inject(on(Operation.PUT_OBJECT), Answer(400, "InvalidArgument"), times=None)
    for _ in range(2):
        answer = await client.ask("PUT", "back/k", b"x", COLD, status=400)
        assert why(answer) == Reason.STORAGE_CLASS
    assert client.buffer.look(lambda tx: tx.counts()) == (0, 0)


@with_a_client()
async def test_create_tells_of_its_storage_class(client: Client) -> None:
    """Its answer says that the bucket takes it; with the origin away only one that is known begins here."""
    await client.learn()
    away = client.origin.inject(lambda _: True, Unreachable(), times=None)
    await client.ask("POST", "back/early?uploads", headers=COLD, status=503)
    client.origin.faults.remove(away)
    assert HEADER not in (await client.ask("POST", "back/m?uploads", headers=COLD)).headers
    client.origin.inject(lambda _: True, Unreachable(), times=None)
    assert HEADER not in (await client.ask("POST", "back/late?uploads", headers=COLD)).headers


def test_of_the_bucket(tmp_path: Path) -> None:
    """Unknown, with other ETags, or not to be looked at: PutObject, Create, CopyObject; an error says it, too."""

    async def scenario(client: Client) -> None:
        source = {"x-amz-copy-source": "/bucket/back/k"}
        away = client.origin.inject(lambda _: True, Unreachable(), times=None)
        assert why(await client.ask("PUT", "back/k", b"x", status=503)) == "bucket-unknown"
        away.times = 0
        client.origin.inject(on(Operation.PUT_OBJECT), AlterHeaders(KMS))
        assert why(await client.ask("PUT", "back/k", b"x")) == "bucket-unknown"
        for method, target, headers in (("PUT", "put", {}), ("PUT", "copy", source), ("POST", "m?uploads", {})):
            assert why(await client.ask(method, f"back/{target}", b"", headers)) == "bucket-etags"

    with_client(tmp_path, scenario)

    async def without_looking(client: Client) -> None:
        client.origin.inject(on(Operation.HEAD_OBJECT), Answer(403, "AccessDenied"), times=None)
        assert why(await client.ask("POST", "back/m?uploads")) == "bucket-unreadable"
        assert why(await client.ask("PUT", "back/k", b"x")) == "bucket-unreadable"

    with_client(tmp_path / "other", without_looking)


@with_a_client()
async def test_of_uploads(client: Client) -> None:
    """One that is the origin's own; one with KMS; a Complete that is the origin's; a copy of what is not pending."""
    await client.learn()
    async with await client.origin.send(OriginRequest("POST", "bucket", "back/m", [("uploads", None)])):
        theirs = next(reversed(client.origin.buckets["bucket"].uploads))
    target = f"back/m?partNumber=1&uploadId={theirs}"
    part = await client.ask("PUT", target, b"x")
    assert why(part) == "upload-of-the-origin"
    copied = await client.ask(
        "PUT", target.replace("partNumber=1", "partNumber=2"), headers={"x-amz-copy-source": "/bucket/back/first"}
    )
    assert why(copied) == "upload-of-the-origin"
    assert why(await client.complete("back/m", theirs, {1: part.headers["etag"]})) == "upload-of-the-origin"
    assert why(await client.ask("POST", "back/kms?uploads", headers=KMS)) == "bucket-etags"
    upload_id = await client.create("back/k")
    etags = {1: await client.part("back/k", upload_id, 1, b"x")}
    answer = await client.complete("back/k", upload_id, etags, headers={"If-None-Match": "*"})
    assert why(answer) == "condition"
    answer = await client.ask("PUT", "back/copy", headers={"x-amz-copy-source": "/bucket/back/k"})
    assert why(answer) == "source-of-the-origin"


@within(gateway_app, slots=SLOTS, buffer_closed=True)
async def test_of_a_buffer_without_a_disk(gateway: GatewayApp) -> None:
    """Nothing is absorbed until the gateway can use it again."""
    for method, target in (("PUT", "put"), ("PUT", "put?unheard-of=1"), ("POST", "m?uploads")):
        answer = await call(gateway.app, method, f"/bucket/back/{target}", body=b"")
        assert answer.headers[HEADER] == "disk"
    assert HEADER not in (await call(gateway.app, "GET", "/bucket/back/put")).headers


def test_nothing_is_said_of_other_writes(tmp_path: Path) -> None:
    """Those that are absorbed, or in other slots. What another gateway says, behind this one, is not repeated."""
    slots = [*SLOTS, Slot("through", Prefix.parse("s3://bucket/through/"))]

    async def scenario(client: Client) -> None:
        client.origin.inject(on(Operation.PUT_OBJECT), AlterHeaders({HEADER: "full"}))
        first = await client.ask("PUT", "back/first", b"x")
        assert first.headers[HEADER] == "bucket-unknown"
        for name in ("back/k", "through/k"):
            assert HEADER not in (await client.ask("PUT", name, b"x")).headers
        assert HEADER not in (await client.ask("GET", "back/k")).headers
        assert REASONS == ["bucket-unknown"]

    with_client(tmp_path, scenario, slots)
