"""The order in which writes reach the origin: markers last. Pure.

A marker is an object by which readers know that others are complete: the manifest of a checkpoint, the index of its
shards, `latest`, `_SUCCESS`, the log of a table, and any conditional write, by which writers make sure that no other
writer has published the same. It waits until everything that was acknowledged before it under its directory, or its
table's, is at the origin. In a slot with `order = "strict"` every write waits for all before it in its bucket.
Elsewhere the oldest goes first, and small ones do not wait for large ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import translate
from functools import lru_cache

from gateway.core.clock import Moment
from gateway.core.model import MARKERS
from gateway.policy.slots import Slot
from gateway.writeback.checkpoints.layouts import member_of, rules_of
from gateway.writeback.journal.records import State, Write


def with_order(write: Write, slot: Slot | None, acknowledged: Moment | None = None) -> Write:
    """Return a write with its checkpoint, and with the order in which it must reach the origin."""
    member = member_of(write.key, rules_of(None if slot is None else slot.checkpoints))
    write = replace(write, member=member, acknowledged=acknowledged)
    if slot is not None and slot.write == "scratch" and not write.deleted and write.is_acknowledged:
        return replace(write, state=State.LOCAL)
    if slot is not None and slot.order == "strict":
        return replace(write, in_order=True)
    is_behind = not write.deleted and is_marker(write.key.key, MARKERS if slot is None else slot.markers)
    return replace(write, behind=root_of(write.key.key)) if is_behind else write


def key_prefix_before(key: str, slot: Slot, *, is_conditional: bool) -> str | None:
    """Return the prefix that must be at the origin before a write of a key; None: it waits for none."""
    root = root_of(key) if is_conditional or is_marker(key, slot.markers) else None
    if slot.order != "strict":
        return root
    return slot.prefix.key_prefix if root is None else min(root, slot.prefix.key_prefix, key=len)


_LOGS = frozenset(("_delta_log", "_hoodie", ".hoodie", "_versions", "_transactions", "_indices"))
_METADATA = frozenset(("metadata", "manifest", "manifests", "snapshot", "snapshots"))
"""Directories in which tables keep the names of their files: Delta Lake, Hudi, Lance; Iceberg, SlateDB, Paimon. Those
with a common name count only when the object lies right in them; Icechunk's `refs/` one level below."""


def root_of(key: str) -> str:
    """Return the directory that a marker speaks for: that of the table whose log or metadata has it, else its own."""
    parts = key.split("/")
    for number, name in enumerate(parts[:-1]):
        below = len(parts) - number - 1
        if name in _LOGS or (name in _METADATA and below == 1) or (name == "refs" and below == 2):
            return "/".join([*parts[:number], ""])
    return "/".join([*parts[:-1], ""])


def is_marker(key: str, patterns: Sequence[str]) -> bool:
    """Tell whether the end of a key's path matches a pattern (`*` and `?` as in a shell) of as many parts."""
    for depth, pattern in _by_depth(tuple(patterns)):
        if pattern.match("/".join(key.rsplit("/", depth + 1)[-1 - depth :])) is not None:
            return True
    return False


@lru_cache
def _by_depth(patterns: tuple[str, ...]) -> Sequence[tuple[int, re.Pattern[str]]]:
    """Return one pattern for all of the same number of slashes: every write asks."""
    depths = sorted({one.count("/") for one in patterns})
    alike = [[translate(one) for one in patterns if one.count("/") == depth] for depth in depths]
    return [(depth, re.compile("|".join(found))) for depth, found in zip(depths, alike, strict=True)]
