"""The state of a checkpoint, from its objects and the open uploads under it. Pure.

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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from gateway.writeback.checkpoints.layouts import shard_of, world_size_of

STALLED_SECONDS = 60.0
"""Seconds without a write after which an unfinished save is stalled."""

QUIET_SECONDS = 10.0
"""Seconds without a write after which a save without a manifest is over."""

RANKS_MAX = 65_536
"""Names that imply more ranks are not believed."""

MISSING_SHOWN_MAX = 100


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


@dataclass(frozen=True, slots=True)
class Missing:
    """The parts that a save still lacks: ranks, objects by key (the first ones), uploads that are not completed."""

    ranks: Sequence[int] = ()
    keys: Sequence[str] = ()
    uploads: int = 0

    def __bool__(self) -> bool:
        return bool(self.ranks or self.keys or self.uploads)


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """The facts of one checkpoint. Times in seconds since 1970.

    `size_bytes` are of acknowledged objects. `save_seconds` is from the first byte of the save to its last
    acknowledgement; None before the first. `exposed_since` is when the oldest object was acknowledged that is still to
    reach the origin; None: there is none.
    """

    state: CheckpointState
    objects: int
    size_bytes: int
    flushed_bytes: int
    ranks: frozenset[int]
    began_at: float
    last_at: float
    save_seconds: float | None
    exposed_since: float | None
    missing: Missing = field(default_factory=Missing)
    reason: str | None = None
    local_bytes: int = 0
    """Bytes that the slot leaves out of flushes."""

    @property
    def is_whole(self) -> bool:
        """Return whether nothing is missing, as far as names tell."""
        return self.objects > 0 and not self.missing and self.state is not CheckpointState.WRITING

    @property
    def left_bytes(self) -> int:
        return self.size_bytes - self.flushed_bytes - self.local_bytes


def facts_of(
    objects: Sequence[ObjectFacts],
    uploads: Sequence[UploadFacts],
    save_began_at: float,
    ranks_before: Iterable[int],
    now: float,
) -> CheckpointFacts:
    """Return a checkpoint's facts. Objects begun before `save_began_at` belong to an earlier save of the same name.

    `ranks_before` are those of the run's previous checkpoint.
    """
    in_save = [one for one in objects if one.began_at >= save_began_at]
    ranks = frozenset(one.rank for one in in_save if one.rank is not None)
    missing = missing_of([one.key for one in in_save], ranks, ranks_before, uploads)
    acknowledged_at = max((one.acknowledged_at for one in in_save), default=None)
    last_at = max([save_began_at, *(one.acknowledged_at for one in in_save), *(one.touched_at for one in uploads)])
    began_at = min([save_began_at, *(one.began_at for one in uploads)]) if not in_save else save_began_at
    left = [one for one in objects if not one.is_durable and not one.is_local]
    reasons = [one.reason for one in left if one.reason is not None]
    return CheckpointFacts(
        _state(objects, missing, _ends_with_manifest(in_save), now - last_at),
        len(objects),
        sum(one.size_bytes for one in objects),
        sum(one.size_bytes if one.is_durable else min(one.sent_bytes, one.size_bytes) for one in objects),
        ranks,
        began_at,
        last_at,
        None if acknowledged_at is None else max(0.0, acknowledged_at - save_began_at),
        min((one.acknowledged_at for one in left), default=None),
        missing,
        reasons[0] if reasons else None,
        sum(one.size_bytes for one in objects if one.is_local),
    )


def _state(
    objects: Sequence[ObjectFacts], missing: Missing, ends_with_manifest: bool, quiet_seconds: float
) -> CheckpointState:
    if any(one.is_conflict for one in objects):
        return CheckpointState.CONFLICT
    if any(one.is_failing for one in objects):
        return CheckpointState.FAILED
    if missing and quiet_seconds >= STALLED_SECONDS:
        return CheckpointState.STALLED
    if missing or not (ends_with_manifest or quiet_seconds >= QUIET_SECONDS):
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


_MANIFEST = ".metadata"


def _ends_with_manifest(objects: Sequence[ObjectFacts]) -> bool:
    if not objects:
        return False
    last_at = max(one.acknowledged_at for one in objects)
    return any(one.acknowledged_at >= last_at and _name(one.key) == _MANIFEST for one in objects)


def missing_of(
    keys: Sequence[str], ranks: frozenset[int], ranks_before: Iterable[int], uploads: Sequence[UploadFacts]
) -> Missing:
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
    expected = frozenset(() if has_manifest else ranks_before) or _expected_of(keys, ranks)
    waited_for = {one.rank for one in uploads if one.rank is not None}
    # Where this save has no ranks at all, its layout is another than that of the checkpoint before it.
    absent = (expected - ranks if ranks or waited_for else frozenset[int]()) | waited_for
    return Missing(tuple(islice(sorted(absent), MISSING_SHOWN_MAX)), tuple(lacking[:MISSING_SHOWN_MAX]), len(uploads))


def _expected_of(keys: Sequence[str], ranks: frozenset[int]) -> frozenset[int]:
    """Return the ranks that names imply; none where those here may be all of one node among several."""
    world = max((size for key in keys if (size := world_size_of(key)) is not None and size <= RANKS_MAX), default=0)
    is_block = bool(ranks) and max(ranks) - min(ranks) + 1 == len(ranks) and min(ranks) % len(ranks) == 0
    if is_block and world % len(ranks) == 0:
        return frozenset()
    return frozenset(range(world))


def _manifests_of(keys: Sequence[str], shards: Mapping[tuple[str, int], set[int]], *, is_first_here: bool) -> set[str]:
    """Return these objects' manifest keys. The first rank writes `.metadata`: perhaps on another node, if not here."""
    found = {f"{_directory(key)}{_MANIFEST}" for key in keys if key.endswith(".distcp")} if is_first_here else set()
    for family, count in shards:
        name = _name(family)
        if count > 1 and name.endswith("-.safetensors") and not name.startswith("shard-"):
            found.add(f"{family.removesuffix('-.safetensors')}.safetensors.index.json")
    return found


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _directory(key: str) -> str:
    above, slash, _ = key.rpartition("/")
    return above + slash
