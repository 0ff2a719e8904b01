"""D2 (own writes carry their MD5), D3 (whole or not there; in place), D4 (keys that no file can have)."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.core.errors import OriginBusy, S3Error
from gateway.core.model import ObjectKey
from gateway.origin.client import OriginRequest, StreamedBody
from gateway.origin.stores.directory import beneath, key_paths, writes
from gateway.origin.stores.directory.held import lock
from gateway.origin.stores.directory.key_paths import OWN
from gateway.origin.stores.directory.writes import lock_number
from tests.origin.origins import ask, xml
from tests.origin.stores.asking import (
    KEY,
    MEBIBYTE,
    PART,
    begin,
    cannot,
    code,
    complete,
    litter,
    md5_etag,
    part,
    put,
    without_attributes,
)
from tests.support.directory_origin import BUCKET, DirectoryOrigin
from tests.support.rights import with_plain_rights
from tests.support.waiting import until


async def test_what_forebay_writes_has_the_etag_of_s3(nas: DirectoryOrigin) -> None:
    """With type and metadata, in HEAD and LIST, and others see an ordinary file of the usual rights."""
    data = os.urandom(3 * MEBIBYTE)
    answer = await put(nas, KEY, data, content_type="text/plain", x_amz_meta_step="7")
    head = await ask(nas, "HEAD", BUCKET, KEY)
    listed = xml((await ask(nas, "GET", BUCKET, query=[("list-type", "2")])).body)
    assert {answer.headers["etag"], head.headers["etag"], listed.findtext("Contents/ETag")} == {md5_etag(data)}
    assert (head.headers["content-type"], head.headers["x-amz-meta-step"]) == ("text/plain", "7")
    path, umask = nas.bucket / KEY, os.umask(0)
    os.umask(umask)
    assert (path.read_bytes(), path.stat().st_mode & 0o777, litter(nas)) == (data, 0o666 & ~umask, [])


async def test_a_file_that_others_change_is_no_longer_forebays(nas: DirectoryOrigin) -> None:
    """In place, or by another file in its place: its ETag is a token then, and the metadata are gone."""
    for change in ("in place", "replaced"):
        await put(nas, KEY, b"ours", x_amz_meta_step="7")
        path = nas.bucket / KEY
        if change == "in place":
            path.write_bytes(b"them")
            os.utime(path, (1, 1))
        else:
            nas.write("new", b"them").rename(path)
        head = await ask(nas, "HEAD", BUCKET, KEY)
        assert head.headers["etag"].endswith('.f"')
        assert "x-amz-meta-step" not in head.headers


async def test_conditions_are_judged_at_the_last_moment(nas: DirectoryOrigin) -> None:
    """If-None-Match, If-Match and a conditional DELETE, as S3 has them; nothing of a refused write is left."""
    first = await put(nas, KEY, b"1", if_none_match="*")
    assert first.status == 200
    assert (await put(nas, KEY, b"2", if_none_match="*")).status == 412
    assert (await put(nas, KEY, b"2", if_match='"other"')).status == 412
    assert (await put(nas, "none", b"2", if_match='"other"')).status == 404
    second = await put(nas, KEY, b"2", if_match=first.headers["etag"])
    assert second.status == 200
    delete = {"if-match": first.headers["etag"]}
    assert (await ask(nas, "DELETE", BUCKET, KEY, headers=delete)).status == 412
    assert (nas.bucket / KEY).read_bytes() == b"2"
    assert (await ask(nas, "DELETE", BUCKET, KEY, headers={"if-match": second.headers["etag"]})).status == 204
    assert litter(nas) == []


async def test_a_file_that_others_make_meanwhile_is_not_overwritten(
    nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If-None-Match holds against programs that know nothing of Forebay: the file is linked, not renamed."""
    rename_new, link = beneath.rename_new, os.link

    def late(*of: Any) -> None:
        nas.write("file", b"theirs")
        rename_new(*of)

    def later(*of: Any, **how: Any) -> None:
        nas.write("linked", b"theirs")
        link(*of, **how)

    monkeypatch.setattr(writes, "rename_new", late)
    assert (await put(nas, "file", b"ours", if_none_match="*")).status == 412
    monkeypatch.setattr(writes, "rename_new", cannot)
    monkeypatch.setattr(os, "link", later)
    assert (await put(nas, "linked", b"ours", if_none_match="*")).status == 412
    assert {(nas.bucket / name).read_bytes() for name in ("file", "linked")} == {b"theirs"}


