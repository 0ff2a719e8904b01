"""Putting the write-back buffer in order before any process opens it: what was acknowledged stays, the rest goes."""

from __future__ import annotations

from pathlib import Path

import structlog

from gateway.config import Settings
from gateway.core.clock import Moment, SystemClock
from gateway.core.errors import BufferUnavailable
from gateway.serve.claim import disable_directory
from gateway.serve.full_disk import use_reserve_when_full
from gateway.writeback import DIRECTORY

_log = structlog.get_logger("forebay.serve")


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
