"""Taking the cache directory for this gateway; or going on without it, where the disk under it fails.

A mistake (a wrong place, wrong rights, another gateway, foreign files) ends the start: StartupError. A disk that fails
does not: all processes then leave the directory alone until the gateway is started again. By then its catalog is out of
date, as own writes could not be noted in it. So a mark is left in memory, and the next gateway that can use the
directory drops the catalog.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from gateway.core.errors import StartupError, StoreUnavailable, opening_failure
from gateway.serve.full_disk import refusal_when_full
from gateway.serve.preparation import lock_directory, prepare_directory
from gateway.serve.shared_directory import SHARED_MEMORY, name_by_path

_HEEDED_MAX = 1000
"""Limit of remembered directories at one path: beyond it the earliest drop their catalog again."""

_log = structlog.get_logger("forebay.serve")


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
