"""The documents of the admin API: the gateway answers with them, the command line reads them, OpenAPI describes them.

A field without a default is one that the command line needs. A gateway of another version may lack one of the others;
the gateway itself gives every field. Times are in seconds since 1970.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema


class Document(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="allow", defer_build=True, json_schema_serialization_defaults_required=True
    )

    def document(self) -> dict[str, Any]:
        """Return it with all fields that came, those of a later version too."""
        return self.model_dump(mode="json", exclude_unset=True)


def one_of(*values: str | None) -> WithJsonSchema:
    """Describe the values that this version knows; a later one may answer others."""
    return WithJsonSchema({"enum": list(values)})


def members(kind: str, *names: str) -> WithJsonSchema:
    """Describe an object whose members are all of one kind."""
    return WithJsonSchema({"type": "object", "properties": {name: {"type": kind} for name in names}})


PREFIX: dict[str, Any] = {
    "type": "string",
    "pattern": r"^s3://([^/]+(/[\s\S]*)?)?$",
    "examples": ["s3://bucket/prefix"],
    "description": "s3:// is everything",
}
PREFIX_OF_BUCKET: dict[str, Any] = {
    "type": "string",
    "pattern": r"^s3://[^/]+(/[\s\S]*)?$",
    "examples": ["s3://bucket/prefix"],
}
Time: TypeAlias = Annotated[float, Field(description="seconds since 1970-01-01 UTC")]
MaybeTime: TypeAlias = Annotated[float | None, Field(description="seconds since 1970-01-01 UTC")]

# The gateway


class Process(Document):
    name: str
    process_id: int | None = Field(description="null while it is down")
    ready: bool
    restarts: int
    generation: int = Field(0, description="of the settings that it keeps to")
    hangs: bool = Field(False, description="it has not answered for seconds; killed after 30")
    last_end: str | None = Field(None, description="how it has ended unasked the last time")
    last_end_at: MaybeTime = Field(None)


class GatewayStatus(Document):
    version: str
    instance_id: str = Field("")
    process_id: int = Field(0)
    started_at: Time = Field(0.0)
    s3_url: str
    admin_url: str = Field("")
    peer_address: str | None = Field(None, description="where other nodes ask this one; null without [cluster]")
    directory: str = Field("")
    draining: bool
    ready: bool
    processes: list[Process]
    closed: str | None = Field(None, description="why the cache directory cannot be used")
    generation: int = Field(0, description="how often settings were changed since the start")
    config_file: str | None = Field(None, description="the settings' file; null: there is none")
    settings_problem: str | None = Field(
        None, description="why the configuration, read anew at the last SIGHUP, is not in force"
    )


class DifferingBlocks(Document):
    slot: str
    here_bytes: int = Field(description="size of this node's blocks")
    there_bytes: int = Field(description="size of the member's blocks")


class ClusterMember(Document):
    name: str = Field("", description="its own name; empty until it has answered")
    address: str = Field(description="of its peer port")
    this_node: bool = Field(False)
    zone: str = Field("")
    weight: int = Field(1)
    share: float = Field(description="of the blocks of its zone, 0 to 1")
    state: Annotated[str, one_of("up", "silent", "closed", "unknown")] = Field(
        description="closed: its cache directory cannot be used, or it speaks another protocol, and it owns no blocks; "
        "unknown: it has never answered"
    )
    problem: str | None = Field(None, description="why it does not answer, or owns no blocks")
    version: str | None = Field(None, description="of Forebay; null until it has answered")
    age_seconds: float | None = Field(None, description="for which it has been a member without a gap")
    heard_at: MaybeTime = Field(None)
    clock_seconds: float | None = Field(None, description="by which its clock is ahead of this node's")
    same_homes: bool | None = Field(None, description="it has the same origins as this node")
    reaches_this_node: bool | None = Field(None, description="this node has answered its last hello")
    differing_blocks: list[DifferingBlocks] = Field([], description="slots whose blocks have another size there")
    sent_bytes: int = Field(0, description="of objects that this node gave to it since its own start")
    received_bytes: int = Field(0, description="of objects that this node took from it since its own start")


class RedisState(Document):
    """This node's knowledge of Redis. The server's own fields hold its last answer."""

    believed: bool = Field(description="this node believes what the registry in Redis says")
    problem: str | None = Field(None, description="why it does not")
    since: MaybeTime = Field(None)
    version: str = Field("")
    policy: str = Field("", description="what it does when it is full; anything but noeviction loses entries")
    used_bytes: int = Field(0)
    limit_bytes: int = Field(0, description="0: none")
    clients: int = Field(0)
    clients_max: int = Field(0)
    replicas: int = Field(0)
    waits_for_replicas: bool = Field(False, description="min-replicas-to-write is set")
    clock_seconds: float | None = Field(None, description="by which its clock is ahead of this node's")


class ForgottenNode(Document):
    node: str
    pending: int = Field(description="keys that only this node has pending: they are given up")
    forgotten: bool = Field(description="false: it was only asked what would be given up")


class ClusterDocument(Document):
    name: str
    node: str = Field("")
    address: str = Field("", description="of this node's peer port")
    zone: str = Field("")
    sent_bytes: int = Field(0, description="of objects that this node gave to others since its start")
    received_bytes: int = Field(0, description="of objects that this node took from others since its start")
    redis: RedisState | None = Field(None, description="null: cluster.redis is not set")
    members: list[ClusterMember]


class OriginStatus(Document):
    endpoint_url: str
    region: str = Field("")
    reachable: bool = Field(description="it has answered a signed question, or refused it")
    state: Annotated[str, one_of("well", "unreachable", "no credentials", "refused", "wrong clock")] = Field("well")
    problem: str | None = Field(description="what is wrong, in words")


class DifferingOrigin(OriginStatus):
    prefix: str
    slot: str | None = Field(description="null: it is a bucket's")
    replica: int | None = Field(None, description="which of the bucket's replicas; null: it is its home")
    credentials: str = Field(description="whose key signs, in words")


class MainOrigin(OriginStatus):
    differing: list[DifferingOrigin] = Field(
        [], description="[[buckets]], their replicas, slots with origin_credentials"
    )


DiskState: TypeAlias = Annotated[
    str,
    one_of("well", "full", "read-only", "failing", "closed"),
    Field(description="the worst that any process has found; full, too, where no write finds room"),
]


class DiskStatus(Document):
    state: DiskState
    processes: dict[str, int] = Field({}, description="how many processes have found what")
    journal_failing_processes: int = Field(
        0,
        description="of how many processes the write-back journal takes nothing now: they acknowledge and flush "
        "nothing until it is tried again with success",
    )


class Scrub(Document):
    """the scrubber's pass under way, or its last"""

    started_at: Time = Field(0.0)
    ended_at: MaybeTime
    next_at: Time = Field(0.0)
    part_done: Annotated[float, WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1})]
    blocks: int = Field(0)
    read_bytes: int
    dropped_blocks: int


