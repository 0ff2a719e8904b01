"""D3: a directory that several write to at the same time, and that writers die at."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest

from gateway.origin.stores import store
from gateway.origin.stores.directory import uploads, writes
from gateway.origin.stores.directory.abandoned_files import remove_abandoned
from gateway.origin.stores.directory.key_paths import OWN
from tests.origin.origins import ask, xml
from tests.origin.stores.asking import begin, cannot, complete, part, put, without_attributes
from tests.support.directory_origin import BUCKET, DirectoryOrigin

_WRITER = """
import asyncio, sys
from pathlib import Path
from gateway.origin.client import OriginRequest
from tests.support.directory_origin import BUCKET, DirectoryOrigin

async def main(root, node):
    origin, won = DirectoryOrigin(Path(root)), 0
    for number in range(60):
        request = OriginRequest("PUT", BUCKET, f"{number}", headers={"if-none-match": "*"}, body=node.encode())
        async with await origin.send(request) as answer:
            won += answer.status == 200
    print(won)

asyncio.run(main(*sys.argv[1:]))
"""


def test_of_two_nodes_that_make_a_key_one_wins(file_system: Path) -> None:
    """Two processes write the same keys, each only if it is not there: each key has one winner."""
    (file_system / BUCKET).mkdir()
    command = [sys.executable, "-c", _WRITER, str(file_system)]
    writers = [subprocess.Popen([*command, node], stdout=subprocess.PIPE) for node in "ab"]
    won = [int(writer.communicate()[0]) for writer in writers]
    found = [(file_system / BUCKET / f"{number}").read_text() for number in range(60)]
    assert won == [found.count("a"), found.count("b")]
    assert sum(won) == 60


CHANGES = ("open", "pwrite", "copy_file_range", "ftruncate", "setxattr", "removexattr", "fsync")
CHANGES_OF_NAMES = ("link", "symlink", "rename", "unlink", "mkdir", "rmdir")


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Run work in a process that is killed before its change number `step` of files; False: it has come to its end."""
    child = os.fork()
    if child == 0:
        calls = 0

        def counted(real: Callable[..., object], *of: object, **how: object) -> object:
            nonlocal calls
            calls += 1
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*of, **how)

        for name in (*CHANGES, *CHANGES_OF_NAMES):
            setattr(os, name, partial(counted, getattr(os, name)))
        setattr(writes, "rename_new", partial(counted, getattr(writes, "rename_new")))  # noqa: B009, B010
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@dataclass
class Scene:
    """A bucket, and an operation on it that is killed."""

    root: Path
    upload_id: str = ""
    etags: dict[int, str] = field(default_factory=dict)

    def run(self, work: Callable[[DirectoryOrigin], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            nas = DirectoryOrigin(self.root)
            try:
                return await work(nas)
            finally:
                await nas.aclose()

        return asyncio.run(main())

    async def objects(self, nas: DirectoryOrigin) -> dict[str, tuple[bytes, str]]:
        """What LIST shows, as GET reads it."""
        listed = xml((await ask(nas, "GET", BUCKET, query=[("list-type", "2")])).body)
        keys = [node.text or "" for node in listed.findall("Contents/Key")]
        found = {key: (one.body, one.headers["etag"]) for key in keys for one in [await ask(nas, "GET", BUCKET, key)]}
        found.pop("a/", None)  # where a directory cannot come into being with its mark, it is seen for a moment
        return found

    async def begin(self, nas: DirectoryOrigin) -> None:
        self.upload_id = await begin(nas, "a/b")

    async def part(self, nas: DirectoryOrigin, number: int) -> None:
        answer = await part(nas, self.upload_id, number, PARTS[number], "a/b")
        self.etags[number] = answer.headers["etag"]

    async def complete(self, nas: DirectoryOrigin, *numbers: int) -> int:
        return (await complete(nas, self.upload_id, {one: self.etags[one] for one in numbers}, "a/b")).status

    async def abort(self, nas: DirectoryOrigin) -> None:
        await ask(nas, "DELETE", BUCKET, "a/b", query=[("uploadId", self.upload_id)])

    async def uploaded(self, nas: DirectoryOrigin, *numbers: int) -> None:
        await self.begin(nas)
        for number in numbers:
            await self.part(nas, number)


PART = 1000
PARTS = {1: os.urandom(PART), 2: os.urandom(10), 3: os.urandom(PART)}
Work = Callable[[Scene, DirectoryOrigin], Awaitable[Any]]


async def before(_: Scene, nas: DirectoryOrigin) -> None:
    await put(nas, "a/b", b"before")


async def delete(_: Scene, nas: DirectoryOrigin) -> None:
    await ask(nas, "DELETE", BUCKET, "a/b")


async def copy(_: Scene, nas: DirectoryOrigin) -> None:
    await ask(nas, "PUT", BUCKET, "a/d", headers={"x-amz-copy-source": f"{BUCKET}/a/b"})


async def nothing(*_: object) -> None:
    """Prepare nothing."""


OPERATIONS: dict[str, tuple[Work, Work]] = {
    "a new object": (nothing, lambda _, nas: put(nas, "a/b", b"new")),
    "an object again": (before, lambda _, nas: put(nas, "a/b", b"newer")),
    "an empty directory": (nothing, lambda _, nas: put(nas, "a/b/", b"")),
    "delete": (before, delete),
    "copy": (before, copy),
    "begin": (before, Scene.begin),
    "part": (Scene.begin, lambda scene, nas: scene.part(nas, 1)),
    "odd part": (Scene.begin, lambda scene, nas: scene.part(nas, 2)),
    "complete": (lambda scene, nas: scene.uploaded(nas, 1, 3), lambda scene, nas: scene.complete(nas, 1, 3)),
    "complete, with a part copied": (
        lambda scene, nas: scene.uploaded(nas, 2, 1, 3),
        lambda scene, nas: scene.complete(nas, 1, 2),
    ),
    "complete, made anew": (lambda scene, nas: scene.uploaded(nas, 1, 3), lambda scene, nas: scene.complete(nas, 3)),
    "abort": (lambda scene, nas: scene.uploaded(nas, 1, 2), Scene.abort),
}


EVERYWHERE = "FOREBAY_DIRECTORY_KILLS" in os.environ
"""Each file system with and without attributes; else one with them and one without: a process dies alike on both."""

QUICK = {("memory", "an object again", False)}


@pytest.mark.parametrize(
    ("file_system", "name", "is_poor"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow)
        for one in product(("disk", "memory"), OPERATIONS, (False, True))
        if EVERYWHERE or one in QUICK or one[2] == (one[0] == "memory")
    ],
    indirect=["file_system"],
)
def test_a_write_that_is_killed_is_there_whole_or_not_at_all(
    file_system: Path, name: str, is_poor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each change of the file system: LIST and GET show all as it was or as it was to be; the same again succeeds;
    a part that comes later changes no object; and after a week nothing of it is left. Also where the file system knows
    neither attributes nor how to rename without replacing."""
    prepare, operate = OPERATIONS[name]
    monkeypatch.setattr(uploads, "PART_SIZE_BYTES_MIN", PART)
    monkeypatch.setattr(store, "PART_SIZE_BYTES_MIN", PART)
    if is_poor:
        monkeypatch.setattr(writes, "rename_new", cannot)
        without_attributes(monkeypatch)

    def scene(number: int) -> Scene:
        made = Scene(file_system / str(number))
        made.root.mkdir()
        made.run(partial(prepare, made))
        return made

    after = scene(0)
    allowed = [after.run(after.objects)]
    after.run(partial(operate, after))
    allowed.append(after.run(after.objects))
    for step in count(1):
        killed = scene(step)
        is_killed = killed_at(step, lambda: killed.run(partial(operate, killed)))  # noqa: B023 - called at once

        async def go_on(nas: DirectoryOrigin, killed: Scene = killed, step: int = step) -> None:
            assert await killed.objects(nas) in allowed, step
            if killed.etags:
                await part(nas, killed.upload_id, 9, bytes(PART), "a/b")
                assert await killed.objects(nas) in allowed, step
            await operate(killed, nas)

        async def a_week_later(nas: DirectoryOrigin, killed: Scene = killed, step: int = step) -> None:
            assert await killed.objects(nas) == allowed[1], step
            for path in (killed.root / BUCKET / OWN).rglob("*"):
                os.utime(path, (1, 1), follow_symlinks=False)
            await nas.files.threads.run(partial(removed_abandoned, nas), 60.0)

        killed.run(go_on)
        killed.run(a_week_later)
        own = [
            path.name for path in (killed.root / BUCKET / OWN).glob("*/*") if path.parent.name not in ("locks", "meta")
        ]
        assert own == []
        shutil.rmtree(killed.root)
        if not is_killed:
            break
    assert step > 2


def removed_abandoned(nas: DirectoryOrigin) -> None:
    with nas.files._files.bucket(BUCKET) as bucket:
        remove_abandoned(bucket)
