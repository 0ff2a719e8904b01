"""A FUSE file system over a directory that can do little, and that hangs when it is told to. Mounting takes root.

    with poor_file_system(source, mount_point) as poor:
        poor.hang()
        ...
        poor.go_on()

It has neither extended attributes, nor links, nor a rename that does not replace; its times are whole seconds, and
those of change are those of modification. As a file server that is gone it answers nothing while it hangs, whatever is
asked, but for what its kernel remembers: it is told to remember nothing.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.root import require_root_marker
from tests.support.waiting import eventually

_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class PoorFileSystem:
    mount_point: Path
    source: Path
    """What others write, past it."""

    _hangs: Path

    def hang(self) -> None:
        self._hangs.touch()

    def go_on(self) -> None:
        self._hangs.unlink(missing_ok=True)


@contextmanager
def poor_file_system(source: Path, mount_point: Path) -> Iterator[PoorFileSystem]:
    require_root_marker()
    for directory in (source, mount_point):
        directory.mkdir()
    hangs = source.with_name(f"{source.name}.hangs")
    command = [sys.executable, "-m", "tests.support.poor_file_system", str(source), str(mount_point), str(hangs)]
    server = subprocess.Popen(command)
    try:
        eventually(lambda: os.path.ismount(mount_point), "the file system is not mounted")
        yield PoorFileSystem(mount_point, source, hangs)
    finally:
        hangs.unlink(missing_ok=True)
        subprocess.run(["umount", "--lazy", str(mount_point)], check=False)
        server.kill()
        server.wait()


def _serve(source: str, mount_point: str, hangs: str) -> None:
    import mfusepy

    class Fuse(mfusepy.FUSE):  # type: ignore[misc]
        def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
            return -errno.EINVAL if flags else int(self.rename_fuse_2(old, new))

    operations = {name: _prepared(method, source, hangs) for name, method in vars(_Poor).items() if name[0] != "_"}
    made = type("Operations", (mfusepy.Operations,), {**operations, "use_ns": True})()
    Fuse(made, mount_point, foreground=True, attr_timeout=0, entry_timeout=0, negative_timeout=0, use_ino=True)


def _prepared(method: Callable[..., Any], source: str, hangs: str) -> Callable[..., Any]:
    def operation(_: object, path: str, *of: Any) -> Any:
        while os.path.exists(hangs):
            time.sleep(_POLL_SECONDS)
        return method(None, source + path, *(source + one if method is _Poor.rename else one for one in of))

    return operation


class _Poor:
    """Operations as mfusepy calls them, on paths in the source."""

    def getattr(self, path: str, _: Any = None) -> dict[str, Any]:
        seen = os.lstat(path)
        whole = seen.st_mtime_ns // 10**9 * 10**9
        names = ("st_ino", "st_mode", "st_nlink", "st_size", "st_uid", "st_gid")
        return {
            **{name: getattr(seen, name) for name in names},
            "st_mtime": whole,
            "st_ctime": whole,
            "st_atime": whole,
        }

    def readdir(self, path: str, _: int) -> list[tuple[str, dict[str, int], int]]:
        with os.scandir(path) as entries:
            found = [(one.name, one.stat(follow_symlinks=False)) for one in entries]
        return [(name, {"st_ino": seen.st_ino, "st_mode": seen.st_mode}, 0) for name, seen in found]

    def statfs(self, path: str) -> dict[str, int]:
        seen = os.statvfs(path)
        return {name: getattr(seen, name) for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail")}

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags & ~os.O_NOFOLLOW)

    def create(self, path: str, mode: int, _: Any = None) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, _: str, size: int, offset: int, file: int) -> bytes:
        return os.pread(file, size, offset)

    def write(self, _: str, data: bytes, offset: int, file: int) -> int:
        return os.pwrite(file, data, offset)

    def truncate(self, path: str, length: int, _: int | None = None) -> None:
        os.truncate(path, length)

    def fsync(self, _: str, __: int, file: int) -> None:
        os.fsync(file)

    def fsyncdir(self, *_: Any) -> None: ...

    def release(self, _: str, file: int) -> None:
        os.close(file)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        os.utime(path, ns=times or (time.time_ns(),) * 2)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
