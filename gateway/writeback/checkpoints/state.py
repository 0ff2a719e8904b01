"""How far a checkpoint has come: saved, sent to the origin, and read back. From its objects and open uploads. Pure.

    writing        objects are being sent, or are still missing
    stalled        the same, and nothing has come for a minute
    acknowledged   all of it is here; the origin has nothing that this node was given
    flushing       the origin has some of it
    durable        the origin has all of it
    local          it is whole here, but not durable: its slot leaves some of it out of flushes
    waiting for the bucket   the origin does not answer, or is too busy: the flush tries again
    failed         some of it needs a person: it is damaged, or the origin refuses it
    conflict       others have changed some of it at the origin: a person decides

A save is over when nothing that its names imply is missing, no upload is open, and its `.metadata` came last or nothing
has come for ten seconds. Names imply shards (`-of-00004`), the number of ranks (`world_size_8`) and manifests;
otherwise the ranks of the run's previous checkpoint are expected. Of a job on several nodes this node may have only a
part: that part counts as all.

A restore:

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

from gateway.api import documents as to
from gateway.writeback.checkpoints.layouts import CheckpointName, shard_of, world_size_of
from gateway.writeback.checkpoints.reads import PAUSE_SECONDS, ReadPass

STALLED_SECONDS = 60.0
"""Seconds without a write after which an unfinished save is stalled."""

QUIET_SECONDS = 10.0
"""Seconds without a write after which a save without a manifest is over."""

RANKS_MAX = 65_536
"""Names that imply more ranks are not believed."""

RANKS_SHOWN_MAX = 1000
MISSING_SHOWN_MAX = 100

BREAK_SECONDS = 600.0
"""Seconds without a read after which a read begins another restore."""

RESTORE_SHOWN_SECONDS = 3600.0
"""Seconds after the last byte for which a restore is shown."""

BEHIND_SHOWN_MAX = 100

_LAG = 0.9
"""A file lags when its share of bytes read is below this part of the largest share of its kind."""

_AGAIN = 0.5
"""A file with at least this share read both before and after a minute's break was restored twice."""

_DIGITS = re.compile(r"[0-9]+")
_MANIFEST = ".metadata"


class CheckpointState(StrEnum):
    """See above."""

    WRITING = "writing"
    STALLED = "stalled"
    ACKNOWLEDGED = "acknowledged"
    FLUSHING = "flushing"
    DURABLE = "durable"
    LOCAL = "local"
    WAITING = "waiting for the bucket"
    FAILED = "failed"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """An object of a checkpoint. `sent_bytes` are at the origin as parts, of what is not durable yet."""

    key: str
    size_bytes: int
    began_at: float
    acknowledged_at: float
    rank: int | None = None
    is_durable: bool = False
    is_local: bool = False
    """Only this node has it, and its slot leaves it out of flushes."""
    is_conflict: bool = False
    is_failing: bool = False
    is_waiting: bool = False
    """It waits for the bucket."""
    is_sending: bool = False
    sent_bytes: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class UploadFacts:
    """An upload that is open under a checkpoint's prefix."""

    key: str
    began_at: float
    touched_at: float
    rank: int | None = None


def is_whole(checkpoint: to.Checkpoint) -> bool:
    """Return whether nothing is missing, as far as names tell."""
    return checkpoint.files > 0 and not _lacks(checkpoint.missing) and checkpoint.state != CheckpointState.WRITING


def _lacks(missing: to.MissingDocument) -> bool:
    return bool(missing.ranks or missing.objects or missing.open_uploads)