class FiguresDocument(Document):
    usage_bytes: int
    hit_bytes: int = Field(0)
    miss_bytes: int = Field(0)
    pinned_bytes: int = Field(0, description="of usage_bytes")
    hit_ratio: float | None = Field(description="a share of bytes; null while nothing was read")


class CacheStatus(FiguresDocument):
    directory: str
    capacity_bytes: int
    block_size_bytes: int = Field(0)
    disk: DiskStatus
    scrub: Scrub | None = Field(None)


class SlotStatus(FiguresDocument):
    name: str
    prefix: str
    mode: str
    eviction: str
    capacity_bytes: int = Field(description="guaranteed to the slot")
    capacity_limit_bytes: int = Field(description="the slot never has more")


class FrozenSlot(Document):
    slot: str
    snapshot: str
    problem: str | None = Field(description="why requests in the slot are refused")


class Index(Document):
    slot: str
    prefix: str = Field("")
    refresh_seconds: float | None = Field(None, description="null: crawled once")
    state: Annotated[str, one_of("starting", "inventory", "crawling", "waiting", "failing")]
    complete: bool = Field(description="LIST of the prefix is answered without the origin")
    known_since: float | None = Field(None, description="seconds since 1970-01-01 UTC: the oldest part")
    age_seconds: float | None = Field(description="of the oldest part")
    started_at: float | None = Field(None, description="of the crawl under way, or the last one")
    ended_at: float | None = Field(None, description="of the last crawl that came to its end")
    next_at: MaybeTime = Field(None)
    keys: int = Field(
        description="that the crawl under way, or the last one, has listed, and those that it need not list"
    )
    pages: int = Field(0)
    keys_before: int | None = Field(description="at the end of the last crawl")
    crawls: int = Field(0, description="that have come to their end, since the gateway started")
    changed: int = Field(0, description="keys that were found changed or gone")
    error: str | None
    inventory: str | None = Field(None, description="s3://bucket/path/manifest.json to begin with")
    inventory_error: str | None = Field(description="why it could not be used")
    refreshing: bool = Field(False, description="a refresh that was asked for is not over")


