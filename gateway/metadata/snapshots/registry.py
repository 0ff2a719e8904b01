"""The snapshots that the slots of this node name, as one worker has them: open, and read without waiting.

Whether snapshots have come or gone is one look at shared memory; only then is the directory looked at, in a thread.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from gateway.core.clock import Clock, SystemClock
from gateway.core.errors import NoSuchSnapshot, S3Error, SnapshotError, SnapshotUnusable, StoreUnavailable
from gateway.core.model import Homes, ObjectKey, ObjectVersion
from gateway.metadata.entries import ObjectHead
from gateway.metadata.listing.records import etag_and_size, modified_of
from gateway.metadata.snapshots.store import Manifest, Snapshot, SnapshotStore
from gateway.policy.slots import Slot
from gateway.s3.error_codes import s3_error
from gateway.telemetry import metrics

V = TypeVar("V")

HEADS_MAX = 16_384
"""Heads kept per slot: about a kilobyte of memory each."""

LOST_MAX = 16_384

LOOK_SECONDS = 1.0
"""A snapshot that was missing, or that the disk did not give, is looked for again no more often."""

NOT_USABLE_STATUS = 409
"""Clients do not retry a 409: a retry fails until an operator has made the snapshot."""


class SnapshotObject(NamedTuple):
    """One object as it was listed; `version.etag` as the listing gave it, `record` as the snapshot has it."""

    version: ObjectVersion
    record: bytes

    @property
    def modified(self) -> str:
        """The date as it was listed."""
        return modified_of(self.record)


class OpenSnapshot:
    """An open snapshot for one slot.

    Heads of its objects never change, so recently used ones stay in memory; `lost` are the keys of objects that the
    origin turned out not to have any more.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.manifest = snapshot.manifest
        self.lost: dict[str, None] = {}
        self._bucket = snapshot.manifest.scope.bucket
        self._heads: tuple[dict[str, ObjectHead], dict[str, ObjectHead]] = ({}, {})

    def find(self, key: str) -> SnapshotObject | None:
        """Return the object that the snapshot has of a key, or None. S3Error: damaged, or the disk fails."""
        try:
            record = self.snapshot.data.record(key.encode("utf-8", "surrogatepass"))
            if record is None:
                return None
            etag, size_bytes = etag_and_size(record)
        except (struct.error, SnapshotUnusable, StoreUnavailable) as error:
            raise unusable(self.manifest.name, error) from error
        return SnapshotObject(ObjectVersion(ObjectKey(self._bucket, key), etag, size_bytes), record)

    def head(self, key: str, *, with_checksums: bool) -> ObjectHead | None:
        """Return the kept head of an object, with or without the checksums, for which only some callers ask."""
        return self._heads[with_checksums].get(key)

    def keep(self, head: ObjectHead, *, with_checksums: bool) -> None:
        _put(self._heads[with_checksums], head.version.key.key, head, HEADS_MAX)

    def lose(self, key: str) -> None:
        """Note that the origin has lost a frozen object; some of it may still be cached."""
        _put(self.lost, key, None, LOST_MAX)


