"""Whether everything that a manifest names is at the origin: what may be shown there, and what waits.

    a manifest's bytes → what it names (checkpoints/manifests.py), once → HEAD of each, some at a time → found, missing

What was found is remembered while the rest is waited for, so that whoever waits asks little: a few of those that were
missing first, and the others only once these have come. What this node has acknowledged later, and sends behind the
manifest, is not waited for.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from gateway.core.clock import Clock
from gateway.core.errors import OriginBodyError, OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.core.steps import each, in_steps
from gateway.origin.client import Origin, OriginRequest, OriginResponse, Purpose
from gateway.s3.xml import error_code_of, text_of
from gateway.writeback.checkpoints.manifests import CONTENT_BYTES_MAX, NamedFiles, NotUnderstood, named_files
from gateway.writeback.flushing.failures import kind_of_answer, kind_of_error
from gateway.writeback.flushing.state import LookedFor, Lost, Refused
from gateway.writeback.journal.records import Write
from gateway.writeback.threads import BufferThreads

if TYPE_CHECKING:
    from gateway.writeback.flushing.requests import Requests
    from gateway.writeback.journal.journal import Journal
    from gateway.writeback.journal.transaction import JournalTransaction

PARALLEL = 16
"""Questions about one manifest's files at a time."""

FIRST_LOOK = 16
"""Of what was missing so many are asked about first: while they all are, nothing else is."""

FOUND_AGAIN_SECONDS = 10.0
"""What was found longer ago than this is looked for again, once, when all else is there."""

REMEMBERED_NAMES_MAX = 400_000
"""Of all manifests that wait: with more, the one that was looked at longest ago is read again."""

REMEMBERED_MAX = 1000
"""Manifests."""

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 5.0
AWAITED_PAUSE_SECONDS = 1.0
"""From one look to the next: the last where somebody waits."""

SMALL_BYTES = 8 * 1024
"""So much is understood at once, in a millisecond; more on a thread."""

LONG_BYTES = 1024**2
"""Of what is longer one is read at a time."""

_ANSWER_BYTES_MAX = 64 * 1024

Answer: TypeAlias = bool | Refused | Lost
"""Whether it is there, or why nobody knows."""


class Presence:
    """What of a manifest's files was found at the origin."""

    def __init__(self, bucket: str, named: NamedFiles) -> None:
        self._bucket = bucket
        self._missing: dict[str, None] = dict.fromkeys([*named.keys, *(f"{one}/" for one in named.directories)])
        self._found: dict[str, float] = {}
        self.names_count = len(self._missing)

    async def look(
        self,
        origin: Origin,
        slot: str,
        purpose: Purpose,
        clock: Clock,
        ignored: Callable[[str], bool],
        *,
        is_first: bool,
    ) -> LookedFor | Refused | Lost:
        """`ignored` says of a key whether nobody has to wait for it. The first time all others are asked about."""
        began = clock.monotonic()
        while True:
            are_ignored = await in_steps(each(ignored, list(self._missing)))
            asked = [one for one, is_ignored in zip(self._missing, are_ignored, strict=True) if not is_ignored]
            failure = await self._ask(
                origin, asked, slot, purpose, clock, at_once=len(asked) if is_first else FIRST_LOOK
            )
            if failure is not None:
                return failure
            left = [one for one in asked if one in self._missing]
            if left or not self._doubt_old(began):
                break
        example = str(ObjectKey(self._bucket, left[0])) if left else ""
        return LookedFor(len(left), self.names_count, example)

    def _doubt_old(self, began: float) -> bool:
        old = [one for one, at in self._found.items() if began - at > FOUND_AGAIN_SECONDS]
        for one in old:
            del self._found[one]
            self._missing[one] = None
        return bool(old)

    async def _ask(
        self, origin: Origin, asked: Sequence[str], slot: str, purpose: Purpose, clock: Clock, *, at_once: int
    ) -> Refused | Lost | None:
        """About what is missing, some at once, until all of some still are. Why nobody knows, if nobody does."""
        for first in range(0, len(asked), at_once or 1):
            answers = await _asked(origin, self._bucket, asked[first : first + at_once], slot, purpose)
            for one, answer in answers.items():
                if answer is True:
                    del self._missing[one]
                    self._found[one] = clock.monotonic()
            failure = next((one for one in answers.values() if not isinstance(one, bool)), None)
            if failure is not None or not any(answers.values()):
                return failure
        return None


