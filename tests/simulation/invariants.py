"""What must hold whatever happens, judged by what clients were answered and by what the origin has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.simulation.origins import OTHERS, Change, SimulatedOrigin

Value = bytes | None
"""Of a key; None: no object."""

FLUSHED_WITHIN_SECONDS = 120.0
"""After its acknowledgement, or after its bucket takes writes again."""

ACKNOWLEDGED_WITHIN_SECONDS = 1.5
SMALL_FLUSHED_WITHIN_SECONDS = 10.0
"""What is small, in a bucket that has been well for two minutes, whatever large things are on their way."""

SMALL_BYTES = 1024
TRIES_AT_REST_MAX = 200
"""Of requests in five minutes, when nothing has been wrong for as long, and all that could be flushed is."""

MARKER = "/.metadata"


class Violation(AssertionError):
    """`rule` is the invariant that does not hold."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


@dataclass
class Attempt:
    """A write that a client of the node has asked for. `ended` None: it still is."""

    value: Value
    begun: float
    ended: float | None = None
    acknowledged: bool = False
    etag: str | None = None
    absorbed: bool = False


@dataclass
class KeyHistory:
    """What has become of one key, as clients and others know it."""

    attempts: list[Attempt] = field(default_factory=list)
    others: list[tuple[float, Value]] = field(default_factory=list)

    def begin(self, value: Value, now: float) -> Attempt:
        attempt = Attempt(value, now)
        self.attempts.append(attempt)
        return attempt

    def last_acknowledged(self) -> Attempt | None:
        return next((one for one in reversed(self.attempts) if one.acknowledged), None)

    def may_be(self) -> set[Value]:
        """What may be read: the last acknowledged, whatever was tried since, what others have written meanwhile."""
        last = self.last_acknowledged()
        since = last.begun if last is not None else -1.0
        tried = self.attempts[self.attempts.index(last) :] if last is not None else self.attempts
        found: set[Value] = {one.value for one in tried} | {value for at, value in self.others if at >= since}
        if last is None:
            before = [value for at, value in self.others if at < since]
            found.add(before[-1] if before else None)
        return found

    def written_by_others_since(self, moment: float) -> bool:
        return any(at >= moment for at, _ in self.others)


