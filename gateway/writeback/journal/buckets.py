"""The facts about buckets, and this gateway's last changes to keys: the tables `profiles` and `origin`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged
from gateway.core.model import ObjectKey
from gateway.writeback.journal import codec
from gateway.writeback.journal.records import (
    LAST_OWN_WRITE_KEPT_SECONDS,
    BucketCapabilities,
    LastOwnWrite,
)
from gateway.writeback.journal.rows import OPEN, Table, at, decoded
from gateway.writeback.key_forms import bounded, forms_of, refused_forms

LAST_OWN_WRITES_MAX = 50_000
"""The most own writes, some 300 bytes each. With more, the oldest are forgotten early: then a write may pass for
another writer's, which loses nothing."""


class Buckets(Table):
    def capabilities(self, bucket: str) -> BucketCapabilities | None:
        """Return the facts learned of a bucket. An unreadable row counts as unknown: the next write learns it anew."""
        row = self._row("SELECT record FROM profiles WHERE bucket = ?", bucket)
        return _capabilities(bucket, row[0]) if row else None

    def all_capabilities(self) -> Sequence[tuple[str, BucketCapabilities]]:
        found = self._all("SELECT bucket, record FROM profiles ORDER BY bucket")
        read = [(bucket, _capabilities(bucket, record)) for bucket, record in found]
        return [(bucket, capabilities) for bucket, capabilities in read if capabilities is not None]

    def learn(self, bucket: str, capabilities: BucketCapabilities) -> None:
        """Record a bucket's latest answer; conditions stay if it has none, classes taken and forms refused always."""
        before = self.capabilities(bucket)
        if before is not None:
            classes = before.storage_classes | capabilities.storage_classes
            capabilities = replace(capabilities, storage_classes=classes, refused_forms=before.refused_forms)
            if not capabilities.conditions.learned_at:
                capabilities = replace(capabilities, conditions=before.conditions)
        self._set(bucket, capabilities)

    def amend(self, bucket: str, **facts: Any) -> None:
        """Record some facts about a known bucket, and leave the others as they are by now."""
        known = self.capabilities(bucket)
        if known is not None:
            self.learn(bucket, replace(known, **facts))

    def refused_for_good(self, key: ObjectKey, code: str) -> None:
        """Note that a bucket refuses a key for good: it is asked before the next such write is acknowledged."""
        known = self.capabilities(key.bucket)
        if known is not None:
            forms = bounded(known.refused_forms | refused_forms(key.key, code))
            self._set(key.bucket, replace(known, refused_forms=forms))

    def _set(self, bucket: str, capabilities: BucketCapabilities) -> None:
        self._put("profiles", bucket, codec.pack_capabilities(bucket, capabilities))

    def forget(self, buckets: Callable[[str], bool]) -> None:
        """Forget all that was learned of these buckets, and own writes there."""
        for table in ("profiles", "origin"):
            known = filter(buckets, self._column(f"SELECT DISTINCT bucket FROM {table}"))
            self._rows.executemany(f"DELETE FROM {table} WHERE bucket = ?", [(one,) for one in known])

    def last_own_write(self, key: ObjectKey) -> LastOwnWrite | None:
        """Return the last own write of a key, as far as remembered; for a damaged row, one that is not `known`."""
        row = self._row("SELECT record FROM origin WHERE bucket = ? AND key = ?", *at(key))
        return as_last_own_write(key, math.inf, row[0]) if row else None

    def own_writes_count(self) -> int:
        count: int = self._value("SELECT count(*) FROM origin")
        return count

    def record_own_write(self, key: ObjectKey, own: LastOwnWrite) -> None:
        """Record that this gateway has changed a key at the origin, or, if `own` is not `known`, may have."""
        before = self.last_own_write(key) if not own.known else None
        if before is not None:
            own = replace(own, etag=before.etag)
        if own.known and own.etag is not None:
            taken = self.capabilities(key.bucket)
            if taken is not None and taken.refuses(key.key):
                self._set(key.bucket, replace(taken, refused_forms=taken.refused_forms - forms_of(key.key)))
        looked_at = own.at + own.kept_seconds - LAST_OWN_WRITE_KEPT_SECONDS
        self._put("origin", *at(key), looked_at, codec.pack_last_own_write(key, own))

    def forget_old(self, moment: Moment, count_max: int) -> int:
        """Forget own writes that no request can need. Return how many rows it took."""
        # Those of keys with an open upload stay while there is room.
        open_upload = f"SELECT 1 FROM writes WHERE bucket = origin.bucket AND key = origin.key AND {OPEN}"
        old = f"SELECT bucket, key, record FROM origin WHERE at < ? AND NOT EXISTS ({open_upload}) LIMIT ?"
        found = self._all(old, moment.at - LAST_OWN_WRITE_KEPT_SECONDS, count_max)
        for bucket, key, record in found:
            own = as_last_own_write(ObjectKey(bucket, decoded(key)), 0.0, record)
            if moment.passed_since(own.moment or Moment(own.at)) >= own.kept_seconds:
                self._change("DELETE FROM origin WHERE bucket = ? AND key = ?", bucket, key)
            else:  # the clock was set since
                self._change("UPDATE origin SET at = ? WHERE bucket = ? AND key = ?", moment.at, bucket, key)
        too_many = min(count_max, self.own_writes_count() - LAST_OWN_WRITES_MAX)
        if too_many > 0:
            oldest = "SELECT bucket, key FROM origin ORDER BY at LIMIT ?"
            self._change(f"DELETE FROM origin WHERE (bucket, key) IN ({oldest})", too_many)
        return max(len(found), too_many)


def _capabilities(bucket: str, record: bytes) -> BucketCapabilities | None:
    try:
        return codec.unpack_capabilities(bucket, record)
    except BufferDamaged:
        return None


def as_last_own_write(key: ObjectKey, at: float, record: bytes) -> LastOwnWrite:
    try:
        return codec.unpack_last_own_write(key, record)
    except BufferDamaged:
        return LastOwnWrite(at, None, known=False)
