"""The turns of writes: when the reconciler looks at each, and which goes before others. Columns of the table `writes`.

Due times later than any can be were written before the clock went back: `set_right` corrects them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from gateway.core.model import ObjectKey
from gateway.writeback.journal.records import IDLE_SECONDS_MIN, UPLOAD_LOOK_SECONDS, Priority, Turn
from gateway.writeback.journal.rows import (
    AWAITED_SINCE,
    BEHIND_ALL,
    OPEN,
    PENDING,
    Table,
    Value,
    at,
    decoded,
    keys_under,
    marks,
)

RETRY_SECONDS_MAX, UPLOAD_SECONDS_MAX = 90.0, 700.0
"""The longest times to the next turn; the second is for open uploads and permanent refusals. A later due time was
written before the clock went back."""

RAISED_MAX = 10_000
"""The most objects raised at once: writers wait meanwhile."""

_COLUMNS = ("due_at", "attempts", "failing_since", "last_error", "priority", "after_sequence", "damaged")
TURN_COLUMNS, _SET = ", ".join(_COLUMNS), ", ".join(f"{name} = ?" for name in _COLUMNS)
_columns_of = attrgetter(*_COLUMNS)

_LOOKED_AT_MAX = 64


class Due(NamedTuple):
    """A write that is due."""

    id: int
    key: ObjectKey
    due_at: float
    attempts: int


def turn_of(columns: Sequence[Any]) -> Turn:
    due_at, attempts, failing_since, last_error, priority, after_sequence, damaged = columns
    return Turn(due_at, attempts, failing_since, last_error, Priority(priority), after_sequence, bool(damaged))


class Turns(Table):
    """`has_due`: the reconciler has more to look at."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self.has_due = False

    def of(self, write_id: int) -> Turn | None:
        row = self._row(f"SELECT {TURN_COLUMNS} FROM writes WHERE id = ? AND state < 5", write_id)
        return turn_of(row) if row else None

    def put(self, write_id: int, turn: Turn) -> None:
        self._change(f"UPDATE writes SET {_SET} WHERE id = ?", *_columns_of(turn), write_id)

    def wait(self, write_id: int, seen: Turn, turn: Turn) -> None:
        """Set a write's next turn, and why. If it came due since `seen`, and has not failed, it stays due."""
        self._change(
            "UPDATE writes SET due_at = CASE WHEN due_at = ? OR ? > 0 THEN ? ELSE due_at END, attempts = ?, "
            "failing_since = ?, last_error = ?, priority = CASE WHEN priority = ? THEN ? ELSE priority END "
            "WHERE id = ? AND due_at IS NOT NULL",
            *(seen.due_at, turn.attempts, turn.due_at, turn.attempts, turn.failing_since, turn.last_error),
            *(seen.priority, turn.priority, write_id),
        )

    def rest(self, write_id: int, seen: Turn, turn: Turn) -> None:
        """Set the next turn of a write with nothing to do now. An open upload with an unsent part stays due."""
        unsent = "SELECT 1 FROM parts JOIN writes ON write_id = id WHERE id = ? AND state = 0 AND sent = 0 LIMIT 1"
        if self._row(unsent, write_id) is None:
            self.wait(write_id, seen, turn)

    def quarantine(self, write_id: int, reason: str) -> None:
        """Set a damaged write aside until the next start."""
        self._change("UPDATE writes SET due_at = NULL, damaged = 1, last_error = ? WHERE id = ?", reason, write_id)

    # What is due

    def lanes(self) -> Mapping[tuple[str, str], Mapping[Priority, float]]:
        """Return the slots and buckets in which something is or will be due: by priority, the time of the first."""
        found: dict[tuple[str, str], dict[Priority, float]] = {}
        due = "SELECT slot, bucket, priority, due_at FROM writes WHERE due_at IS NOT NULL AND state < 5 AND"
        # Not by (slot, bucket, priority) > (?, ?, ?): that reads the whole lane.
        within = f"{due} slot = ? AND bucket = ? AND priority > ? ORDER BY priority, due_at LIMIT 1"
        beside = f"{due} slot = ? AND bucket > ? ORDER BY bucket, priority, due_at LIMIT 1"
        behind = f"{due} slot > ? ORDER BY slot, bucket, priority, due_at LIMIT 1"
        row = self._row(behind, "")
        while row is not None:
            slot, bucket, priority, due_at = row
            found.setdefault((slot, bucket), {})[Priority(priority)] = due_at
            row = self._row(within, *row[:3]) or self._row(beside, slot, bucket) or self._row(behind, slot)
        return found

    def due(
        self, lane: tuple[str, str], priority: Priority, now: float, count_max: int, *, newest: bool = False
    ) -> Sequence[Due]:
        """Return the due writes of a lane that have waited longest, or, with `newest`, least."""
        found = self._all(
            "SELECT id, bucket, key, due_at, attempts FROM writes WHERE slot = ? AND bucket = ? AND priority = ? "
            f"AND due_at <= ? AND state < 5 ORDER BY due_at {'DESC' if newest else 'ASC'} LIMIT ?",
            *(*lane, priority, now, count_max),
        )
        return [Due(write_id, ObjectKey(bucket, decoded(key)), *turn) for write_id, bucket, key, *turn in found]

    def living(self, write_ids: Sequence[int]) -> set[int]:
        query = f"SELECT id FROM writes WHERE id IN ({marks(write_ids)}) AND state BETWEEN 0 AND 4"
        return set(self._column(query, *write_ids))

    def urgent(self, write_ids: Sequence[int]) -> set[int]:
        query = f"SELECT id FROM writes WHERE id IN ({marks(write_ids)}) AND priority = ?"
        return set(self._column(query, *write_ids, Priority.URGENT))

    # What goes before others

    def prioritise(self, key: ObjectKey, now: float) -> None:
        """Put the pending writes of a key, and those that they wait for, before others: a request waits for them."""
        self.hurry(self._column(f"SELECT id FROM writes WHERE bucket = ? AND key = ? AND {PENDING}", *at(key)), now)
        self.has_due = True

    def raise_priority(self, bucket: str, start: bytes, stop: bytes, now: float) -> None:
        """Put pending writes in a range of keys, and those they wait for, first: at most RAISED_MAX, the oldest."""
        # A request or a person waits for them. Failed ones keep their place.
        found = self._column(
            f"SELECT id FROM writes WHERE bucket = ? AND key >= ? AND key < ? AND {PENDING} AND attempts = 0 "
            "AND sequence IS NOT NULL ORDER BY sequence LIMIT ?",
            *(bucket, start, stop, RAISED_MAX),
        )
        self.hurry(found, now)
        self.has_due = True

    def hurry(self, write_ids: Sequence[int], now: float) -> None:
        """Put writes before others, and those that they wait for before them, at most RAISED_MAX of these."""
        # Writes that they come to wait for later follow when they begin to wait (`Writes.wait_or_start`).
        left = RAISED_MAX
        while write_ids:
            self._rows.executemany(
                "UPDATE writes SET priority = ?, due_at = min(due_at, ?) WHERE id = ?",
                [(Priority.URGENT, now, write_id) for write_id in write_ids],
            )
            before = dict.fromkeys(one for write_id in write_ids for one in self.unhurried_before(write_id, left))
            write_ids = list(before)[:left]
            left -= len(write_ids)

    def unhurried_before(self, write_id: int, count_max: int = RAISED_MAX) -> Sequence[int]:
        """Return the writes that a write waits for, and that do not go before others yet."""
        row = self._row(
            "SELECT bucket, sequence, after_sequence, behind FROM writes WHERE id = ? AND after_sequence IS NOT NULL",
            write_id,
        )
        if row is None:
            return []
        bucket, sequence, after, behind = row
        found = self._column("SELECT id FROM writes WHERE sequence = ? AND priority <> ?", after, Priority.URGENT)
        if behind is not None:
            found += self._column(
                "SELECT id FROM writes WHERE bucket = ? AND key >= ? AND key < ? AND "
                f"{AWAITED_SINCE} < ? AND {PENDING} AND state >= 0 AND priority <> ? LIMIT ?",
                *(bucket, behind, behind + BEHIND_ALL, sequence, Priority.URGENT, count_max),
            )
        return [one for one in found if one != write_id]

    def try_now(self, bucket: str, prefix: str, now: float, besides: Iterable[int] = ()) -> None:
        """Make failed writes under a prefix (no bucket: everywhere) due now, and those with the ids `besides`."""
        hurried = "UPDATE writes SET due_at = ? WHERE id = ? AND state < 5 AND due_at > ?"
        self._rows.executemany(hurried, [(now, one, now) for one in besides])
        where, values = "1", list[Value]()
        if bucket:
            where, values = "bucket = ? AND key >= ? AND key < ?", [bucket, *keys_under(prefix)]
        failed = f"{where} AND state < 5 AND attempts > 0 AND due_at > ?"
        self._change(f"UPDATE writes SET due_at = ? WHERE {failed}", now, *values, now)
        self.has_due = True

    def look_at_uploads(self, slot: str, now: float) -> None:
        """Look at the uploads that clients have left alone, as a write finds no room."""
        # The origin may have ended some. At most _LOOKED_AT_MAX, those looked at longest ago.
        resting = (
            f"SELECT id FROM writes WHERE slot = ? AND {OPEN} AND state = 0 AND priority = ? AND attempts = 0 "
            "AND due_at > ? AND due_at <= ? ORDER BY due_at LIMIT ?"
        )
        until = now + UPLOAD_LOOK_SECONDS - IDLE_SECONDS_MIN
        looked_at = self._change(
            f"UPDATE writes SET due_at = ?, priority = ? WHERE id IN ({resting})",
            *(now, Priority.URGENT, slot, Priority.UPLOAD, now, until, _LOOKED_AT_MAX),
        )
        self.has_due = self.has_due or looked_at > 0

    def set_right(self, now: float) -> None:
        """Correct due times later than any can be. Writes that were not tried yet become due at once."""
        late = {"now": now, "retry": now + RETRY_SECONDS_MAX, "upload": now + UPLOAD_SECONDS_MAX}
        for (slot, bucket), priorities in self.lanes().items():
            for priority in priorities:  # by the index, which skips what is due soon
                from_at = late["retry"] if priority > Priority.LARGE else now
                self._rows.execute(
                    "UPDATE writes SET due_at = :now WHERE slot = :slot AND bucket = :bucket AND priority = :priority "
                    "AND due_at > :from AND state < 5 AND CASE WHEN pending = 1 AND attempts = 0 THEN 1 "
                    "WHEN priority = 6 OR (sequence IS NULL AND state < 3) THEN due_at > :upload "
                    "ELSE due_at > :retry END",
                    {**late, "slot": slot, "bucket": bucket, "priority": priority, "from": from_at},
                )
