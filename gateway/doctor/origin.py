"""The origin: whose key signs, whether it answers, how late, by which clock, and what the key may do there.

Nothing is written, except by the write test: it deletes everything that it made, versions included, and names what it
could not delete.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import statistics
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from time import monotonic, time
from typing import Final
from urllib.parse import urlsplit

from gateway.admin.origin_check import SKEW_SECONDS_MAX, OriginChecks
from gateway.app.node import origin_for_checks
from gateway.config import Settings
from gateway.config.fields import is_store
from gateway.config.live import LiveSettings
from gateway.core.errors import OriginBodyError, OriginError, OriginUnreachable
from gateway.doctor import Area, Finding
from gateway.origin.client import Origin, OriginRequest
from gateway.origin.dialects import dialect_of
from gateway.policy.slots import Prefix
from gateway.s3.headers import parse_http_date, unquote
from gateway.s3.list_result import ListedEntry, listed_objects
from gateway.s3.origin_habits import OriginHabits, makes_weak_etags, refuses, shared_etags
from gateway.s3.xml import error_code_of
from gateway.serve.own_credentials import find_own_key

SECONDS_MAX = 5.0
_DOCUMENT_BYTES_MAX = 256 * 1024


@dataclass(frozen=True, slots=True)
class Answered:
    """A response of the origin."""

    status: int
    headers: Mapping[str, str]
    document: bytes

    @property
    def code(self) -> str | None:
        """The code of the error document. HEAD has none."""
        return error_code_of(self.document) if self.status >= 300 else None

    @property
    def described(self) -> str:
        """`403 AccessDenied`."""
        return f"{self.status} {self.code}" if self.code else str(self.status)

    def objects(self) -> list[ListedEntry]:
        """Return the objects of a listing. Other documents have none."""
        with suppress(OriginBodyError):
            return listed_objects(self.document)
        return []


class OriginProbe:
    """Asks, and remembers what time the origin told last."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self.date = ""
        self.date_seen_at = 0.0

    async def ask(
        self,
        method: str,
        bucket: str | None = None,
        key: str | None = None,
        *,
        query: Sequence[tuple[str, str | None]] = (),
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        replica: int | None = None,
    ) -> Answered:
        """Return the answer, of any status; OriginError where there is none in time."""
        fields, asked = dict(headers or {}), list(query)
        request = OriginRequest(method, bucket, key, query=asked, headers=fields, body=body, replica=replica)
        try:
            async with asyncio.timeout(SECONDS_MAX), await self._origin.send(request) as response:
                document = b"" if method == "HEAD" else await response.read(_DOCUMENT_BYTES_MAX)
                self.date, self.date_seen_at = response.headers.get("date", ""), time()
                return Answered(response.status, response.headers, document)
        except TimeoutError as error:
            raise OriginUnreachable(f"no answer within {SECONDS_MAX:g} seconds") from error


AREA, RIGHTS, WRITE_TEST = Area("origin"), Area("rights"), Area("write test")

_HEADS = 7
_FAR_SECONDS = 0.2
_SKEW_TOLD_SECONDS = 5.0
_PLACES_MAX = 20
_LISTED = "200"
_COMPARED_BYTES_MAX = 64 * 1024
_NO_SUCH_KEY = "forebay-doctor/there-is-no-such-object"


@dataclass(frozen=True, slots=True)
class Place:
    """A prefix at the origin that the configuration names, and whether writes go there."""

    prefix: Prefix
    is_written: bool
    name: str


def places(settings: Settings) -> list[Place]:
    """Slots, then buckets and what callers may touch, each bucket once where no slot names it."""
    found = [
        Place(slot.prefix, slot.mode == "read-write", f"slot {slot.name}")
        for slot in settings.slots
        if slot.prefix.bucket
    ]
    known = {one.prefix.bucket for one in found}
    others = [(Prefix(bucket.name), "[[buckets]]") for bucket in settings.buckets]
    others += [(one, "[[credentials]]") for entry in settings.credentials for one in entry.allow]
    for prefix, name in others:
        if prefix.bucket and prefix.bucket not in known:
            known.add(prefix.bucket)
            found.append(Place(prefix, True, name))
    return found