def checkpoint_document(
    name: CheckpointName,
    slot: str,
    objects: Sequence[ObjectFacts],
    uploads: Sequence[UploadFacts],
    save_began_at: float,
    ranks_before: Iterable[int],
    now: float,
) -> to.Checkpoint:
    """Return a checkpoint without the rate of its flush, its place in the cache, and its restore.

    Objects begun before `save_began_at` belong to an earlier save of the same name. `ranks_before` are those of the
    run's previous checkpoint.
    """
    in_save = [one for one in objects if one.began_at >= save_began_at]
    ranks = {one.rank for one in in_save if one.rank is not None}
    missing = _missing([one.key for one in in_save], ranks, ranks_before, uploads)
    acknowledged_at = max((one.acknowledged_at for one in in_save), default=None)
    last_at = max([save_began_at, *(one.acknowledged_at for one in in_save), *(one.touched_at for one in uploads)])
    left = [one for one in objects if not one.is_durable and not one.is_local]
    exposed_since = min((one.acknowledged_at for one in left), default=None)
    return to.Checkpoint(
        bucket=name.bucket,
        prefix=name.prefix,
        step=name.step,
        layout=name.layout,
        slot=slot,
        state=_state(objects, missing, _ends_with_manifest(in_save), now - last_at).value,
        files=len(objects),
        bytes=sum(one.size_bytes for one in objects),
        bytes_flushed=sum(one.size_bytes if one.is_durable else min(one.sent_bytes, one.size_bytes) for one in objects),
        bytes_local=sum(one.size_bytes for one in objects if one.is_local),
        ranks=len(ranks),
        ranks_seen=sorted(ranks)[:RANKS_SHOWN_MAX],
        began_at=save_began_at if in_save else min([save_began_at, *(one.began_at for one in uploads)]),
        last_at=last_at,
        save_seconds=None if acknowledged_at is None else max(0.0, acknowledged_at - save_began_at),
        flush_seconds_left=None,
        exposed_seconds=None if exposed_since is None else max(0.0, now - exposed_since),
        kept=False,
        kept_reason=None,
        missing=missing,
        restore=None,
        nodes=[],
        reason=next((one.reason for one in left if one.reason is not None), None),
    )


def _state(
    objects: Sequence[ObjectFacts], missing: to.MissingDocument, ends_with_manifest: bool, quiet_seconds: float
) -> CheckpointState:
    if any(one.is_conflict for one in objects):
        return CheckpointState.CONFLICT
    if any(one.is_failing for one in objects):
        return CheckpointState.FAILED
    if _lacks(missing) and quiet_seconds >= STALLED_SECONDS:
        return CheckpointState.STALLED
    if _lacks(missing) or not (ends_with_manifest or quiet_seconds >= QUIET_SECONDS):
        return CheckpointState.WRITING
    if any(one.is_waiting for one in objects):
        return CheckpointState.WAITING
    if any(one.is_local for one in objects):
        return CheckpointState.LOCAL
    if all(one.is_durable for one in objects):
        return CheckpointState.DURABLE
    if any(one.is_durable or one.is_sending or one.sent_bytes for one in objects):
        return CheckpointState.FLUSHING
    return CheckpointState.ACKNOWLEDGED


def _ends_with_manifest(objects: Sequence[ObjectFacts]) -> bool:
    if not objects:
        return False
    last_at = max(one.acknowledged_at for one in objects)
    return any(one.acknowledged_at >= last_at and _name(one.key) == _MANIFEST for one in objects)


def _missing(
    keys: Sequence[str], ranks: set[int], ranks_before: Iterable[int], uploads: Sequence[UploadFacts]
) -> to.MissingDocument:
    """Return the parts that a save with these objects, ranks and open uploads still lacks."""
    there = set(keys)
    shards: dict[tuple[str, int], set[int]] = {}
    for key in keys:
        if (shard := shard_of(key)) is not None:
            shards.setdefault((shard.family, shard.shards), set()).add(shard.number)
    lacking = [
        f"{family} ({count - len(numbers)} of {count})"
        for (family, count), numbers in sorted(shards.items())
        if len(numbers) < count
    ]
    lacking += sorted(_manifests_of(keys, shards, is_first_here=0 in ranks) - there)
    has_manifest = any(_name(key) == _MANIFEST for key in keys)
    expected = set(() if has_manifest else ranks_before) or _expected_of(keys, ranks)
    waited_for = {one.rank for one in uploads if one.rank is not None}
    # Where this save has no ranks at all, its layout is another than that of the checkpoint before it.
    absent = (expected - ranks if ranks or waited_for else set[int]()) | waited_for
    return to.MissingDocument(
        ranks=sorted(absent)[:MISSING_SHOWN_MAX], objects=lacking[:MISSING_SHOWN_MAX], open_uploads=len(uploads)
    )


