"""What a reader takes for "all of it is there": it may be seen at the origin when all of it is there, not before."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tests.simulation.histories import Attempt, KeyHistory, Value

_NAMES = frozenset({".metadata", ".metadata.tmp", "latest", "latest_checkpointed_iteration.txt", "_SUCCESS"})
"""Of `.metadata.tmp` PyTorch makes `.metadata`: under that name, too, a node keeps it behind what it speaks for."""

_ENDS = (".index.json",)
_LOG = "/_delta_log/"
"""Of a table, which lies above it."""

PASSING = ".tmp"


@dataclass
class _StorageInfo:
    """As PyTorch's DCP writes one for each piece of a tensor."""

    relative_path: str
    number: int


def metadata_of(names: Sequence[str], number: int) -> bytes:
    """A manifest like PyTorch's that names files beside it, and no two of which are alike."""
    return pickle.dumps([_StorageInfo(name, number) for name in names], protocol=4)


def index_of(names: Sequence[str], number: int) -> bytes:
    """One of safetensors."""
    return json.dumps({"metadata": {"number": number}, "weight_map": {f"w.{one}": one for one in names}}).encode()


def is_marker(key: str) -> bool:
    return key.rpartition("/")[2] in _NAMES or key.endswith(_ENDS) or _LOG in key


def missing(
    marker: str,
    value: Value,
    keys: Iterable[tuple[str, KeyHistory]],
    is_left_out: Callable[[str, float], bool] = lambda _key, _until: False,
) -> str | None:
    """A key of those that a marker speaks for, which was acknowledged before it, and has not been at the origin.
    `is_left_out`: whether a key is of a checkpoint that one had superseded which was acknowledged by a time.

    What was written to that key later is as good. What is in conflict is not: others' object is no part of it.
    """
    found = dict(keys)
    asked = next((one for one in reversed(found[marker].attempts) if one.value == value), None)
    if asked is None:
        return None
    directory = (marker.partition(_LOG) if _LOG in marker else marker.rpartition("/"))[0] + "/"
    for key, history in sorted(found.items()):
        if key != marker and key.startswith(directory) and not key.endswith(PASSING) and _misses(history, asked):
            if is_left_out(key, asked.begun):
                continue
            return key
    return None


def _misses(history: KeyHistory, marker: Attempt) -> bool:
    before = [one for one in history.attempts if one.acknowledged and (one.ended or 0.0) <= marker.begun]
    if not before or before[-1].value is None:
        return False
    last = before[-1]
    since = history.attempts[history.attempts.index(last) :]
    if any(one.value is None for one in since):
        return False
    values = {one.value for one in since}
    return not any(value in values for _, value in history.arrived)
