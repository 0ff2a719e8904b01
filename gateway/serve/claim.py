"""Taking the cache directory for this gateway, and putting the write-back buffer there in order.

A mistake (a wrong place, wrong rights, another gateway, foreign files) ends the start: StartupError. A disk that fails
does not: all processes then leave the directory alone until the gateway is started again, and the origin serves
everything. By then its catalog is out of date, as own writes could not be noted in it. So a mark is left in memory, and
the next gateway that can use the directory drops the catalog.

On a full disk nothing is wrong with what lies there, but the buffer's journal cannot be opened either: SQLite wants
room for its log. Going on without it would answer with older versions of what was acknowledged, and write past it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from gateway.config import Settings
from gateway.config.defaults import LOCK_MARK, LOCK_NAME, others_files
from gateway.core.clock import Moment, SystemClock
from gateway.core.errors import BufferUnavailable, StartupError, StoreUnavailable, is_no_room, opening_failure
from gateway.disk.atomic_write import check_room
from gateway.serve.shared_directory import SHARED_MEMORY, name_by_path
from gateway.writeback import DIRECTORY

_ORPHANS_GONE_SECONDS = 10.0

_log = structlog.get_logger("forebay.serve")

ROOM_BYTES = 4 * 1024 * 1024
"""Room that all processes together need to open the directory, and some more."""

_HEEDED_MAX = 1000
"""Limit of remembered directories at one path: beyond it the earliest drop their catalog again."""


def prepare_directory(directory: Path) -> None:
    """Make the cache directory, readable by its owner alone. An existing one keeps its mode.

    Raises StartupError when it belongs to another ordinary user, holds foreign files, or cannot be there;
    StoreUnavailable when the disk fails.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for status in (directory.lstat(), directory.stat()):  # the owner of a link decides where it leads
            _refuse_foreign_owner(directory, status.st_uid)
        others = others_files(directory)
    except OSError as error:
        raise opening_failure(f"cache.directory {directory}", error) from error
    if others:
        raise StartupError(
            f"cache.directory {directory} holds files that are not Forebay's ({others[0]}); give forebay another one"
        )
    if status.st_mode & 0o077:
        _log.warning(
            "other users can enter cache.directory and may find what is cached in it",
            directory=str(directory),
        )


def _refuse_foreign_owner(directory: Path, owner: int) -> None:
    """Its owner could put any bytes in the place of cached ones. Root, who owns fresh volumes, could do so anyway."""
    if owner not in (0, os.geteuid()):
        raise StartupError(
            f"cache.directory {directory} belongs to user {owner}, and forebay runs as {os.geteuid()}; "
            "change its owner, or give forebay a directory of its own"
        )


def lock_directory(directory: Path) -> int:
    """Lock the directory for this gateway and return the lock's descriptor, to be inherited by all its processes.

    The lock ends with the last process that holds the descriptor. When the recorded supervisor is gone its children are
    about to go, which is waited for. Raises StartupError when another gateway runs here, StoreUnavailable when the disk
    fails.
    """
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise opening_failure(f"cache.directory {directory}", error) from error
    try:
        _acquire(descriptor, directory)
        written = os.pwrite(descriptor, b"%b%d\n" % (LOCK_MARK, os.getpid()), 0)
        os.ftruncate(descriptor, written)  # in place: a full disk has no room
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise opening_failure(f"cache.directory {directory}", error) from error
        raise
    return descriptor


@contextmanager
def kept_from_gateways(directory: Path) -> Iterator[bool]:
    """While this lasts, no gateway starts on a directory; False where one is at work already. Writes nothing.

    A directory without a lock file is one that no gateway has opened. OSError when the file cannot be opened.
    """
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _is_free(descriptor)
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """Locks it; False while a gateway is at work. Children of one that was killed are waited for."""
    deadline = time.monotonic() + _ORPHANS_GONE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if _is_alive(_holder(descriptor)) or time.monotonic() > deadline:
                return False
        time.sleep(0.02)


def _acquire(descriptor: int, directory: Path) -> None:
    deadline = time.monotonic() + _ORPHANS_GONE_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(descriptor)
            if _is_alive(holder) or time.monotonic() > deadline:
                raise StartupError(
                    f"another forebay serve (process {holder}) uses cache.directory {directory}; stop it, or give this "
                    "one a directory of its own"
                ) from None
        time.sleep(0.02)


def _holder(descriptor: int) -> int:
    text = os.pread(descriptor, 32, 0).removeprefix(LOCK_MARK).strip()
    return int(text) if text.isdigit() else 0


def _is_alive(process_id: int) -> bool:
    """Also true for 0: a holder that has not written its number yet is starting now."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def use_reserve_when_full(cache_directory: Path) -> None:
    """Give the room that was set aside for the buffer's journal to those who are about to open the directory."""
    buffer = cache_directory / DIRECTORY
    if (buffer / "journal").exists() and _is_full(cache_directory) and _give_up_reserve(buffer):
        _log.warning(
            "the disk is full: the write-back journal uses its reserve file now",
            directory=str(cache_directory),
        )


