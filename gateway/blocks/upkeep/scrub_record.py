"""How far the scrubber has come, on disk: replaced as a whole, so that a killed process goes on where it was."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import orjson

from gateway.durable import write_durably
from gateway.errors import StoreUnavailable


@dataclass(frozen=True, slots=True)
class ScrubPass:
    """One pass over all blocks, in the order of their keys in the index. Times are in seconds since 1970.

    `after` is the id of the last block looked at, as hex; `ended_at` None while the pass is under way.
    """

    started_at: float
    ended_at: float | None = None
    after: str = ""
    blocks: int = 0
    read_bytes: int = 0
    dropped_blocks: int = 0

    @property
    def part_done(self) -> float:
        """From 0 to 1: ids are hashes, so that the id itself tells how far it is, by what blocks are sorted by."""
        return 1.0 if self.ended_at is not None else int(self.after[32:40] or "0", 16) / 2**32


def load(path: Path) -> ScrubPass | None:
    """The pass that was written down last; None when there is none that makes sense. Blocks."""
    try:
        document: Any = orjson.loads(path.read_bytes())
        known = {field.name: document[field.name] for field in fields(ScrubPass)}
        record = ScrubPass(**known)
        bytes.fromhex(record.after)
        record.started_at + (record.ended_at or 0.0) + record.blocks + record.read_bytes + record.dropped_blocks
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record


def save(path: Path, record: ScrubPass) -> None:
    """Write a pass down; StoreUnavailable when the disk does not take it. Blocks."""
    try:
        write_durably(path, orjson.dumps(asdict(record)))
    except OSError as error:
        raise StoreUnavailable(f"the scrubber's place cannot be written down: {error}") from error
