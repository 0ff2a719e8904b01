"""Conditions of a start: enough file descriptors, and a directory of this user alone."""

from __future__ import annotations

import fcntl
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from gateway.config.defaults import LOCK_MARK, LOCK_NAME, others_files
from gateway.core.errors import StartupError, opening_failure

DESCRIPTORS_MIN = 256
DESCRIPTORS_ADVISED = 4096
_ORPHANS_GONE_SECONDS = 10.0

_log = structlog.get_logger("forebay.serve")


def raise_descriptor_limit() -> None:
    """Take all file descriptors that the hard limit allows: every connection and every open block needs one.

    Raises StartupError when even that is too little to work with.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY or hard >= DESCRIPTORS_ADVISED:
        return
    message = f"the limit of open files is {hard}; raise it (ulimit -n, LimitNOFILE=) to {DESCRIPTORS_ADVISED} or more"
    if hard < DESCRIPTORS_MIN:
        raise StartupError(message)
    _log.warning(message)


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