class IndexesDocument(Document):
    indexes: list[Index]


class EventSource(Document):
    queue_url: str
    canary: str | None = Field(None, description="where the canary is written; null: nothing is measured")
    problem: str | None = Field(description="why no events may come, in words")
    lag_seconds: float | None = Field(None, description="of the last event")
    silent_seconds: float = Field(description="since the canary's event came last; without one, since any did")


class Health(Document):
    status: Annotated[str, WithJsonSchema({"const": "ok"})]


class Readiness(Document):
    ready: bool
    draining: bool
    workers_ready: list[str]
    origin_reachable: bool
    origin_problem: str | None
    events_problem: str | None = Field(None, description="why no events of [[event_sources]] may come")
    frozen_slots_missing: list[str] = Field(description="slots whose snapshot is not there or cannot be used")
    cache_disk: DiskState


class SettingsInForce(Document):
    settings: dict[str, Any]
    defaults: dict[str, Any]


class ReloadedDocument(Document):
    file: str | None = Field(description="what was read besides the environment")
    changed: list[str] = Field(description="the keys of what is another than before")
    in_force: bool = Field(description="all processes keep to them")


class SlotChanged(Document):
    name: str
    in_force: bool


# Writes that the origin does not have yet


class Sums(Document):
    objects: int = Field(description="acknowledged here, and not at the origin; deletions too")
    bytes: int = Field(description="of these objects")
    oldest_acknowledged_at: MaybeTime = Field(None)
    open_uploads: int
    open_upload_bytes: int = Field(description="what parts of open uploads take here")
    conflicts: int = Field(description="others have changed the object at the origin")
    damaged: int
    failing: int = Field(description="refused, and tried again and again")
    waiting_for_bucket: int = Field(0, description="tried in vain: the bucket does not answer, or is busy")
    local_objects: int = Field(0, description="kept here only, and not to be sent; not among objects")


class PendingSums(Sums):
    local_bytes: int = Field(0, description="of local_objects")
    staged_bytes: int = Field(description="what is taken of the buffer, by parts of open uploads too")


class PendingSlot(PendingSums):
    slot: str
    buffer_bytes: int | None = Field(description="null: it does not write back any more")
    oldest_upload_touched_at: float | None = Field(description="the last part of the one left alone longest")
    reason: str | None = Field(description="why the last of its flushes failed that do")


class BucketProfile(Document):
    bucket: str
    md5_etags: bool = Field(description="otherwise nothing is absorbed")
    conditions: Annotated[
        dict[str, str],
        WithJsonSchema(
            {
                "type": "object",
                "properties": {
                    kind: {"enum": ["yes", "ignored", "refused", "unknown"]} for kind in ("put", "complete", "delete")
                },
            }
        ),
    ] = Field(description="what the bucket makes of a condition on such a request")


JournalProblem: TypeAlias = Annotated[
    str | None, Field(description="why nothing of what the origin takes can be written down: then nothing is flushed")
]


class Writeback(PendingSums):
    journal_problem: JournalProblem
    slots: list[PendingSlot]
    buckets: list[BucketProfile]


class Named(Document):
    bucket: str
    key: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


