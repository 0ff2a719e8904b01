"""Taking the cache directory for this gateway; or going on without it, where the disk under it fails.

A mistake (a wrong place, wrong rights, another gateway, somebody else's files) ends the start: StartupError. A disk
that fails does not: all processes then leave the directory alone until the gateway is started again. What it remembers
of objects is out of date by then, as own writes could not be noted in it. So a mark is left in memory, and the next
gateway that can use the directory has it forget.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import structlog

from gateway.errors import StoreUnavailable
from gateway.serve.preparation import lock_directory, prepare_directory
from gateway.serve.shared_directory import SHARED_MEMORY, name_by_path

_log = structlog.get_logger("forebay.serve")


def claim(directory: Path) -> tuple[int | None, str | None]:
    """The lock's descriptor, to be inherited by all processes; or why the directory is left alone."""
    try:
        prepare_directory(directory)
        lock = lock_directory(directory)
    except StoreUnavailable as error:
        report_closed(directory, str(error))
        return None, str(error)
    try:
        _heed_mark(directory)
    except StoreUnavailable as error:
        os.close(lock)
        report_closed(directory, str(error))
        return None, str(error)
    return lock, None


def _heed_mark(directory: Path) -> None:
    if closed_mark(directory).exists():
        from gateway.app import forget_remembered  # the supervisor stays small: it seldom needs the rest

        forget_remembered(directory)
        with suppress(OSError):  # somebody else has put it there: then the next start forgets, too
            closed_mark(directory).unlink()


def report_closed(directory: Path, reason: str) -> None:
    """Say it loudly, and leave the mark."""
    _log.error(
        "THERE IS NO CACHE: the cache directory cannot be used, the origin serves everything; "
        "put it right and start the gateway again",
        directory=str(directory),
        reason=reason,
    )
    leave_mark(directory)


def leave_mark(directory: Path) -> None:
    """For the next gateway that can use the directory."""
    try:
        closed_mark(directory).touch(mode=0o600)
    except OSError as error:
        _log.error("after this, empty the directory's catalog/ before it is used again", error=str(error))


def closed_mark(directory: Path) -> Path:
    """A file in memory: while this machine was up, a gateway on the directory has done without it."""
    return SHARED_MEMORY / f"{name_by_path(directory)}.closed"
