"""The tables that may repeat: caller classes, buckets, slots, and credentials of callers and origins."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, SecretStr, model_validator

from gateway.config.fields import (
    AZURE_FORM,
    DIALECT_NAMES,
    BandwidthBytesPerSecond,
    CheckpointPatternText,
    DialectName,
    DurationSeconds,
    FileMode,
    HostPattern,
    PemFileSetting,
    S3ObjectUrl,
    S3Prefix,
    Section,
    SizeBytes,
    Symlinks,
    origin_url,
    power_of_two,
    setting,
    valid_endpoint_url,
)
from gateway.core.model import LOCAL_EXPIRY_SECONDS, MARKERS

BUFFER_BYTES_MIN = 8 * 2**20
"""One part of the usual size."""


_FLUSH = re.compile(r"all|latest|every-(\d{1,4})(?:st|nd|rd|th)")


def _flush_rule(value: str) -> str:
    found = _FLUSH.fullmatch(value)
    if found is None or (found[1] is not None and not 2 <= int(found[1]) <= 1000):
        raise ValueError("all, latest, or every-Nth with N from 2 to 1000, such as every-5th")
    return value


class CallerLimitSettings(Section):
    """The limits of callers on this node, over all its workers."""

    max_concurrent_requests: int | None = setting(
        None, "Requests at the same time, over all workers. Omitted: no limit.", allowed="1 to 100000"
    )
    requests_per_second: float | None = setting(
        None, "Requests per second, over all workers. Omitted: no limit.", allowed="0.1 to 1000000"
    )
    read_bandwidth_bytes_per_second: BandwidthBytesPerSecond | None = setting(
        None,
        "Bytes of bodies to the client, over all workers. Omitted: no limit.",
        allowed='at least 64KiB/s, such as "1GiB/s"',
    )
    write_bandwidth_bytes_per_second: BandwidthBytesPerSecond | None = setting(
        None,
        "Bytes of bodies from the client, over all workers. Omitted: no limit.",
        allowed='at least 64KiB/s, such as "500MiB/s"',
    )


_WORD = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}$"
"""The form of an app id in SDKs: the characters of a token (RFC 9110, 5.6.2)."""


class CallerClassSettings(CallerLimitSettings):
    """Callers of one kind, and their limits together. Without `app` and `product`: callers of no other class."""

    name: str = setting(
        help="Name in metrics and commands.",
        allowed="letters, digits, `-`, `_`, `.`; at most 64; unique",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
    )
    app: str | None = setting(
        None,
        "The class has callers whose User-Agent has the word `app/APP`; AWS SDKs add it from `AWS_SDK_UA_APP_ID`.",
        allowed="a word of at most 64 characters; this or product, not both",
        pattern=_WORD,
    )
    product: str | None = setting(
        None,
        "The class has callers whose User-Agent names this product, such as `rclone` in `rclone/v1.70`.",
        allowed="a word of at most 64 characters; this or app, not both",
        pattern=_WORD,
    )


class CredentialSettings(CallerLimitSettings):
    """A key pair that callers may sign with, the prefixes that it may touch, and its limits."""

    access_key_id: str = setting(
        help="Key id of the caller.",
        allowed="1 to 128 characters; not `none`, `anonymous`, `gateway`, `admin`, `signal` or `(gone)`",
        min_length=1,
        max_length=128,
    )
    secret_access_key: SecretStr | None = setting(
        None,
        "Secret of the caller.",
        allowed="a secret; exactly one of secret_access_key and secret_access_key_file",
        min_length=1,
    )
    secret_access_key_file: Path | None = setting(
        None,
        "File that holds the secret.",
        allowed="a readable file; exactly one of secret_access_key and secret_access_key_file",
    )
    session_token: SecretStr | None = setting(
        None,
        'Session token of the pair, if it is a temporary one of the origin (`authorization = "origin"`). Callers must '
        "send it.",
        allowed="a token",
        min_length=1,
    )
    allow: list[S3Prefix] = setting(
        help="Prefixes the caller may touch; `s3://` is everything.",
        allowed='a list with at least one of "s3://", "s3://bucket/", "s3://bucket/prefix"',
        min_length=1,
    )
    operations: Literal["read-write", "read-only"] = setting(
        "read-write", "Whether the caller may change anything.", allowed="read-write or read-only"
    )

    @property
    def secret(self) -> str:
        """The secret itself; loading has read it from its file."""
        if self.secret_access_key is None:
            raise ValueError(f"the secret of {self.access_key_id} was not loaded")
        return self.secret_access_key.get_secret_value()


NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class OriginCredentialSettings(Section):
    """A key towards an origin, by a name that buckets and slots refer to: a key pair, a profile, or a role."""

    name: str = setting(
        help="Name that `origin_credentials` of buckets and slots refers to.",
        allowed="letters, digits, `-`, `_`, `.`; at most 64; unique",
        pattern=NAME,
    )
    access_key_id: str | None = setting(
        None,
        "Key id for the origin.",
        allowed="a key id; needs secret_access_key or secret_access_key_file; exactly one of access_key_id, profile "
        "and role_arn",
        min_length=1,
    )
    secret_access_key: SecretStr | None = setting(
        None, "Secret of the key id.", allowed="a secret; this or secret_access_key_file, not both", min_length=1
    )
    secret_access_key_file: Path | None = setting(
        None, "File that holds the secret.", allowed="a readable file; this or secret_access_key, not both"
    )
    session_token: SecretStr | None = setting(
        None, "Session token of temporary credentials.", allowed="a token; needs access_key_id", min_length=1
    )
    profile: str | None = setting(
        None, "Profile of the AWS configuration files.", allowed="a profile name", min_length=1
    )
    role_arn: str | None = setting(
        None,
        "Role that the gateway assumes: by AssumeRoleWithWebIdentity with web_identity_token_file, else by AssumeRole. "
        "Forebay asks for the next key pair before the last one expires.",
        allowed="an ARN such as arn:aws:iam::123456789012:role/train",
        pattern=r"^arn:[^\s:]+:[^\s:]*:[^\s:]*:[^\s:]*:\S+$",
    )
    role_session_name: str | None = setting(
        None,
        "Name of the role's session in the logs of the account. Omitted: forebay.",
        allowed="2 to 64 letters, digits and _+=,.@-; needs role_arn",
        pattern=r"^[A-Za-z0-9_+=,.@-]{2,64}$",
    )
    external_id: SecretStr | None = setting(
        None,
        "External id that the role's trust policy asks for.",
        allowed="2 to 1224 characters; needs role_arn; not with web_identity_token_file",
        min_length=2,
        max_length=1224,
    )
    role_duration_seconds: DurationSeconds | None = setting(
        None,
        "How long a key pair of STS is good. Omitted: as long as STS says, an hour.",
        allowed="15m to 12h; needs role_arn",
    )
    web_identity_token_file: Path | None = setting(
        None,
        "File with the token of an identity provider, such as Kubernetes'; read each time.",
        allowed="a readable file; needs role_arn",
    )
    source_profile: str | None = setting(
        None,
        "Profile of the AWS configuration files whose key assumes the role. Omitted: the key of [origin].",
        allowed="a profile name; needs role_arn; not with web_identity_token_file",
        min_length=1,
    )
    sts_endpoint_url: Annotated[str, AfterValidator(valid_endpoint_url)] | None = setting(
        None,
        "Where STS is. Omitted: AWS_ENDPOINT_URL_STS, else AWS's own of origin.region.",
        allowed="http://host[:port] or https://host[:port], without user, path or query; needs role_arn",
    )


class ReplicaSettings(Section):
    """A copy of a bucket nearby, kept by others. Forebay reads bytes there by the ETags that the source names."""

    name: str = setting(
        "",
        "Name of the bucket there. Omitted: the source's.",
        allowed="a bucket name",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,254})?$",
    )
    endpoint_url: Annotated[str, AfterValidator(valid_endpoint_url)] = setting(
        help="Where the replica is.",
        allowed="http://host[:port] or https://host[:port], without user, path or query",
        min_length=1,
    )
    region: str = setting(
        "",
        "Region that requests are signed for. Omitted: the bucket's.",
        allowed="a region name such as eu-central-1",
        pattern=r"^[A-Za-z0-9-]*$",
    )
    addressing_style: Literal["auto", "path", "virtual"] | None = setting(
        None,
        "Bucket in the path or in the host name. Omitted: origin.addressing_style.",
        allowed="auto, path or virtual",
    )
    dialect: DialectName | None = setting(
        None,
        "How the replica's home differs from S3. Omitted: auto.",
        allowed=DIALECT_NAMES,
    )
    ca_bundle: PemFileSetting | None = setting(
        None,
        "PEM certificates that Forebay trusts for the replica. Omitted: the system's.",
        allowed="a readable file",
    )
    origin_credentials: str | None = setting(
        None,
        "Which of [[origin_credentials]] signs requests to the replica. Omitted: what signs those to the bucket.",
        allowed="the name of one of [[origin_credentials]]",
        pattern=NAME,
    )


class BucketSettings(Section):
    """A bucket that differs from `[origin]`: by where it is, or by the key with which the gateway signs."""

    name: str = setting(
        help="Name of the bucket, here and at its home.",
        allowed="a bucket name, unique",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$",
    )
    endpoint_url: Annotated[str, AfterValidator(origin_url)] = setting(
        "",
        "The bucket's home. Omitted: origin.endpoint_url; if that is AWS's own, AWS's endpoint for the region. With "
        "file:///mnt/nas, the bucket is the directory /mnt/nas/NAME. With azure://…, it is a container.",
        allowed="http://host[:port] or https://host[:port], without user, path or query; file:///path of a "
        f"directory; webhdfs://[user@]host:port[/path]; or {AZURE_FORM}",
    )
    region: str = setting(
        "",
        "Region that requests are signed for. Omitted: origin.region.",
        allowed="a region name such as us-east-1",
        pattern=r"^[A-Za-z0-9-]*$",
    )
    addressing_style: Literal["auto", "path", "virtual"] | None = setting(
        None,
        "Bucket in the path or in the host name. Omitted: origin.addressing_style.",
        allowed="auto, path or virtual",
    )
    dialect: DialectName | None = setting(
        None,
        "How the bucket's home differs from S3. Omitted: origin.dialect; with an endpoint_url, auto.",
        allowed=DIALECT_NAMES,
    )
    datanodes: list[HostPattern] = setting(
        [],
        "Hosts to which a webhdfs:// namenode may send reads. Empty: the namenode's own host, and those of its domain.",
        allowed="host names or addresses, or *.domain",
    )
    symlinks: Symlinks | None = setting(
        None,
        "Symbolic links in a file:// origin that stay in their bucket. read: reads follow them. follow: listings "
        "enter linked directories, too. Omitted: read; without an endpoint_url, origin.symlinks.",
        allowed='"read" or "follow"',
    )
    file_mode: FileMode | None = setting(
        None,
        "Rights of new files in a file:// origin; directories may also be entered by those who may read. Omitted: what "
        "the umask leaves of 0666 and 0777; without an endpoint_url, origin.file_mode.",
        allowed='octal digits as text, "0600" to "0777", with 6 or 7 for the owner',
    )
    ca_bundle: PemFileSetting | None = setting(
        None,
        "PEM certificates that Forebay trusts for the bucket's home. Omitted: origin.ca_bundle; with an endpoint_url, "
        "the system's.",
        allowed="a readable file",
    )
    origin_credentials: str | None = setting(
        None,
        "Which of [[origin_credentials]] signs requests to the bucket. Omitted: the key of [origin].",
        allowed="the name of one of [[origin_credentials]]",
        pattern=NAME,
    )
    replicas: list[ReplicaSettings] = setting(
        [],
        "Copies of the bucket that are nearer, the nearest first: tables [[buckets.replicas]], below.",
        allowed="up to 4 tables; the bucket's home must be an S3",
        max_length=4,
    )


class EventSourceSettings(Section):
    """A queue with the events of buckets. This node reads it, and forgets what they name."""

    type: Literal["sqs"] = setting("sqs", "What it is.", allowed="sqs")
    queue_url: str = setting(
        help="The queue. Each node needs one of its own, or one node of a cluster reads it.",
        allowed="https://host/account/queue",
        pattern=r"^https?://[^/?#@\s]+/[^?#\s]*[^/?#\s]$",
    )
    region: str = setting(
        "",
        "Region that requests are signed for. Omitted: the one in queue_url, else origin.region.",
        allowed="a region name such as eu-central-1",
        pattern=r"^[A-Za-z0-9-]*$",
    )
    origin_credentials: str | None = setting(
        None,
        "Which of [[origin_credentials]] signs requests to the queue. Omitted: the key of [origin].",
        allowed="the name of one of [[origin_credentials]]",
        pattern=NAME,
    )
    canary: S3Prefix | None = setting(
        None,
        "Forebay writes an object under this prefix once in canary_window, and waits for its event. Omitted: nobody "
        "knows whether events come.",
        allowed="s3://bucket/ or s3://bucket/prefix; one whose events go to the queue, and that no job lists",
    )
    canary_window_seconds: DurationSeconds = setting(
        "60s", "If the canary's event does not come back in this time, the feed counts as dead.", allowed="1s to 1h"
    )


class SlotSettings(Section):
    """A prefix with rules: its rights to this node's disk and to the link to the origin, and how fresh reads are."""

    name: str = setting(
        help="Name in metrics and commands.",
        allowed="letters, digits, `-`, `_`, `.`; at most 64; unique; not `default` or `none`",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
    )
    prefix: S3Prefix = setting(
        help="What the slot covers; the longest matching prefix wins.",
        allowed="s3://, s3://bucket/ or s3://bucket/prefix; unique",
    )
    origin_credentials: str | None = setting(
        None,
        "Which of [[origin_credentials]] signs requests to the origin about keys of the slot. Omitted: those of the "
        "slot around it (with a shorter prefix), of the bucket, or the key of [origin].",
        allowed="the name of one of [[origin_credentials]]",
        pattern=NAME,
    )
    prefer: Literal["replica", "source"] = setting(
        "replica",
        "Where Forebay reads bytes of a bucket with [[buckets.replicas]] first. `source`: no replica is asked, for "
        "objects that are read right after others have written them.",
        allowed="replica or source",
    )
    mode: Literal["read-only", "read-write"] = setting(
        "read-write", "A read-only slot refuses every request that is not a read.", allowed="read-only or read-write"
    )
    authorization: Literal["gateway", "origin"] = setting(
        "gateway",
        "Who says what a caller may do. `gateway`: `[[credentials]]` alone. `origin`: the origin, too. Forebay asks it "
        "in the caller's name before reads and listings, and sends everything else in the caller's name. So the key "
        "pair in `[[credentials]]` must be one that the origin knows.",
        allowed="gateway or origin; origin needs write = through",
    )
    authorization_ttl_seconds: DurationSeconds = setting(
        "60s",
        "How long the origin's yes to a caller counts, for one object or one listing. `0s`: Forebay asks each time.",
        allowed="0s to 1h; needs authorization = origin",
    )
    stated_consistency: Literal["strict", "ttl", "immutable", "snapshot"] | None = setting(
        None,
        "When the slot shows changes that others make at the origin. `strict`: at once. `ttl`: within metadata_ttl. "
        "`immutable`: never for an object that Forebay knows. `snapshot`: never; the slot has exactly the objects and "
        "versions of its snapshot, and is read-only. Omitted: ttl for read-only slots, else strict.",
        allowed="strict, ttl, immutable or snapshot",
        toml="consistency",
    )
    snapshot: str | None = setting(
        None,
        "Name of the snapshot that freezes the slot, made by `forebay snapshot create`; it must cover the prefix.",
        allowed="a name of letters, digits, `-`, `_`, `.`; at most 64; needs consistency = snapshot, which needs it",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
    )
    metadata_ttl_seconds: DurationSeconds = setting(
        "60s", "How long Forebay remembers answers about objects with consistency = ttl.", allowed="0s to 365d"
    )
    negative_ttl_seconds: DurationSeconds = setting(
        "0s",
        "How long Forebay remembers that an object does not exist, unless consistency = strict.",
        allowed="0s to 365d",
    )
    stale_if_unreachable_seconds: DurationSeconds = setting(
        "0s",
        "How much longer than metadata_ttl an answer counts while the origin does not answer (consistency = ttl).",
        allowed="0s to 365d",
    )
    index: bool = setting(
        False,
        "Keep a complete listing of the prefix. Forebay crawls it at the start and every index_refresh, and answers "
        "LIST without the origin. When a crawl finds that others changed an object, Forebay drops it from the cache.",
        allowed="true or false; not with consistency = strict, nor with prefix s3://",
    )
    index_refresh_seconds: DurationSeconds | None = setting(
        None,
        "How often Forebay crawls the index anew. Omitted: every half of metadata_ttl with consistency = ttl; only "
        "once with immutable.",
        allowed="1s to 365d; at most metadata_ttl with consistency = ttl; needs index = true",
    )
    index_concurrency: int = setting(
        32, "LIST requests to the origin at the same time during a crawl.", allowed="1 to 256; needs index = true"
    )
    index_inventory: S3ObjectUrl | None = setting(
        None,
        "manifest.json of an S3 Inventory of the prefix, with which the first crawl begins. It needs "
        "`pip install '.[inventory]'` in a clone.",
        allowed="s3://bucket/path/manifest.json; needs index = true",
    )
    capacity_bytes: SizeBytes | None = setting(
        None, "Cache space that no other slot can take.", allowed="at most cache.capacity for all slots together", gt=0
    )
    capacity_limit_bytes: SizeBytes | None = setting(
        None,
        "The slot may borrow idle room of others up to this size.",
        allowed="at least capacity, at most cache.capacity",
        gt=0,
    )
    block_size_bytes: Annotated[SizeBytes, AfterValidator(power_of_two)] | None = setting(
        None,
        "Forebay caches objects of the slot in blocks of this size. Omitted: cache.block_size. After a change it does "
        "not find blocks of another size any more, and evicts them in time.",
        allowed="a power of two, 64KiB to 64MiB",
    )
    eviction: Literal["epoch", "lru"] = setting(
        "epoch",
        "Which blocks Forebay evicts first. `epoch`: those that it expects to be read again last, by what was read "
        "again so far. `lru`: those that were read longest ago.",
        allowed="epoch or lru",
    )
    kept_object_bytes_max: SizeBytes | None = setting(
        None,
        "Forebay serves larger objects and does not cache them. Omitted: it caches objects of every size.",
        allowed='a size, such as "10GiB"',
        toml="max_cached_object_size",
        gt=0,
    )
    copies: Literal["idle", "none", "all"] = setting(
        "idle",
        "In a cluster: which blocks this node keeps that another node looks after. `idle`: those for which there is "
        "room that nobody else uses; they leave before all others. `none`: none. `all`: all, like its own.",
        allowed="idle, none or all",
    )
    own_writes: Literal["cluster", "node"] = setting(
        "cluster",
        "With `cluster.redis`: who sees at once what a client has written through this node. `cluster`: readers on all "
        "nodes; requests in the slot ask the registry first, unless it is read-only, or strict and not write-back. "
        "`node`: readers on this node; the others see it like a write of others, once the bucket has it.",
        allowed="cluster or node",
    )
    read_bandwidth_bytes_per_second: BandwidthBytesPerSecond | None = setting(
        None, "Ceiling on reads from the origin, over all workers.", allowed='at least 64KiB/s, such as "4GiB/s"'
    )
    write_bandwidth_bytes_per_second: BandwidthBytesPerSecond | None = setting(
        None, "Ceiling on writes to the origin, over all workers.", allowed='at least 64KiB/s, such as "500MiB/s"'
    )
    read_guarantee_bytes_per_second: BandwidthBytesPerSecond | None = setting(
        None,
        "Bandwidth of the link that the slot's reads get at least, whenever they want it, whatever other slots want.",
        allowed="at least 64KiB/s; at most read_bandwidth; needs origin.read_bandwidth; all together at most that",
    )
    write_guarantee_bytes_per_second: BandwidthBytesPerSecond | None = setting(
        None,
        "The same for writes to the origin.",
        allowed="at least 64KiB/s; at most write_bandwidth; needs origin.write_bandwidth; all together at most that",
    )
    weight: int = setting(
        1,
        "The slot's part of a full link in each direction, in proportion to the weights of the other slots that want "
        "more of it. The slot `default` has 1.",
        allowed="1 to 1000; has an effect only with origin.read_bandwidth or origin.write_bandwidth",
    )
    write: Literal["through", "back", "scratch"] = setting(
        "through",
        "When Forebay acknowledges a write. `through`: when the origin has it. `back`: when this node's disk has it, "
        "synced; Forebay sends it to the origin in the background. `scratch`: the same, but Forebay never sends it: it "
        "is lost with the disk, and removed after scratch_expiry or for room.",
        allowed="through, back or scratch; back and scratch need cache.persistent = true and mode = read-write",
    )
    buffer_bytes: SizeBytes | None = setting(
        None,
        "Disk space, in addition to cache.capacity, for acknowledged writes that the origin does not have yet. "
        "Omitted: a quarter of cache.capacity, divided by the number of slots with a buffer; at least 64MiB; less if "
        "the disk has no room for it.",
        allowed='at least 8MiB, such as "500GiB"; needs write = back or scratch',
        ge=BUFFER_BYTES_MIN,
    )
    when_buffer_full: Literal["through", "slow-down"] = setting(
        "through",
        "What happens to writes while the buffer is full. `through`: Forebay acknowledges them when the origin has "
        "them. `slow-down`: they wait up to 20 seconds for room, then get 503 SlowDown.",
        allowed="through or slow-down; needs write = back",
    )
    unflushed_bytes_max: SizeBytes | None = setting(
        None,
        "While this node has more acknowledged bytes than this that the origin lacks, writes go through. Omitted: the "
        "buffer is the only limit.",
        allowed='a size, such as "50GiB"; needs write = back',
        toml="max_unflushed_bytes",
        gt=0,
    )
    unflushed_age_seconds_max: DurationSeconds | None = setting(
        None,
        "While a write that Forebay acknowledged longer ago than this has not reached the origin, writes go through. "
        "Omitted: no limit.",
        allowed="1s to 365d; needs write = back",
        toml="max_unflushed_age",
    )
    order: Literal["markers", "strict"] = setting(
        "markers",
        "In which order writes reach the origin. `markers`: the oldest first, many at once; a marker waits until the "
        "origin has all writes under its directory, or its table's, that were acknowledged before it. `strict`: one by "
        "one, as they were acknowledged, also those that were overwritten since.",
        allowed="markers or strict; needs write = back",
    )
    markers: tuple[str, ...] = setting(
        MARKERS,
        "Names (the last part of a key's path; of names with slashes, as many parts) of objects that tell readers that "
        "others are complete, such as a checkpoint's manifest.",
        allowed='a list of names, with * and ?, such as ["*.index.json", "_delta_log/*"]; needs write = back',
    )
    checkpoints: tuple[CheckpointPatternText, ...] | None = setting(
        None,
        "Which keys make one checkpoint: patterns of keys in the bucket with `{step}` and, behind it, `{rank}`; "
        "`built-in` stands for the known layouts. Omitted: only these. `[]`: Forebay groups nothing.",
        allowed='a list such as ["built-in", "runs/*/step-{step}/"]; needs write = back or scratch',
    )
    manifests: Literal["checked", "in-order"] = setting(
        "checked",
        "Whether markers that name files wait until the bucket has each of these, also those of other nodes. "
        "`checked`: PyTorch's .metadata, *.index.json, DeepSpeed's latest and Megatron's "
        "latest_checkpointed_iteration.txt do. `in-order`: they wait only for what was acknowledged before them, "
        "here or on nodes of the same cluster.",
        allowed="checked or in-order; needs write = back",
    )
    etag: Literal["bucket", "local"] = setting(
        "bucket",
        "Which ETag an acknowledged write has until the origin has it, where the bucket's own cannot be foretold "
        "(SSE-KMS). `bucket`: none, so such writes go through. `local`: the MD5 that this node computes; from the "
        "flush on, reads show the bucket's.",
        allowed="bucket or local; needs write = back",
    )
    upload_expiry_seconds: DurationSeconds = setting(
        "1d",
        "Forebay ends a multipart upload of which no part has come for this long, here and at the origin.",
        allowed="10m to 365d; needs write = back or scratch",
    )
    flush: Annotated[str, AfterValidator(_flush_rule)] = setting(
        "all",
        "Which checkpoints Forebay sends to the origin. `all`. `latest`: it stops sending one when the origin has a "
        "newer one of the same run. `every-5th`: the same, but it sends each fifth of a run, as they were begun, in "
        "any case. It always sends objects of no checkpoint.",
        allowed="all, latest, or every-Nth with N from 2 to 1000; needs write = back; must be all with order = strict",
    )
    scratch_expiry_seconds: DurationSeconds = setting(
        f"{int(LOCAL_EXPIRY_SECONDS // 86_400)}d",
        "How long this node keeps what Forebay does not send because of `write` or `flush`; less if it needs the room.",
        allowed="1m to 365d; needs write = scratch, or flush",
    )
    keep_last: int | None = setting(
        None,
        "The newest N complete checkpoints of each run stay in the cache once they are there: nothing else evicts "
        "them. Omitted: Forebay evicts them like everything else.",
        allowed="1 to 10000; needs write = back",
    )

    @property
    def is_buffered(self) -> bool:
        """Return whether writes are acknowledged when this node's disk has them."""
        return self.write != "through"

    @property
    def asks_other_nodes(self) -> bool:
        """Return whether other nodes' writes must be known in it, and are not told by the origin each time."""
        if self.own_writes != "cluster" or self.mode == "read-only" or self.write == "scratch":
            return False
        return self.is_buffered or self.consistency in ("ttl", "immutable")

    def believing_at_most(self, seconds: float) -> Self:
        """Return the same slot, which believes nothing that it has learned of objects longer ago than that."""
        if self.consistency not in ("ttl", "immutable"):
            return self
        is_immutable = self.consistency == "immutable"
        fresh_seconds = seconds if is_immutable else min(self.metadata_ttl_seconds, seconds)
        stale_seconds = 0.0 if is_immutable else min(self.stale_if_unreachable_seconds, seconds - fresh_seconds)
        bounded = {"metadata_ttl_seconds": fresh_seconds, "stale_if_unreachable_seconds": stale_seconds}
        kept = {name: value for name, value in self.__dict__.items() if name in type(self).model_fields}
        return type(self).model_construct(**{**kept, "stated_consistency": "ttl", **bounded})

    @property
    def index_refresh_in_force_seconds(self) -> float | None:
        """Return the interval that applies, even if `index_refresh` is omitted. None: never."""
        if self.index_refresh_seconds is not None or self.consistency == "immutable":
            return self.index_refresh_seconds
        return self.metadata_ttl_seconds / 2

    @cached_property
    def consistency(self) -> Literal["strict", "ttl", "immutable", "snapshot"]:
        """The stated consistency, or the one that a slot of this mode has without."""
        return self.stated_consistency or ("ttl" if self.mode == "read-only" else "strict")

    @model_validator(mode="before")
    @classmethod
    def _frozen_is_read_only(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("consistency") == "snapshot" and "mode" not in given:
            return {**given, "mode": "read-only"}
        return given