async def origin(
    settings: Settings, environment: Mapping[str, str], tested: Prefix | None
) -> AsyncGenerator[Finding, None]:
    """Everything that is asked of the origin; `tested` is where writes may be tried."""
    is_unsigned = is_store(settings.origin.endpoint_url)
    own = find_own_key(settings, environment) if not is_unsigned else None
    if is_unsigned:
        yield AREA.ok(f"{settings.origin.endpoint_url} is a directory: nothing is signed")
    elif own is None:
        tell = AREA.error if settings.origin.needs_key else AREA.note
        yield tell(
            "no key to sign with was found",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role; where one is set, see why it fails",
        )
    else:
        yield AREA.ok(f"signs with the key {own.access_key_id}, from {own.source}")
    homes = {settings.origin.endpoint_url: settings.origin.dialect}
    homes |= {bucket.endpoint_url: bucket.dialect or settings.origin.dialect for bucket in settings.buckets}
    for endpoint_url, configured in homes.items():
        name = dialect_of(configured, urlsplit(endpoint_url).hostname or "").name
        if name != "s3":
            yield AREA.ok(f"{endpoint_url}: is spoken to in the dialect {name} (docs/origins.md)")
    async with origin_for_checks(LiveSettings(settings), "doctor") as (asked, keys):
        checks = OriginChecks(asked, LiveSettings(settings), keys.problem)
        main, others = await checks.findings()
        found = [(settings.origin.endpoint_url, main)]
        found += [
            (f"{one.place} at {one.endpoint_url}, signed by {one.credentials}", finding) for one, finding in others
        ]
        for name, finding in found:
            if finding.problem is None:
                is_signed = not is_store(name) and not name.endswith("signed by no key")
                yield AREA.ok(f"{name}: answers" + (", and knows the key" if is_signed else ""))
            else:
                yield AREA.error(
                    f"{name}: {finding.problem}" if name not in finding.problem else finding.problem, _DO[finding.state]
                )
        is_refused = (main.is_refused or main.state == "refused") and not settings.origin_credentials
        if not main.reachable or is_refused or own is None:
            yield RIGHTS.note("not checked: there is no origin to ask, or no key to ask with", "mend that first")
            return
        probe = OriginProbe(asked)
        named = places(settings)
        yield await _latency(probe, settings, named)
        if main.state != "wrong clock":  # else that was said
            yield _clock(probe)
        if not named:
            yield RIGHTS.note(
                "the configuration names no bucket: rights were not checked", "declare [[slots]] for your data"
            )
        replica_counts = {bucket.name: len(bucket.replicas) for bucket in settings.buckets}
        for place in named[:_PLACES_MAX]:
            async with aclosing(_readable(probe, place, replica_counts.get(place.prefix.bucket, 0))) as of_place:
                async for finding_of_place in of_place:
                    yield finding_of_place
        if len(named) > _PLACES_MAX:
            yield RIGHTS.note(
                f"{len(named) - _PLACES_MAX} more prefixes were not checked", "give a --config with fewer slots"
            )
        written = [place for place in named if place.is_written]
        if tested is not None:
            async with aclosing(write_test(probe, tested)) as of_test:
                async for finding_of_test in of_test:
                    yield finding_of_test
        elif written:
            yield RIGHTS.note(
                f"writes were not tried (put, delete, multipart, conditions): "
                f"{', '.join(place.name for place in written[:3])} needs them",
                f"forebay doctor --write-test {written[0].prefix} writes a small object there, and deletes it",
            )


_DO = {
    "unreachable": "check origin.endpoint_url, DNS, proxies and firewalls between this machine and the origin",
    "no credentials": "check where the key comes from (environment, profile, role), and whether it has expired",
    "refused": "check the key, its policy, and origin.region",
    "wrong clock": "set this machine's clock: chronyc tracking, timedatectl",
    "well": "check where the credentials come from",
}


async def _latency(probe: OriginProbe, settings: Settings, named: list[Place]) -> Finding:
    """Time questions to the origin, less the first, which opens the connection."""
    bucket = next((place.prefix.bucket for place in named), None)
    seconds: list[float] = []
    for number in range(_HEADS + 1):
        begun = monotonic()
        try:
            await probe.ask("HEAD" if bucket else "GET", bucket, query=() if bucket else (("max-buckets", "1"),))
        except OriginError as failure:
            return AREA.error(f"did not answer a HEAD: {failure}", _DO["unreachable"])
        if number:
            seconds.append(monotonic() - begun)
    median = statistics.median(seconds)
    spread = f"median of {len(seconds)}; {min(seconds) * 1000:.3g} to {max(seconds) * 1000:.3g}"
    found = f"a HEAD takes {median * 1000:.3g} ms ({spread})"
    if median > _FAR_SECONDS:
        return AREA.warning(
            f"{found}: the origin is far", "use immutable or ttl slots: strict ones wait that long at each GET"
        )
    return AREA.ok(found)


