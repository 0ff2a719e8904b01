"""Values that depend on the machine and on the usual AWS variables, filled in where the settings omit them."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gateway.config.entries import BUFFER_BYTES_MIN, BucketSettings, OriginCredentialSettings, SlotSettings
from gateway.config.problems import SettingsError
from gateway.config.settings import CacheSettings, ClusterSettings, OriginSettings, Settings
from gateway.core.errors import ConfigError

OWN_NAME = "forebay"
"""The name of the directory that Forebay makes inside one that others use."""

LOCK_NAME = "lock"
LOCK_MARK = b"forebay "
"""The first bytes of the lock, which Forebay writes before it works in a directory."""

_MARKS = ((LOCK_NAME, LOCK_MARK), ("blocks/FORMAT", b"forebay blocks "), ("writeback/FORMAT", b"forebay writeback "))


def own_directory(given: Path) -> Path:
    """Return `given` if Forebay makes it, has worked in it, or finds it empty and closed to others; else one below it.

    So Forebay neither closes a directory that it did not make nor works among files of others.
    """
    try:
        status = given.stat()
        is_closed = not status.st_mode & 0o077
        if status.st_uid not in (0, os.geteuid()) or is_own(given) or (is_closed and not others_files(given)):
            return given  # that of another user is refused when it is prepared
    except OSError:  # it is not there; or the start says why it cannot be used
        return given
    return given / OWN_NAME


def are_same(one: Path, other: Path) -> bool:
    """Return whether both may name one cache directory: a user without access cannot tell which of the two it is."""
    return one == other or one == other / OWN_NAME or other == one / OWN_NAME


def is_own(directory: Path) -> bool:
    """Return whether Forebay has worked in a directory. False if the directory cannot be read."""
    return any(_begins_with(directory / name, mark) for name, mark in _MARKS)


def others_files(directory: Path) -> list[str]:
    """Return the names in a directory in which Forebay has not worked yet. Raise OSError."""
    return [] if is_own(directory) else sorted(set(os.listdir(directory)) - {"lost+found"})


def _begins_with(path: Path, mark: bytes) -> bool:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # a link says nothing, and a pipe would be waited for
            return False
        with path.open("rb") as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False


CAPACITY_SHARE = 0.5
"""The share of the file system's free and cached bytes for the cache, if `cache.capacity` is omitted."""

USUAL_BUFFER_BYTES_MIN = 64 * 2**20
"""The least buffer without a setting: a few parts of several uploads at once."""

BUFFERS_SHARE = 0.25
"""The share of the cache's capacity, besides it, for all write-back buffers, if a slot's `buffer` is omitted."""


class DiskUsage(NamedTuple):
    """In bytes, of a whole file system."""

    total: int
    used: int
    free: int


def complete(settings: Settings, environment: Mapping[str, str], running: Settings | None = None) -> Settings:
    """Return `settings` with all omitted values filled in; the cache's capacity is then that of `running`."""
    cache = _cache(settings.cache, environment, running)
    origin = _origin(settings.origin, environment)
    return settings.model_copy(
        update={
            "origin": origin,
            "origin_credentials": [_with_sts(one, environment) for one in settings.origin_credentials],
            "buckets": [_bucket(one, origin) for one in settings.buckets],
            "cache": cache,
            "cluster": _cluster(settings.cluster, cache, running),
            "slots": _with_buffers(settings.slots, cache),
        }
    )


def _cluster(cluster: ClusterSettings | None, cache: CacheSettings, running: Settings | None) -> ClusterSettings | None:
    """Fill in node, address and weight. The first two stay as they are while the gateway runs, whatever changes."""
    if cluster is None:
        return None
    before = running.cluster if running is not None else None
    node = cluster.node or (before.node if before is not None else socket.gethostname())
    advertise = cluster.advertise or (before.advertise if before is not None else _own_address(cluster, node))
    weight = cluster.weight or _weight(cache.capacity_bytes)
    return cluster.model_copy(update={"node": node, "advertise": advertise, "weight": weight})


def _weight(capacity_bytes: int) -> int:
    """Return GiB to two digits: disks of one model, that differ by a file or two, have one weight."""
    return min(10**6, max(1, int(float(f"{capacity_bytes / 2**30:.2g}"))))


def _own_address(cluster: ClusterSettings, node: str) -> str:
    """Return the address under which members reach this node; empty if this machine has no default route.

    If `listen` names an address, it is that. Otherwise the default route's, unless the list of members has this node
    by its name, or under a loopback address because all of them run on this machine.
    """
    host, _, port = cluster.listen.rpartition(":")
    if host not in ("0.0.0.0", "[::]"):
        return cluster.listen
    routed = _address_of_default_route()
    hosts = ([f"[{routed}]" if ":" in routed else routed] if routed else []) + [node, "127.0.0.1", "[::1]", "localhost"]
    usual = next((one for one in hosts if f"{one}:{port}" in cluster.members), hosts[0] if routed else None)
    return f"{usual}:{port}" if usual is not None else ""