class SnapshotRegistry:
    """All of them. Use `refresh` at the start, so that requests need not wait, and `close` at the end.

    Without a `store`, where the cache directory cannot be used, requests in slots that name a snapshot fail. Call
    `apply_settings` after a change of slots.
    """

    def __init__(
        self,
        store: SnapshotStore | None,
        slots: Iterable[Slot],
        clock: Clock,
        homes: Homes | None = None,
    ) -> None:
        """`homes` tells where buckets are: a snapshot from another home is not used. None: unknown."""
        self._homes = homes or Homes("")
        self._store = store
        self._clock = clock
        self._problems: dict[str, SnapshotError | StoreUnavailable] = {}
        self._looked = 0.0
        self._slots = slots
        self._open: dict[str, OpenSnapshot] = {}
        self._seen = -1
        self._refreshing = asyncio.Lock()

    @classmethod
    def switched_off(cls) -> SnapshotRegistry:
        """One without a cache directory."""
        return cls(None, (), SystemClock())

    def of(self, slot: Slot) -> OpenSnapshot | None:
        """Return the slot's open snapshot if nothing has changed since; None: await `opened`."""
        if self._store is None or self._store.changes.number != self._seen:
            return None
        return self._open.get(slot.name)

    async def opened(self, slot: Slot) -> OpenSnapshot:
        """Return the snapshot of a slot; S3Error 409 when there is none that can be used, 503 when the disk fails."""
        if self._store is None:
            message = f"The slot {slot.name!r} is frozen; its snapshot lies in a cache directory that cannot be used."
            raise s3_error("ServiceUnavailable", message)
        opened = self.of(slot)
        if opened is not None:
            return opened
        async with self._refreshing:
            opened = self.of(slot)
            if opened is not None:
                return opened
            if self._is_to_be_looked_at(self._store, slot):
                await self._refresh(self._store)
            opened = self._open.get(slot.name)
            if opened is None:
                raise self._refusal(slot, self._problems[slot.name])
            return opened

    @contextmanager
    def holding(self, opened: OpenSnapshot) -> Iterator[OpenSnapshot]:
        """Keep a snapshot open over awaits, even if deleted, until the context ends. S3Error: deleted just before."""
        try:
            opened.snapshot.hold()
        except NoSuchSnapshot as error:
            raise unusable(opened.manifest.name, error) from None
        try:
            yield opened
        finally:
            opened.snapshot.close()

    async def apply_settings(self, open_store: Callable[[], SnapshotStore]) -> None:
        """Open the snapshots that changed slots name. `open_store` is called when first needed, in a thread."""
        if self._store is None:
            if not self._frozen():
                return
            self._store = await asyncio.to_thread(open_store)
        self._seen = -1
        await self.refresh()

    def _frozen(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.consistency == "snapshot"]

    async def refresh(self) -> None:
        if self._store is None:
            return
        async with self._refreshing:
            await self._refresh(self._store)

    async def close(self) -> None:
        async with self._refreshing:
            for name in list(self._open):
                self._drop(name)
            if self._store is not None:
                self._store.close()

    async def _refresh(self, store: SnapshotStore) -> None:
        """Close removed snapshots and open new ones. Errors reach the requests that need the snapshot."""
        number, self._looked = store.changes.number, self._clock.monotonic()
        frozen = self._frozen()
        for name in self._open.keys() - {slot.name for slot in frozen}:
            self._drop(name)
        for slot in frozen:
            try:
                await self._take(store, slot)
                self._problems.pop(slot.name, None)
            except (SnapshotError, StoreUnavailable) as error:
                self._problems[slot.name] = error
                self._drop(slot.name)
        self._seen = number

    def _is_to_be_looked_at(self, store: SnapshotStore, slot: Slot) -> bool:
        if store.changes.number != self._seen or slot.name not in self._problems:
            return True
        return self._clock.monotonic() - self._looked >= LOOK_SECONDS

    def _refusal(self, slot: Slot, error: Exception) -> S3Error:
        if isinstance(error, NoSuchSnapshot):
            metrics.SNAPSHOT_REFUSALS.add(1, slot.name, "missing")
            return s3_error("NoSuchSnapshot", missing(slot), status=NOT_USABLE_STATUS)
        metrics.SNAPSHOT_REFUSALS.add(1, slot.name, "unusable")
        return unusable(slot.snapshot or "", error)

    async def _take(self, store: SnapshotStore, slot: Slot) -> None:
        snapshot = await self._opening(store, slot.snapshot or "")
        known = self._open.get(slot.name)
        if known is not None and known.manifest.id == snapshot.manifest.id:
            snapshot.close()  # it is open already
            return
        try:
            check_covers(snapshot.manifest, slot, self._homes)
        except SnapshotUnusable:
            snapshot.close()
            raise
        self._drop(slot.name)
        self._open[slot.name] = OpenSnapshot(snapshot)

    async def _opening(self, store: SnapshotStore, name: str) -> Snapshot:
        opening = asyncio.ensure_future(asyncio.to_thread(store.open, name))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_let_go)
            raise

    def _drop(self, name: str) -> None:
        known = self._open.pop(name, None)
        if known is not None:
            known.snapshot.close()


def _let_go(opening: asyncio.Future[Snapshot]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def check_covers(manifest: Manifest, slot: Slot, homes: Homes) -> None:
    """Raise SnapshotUnusable when the snapshot does not cover the slot, or was made of the bucket at another home.

    An imported snapshot has no home here: its importer vouches for the bucket.
    """
    home = homes.of(slot.prefix.bucket or "")
    if manifest.made_by and home and manifest.origin and manifest.origin != home:
        raise SnapshotUnusable(
            f"snapshot {slot.snapshot!r} is of {manifest.prefix} at {manifest.origin}, and the bucket is at {home} "
            f"(slot {slot.name!r}). Make another; or export and import this one, if both are the same store"
        )
    if not manifest.scope.covers(slot.prefix.bucket, slot.prefix.key_prefix):
        raise SnapshotUnusable(
            f"snapshot {slot.snapshot!r} is of {manifest.prefix}, which does not cover {slot.prefix} "
            f"(slot {slot.name!r})"
        )


def unusable(name: str, error: Exception) -> S3Error:
    """Return the error for a snapshot that exists and cannot be used: 409, or 503 while the disk fails."""
    if isinstance(error, StoreUnavailable):
        return s3_error("ServiceUnavailable", f"The snapshot {name!r} cannot be read: {error}")
    message = f"This is frozen by the snapshot {name!r}, which cannot be used: {error}"
    return s3_error("SnapshotUnusable", message, status=NOT_USABLE_STATUS)


def missing(slot: Slot) -> str:
    """Return the message for requests in a slot whose snapshot does not exist."""
    return (
        f"The slot {slot.name!r} is frozen by the snapshot {slot.snapshot!r}, which does not exist. "
        f"Make it: forebay snapshot create {slot.snapshot} {slot.prefix}"
    )


def _put(kept: dict[str, V], key: str, value: V, count_max: int) -> None:
    kept[key] = value
    if len(kept) > count_max:
        del kept[next(iter(kept))]