class PendingObject(Named):
    """A write that the origin does not have yet."""

    sequence: int = Field(0, description="never given twice")
    slot: str = Field("")
    state: Annotated[
        str, one_of("waiting", "sending", "local", "waiting for the bucket", "failed", "conflict", "damaged")
    ] = Field(description="local: kept here only, and not to be sent")
    bytes: int = Field(0)
    etag: str | None = Field(None, description="as the origin will show it")
    deleted: bool | None = Field(None, description="the flush deletes the key at the origin")
    acknowledged_at: MaybeTime = Field(None)
    parts: int = Field(0)
    parts_sent: int = Field(0)
    bytes_sent: int = Field(0, description="of the parts that the origin has")
    failures: int = Field(0, description="in a row")
    failing_since: float | None = Field(None, description="null while only the bucket keeps it waiting")
    waits_for: int | None = Field(None, description="the sequence of what must be there before")
    reason: str | None = Field(None, description="of the last failure, or what is damaged")


class OpenUploadDocument(Named):
    """A multipart upload that its client has not completed."""

    upload_id: str
    slot: str = Field("")
    initiated_at: MaybeTime
    touched_at: MaybeTime
    parts: int
    parts_sent: int = Field(0)
    bytes: int = Field(description="what they take here")
    reason: str | None = Field(None, description="of the last failure")


Next: TypeAlias = Annotated[str | None, Field(description="`after` of the next page; null: this is the last")]


class PendingObjects(Document):
    objects: list[PendingObject]
    next: Next = Field(None)


class OpenUploadsDocument(Document):
    uploads: list[OpenUploadDocument]
    next: Next = Field(None)


class FlushSums(Sums):
    bytes_sent: int
    stuck: int = Field(description="conflicts, damaged objects, and what waits behind these")
    held_up: int = Field(description="what is stuck, what fails, and what waits behind these")


class FlushProgress(FlushSums):
    """the rest of what was pending when the flush was asked for"""

    prefix: Annotated[str, WithJsonSchema(PREFIX)]
    is_name: bool = Field(description="it is about the object of that name, and all under it as under a directory")
    awaiting_files: int = Field(
        description="manifests whose files are not all at the origin, and markers that wait for other nodes"
    )
    files_missing: int = Field(description="of these; writes of other nodes, too")
    through: int = Field(description="what was acknowledged later does not count")
    longest_attempt_seconds: float | None = Field(
        description="since the first of the attempts began that are under way; null: none is"
    )
    journal_problem: JournalProblem
    origin_away: bool = Field(description="it has not carried out several requests in a row")
    problems: list[PendingObject] = Field(description="the first of them")


class NodeFlush(Document):
    """one node's part of a flush over the cluster"""

    node: str
    address: str = Field(description="of its peer port")
    problem: str | None = Field(None, description="why it could not be asked")
    progress: FlushProgress | None = Field(None, description="null: it could not be asked")


class ClusterFlush(Document):
    nodes: list[NodeFlush]


class AtOrigin(Document):
    bytes: int | None
    etag: str
    modified_at: MaybeTime


class Versions(Document):
    object: PendingObject
    at_origin: AtOrigin | None = Field(description="null: nothing is there")


class Resolved(Document):
    object: str = Field("")
    sequence: int = Field(0)
    decision: Annotated[str, one_of("keep-ours", "keep-theirs", "discard")] = Field("")
    etag_at_origin: str | None = Field(None, description="keep-ours: what is overwritten, if it is there")


class AbortedDocument(Document):
    aborted: list[str] = Field(description="upload ids")
    not_open: list[str] = Field(description="completed or aborted before, or unknown")


# Checkpoints

CHECKPOINT_STATES = (
    *("writing", "stalled", "acknowledged", "flushing", "durable", "local", "waiting for the bucket", "failed"),
    "conflict",
)


class FileBehind(Document):
    key: str
    bytes: int
    bytes_read: int
    last_at: float | None = Field(description="null: nothing was read")


class Behind(Document):
    """the first 100 that lag, those first that were read least"""

    ranks: list[int] = Field(description="that wrote these objects")
    objects: list[FileBehind]