def _address_of_default_route() -> str:
    """Return the address from which this machine would send to others; empty if there is none. Sends nothing."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((elsewhere, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def _with_buffers(slots: Sequence[SlotSettings], cache: CacheSettings) -> list[SlotSettings]:
    """Give each slot that writes back a part, sized or not: one's setting changes no other's, as long as all fit."""
    of_back = [slot.buffer_bytes for slot in slots if slot.is_buffered]
    if None not in of_back:
        return list(slots)
    part_bytes = max(USUAL_BUFFER_BYTES_MIN, int(cache.capacity_bytes * BUFFERS_SHARE) // len(of_back))
    disk = disk_usage(cache.directory)
    if disk is not None:
        left_bytes = disk.total - cache.capacity_bytes - sum(one or 0 for one in of_back)
        part_bytes = min(part_bytes, max(BUFFER_BYTES_MIN, left_bytes // of_back.count(None)))
    return [
        slot.model_copy(update={"buffer_bytes": part_bytes}) if slot.is_buffered and slot.buffer_bytes is None else slot
        for slot in slots
    ]


def _origin(origin: OriginSettings, environment: Mapping[str, str]) -> OriginSettings:
    region = origin.region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint_url = origin.endpoint_url or aws_endpoint_url(environment) or _aws(region)
    return origin.model_copy(update={"region": region, "endpoint_url": endpoint_url.rstrip("/")})


def _bucket(bucket: BucketSettings, origin: OriginSettings) -> BucketSettings:
    region = bucket.region or origin.region
    is_aws = origin.endpoint_url == _aws(origin.region)
    return bucket.model_copy(
        update={
            "endpoint_url": bucket.endpoint_url or (_aws(region) if is_aws else origin.endpoint_url),
            "region": region,
            "addressing_style": bucket.addressing_style or origin.addressing_style,
            "datanodes": bucket.datanodes or ([] if bucket.endpoint_url else origin.datanodes),
            "symlinks": bucket.symlinks or (None if bucket.endpoint_url else origin.symlinks),
            "file_mode": bucket.file_mode if bucket.file_mode or bucket.endpoint_url else origin.file_mode,
            "dialect": bucket.dialect or ("auto" if bucket.endpoint_url else origin.dialect),
            "ca_bundle": bucket.ca_bundle or (None if bucket.endpoint_url else origin.ca_bundle),
            "replicas": [
                one.model_copy(
                    update={
                        "name": one.name or bucket.name,
                        "region": one.region or region,
                        "addressing_style": one.addressing_style or origin.addressing_style,
                        "dialect": one.dialect or "auto",
                        "origin_credentials": one.origin_credentials or bucket.origin_credentials,
                    }
                )
                for one in bucket.replicas
            ],
        }
    )


def _with_sts(credential: OriginCredentialSettings, environment: Mapping[str, str]) -> OriginCredentialSettings:
    """AWS_ENDPOINT_URL is ignored: it names S3's place, which on a node of ours is this gateway."""
    if credential.role_arn is None or credential.sts_endpoint_url:
        return credential
    return credential.model_copy(update={"sts_endpoint_url": environment.get("AWS_ENDPOINT_URL_STS") or None})


def aws_endpoint_variable(environment: Mapping[str, str]) -> str | None:
    """Return the AWS variable that names the endpoint for S3, or None."""
    if environment.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return None
    return next((name for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if environment.get(name)), None)


def aws_endpoint_url(environment: Mapping[str, str]) -> str:
    """Return the endpoint that the AWS variables name for S3, or nothing."""
    variable = aws_endpoint_variable(environment)
    return "" if variable is None else environment[variable]


def _aws(region: str) -> str:
    suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return f"https://s3.{region}.{suffix}"


def _cache(cache: CacheSettings, environment: Mapping[str, str], running: Settings | None) -> CacheSettings:
    directory = usual_directory(environment)
    if "directory" in cache.model_fields_set:
        directory = own_directory(_expanded(cache.directory).absolute())
    known = running.cache.capacity_bytes if running is not None and running.cache.directory == directory else 0
    capacity_bytes = cache.capacity_bytes or known or _share_of_disk(directory, cache.block_size_bytes)
    return cache.model_copy(update={"directory": directory, "capacity_bytes": capacity_bytes})


def usual_directory(environment: Mapping[str, str]) -> Path:
    bases = (environment.get("XDG_CACHE_HOME") or "", os.path.expanduser("~/.cache"))
    # Without HOME and without an entry in passwd, as any uid in a container, the second stays as it is.
    base = next((one for one in bases if one.startswith("/")), None)
    return own_directory(Path(base) / "forebay" if base else Path(tempfile.gettempdir(), f"forebay-{os.geteuid()}"))


def _expanded(directory: Path) -> Path:
    try:
        return directory.expanduser()
    except RuntimeError:
        allowed = "a path without ~: this user has no home directory"
        raise SettingsError([ConfigError("cache.directory", str(directory), allowed)]) from None


def disk_usage(directory: Path) -> DiskUsage | None:
    """Return the usage of a directory's file system, even before it exists; None: unreadable, as its opener reports."""
    try:
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        return DiskUsage(*shutil.disk_usage(existing))
    except OSError:
        return None


def _share_of_disk(directory: Path, block_size_bytes: int) -> int:
    """Count the cached bytes too, so that the figure stays the same over restarts."""
    least_bytes = 8 * block_size_bytes
    disk = disk_usage(directory)
    try:
        room = disk.free + held_bytes(directory) if disk is not None else 0
    except OSError:
        return least_bytes
    return max(least_bytes, int(room * CAPACITY_SHARE))


def held_bytes(directory: Path) -> int:
    held = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                held += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # evicted while we look
    return held


def file_system_kind(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that a directory is on, or will be; empty if the system does not say."""
    try:
        path = os.path.realpath(directory)
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = _unescaped(before.split(" ")[4])
        if len(point) >= len(best) and (point == "/" or path == point or path.startswith(f"{point}/")):
            best, kind = point, after.split(" ")[0]
    return kind


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