def refusal_when_full(cache_directory: Path, error: Exception) -> str | None:
    """Return why processes need the cache directory that could not be opened; None: they do not.

    They need it where the disk is full, and the write-back buffer may hold data that the origin lacks. The reserve is
    given up for the next attempt.
    """
    from gateway.writeback.opening import may_hold  # small where there is no buffer

    buffer = cache_directory / DIRECTORY
    if not (is_no_room(error) or _is_full(cache_directory)) or not may_hold(buffer):
        return None
    _give_up_reserve(buffer)
    return (
        f"the disk under cache.directory {cache_directory} is full ({error}), and the write-back buffer there may hold "
        "what the origin does not have yet: without it, clients would read older versions. Nothing is lost: make "
        f"{ROOM_BYTES // 2**20} MiB of room or more"
    )


def _is_full(cache_directory: Path) -> bool:
    try:
        check_room(cache_directory, ROOM_BYTES)
    except OSError as error:
        return is_no_room(error)
    return False


def _give_up_reserve(buffer: Path) -> bool:
    from gateway.writeback.room import ReserveFile

    return ReserveFile(buffer).give_up()


def claim(directory: Path) -> tuple[int | None, str | None]:
    """Return the lock's descriptor, to be inherited by all processes; or why the directory is left alone."""
    try:
        prepare_directory(directory)
        lock = lock_directory(directory)
    except StoreUnavailable as error:
        return None, disable_directory(directory, error)
    try:
        _read_disable_mark(directory)
    except StoreUnavailable as error:
        os.close(lock)
        return None, disable_directory(directory, error)
    return lock, None


def disable_directory(directory: Path, error: Exception) -> str:
    """Say, and return, why the directory is done without.

    StartupError if acknowledged writes are in it, and its disk is not failing but full.
    """
    refusal = refusal_when_full(directory, error)
    if refusal is not None:
        raise StartupError(refusal) from error
    report_closed(directory, str(error))
    return str(error)


def _read_disable_mark(directory: Path) -> None:
    """Forget, unless this very directory has since the mark was left: containers have others at the same path."""
    try:
        status = directory.stat()
    except OSError as error:
        raise opening_failure(f"cache.directory {directory}", error) from error
    own = b"%d:%d" % (status.st_dev, status.st_ino)
    heeded = _heeded_by(closed_mark(directory))
    if heeded is None or own in heeded:
        return
    from gateway.app.node import forget_remembered  # the supervisor stays small: it seldom needs the rest

    forget_remembered(directory)
    with suppress(OSError):  # another program has put it there: then the next start forgets, too
        _write_mark(directory, [*heeded[-_HEEDED_MAX:], own])


def _heeded_by(mark: Path) -> list[bytes] | None:
    """Which directories have forgotten since the mark was left; None: there is no mark."""
    try:
        descriptor = os.open(mark, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError:  # another program has put it there
        return []
    with os.fdopen(descriptor, "rb") as file:
        return file.read().split() if os.fstat(descriptor).st_uid == os.geteuid() else []


def _write_mark(directory: Path, heeded: Sequence[bytes]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(closed_mark(directory), flags, 0o600), "wb") as file:
        file.write(b"\n".join(heeded))


def report_closed(directory: Path, reason: str) -> None:
    """Say it loudly, and leave the mark."""
    _log.error(
        "THERE IS NO CACHE: the cache directory cannot be used, and the origin serves everything. "
        "Repair it and start the gateway again",
        directory=str(directory),
        reason=reason,
    )
    leave_mark(directory)


def leave_mark(directory: Path) -> None:
    """For the next gateway that can use the directory."""
    try:
        _write_mark(directory, [])
    except OSError as error:
        _log.error("after this, empty the directory's catalog/ before it is used again", error=str(error))


def closed_mark(directory: Path) -> Path:
    """Return a file in memory that marks that, since this machine's boot, a gateway did without the directory."""
    return SHARED_MEMORY / f"{name_by_path(directory)}.closed"


def recover_buffer(settings: Settings) -> str | None:
    """Why the cache directory is left alone, because the disk fails; None: the buffer is in order, or there is none.

    StartupError, and nothing is touched, where acknowledged writes would be lost by going on.
    """
    directory = settings.cache.directory / DIRECTORY
    wanted = any(slot.is_buffered for slot in settings.slots)
    if not wanted and not directory.exists():
        return None
    use_reserve_when_full(settings.cache.directory)
    try:
        _recover(directory, settings, wanted=wanted)
    except BufferUnavailable as error:
        return disable_directory(settings.cache.directory, error)
    return None


def _recover(directory: Path, settings: Settings, *, wanted: bool) -> None:
    from gateway.writeback.opening import drop, keep_to_homes, recover  # small where there is no buffer

    found = recover(directory, Moment.of(SystemClock()))
    keep_to_homes(directory, settings.homes, found)
    for slot in sorted(found.local.keys() - {slot.name for slot in settings.slots if slot.is_buffered}):
        _log.warning(
            "a slot that is gone, or writes through now, has objects that are kept here only: Forebay sends them to no "
            "bucket, and removes them when they expire; forebay flush of their prefix sends them after all",
            slot=slot,
            objects=found.local[slot],
        )
    unsent = found.pending - sum(found.local.values())
    if unsent or found.uploads:
        _log.info(
            "the write-back buffer holds writes that the origin does not have yet",
            objects=unsent,
            open_uploads=found.uploads,
        )
        if not wanted:
            _log.warning(
                'no slot has write = "back" any more: Forebay flushes what it acknowledged, and buffers nothing new'
            )
    if found.is_nothing and not wanted:
        drop(directory)