def _clock(probe: OriginProbe) -> Finding:
    told = parse_http_date(probe.date)
    if told is None:
        return AREA.note("tells no time: this machine's clock was not compared with it")
    skew = probe.date_seen_at - told
    if abs(skew) > SKEW_SECONDS_MAX:
        return AREA.error(f"this machine's clock differs by {skew:+.0f} s", _DO["wrong clock"])
    if abs(skew) > _SKEW_TOLD_SECONDS:
        return AREA.warning(
            f"this machine's clock differs by {skew:+.0f} s; at 15 minutes requests are refused", _DO["wrong clock"]
        )
    return AREA.ok(f"this machine's clock differs by less than {max(1.0, abs(skew)) + 1:.0f} s")


async def _readable(probe: OriginProbe, place: Place, replicas: int) -> AsyncGenerator[Finding, None]:
    """LIST, HEAD and GET under a prefix: the first object there, its first byte; and what the answers show."""
    bucket, prefix = place.prefix.bucket, place.prefix.key_prefix
    where = f"{place.prefix} ({place.name})"
    try:
        listed = await probe.ask("GET", bucket, query=(("list-type", "2"), ("max-keys", _LISTED), ("prefix", prefix)))
        first = next(iter(listed.objects()), None)
        key = first.key.decode() if first is not None else None
        head = await probe.ask("HEAD", bucket, key or f"{prefix}{_NO_SUCH_KEY}")
        read: Answered | None = None
        if first is not None and first.size_bytes:
            etag = head.headers.get("etag", "")
            pinned = {} if etag[:1] in ("", "W") else {"if-match": etag}
            read = await probe.ask("GET", bucket, key, headers={"range": "bytes=0-0", **pinned})
    except OriginError as failure:
        yield RIGHTS.error(f"{where}: {failure}", _DO["unreachable"])
        return
    if listed.code == "NoSuchBucket":
        yield RIGHTS.error(f"{where}: there is no bucket {bucket}", "correct the prefix, or make the bucket")
        return
    refused = list(_refused(listed, head, read, has_key=key is not None))
    if refused:
        yield RIGHTS.error(
            f"{where}: refused are {', '.join(refused)}", "allow these to the key in the bucket's policy or in IAM"
        )
    elif key is None:
        yield RIGHTS.note(f"{where}: list and head work; there is no object, so get was not tried")
    else:
        yield RIGHTS.ok(f"{where}: list, head{' and get' if read is not None else ''} work")
    for why in sorted(_habits(listed, head, read).reasons()):
        yield AREA.warning(f"{where}: {why}", "they are not cached: see docs/origins.md")
    with suppress(OriginError):
        if (keys := await _alike(probe, bucket, listed.objects())) is not None:
            yield AREA.error(f"{where}: {keys[0]} and {keys[1]} have different bytes and one ETag", _NO_VERSIONS)

    for replica in range(replicas if key is not None else 0):
        yield await _same_at(probe, replica, place, key or "", head)


async def _alike(probe: OriginProbe, bucket: str, listed: Sequence[ListedEntry]) -> tuple[str, str] | None:
    """Return the keys of two small objects that have one ETag and length, and other bytes. Copies are read in vain."""
    seen = dict[tuple[str, int], ListedEntry]()
    for one in listed:
        before = seen.setdefault((one.etag, one.size_bytes), one)
        if before is not one and 0 < one.size_bytes <= _COMPARED_BYTES_MAX and one.etag:
            keys = before.key.decode(), one.key.decode()
            found = [(await probe.ask("GET", bucket, key, headers={"if-match": one.etag})) for key in keys]
            is_read = all(answer.status == 200 for answer in found)
            return keys if is_read and found[0].document != found[1].document else None
    return None


async def _same_at(probe: OriginProbe, replica: int, place: Place, key: str, head: Answered) -> Finding:
    """Compare an object of the source with what a replica has under its key."""
    where = f"{place.prefix} (replica {replica + 1})"
    try:
        found = await probe.ask("HEAD", place.prefix.bucket, key, replica=replica)
    except OriginError as failure:
        return RIGHTS.error(f"{where}: {failure}", _DO["unreachable"])
    if found.status in (403, 404):
        told = f"{where}: {key} is {found.status} there, and would come from the source"
        return RIGHTS.warning(told, "see how far the replication is, and what the key may read there")
    if unquote(found.headers.get("etag", "")) != unquote(head.headers.get("etag", "")):
        told = f"{where}: {key} has another ETag there: objects come from the source unless their ETags are the same"
        return RIGHTS.warning(told, "copy objects with the same part sizes, and without KMS; see docs/origins.md")
    return RIGHTS.ok(f"{where}: has {key} with the source's ETag")


