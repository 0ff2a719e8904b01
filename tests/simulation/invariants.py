"""What must hold whatever happens, judged by what clients were answered and by what the origin has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from gateway.core.model import ObjectKey
from gateway.s3.headers import is_of_parts
from gateway.writeback.checkpoints.layouts import member_of, rules_of
from gateway.writeback.journal.buckets import DATED_EARLIER_SECONDS_MAX
from tests.simulation.histories import Attempt, KeyHistory, Value
from tests.simulation.markers import PASSING, is_marker, missing
from tests.simulation.node import NOTHING_KEPT, Kept
from tests.simulation.origins import DENIED, OTHERS, PROBES, Change, SimulatedOrigin

RULES = (
    "nothing is lost",
    "what is left out is superseded",
    "reads see the last write",
    "others are kept",
    "conflicts are with others",
    "conflicts are decided by people",
    "markers come last",
    "manifests are whole",
    "all is flushed",
    "small ones do not wait",
    "acknowledged soon",
    "writes are taken while the bucket is away",
    "ETags are the origin's",
    "nothing is sent twice",
    "what is gone is not sent",
    "a kill costs little",
    "tries grow rare",
    "parts are counted while they go",
    "nothing is left",
    "uploads expire",
    "requests end",
    "requests do not fail inside",
    "clients",
)

FLUSHED_WITHIN_SECONDS = 120.0
"""After its acknowledgement, or after its bucket takes writes again, and what the origin takes (`flush_seconds`)."""

ACKNOWLEDGED_WITHIN_SECONDS = 1.5
SMALL_FLUSHED_WITHIN_SECONDS = 10.0
"""What is small, in a bucket that has been well for two minutes, whatever large things are on their way."""

SMALL_BYTES = 1024
UNCLEAR_SECONDS = 10.0
"""So long after a request without an outcome what it has made cannot be told from others' (docs/semantics.md, 6.2)."""

ONCE = "crowd"
"""Keys that begin so are written once."""

LOOKED_AT_SECONDS = 60.0
"""So soon the node has seen which ETag the origin has made, where it does its work."""

FULL_SECONDS = 60.0
"""So long behind a full disk a node may still go past it."""


