"""What a node sends, and what of it was in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.processes import Process

LARGE_BYTES = 100_000
"""What is sent anew of less is not worth a rule."""

WRITTEN_DOWN_SECONDS = 1.0
"""So long a process may take to write down what it was answered."""

NOTICED_SECONDS = 2.0
"""The same to hear of what a worker has acknowledged."""

KILL_COSTS_BYTES_MAX = 2_500_000
"""Eight large parts: so much may be on its way to a bucket at once."""

TRIES_OF_A_KEY_AT_REST_MAX = 20
"""In two and a half minutes, when nothing has been wrong for twice as long; two requests make a try."""

TRIES_AT_REST_MAX = 100
"""The same, of requests about buckets."""


@dataclass(eq=False)
class Sent:
    """One request of a process of the node."""

    process: Process
    method: str
    bucket: str
    key: str
    begun: float
    size_bytes: int
    digest: str | None
    upload_id: str | None
    sent_bytes: int = 0
    answered_at: float | None = None
    is_told: bool = False
    is_excused: bool = False
    """Its sender died when it had hardly heard the answer, or the origin has forgotten it since."""


class Traffic:
    """Of one history. `tell` takes a rule and what breaks it."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self._tell = tell
        self.is_gone: Callable[[str, str, float], bool] = lambda _, __, ___: False
        """Whether a key was deleted before this moment, and nobody is about it since."""

        self.had_no_room: Callable[[float], bool] = lambda _: False
        """Whether the disk was full, or had just been."""

        self.has_upload: Callable[[str, str], bool] = lambda _, __: False
        """Whether the origin has an upload (a bucket, an id) open."""

        self._on_the_way: dict[Sent, None] = {}
        self._delivered: dict[tuple[str, str, str], Sent] = {}
        self._tries: list[tuple[float, str, str]] = []

    def begin(self, sent: Sent) -> Sent:
        self._tries.append((sent.begun, sent.bucket, sent.key))
        if sent.digest is not None and sent.process.name == "background":
            self._check_not_gone(sent, sent.begun)
        if sent.digest is not None and sent.size_bytes >= LARGE_BYTES:
            self._on_the_way[sent] = None
            self._check_not_delivered(sent)
        return sent

    def piece(self, sent: Sent, size_bytes: int, now: float) -> None:
        """So much of a body has gone over the line."""
        sent.sent_bytes += size_bytes
        if sent.digest is not None and sent.process.name == "background" and sent.process.alive and not sent.is_told:
            self._check_not_gone(sent, now)

    def over(self, sent: Sent) -> None:
        if sent.process.alive:
            self._on_the_way.pop(sent, None)

    def answered(self, sent: Sent, status: int, now: float) -> None:
        """A process that lives has heard it."""
        if sent.digest is not None and 200 <= status < 300:
            sent.answered_at = now
            self._delivered[sent.bucket, sent.key, sent.digest] = sent

    def killed(self, process: Process, now: float) -> None:
        lost = [one for one in self._on_the_way if one.process is process]
        for one in lost:
            del self._on_the_way[one]
        for bucket in sorted({one.bucket for one in lost}):
            on_the_way = [one for one in lost if one.bucket == bucket]
            lost_bytes = sum(one.sent_bytes for one in on_the_way)
            if lost_bytes > KILL_COSTS_BYTES_MAX:
                keys = len({one.key for one in on_the_way})
                told = f"{lost_bytes:,} bytes of {len(on_the_way)} parts of {keys} objects were on their way"
                self._tell("a kill costs little", f"{told} when {process.name} was killed")
        for one in self._delivered.values():
            if one.process is process and now - (one.answered_at or 0.0) <= WRITTEN_DOWN_SECONDS:
                one.is_excused = True

    def uploads_forgotten(self) -> None:
        for one in self._delivered.values():
            one.is_excused = True

    def parts_delivered(self, bucket: str, key: str, before: float) -> int:
        """How many parts of an upload that the origin has open were answered to somebody who lived on."""
        found = [one for place, one in self._delivered.items() if place[:2] == (bucket, key)]
        known = [one for one in found if not one.is_excused and (one.answered_at or 0.0) < before]
        known = [one for one in known if not self.had_no_room(one.answered_at or 0.0)]  # to write it down
        counted = Counter(one.upload_id for one in known if one.upload_id and self.has_upload(bucket, one.upload_id))
        return max(counted.values(), default=0)

    def check_rest(self, since: float) -> None:
        """What is refused for ever is not asked for ever, and what is done is not asked for."""
        tries = Counter((bucket, key) for at, bucket, key in self._tries if at >= since)
        for (bucket, key), count in tries.items():
            if count > (TRIES_OF_A_KEY_AT_REST_MAX if key else TRIES_AT_REST_MAX):
                self._tell("tries grow rare", f"{count} requests for {bucket}/{key} in two and a half minutes")
                return

    def _check_not_gone(self, sent: Sent, now: float) -> None:
        if self.is_gone(sent.bucket, sent.key, now - NOTICED_SECONDS):
            sent.is_told = True
            self._tell("what is gone is not sent", f"{sent.bucket}/{sent.key}, {sent.size_bytes:,} bytes")

    def _check_not_delivered(self, sent: Sent) -> None:
        for other in self._on_the_way:
            is_same = other is not sent and (other.process, other.upload_id) == (sent.process, sent.upload_id)
            if is_same and other.digest == sent.digest and sent.upload_id is not None:
                when = "while it is on its way there"
                self._tell("nothing is sent twice", f"{sent.size_bytes:,} bytes of {sent.bucket}/{sent.key}, {when}")
        before = self._delivered.get((sent.bucket, sent.key, sent.digest or ""))
        if before is None or before.is_excused or before.answered_at is None or before.upload_id is None:
            return
        if self.had_no_room(before.answered_at):
            return  # to write it down
        if sent.begun - before.answered_at > WRITTEN_DOWN_SECONDS and self.has_upload(sent.bucket, before.upload_id):
            when = f"{sent.begun - before.answered_at:.1f} s after the origin has said that it has them"
            self._tell("nothing is sent twice", f"{sent.size_bytes:,} bytes of {sent.bucket}/{sent.key}, {when}")
