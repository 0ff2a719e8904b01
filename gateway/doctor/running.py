"""A running gateway: how it says that it is, and what its figures say about the settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from gateway import __version__
from gateway.admin.client import AdminClient, Sample, samples
from gateway.admin.formatting import age_text, bucket_text, counted, differing_blocks_texts, size_text, waiting_text
from gateway.admin.troubles import troubles
from gateway.api import documents as to
from gateway.config import Settings
from gateway.core.errors import AdminPortError, NoAdminPort
from gateway.doctor import Area, Finding
from gateway.telemetry import metrics

AREA, SLOTS, CLUSTER = Area("running gateway"), Area("slots"), Area("cluster")

_READS_MIN = 200
"""Fewer say little."""

_HEADS_SHARE = 0.5
_SMALL_BYTES = 4 * 2**20
"""The HEAD before a GET of so much costs as much time as the bytes, or more."""


def running(client: AdminClient, settings: Settings | None) -> Iterator[Finding]:
    """Yield what the running gateway reports. Without a running gateway there is nothing to find."""
    try:
        status = client.status()
        slots, exposition = client.slots().slots, client.metrics()
    except NoAdminPort as absent:
        yield AREA.note(str(absent), "start it, or give --admin-url, for more checks")
        return
    except AdminPortError as refusal:  # it is another one, or another program, or has another token
        yield AREA.error(str(refusal), "see what has the port; give the --config of that gateway, or --admin-url")
        return
    yield from _health(status)
    if settings is not None and status.origin.endpoint_url != settings.origin.endpoint_url:
        yield AREA.warning(
            f"its origin is {status.origin.endpoint_url}, and this configuration says {settings.origin.endpoint_url}",
            "give its --config to check that one",
        )
    yield from _pending(status)
    if status.cluster is not None:
        yield from of_cluster(status.cluster)
    yield from advised(slots, exposition)


def _health(status: to.Status) -> Iterator[Finding]:
    gateway = status.gateway
    if gateway is None:
        yield AREA.note("it starts", "ask again in a moment")
        return
    if gateway.ready:
        yield AREA.ok(f"version {gateway.version}, ready, S3 on {gateway.s3_url}")
    if gateway.version != __version__:
        yield AREA.note(
            f"it has version {gateway.version}, and this command {__version__}", "restart it after an upgrade"
        )
    for one in gateway.processes:
        yield from _process(one)
    for found in troubles(status):
        text = f"{found.what}: {found.why}" if found.why else found.what
        yield (AREA.error if found.level == "error" else AREA.warning)(text, found.advice)


def _process(one: to.Process) -> Iterator[Finding]:
    if one.restarts:
        found = f"{counted(one.restarts, 'restart')} of {one.name} since the gateway started"
        if one.last_end is not None:
            found += f"; {age_text(one.last_end_at)} ago: {one.last_end}"
        yield AREA.warning(found, _KILLED if one.last_end == "SIGKILL" else "see its log for why")


_KILLED = "somebody has killed it; the kernel does where memory is short: dmesg, and the memory limit"


def _pending(status: to.Status) -> Iterator[Finding]:
    if status.writeback is None:
        return
    for slot in status.writeback.slots:
        if waiting := waiting_text(slot):
            text = f"slot {slot.slot}: not at the origin: {waiting}"
            yield AREA.note(text, "nothing about the writes: they go when it answers")
    for bucket in status.writeback.buckets:
        yield _profile(bucket)


def _profile(bucket: to.BucketProfile) -> Finding:
    """Return the finding about a bucket that the gateway writes back to."""
    found = bucket_text(bucket)
    if not bucket.md5_etags:
        return AREA.warning(found, 'use write = "through" for its slots, or SSE-S3 as its encryption')
    if {"ignored", "refused"} & {*bucket.conditions.values()}:
        return AREA.warning(found, "flushes look by HEAD before they write: let nobody else write under these slots")
    return AREA.ok(found)


def of_cluster(cluster: to.ClusterDocument) -> Iterator[Finding]:
    """Yield what this node finds of the other members by their hellos."""
    if not any(one.this_node for one in cluster.members):
        text = f"{cluster.address} is not among the members: this node asks them, and looks after no blocks"
        yield CLUSTER.warning(text, "set cluster.advertise to the address by which the others know it")
    if cluster.redis is not None:
        yield from of_redis(cluster.redis, len(cluster.members))
    found = [one for member in cluster.members if not member.this_node for one in _of_member(member)]
    yield from found[:_MEMBERS_SHOWN]
    if len(found) > _MEMBERS_SHOWN:
        yield CLUSTER.note(f"{len(found) - _MEMBERS_SHOWN} more findings about members", "forebay cluster status")
    if not found:
        text = f"{counted(len(cluster.members), 'member')} of {cluster.name}: all answer and reach this node, with one"
        yield CLUSTER.ok(f"{text} secret, one version, the same origins, and clocks that agree")


def _of_member(one: to.ClusterMember) -> Iterator[Finding]:
    name = f"{one.name} ({one.address})" if one.name else one.address
    if one.state in ("silent", "unknown"):
        yield CLUSTER.error(f"{name} does not answer: {one.problem or 'it was not asked yet'}", _UNANSWERED)
        return
    if one.state == "closed":
        why = one.problem or "its cache directory cannot be used"
        yield CLUSTER.warning(f"{name} owns no blocks: {why}", "forebay doctor on that node says more")
    if one.reaches_this_node is False:
        yield CLUSTER.error(f"{name} gets no answer from this node, which gets its answers", _UNANSWERED)
    if one.same_homes is False:
        text = f"{name} has other origins: it answers only for buckets that both have at one endpoint"
        yield CLUSTER.error(text, "give all nodes the same origin.endpoint_url and [[buckets]]")
    for text in differing_blocks_texts(one):
        yield CLUSTER.warning(text, "give the slot the same block_size on all nodes")
    if one.version != __version__:
        yield CLUSTER.note(f"{name} has version {one.version}, and this command {__version__}", "finish the upgrade")
    if (seconds := abs(one.clock_seconds or 0.0)) > _CLOCK_SECONDS:
        is_refused = seconds > _CLOCK_SECONDS_MAX
        text = f"the clock of {name} differs by {seconds:.0f} s; nodes refuse {_CLOCK_SECONDS_MAX:.0f} s"
        yield (CLUSTER.error if is_refused else CLUSTER.warning)(text, "set the clocks: chronyc tracking, timedatectl")


def of_redis(redis: to.RedisState, members: int) -> Iterator[Finding]:
    """Yield what this node finds of the registry's server."""
    if not redis.believed:
        text = f"Redis is not believed: {redis.problem or 'it was not asked yet'}"
        yield CLUSTER.error(text, "docs/cluster.md, With Redis, says what it takes")
    if not redis.version:
        return
    name, clients = f"Redis {redis.version}", members * _CLIENTS_OF_NODE
    if redis.policy != "noeviction":
        text = f"{name} may drop entries of the registry when it is full: maxmemory-policy is {redis.policy}"
        yield CLUSTER.error(text, "set maxmemory-policy noeviction")
    if redis.limit_bytes and redis.used_bytes > _FULL_SHARE * redis.limit_bytes:
        text = f"{name} uses {size_text(redis.used_bytes)} of {size_text(redis.limit_bytes)}; when full, it refuses all"
        yield CLUSTER.warning(text, "raise maxmemory")
    if redis.clients_max and clients > redis.clients_max:
        text = f"{name} takes {redis.clients_max:,} clients; {counted(members, 'node')} may need more"
        yield CLUSTER.warning(text, f"set maxclients to {clients:,}, one for each process, or more")
    if redis.replicas and not redis.waits_for_replicas:
        text = f"{name} goes on as a primary when its replicas are gone"
        advice = "set min-replicas-to-write 1 and min-replicas-max-lag 5: of two primaries, one then ends soon"
        yield CLUSTER.warning(text, advice)
    if (seconds := abs(redis.clock_seconds or 0.0)) > _CLOCK_SECONDS:
        yield CLUSTER.note(f"the clock of {name} differs by {seconds:.0f} s; nothing depends on it", "set the clocks")


