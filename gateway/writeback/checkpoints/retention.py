"""Which checkpoints of a run need not be sent any more, and which stay in the cache. Pure.

A run's checkpoints are in the order in which they were begun. Once one of them is at the origin, whole, those before it
are not sent any more where the slot's rule says so; before that all are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway.writeback.checkpoints.state import CheckpointState

FlushRule: TypeAlias = int | Literal["all", "latest"]
"""Which checkpoints are sent whatever comes after them: all, none, or each of so many."""


def flush_rule_of(text: str) -> FlushRule:
    """`all`, `latest`, or the number in `every-5th`; ValueError for anything else."""
    if text == "all" or text == "latest":
        return text  # type: ignore[return-value]
    number = text.removeprefix("every-").rstrip("stndrh")
    if not text.startswith("every-") or not number.isdecimal() or int(number) < 2:
        raise ValueError(f"{text!r} is no rule for flushes")
    return int(number)


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint of a run: its place among those that were begun, from 1, and its state. `is_whole`: nothing of it
    is missing, as far as names tell."""

    id: int
    ordinal: int
    began_at: float
    state: CheckpointState
    is_whole: bool
    last_at: float = 0.0
    """When the last of it came."""


def whole_since(saves: Sequence[Save]) -> float:
    """When the newest that is at the origin was whole here; 0: none is there."""
    durable = [one for one in saves if one.state is CheckpointState.DURABLE]
    return max(durable, key=_place).last_at if durable else 0.0


def superseded(saves: Sequence[Save], rule: FlushRule) -> list[int]:
    """Of one run's, the ids of those of which nothing need be sent any more."""
    if rule == "all":
        return []
    newest = max((_place(one) for one in saves if one.state is CheckpointState.DURABLE), default=None)
    if newest is None:
        return []
    return [
        one.id
        for one in saves
        if _place(one) < newest
        and one.state is not CheckpointState.DURABLE
        and (rule == "latest" or one.ordinal % rule != 0)
    ]


def kept(saves: Sequence[Save], keep_last: int) -> list[int]:
    """Of one run's, the ids of the newest complete ones, so many, and of those that are being saved."""
    complete = sorted((one for one in saves if one.is_whole), key=_place, reverse=True)[:keep_last]
    being_saved = [one for one in saves if one.state is CheckpointState.WRITING and one not in complete]
    return [one.id for one in (*being_saved, *complete)]


def _place(save: Save) -> tuple[float, int]:
    """By the beginning of a save: one of a name that was there before is a newer one."""
    return save.began_at, save.ordinal
