"""Real file systems that fill up and die, for tests that must see what the kernel says then. Mounting takes root."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.support.root import require_root_marker

_EXT4_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2


@contextmanager
def small_disk(mount_point: Path, size_bytes: int) -> Iterator[Path]:
    """A file system in memory that holds so much and no more."""
    mount_point.mkdir(exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(mount_point))
    try:
        yield mount_point
    finally:
        _unmount(mount_point)


@contextmanager
def mortal_disk(mount_point: Path, image: Path, size_bytes: int = 128 * 1024**2) -> Iterator[Path]:
    """An ext4 of its own, which `kill_disk` ends."""
    mount_point.mkdir(exist_ok=True)
    with image.open("wb") as file:
        file.truncate(size_bytes)
    _run("mkfs.ext4", "-q", str(image))
    with mounted(mount_point, image):
        yield mount_point


@contextmanager
def mounted(mount_point: Path, image: Path) -> Iterator[Path]:
    """The file system of an image, as it was left."""
    _run("mount", "-o", "loop", str(image), str(mount_point))
    try:
        yield mount_point
    finally:
        _unmount(mount_point)


def kill_disk(mount_point: Path) -> None:
    """From now on the file system answers everything with EIO, what it has in memory too."""
    descriptor = os.open(mount_point, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(descriptor, _EXT4_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(descriptor)


def remount_read_only(mount_point: Path) -> None:
    """As the kernel does when a file system finds itself inconsistent."""
    _run("mount", "-o", "remount,ro", str(mount_point))


def remount_writable(mount_point: Path) -> None:
    _run("mount", "-o", "remount,rw", str(mount_point))


def fill_up(mount_point: Path, name: str = "of somebody else", *, leave_bytes: int = 0) -> Path:
    """A file that takes all the room there is, but for so much; whoever else writes meanwhile may get some of it."""
    path, size_bytes = mount_point / name, 0
    with path.open("wb") as file:
        while free_bytes := max(0, _free_bytes(mount_point) - leave_bytes):
            with suppress(OSError):
                os.posix_fallocate(file.fileno(), size_bytes, free_bytes)
                size_bytes += free_bytes
    return path


def _free_bytes(mount_point: Path) -> int:
    facts = os.statvfs(mount_point)
    return facts.f_bavail * facts.f_bsize


def _unmount(mount_point: Path) -> None:
    """Fails where something is still open in it, and leaves no mount behind all the same."""
    try:
        _run("umount", str(mount_point))
    except AssertionError:
        _run("umount", "--lazy", str(mount_point))
        raise


def _run(*command: str) -> None:
    require_root_marker()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)} (root is needed): {done.stderr.strip()}"


class RemountedDisk:
    """An ext4 in a file whose power can be cut (`kill_disk`), mounted anew afterwards."""

    def __init__(self, mount_point: Path, image: Path, size_bytes: int) -> None:
        self.mount_point = mount_point
        self._image = image
        self._size_bytes = size_bytes
        self._mount = ExitStack()

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """While this lasts; empty at first."""
        with mortal_disk(self.mount_point, self._image, self._size_bytes):
            pass
        self._mount.enter_context(mounted(self.mount_point, self._image))
        with self._mount:
            yield

    def mount_anew(self) -> None:
        """After a cut: what was not synced is lost."""
        self._mount.pop_all().close()
        self._mount.enter_context(mounted(self.mount_point, self._image))
