"""A start on a full disk: nothing is wrong with what lies there, so acknowledged writes are not done without.

A directory that fails is left alone, and the origin serves everything (claim.py). On a full one the buffer's journal
cannot be opened either: SQLite wants room for its log. Going on without it would answer with older versions of what was
acknowledged, and write past it.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from gateway.core.errors import is_no_room
from gateway.disk.atomic_write import check_room
from gateway.writeback import DIRECTORY

ROOM_BYTES = 4 * 1024 * 1024
"""Room that all processes together need to open the directory, and some more."""

_log = structlog.get_logger("forebay.serve")


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
