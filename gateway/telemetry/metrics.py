"""Declare every metric of the gateway once: name, labels, unit, help. A test holds `docs/metrics.md` to this.

Code counts where something happens: `metrics.CACHE_DAMAGED.add(1, slot)`. Label values come from small closed sets,
such as operations, statuses and purposes; never from keys or callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from gateway.telemetry.metric_kinds import DECLARED as DECLARED
from gateway.telemetry.metric_kinds import Counter, Gauge, Histogram, LatestGauge

_READS = "GetObject HeadObject ListObjectsV2"
_COMMON = f"{_READS} PutObject UploadPart CompleteMultipartUpload DeleteObject"
"""Operations that are exported as 0 before the first of them."""

_PURPOSES = "live readahead warm refresh flush forward"

USED_BY_ALL = "default"
"""The `used_by` of `[origin]`."""

_FLUSH_BUCKETS_SECONDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0, 14400.0)
"""A flush may wait for the origin for hours."""

FailureKind = Literal[
    "unreachable",
    "credentials",
    "clock",
    "refused",
    "no-bucket",
    "slow-down",
    "origin-error",
    "changed",
    "disk",
    "other",
]
"""Why an attempt to flush has failed."""

BUILD_INFO = LatestGauge(
    "forebay_build_info{version,python} 1", "1. version: of the gateway; python: of the interpreter."
)
ORIGIN_UP = LatestGauge(
    "forebay_origin_up{origin,used_by} 1 or 0",
    "1: the origin answered when it was asked last, 30 seconds ago at most; it is asked sooner where requests have "
    "failed since. 0: it did not, or could not be asked: forebay_origin_state says which. origin: its host and port. "
    "used_by: default ([origin], whatever is not named), bucket:NAME (of [[buckets]]), replica:BUCKET/NUMBER (from 0 "
    "on) or slot:NAME (with a key of its own).",
)
ORIGIN_STATE = LatestGauge(
    "forebay_origin_state{origin,used_by,state} 1 or 0",
    "1 for the state that the origin was in then, else 0. state: well, unreachable (no answer), no-credentials (there "
    "is no key to ask with: none was found, or it has expired and is not renewed), refused (it refuses the gateway's "
    "own key, or has no such bucket) or wrong-clock (this machine's). origin and used_by: as of forebay_origin_up.",
)
ORIGIN_KEY_NOT_RENEWED = LatestGauge(
    "forebay_origin_key_not_renewed{origin,used_by} 1 or 0",
    "1: what signs is good still, and STS does not lend the next key pair: when it expires, the state becomes "
    "no-credentials. origin and used_by: as of forebay_origin_up.",
)
PROCESS_START = LatestGauge(
    "forebay_process_start_time_seconds{process} seconds since 1970",
    "When the process began. process: supervisor, worker0, worker1, … or background.",
)
PROCESS_CPU = LatestGauge(
    "forebay_process_cpu_seconds{process} seconds",
    "Processor time that it has used since then; it begins anew with the process.",
)
PROCESS_MEMORY = LatestGauge(
    "forebay_process_resident_memory_bytes{process} bytes", "Memory that is its own or shared."
)
PROCESS_DESCRIPTORS = LatestGauge(
    "forebay_process_open_fds{process} descriptors", "Files and sockets that it has open."
)

REQUESTS = Counter(
    "forebay_requests_total{operation,slot,status,cache} requests",
    "Requests to the S3 port that are over. slot: the key's, or none when refused before. status: the HTTP status, "
    "client-left or broken-off. cache: hit, partial, miss, peer, bypass, forwarded, absorbed or none.",
    {"operation": "GetObject", "status": "200 206", "cache": "hit miss"},
    {"operation": "HeadObject ListObjectsV2", "status": "200", "cache": "hit miss forwarded"},
    {"operation": "PutObject UploadPart CompleteMultipartUpload", "status": "200", "cache": "absorbed forwarded"},
    {"operation": "DeleteObject", "status": "204", "cache": "absorbed forwarded"},
    {"operation": _COMMON, "status": "500 503", "cache": "none"},
    {"operation": "Unknown", "slot": "none", "status": "400 405 503", "cache": "none"},
)
MISSES = Counter(
    "forebay_misses_total{operation,slot,reason} requests",
    "Requests for objects, listings and bucket settings that were not answered by what is here alone, by why. reason: "
    "first-read, evicted, changed, not-kept or expired, as in x-forebay-cache.",
    operation=_READS,
    reason="first-read evicted changed not-kept expired",
)
REQUEST_SECONDS = Histogram(
    "forebay_request_duration_seconds{operation} seconds",
    "From the head of a request to the end of its answer.",
    operation=_COMMON,
)
PREPARED_REQUESTS = Counter(
    "forebay_prepared_requests_total{operation,slot} requests",
    "Those of forebay_requests_total with cache = hit that were answered by what an earlier request had prepared.",
    operation="GetObject HeadObject",
)
REQUESTS_IN_FLIGHT = Gauge("forebay_requests_in_flight requests", "Requests to the S3 port now being answered.")
SENT_BYTES = Counter(
    "forebay_sent_bytes_total{operation,slot} bytes", "Bytes of answers' bodies sent to clients.", operation=_COMMON
)
RECEIVED_BYTES = Counter(
    "forebay_received_bytes_total{operation,slot} bytes",
    "Bytes of requests' bodies received from clients.",
    operation=_COMMON,
)

CACHE_HIT_BYTES = Counter(
    "forebay_cache_hit_bytes_total{slot} bytes", "Bytes given to readers from blocks that were complete on disk."
)
CACHE_MISS_BYTES = Counter(
    "forebay_cache_miss_bytes_total{slot} bytes",
    "Bytes given to readers that had to come from the origin first; not those from other nodes.",
)
CACHE_COALESCED = Counter(
    "forebay_cache_coalesced_total{slot} reads", "Reads that joined a fill which another reader had started."
)
CACHE_FILLS = Counter(
    "forebay_cache_fills_total{slot,outcome} blocks",
    "Fills of blocks that are over. outcome: filled or failed.",
    outcome="filled failed",
)
CACHE_FILL_SECONDS = Histogram(
    "forebay_cache_fill_duration_seconds seconds", "From the start of a block's fill to its publication."
)
CACHE_FILLED_BYTES = Counter("forebay_cache_filled_bytes_total{slot} bytes", "Bytes of blocks filled.")
CACHE_EVICTED_BLOCKS = Counter("forebay_cache_evicted_blocks_total{slot} blocks", "Blocks that made room for others.")
CACHE_EVICTED_BYTES = Counter(
    "forebay_cache_evicted_bytes_total{slot} bytes", "Bytes on disk of the blocks that made room for others."
)
CACHE_DAMAGED = Counter(
    "forebay_cache_damaged_blocks_total{slot} blocks",
    "Blocks dropped because their bytes were not what had been written, or could not be read.",
)
CACHE_NOT_KEPT = Counter(
    "forebay_cache_not_kept_total{slot,reason} blocks",
    "Blocks that were served and not kept; of a run of them in one read, the first is counted. reason: size (larger "
    "than max_cached_object_size), write-budget (daily_writes are used up), room (all there is is being filled, is "
    "pinned or belongs to others), copy (it is another node's, and the slot keeps no copies), disk (a small block that "
    "the disk did not take).",
    reason="size write-budget room copy disk",
)
WARM_UP_OBJECTS = Counter(
    "forebay_warm_up_objects_total{slot,outcome} objects",
    "Warm-ups by HEAD with Range: bytes=0-0 that are over. outcome: fetched (all of it is here), no-room (the cache "
    "took no more of it), changed (it was written or deleted meanwhile) or failed (the origin did not give it).",
    outcome="fetched no-room changed failed",
)
WARM_UP_WAITING = Gauge(
    "forebay_warm_up_waiting_objects objects", "Objects that wait to be warmed, of those asked for by HEAD."
)
CACHE_STORE_UNAVAILABLE = Counter(
    "forebay_cache_store_unavailable_total reads",
    "Reads served straight from the origin because the cache directory could not take or give bytes.",
)
SCRUB_BLOCKS = Counter(
    "forebay_scrub_blocks_total blocks",
    "Blocks that the scrubber has looked at. What it drops is in forebay_cache_damaged_blocks_total.",
)
SCRUB_BYTES = Counter(
    "forebay_scrub_read_bytes_total bytes", "Bytes that the scrubber has read from the disk and verified."
)
SCRUB_PASSES = Counter("forebay_scrub_passes_total passes", "Passes over all blocks that the scrubber has ended.")
CACHE_DISK_ERRORS = Counter(
    "forebay_cache_disk_errors_total{trouble} errors",
    "What the disk under the cache directory refused. trouble: full (no space, quota), read-only or failing.",
    trouble="full read-only failing",
)
CACHE_DISK_STATE = Gauge(
    "forebay_cache_disk_state_processes{state} processes",
    "Processes by what they may use the cache directory for now. state: well; full and read-only (what is there is "
    "served, nothing is filled); failing (left alone, the origin serves) or closed (could not be opened).",
)
WRITEBACK_DISK_FULL = LatestGauge(
    "forebay_writeback_disk_full state",
    "1 while the disk under the cache directory has no room for another buffered write, so that writes go to the "
    "bucket; 0 otherwise. Cached blocks may still replace each other.",
)
CACHE_USAGE_BYTES = LatestGauge("forebay_cache_usage_bytes{slot} bytes", "Bytes on disk that cached blocks take now.")
CACHE_RESERVED_BYTES = LatestGauge(
    "forebay_cache_reserved_bytes{slot} bytes", "Bytes on disk set aside for fills in progress."
)
CACHE_PINNED_BYTES = LatestGauge(
    "forebay_cache_pinned_bytes{slot} bytes", "Of the bytes on disk, those that are pinned."
)
CACHE_WRITTEN_TODAY_BYTES = LatestGauge(
    "forebay_cache_written_today_bytes bytes",
    "Bytes that fills were given room for since midnight UTC: what daily_writes bounds.",
)
CACHE_UNSURVEYED_BYTES = LatestGauge(
    "forebay_cache_unaccounted_bytes bytes",
    "Bytes on disk, left by an unclean boot, that the cache does not know again yet.",
)
CACHE_CAPACITY_BYTES = LatestGauge("forebay_cache_capacity_bytes bytes", "Bytes on disk that cached blocks may take.")

CATALOG_LOOKUPS = Counter(
    "forebay_catalog_lookups_total{slot,outcome} look-ups",
    "Questions about objects in slots whose consistency is not strict. outcome: hit and absent (the catalog answered), "
    "listed (it did, because a LIST has shown since that the object is the same), miss (the origin was asked) or stale "
    "(it did not answer, and the slot allows an older answer). With consistency = snapshot: hit (the frozen version's "
    "head is known), absent (it is not in the snapshot) or miss.",
    outcome="hit absent listed miss stale",
)
CATALOG_NOT_KEPT = Counter(
    "forebay_catalog_not_kept_total answers",
    "Answers of the origin that the catalog did not keep: too many at once, or the disk could not take them.",
)
LISTING_PAGES = Counter(
    "forebay_listing_pages_total{slot,outcome} pages",
    "Pages of LIST that Forebay has made: in slots whose consistency is not strict, and where something may be pending "
    "in the write-back buffer. outcome: hit (index or snapshot answered), partial (they did, and the origin was asked "
    "about keys just written through Forebay, or about what no snapshot freezes), miss (the origin was asked) or stale "
    "(it did not answer, and the slot allows an older answer).",
    outcome="hit partial miss stale",
)
LISTING_KEYS_NOT_KEPT = Counter(
    "forebay_listing_keys_dropped_total keys",
    "Keys listed by the origin that the listing index did not keep: too many at once, or the disk could not take them.",
)
INDEX_CRAWLS = Counter(
    "forebay_index_crawls_total{slot,outcome} crawls",
    "Crawls of slots with index = true that are over. outcome: done or failed (what is left is crawled later).",
    outcome="done failed",
)
INDEX_CRAWLED_KEYS = Counter("forebay_index_crawled_keys_total{slot} keys", "Keys that crawls have listed and kept.")
INDEX_CHANGED_KEYS = Counter(
    "forebay_index_changed_keys_total{slot} keys",
    "Keys that crawls have found changed or gone; they were forgotten, and their blocks dropped.",
)
INDEX_KEYS = LatestGauge("forebay_index_keys{slot} keys", "Keys that there were when the last crawl ended.")
INDEX_KNOWN_SINCE = LatestGauge(
    "forebay_index_known_since_timestamp_seconds{slot} seconds since 1970",
    "When the oldest part of a complete index was asked for: time() minus this is its age. 0 while the index is not "
    "complete, or its age is not known because the machine was booted since.",
)

EVENT_SOURCE_UP = LatestGauge(
    "forebay_event_source_up{queue} 1 or 0",
    "1: the queue is read, and the canary's last event came back. 0: no events may come, whatever changes.",
)
EVENT_SOURCE_SILENT_SECONDS = LatestGauge(
    "forebay_event_source_silent_seconds{queue} seconds",
    "Since the canary's event came last; without a canary, since any event did, or since the start.",
)
EVENT_LAG_SECONDS = LatestGauge(
    "forebay_event_lag_seconds{queue} seconds",
    "From a change to when what was remembered of it was forgotten: of the last event, by its own time and this "
    "machine's clock, or of the canary, by the clock that only runs forward.",
)
ORIGIN_EVENTS = Counter(
    "forebay_origin_events_total{outcome} events",
    "Events of the origin that came to the admin port or in queues. outcome: applied (what is remembered of the object "
    "is void), ignored (a test, a confirmation, another service, a frozen slot) or malformed.",
    outcome="applied ignored malformed",
)

WRITEBACK_FLUSHED_OBJECTS = Counter(
    "forebay_writeback_flushed_objects_total{slot} objects",
    "Acknowledged writes and deletions that have reached the origin.",
)
WRITEBACK_FLUSHED_BYTES = Counter(
    "forebay_writeback_flushed_bytes_total{slot} bytes", "Bytes of the objects that have reached the origin."
)
WRITEBACK_FLUSH_FAILURES = Counter(
    "forebay_writeback_flush_failures_total{slot,reason} attempts",
    "Attempts to flush a write that failed; each is made again, for ever. reason: unreachable (no answer), credentials "
    "(there is no key to sign with, or the origin refuses it), clock (the origin has another time, and refuses what is "
    "signed), refused (403), no-bucket, slow-down (too many requests), origin-error (5xx, or an answer that is not "
    "S3's), changed (others change the key meanwhile, or the bucket has lost an upload), disk (this node's) or other.",
    reason=" ".join(get_args(FailureKind)),
)
WRITEBACK_FLUSH_SECONDS = Histogram(
    "forebay_writeback_flush_duration_seconds{slot} seconds",
    "From the acknowledgement of a write or deletion until the origin has it.",
    buckets_seconds=_FLUSH_BUCKETS_SECONDS,
)
WRITEBACK_CONFLICTS = Counter(
    "forebay_writeback_conflicts_total{slot} objects",
    "Writes that are kept here because others have changed the object at the origin.",
)
WRITEBACK_DAMAGED = Counter(
    "forebay_writeback_damaged_total{slot} objects",
    "Writes found to lie here otherwise than they were acknowledged; they are kept, and not sent.",
)
WRITEBACK_BUFFER_BYTES = LatestGauge(
    "forebay_writeback_buffer_bytes{slot} bytes", "What the slot's buffer may hold: `buffer`."
)
WRITEBACK_EXPOSURE_BYTES = LatestGauge(
    "forebay_writeback_exposure_bytes{slot} bytes",
    "What of the slot may be on this node alone, before writes go through: `max_unflushed_bytes`; 0: no limit.",
)
WRITEBACK_USED_BYTES = LatestGauge(
    "forebay_writeback_buffer_used_bytes{slot} bytes",
    "What the slot's buffer holds: pending bytes, room taken for bodies that are arriving, and what is not to be sent.",
)
WRITEBACK_PENDING_BYTES = LatestGauge(
    "forebay_writeback_pending_bytes{slot} bytes",
    "Acknowledged bytes that would be lost with this node: of objects that the origin does not have yet, conflicts "
    "included, and of parts of open uploads. What copies share counts once.",
)
WRITEBACK_PENDING_OBJECTS = LatestGauge(
    "forebay_writeback_pending_objects{slot} objects",
    "Objects and deletions that were acknowledged and have not reached the origin, conflicts included.",
)
WRITEBACK_LOCAL_BYTES = LatestGauge(
    "forebay_writeback_local_bytes{slot} bytes",
    "Acknowledged bytes that are kept on this node only, and not to be sent, because of the slot's write or flush: not "
    "among the pending ones.",
)
WRITEBACK_LOCAL_OBJECTS = LatestGauge(
    "forebay_writeback_local_objects{slot} objects", "The objects that these bytes are of."
)
WRITEBACK_OLDEST_SECONDS = LatestGauge(
    "forebay_writeback_oldest_age_seconds{slot} seconds",
    "How long ago the oldest write was acknowledged that is on its way to the origin; 0: there is none. Conflicts, "
    "which wait for a person, do not count.",
)
WRITEBACK_OLDEST_CONFLICT_SECONDS = LatestGauge(
    "forebay_writeback_oldest_conflict_age_seconds{slot} seconds",
    "How long ago the oldest write was acknowledged that is in conflict, and waits for a person; 0: there is none.",
)
WRITEBACK_THROUGH = Counter(
    "forebay_writeback_written_through_total{slot,reason} writes",
    "Writes that were not absorbed in a slot with write-back, and are the origin's: PutObject, CopyObject, "
    "CreateMultipartUpload, UploadPart, UploadPartCopy and CompleteMultipartUpload. reason, as in the answer's "
    "x-forebay-not-absorbed. Because of a bound: full, share (the access key's bodies that are still arriving take its "
    "share), size (larger than the whole buffer), exposure-bytes, exposure-age, disk (the file system has no room, or "
    "has just failed). Because only the origin can judge it: condition, header, key. Because of the bucket: "
    "bucket-unknown (nothing was written to it yet), bucket-etags (they are no MD5s), bucket-unreadable (the gateway "
    "may not look at its objects), storage-class, acl (it has taken none of this class, or with this ACL, yet). "
    "Because only the origin has it: source-of-the-origin (of a copy), upload-of-the-origin, part-of-the-origin (of an "
    "upload that is completed). Because other nodes could not find it: registry.",
    reason="full share size exposure-bytes exposure-age disk condition header key bucket-unknown bucket-etags "
    "bucket-unreadable storage-class acl source-of-the-origin upload-of-the-origin part-of-the-origin "
    "registry",
)
WRITEBACK_SLOWED_DOWN = Counter(
    "forebay_writeback_slow_down_total{slot} writes",
    "Writes that were answered 503 SlowDown because the buffer had no room for them.",
)
WRITEBACK_PACED_SECONDS = Counter(
    "forebay_writeback_paced_seconds_total{slot} seconds",
    "Time that acknowledgements were held back because the buffer filled faster than it was flushed, summed over all "
    "that waited side by side.",
)
WRITEBACK_NOT_FLUSHED = Gauge(
    "forebay_writeback_unflushed_objects{slot,state} objects",
    "Acknowledged writes that do not get to the origin now. state: failing (tried again and again: 403, a bucket that "
    "is gone, expired credentials), conflict (others have changed the object: forebay writeback resolve), damaged, or "
    "waiting for the bucket (it does not answer, or is busy: nobody has to do anything about the write). forebay "
    "writeback list --problems names all but the last.",
)
CHECKPOINTS = Gauge(
    "forebay_checkpoints{slot,state} checkpoints",
    "Checkpoints that this node knows, by state: writing, stalled (a save that lacks something, of which nothing has "
    "come for a minute), acknowledged, flushing, durable, local (something of it is not to be sent), waiting for the "
    "bucket (it does not answer, or is busy), failed, conflict. forebay checkpoints shows them.",
)
WRITEBACK_OPEN_UPLOADS = LatestGauge(
    "forebay_writeback_open_uploads{slot} uploads",
    "Multipart uploads that were begun here, and are neither completed nor aborted: forebay writeback list --uploads.",
)
WRITEBACK_OPEN_UPLOAD_BYTES = LatestGauge(
    "forebay_writeback_open_upload_bytes{slot} bytes",
    "What the parts of open uploads take of the buffer. They are no objects yet, and cannot be flushed.",
)
WRITEBACK_OPEN_UPLOAD_IDLE = LatestGauge(
    "forebay_writeback_open_upload_idle_seconds{slot} seconds",
    "Since the last part of the open upload that was left alone longest (of the 10,000 begun first); 0: there is none. "
    "At the slot's upload_expiry it is aborted.",
)
WRITEBACK_REMEMBERED = LatestGauge(
    "forebay_writeback_journal_rows{kind} rows",
    "What the journal remembers of what is over; 50,000 of each kind at most. kind: ended-upload (answers a repeated "
    "CompleteMultipartUpload for a day) or own-write (what this gateway has last put under a key at the origin).",
)
WRITEBACK_JOURNAL_BYTES = LatestGauge(
    "forebay_writeback_journal_bytes bytes",
    "The size of the write-back journal and its log on the disk. The file does not shrink: room in it is used again.",
)
WRITEBACK_JOURNAL_STATE = Gauge(
    "forebay_writeback_journal_state_processes{state} processes",
    "Processes that have the write-back journal open, by what it takes of them now. state: well, or failing (a commit "
    "has failed in the disk: nothing is acknowledged by them, or flushed, until it is tried again with success).",
)

SNAPSHOT_REFUSALS = Counter(
    "forebay_snapshot_refusals_total{slot,reason} requests",
    "Requests in slots with consistency = snapshot that could not be answered. reason: missing (there is no such "
    "snapshot), unusable (it is damaged, of another version or not of the slot), changed or gone (the bucket has "
    "another version of the object, or none, and the frozen one is not cached).",
    reason="missing unusable changed gone",
)

SMALL_ANSWERS = Counter(
    "forebay_bucket_metadata_answers_total{operation,outcome} requests",
    "Questions about buckets that may be answered from memory: HeadBucket, GetBucketLocation and the like. outcome: "
    "hit, miss (the origin was asked) or stale (it did not answer, and the slot allows an older answer).",
    operation="HeadBucket GetBucketLocation",
    outcome="hit miss stale",
)
SMALL_ANSWER_TROUBLES = Counter(
    "forebay_bucket_metadata_errors_total{trouble} troubles",
    "Small answers that the disk did not give or take: the origin is asked. trouble: unavailable (full, failing, "
    "locked or too slow) or damaged (the file was not what had been written).",
    trouble="unavailable damaged",
)

ORIGIN_REQUESTS = Counter(
    "forebay_origin_requests_total{method,status,purpose,slot,origin} requests",
    "Requests to the origin, each try counted. status: the HTTP status or unreachable. purpose: live, readahead, warm, "
    "refresh, flush or forward. origin: its host and port.",
    {"method": "GET", "status": "200 206", "purpose": "live"},
    {"method": "HEAD", "status": "200", "purpose": "live forward"},
    {"method": "GET", "status": "200", "purpose": "forward"},
    {"method": "GET HEAD", "status": "503 unreachable", "purpose": "live forward"},
    {"method": "POST", "status": "200", "purpose": "flush"},
    {"method": "PUT", "status": "200 403 503 unreachable", "purpose": "flush"},
    {"method": "PUT", "status": "200 503 unreachable", "purpose": "forward"},
)
ORIGIN_REQUEST_SECONDS = Histogram(
    "forebay_origin_request_duration_seconds{purpose,origin} seconds",
    "From sending a request to the origin to the head of its answer, and to the end of a body of at most 256 KiB.",
    purpose=_PURPOSES,
)
MEMBER_STATES = ("up", "silent", "closed", "unknown")

CLUSTER_MEMBERS = LatestGauge(
    "forebay_cluster_members{state} members",
    "Members of the cluster as this node knows them, itself included. state: up, silent (it does not answer any more), "
    "closed (it owns nothing: its cache directory cannot be used, or it speaks another protocol) or unknown (it has "
    "never answered).",
    state=" ".join(MEMBER_STATES),
)
CLUSTER_REGISTRY_BELIEVED = LatestGauge(
    "forebay_cluster_registry_believed state",
    "1 while this node believes Redis, 0 while it does not (`forebay cluster status` says why). Only with "
    "`cluster.redis`.",
)
CLUSTER_PEER_BYTES = Counter(
    "forebay_cluster_peer_bytes_total{slot,direction} bytes",
    "Bytes of objects moved between nodes of the cluster. direction: sent (this node gave them) or received.",
    direction="sent received",
)
CLUSTER_PEER_SECONDS = Histogram(
    "forebay_cluster_peer_seconds seconds", "From sending a request to another node to the head of its answer."
)
CLUSTER_FALLBACK_REQUESTS = Counter(
    "forebay_cluster_fallback_requests_total{reason} requests",
    "Requests to the bucket for what another node looks after. reason: unreachable (no answer that proves that a node "
    "gave it), busy, refused (it did not have what was asked for, or gave something else), bucket-away (it gets no "
    "answer from the bucket), old (what it remembers is older than the slot allows) or damaged (its bytes were not "
    "those that it promised, or broke off).",
    reason="unreachable busy refused bucket-away old damaged",
)
CLUSTER_DAMAGED = Counter(
    "forebay_cluster_damaged_total answers", "Answers of other nodes whose bytes were not those that they promised."
)
CLUSTER_PEER_REQUESTS = Counter(
    "forebay_cluster_peer_requests_total{outcome} requests",
    "Requests of other nodes that are over. outcome: served, verified (a block that another node doubted), named "
    "(other nodes that have just got the block), absent (not cached, where nothing else was wanted, or no such "
    "object), changed (the bucket has another version, or fewer bytes), refused (not signed by the cluster's secret, "
    "sent again, or no request of a node), misdirected (another protocol or bucket), busy, failed (also: the bucket "
    "does not answer this node) or broken-off.",
    outcome="served verified named absent changed refused misdirected busy failed broken-off",
)
ORIGIN_HEDGES = Counter(
    "forebay_origin_hedges_total{outcome} requests",
    "Reads of the origin that were stuck, and were asked for on another connection as well. outcome: won (that one "
    "brought the bytes), lost (the first one did, after all) or failed.",
    outcome="won lost failed",
)
ORIGIN_REPLICA = Counter(
    "forebay_origin_replica_total{outcome} requests",
    "Reads that a bucket's replica was asked for. outcome: hit (it had these bytes of this version), absent, "
    "other-version (another ETag, size or range) or failed (refused, an error, no answer). All but hits went to the "
    "source, or to the next replica.",
    outcome="hit absent other-version failed",
)
ORIGIN_REPLICA_BYTES = Counter(
    "forebay_origin_replica_bytes_total bytes",
    "Bytes of objects that replicas gave. They are among forebay_origin_bytes_total.",
)
DIRECTORY_SKIPPED_NAMES = Counter(
    "forebay_directory_skipped_names_total{reason} names",
    "Names in directories that are origins, left out of a listing each time that Forebay reads their directory. "
    "reason: not-utf-8, special-file (socket, FIFO, device), too-long (the key) or unreadable (a directory that the "
    "gateway's user may not read).",
    reason="not-utf-8 special-file too-long unreadable",
)
ORIGIN_BYTES = Counter(
    "forebay_origin_bytes_total{direction,purpose,slot} bytes",
    "Bytes of bodies moved to and from the origin. direction: read or write.",
    direction="read write",
    purpose=_PURPOSES,
)
BANDWIDTH_WAIT_SECONDS = Counter(
    "forebay_bandwidth_wait_seconds_total{by,direction,slot} seconds",
    "Time that pieces of bodies were held back, summed over all that waited side by side. by: ceiling (read_bandwidth "
    "or write_bandwidth of the slot was reached) or link (that of [origin] was, or others had more right to it). "
    "direction: read or write.",
    by="ceiling link",
    direction="read write",
)
ORIGIN_SLOW_DOWN = Counter(
    "forebay_origin_slow_down_total{slot} requests",
    "Requests that the origin has refused for their number (503 SlowDown, 429), each try counted.",
)
ORIGIN_THROTTLED = Counter(
    "forebay_origin_throttled_total{slot} requests",
    "Requests that were held back because the origin refuses some for their number, each try counted.",
)
ORIGIN_THROTTLE_WAIT_SECONDS = Counter(
    "forebay_origin_throttle_wait_seconds_total{slot} seconds",
    "Time that they were held back, summed over all that waited side by side.",
)
ORIGIN_THROTTLED_IN_VAIN = Counter(
    "forebay_origin_throttle_timeouts_total{slot} requests",
    "Requests that were held back for as long as it may be, and not sent: clients were answered 503 SlowDown.",
)
ORIGIN_REQUEST_RATE = LatestGauge(
    "forebay_origin_request_rate{bucket,direction} requests per second",
    "What the origin is believed to take of reads (GET, HEAD, LIST) or writes in a bucket, all prefixes that have a "
    "rate together; 0: nothing is held back. bucket: one of those that slots name, or (other).",
)
LINK_CAPACITY = LatestGauge(
    "forebay_link_capacity_bytes_per_second{direction} bytes per second",
    'What the link to the origin was found to bear, with read_bandwidth or write_bandwidth = "auto"; 0: no queue was '
    "seen yet, so nothing is held back. direction: read or write.",
)
LINK_DELAY = LatestGauge(
    "forebay_link_delay_seconds{direction} seconds",
    "By how much even the timeliest of the origin's last answers were later than without a queue at the link, where "
    "what it bears is found out; what cannot be told is 0. direction: read or write.",
)

AUTHORIZATIONS = Counter(
    "forebay_authorizations_total{slot,outcome} questions",
    "What a caller may do in a slot with authorization = origin. outcome: remembered (answered from memory), or what "
    "the origin has answered to a question in the caller's own name: allowed, denied (403), other (not there, another "
    "refusal), failed (5xx or no answer). Requests that are themselves sent in the caller's name, and prepared ones, "
    "are not counted here.",
    outcome="remembered allowed denied other failed",
)
CALLER_REQUESTS = Counter(
    "forebay_caller_requests_total{credential} requests",
    "Requests by credential: the access key id of [[credentials]], gateway (the gateway's own key pair), anonymous "
    "(unsigned) or none (refused before it was known).",
)
CALLER_SENT_BYTES = Counter(
    "forebay_caller_sent_bytes_total{credential} bytes", "Bytes of bodies sent to clients, by credential."
)
CALLER_RECEIVED_BYTES = Counter(
    "forebay_caller_received_bytes_total{credential} bytes", "Bytes of bodies received from clients, by credential."
)
CALLER_WAITS = Counter(
    "forebay_caller_waits_total{scope,name,limit} waits",
    "Requests, and pieces of bodies, that waited for room under a caller's limit. scope: credential or class. limit: "
    "concurrency, rate, read (bytes to the client) or write (bytes from it).",
)
CALLER_WAIT_SECONDS = Counter(
    "forebay_caller_wait_seconds_total{scope,name,limit} seconds",
    "Time that they have waited, summed over all that waited side by side. It grows while they wait.",
)
CALLER_REFUSED = Counter(
    "forebay_caller_refused_total{scope,name,limit} requests",
    "Requests that were answered 503 SlowDown because there was no room under a caller's limit in time.",
)
AUDIT_LOST = Counter(
    "forebay_audit_lost_lines_total lines", "Lines of the audit log that its disk has not taken, or not in time."
)
ACCESS_LOST = Counter(
    "forebay_access_log_lost_lines_total lines", "Lines of the access log that its disk has not taken, or not in time."
)
TRACE_SPANS = Counter(
    "forebay_trace_spans_total{outcome} spans",
    "Spans of traces. outcome: sent, failed (the collector did not take them) or dropped (too many waited for it).",
    outcome="sent failed dropped",
)
LOCAL_READS = Counter(
    "forebay_local_reads_total{answer} reads",
    "Reads that clients of the local socket asked for. answer: given (the client reads the files itself; also counted "
    "in forebay_requests_total), absent (it reads by HTTP) or damaged (it found wrong bytes).",
    answer="given absent damaged",
)
LOCAL_CONNECTIONS = Gauge("forebay_local_connections connections", "Connections to the local socket.")
LOCAL_CUT_OFF = Counter(
    "forebay_local_cut_off_total{reason} connections",
    "Connections to the local socket that the gateway closed. reason: stranger (no proof of a key), crowd (too many "
    "connections), protocol (a message that makes no sense, or answers that are not taken) or lease (files were not "
    "released in time).",
    reason="stranger crowd protocol lease",
)
CALLER_WAITING = Gauge(
    "forebay_caller_waiting{scope,name,limit} requests",
    "Requests and pieces of bodies that wait now, by the limit that kept them when they came.",
)
CALLER_RUNNING = Gauge(
    "forebay_caller_running{scope,name} requests", "Requests of callers that are limited, in all workers."
)

WORKER_RESTARTS = Counter(
    "forebay_worker_restarts_total{process} processes",
    "Processes that ended unasked and were started again. process: worker0, worker1, … or background.",
)


DISK_STATES = ("well", "full", "read-only", "failing", "closed")
"""From the best to the worst."""


def set_disk_state(state: str) -> None:
    """Set the state, of DISK_STATES, that this process has the cache directory in."""
    for one in DISK_STATES:
        CACHE_DISK_STATE.set(one == state, one)


def count_fills(slot: str, seconds: Sequence[float], size_bytes: int) -> None:
    """Count blocks that were fetched and published: for how long each, and their bytes together."""
    CACHE_FILLS.add(len(seconds), slot, "filled")
    CACHE_FILL_SECONDS.observe_all(seconds)
    CACHE_FILLED_BYTES.add(size_bytes, slot)
