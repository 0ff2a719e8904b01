"""The admin port of a running gateway, as programs ask it: a client, and its answers with their types.

Answers have the fields that somebody here uses; all others are kept (`document`). A gateway of another version may lack
one: that is said, and nothing is guessed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import quote, urlencode

import httpx
import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from gateway.core.errors import AdminPortError, NoAdminPort

ANSWER_TIMEOUT_SECONDS = 10.0
CHANGE_TIMEOUT_SECONDS = 60.0
"""For changed settings: the gateway reads files, and waits for its processes."""

PAGE = 1000
_AGAIN_SECONDS = 0.5

_STRANGE_SECONDS = 10.0
"""So long a port at which nobody has ever answered is tried again, however much patience there is."""

_STREAM_TIMEOUT_SECONDS = 600.0
"""Between pieces, and behind the last of them: a snapshot of many objects is read and synced as a whole."""


class Answer(BaseModel):
    """A document of the admin port, or a part of one."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def document(self) -> dict[str, Any]:
        """As it was answered, fields that are not declared here included."""
        return self.model_dump(mode="json", exclude_unset=True)


class Process(Answer):
    """One process of the gateway. `process_id` is None while it is down."""

    name: str
    process_id: int | None
    ready: bool
    restarts: int
    hangs: bool = False
    last_end: str | None = None
    last_end_at: float | None = None


class GatewayStatus(Answer):
    """The gateway as a whole. `closed` says why there is no cache, `started_at` is in seconds since 1970."""

    version: str
    started_at: float = 0.0
    s3_url: str
    ready: bool
    draining: bool
    closed: str | None = None
    settings_problem: str | None = None
    processes: list[Process]


class Reloaded(Answer):
    """Settings that were read anew. `changed` are keys; `in_force`: all processes keep to them."""

    file: str | None
    changed: list[str]
    in_force: bool


class OriginStatus(Answer):
    """`problem` says in words what is wrong; None where all is well."""

    endpoint_url: str
    reachable: bool
    state: str = "well"
    problem: str | None


class DifferingOrigin(OriginStatus):
    """A bucket with a home of its own, or a slot with a key of its own. `credentials` says whose key, and no secret."""

    prefix: str
    slot: str | None
    credentials: str


class MainOrigin(OriginStatus):
    """That of `[origin]`, with those that differ from it."""

    differing: list[DifferingOrigin] = []


class DiskStatus(Answer):
    """The worst that any process has found."""

    state: str
    journal_failing_processes: int = 0


class Scrub(Answer):
    """The scrubber's pass under way, or its last. `ended_at` is in seconds since 1970."""

    part_done: float
    read_bytes: int
    dropped_blocks: int
    ended_at: float | None


class CacheStatus(Answer):
    """`hit_ratio` is a share of bytes; None while nothing was read."""

    directory: str
    capacity_bytes: int
    usage_bytes: int
    hit_ratio: float | None
    disk: DiskStatus
    scrub: Scrub | None = None


class FrozenSlot(Answer):
    """`problem` says why its requests are refused; None where its snapshot is there."""

    slot: str
    snapshot: str
    problem: str | None


class Index(Answer):
    """The listing of a slot. `age_seconds` is that of its oldest part."""

    slot: str
    state: str
    complete: bool
    age_seconds: float | None
    keys: int
    keys_before: int | None
    error: str | None
    inventory_error: str | None


class Pending(Answer):
    """What the origin does not have yet. `oldest_acknowledged_at` is in seconds since 1970."""

    objects: int
    bytes: int
    oldest_acknowledged_at: float | None
    open_uploads: int
    open_upload_bytes: int
    conflicts: int
    damaged: int
    failing: int
    waiting_for_bucket: int = 0
    local_objects: int = 0
    local_bytes: int = 0


class PendingSlot(Pending):
    """Of one slot. `buffer_bytes` is None where it does not write back any more."""

    slot: str
    buffer_bytes: int | None
    staged_bytes: int
    oldest_upload_touched_at: float | None
    reason: str | None


class BucketProfile(Answer):
    """What was found out about a bucket: whether its ETags are MD5s, and what it makes of conditions, by request."""

    bucket: str
    md5_etags: bool
    conditions: dict[str, str]


class Writeback(Answer):
    """Of all slots."""

    journal_problem: str | None
    slots: list[PendingSlot]
    buckets: list[BucketProfile]


