"""Checkpoints whose objects came through several nodes: each node tells its part, and together they are one checkpoint.

A part has facts, not findings: which ranks are missing, and which lag, follows from all parts. Times are by the clock
of the node that tells them; `now` tells by how much it differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict

from gateway.api import documents as to
from gateway.writeback.checkpoints.layouts import CheckpointName
from gateway.writeback.checkpoints.reads import ReadPass, checkpoint_id, file_id
from gateway.writeback.checkpoints.state import ObjectFacts, UploadFacts, checkpoint_document, restore_of

OBJECTS_TOLD_MAX = 15_000
"""Objects in one answer to another node: 3 MiB. A checkpoint that has more on one node is told in part."""

Reads: TypeAlias = Mapping[str, Sequence[tuple[Any, ...]]]
"""Id of a file, as hexadecimal digits → its passes (`ReadPass`)."""


class Part(BaseModel):
    """One node's knowledge of a checkpoint. Objects and uploads are `ObjectFacts` and `UploadFacts`, as tuples."""

    model_config = ConfigDict(frozen=True)

    bucket: str
    prefix: str
    step: int | None
    layout: str
    slot: str
    began_at: float
    objects: tuple[tuple[Any, ...], ...]
    uploads: tuple[tuple[Any, ...], ...]
    ranks_before: tuple[int, ...]
    is_whole: bool = True
    seconds_left: float | None = None

    @property
    def place(self) -> tuple[str, str]:
        return self.bucket, self.prefix


class PartsPage(BaseModel):
    """Parts in the order of bucket and prefix. `following`: behind this place there are more; None: there are none."""

    model_config = ConfigDict(frozen=True)

    now: float
    parts: tuple[Part, ...] = ()
    following: tuple[str, str] | None = None


class Told(NamedTuple):
    """A node, its part, and its passes. `ahead_seconds`: by which its clock is ahead."""

    node: str
    part: Part
    ahead_seconds: float
    reads: Reads


def part_of(
    name: CheckpointName,
    slot: str,
    began_at: float,
    objects: Sequence[ObjectFacts],
    uploads: Sequence[UploadFacts],
    ranks_before: Iterable[int],
) -> Part:
    return Part(
        **name._asdict(),
        slot=slot,
        began_at=began_at,
        objects=tuple(astuple(one) for one in objects[:OBJECTS_TOLD_MAX]),
        uploads=tuple(astuple(one) for one in uploads),
        ranks_before=tuple(sorted(ranks_before)),
        is_whole=len(objects) <= OBJECTS_TOLD_MAX,
    )


def joined(told: Sequence[Told], now: float) -> to.Checkpoint:
    """Return the checkpoint that these parts make, as if one node had all of them."""
    first = told[0].part
    began_at = min(one.part.began_at - one.ahead_seconds for one in told)
    objects, uploads = dict[str, ObjectFacts](), list[UploadFacts]()
    for one in told:
        for columns in one.part.objects:
            fact = ObjectFacts(*columns)
            is_of_before = fact.began_at < one.part.began_at
            fact = replace(
                fact,
                began_at=began_at - 1.0 if is_of_before else max(began_at, fact.began_at - one.ahead_seconds),
                acknowledged_at=fact.acknowledged_at - one.ahead_seconds,
            )
            other = objects.get(fact.key)
            if other is None or _counts_before(fact) > _counts_before(other):
                objects[fact.key] = fact
        for columns in one.part.uploads:
            upload, ahead = UploadFacts(*columns), one.ahead_seconds
            uploads.append(replace(upload, began_at=upload.began_at - ahead, touched_at=upload.touched_at - ahead))
    ranks_before = {rank for one in told for rank in one.part.ranks_before}
    name = CheckpointName(first.bucket, first.prefix, first.step, first.layout)
    found = checkpoint_document(name, first.slot, list(objects.values()), uploads, began_at, ranks_before, now)
    missing = [one.node for one in told if not one.part.is_whole]
    return found.model_copy(
        update={
            "nodes": sorted(one.node for one in told if one.part.objects or one.part.uploads),
            "flush_seconds_left": max((s for one in told if (s := one.part.seconds_left) is not None), default=None),
            "restore": restore_of(objects.values(), _passes(first, objects, told), now),
            **({"reason": f"not all objects are counted that {', '.join(missing)} has"} if missing else {}),
        }
    )


def _counts_before(fact: ObjectFacts) -> tuple[bool, float]:
    """Rank two facts of one key. A pending write counts, as the other node has flushed its own; else the later."""
    return not fact.is_durable, fact.acknowledged_at


def _passes(part: Part, keys: Iterable[str], told: Sequence[Told]) -> Mapping[str, Sequence[ReadPass]]:
    of_checkpoint, found = checkpoint_id(*part.place), dict[str, list[ReadPass]]()
    for key in keys:
        name = file_id(of_checkpoint, key).hex()
        for one in told:
            for columns in one.reads.get(name, ()):
                read, ahead = ReadPass(*columns), one.ahead_seconds
                shifted = read._replace(first_at=read.first_at - ahead, last_at=read.last_at - ahead)
                found.setdefault(key, []).append(shifted)
    return found
