"""D3: parts of an upload are written where the object will have them."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from gateway.origin.client import StreamedBody
from gateway.origin.stores.directory import uploads, writes
from gateway.origin.stores.directory.key_paths import OWN
from gateway.s3.checksums import Checksum
from gateway.s3.headers import multipart_etag
from tests.origin.origins import ask, xml
from tests.origin.stores.asking import (
    KEY,
    MEBIBYTE,
    PART,
    begin,
    code,
    complete,
    litter,
    md5_etag,
    part,
    put,
    without_attributes,
)
from tests.support.directory_origin import BUCKET, DirectoryOrigin
from tests.support.waiting import until


async def test_parts_are_written_where_the_object_will_have_them(
    nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, and each byte once: Complete renames the file."""
    parts = {number: os.urandom(PART if number < 4 else 1000 + number) for number in (1, 2, 3, 4)}
    copies = list[int]()
    copy = uploads._copy

    def counted(directory: int, record: Mapping[str, Any], target: int, place: int) -> None:
        copies.append(record["size"])
        copy(directory, record, target, place)

    monkeypatch.setattr(uploads, "_copy", counted)
    upload_id = await begin(nas, **{"content-type": "text/plain"})
    etags = {number: (await part(nas, upload_id, number, parts[number])).headers["etag"] for number in (3, 1, 4, 2)}
    inode = next((nas.bucket / OWN / "uploads").rglob("data")).stat().st_ino
    done = await complete(nas, upload_id, etags)
    assert xml(done.body).findtext("ETag") == multipart_etag(list(dict(sorted(etags.items())).values()))
    assert (nas.bucket / KEY).read_bytes() == b"".join(parts[number] for number in sorted(parts))
    assert ((nas.bucket / KEY).stat().st_ino, copies, litter(nas)) == (inode, [], [])
    head = await ask(nas, "HEAD", BUCKET, KEY, query=[("partNumber", "4")])
    assert (head.headers["x-amz-mp-parts-count"], head.headers["content-length"]) == ("4", "1004")
    again = await complete(nas, upload_id, etags)
    assert (again.status, xml(again.body).findtext("ETag")) == (200, xml(done.body).findtext("ETag"))


async def test_a_part_costs_no_file_of_its_own(nas: DirectoryOrigin) -> None:
    """Else Complete would read and unlink thousands."""
    upload_id = await begin(nas)
    directory = next((nas.bucket / OWN / "uploads").glob("*"))
    etags = {1: (await part(nas, upload_id, 1, os.urandom(PART))).headers["etag"]}
    files = sorted(directory.iterdir())
    for number in (2, 3, 9):
        etags[number] = (await part(nas, upload_id, number, os.urandom(PART))).headers["etag"]
    assert sorted(directory.iterdir()) == files
    assert (await complete(nas, upload_id, etags)).status == 200


async def test_a_torn_record_is_none(nas: DirectoryOrigin) -> None:
    """The part is unknown, and can come again."""
    upload_id, data = await begin(nas), [os.urandom(PART), b"end"]
    etags = {at + 1: (await part(nas, upload_id, at + 1, data[at])).headers["etag"] for at in range(2)}
    records = next((nas.bucket / OWN / "uploads").rglob("records"))
    with records.open("r+b") as file:
        file.seek(uploads._RECORD_BYTES + 20)
        file.write(b"#")
    assert code(await complete(nas, upload_id, etags)) == "InvalidPart"
    etags[2] = (await part(nas, upload_id, 2, data[1])).headers["etag"]
    assert (await complete(nas, upload_id, etags)).status == 200
    assert (nas.bucket / KEY).read_bytes() == b"".join(data)