def _expected_of(keys: Sequence[str], ranks: set[int]) -> set[int]:
    """Return the ranks that names imply; none where those here may be all of one node among several."""
    world = max((size for key in keys if (size := world_size_of(key)) is not None and size <= RANKS_MAX), default=0)
    is_block = bool(ranks) and max(ranks) - min(ranks) + 1 == len(ranks) and min(ranks) % len(ranks) == 0
    if is_block and world % len(ranks) == 0:
        return set()
    return set(range(world))


def _manifests_of(keys: Sequence[str], shards: Mapping[tuple[str, int], set[int]], *, is_first_here: bool) -> set[str]:
    """Return these objects' manifest keys. The first rank writes `.metadata`: perhaps on another node, if not here."""
    found = (
        {key.removesuffix(_name(key)) + _MANIFEST for key in keys if key.endswith(".distcp")}
        if is_first_here
        else set()
    )
    for family, count in shards:
        name = _name(family)
        if count > 1 and name.endswith("-.safetensors") and not name.startswith("shard-"):
            found.add(f"{family.removesuffix('-.safetensors')}.safetensors.index.json")
    return found


def _name(key: str) -> str:
    return key.rpartition("/")[2]


# Restores


class _Reading(NamedTuple):
    """How far a file was read; `last_at` None: not at all."""

    file: ObjectFacts
    read_bytes: int
    last_at: float | None

    @property
    def share(self) -> float:
        return self.read_bytes / self.file.size_bytes


def restore_of(files: Iterable[ObjectFacts], read: Mapping[str, Sequence[ReadPass]], now: float) -> to.Restore | None:
    """Return a checkpoint's last restore; `read` are each key's passes. None: there is none in the last hour."""
    sized = {one.key: one for one in files if one.size_bytes > 0}
    passes = [(key, one) for key, found in read.items() if key in sized for one in found]
    latest = _of_latest(passes, {key: one.size_bytes for key, one in sized.items()}, now)
    if not latest:
        return None
    began_at = min(one.first_at for _, one in latest)
    last_at = max(one.last_at for _, one in latest)
    is_open = any(one.open for _, one in latest)
    if not is_open and now - last_at > RESTORE_SHOWN_SECONDS:
        return None
    kinds: dict[str, list[_Reading]] = {}
    by_key: dict[str, list[ReadPass]] = {}
    for key, one in latest:
        by_key.setdefault(key, []).append(one)
    for file in sized.values():
        kinds.setdefault(_DIGITS.sub("#", file.key), []).append(_reading(file, by_key.get(file.key, ())))
    begun = [one for one in kinds.values() if any(reading.last_at is not None for reading in one)]
    behind = [reading for kind in begun for reading in _lagging(kind)]
    behind.sort(key=lambda one: (one.share, one.file.key))
    # While any file is being read, others may have their turn behind it.
    is_recent = is_open or now - last_at < PAUSE_SECONDS
    shown = behind[:BEHIND_SHOWN_MAX]
    return to.Restore(
        state="reading" if is_recent else "stalled" if behind else "over",
        began_at=began_at,
        last_at=last_at,
        files=sum(len(kind) for kind in begun),
        files_begun=len(by_key),
        files_behind=len(behind),
        bytes=sum(one.file.size_bytes for kind in begun for one in kind),
        bytes_read=sum(one.read_bytes for kind in begun for one in kind),
        behind=to.Behind(
            ranks=sorted({one.file.rank for one in shown if one.file.rank is not None}),
            objects=[
                to.FileBehind(key=file.key, bytes=file.size_bytes, bytes_read=read_bytes, last_at=read_at)
                for file, read_bytes, read_at in shown
            ],
        ),
    )


def _reading(file: ObjectFacts, passes: Sequence[ReadPass]) -> _Reading:
    read_bytes = min(sum(one.read_bytes for one in passes), file.size_bytes)
    last_at = max((one.last_at for one in passes), default=None)
    return _Reading(file, read_bytes, last_at)


def _lagging(kind: Sequence[_Reading]) -> list[_Reading]:
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