async def _asked(
    origin: Origin, bucket: str, names: Sequence[str], slot: str, purpose: Purpose
) -> Mapping[str, Answer]:
    """Of some names whether they are there; where nobody can tell of one, the others may be left out."""
    waiting, answers = iter(names), dict[str, Answer]()

    async def ask() -> None:
        for one in waiting:
            answers[one] = await _is_there(origin, bucket, one, slot, purpose)
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


async def _is_there(origin: Origin, bucket: str, name: str, slot: str, purpose: Purpose) -> Answer:
    """A name that ends with a slash is a directory's."""
    try:
        if name.endswith("/"):
            return await _has_any(origin, bucket, name[:-1], slot, purpose)
        request = OriginRequest("HEAD", bucket, name, purpose=purpose, slot=slot)
        async with await origin.send(request) as response:
            return response.status == 200 if response.status in (200, 404) else await _failure(response)
    except (OriginUnreachable, OriginBodyError, OSError) as error:
        return Lost(str(error), kind_of_error(error))


async def _has_any(origin: Origin, bucket: str, beginning: str, slot: str, purpose: Purpose) -> Answer:
    """In S3's order `step-1`, `step-1.pt` and `step-1/x` come before `step-10`."""
    query = [("list-type", "2"), ("prefix", beginning), ("max-keys", "1")]
    async with await origin.send(OriginRequest("GET", bucket, None, query, purpose=purpose, slot=slot)) as response:
        if response.status != 200:
            return await _failure(response)
        listed = text_of(await response.read(_ANSWER_BYTES_MAX), "Key")
    return listed is not None and listed.startswith(beginning) and not listed[len(beginning) :][:1].isalnum()


async def _failure(response: OriginResponse) -> Refused | Lost:
    document = await response.read(_ANSWER_BYTES_MAX)
    code = error_code_of(document) or f"HTTP {response.status}"
    kind = kind_of_answer(response.status, code, document)
    return Lost(code, kind) if response.status >= 500 or response.status == 429 else Refused(code, kind)


async def understood(key: ObjectKey, content: bytes, threads: BufferThreads) -> NamedFiles | NotUnderstood:
    """What a manifest names; of a long one found out on a thread."""
    if len(content) <= SMALL_BYTES:
        return named_files(key, content)
    return await threads.run(named_files, key, content)


class ManifestObserver(Protocol):
    """What is told of manifests."""

    def not_understood(self, write: Write, reason: str) -> None:
        """Nobody knows what it names: it goes in the order of arrival."""

    def awaits_files(self, write: Write, reason: str) -> None:
        """It waits, the first time."""


@dataclass(slots=True)
class _Known:
    """A manifest that was read. `presence` None: it is not understood."""

    key: ObjectKey
    etag: str
    presence: Presence | None
    looks: int = 0
    missing: int = 0


