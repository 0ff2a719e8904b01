"""Snapshots as the admin port has them: made, listed, compared, deleted, taken out and brought in."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import partial
from typing import Any

import orjson
import structlog

from gateway.api import documents as to
from gateway.core.errors import NoSuchSnapshot, OriginError, SnapshotConflict, SnapshotError, StoreUnavailable
from gateway.jobs.job import Job, JobDependencies, steadily
from gateway.jobs.runner import Jobs
from gateway.jobs.snapshot_job import check_free, pages
from gateway.metadata.listing.pages import END, key_successor
from gateway.metadata.snapshots.diff import differences
from gateway.metadata.snapshots.ndjson import BadLine, Header, LineReader, header_line, object_lines
from gateway.metadata.snapshots.registry import check_covers, missing
from gateway.metadata.snapshots.staging import Origins, SnapshotStaging
from gateway.metadata.snapshots.store import Snapshot, valid_name
from gateway.policy.slots import Prefix, Slot
from gateway.s3.list_result import ListedEntry

__all__ = ["BadLine", "SnapshotService"]

IMPORTS_MAX = 4
_INSERTED_AT_ONCE = 512
_LINES_PER_PIECE = 64
_log = structlog.get_logger("forebay.snapshots")


class SnapshotService:
    """All of it. Names are checked here: ValueError for what is none."""

    def __init__(self, dependencies: JobDependencies, jobs: Jobs) -> None:
        self._dependencies = dependencies
        self._jobs = jobs
        self._store = dependencies.snapshots
        self._homes = dependencies.homes
        self._imports = 0

    async def all(self) -> list[to.SnapshotDocument]:
        """Return every snapshot, by name."""
        found = []
        for one in await asyncio.to_thread(self._store.all):
            known = one.manifest.document() if one.manifest is not None else {"name": one.name}
            found.append(to.SnapshotDocument(**known, problem=one.problem, slots=self._slots_of(one.name)))
        return found

    async def one(self, name: str) -> to.SnapshotDocument:
        """Return one of them; NoSuchSnapshot."""
        valid_name(name)
        found = [one for one in await self.all() if one.name == name]
        if not found:
            raise NoSuchSnapshot(f"there is no snapshot {name!r}")
        return found[0]

    async def slots(self, *, whole: bool = False) -> list[to.FrozenSlot]:
        """Return the slots that are frozen, and the problems of their snapshots.

        With `whole`, read all of each snapshot to know them, and the beginning otherwise.
        """
        return [
            to.FrozenSlot(
                slot=slot.name,
                snapshot=slot.snapshot or "",
                problem=await asyncio.to_thread(self._problem, slot, whole=whole),
            )
            for slot in self._frozen()
        ]

    async def warn(self) -> None:
        """Log which slots cannot be answered, and what to do about it."""
        for one in await self.slots(whole=True):
            if one.problem is not None:
                _log.warning("a slot cannot be served from its snapshot", slot=one.slot, problem=one.problem)

    def _frozen(self) -> list[Slot]:
        return [slot for slot in self._dependencies.slots if slot.consistency == "snapshot"]

    async def create(self, name: str, prefix: str, *, allow_empty: bool = False) -> Job:
        """Begin to make one; SnapshotConflict, TooManyJobs, StoreUnavailable."""
        return await self._jobs.start_snapshot(valid_name(name), prefix, allow_empty=allow_empty)

    async def delete(self, name: str, *, force: bool) -> None:
        """Delete one for good; SnapshotConflict while it freezes a slot, unless `force`. NoSuchSnapshot."""
        slots = self._slots_of(valid_name(name))
        if slots and not force:
            await self.one(name)
            raise SnapshotConflict(f"snapshot {name!r} freezes the slot {', '.join(slots)}: --force deletes it anyway")
        await asyncio.to_thread(self._store.delete, name)
        _log.info("a snapshot was deleted", name=name)

    async def exported(self, name: str) -> AsyncGenerator[bytes, None]:
        """One as JSON lines, in pieces; NoSuchSnapshot, SnapshotUnusable, StoreUnavailable before the first."""
        await self._check(name)
        return self._lines(name)

    async def compared(self, name: str, other: str | None) -> AsyncGenerator[bytes, None]:
        """Yield the differences to another snapshot, or to the origin now, as pieces of JSON lines.

        Raise SnapshotError, StoreUnavailable or ValueError before the first piece; later, errors of the origin.
        """
        prefix = await self._check(name)
        if other is not None and (await self._check(other)).bucket != prefix.bucket:
            raise ValueError(f"snapshots {name!r} and {other!r} are of two buckets")
        after = self._entries(other) if other is not None else pages(self._dependencies, prefix, None)
        return _in_pieces(differences(self._entries(name), after))

    async def imported(self, name: str, pieces: AsyncIterator[bytes]) -> to.SnapshotDocument:
        """Make one of JSON lines, in any order of keys; BadLine, SnapshotConflict, SnapshotError, StoreUnavailable."""
        await check_free(self._dependencies, valid_name(name))
        if self._imports >= IMPORTS_MAX:
            raise SnapshotConflict(f"{IMPORTS_MAX} snapshots are being imported: wait for one")
        self._imports += 1
        try:
            return await self._imported(name, pieces)
        finally:
            self._imports -= 1

    async def _imported(self, name: str, pieces: AsyncIterator[bytes]) -> to.SnapshotDocument:
        lines, now = LineReader(), self._dependencies.clock.now()
        begun: SnapshotStaging | None = None
        try:
            async for piece in pieces:
                found = await asyncio.to_thread(list, lines.feed(piece))
                if begun is None and lines.header is not None:
                    begun = await self._begun(name, lines.header, now)
                if begun is not None:
                    await _insert(begun, found)
            found = list(lines.end())
            if lines.header is None:
                raise BadLine("line 1: there is no header")
            begun = begun or await self._begun(name, lines.header, now)
            await _insert(begun, found)
            return await self._published(begun, lines.header, now)
        except BaseException:
            if begun is not None:
                await asyncio.to_thread(begun.discard)
            raise

    async def _begun(self, name: str, header: Header, now: float) -> SnapshotStaging:
        started_at = header.started_at if header.started_at is not None else now
        origins = Origins(name, str(header.prefix), header.origin, started_at)
        begin = partial(SnapshotStaging.begin, self._store, f"import-{secrets.token_hex(8)}", origins)
        return await steadily(begin, unwanted=SnapshotStaging.leave)

    async def _published(self, begun: SnapshotStaging, header: Header, now: float) -> to.SnapshotDocument:
        expected = None
        if header.objects is not None and header.digest is not None:
            expected = header.objects, header.digest
        ended_at = header.ended_at if header.ended_at is not None else now
        manifest = await steadily(partial(begun.publish, ended_at, expected=expected))
        _log.info("a snapshot was imported", name=manifest.name, prefix=manifest.prefix, objects=manifest.objects)
        return await self.one(manifest.name)

    async def _check(self, name: str) -> Prefix:
        """Return the prefix of a snapshot that can be read."""
        return (await asyncio.to_thread(self._store.check, valid_name(name))).scope

    async def _entries(self, name: str) -> AsyncGenerator[list[ListedEntry], None]:
        snapshot = await steadily(partial(self._store.open, name), unwanted=Snapshot.close)
        try:
            start = b""
            while part := await steadily(partial(snapshot.data.part, start, END)):
                yield part
                start = key_successor(part[-1].key)
        finally:
            snapshot.close()

    async def _lines(self, name: str) -> AsyncGenerator[bytes, None]:
        snapshot = await steadily(partial(self._store.open, name), unwanted=Snapshot.close)
        try:
            templates, start = snapshot.data.templates, b""
            yield header_line(snapshot.manifest, templates)
            while part := await steadily(partial(snapshot.data.part, start, END)):
                yield await asyncio.to_thread(object_lines, part, templates)
                start = key_successor(part[-1].key)
        finally:
            snapshot.close()

    def _slots_of(self, name: str) -> list[str]:
        return [slot.name for slot in self._frozen() if slot.snapshot == name]

    def _problem(self, slot: Slot, *, whole: bool) -> str | None:
        try:
            check_covers(self._store.check(slot.snapshot or "", whole=whole), slot, self._homes)
        except NoSuchSnapshot:
            return missing(slot)
        except (SnapshotError, StoreUnavailable) as error:
            return str(error)
        return None


async def _insert(staging: SnapshotStaging, found: Sequence[tuple[int, ListedEntry]]) -> None:
    """Add objects; BadLine names the line whose key has come before."""
    for start in range(0, len(found), _INSERTED_AT_ONCE):
        rows = found[start : start + _INSERTED_AT_ONCE]
        double = await steadily(partial(staging.insert, [entry for _, entry in rows]))
        if double is not None:
            number, entry = rows[double]
            raise BadLine(f"line {number}: the key {entry.key.decode()!r} has come before")


async def _in_pieces(documents: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """As lines; what goes wrong in the midst of them is the last one."""
    lines: list[bytes] = []
    try:
        async for document in documents:
            lines.append(orjson.dumps(document) + b"\n")
            if len(lines) == _LINES_PER_PIECE:
                yield b"".join(lines)
                lines.clear()
    except (OriginError, SnapshotError, StoreUnavailable) as error:
        lines.append(orjson.dumps({"error": f"it could not be read on: {error}"}) + b"\n")
    yield b"".join(lines)