class Status(Answer):
    """`/api/v1/status`. `gateway` is None while it starts."""

    gateway: GatewayStatus | None
    origin: MainOrigin
    cache: CacheStatus
    pins: list[str]
    frozen: list[FrozenSlot]
    indexes: list[Index]
    writeback: Writeback | None

    @property
    def is_ready(self) -> bool:
        """Every process serves."""
        return self.gateway is not None and self.gateway.ready


class Link(Answer):
    """One direction of the link to the origin, in bytes per second; `capacity` None: not limited, or not found yet."""

    capacity: int | None
    capacity_found: bool
    delay_seconds: float | None
    bytes_per_second: int


class SlotCapacity(Answer):
    """Of the disk."""

    guaranteed_bytes: int
    limit_bytes: int | None
    used_bytes: int
    borrowed_bytes: int
    pinned_bytes: int


class SlotBandwidth(Answer):
    """Bytes per second in the last second, and those that a slot has a right to."""

    bytes_per_second: int
    guarantee: int | None
    ceiling: int | None
    share: int | None


class OriginRequests(Answer):
    """Requests that were held back because the origin refuses some, and what has become of them."""

    throttled: int
    waited_seconds: float
    in_vain: int
    slow_down: int


class Unflushed(Answer):
    """What the origin does not have yet."""

    objects: int
    bytes: int


class Slot(Answer):
    """What one has, what it is entitled to, and what binds it."""

    name: str
    prefix: str
    mode: str
    consistency: str
    write: str
    capacity: SlotCapacity
    hit_ratio: float | None
    misses: dict[str, int]
    unflushed: Unflushed | None
    read_bandwidth: SlotBandwidth
    write_bandwidth: SlotBandwidth
    origin_requests: OriginRequests
    binds: list[str]


class Slots(Answer):
    """`/api/v1/slots`."""

    link: dict[str, Link]
    slots: list[Slot]


class CallerLimits(Answer):
    """None where nothing limits it; bandwidths in bytes per second."""

    max_concurrent_requests: int | None
    requests_per_second: float | None
    read_bandwidth: int | None
    write_bandwidth: int | None

    @property
    def is_any(self) -> bool:
        return any((self.max_concurrent_requests, self.requests_per_second, self.read_bandwidth, self.write_bandwidth))


class CallerRates(Answer):
    """Per second."""

    requests: float
    sent_bytes: float
    received_bytes: float


class Caller(Answer):
    """A credential or a class. `throttled` and `refused` are requests by limit, `per_second` None of a class."""

    scope: str
    name: str
    limits: CallerLimits
    running: int
    waiting: int
    throttled: dict[str, int]
    refused: dict[str, int]
    per_second: CallerRates | None
    binds: list[str]


class Callers(Answer):
    """`/api/v1/callers`."""

    callers: list[Caller]


class RecentRequest(Answer):
    """A request to the S3 port that is over, at a time in seconds since 1970."""

    at: float
    operation: str
    bucket: str | None
    key: str | None
    slot: str
    status: str
    cache: str | None
    reason: str | None
    error: str | None
    seconds: float
    sent_bytes: int
    received_bytes: int
    caller: str
    request_id: str

    @property
    def url(self) -> str:
        return _url(self.bucket, self.key)

    @property
    def is_error(self) -> bool:
        """Whether the client was not served, and not to blame for it."""
        return self.status.startswith("5") or self.status == "broken-off"


class OriginFailure(Answer):
    """A request to the origin that it answered with a failure, or not at all (`status` is unreachable)."""

    at: float
    method: str
    bucket: str | None
    key: str | None
    slot: str
    purpose: str
    status: str
    seconds: float

    @property
    def url(self) -> str:
        return _url(self.bucket, self.key)


def _url(bucket: str | None, key: str | None) -> str:
    return "s3://" + "/".join(part for part in (bucket, key) if part is not None)


class RecentRequests(Answer):
    """`/api/v1/requests`."""

    slowest: list[RecentRequest]
    errors: list[RecentRequest]
    refusals: list[RecentRequest]
    origin_failures: list[OriginFailure]


class Job(Answer):
    """Work in the background. `prefix` is empty where a manifest lists the objects."""

    id: str
    kind: str
    name: str
    prefix: str
    state: str
    objects_found: int
    bytes_found: int
    found_all: bool
    objects_done: int
    bytes_done: int
    bytes_fetched: int
    bytes_per_second: float | None = None
    seconds_left: float | None = None
    full: bool
    objects_failed: int
    errors: list[str]


