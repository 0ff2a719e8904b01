"""How far a checkpoint has been read, from the bytes sent of its files. Pure.

    reading    bytes of it were sent within the last minute, or are being sent
    stalled    nothing has come for a minute, and of some files much less was read than of others of their kind
    over       nothing has come for a minute, and no file lags

Files whose keys differ only in numbers are of one kind: ranks, or shards. If no file of a kind was read, such as an
optimizer's state or a README, the loader does not want it, and the restore does not wait for it; nor does it wait for
the second half of files that no reader has read past the first. The number of readers is unknown: two partial reads of
a file count as one longer read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gateway.writeback.checkpoints.reads import PAUSE_SECONDS, ReadPass

QUIET_SECONDS = PAUSE_SECONDS

BREAK_SECONDS = 600.0
"""Seconds without a read after which a read begins another restore."""

SHOWN_SECONDS = 3600.0
"""Seconds after the last byte for which a restore is shown."""

BEHIND_SHOWN_MAX = 100

_LAG = 0.9
"""A file lags when its share of bytes read is below this part of the largest share of its kind."""

_AGAIN = 0.5
"""A file with at least this share read both before and after a minute's break was restored twice."""

_DIGITS = re.compile(r"[0-9]+")


class RestoreState(StrEnum):
    """See above."""

    READING = "reading"
    STALLED = "stalled"
    OVER = "over"


class CheckpointFile(NamedTuple):
    """A file of a checkpoint. `rank` wrote it, where its name says so."""

    key: str
    size_bytes: int
    rank: int | None = None


class RestoreReading(NamedTuple):
    """How far a file was read; `last_at` None: not at all."""

    file: CheckpointFile
    read_bytes: int
    last_at: float | None

    @property
    def share(self) -> float:
        return self.read_bytes / self.file.size_bytes


@dataclass(frozen=True, slots=True)
class RestoreFacts:
    """Times in seconds since 1970. `behind` are files that lag, those first that were read least."""

    state: RestoreState
    began_at: float
    last_at: float
    files: int
    """Files of the kinds that were begun; `size_bytes` are theirs."""
    files_begun: int
    files_behind: int
    size_bytes: int
    read_bytes: int
    behind: Sequence[RestoreReading]
    """The first BEHIND_SHOWN_MAX."""


def restore_of(
    files: Iterable[CheckpointFile], read: Mapping[str, Sequence[ReadPass]], now: float
) -> RestoreFacts | None:
    """Return a checkpoint's last restore; `read` are each key's passes. None: there is none in the last hour."""
    sized = {one.key: one for one in files if one.size_bytes > 0}
    passes = [(key, one) for key, found in read.items() if key in sized for one in found]
    latest = _of_latest(passes, {key: one.size_bytes for key, one in sized.items()}, now)
    if not latest:
        return None
    began_at = min(one.first_at for _, one in latest)
    last_at = max(one.last_at for _, one in latest)
    is_open = any(one.open for _, one in latest)
    if not is_open and now - last_at > SHOWN_SECONDS:
        return None
    kinds: dict[str, list[RestoreReading]] = {}
    by_key: dict[str, list[ReadPass]] = {}
    for key, one in latest:
        by_key.setdefault(key, []).append(one)
    for file in sized.values():
        kinds.setdefault(_DIGITS.sub("#", file.key), []).append(_reading(file, by_key.get(file.key, ())))
    begun = [one for one in kinds.values() if any(reading.last_at is not None for reading in one)]
    behind = [reading for kind in begun for reading in _lagging(kind)]
    behind.sort(key=lambda one: (one.share, one.file.key))
    is_recent = is_open or now - last_at < QUIET_SECONDS
    return RestoreFacts(
        _state(behind, is_recent=is_recent),
        began_at,
        last_at,
        sum(len(kind) for kind in begun),
        len(by_key),
        len(behind),
        sum(one.file.size_bytes for kind in begun for one in kind),
        sum(one.read_bytes for kind in begun for one in kind),
        behind[:BEHIND_SHOWN_MAX],
    )


def _state(behind: Sequence[RestoreReading], *, is_recent: bool) -> RestoreState:
    if is_recent:
        return RestoreState.READING  # files without reads may have their turn behind others
    return RestoreState.STALLED if behind else RestoreState.OVER


def _reading(file: CheckpointFile, passes: Sequence[ReadPass]) -> RestoreReading:
    read_bytes = min(sum(one.read_bytes for one in passes), file.size_bytes)
    last_at = max((one.last_at for one in passes), default=None)
    return RestoreReading(file, read_bytes, last_at)


def _lagging(kind: Sequence[RestoreReading]) -> list[RestoreReading]:
    furthest = max(one.share for one in kind)
    return [one for one in kind if one.share < _LAG * furthest]


def _of_latest(
    passes: Sequence[tuple[str, ReadPass]], sizes: Mapping[str, int], now: float
) -> Sequence[tuple[str, ReadPass]]:
    """Return the passes since a break of BREAK_SECONDS, or of a minute if files were read again after it."""
    latest: list[tuple[str, ReadPass]] = []
    for burst in _bursts(passes, now):
        if latest:
            began_at = min(one.first_at for _, one in latest)
            last_at = max(one.last_at for _, one in burst)
            if began_at - last_at >= BREAK_SECONDS or _much_of(burst, sizes) & _much_of(latest, sizes):
                break
        latest += burst
    return latest


def _bursts(passes: Sequence[tuple[str, ReadPass]], now: float) -> list[list[tuple[str, ReadPass]]]:
    """Return the passes in groups that no minute without reads divides, the latest group first."""
    bursts: list[list[tuple[str, ReadPass]]] = []
    began_at = 0.0
    for key, one in sorted(passes, key=lambda found: now if found[1].open else found[1].last_at, reverse=True):
        ended_at = now if one.open else one.last_at
        if not bursts or began_at - ended_at >= PAUSE_SECONDS:
            bursts.append([])
            began_at = one.first_at
        began_at = min(began_at, one.first_at)
        bursts[-1].append((key, one))
    return bursts


def _much_of(burst: Sequence[tuple[str, ReadPass]], sizes: Mapping[str, int]) -> set[str]:
    read: dict[str, int] = {}
    for key, one in burst:
        read[key] = read.get(key, 0) + one.read_bytes
    return {key for key, read_bytes in read.items() if read_bytes >= _AGAIN * sizes[key]}