class Restore(Document):
    """how far it was read through this gateway the last time; null: not within the last hour"""

    state: Annotated[str, one_of("reading", "stalled", "over")] = Field(
        description="stalled: nothing has come for a minute, and files lag behind others of their kind"
    )
    began_at: Time
    last_at: float = Field(description="the last byte that was sent")
    files: int = Field(description="files that were read in part, and all others of their kinds")
    files_begun: int = Field(0, description="files that were read in part")
    files_behind: int = Field(description="those that lag")
    bytes: int = Field(description="of these files")
    bytes_read: int = Field(description="of each file as much as it has at most")
    behind: Behind


class MissingDocument(Document):
    """what the save lacks still"""

    ranks: list[int] = Field(description="the first 100")
    objects: list[str] = Field(description="manifests and shards")
    open_uploads: int


class Checkpoint(Document):
    bucket: str
    prefix: str = Field(description="its directory; the key, where it is one object")
    step: int | None = Field(None)
    layout: str = Field("", examples=["dcp", "huggingface", "pattern"])
    slot: str = Field("")
    state: Annotated[str, one_of(*CHECKPOINT_STATES)]
    files: int = Field(description="acknowledged objects")
    bytes: int = Field(description="of these")
    bytes_flushed: int = Field(description="what the origin has of them, parts too")
    bytes_local: int = Field(0, description="what is not to be sent")
    ranks: int = Field(description="how many have written something, as names tell")
    ranks_seen: list[int] = Field([], description="the first 1000")
    began_at: float | None = Field(None, description="the first byte of the save")
    last_at: float | None = Field(None, description="the last thing that came of it")
    save_seconds: float | None = Field(
        None, description="from the first byte to the last acknowledgement; null: nothing is acknowledged"
    )
    flush_seconds_left: float | None = Field(
        description="at the rate of the last minute; null: nothing is left, or the rate is not known yet"
    )
    exposed_seconds: float | None = Field(
        description="since the oldest object was acknowledged that only this node has; null: none is"
    )
    kept: bool = Field(False, description="it stays in the cache, by the slot's keep_last")
    kept_reason: str | None = Field(None, description="why it does not, though it is to")
    missing: MissingDocument
    reason: str | None = Field(None, description="of a failure or conflict, or what a manifest waits for")
    restore: Restore | None = Field(None)
    nodes: list[str] = Field([], description="over the cluster: those through which it came")

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


class UngroupedObjects(Document):
    objects: int = Field(description="1000 at most are counted")
    first: str = Field(description="one of them, as s3://bucket/key")
    slot: str | None = Field(description="its slot, while it is pending")


class CheckpointsDocument(Document):
    checkpoints: list[Checkpoint]
    next: Next = Field(None)
    ungrouped: UngroupedObjects | None = Field(
        None,
        description="where there is no checkpoint, and no state was asked for: what this node has acknowledged "
        "under the prefix that belongs to none; null: nothing of late",
    )


class NodeProblem(Document):
    """a node that could not be asked"""

    node: str
    address: str
    problem: str


class ClusterCheckpoints(Document):
    """one table over all nodes"""

    checkpoints: list[Checkpoint]
    next: Next = Field(None)
    unanswered: list[NodeProblem] = Field(description="what these nodes have is not in it")


# Slots


class LinkDocument(Document):
    capacity: int | None = Field(description="bytes per second; null: no limit, or not found yet")
    capacity_found: bool = Field(description='it is "auto": found out while the link is used')
    delay_seconds: float | None = Field(
        description="by how much the last answers were later than without a queue, where that is found out"
    )
    bytes_per_second: int


class Links(Document):
    read: LinkDocument
    write: LinkDocument


class SlotCapacity(Document):
    guaranteed_bytes: int
    limit_bytes: int | None
    used_bytes: int
    reserved_bytes: int = Field(0, description="for fills in progress")
    pinned_bytes: int = Field(description="of used_bytes")
    borrowed_bytes: int = Field(description="beyond what is guaranteed")
    lendable_bytes: int = Field(0, description="guaranteed and not in use")


