"""What each slot has in the buffer, counted in the transactions that change it (schema.py's triggers)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.writeback.journal import codec
from gateway.writeback.journal.file_rows import STARTABLE, URGENT, FileRows


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of staged files that something refers to, a file that copies share once; objects and tombstones that are
    pending."""

    staged_bytes: int = 0
    objects: int = 0


class UsageRows(FileRows):
    """One transaction's view."""

    def usage(self, slot: str) -> Usage:
        """Of one slot: a look-up, however much is pending."""
        row = self._row("SELECT staged_bytes, objects FROM usage WHERE slot = ?", slot)
        return Usage(*row) if row else Usage()

    def usages(self) -> Mapping[str, Usage]:
        """Of every slot that ever had something here."""
        found = self._rows.execute("SELECT slot, staged_bytes, objects FROM usage")
        return {slot: Usage(staged_bytes, objects) for slot, staged_bytes, objects in found}

    def oldest(self, slot: str) -> float | None:
        """When the oldest write was acknowledged that is still on its way to the origin (seconds since 1970).

        Conflicts are not on their way, and parts of open uploads are no object yet. None: nothing is.
        """
        first = "SELECT sequence, record FROM objects WHERE slot = ? AND startable = ? ORDER BY sequence LIMIT 1"
        rows = [row for how in (STARTABLE, URGENT) if (row := self._row(first, slot, how)) is not None]
        return codec.unpack_object(*min(rows)).acknowledged_at if rows else None

    def counted(self) -> Mapping[str, Usage]:
        """The same as `usages`, by counting all of it, without slots that have nothing."""
        sums = dict(self._rows.execute("SELECT slot, sum(size_bytes) FROM files GROUP BY slot").fetchall())
        counts = dict(self._rows.execute("SELECT slot, count(*) FROM objects GROUP BY slot").fetchall())
        return {slot: Usage(sums.get(slot, 0), counts.get(slot, 0)) for slot in sums.keys() | counts.keys()}

    def recount(self) -> None:
        """Have the counters say what there is, whatever they said."""
        counted = self.counted()
        self._rows.execute("DELETE FROM usage")
        rows = [(slot, usage.staged_bytes, usage.objects) for slot, usage in counted.items()]
        self._rows.executemany("INSERT INTO usage VALUES (?, ?, ?)", rows)