@pytest.mark.parametrize(
    "sizes",
    [
        {1: 100},
        {2: 100, 1: PART},  # the short last part came first
        {1: PART, 3: PART, 7: 5},  # gaps
        {1: PART, 2: PART + 1, 3: 5},  # longer than the first
        {1: PART + 3, 2: PART, 3: 5},  # shorter than the first
        {5: PART, 2: PART + 1},
    ],
)
async def test_parts_of_odd_sizes_make_the_same_object(nas: DirectoryOrigin, sizes: dict[int, int]) -> None:
    """Whatever the sizes, numbers and order of parts."""
    parts = {number: os.urandom(size) for number, size in sizes.items()}
    upload_id = await begin(nas)
    etags = {number: (await part(nas, upload_id, number, data)).headers["etag"] for number, data in parts.items()}
    assert (await complete(nas, upload_id, etags)).status == 200
    assert (nas.bucket / KEY).read_bytes() == b"".join(parts[number] for number in sorted(parts))
    assert litter(nas) == []


async def test_a_part_that_comes_again_replaces_the_first(nas: DirectoryOrigin) -> None:
    """Also while the first attempt is still under way, and though it fails: no byte of one gets into the other."""
    upload_id = await begin(nas)
    first, second, third = (os.urandom(PART) for _ in range(3))
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(data: bytes) -> AsyncIterator[bytes]:
        yield data[:MEBIBYTE]
        begun.set()
        await goes_on.wait()
        yield data[MEBIBYTE:]

    attempt = asyncio.create_task(part(nas, upload_id, 1, StreamedBody(slow(first), PART)))
    await begun.wait()
    etag = (await part(nas, upload_id, 1, second)).headers["etag"]
    etags = {1: etag, 2: (await part(nas, upload_id, 2, third)).headers["etag"]}
    attempt.cancel()
    await asyncio.gather(attempt, return_exceptions=True)
    goes_on.set()
    assert (await complete(nas, upload_id, etags)).status == 200
    assert (nas.bucket / KEY).read_bytes() == second + third


async def test_an_attempt_that_goes_on_behind_complete_changes_no_object(nas: DirectoryOrigin) -> None:
    """Its client has given it up long ago and sent the part again; the first one's connection still lives."""
    upload_id = await begin(nas)
    first, second, third = (os.urandom(PART) for _ in range(3))
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield first[:MEBIBYTE]
        begun.set()
        await goes_on.wait()
        yield first[MEBIBYTE:]

    attempt = asyncio.create_task(part(nas, upload_id, 1, StreamedBody(slow(), PART)))
    await begun.wait()
    etags = {
        number: (await part(nas, upload_id, number, data)).headers["etag"] for number, data in ((1, second), (2, third))
    }
    done = await complete(nas, upload_id, etags)
    goes_on.set()
    assert code(await attempt) == "NoSuchUpload"
    answer = await ask(nas, "GET", BUCKET, KEY)
    assert (answer.body, answer.headers["etag"]) == (second + third, xml(done.body).findtext("ETag"))


