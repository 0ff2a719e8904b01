"""Finds out whether everything that a manifest names is at the origin, so that the manifest may be shown there.

    a manifest's bytes → its names (checkpoints/manifests.py), once → HEAD of each, some at a time → found, missing

Findings are remembered while the manifest waits, so that each look asks little: first about a few of the missing files,
and about the others only once these have come. Files that this node acknowledged later, and sends behind the manifest,
are not waited for.

In a cluster a marker also waits for what other nodes have acknowledged before it (`OtherNodes`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from gateway.core.clock import Clock
from gateway.core.errors import RegistryAway
from gateway.core.model import ObjectKey
from gateway.core.steps import each, in_steps
from gateway.origin.client import Origin, OriginRequest, Purpose
from gateway.writeback.checkpoints.manifests import CONTENT_BYTES_MAX, NamedFiles, NotUnderstood, named_files
from gateway.writeback.flushing.flush_logger import FlushLogger
from gateway.writeback.flushing.requests import Requests, answered, first_key, head_of
from gateway.writeback.flushing.state import LookedFor, Lost, WriteRefused
from gateway.writeback.journal.records import Write
from gateway.writeback.order import root_of
from gateway.writeback.staged_file import BufferThreads

if TYPE_CHECKING:
    from gateway.writeback.journal.journal import Journal
    from gateway.writeback.journal.transaction import JournalTransaction

PARALLEL = 16
"""Questions about one manifest's files at a time."""

FIRST_LOOK = 16
"""Missing files that a look asks about first: while all are missing, it asks about no others."""

FOUND_AGAIN_SECONDS = 10.0
"""Older findings are confirmed once, when all else is there."""

REMEMBERED_NAMES_MAX = 400_000
"""The most names of all waiting manifests. With more, the one looked at longest ago is read again later."""

REMEMBERED_MAX = 1000
"""The most waiting manifests."""

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 5.0
AWAITED_PAUSE_SECONDS = 1.0
"""Seconds between two looks; the last is for a manifest that a request waits for."""

SMALL_BYTES = 8 * 1024
"""Up to this size a manifest is parsed at once, in a millisecond; a larger one on a thread."""

LONG_BYTES = 1024**2
"""Manifests beyond this size are read one at a time."""

NAMES_ASKED_MAX = 999
"""Missing files about which other nodes are asked at a time."""

BEHIND_ALL_WRITES = 2**62
"""An order behind that of all writes."""

Answer: TypeAlias = bool | WriteRefused | Lost
"""True if a file exists, False if it does not, or why the origin does not say."""


class FilePresence:
    """The files of a manifest, found at the origin or missing."""

    def __init__(
        self, origin: Origin, bucket: str, named: NamedFiles, *, slot: str, purpose: Purpose, clock: Clock
    ) -> None:
        self._origin = origin
        self._bucket = bucket
        self._slot = slot
        self._purpose = purpose
        self._clock = clock
        self._missing: dict[str, None] = dict.fromkeys([*named.keys, *(f"{one}/" for one in named.directories)])
        self._found: dict[str, float] = {}
        self.names_count = len(self._missing)
        self.looks = 0
        """Looks that came to their end."""
        self.missing_count = 0
        """The missing files by the last of them."""

    def missing(self, count_max: int) -> Sequence[str]:
        """Return the first missing files."""
        return list(islice((one for one in self._missing if not one.endswith("/")), count_max))

    async def look(self, ignored: Callable[[str], bool] = lambda _: False) -> LookedFor | WriteRefused | Lost:
        """Look for missing files, without those that `ignored` says to skip; the first time, for all of them."""
        began = self._clock.monotonic()
        while True:
            are_ignored = await in_steps(each(ignored, list(self._missing)))
            asked = [one for one, is_ignored in zip(self._missing, are_ignored, strict=True) if not is_ignored]
            failure = await self._seek(asked, FIRST_LOOK if self.looks else len(asked))
            if failure is not None:
                return failure
            left = [one for one in asked if one in self._missing]
            if left or not self._doubt_old(began):
                break
        self.looks, self.missing_count = self.looks + 1, len(left)
        return LookedFor(len(left), self.names_count, str(ObjectKey(self._bucket, left[0])) if left else "")

    def _doubt_old(self, began: float) -> bool:
        old = [one for one, at in self._found.items() if began - at > FOUND_AGAIN_SECONDS]
        for one in old:
            del self._found[one]
            self._missing[one] = None
        return bool(old)

    async def _seek(self, asked: Sequence[str], at_once: int) -> WriteRefused | Lost | None:
        """Ask about files, `at_once` a time, until none of a batch is there. Return why the origin does not say."""
        for first in range(0, len(asked), at_once or 1):
            answers = await self._ask(asked[first : first + at_once])
            for one, answer in answers.items():
                if answer is True:
                    del self._missing[one]
                    self._found[one] = self._clock.monotonic()
            failure = next((one for one in answers.values() if not isinstance(one, bool)), None)
            if failure is not None or not any(answers.values()):
                return failure
        return None

    async def _ask(self, names: Sequence[str]) -> Mapping[str, Answer]:
        """Return which names exist. If one question fails, the result may lack others."""
        waiting, answers = iter(names), dict[str, Answer]()

        async def ask() -> None:
            for one in waiting:
                answers[one] = await self._is_there(one)
                if not isinstance(answers[one], bool):
                    return

        asking = [asyncio.ensure_future(ask()) for _ in range(min(PARALLEL, len(names)))]
        try:
            await asyncio.gather(*asking)
        finally:
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return answers

    @answered
    async def _is_there(self, name: str) -> Answer:
        """Return whether an object exists, or, for a name that ends with a slash, a directory.

        A directory is looked for as S3 orders names: `step-1`, `step-1.pt` and `step-1/x` come before `step-10`.
        """
        if name.endswith("/"):
            beginning = name[:-1]
            first = await first_key(self._origin, self._bucket, beginning, self._slot, self._purpose)
            if isinstance(first, WriteRefused | Lost):
                return first
            return first is not None and first.startswith(beginning) and not first[len(beginning) :][:1].isalnum()
        request = OriginRequest("HEAD", self._bucket, name, purpose=self._purpose, slot=self._slot)
        head = await head_of(self._origin, request, believes_404=True)
        return head if isinstance(head, WriteRefused | Lost) else head is not None