async def test_a_body_that_is_not_what_was_declared_leaves_nothing(nas: DirectoryOrigin) -> None:
    """A wrong digest, a short body, a source that fails: the object is as it was."""
    await put(nas, KEY, b"before")

    async def fails() -> AsyncIterator[bytes]:
        yield bytes(2 * MEBIBYTE)
        raise S3Error("IncompleteBody", "the client is gone", 400)

    async def short() -> AsyncIterator[bytes]:
        yield b"short"

    assert code(await put(nas, KEY, b"x", content_md5="1B2M2Y8AsgTpgAmY7PhCfg==")) == "BadDigest"
    assert code(await put(nas, KEY, b"x", x_amz_checksum_crc32="AAAAAA==")) == "BadDigest"
    assert code(await put(nas, KEY, StreamedBody(short(), 10))) == "IncompleteBody"
    assert code(await put(nas, KEY, StreamedBody(fails(), None))) == "IncompleteBody"
    await until(lambda: not nas.files.threads._busy)
    assert ((nas.bucket / KEY).read_bytes(), litter(nas)) == (b"before", [])


@pytest.mark.parametrize(
    ("key", "status", "told"),
    [
        ("a//b", 400, "InvalidArgument"),
        ("../a", 400, "InvalidArgument"),
        ("a/./b", 400, "InvalidArgument"),
        ("/a", 400, "InvalidArgument"),
        (f"{OWN}/x", 400, "InvalidArgument"),
        ("a\0b", 400, "InvalidArgument"),
        ("n" * 256, 400, "KeyTooLongError"),
        ("file/below", 409, "ObjectParentIsFile"),
        ("file/", 409, "ObjectParentIsFile"),
        ("there", 409, "ExistingObjectIsDirectory"),
        ("out/file", 409, "ObjectParentIsFile"),
        ("dangling", 409, "ObjectParentIsFile"),
        ("dangling/file", 409, "ObjectParentIsFile"),
        ("fifo", 409, "InvalidRequest"),
    ],
)
async def test_a_key_that_no_file_can_have_is_refused(nas: DirectoryOrigin, key: str, status: int, told: str) -> None:
    """Before a byte of a large one is taken, PUT and CreateMultipartUpload alike; and nothing is made."""
    nas.write("file", b"1")
    nas.write("there/file", b"1")
    (nas.bucket / "out").symlink_to("/tmp")
    (nas.bucket / "dangling").symlink_to("nothing")
    os.mkfifo(nas.bucket / "fifo")
    before = sorted(nas.root.rglob("*"))

    async def untouched() -> AsyncIterator[bytes]:
        raise AssertionError("a byte was taken")
        yield b""

    for answer in (
        await put(nas, key, StreamedBody(untouched(), 2 * MEBIBYTE) if key != "file/" else b""),
        await ask(nas, "POST", BUCKET, key, query=[("uploads", None)]),
    ):
        if answer.status != 400 or not key.endswith("/"):
            assert (answer.status, code(answer)) == (status, told)
    assert sorted(path for path in nas.root.rglob("*") if OWN not in path.parts) == before