async def test_a_write_that_hangs_meets_no_bytes_of_the_next_attempt(
    nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client is gone while a thread writes; what the thread then writes is in no part, and in no other file."""
    upload_id = await begin(nas)
    first, second, third = (os.urandom(PART) for _ in range(3))
    hangs, begun = threading.Event(), threading.Event()
    write_all = writes.write_all

    def stuck(descriptor: int, data: bytes | memoryview, offset: int) -> None:
        copy = bytes(data)
        if copy == first[:MEBIBYTE]:
            begun.set()
            hangs.wait()
        write_all(descriptor, copy, offset)

    monkeypatch.setattr(uploads, "write_all", stuck)
    attempt = asyncio.create_task(part(nas, upload_id, 1, first))
    await asyncio.to_thread(begun.wait)
    attempt.cancel()
    await asyncio.gather(attempt, return_exceptions=True)
    await until(lambda: nas.files.threads._busy == 1)
    etags = {
        number: (await part(nas, upload_id, number, data)).headers["etag"] for number, data in ((1, second), (2, third))
    }
    assert (await complete(nas, upload_id, etags)).status == 200
    hangs.set()
    await nas.files.threads.run(lambda: None, 60.0)
    await until(lambda: not nas.files.threads._busy)
    assert (nas.bucket / KEY).read_bytes() == second + third


async def test_a_refused_complete_leaves_the_upload_whole(nas: DirectoryOrigin) -> None:
    """After a condition that does not hold, other parts can be chosen."""
    await put(nas, KEY, b"before")
    upload_id = await begin(nas)
    parts = {number: os.urandom(PART) for number in (1, 2, 3)}
    etags = {number: (await part(nas, upload_id, number, data)).headers["etag"] for number, data in parts.items()}
    first = {1: etags[1]}
    assert (await complete(nas, upload_id, first, if_none_match="*")).status == 412
    assert code(await complete(nas, upload_id, {1: '"other"'})) == "InvalidPart"
    assert (await complete(nas, upload_id, etags, if_match=md5_etag(b"before"))).status == 200
    assert (nas.bucket / KEY).read_bytes() == b"".join(parts.values())


@pytest.mark.parametrize("algorithm", ["CRC32", "SHA256", "CRC64NVME"])
async def test_a_copied_part_has_the_checksum_of_its_upload(nas: DirectoryOrigin, algorithm: str) -> None:
    """Which nobody sends: S3 computes it, and the object has it in the end."""
    name, data = f"x-amz-checksum-{algorithm.lower()}", os.urandom(PART + 7)
    checksum = Checksum(algorithm.lower())
    checksum.update(data)
    await put(nas, "source", data)
    upload_id = await begin(nas, **{"x-amz-checksum-algorithm": algorithm})
    headers = {"x-amz-copy-source": f"/{BUCKET}/source"}
    query = [("partNumber", "1"), ("uploadId", upload_id)]
    copied = xml((await ask(nas, "PUT", BUCKET, KEY, query=query, headers=headers)).body)
    assert copied.findtext(f"Checksum{algorithm}") == checksum.base64()
    assert (await complete(nas, upload_id, {1: copied.findtext("ETag") or ""})).status == 200
    head = await ask(nas, "HEAD", BUCKET, KEY, headers={"x-amz-checksum-mode": "ENABLED"})
    assert name in head.headers
    assert (nas.bucket / KEY).read_bytes() == data


@pytest.mark.parametrize("sizes", [(PART, PART), (PART, 1, 2)], ids=["in place", "anew"])
async def test_no_attribute_of_a_refused_complete_is_left(
    nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """Forebay keeps attributes in a file of its own where the file system has none. It removes that file, too."""
    without_attributes(monkeypatch)
    await put(nas, KEY, b"before")
    upload_id = await begin(nas)
    etags = {at + 1: (await part(nas, upload_id, at + 1, bytes(size))).headers["etag"] for at, size in enumerate(sizes)}
    del etags[2]
    assert (await complete(nas, upload_id, etags, if_none_match="*")).status == 412
    assert (await ask(nas, "DELETE", BUCKET, KEY, query=[("uploadId", upload_id)])).status == 204
    assert (await ask(nas, "DELETE", BUCKET, KEY)).status == 204
    assert litter(nas) == []


async def test_an_aborted_upload_is_gone(nas: DirectoryOrigin) -> None:
    upload_id = await begin(nas)
    await part(nas, upload_id, 1, b"x")
    listed = xml((await ask(nas, "GET", BUCKET, query=[("uploads", None)])).body)
    assert listed.findtext("Upload/UploadId") == upload_id
    assert (await ask(nas, "DELETE", BUCKET, KEY, query=[("uploadId", upload_id)])).status == 204
    assert code(await part(nas, upload_id, 1, b"x")) == "NoSuchUpload"
    assert code(await part(nas, "../../dir", 1, b"x")) == "NoSuchUpload"
    assert litter(nas) == []


async def test_an_upload_that_cannot_begin_leaves_nothing(
    nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system is full: the client gets 507."""

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(uploads, "write_all", no_room)
    assert (await ask(nas, "POST", BUCKET, KEY, query=[("uploads", None)])).status == 507
    assert list((nas.bucket / OWN / "uploads").iterdir()) == []