class JobList(Answer):
    """`/api/v1/jobs`."""

    jobs: list[Job]


class Prefix(Answer):
    """What was unpinned."""

    prefix: str


class Snapshot(Answer):
    """A frozen data set. What cannot be used has a problem, and may lack the rest; times in seconds since 1970."""

    name: str
    prefix: str | None = None
    objects: int = 0
    bytes: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    digest: str = ""
    problem: str | None = None
    slots: list[str] = []


class SnapshotList(Answer):
    """`/api/v1/snapshots`."""

    snapshots: list[Snapshot]


class NamedAnswer(Answer):
    """What was deleted."""

    name: str


class PendingObject(Answer):
    """A write that the origin does not have yet. Times in seconds since 1970."""

    bucket: str
    key: str
    state: str
    bytes: int = 0
    deleted: bool | None = None
    acknowledged_at: float | None = None
    sequence: int | None = None
    bytes_sent: int = 0
    failures: int = 0
    failing_since: float | None = None
    reason: str | None = None

    @property
    def url(self) -> str:
        """`s3://bucket/key`."""
        return f"s3://{self.bucket}/{self.key}"


class OpenUpload(Answer):
    """A multipart upload that its client has not completed. Times in seconds since 1970."""

    bucket: str
    key: str
    upload_id: str
    initiated_at: float | None
    touched_at: float | None
    parts: int
    bytes: int

    @property
    def url(self) -> str:
        """`s3://bucket/key`."""
        return f"s3://{self.bucket}/{self.key}"


class FlushProgress(Answer):
    """What is left of what was pending when the flush was asked for, and what is the matter with it.

    `stuck` waits for a person's decision, `held_up` besides that for failures to end; `through` is the number up to
    which writes are meant.
    """

    prefix: str
    is_name: bool
    through: int
    objects: int
    bytes: int
    bytes_sent: int
    local_objects: int
    conflicts: int
    damaged: int
    failing: int
    waiting_for_bucket: int = 0
    stuck: int
    held_up: int
    open_uploads: int
    open_upload_bytes: int
    awaiting_files: int
    files_missing: int
    longest_attempt_seconds: float | None
    origin_away: bool
    journal_problem: str | None
    problems: list[PendingObject]


class OpenUploadCount(Answer):
    """How many uploads are no objects yet, and how much of them is here."""

    open_uploads: int
    open_upload_bytes: int


class Resolved(Answer):
    """`etag_at_origin` is what is overwritten, if there is anything."""

    etag_at_origin: str | None = None


class Aborted(Answer):
    """Upload ids."""

    aborted: list[str]
    not_open: list[str]