class SlotBandwidth(Document):
    """from or to the origin, bytes per second"""

    bytes_per_second: int = Field(description="over the last second")
    guarantee: int | None
    ceiling: int | None
    share: int | None = Field(
        description="by its weight, if all slots that move something now wanted all they could get; null: "
        "the link's capacity is not set"
    )
    waited_seconds: Annotated[dict[str, float], members("number", "ceiling", "link")] = Field(
        {}, description="that pieces of bodies were held back since the gateway started, all of them together"
    )
    bound_by: Annotated[str | None, one_of("ceiling", "link", None)] = Field(
        None, description="what held pieces back in the last second"
    )


class OriginRequests(Document):
    throttled: int = Field(description="held back, as the origin refuses some")
    waited_seconds: float = Field(description="for which they were")
    in_vain: int = Field(description="held back for too long, and not sent")
    slow_down: int = Field(description="refused by the origin for their number")


class Unflushed(Document):
    objects: int
    bytes: int


Authorization: TypeAlias = Annotated[str, one_of("gateway", "origin")]
SlotBound: TypeAlias = Annotated[
    str, one_of("read-ceiling", "read-link", "write-ceiling", "write-link", "capacity-limit", "buffer", "request-rate")
]


class SlotDocument(Document):
    name: str
    prefix: str
    mode: str
    consistency: str
    write: str
    authorization: Authorization = Field("gateway")
    weight: int = Field(1)
    capacity: SlotCapacity
    hit_ratio: float | None
    misses: dict[str, int] = Field(description="by reason")
    unflushed: Unflushed | None
    read_bandwidth: SlotBandwidth
    write_bandwidth: SlotBandwidth
    origin_requests: OriginRequests
    binds: list[SlotBound]


class SlotsDocument(Document):
    link: Links
    slots: list[SlotDocument]


# Callers, and requests of late


class CallerLimitsDocument(Document):
    max_concurrent_requests: int | None
    requests_per_second: float | None
    read_bandwidth: int | None
    write_bandwidth: int | None

    @property
    def is_any(self) -> bool:
        return any((self.max_concurrent_requests, self.requests_per_second, self.read_bandwidth, self.write_bandwidth))


class CallerUse(Document):
    requests: int
    sent_bytes: int
    received_bytes: int


class CallerRates(Document):
    requests: float
    sent_bytes: float
    received_bytes: float


LIMITS = ("concurrency", "rate", "read", "write")
ByLimit: TypeAlias = Annotated[dict[str, int], members("integer", *LIMITS)]


class CallerDocument(Document):
    scope: Annotated[str, one_of("credential", "class")]
    name: str
    limits: CallerLimitsDocument
    running: int = Field(description="0 where nothing limits it")
    waiting: int
    throttled: ByLimit
    waited_seconds: Annotated[dict[str, float], members("number", *LIMITS)] = Field({})
    refused: ByLimit
    used: CallerUse | None = Field(None)
    per_second: CallerRates | None = Field(description="null of a class")
    binds: list[Annotated[str, one_of(*LIMITS)]]


class CallersDocument(Document):
    callers: list[CallerDocument]


class Try(Document):
    process: str = Field("", description="worker0, worker1, … or background")
    at: float = Field(description="when it was over, in seconds since 1970-01-01 UTC")
    bucket: str | None
    key: str | None = Field(description="at most 200 bytes: the middle of a longer one is left out")
    slot: str = Field(description="none: refused before it was looked up")
    seconds: float

    @property
    def url(self) -> str:
        return "s3://" + "/".join(part for part in (self.bucket, self.key) if part is not None)


class RecentRequest(Try):
    operation: str
    status: str = Field(description="the HTTP status, client-left or broken-off")
    cache: str | None = Field(description="as in x-forebay-cache")
    reason: str | None = Field(description="of a miss")
    error: str | None = Field(description="S3's code, where the gateway has answered with it")
    sent_bytes: int
    received_bytes: int
    caller: str = Field(description="the credential, as in forebay_caller_requests_total")
    request_id: str

    @property
    def is_error(self) -> bool:
        """Return whether the client was not served, and not to blame for it."""
        return self.status.startswith("5") or self.status == "broken-off"


class OriginFailure(Try):
    method: str
    purpose: str = Field(description="as in forebay_origin_requests_total")
    status: str = Field(description="the HTTP status, or unreachable: there was no answer")