def _habits(listed: Answered, head: Answered, read: Answered | None) -> OriginHabits:
    told = head.headers.get("etag", "")
    is_withheld = read is not None and (
        refuses(read.status)
        or read.headers.get("etag", told) != told
        or (read.status == 206 and "bytes 0-0/" not in read.headers.get("content-range", ""))
    )
    return OriginHabits(
        weak_etags=makes_weak_etags(told),
        no_ranges=read is not None and read.status == 200 and listed.objects()[0].size_bytes > 1,
        shared_etags=shared_etags(((one.etag, one.size_bytes) for one in listed.objects()), {}),
        withheld_etags=frozenset("*" if is_withheld else ""),
    )


def _refused(listed: Answered, head: Answered, read: Answered | None, *, has_key: bool) -> Iterator[str]:
    """Yield the actions that the origin refused, as a policy names them."""
    if listed.status != 200:
        yield f"list ({listed.described}; s3:ListBucket)"
    if head.status not in ((200,) if has_key else (404,)):
        yield f"head ({head.described}; s3:GetObject and s3:ListBucket)"
    if read is not None and read.status not in (200, 206) and not refuses(read.status):
        yield f"get ({read.described}; s3:GetObject)"


_BODY: Final = b"forebay doctor\n" * 64
_UPLOAD_ID = re.compile(rb"<UploadId>([^<]+)</UploadId>")
_ALLOW = "allow it to the key in the bucket's policy or in IAM"
_NO_VERSIONS = (
    "Forebay would take a new version for the old one: let the origin name each version (versitygw: without "
    "--default-etag), and cache nothing from it until then"
)
_OTHER_ETAG = '"00000000000000000000000000000000"'


