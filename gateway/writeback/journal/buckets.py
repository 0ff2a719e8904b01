"""The facts about buckets, and this gateway's last changes to keys: the tables `profiles` and `origin`.

S3 takes every key. Stores that keep objects as files do not: they refuse an empty part of a path, one that is too long,
an object where there is a directory. If a bucket has refused the key of an acknowledged write, the gateway asks it
before it acknowledges another key of that form, until the bucket takes one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Self

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged
from gateway.core.model import ObjectKey
from gateway.s3.headers import is_of_parts, unquote
from gateway.writeback.journal.rows import OPEN, Table, as_moment, at, decoded, moment_record, pack, unpack

LAST_OWN_WRITE_KEPT_SECONDS = 600.0
"""Seconds for which a last own write is kept: later questions to the origin have seen it (a write that takes longer
asks again). Longer only while an upload of the key has been open for longer."""

DATED_EARLIER_SECONDS_MAX = 7 * 24 * 3600.0
"""S3 dates an object of parts by the start of its upload ("the date of initiation", System-defined object metadata):
its completion may be this much later."""

LAST_OWN_WRITES_MAX = 50_000
"""The most own writes, some 300 bytes each. With more, the oldest are forgotten early: then a write may pass for
another writer's, which loses nothing."""

FORMS_MAX = 64
"""The most forms that the gateway keeps of a bucket."""

EVERY_KEY = "*"

_UNUSUAL = {
    "an empty part": re.compile(r"^/|//"),
    "a slash at the end": re.compile(r"/$"),
    "a part of dots": re.compile(r"(^|/)\.{1,2}(/|$)"),
    "a long part": re.compile(r"[^/]{256}"),
    "a long key": re.compile(r"(?s).{901}"),
    "control characters": re.compile(r"[\x00-\x1f\x7f]"),
    "not ASCII": re.compile(r"[^\x00-\x7f]"),
    "special characters": re.compile(r"""[\\:*?"'<>|`^{}\[\]#%~&$@=;+, ]"""),
}
"""Patterns over bytes, one a character. File systems take 255 of a part."""


def forms_of(key: str, headers: Mapping[str, str]) -> frozenset[str]:
    """Return all forms that a write has; `refused_forms` of another one are among these."""
    forms = _unusual(key) | _directories_of(key) | {EVERY_KEY}
    return forms | _with_values(forms, headers)


def refused_forms(key: str, code: str, headers: Mapping[str, str]) -> frozenset[str]:
    """Return the forms to avoid after a write's final refusal: its unusual ones, or a usual key's directories'.

    Perhaps the bucket refuses not the key but the write's `judged_values`: avoid the forms with these alone.
    """
    if code == "NoSuchBucket":
        return frozenset({EVERY_KEY})
    return _with_values(_unusual(key) or _directories_of(key), headers)


def without_forms_of(forms: frozenset[str], key: str) -> frozenset[str]:
    """Return the forms that the key does not have: the bucket has taken it."""
    taken = forms_of(key, {})
    return frozenset(form for form in forms if form.partition("\0")[0] not in taken)


def _with_values(forms: frozenset[str], headers: Mapping[str, str]) -> frozenset[str]:
    values = "".join(f"\0{name}: {value}" for name, value in sorted(judged_values(headers)))
    return frozenset(form + values for form in forms)


def bounded(forms: frozenset[str]) -> frozenset[str]:
    """Keep what is unusual about keys, and the shortest directories: those that most keys have."""
    return frozenset(sorted(forms, key=lambda form: (form.startswith("in /"), len(form), form))[:FORMS_MAX])


def _unusual(key: str) -> frozenset[str]:
    text = key.encode("utf-8", "surrogatepass").decode("latin-1")
    return frozenset(name for name, pattern in _UNUSUAL.items() if pattern.search(text))


def _directories_of(key: str) -> frozenset[str]:
    """Return the prefixes that end with a slash, and the empty one: one of them may be an object, or no directory."""
    return frozenset({"in /", *(f"in /{key[: at + 1]}" for at, character in enumerate(key) if character == "/")})