async def test_deleting_removes_the_directories_that_forebay_made(nas: DirectoryOrigin) -> None:
    """Those of others stay, though they are empty; and a DELETE never removes a file below."""
    nas.write("theirs/file", b"1")
    await put(nas, "theirs/a/b/c", b"1")
    await put(nas, "theirs/a/d", b"1")
    assert (await ask(nas, "DELETE", BUCKET, "theirs/a")).status == 204
    assert (await ask(nas, "DELETE", BUCKET, "theirs/a/")).status == 204
    assert (nas.bucket / "theirs/a/b/c").exists()
    await ask(nas, "DELETE", BUCKET, "theirs/a/b/c")
    assert not (nas.bucket / "theirs/a/b").exists()
    await ask(nas, "DELETE", BUCKET, "theirs/a/d")
    await ask(nas, "DELETE", BUCKET, "theirs/file")
    assert [path.name for path in nas.bucket.iterdir() if path.name != OWN] == ["theirs"]
    assert (await ask(nas, "DELETE", BUCKET, "../bucket/theirs/")).status == 204


async def test_dir_slash_is_an_empty_directory(nas: DirectoryOrigin) -> None:
    """Made by a PUT of nothing, and removed by DELETE; one with bytes is refused."""
    assert code(await put(nas, "a/dir/", b"bytes")) == "InvalidArgument"
    assert (await put(nas, "a/dir/", b"", if_none_match="*")).status == 200
    assert (nas.bucket / "a/dir").is_dir()
    assert (await put(nas, "a/dir/", b"", if_none_match="*")).status == 412
    assert (await ask(nas, "GET", BUCKET, "a/dir/")).status == 200
    assert (await ask(nas, "DELETE", BUCKET, "a/dir/")).status == 204
    assert not (nas.bucket / "a").exists()


@pytest.mark.parametrize(
    "condition", [{"if_match": '"x"'}, {"if_none_match": "*"}, {"content_md5": "AAAAAAAAAAAAAAAAAAAAAA=="}]
)
async def test_a_small_write_that_fails_says_what_is_in_its_way(
    nas: DirectoryOrigin, condition: dict[str, str]
) -> None:
    """A file above it, rather than its condition, which no write there can fulfil. A bad body comes first."""
    nas.write("file", b"1")
    told = code(await put(nas, "file/below", b"2", **condition))
    assert told == ("BadDigest" if "content_md5" in condition else "ObjectParentIsFile")
    assert litter(nas) == []


@pytest.mark.parametrize(("mode", "of_directories"), [(0o640, 0o750), (0o604, 0o705), (0o600, 0o700)])
async def test_new_files_have_the_rights_that_are_set(file_system: Path, mode: int, of_directories: int) -> None:
    """Whatever the umask: of one piece, of parts in place or copied; and those of directories with them."""
    nas = DirectoryOrigin(file_system, file_mode=mode)
    await put(nas, "small/one", b"1")
    await put(nas, "large/one", bytes(2 * MEBIBYTE))
    await put(nas, "dir/", b"")
    for key, sizes in (("parts/equal", (PART, 1)), ("parts/not", (PART + 1, PART, 1))):
        upload_id = await begin(nas, key)
        etags = dict[int, str]()
        for at, size in enumerate(sizes, 1):
            etags[at] = (await part(nas, upload_id, at, bytes(size), key)).headers["etag"]
        assert (await complete(nas, upload_id, etags, key)).status == 200
    found = {path for path in nas.bucket.rglob("*") if key_paths.OWN not in path.parts}
    rights = {path.is_dir(): path.stat().st_mode & 0o777 for path in found}
    assert {path.stat().st_mode & 0o777 for path in found} == set(rights.values())
    assert (rights, len(found)) == ({False: mode, True: of_directories}, 8)
    nas.files.threads.end()


