"""Clause 7.5 of docs/semantics.md: what a caller is answered does not depend on what others have."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from gateway.edge.access import ConfiguredKeyring, Key
from gateway.operations.writeback import past_the_buffer
from gateway.policy.slots import Grant, Prefix
from tests.support.asgi import Answer, call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.slots import Slot

SECRET = b"what is theirs"

_OF_ONE_ANSWER = frozenset({"x-amz-request-id", "x-amz-id-2", "date", "x-forebay-origin-request-id", "last-modified"})
_OF_ONE_REQUEST = b"RequestId|HostId|UploadId|LastModified|Initiated|NextUploadIdMarker|UploadIdMarker"
_OF_ONE_REQUEST += b"|StringToSign|StringToSignBytes|CanonicalRequest|CanonicalRequestBytes|SignatureProvided"
_IDS = re.compile(rb"<(%b)>[^<]*</\1>" % _OF_ONE_REQUEST)


def slots(layout: str) -> list[Slot]:
    """Each tenant's own, or one for both."""
    write = "back" if "back" in layout else "through"
    consistency = "strict" if "strict" in layout else "immutable"
    prefixes = ["s3://bucket/"] if "shared" in layout else ["s3://bucket/mine/", "s3://bucket/theirs/"]
    order = "strict" if "ordered" in layout else "markers"
    return [
        Slot(f"s{number}", Prefix.parse(prefix), consistency=consistency, write=write, order=order)
        for number, prefix in enumerate(prefixes)
    ]