def judged_values(headers: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Return the headers of a write that each bucket must have taken once, with their values: its class and its ACL."""
    values = {(name, headers[name]) for name in ("x-amz-storage-class", "x-amz-acl") if name in headers}
    return frozenset(values - {("x-amz-storage-class", "STANDARD")})


class Honoured(IntEnum):
    """An origin's treatment of a condition on a request that changes something."""

    UNKNOWN = 0
    YES = 1
    IGNORED = 2
    """It takes the request as if it had no condition."""

    REFUSED = 3
    """It answers 501, or 412 whether the condition holds or not."""

    CREATES = 4
    """It honours `If-None-Match: *`, and not If-Match."""


_HONOURED = tuple(Honoured)


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions that a bucket honours, by the kind of request; `learned_at` 0: never tried."""

    put: Honoured = Honoured.UNKNOWN
    complete: Honoured = Honoured.UNKNOWN
    delete: Honoured = Honoured.UNKNOWN
    learned_at: float = 0.0


@dataclass(frozen=True, slots=True)
class BucketCapabilities:
    """Facts about a bucket, learned from its own answers.

    `md5_etags`: its ETags are MD5s, and can be foretold. `may_look`: the gateway's own key pair may HEAD its objects,
    and learns when there is none; otherwise no flush could know what it overwrites. `multipart_etags`: ETags of objects
    of parts can be foretold too, as far as is known. `accepted` are the `judged_values` that it has taken,
    `refused_forms` the forms of writes that it has refused for good.
    """

    md5_etags: bool
    may_look: bool
    learned_at: float
    conditions: Conditions = Conditions()
    multipart_etags: bool = True
    accepted: frozenset[tuple[str, str]] = frozenset()
    refused_forms: frozenset[str] = frozenset()

    def foretells(self, *, of_parts: bool) -> bool:
        """Return whether the ETag of an object, or of one of parts, is known before the bucket has it."""
        return self.md5_etags and (self.multipart_etags or not of_parts)

    def refuses(self, key: str, headers: Mapping[str, str]) -> bool:
        """Return whether the bucket has refused for good a similar acknowledged write."""
        return bool(self.refused_forms) and not self.refused_forms.isdisjoint(forms_of(key, headers))


@dataclass(frozen=True, slots=True)
class LastOwnWrite:
    """The last change by this gateway to a key at the origin, in seconds since 1970.

    `etag` None: it deleted the object. If `known` is false, a forwarded request changed it in an unknown way, and
    `etag` is the one put there before, if known. `answered` is the ETag by which it was acknowledged here, if that
    differs.
    """

    at: float
    etag: str | None = None
    known: bool = True
    moment: Moment | None = field(default=None, compare=False)
    answered: str | None = field(default=None, compare=False)

    @classmethod
    def now(cls, now: Moment, etag: str | None = None, *, known: bool = True, answered: str | None = None) -> Self:
        is_other = etag is not None and answered is not None and unquote(etag) != unquote(answered)
        return cls(now.at, etag, known, now, answered if is_other else None)

    @property
    def kept_seconds(self) -> float:
        """Return how long to remember it: later questions to the origin have seen it."""
        # An object of parts must be known while other objects of the same date may still come after it.
        return (
            DATED_EARLIER_SECONDS_MAX
            if self.etag is not None and is_of_parts(self.etag)
            else LAST_OWN_WRITE_KEPT_SECONDS
        )

    def seconds_after(self, moment: Moment) -> float:
        return (self.moment or Moment(self.at)).since(moment)[0]


def _pack_capabilities(bucket: str, capabilities: BucketCapabilities) -> bytes:
    known = capabilities.conditions
    at = known.learned_at
    record = {
        "md5_etags": capabilities.md5_etags,
        "may_look": capabilities.may_look,
        "learned": capabilities.learned_at,
        "multipart_etags": capabilities.multipart_etags,
        # An earlier version, which knows no CREATES, then looks before each write.
        "conditions": [*(min(kind, Honoured.REFUSED) for kind in (known.put, known.complete, known.delete)), at],
        "creates": [kind for kind in ("put", "complete") if getattr(known, kind) is Honoured.CREATES],
        "accepted": sorted(capabilities.accepted),
        "refused_forms": sorted(capabilities.refused_forms),
    }
    return pack(("profiles", bucket), record)


def _unpack_capabilities(bucket: str, packed: bytes) -> BucketCapabilities | None:
    """Return None for a damaged row."""
    try:
        record = unpack(("profiles", bucket), packed)
    except BufferDamaged:
        return None
    put, complete, delete, learned_at = record["conditions"]
    conditions = Conditions(_HONOURED[put], _HONOURED[complete], _HONOURED[delete], learned_at)
    return BucketCapabilities(
        record["md5_etags"],
        record["may_look"],
        record["learned"],
        replace(conditions, **dict.fromkeys(record.get("creates", ()), Honoured.CREATES)),
        record.get("multipart_etags", True),
        frozenset(map(tuple, record.get("accepted", ()))),
        frozenset(record.get("refused_forms", ())),
    )


def as_last_own_write(key: ObjectKey, at: float, record: bytes) -> LastOwnWrite:
    """Return a row's own write; for a damaged row, one at this time that is not `known`."""
    try:
        own = unpack(("origin", key.bucket, key.key), record)
    except BufferDamaged:
        return LastOwnWrite(at, None, known=False)
    return LastOwnWrite(own["at"], own["etag"], own["known"], as_moment(own.get("moment")), own.get("answered"))


class Buckets(Table):
    def capabilities(self, bucket: str) -> BucketCapabilities | None:
        """Return the facts learned of a bucket. An unreadable row counts as unknown: the next write learns it anew."""
        row = self._row("SELECT record FROM profiles WHERE bucket = ?", bucket)
        return _unpack_capabilities(bucket, row[0]) if row else None

    def all_capabilities(self) -> Sequence[tuple[str, BucketCapabilities]]:
        found = self._all("SELECT bucket, record FROM profiles ORDER BY bucket")
        read = [(bucket, _unpack_capabilities(bucket, record)) for bucket, record in found]
        return [(bucket, capabilities) for bucket, capabilities in read if capabilities is not None]

    def learn(self, bucket: str, capabilities: BucketCapabilities) -> None:
        """Record a bucket's latest answer; conditions stay if it has none, values taken and forms refused always."""
        before = self.capabilities(bucket)
        if before is not None:
            accepted = before.accepted | capabilities.accepted
            capabilities = replace(capabilities, accepted=accepted, refused_forms=before.refused_forms)
            if not capabilities.conditions.learned_at:
                capabilities = replace(capabilities, conditions=before.conditions)
        self._set(bucket, capabilities)

    def amend(self, bucket: str, **facts: Any) -> None:
        """Record some facts about a known bucket, and leave the others as they are by now."""
        known = self.capabilities(bucket)
        if known is not None:
            self.learn(bucket, replace(known, **facts))

    def refused_for_good(self, key: ObjectKey, headers: Mapping[str, str], code: str) -> None:
        """Note that a bucket refuses a write for good: it is asked before the next such write is acknowledged."""
        known = self.capabilities(key.bucket)
        if known is not None:
            forms = bounded(known.refused_forms | refused_forms(key.key, code, headers))
            self._set(key.bucket, replace(known, refused_forms=forms))

    def forget_accepted(self, bucket: str, headers: Mapping[str, str]) -> None:
        """Forget that a bucket takes these headers' `judged_values`: it has refused a write that has them."""
        known, values = self.capabilities(bucket), judged_values(headers)
        if known is not None and known.accepted & values:
            self._set(bucket, replace(known, accepted=known.accepted - values))

    def _set(self, bucket: str, capabilities: BucketCapabilities) -> None:
        self._put("profiles", bucket, _pack_capabilities(bucket, capabilities))

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
            known = self.capabilities(key.bucket)
            if known is not None and known.refused_forms:
                left = without_forms_of(known.refused_forms, key.key)
                if left != known.refused_forms:
                    self._set(key.bucket, replace(known, refused_forms=left))
        looked_at = own.at + own.kept_seconds - LAST_OWN_WRITE_KEPT_SECONDS
        record = {
            "at": own.at,
            "etag": own.etag,
            "known": own.known,
            "moment": moment_record(own.moment),
            "answered": own.answered,
        }
        self._put("origin", *at(key), looked_at, pack(("origin", *key), record))

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