class RecentRequestsDocument(Document):
    slowest: list[RecentRequest] = Field(description="of the last five minutes, the slowest first")
    errors: list[RecentRequest] = Field(description="answered 5xx, or not to the end; the latest first")
    refusals: list[RecentRequest] = Field(description="answered 4xx, except 404, 412 and 416; the latest first")
    origin_failures: list[OriginFailure] = Field(
        description="tries of requests to the origin: answered 5xx or 429, or not at all; the latest first"
    )


# Jobs, pins, events and snapshots


class JobDocument(Document):
    id: str
    kind: Annotated[str, one_of("warm", "evict", "pin", "snapshot")]
    name: str = Field(description="of the snapshot that is made")
    prefix: str = Field(description="empty where a manifest lists the objects")
    manifest: bool = Field(False)
    state: Annotated[str, one_of("running", "done", "failed", "cancelled")]
    created_at: Time = Field(0.0)
    ended_at: MaybeTime = Field(None)
    place: int = Field(0, description="how far in its list everything is done")
    objects_found: int
    bytes_found: int
    found_all: bool = Field(description="the listing is complete")
    objects_done: int
    bytes_done: int = Field(description="of an eviction: what it has dropped, of every version")
    bytes_fetched: int = Field(description="of bytes_done, what came from the origin for this job")
    bytes_per_second: float | None = Field(None, description="over the last half minute, of what has arrived")
    seconds_left: float | None = Field(
        None, description="at that rate; null: not everything is found, nothing moves, or the rate is not known yet"
    )
    full: bool = Field(description="the cache has no room for the rest")
    objects_failed: int
    errors: list[str]
    allow_empty: bool = Field(False, description="of a pin or a snapshot: finding no object is no failure")
    cluster: bool = Field(False, description="of a warm-up or a pin: each block goes to the node that owns it")
    was_pinned: bool = Field(False, description="before the job, so it stays pinned however the job ends")


class JobsDocument(Document):
    jobs: list[JobDocument]


class PinsDocument(Document):
    pins: list[str]


class Unpinned(Document):
    prefix: Annotated[str, WithJsonSchema(PREFIX_OF_BUCKET)]
    not_told: list[str] = Field([], description="nodes of the cluster that do not answer, and may keep it pinned")


class Refresh(Document):
    prefix: Annotated[str, WithJsonSchema(PREFIX_OF_BUCKET)]
    indexes: list[str] = Field(description="slots whose indexes list it anew; /api/v1/indexes says when that is over")
    voided: bool = Field(description="all is forgotten that was remembered of the bucket: no index has all of it")


class EventResult(Document):
    model_config = ConfigDict(json_schema_serialization_defaults_required=False)

    place: str = Field(description="where in the document it stands")
    event: str = ""
    bucket: str = ""
    key: str = ""
    outcome: Annotated[str, one_of("applied", "ignored", "malformed")]
    why: str = Field(default="", description="where it was not applied")


class EventResults(Document):
    applied: int
    ignored: int
    malformed: int
    results: list[EventResult]