class Checkpoint(Answer):
    """A checkpoint, as far as it is known here."""

    bucket: str
    prefix: str
    state: str
    files: int
    bytes: int
    bytes_flushed: int
    ranks: int
    last_at: float = 0.0
    flush_seconds_left: float | None
    exposed_seconds: float | None

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`."""
        return f"s3://{self.bucket}/{self.prefix}"


class UngroupedObjects(Answer):
    """Objects that belong to no checkpoint."""

    objects: int
    first: str
    slot: str | None


class CheckpointPage(Answer):
    """`/api/v1/checkpoints`."""

    checkpoints: list[Checkpoint]
    ungrouped: UngroupedObjects | None = None


class ExplainedSlot(Answer):
    """The slot of an object."""

    name: str
    prefix: str
    mode: str
    consistency: str
    metadata_ttl_seconds: float | None
    snapshot: str | None
    write: str
    authorization: str
    authorization_ttl_seconds: float | None


class KnownVersion(Answer):
    """What is known of an object's version: `by` whom, and whether that is believed (`state`)."""

    by: str | None
    state: str
    age_seconds: float | None
    exists: bool | None
    etag: str | None
    bytes: int | None


class ExplainedBlocks(Answer):
    """Of that version: which blocks are here. `missing` are first and last bytes."""

    total: int
    looked_at: int
    here: int
    partly_here: int
    evicted: int
    bytes_here: int
    missing: list[tuple[int, int]]


class HeldBlocks(Answer):
    """Of all versions."""

    blocks: int
    bytes: int


class ExplainedWrite(Answer):
    """A write that the origin does not have yet."""

    deleted: bool | None
    etag: str | None
    bytes: int | None
    state: str
    acknowledged_at: float | None
    reason: str | None


class Explanation(Answer):
    """`/api/v1/explain`."""

    bucket: str
    key: str
    slot: ExplainedSlot
    known: KnownVersion
    pins: list[str]
    blocks: ExplainedBlocks | None
    held: HeldBlocks
    why_not_kept: str | None
    pending: ExplainedWrite | None


AnswerType = TypeVar("AnswerType", bound=Answer)


def parsed(kind: type[AnswerType], document: Any, base_url: str) -> AnswerType:
    """A document as one of its kind; AdminPortError where it is another."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise AdminPortError(
            f"this version of the command does not understand the answer of {base_url} "
            f"({place}: {first['msg']}): is it a Forebay, and of the same version?"
        ) from None


class Sample(NamedTuple):
    """One number of /metrics."""

    name: str
    labels: dict[str, str]
    value: float


_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)",?')


def _labels(text: str) -> dict[str, str]:
    found, at = {}, 0
    while label := _LABEL.match(text, at):
        found[label[1]], at = label[2], label.end()
    return found


def samples(exposition: str, names: Collection[str]) -> Iterator[Sample]:
    """The numbers of these metrics, of the text of /metrics."""
    for line in exposition.splitlines():
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        if name in names:
            yield Sample(name, _labels(labels), float(value))


class AdminClient:
    """Asks the admin port at `base_url`, with its token where it has one. AdminPortError says what was wrong."""

    def __init__(self, base_url: str, token: str | None, directory: str | None = None) -> None:
        """A gateway on another cache directory than `directory` is told to refuse."""
        self.base_url = base_url.rstrip("/")
        self._headers = _headers(token, directory)
        self._has_answered = False

    def status(self) -> Status:
        """How the gateway is."""
        return self.get("/api/v1/status", Status)

    def slots(self) -> Slots:
        """Takes a second, over which rates are taken."""
        return self.get("/api/v1/slots", Slots)

    def reload(self) -> Reloaded:
        """Have the gateway read its settings anew. AdminPortError where it refuses them."""
        answer = self._ask("POST", "/api/v1/reload", timeout=CHANGE_TIMEOUT_SECONDS)
        return parsed(Reloaded, answer, self.base_url)

    def metrics(self) -> str:
        """The text of /metrics."""
        with httpx.Client(timeout=ANSWER_TIMEOUT_SECONDS, trust_env=False, headers=self._headers) as client:
            try:
                answer = client.get(f"{self.base_url}/metrics")
                answer.raise_for_status()
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise_problem(self.base_url, error)
        return answer.text

    def requests(self, limit: int) -> RecentRequests:
        """Those of late that were slow, failed or were refused: so many of each at most."""
        return self.get(f"/api/v1/requests?limit={limit}", RecentRequests)

    def callers(self) -> Callers:
        """Takes a second, over which rates are taken."""
        return self.get("/api/v1/callers", Callers)

    def explain(self, name: str) -> Explanation:
        return self.get(f"/api/v1/explain?{urlencode({'object': name})}", Explanation)

    def jobs(self) -> list[Job]:
        """All that are known, the oldest first."""
        return self.get("/api/v1/jobs", JobList).jobs

    def job(self, job_id: str) -> Job:
        """One of them."""
        return self.get(f"/api/v1/jobs/{quote(job_id, safe='')}", Job)

    def cancel_job(self, job_id: str) -> Job:
        """End a job; what it has done stays done."""
        return self.delete(f"/api/v1/jobs/{quote(job_id, safe='')}", Job)

    def start_job(self, kind: str, prefix: str, *, allow_empty: bool = False) -> Job:
        """Begin to `warm`, `evict` or `pin` what lies under a prefix."""
        return self.post(f"/api/v1/{kind}", {"prefix": prefix, "allow_empty": allow_empty}, Job)

    def start_listed_job(self, kind: str, manifest: Iterator[bytes], media_type: str) -> Job:
        return parsed(Job, self._ask("POST", f"/api/v1/{kind}", **_content(manifest, media_type)), self.base_url)

    def unpin(self, prefix: str) -> Prefix:
        return self.post("/api/v1/unpin", {"prefix": prefix}, Prefix)

    def snapshots(self) -> SnapshotList:
        """All of them."""
        return self.get("/api/v1/snapshots", SnapshotList)

    def snapshot(self, name: str) -> Snapshot:
        """One of them."""
        return self.get(_snapshot_path(name), Snapshot)

    def create_snapshot(self, name: str, prefix: str, *, allow_empty: bool = False) -> Job:
        """Begin to make one."""
        return self.post("/api/v1/snapshots", {"name": name, "prefix": prefix, "allow_empty": allow_empty}, Job)

    def import_snapshot(self, name: str, lines: Iterator[bytes], media_type: str) -> Snapshot:
        """Make one of JSON lines, of any number."""
        options = _content(lines, media_type) | {"timeout": _STREAM_TIMEOUT_SECONDS}
        return parsed(Snapshot, self._ask("PUT", _snapshot_path(name), **options), self.base_url)

    def delete_snapshot(self, name: str, *, force: bool) -> NamedAnswer:
        """With `force` though it freezes a slot."""
        return self.delete(_snapshot_path(name) + ("?force=true" if force else ""), NamedAnswer)

    def snapshot_lines(self, name: str) -> Iterator[bytes]:
        return self._lines(f"{_snapshot_path(name)}/objects", {})

    def snapshot_differences(self, name: str, other: str | None) -> Iterator[bytes]:
        """What is different in another one, or at the bucket now, line by line."""
        return self._lines(f"{_snapshot_path(name)}/diff", {"with": other} if other is not None else {})

    def flush(self, prefix: str, *, patience_seconds: float = 0.0) -> FlushProgress:
        return self.post("/api/v1/flush", {"prefix": prefix}, FlushProgress, patience_seconds=patience_seconds)

    def flush_progress(self, begun: FlushProgress, *, patience_seconds: float = 0.0) -> FlushProgress:
        asked = {"prefix": begun.prefix, "through": str(begun.through)} | ({"is_name": "true"} if begun.is_name else {})
        return self.get(f"/api/v1/flush?{urlencode(asked)}", FlushProgress, patience_seconds=patience_seconds)

    def open_upload_count(self, prefix: str) -> OpenUploadCount:
        return self.get(f"/api/v1/flush?{urlencode({'prefix': prefix, 'through': '0'})}", OpenUploadCount)

    def pending_objects(self, prefix: str, *, problems: bool = False) -> Iterator[PendingObject]:
        """Every one, read page by page; with `problems` only what does not get to the origin."""
        asked = {"prefix": prefix} | ({"problems": "true"} if problems else {})
        for one in self.pages("/api/v1/writeback/objects", "objects", asked):
            yield parsed(PendingObject, one, self.base_url)

    def open_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """Every one, read page by page."""
        for one in self.pages("/api/v1/writeback/uploads", "uploads", {"prefix": prefix}):
            yield parsed(OpenUpload, one, self.base_url)

    def resolve(self, name: str, decision: str, sequence: int | None) -> Resolved:
        """Decide about `s3://bucket/key`; with `sequence` about this very write."""
        asked = {"object": name, "decision": decision} | ({} if sequence is None else {"sequence": sequence})
        return self.post("/api/v1/writeback/resolve", asked, Resolved)

    def abort_uploads(self, upload_ids: list[str]) -> Aborted:
        """100 at most."""
        return self.post("/api/v1/writeback/abort", {"upload_ids": upload_ids}, Aborted)

    def pages(self, path: str, what: str, asked: Mapping[str, str], size: int = PAGE) -> Iterator[dict[str, Any]]:
        """Every document of a list, read page by page, as they are."""
        after = None
        while True:
            query = dict(asked) | {"limit": str(size)} | ({"after": after} if after is not None else {})
            page = self._ask("GET", f"{path}?{urlencode(query)}")
            yield from page[what]
            after = page["next"]
            if after is None:
                return

    def get(self, path: str, kind: type[AnswerType], *, patience_seconds: float = 0.0) -> AnswerType:
        """A document. With patience, a gateway that does not answer now, or says that it cannot (503), is asked again
        so long."""
        return parsed(kind, self._ask("GET", path, patience_seconds=patience_seconds), self.base_url)

    def post(
        self, path: str, document: Mapping[str, Any], kind: type[AnswerType], *, patience_seconds: float = 0.0
    ) -> AnswerType:
        """Ask for something to be done. Patience as in `get`: what is asked for may be done twice then."""
        options = _content(orjson.dumps(document), "application/json")
        return parsed(kind, self._ask("POST", path, patience_seconds=patience_seconds, **options), self.base_url)

    def delete(self, path: str, kind: type[AnswerType]) -> AnswerType:
        return parsed(kind, self._ask("DELETE", path), self.base_url)

    def _lines(self, path: str, query: Mapping[str, str]) -> Iterator[bytes]:
        try:
            with (
                httpx.Client(timeout=_STREAM_TIMEOUT_SECONDS, trust_env=False) as client,
                client.stream("GET", self.base_url + path, params=query, headers=self._headers) as answer,
            ):
                if answer.is_error:
                    answer.read()
                answer.raise_for_status()
                rest = b""
                for piece in answer.iter_bytes():
                    *lines, rest = (rest + piece).split(b"\n")
                    yield from lines
                if rest:
                    yield rest
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise_problem(self.base_url, error)

    def _ask(self, method: str, path: str, *, patience_seconds: float = 0.0, **options: Any) -> dict[str, Any]:
        begun = time.monotonic()
        while True:
            try:
                return self._answer(method, path, **options)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                is_strange = isinstance(error, httpx.ConnectError) and not self._has_answered
                bound_seconds = min(patience_seconds, _STRANGE_SECONDS) if is_strange else patience_seconds
                if time.monotonic() >= begun + bound_seconds or not _passes(error):
                    raise_problem(self.base_url, error)
            time.sleep(_AGAIN_SECONDS)

    def _answer(
        self, method: str, path: str, *, timeout: float = ANSWER_TIMEOUT_SECONDS, **options: Any
    ) -> dict[str, Any]:
        headers = self._headers | options.pop("headers", {})
        with httpx.Client(timeout=timeout, trust_env=False) as client:
            answer = client.request(method, self.base_url + path, headers=headers, **options)
            self._has_answered = True
            answer.raise_for_status()
            document: dict[str, Any] = answer.json()
        return document


