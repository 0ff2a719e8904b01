"""ListMultipartUploads with uploads that are open on this node."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, unquote_plus

import pytest

from gateway.origin.client import OriginRequest
from gateway.policy.slots import Prefix
from gateway.s3.xml import text_of
from tests.origin.origins import xml
from tests.support.asgi import Answer
from tests.support.memory_origin.faults import Unreachable
from tests.support.slots import Slot
from tests.support.write_back_gateway import Client, with_a_client, with_client

EVERYWHERE = [Slot("back", Prefix.parse("s3://bucket/"), write="back")]
Row = tuple[str, str]
"""Key and id; a common prefix has no id."""


def rows(answer: Answer) -> list[Row]:
    root = xml(answer.body)
    uploads = [(unquote_plus(one.findtext("Key") or ""), one.findtext("UploadId") or "") for one in root.iter("Upload")]
    prefixes = [(unquote_plus(one.findtext("Prefix") or ""), "") for one in root.iter("CommonPrefixes")]
    return sorted([*uploads, *prefixes], key=lambda row: row[0].encode())


async def begin_at_origin(client: Client, key: str) -> str:
    """An upload that the gateway knows nothing of."""
    async with await client.origin.send(OriginRequest("POST", "bucket", key, [("uploads", "")])) as response:
        return text_of(await response.read(65536), "UploadId") or ""


async def pages(client: Client, limit: int, prefix: str = "", delimiter: str = "") -> list[list[Row]]:
    """All of a walk, page by page."""
    found: list[list[Row]] = []
    markers: dict[str, str] = {}
    while True:
        said = {"delimiter": delimiter, "encoding-type": "url", "max-uploads": str(limit), "prefix": prefix} | markers
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in sorted([*said.items(), ("uploads", "")]))
        answer = await client.ask("GET", f"?{query}")
        found.append(rows(answer))
        root = xml(answer.body)
        if root.findtext("IsTruncated") != "true":
            return found
        markers = {
            "key-marker": unquote_plus(root.findtext("NextKeyMarker") or ""),
            "upload-id-marker": root.findtext("NextUploadIdMarker") or "",
        }


def rolled_up(uploads: Sequence[Row], prefix: str, delimiter: str) -> set[Row]:
    found = set()
    for key, upload_id in uploads:
        end = key.find(delimiter, len(prefix)) if delimiter else -1
        if key.startswith(prefix):
            found.add((key, upload_id) if end < 0 else (key[: end + len(delimiter)], ""))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@with_a_client(EVERYWHERE)
async def test_every_upload_is_listed_once_by_the_id_that_clients_have(client: Client, seed: int) -> None:
    """Page by page, in the order of keys; what was completed or aborted is not, whatever the origin still has."""
    dice = random.Random(seed)
    opened: list[Row] = []
    for _ in range(24):
        key = "".join(dice.choices(["a", "b", "/", "é"], k=dice.randint(1, 3)))
        target = quote(key)
        if dice.random() < 0.4:
            opened.append((key, await begin_at_origin(client, key)))
            continue
        upload_id = await client.create(target)
        fate = dice.random()
        if fate < 0.3:
            etag = await client.part(target, upload_id, 1, b"x")
            await client.complete(target, upload_id, {1: etag})
        elif fate < 0.5:
            await client.ask("DELETE", f"{target}?uploadId={upload_id}", status=204)
        else:
            opened.append((key, upload_id))
    for limit, prefix, delimiter in [(1000, "", ""), (1, "", ""), (3, "", "/"), (2, "a", ""), (1, "a", "/")]:
        found = await pages(client, limit, prefix, delimiter)
        listed = [row for page in found for row in page]
        assert sorted(listed) == sorted(rolled_up(opened, prefix, delimiter))
        assert [row[0].encode() for row in listed] == sorted(row[0].encode() for row in listed)
        assert all(len(page) == limit for page in found[:-1])


@with_a_client(EVERYWHERE)
async def test_markers_are_good_when_what_they_name_has_ended(client: Client) -> None:
    """A client that aborts what it has seen listed before it asks for the next page gets all the others."""
    ids = [await client.create("k") for _ in range(3)] + [await begin_at_origin(client, "z")]
    first = await client.ask("GET", "?max-uploads=1&uploads=")
    assert rows(first) == [("k", ids[0])]
    following = text_of(first.body, "NextUploadIdMarker") or ""
    await client.ask("DELETE", f"k?uploadId={ids[0]}", status=204)
    second = await client.ask("GET", f"?key-marker=k&upload-id-marker={following}&uploads=")
    assert rows(second) == [("k", ids[1]), ("k", ids[2]), ("z", ids[3])]
    by_id = await client.ask("GET", f"?key-marker=k&upload-id-marker={ids[1]}&uploads=")
    assert rows(by_id) == [("k", ids[2]), ("z", ids[3])]
    assert rows(await client.ask("GET", "?key-marker=k&uploads=")) == [("z", ids[3])]


@with_a_client(EVERYWHERE)
async def test_an_upload_is_listed_with_what_create_said(client: Client) -> None:
    """Storage class, date and checksum algorithm; its id is good for ListParts."""
    headers = {"x-amz-storage-class": "STANDARD_IA", "x-amz-checksum-algorithm": "crc32"}
    upload_id = await client.create("k", headers)
    answer = await client.ask("GET", "?uploads=")
    (node,) = xml(answer.body).iter("Upload")
    assert (node.findtext("UploadId"), node.findtext("StorageClass")) == (upload_id, "STANDARD_IA")
    assert node.findtext("ChecksumAlgorithm") == "CRC32"
    assert (node.findtext("Initiated") or "").endswith(".000Z")
    await client.ask("GET", f"k?uploadId={upload_id}")


def test_an_upload_that_ends_meanwhile_is_no_stranger(tmp_path: Path) -> None:
    """The origin's page may still have an upload of ours that has been flushed when it comes."""

    async def scenario(client: Client) -> None:
        upload_id = await client.create("k")
        await client.complete("k", upload_id, {1: await client.part("k", upload_id, 1, b"x")})
        stranger = await begin_at_origin(client, "other")
        send, flushed = client.origin.send, False

        async def slow(request: OriginRequest) -> object:
            nonlocal flushed
            answer = await send(request)
            if ("uploads", "") in request.query and request.method == "GET" and not flushed:
                flushed = True
                await client.flush()
            return answer

        client.origin.send = slow  # type: ignore[method-assign, assignment]
        assert rows(await client.ask("GET", "?uploads=")) == [("other", stranger)]

    with_client(tmp_path, scenario, EVERYWHERE)


@with_a_client()
async def test_other_buckets_are_the_origins_own(client: Client) -> None:
    """Nothing can be open there; and its errors are passed on everywhere."""
    answer = await client.ask("GET", "?prefix=other&uploads=")
    assert answer.headers["x-forebay-cache"] == "forwarded"
    for query in (
        "max-uploads=x&uploads=",
        "encoding-type=gzip&uploads=",
        "key-marker=k&upload-id-marker=fb1.x&uploads=",
    ):
        await client.ask("GET", f"?{query}", status=400)
    client.origin.inject(lambda _: True, Unreachable(), times=None)
    await client.ask("GET", "?uploads=", status=503)