class ManifestFiles:
    """Of the manifests that are pending, by the ids of their writes; in the process that flushes them. It forgets
    nothing that matters: what is not known any more is read, and looked for, again."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._waived: set[int] = set()
        self._reading = asyncio.Lock()

    async def look(
        self, write: Write, requests: Requests, journal: Journal, clock: Clock, observer: ManifestObserver
    ) -> LookedFor | Refused | Lost:
        """Whether all is there that this manifest names. BufferDamaged."""
        if write.id in self._waived or journal.read(lambda tx: is_to_be_deleted(tx, write)):
            return LookedFor()
        known = self._known.get(write.id)
        if known is None or known.etag != write.etag:  # of an upload that is completed anew, say
            known = await self._read(write, requests, observer)
        if known.presence is None:
            return LookedFor()

        def ignored(name: str) -> bool:
            key = ObjectKey(write.key.bucket, name)
            return journal.pending_keys.may_be(key) and journal.read(lambda tx: comes_behind(tx, write, key))

        found = await known.presence.look(
            requests.origin, write.spec.slot, Purpose.FLUSH, clock, ignored, is_first=known.looks == 0
        )
        if isinstance(found, LookedFor):
            known.looks, known.missing = known.looks + 1, found.missing
        return found

    async def _read(self, write: Write, requests: Requests, observer: ManifestObserver) -> _Known:
        # One of the long at a time: of each, all bytes are in memory, and some times as many while it is understood.
        async with self._reading if write.size_bytes > LONG_BYTES else nullcontext():
            return await self._learned(write, requests, observer)

    async def _learned(self, write: Write, requests: Requests, observer: ManifestObserver) -> _Known:
        content = await requests.content(write, CONTENT_BYTES_MAX)
        if content is None:
            named: NamedFiles | NotUnderstood = NotUnderstood("it is too long, or its parts are not here")
        else:
            named = await understood(write.key, content, requests.threads)
        if isinstance(named, NotUnderstood):
            observer.not_understood(write, named.reason)
            known = _Known(write.key, write.etag, None)
        else:
            known = _Known(write.key, write.etag, Presence(write.key.bucket, named))
        self._known[write.id] = known
        names = sum(one.presence.names_count for one in self._known.values() if one.presence is not None)
        while len(self._known) > 1 and (names > REMEMBERED_NAMES_MAX or len(self._known) > REMEMBERED_MAX):
            _, dropped = self._known.popitem(last=False)
            names -= dropped.presence.names_count if dropped.presence is not None else 0
        return known

    def awaits(self, write: Write, reason: str, observer: ManifestObserver) -> float:
        known = self._known.get(write.id)
        looks = known.looks if known is not None else 1
        if looks == 1:
            observer.awaits_files(write, reason)
        return float(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(looks - 1, 10)))

    def waiting(self, covers: Callable[[ObjectKey], bool]) -> Mapping[int, int]:
        """How much is missing of each that waits for files, of the keys that are asked about."""
        return {one: known.missing for one, known in self._known.items() if known.missing and covers(known.key)}

    def is_waiting(self, write_id: int) -> bool:
        """Whether it is a manifest, and something that it names was missing when it was looked for."""
        known = self._known.get(write_id)
        return known is not None and known.missing > 0

    def waive(self, write_id: int) -> None:
        """Somebody has decided that a manifest goes to the origin whatever it names. For as long as this process runs:
        it is on its way at once."""
        self._waived.add(write_id)
        self.forget([write_id])

    def forget(self, write_ids: Iterable[int]) -> None:
        """They do not wait any more."""
        for one in write_ids:
            self._known.pop(one, None)

    def settled(self, write_id: int) -> None:
        """It is at the origin."""
        self._waived.discard(write_id)
        self.forget([write_id])


def is_to_be_deleted(tx: JournalTransaction, manifest: Write) -> bool:
    """Whether its deletion waits behind it: what it names may be deleted already, and nobody is to wait for that."""
    latest = tx.writes.latest(manifest.key)
    return latest is not None and latest.deleted and latest.sequence > manifest.sequence


def comes_behind(tx: JournalTransaction, manifest: Write, key: ObjectKey) -> bool:
    """Whether what is pending under a key waits for this manifest: it was acknowledged later, and in this order they
    go. Nobody could wait for both."""
    pending = tx.writes.latest(key)
    if pending is None or pending.sequence < manifest.sequence:
        return False
    return pending.in_order or (pending.behind is not None and manifest.key.key.startswith(pending.behind))
