"""Which checkpoints of a run need not be sent any more, and which stay in the cache. Pure.

A run's checkpoints are in the order in which their last saves began, by a count: clocks go back. Once one of them is at
the origin, whole and with as many files, those before it are not sent any more where the slot's rule says so; before
that all are. A job that died while it saved has left fewer files, and names alone may not tell that some are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway.writeback.checkpoints.state import CheckpointState

FlushRule: TypeAlias = int | Literal["all", "latest"]
"""The checkpoints that are flushed whatever follows them: all, none (`latest`), or every n-th."""


def flush_rule_of(text: str) -> FlushRule:
    """Parse `all`, `latest` or `every-5th`; ValueError for anything else."""
    if text == "all" or text == "latest":
        return text  # type: ignore[return-value]
    number = text.removeprefix("every-").rstrip("stndrh")
    if not text.startswith("every-") or not number.isdecimal() or int(number) < 2:
        raise ValueError(f"{text!r} is no rule for flushes")
    return int(number)


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint of a run: its place among those that were begun, from 1, and its state.

    `save_order` is higher than that of every save that began before; a checkpoint that is saved again gets a new one.
    `is_whole`: nothing of it is missing, as far as names tell.
    """

    id: int
    ordinal: int
    save_order: int
    state: CheckpointState
    is_whole: bool
    objects: int = 1
    last_at: float = 0.0
    """When its last write was acknowledged."""


def whole_since(saves: Sequence[Save], superseded_id: int) -> float:
    """Return when the newest checkpoint that supersedes this one was whole here; 0 if none does."""
    old = next(one for one in saves if one.id == superseded_id)
    newer = [
        one
        for one in saves
        if one.state is CheckpointState.DURABLE and one.save_order > old.save_order and one.objects >= old.objects
    ]
    return max(newer, key=_order).last_at if newer else 0.0


def superseded(saves: Sequence[Save], rule: FlushRule) -> list[int]:
    """Return the ids of a run's checkpoints that need no flush any more."""
    if rule == "all":
        return []
    left_out, most = set(), 0
    for one in sorted(saves, key=_order, reverse=True):
        if one.state is CheckpointState.DURABLE:
            most = max(most, one.objects)
        elif 0 < one.objects <= most and (rule == "latest" or one.ordinal % rule != 0):
            left_out.add(one.id)
    return [one.id for one in saves if one.id in left_out]


def kept(saves: Sequence[Save], keep_last: int) -> list[int]:
    """Return the ids of a run's `keep_last` newest complete checkpoints, and of those that are being saved."""
    complete = sorted((one for one in saves if one.is_whole), key=_order, reverse=True)[:keep_last]
    being_saved = [one for one in saves if one.state is CheckpointState.WRITING and one not in complete]
    return [one.id for one in (*being_saved, *complete)]


def _order(save: Save) -> int:
    return save.save_order