@dataclass
class World:
    """A gateway with two tenants, of whom `ME` asks. `upload_id` is one of theirs, where they have any."""

    gateway: GatewayApp
    upload_id: str = "an-upload-of-nobody"

    async def ask(
        self, who: str, method: str, target: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        return await call(
            self.gateway.app, method, target, headers, body, access_key_id=who, secret_access_key=f"{who}-secret"
        )


@asynccontextmanager
async def world(directory: Path, layout: str, *, are_there: bool) -> AsyncIterator[World]:
    """The same but for what the other tenant has: objects that are cached, listed, pending, and an upload."""
    grants = {
        name: Grant((Prefix.parse(f"s3://bucket/{place}/"),)) for name, place in (("ME", "mine"), ("YOU", "theirs"))
    }
    keyring = ConfiguredKeyring([Key(name, f"{name}-secret", None, grant) for name, grant in grants.items()])
    async with gateway_app(directory, slots=slots(layout), keyring=keyring, writeback=True) as gateway:
        here = World(gateway)
        for name in ("a", "b"):
            gateway.origin.put("bucket", f"mine/{name}", b"what is mine")
        await here.ask("ME", "PUT", "/bucket/mine/w", body=b"teaches what the bucket can")
        if are_there:
            for name in ("k", "l"):
                gateway.origin.put("bucket", f"theirs/{name}", SECRET)
                for _ in range(3):
                    await here.ask("YOU", "GET", f"/bucket/theirs/{name}")
            assert (await here.ask("YOU", "GET", "/bucket?list-type=2&prefix=theirs%2F")).status == 200
            assert (await here.ask("YOU", "PUT", "/bucket/theirs/pending", body=SECRET)).status == 200
            assert (await here.ask("YOU", "PUT", "/bucket/theirs/latest", body=SECRET)).status == 200
            created = await here.ask("YOU", "POST", "/bucket/theirs/upload?uploads")
            here.upload_id = created.body.partition(b"<UploadId>")[2].partition(b"</UploadId>")[0].decode()
            part = f"/bucket/theirs/upload?partNumber=1&uploadId={here.upload_id}"
            assert (await here.ask("YOU", "PUT", part, body=SECRET)).status == 200
        await gateway.catalog.settle()
        await gateway.blocks.settle()
        yield here


def md5_of(body: bytes) -> dict[str, str]:
    return {"content-md5": base64.b64encode(hashlib.md5(body).digest()).decode()}


def deletion(*keys: str) -> bytes:
    return b"<Delete>" + b"".join(f"<Object><Key>{key}</Key></Object>".encode() for key in keys) + b"</Delete>"


COMPLETE = b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>a</ETag></Part></CompleteMultipartUpload>"
Door = tuple[str, str, Mapping[str, str], bytes]
Said = tuple[int, dict[str, str], bytes]


def doors(upload_id: str) -> Sequence[Door]:
    """Whatever I may try to learn of theirs; `upload_id` is one of theirs, or of nobody."""
    their, mine = [f"/bucket/theirs/{name}" for name in ("k", "none", "pending", "latest", "upload")], "/bucket/mine/a"
    found: list[Door] = []
    for one in their:
        found += [
            ("GET", one, {}, b""),
            ("HEAD", one, {}, b""),
            ("GET", one, {"range": "bytes=0-3"}, b""),
            ("GET", one, {"if-none-match": f'"{hashlib.md5(SECRET).hexdigest()}"'}, b""),
            ("GET", f"{one}?attributes", {}, b""),
            ("GET", f"{one}?versionId=null", {}, b""),
            ("GET", f"{one}?uploadId={upload_id}", {}, b""),
            ("PUT", one, {"if-match": '"none"'}, b"x"),
            ("PUT", one, {"if-none-match": "*"}, b"x"),
            ("DELETE", one, {}, b""),
            ("PUT", f"{one}?partNumber=1&uploadId={upload_id}", {}, b"x"),
            ("POST", f"{one}?uploadId={upload_id}", {}, COMPLETE),
            ("DELETE", f"{one}?uploadId={upload_id}", {}, b""),
            ("PUT", "/bucket/mine/copy", {"x-amz-copy-source": quote(one)}, b""),
            ("PUT", "/bucket/mine/copy", {"x-amz-copy-source": quote(one, safe="")}, b""),
            ("PUT", "/bucket/mine/copy", {"x-amz-copy-source": quote(f"{one}?versionId=null", safe="/?=")}, b""),
            ("PUT", one, {"x-amz-copy-source": mine}, b""),
            ("PUT", "/bucket/mine/x?renameObject", {"x-amz-rename-source": one}, b""),
        ]
    listings = ["", "&prefix=", "&prefix=t", "&prefix=theirs", "&prefix=theirs%2F", "&delimiter=%2F", "&prefix=mine"]
    listings += ["&prefix=mine%2F", "&prefix=mine%2F&start-after=theirs%2Fa", "&prefix=mine%2F&max-keys=1"]
    listings += ["&prefix=mine%2F&fetch-owner=true", "&prefix=mine%2F&delimiter=%2F", "&prefix=mine%2F..%2Ftheirs%2F"]
    for one in listings:
        found.append(("GET", f"/bucket?list-type=2{one}", {}, b""))
        found.append(("GET", f"/bucket?encoding-type=url{one.replace('start-after', 'marker')}", {}, b""))
        found.append(("GET", f"/bucket?uploads{one.replace('start-after', 'key-marker')}", {}, b""))
        found.append(("GET", f"/bucket?versions{one}", {}, b""))
    found += [
        ("GET", f"/bucket?uploads&prefix=mine%2F&key-marker=theirs%2Fupload&upload-id-marker={upload_id}", {}, b""),
        ("GET", f"/bucket?uploads&prefix=mine%2F&key-marker=mine%2Fa&upload-id-marker={upload_id}", {}, b""),
        ("GET", "/bucket?list-type=2&prefix=mine%2F&prefix=theirs%2F", {}, b""),
        ("HEAD", "/bucket", {}, b""),
        ("GET", "/", {}, b""),
        ("DELETE", "/bucket", {}, b""),
        ("POST", "/bucket", {"content-type": "multipart/form-data; boundary=x"}, b"--x--"),
    ]
    deletions = [deletion("theirs/k"), deletion("theirs/pending", "theirs/none"), deletion("theirs/k", "mine/none")]
    found += [("POST", "/bucket?delete", md5_of(one), one) for one in deletions]
    for method, query, body in (
        ("GET", "?", b""),
        ("PUT", "?partNumber=1&", b"x"),
        ("POST", "?", COMPLETE),
        ("DELETE", "?", b""),
    ):
        found.append((method, f"/bucket/mine/upload{query}uploadId={upload_id}", {}, body))
    found += [
        ("GET", mine, {}, b""),
        ("HEAD", mine, {}, b""),
        ("GET", "/bucket/mine/theirs/k", {}, b""),
        ("GET", "/bucket/mine/..%2Ftheirs/k", {}, b""),
        ("GET", "/bucket/mine/../theirs/k", {}, b""),
        ("PUT", "/bucket/mine/latest", {}, b"a marker of mine"),
        ("PUT", "/bucket/mine/latest", {"if-none-match": "*"}, b"x"),
        ("PUT", "/bucket/mine/tags?tagging", {}, b"<Tagging/>"),
        ("DELETE", "/bucket/mine/b", {}, b""),
    ]
    return found


def said(door: Door, answer: Answer, upload_id: str) -> Said:
    """What may tell something. Who knows the id of an upload, which nobody guesses, may know that there is one."""
    headers = {name: value for name, value in answer.headers.items() if name not in _OF_ONE_ANSWER}
    headers.pop("content-length", None)
    if "/mine/upload?" in door[1]:
        headers = {}
    return answer.status, headers, _IDS.sub(b"", answer.body).replace(upload_id.encode(), b"")


async def told(
    directory: Path, layout: str, *, are_there: bool
) -> list[tuple[Door, tuple[int, dict[str, str], bytes]]]:
    async with world(directory, layout, are_there=are_there) as here:
        found = []
        for door in doors(here.upload_id):
            await here.gateway.catalog.settle()
            await here.gateway.blocks.settle()
            answer = await here.ask("ME", *door)
            assert SECRET not in answer.body
            named = door[1] + repr(door[2]) + door[3].decode()
            for name in ("theirs/k", "theirs/l", "theirs/pending", "theirs/latest", "theirs/upload"):
                assert name in named or quote(name, safe="") in named or name.encode() not in answer.body, door
            found.append((door, said(door, answer, here.upload_id)))
        if are_there:
            assert (await here.ask("YOU", "GET", "/bucket/theirs/pending")).body == SECRET
            part = f"/bucket/theirs/upload?uploadId={here.upload_id}"
            assert b"<PartNumber>1</PartNumber>" in (await here.ask("YOU", "GET", part)).body
        return found


@pytest.fixture(autouse=True)
def _without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is flushed here: what waits for that is answered soon that it is to try again."""
    monkeypatch.setattr(past_the_buffer, "PATIENCE_SECONDS", 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["through", "strict through", "back", "strict back", "shared back", "shared strict through"]
)
def test_what_i_am_answered_does_not_depend_on_what_others_have(tmp_path: Path, layout: str) -> None:
    """7.5 Existence, sizes, names, uploads, what is cached or pending: by no status, header, document or message."""
    with_theirs = asyncio.run(told(tmp_path / "there", layout, are_there=True))
    without = asyncio.run(told(tmp_path / "alone", layout, are_there=False))
    for (door, one), (_, other) in zip(with_theirs, without, strict=True):
        assert one == other, door[:3]


def test_who_waits_for_others_is_not_told_for_whom(tmp_path: Path) -> None:
    """7.5 In a slot of both with `order = "strict"`, what others have written before is waited for; it has no name."""
    answers = asyncio.run(told(tmp_path, "shared ordered back", are_there=True))
    [waited] = [one for door, one in answers if door[1] == "/bucket?delete" and b"mine/none" in door[3]]
    assert b"A key that comes before, and is not among yours" in waited[2]