class Violation(AssertionError):
    """`rule` is the invariant that does not hold."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule
        self.text = text


class Judge:
    """Of one history. `only`: the rules that are looked at; empty: all."""

    def __init__(self, origin: SimulatedOrigin, only: Iterable[str] = ()) -> None:
        self.origin = origin
        self.only = frozenset(only)
        self.keys: dict[tuple[str, str], KeyHistory] = {}
        self.violations: list[Violation] = []
        self.healthy_since: dict[str, float] = {}
        self.told_upload_ids: set[str] = set()
        """Of uploads that clients have begun, as they were told."""
        self._differs: dict[tuple[str, bool], tuple[float, str]] = {}
        """Since when the origin shows other ETags than were answered, and of which key."""
        """By bucket, and whether it is about objects of parts."""
        self.kept: Callable[[], Kept] = lambda: NOTHING_KEPT
        """What the node says that it keeps."""

        self.named: dict[bytes, list[str]] = {}
        """What is named by manifests that clients have begun to write: keys of their bucket."""

        self.left_out = 0
        """How often something was seen that is not to be sent."""
        self._full_at: list[float] = []
        origin.traffic.is_gone = lambda bucket, key, moment: self.of(bucket, key).is_gone(moment)
        origin.traffic.had_no_room = self._had_no_room

    @staticmethod
    def is_written_once(key: str) -> bool:
        """Whether no two uploads have this key."""
        return key.startswith(ONCE)

    def of(self, bucket: str, key: str) -> KeyHistory:
        return self.keys.setdefault((bucket, key), KeyHistory())

    def violated(self, rule: str, text: str) -> None:
        if not self.only or rule in self.only:
            self.violations.append(Violation(rule, text))

    # As things happen

    def changed(self, bucket: str, change: Change) -> None:
        """The origin has changed a key."""
        if change.key.startswith(PROBES):
            return
        history = self.of(bucket, change.key)
        value = None if change.after is None else change.after.content.read(0, change.after.size_bytes)
        if change.by == OTHERS:
            history.others.append((change.at, value))
            self._forget_difference(bucket, change)
            return
        self._check_others_are_kept(bucket, change, history)
        sent = self.origin.spoiled.get(value, value) if value is not None else None
        if sent != value:
            self._note_spoiled(history, change.at, sent, value)
        history.arrived.append((change.at, value))
        if is_marker(change.key) and value is not None:
            self._check_marker(bucket, change.key, value)
            self._check_named(bucket, change.key, value)
        if value is not None:
            self._note_difference(bucket, change, history, value)

    def _note_spoiled(self, history: KeyHistory, at: float, sent: Value, made: Value) -> None:
        """What was acknowledged is kept here. What a client waits for is not: its ETag tells it."""
        if any(one.absorbed for one in history.attempts if one.value == sent):
            history.is_spoiled = True
        else:
            history.others.append((at, made))

    def _check_others_are_kept(self, bucket: str, change: Change, history: KeyHistory) -> None:
        if change.before is None or not history.others:
            return
        written, theirs = history.others[-1]
        lost = change.before.content.read(0, change.before.size_bytes)
        if lost != theirs:
            return
        if any(one.ended is None or one.ended >= written for one in history.attempts):
            return
        made = None if change.after is None else change.after.content.read(0, change.after.size_bytes)
        is_of_parts = change.after is not None and bool(change.after.part_sizes)
        if is_of_parts and any(not one.acknowledged and one.value == made for one in history.attempts):
            return  # a Complete under its client's own condition, carried out though nobody hears of it
        dialect = self.origin.dialect
        _, longest = dialect.latency_seconds
        written_by = dialect.on_complete if is_of_parts else dialect.on_put
        policy = dialect.on_delete if change.after is None else written_by
        window = 0.0 if policy == "honoured" else 2 * longest + 0.2
        if change.at - written > window:
            what = "deletes" if change.after is None else "overwrites"
            self.violated(
                "others are kept",
                f"{change.by} {what} {bucket}/{change.key}, which others wrote {change.at - written:.1f} s ago, after "
                "the last write of this node's clients had ended",
            )

    def _check_marker(self, bucket: str, marker: str, value: bytes) -> None:
        of_bucket = ((key, history) for (name, key), history in self.keys.items() if name == bucket)
        key = missing(marker, value, of_bucket, partial(self._is_left_out, bucket))
        if key is not None:
            self.violated("markers come last", f"{marker} is at the origin, and {key} is not")

    def _check_named(self, bucket: str, manifest: str, value: bytes) -> None:
        """Where nobody is told what is not there, no node absorbs anything, and so none has anything pending. Under a
        passing name no reader looks for a manifest: it waits for this node's files only (docs/semantics.md, 6.7)."""
        if self.origin.dialect.hides_absence or manifest.endswith(PASSING):
            return
        gone = [key for key in self.named.get(value, []) if self.origin.current(bucket, key) is None]
        if gone:
            self.violated("manifests are whole", f"{manifest} is at the origin, and names {gone[0]}, which is not")

    def _note_difference(self, bucket: str, change: Change, history: KeyHistory, value: bytes) -> None:
        ours = [
            one for one in history.attempts if one.value == value
        ]  # a copy has the bytes of another, and its own ETag
        if not ours or change.after is None or any(one.etag in (None, change.after.etag) for one in ours):
            return
        for of_parts in self._alike(ours[0].etag):
            self._differs.setdefault((bucket, of_parts), (change.at, change.key))

    def _forget_difference(self, bucket: str, change: Change) -> None:
        """Nobody can tell any more what the origin made, where its answer was lost, or an error."""
        for of_parts in (False, True):
            since, key = self._differs.get((bucket, of_parts), (-math.inf, ""))
            if key == change.key and change.at < since + LOOKED_AT_SECONDS:
                del self._differs[bucket, of_parts]

    def _alike(self, etag: str | None) -> set[bool]:
        """Whether an ETag says of objects of parts, and of others, what theirs are."""
        return {is_of_parts(etag or "")} if self.origin.dialect.own_multipart_etags else {False, True}

    def acknowledged(self, bucket: str, key: str, attempt: Attempt) -> None:
        """A client has its 200."""
        seconds = (attempt.ended or 0.0) - attempt.begun
        is_slow = seconds > ACKNOWLEDGED_WITHIN_SECONDS and not self._had_no_room(attempt.begun)
        if attempt.absorbed and attempt.value is not None and is_slow:
            self.violated("acknowledged soon", f"{key} after {seconds:.1f} s")
        differs, _ = self._differs.get((bucket, is_of_parts(attempt.etag or "")), (math.inf, ""))
        is_unseen = bucket in self.origin.refused  # then the node may not read back what it was
        could_be_seen = max(differs, self.healthy_since.get(bucket, math.inf))
        is_foretold = attempt.absorbed and not self.origin.dialect.local_etags
        if is_foretold and not is_unseen and attempt.begun > could_be_seen + LOOKED_AT_SECONDS:
            self.violated("ETags are the origin's", f"{key} was told an ETag that the origin will not show")

    def read(self, bucket: str, key: str, value: Value, possible: set[Value]) -> None:
        """A client of the node has read this. `possible`: what might be read at any moment of the request."""
        if value not in possible and value not in self.of(bucket, key).may_be():
            self.violated("reads see the last write", f"{key} reads {_short(value)}")

    def deleted_conflict(self, bucket: str, key: str, status: int) -> None:
        """A DELETE of what was a conflict before, and is one now, has been answered."""
        if status != 409 and not self._had_no_room(self.origin.clock.monotonic()):
            self.violated("conflicts are decided by people", f"a DELETE of {bucket}/{key} was answered {status}")

    def conflict_read(self, bucket: str, key: str, status: int) -> None:
        """What is in conflict was read after its DELETE had been refused."""
        if status == 404:
            self.violated("conflicts are decided by people", f"a DELETE of {bucket}/{key} was refused, and it is gone")

    def answered(self, what: str, status: int, begun: float) -> None:
        """Any request, to anybody."""
        if status == 500 and self.origin.failed_inside_at < begun:
            self.violated("requests do not fail inside", what)

    def disk_is_full(self, now: float) -> None:
        """The node's."""
        self._full_at.append(now)

    def _had_no_room(self, begun: float) -> bool:
        return bool(self._full_at) and begun < self._full_at[-1] + FULL_SECONDS

    # From time to time

    def health(self, bucket: str, *, good: bool, now: float) -> None:
        if not good:
            self.healthy_since.pop(bucket, None)
        else:
            self.healthy_since.setdefault(bucket, now)

    def restarted(self) -> None:
        """The process that flushes was dead for a while, or the origin was away: nothing is late yet."""
        self.healthy_since.clear()

    def check_liveness(self, now: float) -> None:
        """Whatever else fails: what the origin would take is there."""
        within_seconds = FLUSHED_WITHIN_SECONDS + self.origin.dialect.flush_seconds
        for (bucket, key), history in self.keys.items():
            since = self.healthy_since.get(bucket)
            last = history.attempts[-1] if history.attempts else None
            if since is None or last is None or not last.acknowledged or key.startswith(DENIED):
                continue
            if history.arrived and history.arrived[-1][1] == last.value and not history.others:
                continue  # it is there: nobody else writes this key
            if history.written_by_others_since(last.begun):
                continue
            acknowledged = last.ended or 0.0
            is_late = now - max(since, acknowledged) > within_seconds
            is_behind = last.value is not None and is_marker(key)  # a deletion waits for nothing else (6.6)
            is_small = (last.value is None or len(last.value) <= SMALL_BYTES) and not is_behind
            is_well = acknowledged - since > within_seconds
            waits = is_small and is_well and now - acknowledged > SMALL_FLUSHED_WITHIN_SECONDS + self._patience()
            if not (is_late or waits) or self.origin.data(bucket, key) == last.value:
                continue
            if (bucket, key) in self.kept().conflicts:
                self._check_conflict(bucket, key, history)
                continue
            if (bucket, key) in self.kept().local:
                self._check_superseded(bucket, key)
                continue
            if is_behind and _waits_for_a_person(key, self.kept().conflicts):
                continue
            rule = "all is flushed" if is_late else "small ones do not wait"
            self.violated(rule, f"{bucket}/{key} was acknowledged {now - acknowledged:.0f} s ago")
            return

    def check_end(self) -> None:
        """Faults are over, and time has passed."""
        kept = self.kept()
        for (bucket, key), history in sorted(self.keys.items()):
            last = history.last_acknowledged()
            said = _short(last.value) if last is not None else "never"
            if key.startswith(DENIED):
                if last is not None and (bucket, key) not in kept.pending:
                    self.violated("nothing is lost", f"{bucket}/{key} is pending no more, acknowledged: {said}")
                continue
            value = self.origin.data(bucket, key)
            if (bucket, key) in kept.pending and _waits_for_a_person(key, kept.conflicts):
                continue
            if (bucket, key) in kept.local:
                self._check_superseded(bucket, key)
                continue
            is_conflict = (bucket, key) in kept.conflicts
            if is_conflict and last is not None:  # whoever is right about it, the write is kept
                self._check_conflict(bucket, key, history)
                continue
            is_kept = is_conflict and self._may_conflict(bucket, key, history)
            if not is_kept and value not in history.may_be():
                self.violated(
                    "nothing is lost", f"{bucket}/{key} is {_short(value)} at the origin, acknowledged: {said}"
                )
        held = sum(
            1
            for _, key in kept.pending - kept.conflicts - kept.local
            if not key.startswith(DENIED) and not _waits_for_a_person(key, kept.conflicts)
        )
        files = 0 if kept.pending or kept.open_uploads else kept.files
        left = {"pending": held, "in doubt": kept.in_doubt, "files": files, "probes": self.origin.probes()}
        self._check_left("nothing is left", left)

    def _check_superseded(self, bucket: str, key: str) -> None:
        """What is not to be sent belongs to a checkpoint of whose run another has come to the origin, all of it; or it
        is a marker that may name such a one."""
        self.left_out += 1
        if not is_marker(key) and not self._is_superseded(bucket, key):
            self.violated(
                "what is left out is superseded", f"{bucket}/{key} is not sent, and no other of its run is there"
            )

    def _is_left_out(self, bucket: str, key: str, until: float) -> bool:
        return (bucket, key) in self.kept().local and self._is_superseded(bucket, key, until)

    def _is_superseded(self, bucket: str, key: str, until: float = math.inf) -> bool:
        """Whether another checkpoint of the run has come to the origin, that was acknowledged by a time."""
        rules = rules_of(None)
        member = member_of(ObjectKey(bucket, key), rules)
        come = dict[str, bool]()
        for (of_bucket, name), history in self.keys.items():
            other = member_of(ObjectKey(of_bucket, name), rules)
            if member is None or other is None or of_bucket != bucket or other.checkpoint.run != member.checkpoint.run:
                continue
            last = history.last_acknowledged()
            if last is not None and last.value is not None:
                has_come = any(value == last.value for _, value in history.arrived) and (last.ended or 0.0) <= until
                come[other.checkpoint.prefix] = come.get(other.checkpoint.prefix, True) and has_come
        return any(is_whole for prefix, is_whole in come.items() if member and prefix != member.checkpoint.prefix)

    def _may_conflict(self, bucket: str, key: str, history: KeyHistory) -> bool:
        unclear_seconds = UNCLEAR_SECONDS + self.origin.dialect.latency_seconds[1]
        found = self.origin.current(bucket, key)
        if found is not None and is_of_parts(found.etag):
            unclear_seconds = DATED_EARLIER_SECONDS_MAX  # its date says nothing
        data = self.origin.data(bucket, key)
        went_through = [one for one in history.attempts if one.acknowledged and not one.absorbed and one.value == data]
        if any(self._was_full_while(one) for one in went_through):
            return True  # the journal could not take that it is this node's
        return history.may_conflict(data, unclear_seconds)

    def _was_full_while(self, attempt: Attempt) -> bool:
        ended = math.inf if attempt.ended is None else attempt.ended
        return any(attempt.begun - FULL_SECONDS <= at <= ended for at in self._full_at)

    def _check_conflict(self, bucket: str, key: str, history: KeyHistory) -> None:
        if not self._may_conflict(bucket, key, history):
            self.violated("conflicts are with others", f"{bucket}/{key}")

    def check_next_day(self) -> None:
        """Nobody has touched anything for a day."""
        kept = self.kept()
        left = {
            "open uploads": kept.open_uploads,
            "in doubt": kept.in_doubt + kept.perhaps_others,
            "uploads at the origin": self._uploads_left(),
        }
        self._check_left("uploads expire", left)

    def _uploads_left(self) -> int:
        """Those behind conflicts stay, and those that a client has begun at the origin itself are the client's,
        and not to be told apart from others of the key."""
        if not self.origin.dialect.lists_uploads:
            return 0  # one whose beginning nobody has heard of cannot be found
        uploads = self.origin.uploads()
        unclear = {(bucket, key) for bucket, key, _, is_the_clients in uploads if is_the_clients}
        return sum(
            (bucket, key) not in self.kept().conflicts | unclear and upload_id not in self.told_upload_ids
            for bucket, key, upload_id, _ in uploads
        )

    def check_sight(self, shown: Mapping[tuple[str, str], int], before: float) -> None:
        """`shown`: how many parts of what is pending the origin has, as the node tells people."""
        for (bucket, key), sent in shown.items():
            if not self.is_written_once(key):
                continue
            delivered = self.origin.traffic.parts_delivered(bucket, key, before)
            if sent < delivered:
                told = f"{sent} of {bucket}/{key} are told, and {delivered} are at the origin"
                self.violated("parts are counted while they go", told)

    def _patience(self) -> float:
        return 8 * self.origin.dialect.latency_seconds[1]

    def taken(self, bucket: str, what: str, status: int, trouble: str | None) -> None:
        """A write to a known bucket was answered so."""
        away = status >= 500 and trouble in ("unreachable", "503", "silent")
        if away and not self.origin.dialect.may_be_opaque and not self._had_no_room(self.origin.clock.monotonic()):
            self.violated("writes are taken while the bucket is away", f"{what} in {bucket}: {status} ({trouble})")

    def _check_left(self, rule: str, left: Mapping[str, int]) -> None:
        if any(left.values()):
            self.violated(rule, str({name: count for name, count in left.items() if count}))


def _short(value: Value) -> str:
    return "nothing" if value is None else repr(value[:24])


def _waits_for_a_person(key: str, conflicts: Iterable[tuple[str, str]]) -> bool:
    """Whether it is a marker, and something that it speaks for is in conflict."""
    directory = key.rpartition("/")[0] + "/"
    return is_marker(key) and any(one.startswith(directory) for _, one in conflicts)
