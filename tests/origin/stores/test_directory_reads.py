"""Files that others write, read as objects: D1 (versions), D4 (keys that are no paths), D5 (links)."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path

import pytest

from gateway.core.errors import OriginBodyError, OriginUnreachable
from gateway.origin.client import OriginRequest
from gateway.origin.stores.directory import beneath, files, key_paths
from gateway.s3.headers import is_md5_etag, is_of_parts
from gateway.s3.origin_habits import makes_weak_etags
from tests.origin.origins import Answer, ask, xml
from tests.support.directory_origin import BUCKET, DirectoryOrigin

MEBIBYTE = 1024 * 1024


async def get(nas: DirectoryOrigin, key: str, **headers: str) -> Answer:
    return await ask(nas, "GET", BUCKET, key, headers={name.replace("_", "-"): text for name, text in headers.items()})


async def etag(nas: DirectoryOrigin, key: str) -> str:
    return (await ask(nas, "HEAD", BUCKET, key)).headers["etag"]


@pytest.fixture(params=[True, False], ids=["openat2", "by-component"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways of opening below a directory."""
    if request.param and not beneath.HAS_OPENAT2:
        pytest.skip("this kernel has no openat2")
    monkeypatch.setattr(beneath, "HAS_OPENAT2", request.param)
    return bool(request.param)


@pytest.mark.usefixtures("settled")
async def test_a_file_is_read_whole_and_in_ranges(nas: DirectoryOrigin) -> None:
    """Bytes, lengths and ETags of GET, ranged GET and HEAD agree."""
    data = os.urandom(3 * MEBIBYTE + 17)
    nas.write("dir/file", data)
    whole = await get(nas, "dir/file")
    assert (whole.status, whole.body, whole.headers["content-length"]) == (200, data, str(len(data)))
    for first, last in ((0, 0), (5, MEBIBYTE + 4), (MEBIBYTE, 3 * MEBIBYTE), (3 * MEBIBYTE, len(data) - 1)):
        part = await get(nas, "dir/file", range=f"bytes={first}-{last}", if_match=whole.headers["etag"])
        assert (part.status, part.body) == (206, data[first : last + 1])
    assert (await get(nas, "dir/file", if_none_match=whole.headers["etag"])).status == 304
    assert (await get(nas, "dir/file", if_match='"other"')).status == 412
    assert (await get(nas, "dir/file", range=f"bytes={len(data)}-")).status == 416


@pytest.mark.usefixtures("settled")
async def test_each_change_of_a_file_is_another_version(nas: DirectoryOrigin) -> None:
    """A new size, a new mtime, a change in place whose mtime was put back, another file in its place: four ETags."""
    path = nas.write("file", b"one")
    before = os.stat(path)
    seen = [await etag(nas, "file")]
    path.write_bytes(b"longer")
    seen.append(await etag(nas, "file"))
    path.write_bytes(b"two")
    seen.append(await etag(nas, "file"))
    path.write_bytes(b"six")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    seen.append(await etag(nas, "file"))
    other = nas.write("other", b"six")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)
    seen.append(await etag(nas, "file"))
    assert len(set(seen)) == 5
    assert not any(is_md5_etag(one) or is_of_parts(one) for one in seen)


@pytest.mark.slow
async def test_a_file_that_has_just_changed_has_a_weak_etag(nas: DirectoryOrigin) -> None:
    """It may change once more within a tick of the clock, and keep its times: so nothing pins it until then, and a read
    that names it waits. That is no habit of the bucket: the others are read as ever."""
    nas.write("file", b"one")
    answer = await get(nas, "file")
    assert (answer.status, answer.body) == (200, b"one")
    assert answer.headers["etag"].startswith("W/")
    assert not makes_weak_etags(answer.headers["etag"])
    assert (await get(nas, "file", if_match='"other"')).status == 412
    named = answer.headers["etag"]
    pinned = await asyncio.gather(get(nas, "file", if_match=named), get(nas, "file", if_match=named.removeprefix("W/")))
    assert [(one.status, one.body, one.headers["etag"]) for one in pinned] == [(200, b"one", named[2:])] * 2
    assert (await ask(nas, "HEAD", BUCKET, "file", headers={"if-match": named})).status == 200


async def test_a_file_of_the_future_is_not_waited_for(nas: DirectoryOrigin) -> None:
    """A read does not wait longer than its bound for a server whose clock is ahead: the ETag names no version yet."""
    nas.write("file", b"one", age_seconds=-60.0)
    named = (await get(nas, "file")).headers["etag"]
    assert (await get(nas, "file", if_match=named)).status == 412


@pytest.mark.usefixtures("settled")
async def test_a_replaced_file_is_read_to_its_end(nas: DirectoryOrigin) -> None:
    """A rename over a file that is being read changes none of the bytes that are read."""
    data = os.urandom(5 * MEBIBYTE)
    nas.write("file", data)
    async with await nas.send(OriginRequest("GET", BUCKET, "file")) as response:
        pieces = response.stream()
        read = bytes(await anext(pieces))
        nas.write("new", b"other").rename(nas.bucket / "file")
        async for piece in pieces:
            read += piece
    assert read == data
    assert (await get(nas, "file")).body == b"other"


@pytest.mark.usefixtures("settled")
async def test_a_file_that_is_changed_while_it_is_read_ends_the_answer(nas: DirectoryOrigin) -> None:
    """No answer holds bytes of two versions."""
    path = nas.write("file", bytes(8 * MEBIBYTE))
    async with await nas.send(OriginRequest("GET", BUCKET, "file")) as response:
        pieces = response.stream()
        await anext(pieces)
        with path.open("r+b") as file:
            file.seek(7 * MEBIBYTE)
            file.write(b"new")
        with pytest.raises(OriginBodyError):
            async for _ in pieces:
                pass