async def test_dir_slash_is_made_though_its_parent_is_removed_meanwhile(
    nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the DELETE of the last key beside it, which comes between two of its steps."""
    make_object, removed = nas.files._writer._make_object, list[str]()

    def late(*of: Any) -> os.stat_result:
        if not removed:
            removed.append("a")
            (nas.bucket / "a").rmdir()
        return make_object(*of)

    monkeypatch.setattr(nas.files._writer, "_make_object", late)
    assert (await put(nas, "a/dir/", b"")).status == 200
    assert ((nas.bucket / "a/dir").is_dir(), removed) == (True, ["a"])


async def test_dir_slash_that_is_made_meanwhile_stays(nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The DELETE of the last key below has seen the directory empty, and of no other key, a moment ago."""

    def late(directory: int) -> bool:
        nas.files._writer.make_directory(ObjectKey(BUCKET, "a/"), lambda _: None)
        return True

    await put(nas, "a/file", b"1")
    monkeypatch.setattr(writes, "is_empty", late)
    assert (await ask(nas, "DELETE", BUCKET, "a/file")).status == 204
    assert (await ask(nas, "HEAD", BUCKET, "a/")).status == 200


@pytest.mark.parametrize(("free_bytes", "status"), [(0, 507), (MEBIBYTE * 1024, 400)])
async def test_no_room_for_metadata(
    nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch, free_bytes: int, status: int
) -> None:
    """One errno says that the file system is full, for which the client is not to blame, and that they are too long."""

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "setxattr", no_room)
    about = SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "fstatvfs", lambda _: about)
    assert (await put(nas, KEY, b"1")).status == status
    assert litter(nas) == []


async def test_what_rights_forbid_is_forbidden(nas: DirectoryOrigin) -> None:
    """13.8 Also on the way to a key that is not there."""
    nas.write("closed/file", b"")
    (nas.bucket / "closed").chmod(0)
    with pytest.raises(S3Error) as raised:
        with_plain_rights(partial(nas.files._writer.check_place, ObjectKey(BUCKET, "closed/new")))
    assert raised.value.status == 403