async def understood(key: ObjectKey, content: bytes, threads: BufferThreads) -> NamedFiles | NotUnderstood:
    """Return the files that a manifest names; parse a large one on a thread."""
    if len(content) <= SMALL_BYTES:
        return named_files(key, content)
    return await threads.run(named_files, key, content)


class OtherNodes(Protocol):
    """The other nodes' pending writes (gateway/cluster/earlier_writes.py)."""

    async def earlier(self, marker: ObjectKey, prefix: str, order: int, *, hurries: bool) -> tuple[int, str] | None:
        """Return how many writes under a prefix come before a marker's order, and why it waits; None: none does.

        `hurries`: a request waits for the marker, so this node flushes these before others.
        """

    async def behind(self, marker: ObjectKey, order: int, names: Sequence[str]) -> frozenset[str]:
        """Return which of NAMES_ASKED_MAX keys at most have writes that wait for this marker. RegistryAway."""


class _Held(NamedTuple):
    """A marker that waits for writes of other nodes, by as many looks."""

    key: ObjectKey
    writes: int
    looks: int


class _Manifest(NamedTuple):
    """A manifest that was read. `presence` None: it is not understood."""

    key: ObjectKey
    etag: str
    presence: FilePresence | None


class ManifestFiles:
    """The pending manifests of the flushing process, by write id. It reads forgotten ones, and seeks files, again.

    `others` None: no other node writes.
    """

    def __init__(self, others: OtherNodes | None = None) -> None:
        self.others = others
        self._held = OrderedDict[int, _Held]()
        self._read = OrderedDict[int, _Manifest]()
        self._waived: set[int] = set()
        self._reading = asyncio.Lock()

    async def earlier(self, marker: Write, journal: Journal, *, hurries: bool) -> LookedFor | None:
        """Return what other nodes must flush before a marker of this one; None: nothing."""
        if self.others is None or marker.id in self._waived or journal.read(lambda tx: is_to_be_deleted(tx, marker)):
            return None
        prefix = marker.behind if marker.behind is not None else root_of(marker.key.key)
        order = marker.order if marker.is_acknowledged else BEHIND_ALL_WRITES  # its client waits
        held = await self.others.earlier(marker.key, prefix, order, hurries=hurries)
        before = self._held.pop(marker.id, None)
        if held is None:
            return None
        count, reason = held
        self._held[marker.id] = _Held(marker.key, count, before.looks + 1 if before is not None else 1)
        if len(self._held) > REMEMBERED_MAX:
            self._held.popitem(last=False)
        return LookedFor(count, reason=reason)

    async def look(
        self, write: Write, requests: Requests, journal: Journal, clock: Clock, log: FlushLogger
    ) -> LookedFor | WriteRefused | Lost:
        """Return whether all that this manifest names is there. BufferDamaged."""
        if write.id in self._waived or journal.read(lambda tx: is_to_be_deleted(tx, write)):
            return LookedFor()
        manifest = self._read.get(write.id)
        if manifest is None or manifest.etag != write.etag:  # an upload that was completed anew, for instance
            # One large manifest at a time: its bytes are in memory, and several times as many while it is parsed.
            async with self._reading if write.size_bytes > LONG_BYTES else nullcontext():
                manifest = await self._learn(write, requests, clock, log)
        if manifest.presence is None:
            return LookedFor()

        def ignored(name: str) -> bool:
            key = ObjectKey(write.key.bucket, name)
            return journal.pending_keys.may_be(key) and journal.read(lambda tx: comes_behind(tx, write, key))

        found = await manifest.presence.look(ignored)
        if self.others is None or not isinstance(found, LookedFor) or not found.missing:
            return found
        with suppress(RegistryAway):  # then they are waited for, and the next look asks again
            names = [one for one in manifest.presence.missing(NAMES_ASKED_MAX) if not ignored(one)]
            behind = await self.others.behind(write.key, write.order, names) if names else ()
            if behind:
                return await manifest.presence.look(lambda name: name in behind or ignored(name))
        return found

    async def _learn(self, write: Write, requests: Requests, clock: Clock, log: FlushLogger) -> _Manifest:
        named: NamedFiles | NotUnderstood = NotUnderstood("it is too long, or its parts are not here")
        content = await requests.content(write, CONTENT_BYTES_MAX)
        if content is not None:
            named = await understood(write.key, content, requests.threads)
        presence, bucket, slot = None, write.key.bucket, write.spec.slot
        if isinstance(named, NotUnderstood):
            log.not_understood(write, named.reason)
        else:
            presence = FilePresence(requests.origin, bucket, named, slot=slot, purpose=Purpose.FLUSH, clock=clock)
        manifest = self._read[write.id] = _Manifest(write.key, write.etag, presence)
        names = sum(one.presence.names_count for one in self._read.values() if one.presence is not None)
        while len(self._read) > 1 and (names > REMEMBERED_NAMES_MAX or len(self._read) > REMEMBERED_MAX):
            _, dropped = self._read.popitem(last=False)
            names -= dropped.presence.names_count if dropped.presence is not None else 0
        return manifest

    def awaits(self, write: Write, reason: str, log: FlushLogger) -> float:
        """Return the seconds until the next look."""
        manifest, held = self._read.get(write.id), self._held.get(write.id)
        looks = manifest.presence.looks if manifest is not None and manifest.presence is not None else 1
        looks = held.looks if held is not None else looks
        if looks == 1:
            log.awaits_files(write, reason, of_others=held is not None)
        return float(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(looks - 1, 10)))

    def waiting(self, covers: Callable[[ObjectKey], bool] = lambda _: True) -> Mapping[int, int]:
        """Return what was missing at the last look, for each manifest or marker that waits and whose key is covered."""
        read = [(one, found.presence) for one, found in self._read.items() if covers(found.key)]
        held = {one: found.writes for one, found in self._held.items() if covers(found.key)}
        return {one: presence.missing_count for one, presence in read if presence and presence.missing_count} | held

    def waive(self, write_id: int) -> None:
        """Send a manifest at once whatever it names, as a person has decided. Holds while this process runs."""
        self._waived.add(write_id)
        self.forget([write_id])

    def forget(self, write_ids: Iterable[int]) -> None:
        for one in write_ids:
            self._read.pop(one, None)
            self._held.pop(one, None)

    def settled(self, write_id: int) -> None:
        self._waived.discard(write_id)
        self.forget([write_id])


def is_to_be_deleted(tx: JournalTransaction, manifest: Write) -> bool:
    """Return whether a deletion waits behind the manifest: the files that it names may be deleted already."""
    latest = tx.writes.latest(manifest.key)
    return latest is not None and latest.deleted and latest.sequence > manifest.sequence


def comes_behind(tx: JournalTransaction, manifest: Write, key: ObjectKey) -> bool:
    """Tell whether a key's pending write waits for this manifest, an older one. Two that wait would never end."""
    pending = tx.writes.latest(key)
    if pending is None or pending.sequence < manifest.sequence:
        return False
    return pending.in_order or (pending.behind is not None and manifest.key.key.startswith(pending.behind))