class LiveAdminClient:
    """The same on an event loop, over one connection, for somebody who looks again and again. Must be closed."""

    def __init__(self, base_url: str, token: str | None, directory: str | None, timeout_seconds: float) -> None:
        self.base_url = base_url.rstrip("/")
        headers = _headers(token, directory)
        self._client = httpx.AsyncClient(timeout=timeout_seconds, trust_env=False, headers=headers)

    async def get(self, path: str, kind: type[AnswerType]) -> AnswerType:
        """A document; AdminPortError."""
        try:
            answer = await self._client.get(self.base_url + path)
            answer.raise_for_status()
            document = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise_problem(self.base_url, error)
        return parsed(kind, document, self.base_url)

    async def text(self, path: str) -> str:
        """What is no document; AdminPortError."""
        try:
            answer = await self._client.get(self.base_url + path)
            answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise_problem(self.base_url, error)
        return answer.text

    async def aclose(self) -> None:
        await self._client.aclose()


def _snapshot_path(name: str) -> str:
    return f"/api/v1/snapshots/{quote(name, safe='')}"


def _content(content: bytes | Iterator[bytes], media_type: str) -> dict[str, Any]:
    return {"content": content, "headers": {"content-type": media_type}}


def _headers(token: str | None, directory: str | None) -> dict[str, str]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return headers | ({"x-forebay-directory": quote(os.fsencode(directory))} if directory else {})


def _passes(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 503
    return isinstance(error, httpx.TransportError)


def raise_problem(base_url: str, error: Exception) -> NoReturn:
    if isinstance(error, httpx.HTTPStatusError):
        response = error.response
        hint = "; give it as FOREBAY_ADMIN__TOKEN, or in the file of --config" if response.status_code == 401 else ""
        raise AdminPortError(f"{_reason(response)}{hint} ({base_url} answered {response.status_code})") from error
    if isinstance(error, httpx.RemoteProtocolError):
        raise AdminPortError(f"the answer of {base_url} broke off: {error}") from error
    if isinstance(error, httpx.TimeoutException):
        raise AdminPortError(f"no gateway answers at {base_url} in time: {type(error).__name__}") from error
    if isinstance(error, httpx.ConnectError):
        raise NoAdminPort(
            f"no gateway answers at {base_url}: {error}; is `forebay serve` running there? --admin-url names another"
        ) from error
    raise AdminPortError(f"no gateway answers at {base_url}: {error}") from error


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return response.text.strip()[:200]