_FULL_SHARE = 0.75
_CLIENTS_OF_NODE = 9
"""Connections of a node with eight workers."""

_UNANSWERED = "see that it runs, that the network passes the peer port both ways, and that secret and clock agree"
_CLOCK_SECONDS, _CLOCK_SECONDS_MAX = 30.0, 60.0
_MEMBERS_SHOWN = 20


@dataclass(slots=True)
class _Reads:
    """The reads of a slot, and the requests to the origin for them."""

    gets: float = 0.0
    sent_bytes: float = 0.0
    heads: float = 0.0


def advised(slots: list[to.SlotDocument], exposition: str) -> Iterator[Finding]:
    """Yield slots whose unchanged objects are asked for at the origin again and again."""
    reads = _reads(samples(exposition, {one.name for one in _COUNTED}))
    for slot in slots:
        found = reads[slot.name]
        if slot.consistency != "strict" or found.gets < _READS_MIN or found.heads < _HEADS_SHARE * found.gets:
            continue
        mean_bytes = found.sent_bytes / found.gets
        if mean_bytes > _SMALL_BYTES:
            continue
        place = "a slot of its own" if slot.name == "default" else f"slot {slot.name}"
        yield SLOTS.note(
            f"slot {slot.name} (strict): {found.heads:,.0f} HEADs to the origin for {found.gets:,.0f} GETs of "
            f"{size_text(mean_bytes)} on average",
            f'give these objects {place} with consistency = "immutable" if they never change, or "ttl" if a change may '
            "be seen a minute later",
        )
    if not any(one.gets for one in reads.values()):
        yield SLOTS.note("nothing was read yet: figures say nothing about the settings", "ask again after an epoch")


_COUNTED = (metrics.REQUESTS, metrics.SENT_BYTES, metrics.ORIGIN_REQUESTS)


def _reads(found: Iterator[Sample]) -> defaultdict[str, _Reads]:
    reads: defaultdict[str, _Reads] = defaultdict(_Reads)
    for name, labels, value in found:
        if name == metrics.ORIGIN_REQUESTS.name:
            if labels.get("method") == "HEAD":
                reads[labels["slot"]].heads += value
        elif labels.get("operation") == "GetObject":
            if name == metrics.REQUESTS.name:
                reads[labels["slot"]].gets += value
            else:
                reads[labels["slot"]].sent_bytes += value
    return reads