class _Made:
    """Objects (key, version) and uploads (key, upload id) to delete at the end."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str | None], None] = {}
        self.uploads: dict[tuple[str, str], None] = {}

    def take(self, key: str, answer: Answered) -> None:
        if answer.status == 200:
            self.objects[key, answer.headers.get("x-amz-version-id")] = None


async def write_test(probe: OriginProbe, where: Prefix) -> AsyncGenerator[Finding, None]:
    """Every finding; the last ones are about what was cleaned up."""
    made = _Made()
    key = f"{where.key_prefix}.forebay-doctor-{secrets.token_hex(8)}"
    try:
        async for finding in _written(probe, where.bucket, key, made):
            yield finding
    except OriginError as failure:
        yield WRITE_TEST.error(f"{where}: {failure}", "check the network between here and the origin; then try again")
    async for finding in _cleaned(probe, where.bucket, made):
        yield finding


async def _written(probe: OriginProbe, bucket: str, key: str, made: _Made) -> AsyncGenerator[Finding, None]:
    put = await probe.ask("PUT", bucket, key, body=_BODY)
    if put.code == "NoSuchBucket":
        yield WRITE_TEST.error(f"there is no bucket {bucket}", "name another with --write-test, or make it")
        return
    made.take(key, put)
    if put.status != 200:
        yield WRITE_TEST.error(f"put: {put.described} (s3:PutObject)", _ALLOW)
    else:
        yield WRITE_TEST.ok(f"put works, under {_shown(bucket, key)}")
        md5 = hashlib.md5(_BODY, usedforsecurity=False).hexdigest()
        if put.headers.get("etag", "").strip('"') != md5:
            yield WRITE_TEST.note(
                "ETags are not MD5s (the bucket encrypts by KMS, say): Forebay writes nothing back there",
                'use write = "through" for slots of this bucket, or SSE-S3 as its encryption',
            )
        other = await probe.ask("PUT", bucket, f"{key}-other", body=_BODY.upper())
        made.take(f"{key}-other", other)
        if other.status == 200 and (etag := other.headers.get("etag", "")) == put.headers.get("etag", ""):
            yield WRITE_TEST.error(f"two objects with different bytes have one ETag, {etag}", _NO_VERSIONS)
        read = await probe.ask("GET", bucket, key)
        if read.document != _BODY:
            yield WRITE_TEST.error(f"get after put: {read.described}, and not the bytes that were written", _ALLOW)
        async for finding in _conditions(probe, bucket, key, made):
            yield finding
    async for finding in _multipart(probe, bucket, f"{key}-multipart", made):
        yield finding


async def _conditions(probe: OriginProbe, bucket: str, key: str, made: _Made) -> AsyncGenerator[Finding, None]:
    """Yield whether the origin refuses a conditional write over an existing object."""
    again = await probe.ask("PUT", bucket, key, headers={"if-none-match": "*"}, body=_BODY)
    made.take(key, again)
    changed = await probe.ask("PUT", bucket, key, headers={"if-match": _OTHER_ETAG}, body=_BODY)
    made.take(key, changed)
    told = {"If-None-Match": again, "If-Match": changed}
    ignored = [name for name, answer in told.items() if answer.status == 200]
    refused = [f"{name} ({answer.described})" for name, answer in told.items() if answer.status not in (200, 412)]
    if not ignored and not refused:
        yield WRITE_TEST.ok("conditional writes are honoured: If-Match and If-None-Match on put")
    advice = "flushes look by HEAD before they write: let nobody else write under slots with write = back"
    if ignored:
        yield WRITE_TEST.warning(f"conditions of put are ignored: {', '.join(ignored)}", advice)
    if refused:
        yield WRITE_TEST.warning(f"conditions of put are refused: {', '.join(refused)}", advice)


async def _multipart(probe: OriginProbe, bucket: str, key: str, made: _Made) -> AsyncGenerator[Finding, None]:
    created = await probe.ask("POST", bucket, key, query=(("uploads", None),))
    found = _UPLOAD_ID.search(created.document)
    if created.status != 200 or found is None:
        yield WRITE_TEST.error(f"multipart upload: create: {created.described} (s3:PutObject)", _ALLOW)
        return
    upload_id = found[1].decode(errors="replace")
    made.uploads[key, upload_id] = None
    of_upload = ("uploadId", upload_id)
    part = await probe.ask("PUT", bucket, key, query=(("partNumber", "1"), of_upload), body=_BODY)
    if part.status != 200:
        yield WRITE_TEST.error(f"multipart upload: part: {part.described} (s3:PutObject)", _ALLOW)
        return
    listed = f"<Part><PartNumber>1</PartNumber><ETag>{part.headers.get('etag', '')}</ETag></Part>"
    document = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
    completed = await probe.ask("POST", bucket, key, query=(of_upload,), body=document)
    if completed.status != 200 or b"<Error>" in completed.document:
        yield WRITE_TEST.error(f"multipart upload: complete: {completed.described} (s3:PutObject)", _ALLOW)
        return
    made.take(key, completed)
    del made.uploads[key, upload_id]
    created = await probe.ask("POST", bucket, key, query=(("uploads", None),))
    found = _UPLOAD_ID.search(created.document)
    if found is not None:
        upload_id = found[1].decode(errors="replace")
        made.uploads[key, upload_id] = None
        aborted = await probe.ask("DELETE", bucket, key, query=(("uploadId", upload_id),))
        if aborted.status not in (200, 204):
            yield WRITE_TEST.error(f"multipart upload: abort: {aborted.described} (s3:AbortMultipartUpload)", _ALLOW)
            return
        del made.uploads[key, upload_id]
    yield WRITE_TEST.ok("multipart uploads work: create, part, complete, abort")


async def _cleaned(probe: OriginProbe, bucket: str, made: _Made) -> AsyncGenerator[Finding, None]:
    left: list[str] = []
    for key, upload_id in made.uploads:
        if not await _is_deleted(probe, bucket, key, ("uploadId", upload_id)):
            left.append(f"the upload {upload_id} of {_shown(bucket, key)}")
    for key, version in made.objects:
        if not await _is_deleted(probe, bucket, key, ("versionId", version) if version else None):
            left.append(_shown(bucket, key))
    if left:
        yield WRITE_TEST.error(
            f"delete is refused (s3:DeleteObject, s3:DeleteObjectVersion), and this is left: {', '.join(left)}",
            "delete it by hand, and allow deleting to the key",
        )
    elif made.objects:
        yield WRITE_TEST.ok("delete works; nothing of the test is left")


async def _is_deleted(probe: OriginProbe, bucket: str, key: str, query: tuple[str, str] | None) -> bool:
    try:
        answer = await probe.ask("DELETE", bucket, key, query=() if query is None else (query,))
    except OriginError:
        return False
    return answer.status in (200, 204, 404)


def _shown(bucket: str, key: str) -> str:
    return f"s3://{bucket}/{key}"