@pytest.mark.usefixtures("opened")
async def test_no_key_leads_out_of_its_bucket(nas: DirectoryOrigin, tmp_path: Path) -> None:
    """Not by `..`, nor by links to files or directories outside, nor by what the kernel's own links say."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"what is hidden")
    (tmp_path / "outside").mkdir(exist_ok=True)
    (tmp_path / "outside" / "file").write_bytes(b"what is hidden")
    nas.write("dir/file", b"1")
    for name, target in {
        "file-link": str(secret),
        "directory-link": str(tmp_path / "outside"),
        "up": "../../secret",
        "proc": "/proc/self/root",
        "loop": "loop",
    }.items():
        (nas.bucket / name).symlink_to(target)
    keys = ["file-link", "directory-link/file", "up", "proc/etc/passwd", "loop", "../secret", "dir/../../secret", ".."]
    for key in [*keys, "dir//file", "./dir/file", "/etc/passwd", "dir/file/", "dir", "dir/", "\0", "n" * 256]:
        answer = await get(nas, key)
        assert (answer.status, b"hidden" in answer.body) == (404, False), key
        assert (await ask(nas, "HEAD", BUCKET, key)).status == 404


@pytest.mark.usefixtures("opened")
async def test_no_link_leads_to_what_is_forebays_own(nas: DirectoryOrigin) -> None:
    """Unfinished writes, uploads, locks: not read, listed or written by a link within the bucket, of either kind."""
    own = nas.bucket / key_paths.OWN
    (own / "tmp").mkdir(parents=True)
    (own / "tmp" / "unfinished").write_bytes(b"hidden")
    nas.write("dir/file", b"1")
    (nas.bucket / "dir" / "link").symlink_to(f"../{key_paths.OWN}/tmp/unfinished")
    (nas.bucket / "all").symlink_to(key_paths.OWN)
    (nas.bucket / "round").symlink_to(f"dir/../{key_paths.OWN}/tmp")
    for key in ("dir/link", "all/tmp/unfinished", "round/unfinished", "all/", "round/"):
        assert (await get(nas, key)).status == 404, key
    for key in ("all/tmp/unfinished", "all/tmp/new", "round/new"):
        assert (await ask(nas, "PUT", BUCKET, key, body=b"2")).status == 409, key
    listed = await ask(nas, "GET", BUCKET, query=[("list-type", "2")])
    assert [node.text for node in xml(listed.body).findall("Contents/Key")] == ["dir/file"]
    assert (own / "tmp" / "unfinished").read_bytes() == b"hidden"


async def test_links_within_a_bucket_are_read(nas: DirectoryOrigin) -> None:
    """As a cache of Hugging Face has them. LIST shows those of files, and enters no linked directory."""
    nas.write("blobs/1", b"one")
    (nas.bucket / "snapshot").mkdir()
    (nas.bucket / "snapshot" / "model").symlink_to("../blobs/1")
    (nas.bucket / "again").symlink_to("snapshot")
    if beneath.HAS_OPENAT2:
        assert (await get(nas, "snapshot/model")).body == b"one"
    listed = await ask(nas, "GET", BUCKET, query=[("list-type", "2")])
    assert [node.text for node in xml(listed.body).findall("Contents/Key")] == ["blobs/1", "snapshot/model"]


async def test_what_is_no_file_is_no_object(nas: DirectoryOrigin) -> None:
    """A FIFO keeps no thread; sockets and names that are no UTF-8 are left out, and counted."""
    os.mkfifo(nas.bucket / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(nas.bucket / "socket"))
        Path(os.fsdecode(os.fsencode(nas.bucket) + b"/\xff")).write_bytes(b"x")
        for key in ("fifo", "socket"):
            assert (await get(nas, key)).status == 404
        listed = await ask(nas, "GET", BUCKET, query=[("list-type", "2")])
    assert xml(listed.body).findtext("KeyCount") == "0"
    assert nas.skipped == {"special-file": 2, "not-utf-8": 1}


async def test_an_empty_directory_is_an_object_of_nothing(nas: DirectoryOrigin) -> None:
    """`dir/` is there while nothing lies in it."""
    (nas.bucket / "dir").mkdir()
    answer = await get(nas, "dir/")
    assert (answer.status, answer.body, is_md5_etag(answer.headers["etag"])) == (200, b"", True)
    nas.write("dir/file", b"1")
    assert (await get(nas, "dir/")).status == 404


async def test_a_bucket_that_is_not_mounted_is_not_empty(nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch) -> None:
    """13.7 A directory on another file system than before answers nothing: no 404 is made of an absent mount."""
    nas.write("file", b"1")
    assert (await get(nas, "file")).status == 200
    monkeypatch.setitem(nas.files._files._devices, BUCKET, -1)
    with pytest.raises(OriginUnreachable, match="mounted"):
        await get(nas, "file")
    assert (await ask(nas, "GET", "nothing", "file")).status == 404


async def test_13_8_what_the_file_system_forbids_is_forbidden(
    nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13.8 The gateway's own user decides; tests run as root, so the kernel's answer is made up."""
    nas.write("file", b"1")

    def forbidden(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr(files.OpenFile, "__init__", forbidden)
    answer = await get(nas, "file")
    assert (answer.status, xml(answer.body).findtext("Code")) == (403, "AccessDenied")