async def test_where_there_are_no_attributes_a_file_beside_has_them(
    nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13.2 NFS before 4.2, SMB: ETag, type and metadata are there in HEAD and LIST, also after a rename by others; with
    the object they go."""
    without_attributes(monkeypatch)
    for key in ("file", "other"):
        assert (await put(nas, key, b"ours", content_type="text/plain", x_amz_meta_step="7")).status == 200
    (nas.bucket / "file").rename(nas.bucket / "moved")
    head = await ask(nas, "HEAD", BUCKET, "moved")
    assert (head.headers["etag"], head.headers["x-amz-meta-step"]) == (md5_etag(b"ours"), "7")
    listed = xml((await ask(nas, "GET", BUCKET, query=[("list-type", "2")])).body)
    assert {node.text for node in listed.findall("Contents/ETag")} == {md5_etag(b"ours")}
    (nas.bucket / "other").write_bytes(b"theirs")
    assert (await ask(nas, "HEAD", BUCKET, "other")).headers["etag"].endswith('.f"')
    await put(nas, "moved", b"newer")
    assert (await ask(nas, "HEAD", BUCKET, "moved")).headers["etag"] == md5_etag(b"newer")
    await put(nas, "other", b"ours again")
    assert (await put(nas, "other", b"not this", if_none_match="*")).status == 412
    for key in ("moved", "other"):
        assert (await ask(nas, "DELETE", BUCKET, key)).status == 204
    assert litter(nas) == []


async def test_a_file_server_that_sets_the_mtime_late(nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does when it gets the bytes: the ETag is still the MD5."""
    fsync, touched = os.fsync, set[int]()

    def late(descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        if inode not in touched and not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            touched.add(inode)
            os.utime(descriptor, ns=(1_000_000_000, time.time_ns() - 1_000_000_000_123))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", late)
    await put(nas, "file", b"1")
    assert (await ask(nas, "HEAD", BUCKET, "file")).headers["etag"] == md5_etag(b"1")


async def test_a_copy_is_an_object_of_one_part(nas: DirectoryOrigin) -> None:
    """Of a file of others, too, with its bytes' MD5."""
    data = os.urandom(2 * MEBIBYTE)
    nas.write("source", data)
    headers = {"x-amz-copy-source": f"{BUCKET}/source", "if-none-match": "*"}
    assert (await ask(nas, "PUT", BUCKET, "copy/1", headers=headers)).status == 200
    copied = await ask(nas, "GET", BUCKET, "copy/1")
    assert (copied.body, copied.headers["etag"]) == (data, md5_etag(data))


async def test_files_of_dead_writers_are_removed_in_the_end(nas: DirectoryOrigin) -> None:
    """After a day, uploads after a week; not those that another node may be writing just now."""
    tmp = nas.bucket / OWN / "tmp"
    tmp.mkdir(parents=True)
    (tmp / "old").touch()
    (tmp / "young").touch()
    os.utime(tmp / "old", (1, time.time() - 90_000))
    upload_id = await begin(nas)
    await begin(nas)
    os.utime(nas.bucket / OWN / "uploads" / upload_id, (1, time.time() - 8 * 86_400))
    nas.files._removal_due_at.clear()
    await put(nas, "file", b"1")
    await until(lambda: not (tmp / "old").exists() and upload_id not in "".join(litter(nas)))
    assert (tmp / "young").exists()
    assert len(list((nas.bucket / OWN / "uploads").iterdir())) == 1


async def test_what_hangs_keeps_no_key_locked_for_others_for_ever(nas: DirectoryOrigin) -> None:
    """A lock ends with its holder: files of locks that are left behind lock nothing."""
    await put(nas, "file", b"1")
    nas.files._files.check_bucket(BUCKET)
    assert (await nas.files.head(ObjectKey(BUCKET, "file"))).size_bytes == 1
    async with await nas.send(OriginRequest("PUT", BUCKET, "file", body=b"2")) as answer:
        assert answer.status == 200


async def test_a_lock_that_another_node_keeps_leaves_threads_to_other_keys(file_system: Path) -> None:
    """A node that stands still while it has a lock, or many writers of one key."""
    nas = DirectoryOrigin(file_system, max_connections=4)
    await put(nas, "held", b"1")
    nas.write("other", b"theirs")
    held = os.open(nas.bucket / OWN / f"locks/{lock_number(ObjectKey(BUCKET, 'held')):02x}", os.O_RDWR)
    lock(held)
    large = StreamedBody(_pieces(bytes(MEBIBYTE), 3), 3 * MEBIBYTE)
    writes = [asyncio.create_task(put(nas, "held", body)) for body in [b"2"] * 8 + [large]]
    for _ in range(3):
        assert (await ask(nas, "GET", BUCKET, "other")).body == b"theirs"
    assert (await put(nas, "others", b"1")).status == 200
    assert not any(one.done() for one in writes)
    os.close(held)
    assert {one.status for one in await asyncio.gather(*writes)} == {200}
    nas.files.threads.end()


async def test_a_write_that_gets_no_thread_leaves_nothing(file_system: Path) -> None:
    """Its bytes are there, and its turn does not come in time."""
    nas = DirectoryOrigin(file_system, max_connections=4, connection_wait_seconds=0.05)
    await put(nas, "held", b"1")
    held = os.open(nas.bucket / OWN / f"locks/{lock_number(ObjectKey(BUCKET, 'held')):02x}", os.O_RDWR)
    lock(held)
    waiting = asyncio.create_task(put(nas, "held", b"2"))
    with pytest.raises(OriginBusy, match="many writes wait"):
        await put(nas, "held", StreamedBody(_pieces(bytes(MEBIBYTE), 3), 3 * MEBIBYTE))
    os.close(held)
    assert (await waiting).status == 200
    await until(lambda: not nas.files.threads._busy)
    assert litter(nas) == []
    nas.files.threads.end()


async def _pieces(piece: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield piece