class Judge:
    """Of one history. `only`: the rules that are looked at; empty: all."""

    def __init__(self, origin: SimulatedOrigin, only: Iterable[str] = ()) -> None:
        self.origin = origin
        self.only = frozenset(only)
        self.keys: dict[tuple[str, str], KeyHistory] = {}
        self.violations: list[Violation] = []
        self.healthy_since: dict[str, float] = {}
        self.differs_since: dict[str, float] = {}
        self.conflicts: Callable[[], set[tuple[str, str]]] = set
        """What the node keeps as a conflict, and tells so."""

    def of(self, bucket: str, key: str) -> KeyHistory:
        return self.keys.setdefault((bucket, key), KeyHistory())

    def violated(self, rule: str, text: str) -> None:
        if not self.only or rule in self.only:
            self.violations.append(Violation(rule, text))

    # As things happen

    def changed(self, bucket: str, change: Change) -> None:
        """The origin has changed a key."""
        history = self.of(bucket, change.key)
        value = None if change.after is None else change.after.content.read(0, change.after.size_bytes)
        if change.by == OTHERS:
            history.others.append((change.at, value))
            return
        self._check_others_are_kept(bucket, change, history)
        if change.key.endswith(MARKER) and value is not None:
            self._check_marker(bucket, change, history)
        if value is not None:
            self._note_difference(bucket, change, history, value)

    def _check_others_are_kept(self, bucket: str, change: Change, history: KeyHistory) -> None:
        if change.before is None or not history.others:
            return
        written, theirs = history.others[-1]
        lost = change.before.content.read(0, change.before.size_bytes)
        if lost != theirs:
            return
        if any(one.ended is None or one.ended >= written for one in history.attempts):
            return
        dialect = self.origin.dialect
        _, longest = dialect.latency_seconds
        policy = dialect.on_put if change.after is not None else dialect.on_delete
        window = 0.0 if policy == "honoured" else 2 * longest + 0.2
        if change.at - written > window:
            what = "deletes" if change.after is None else "overwrites"
            self.violated(
                "others are kept",
                f"{change.by} {what} {bucket}/{change.key}, which others wrote {change.at - written:.1f} s ago, after "
                "the last write of this node's clients had ended",
            )

    def _check_marker(self, bucket: str, change: Change, history: KeyHistory) -> None:
        directory = change.key[: -len(MARKER)] + "/"
        marker = next((one for one in reversed(history.attempts) if one.value is not None), None)
        if marker is None:
            return
        for (in_bucket, key), data in self.keys.items():
            if in_bucket != bucket or key == change.key or not key.startswith(directory) or key.endswith(".tmp"):
                continue
            last = data.last_acknowledged()
            if last is None or last.value is None or (last.ended or 0.0) > marker.begun:
                continue
            if data.written_by_others_since(last.begun) or any(one.begun > last.begun for one in data.attempts):
                continue
            if self.origin.data(bucket, key) != last.value:
                self.violated("markers come last", f"{change.key} is at the origin, and {key} is not")
                return

    def _note_difference(self, bucket: str, change: Change, history: KeyHistory, value: bytes) -> None:
        ours = next((one for one in history.attempts if one.value == value and one.etag), None)
        if ours is None or change.after is None or ours.etag == change.after.etag:
            return
        self.differs_since.setdefault(bucket, change.at)

    def acknowledged(self, bucket: str, key: str, attempt: Attempt) -> None:
        """A client has its 200."""
        seconds = (attempt.ended or 0.0) - attempt.begun
        if attempt.absorbed and attempt.value is not None and seconds > ACKNOWLEDGED_WITHIN_SECONDS:
            self.violated("acknowledged soon", f"{key} after {seconds:.1f} s")
        differs = self.differs_since.get(bucket)
        if attempt.absorbed and differs is not None and attempt.begun > differs + 60.0:
            self.violated("ETags are the origin's", f"{key} was told an ETag that the origin will not show")

    def read(self, bucket: str, key: str, value: Value, possible: set[Value]) -> None:
        """A client of the node has read this. `possible`: what might be read at any moment of the request."""
        if value not in possible and value not in self.of(bucket, key).may_be():
            self.violated("reads see the last write", f"{key} reads {_short(value)}")

    # From time to time

    def health(self, bucket: str, *, good: bool, now: float) -> None:
        if not good:
            self.healthy_since.pop(bucket, None)
        else:
            self.healthy_since.setdefault(bucket, now)

    def restarted(self) -> None:
        """The process that flushes was dead for a while: nothing is late yet."""
        self.healthy_since.clear()

    def check_liveness(self, now: float) -> None:
        """Whatever else fails: what the origin would take is there."""
        for (bucket, key), history in self.keys.items():
            since = self.healthy_since.get(bucket)
            last = history.last_acknowledged()
            if since is None or last is None or history.written_by_others_since(last.begun):
                continue
            if any(one.begun > last.begun for one in history.attempts):
                continue
            acknowledged = last.ended or 0.0
            is_late = now - max(since, acknowledged) > FLUSHED_WITHIN_SECONDS
            is_small = last.value is None or len(last.value) <= SMALL_BYTES
            is_well = acknowledged - since > FLUSHED_WITHIN_SECONDS
            waits = is_small and is_well and now - acknowledged > SMALL_FLUSHED_WITHIN_SECONDS + self._patience()
            if not (is_late or waits) or self.origin.data(bucket, key) == last.value:
                continue
            if history.others and (bucket, key) in self.conflicts():
                continue
            rule = "all is flushed" if is_late else "small ones do not wait"
            self.violated(rule, f"{bucket}/{key} was acknowledged {now - acknowledged:.0f} s ago")
            return

    def check_end(self) -> None:
        """Faults are over, and time has passed."""
        conflicts = self.conflicts()
        for (bucket, key), history in sorted(self.keys.items()):
            value = self.origin.data(bucket, key)
            is_kept = (bucket, key) in conflicts and bool(history.others)
            if not is_kept and value not in history.may_be():
                last = history.last_acknowledged()
                said = _short(last.value) if last is not None else "never"
                self.violated(
                    "nothing is lost", f"{bucket}/{key} is {_short(value)} at the origin, acknowledged: {said}"
                )
            last = history.last_acknowledged()
            if (bucket, key) in conflicts and last is not None and not history.others:
                self.violated("conflicts are with others", f"{bucket}/{key}")

    def _patience(self) -> float:
        return 8 * self.origin.dialect.latency_seconds[1]

    def taken(self, bucket: str, what: str, status: int, trouble: str | None) -> None:
        """A write that could have been acknowledged was not."""
        if status >= 500 and trouble in ("unreachable", "503", "silent") and not self.origin.dialect.opaque_etags:
            self.violated("writes are taken while the bucket is away", f"{what} in {bucket}: {status} ({trouble})")

    def check_tries(self, tries: int) -> None:
        """What is refused for ever is not asked for ever."""
        if tries > TRIES_AT_REST_MAX:
            self.violated("tries grow rare", f"{tries} in the last five minutes")

    def check_sent(self, sent_bytes: int, written_bytes: int, kills: int) -> None:
        """What the origin has is not sent again."""
        if sent_bytes > 1.2 * written_bytes + 400_000 * (1 + kills):
            self.violated("nothing is sent twice", f"{sent_bytes:,} bytes of {written_bytes:,} after {kills} kills")

    def check_rest(self, left: dict[str, int]) -> None:
        """Nothing is left of what is over."""
        if any(left.values()):
            self.violated("nothing is left", str({name: count for name, count in left.items() if count}))


def _short(value: Value) -> str:
    return "nothing" if value is None else repr(value[:24])
