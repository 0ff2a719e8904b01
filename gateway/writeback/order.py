"""In which order writes reach the origin: markers last. Pure.

A marker is an object by which readers know that others are complete: the manifest of a checkpoint, the index of its
shards, `latest`, `_SUCCESS`. It waits until everything that was acknowledged before it under its directory is at the
origin. In a slot with `order = "strict"` every write waits for all before it in its bucket. Elsewhere the oldest goes
first, and small ones do not wait for large ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from gateway.model import MARKERS
from gateway.policy.slots import Slot
from gateway.writeback.checkpoints.layouts import member_of, rules_of
from gateway.writeback.journal.records import State, Write


def with_order(write: Write, slot: Slot | None) -> Write:
    """A write that is to be acknowledged, with what it has to wait for, and the checkpoint that it belongs to."""
    write = replace(write, member=member_of(write.key, rules_of(None if slot is None else slot.checkpoints)))
    if slot is not None and slot.write == "scratch" and not write.deleted and write.is_acknowledged:
        return replace(write, state=State.LOCAL)
    if slot is not None and slot.order == "strict":
        return replace(write, in_order=True)
    return write if write.deleted else replace(write, behind=_directory(write.key.key, slot))


def key_prefix_before(key: str, slot: Slot) -> str | None:
    """Under which prefix all is to be at the origin before a write of a key; None: it waits for none."""
    return slot.prefix.key_prefix if slot.order == "strict" else _directory(key, slot)


def _directory(key: str, slot: Slot | None) -> str | None:
    """That of a marker; None for what is none."""
    if not is_marker(key, MARKERS if slot is None else slot.markers):
        return None
    directory, slash, _ = key.rpartition("/")
    return directory + slash


def is_marker(key: str, patterns: Sequence[str]) -> bool:
    """Whether the last part of a key's path is like one of these (`*` and `?` stand for what they do in a shell)."""
    name = key.rpartition("/")[2]
    return any(fnmatchcase(name, pattern) for pattern in patterns)