class SnapshotDocument(Document):
    """A frozen data set; one that cannot be used may lack what has a default."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=False)

    name: str
    prefix: str = Field(default="", description="s3://bucket/prefix")
    origin: str = Field(default="", description="where it was listed")
    objects: int = 0
    bytes: int = Field(default=0, description="of all objects together")
    started_at: float = Field(default=0.0, description="when the listing began, seconds since 1970-01-01 UTC")
    ended_at: float = Field(default=0.0, description="when it ended: an object is as it was at some time in between")
    digest: str = Field(default="", description="SHA-256 over all keys, ETags and sizes")
    problem: str | None = Field(description="why it cannot be used; then the rest may be missing")
    slots: list[str] = Field(description="the slots that it freezes")


class Snapshots(Document):
    snapshots: list[SnapshotDocument]


class SnapshotDeleted(Document):
    name: str


# One object


class ExplainedSlot(Document):
    name: str
    prefix: str
    mode: str
    consistency: str
    metadata_ttl_seconds: float | None
    snapshot: str | None
    write: str
    authorization: Authorization = Field(description="who judges callers")
    authorization_ttl_seconds: float | None


class KnownVersion(Document):
    by: Annotated[str | None, one_of("catalog", "snapshot", None)] = Field(description="who knows a version")
    state: Annotated[str, one_of("fresh", "stale", "useless", "unknown")] = Field(
        description="fresh: answers without the origin; stale: where the origin does not"
    )
    age_seconds: float | None
    exists: bool | None
    etag: str | None
    bytes: int | None


class ExplainedBlocks(Document):
    """of that version"""

    total: int
    looked_at: int = Field(description="of a very long object not all are looked at")
    here: int
    partly_here: int
    evicted: int = Field(description="were here, as far as is remembered")
    bytes_here: int
    missing: list[list[int]] = Field(
        description="first and last byte of the first runs of blocks that are not here whole"
    )


class HeldBlocks(Document):
    """of all versions"""

    blocks: int
    bytes: int


class BlockOwner(Document):
    address: str = Field(description="of its peer port")
    this_node: bool
    first: int = Field(description="blocks that it owns")
    second: int = Field(description="blocks that it owns when their owner is away")


class ExplanationDocument(Named):
    slot: ExplainedSlot
    known: KnownVersion
    pins: list[str]
    blocks: ExplainedBlocks | None
    owners: list[BlockOwner] = Field([], description="in a cluster: of its first 256 blocks")
    held: HeldBlocks
    why_not_kept: str | None
    pending: PendingObject | None = Field(None, description="as in /api/v1/writeback/objects")


# All of it


class Status(Document):
    gateway: GatewayStatus | None = Field(description="null while it starts")
    origin: MainOrigin
    cache: CacheStatus
    pins: list[str] = Field(description="s3://bucket/prefix")
    frozen: list[FrozenSlot]
    indexes: list[Index]
    event_sources: list[EventSource] = Field([], description="queues of [[event_sources]]")
    writeback: Writeback | None
    slots: list[SlotStatus] = Field([])
    cluster: ClusterDocument | None = Field(None, description="null: this node is alone, or it starts")

    @property
    def is_ready(self) -> bool:
        """Return whether every process serves."""
        return self.gateway is not None and self.gateway.ready


class TroubleDocument(Document):
    """what is wrong, why, what to do, and a page of the documentation"""

    level: Annotated[str, one_of("error", "warning")] = Field(description="warning: it works, and is at risk or slow")
    what: str
    why: str
    advice: str
    page: str


Latencies: TypeAlias = Annotated[
    list[int],
    Field(
        description="how many took up to each of latency_buckets_seconds and longer than the one before, and how many "
        "took longer than all of them"
    ),
]


class Counts(Document):
    """sums since the gateway started, except for in_flight"""

    at: Time
    requests: int
    request_seconds: float = Field(description="that requests took, all of them together")
    failed: int = Field(description="requests answered 5xx, or not to the end")
    in_flight: int = Field(description="requests that are being answered now")
    sent_bytes: int
    received_bytes: int
    hit_bytes: int
    miss_bytes: int
    misses: dict[str, int] = Field(description="by reason")
    origin_requests: int
    origin_failed: int = Field(description="answered 5xx or 429, or not at all")
    origin_read_bytes: int
    origin_written_bytes: int
    flush_bytes: int
    flushed_objects: int
    served_latencies: Latencies
    origin_latencies: list[int] = Field(description="the same of requests to the origin, flushes left out")
    flush_latencies: list[int] = Field(description="the same of flushes")


class Overview(SlotsDocument, CallersDocument):
    host: str = Field(description="the name of the machine")
    status: Status
    troubles: list[TroubleDocument]
    counts: Counts
    history: list[Counts] = Field(description="of the last 15 minutes, with history=true")
    latency_buckets_seconds: list[float]
    requests: RecentRequestsDocument
    jobs: list[JobDocument] = Field(description="those that run, then the newest of the others")
    snapshots: list[SnapshotDocument]
    checkpoints: list[Checkpoint] = Field(
        description="those that failed, have a conflict or stalled first, then the newest"
    )
    problems: list[PendingObject] = Field(description="what does not get to the origin")
    uploads: list[OpenUploadDocument]
