"""Rules over the settings of a cluster."""

from __future__ import annotations

import importlib.util
import ipaddress
import re
from collections.abc import Iterator
from typing import NamedTuple

from gateway.config.fields import is_loopback
from gateway.config.problems import Hidden, allowed_of
from gateway.config.settings import ClusterSettings, Settings
from gateway.core.errors import ConfigError
from gateway.disk.pem import PemFile

SECRET_CHARACTERS_MIN = 32

_SECRET = re.compile(rb"[ -~]{%d,}" % SECRET_CHARACTERS_MIN)
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_BY_NAME = "dns://"
_OF_SENTINELS = ("sentinel", "sentinels")


def cluster_problems(settings: Settings) -> Iterator[ConfigError]:
    cluster = settings.cluster
    if cluster is None:
        return
    yield from _secret(cluster)
    yield from _members(cluster)
    yield from _redis(cluster)
    yield from _ports(settings, cluster)
    for name in ("node", "zone"):
        text = getattr(cluster, name)
        if not text.isprintable() or text != text.strip() or len(text) > 256 or (name == "node" and not text):
            yield _wrong(name, text)
    if cluster.tls and settings.server.certificate_file is None:
        yield _wrong("tls", True)


def not_among_members(settings: Settings) -> list[str]:
    """Return a warning if this node is missing from `cluster.members`."""
    cluster = settings.cluster
    if cluster is None or cluster.redis:
        return []
    if any(one == cluster.advertise or one.startswith(_BY_NAME) for one in cluster.members):
        return []
    return [
        f"cluster.advertise = {cluster.advertise!r} is not among cluster.members: this node asks the others, and looks "
        "after no blocks itself"
    ]


def place_of(address: str) -> tuple[str, int] | None:
    """Return host and port of `host:port` or `[host]:port`; None if it is neither. Port 0 is none."""
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[1-9][0-9]{0,4}", port) or int(port) > 65535:
        return None
    if host.startswith("[") and host.endswith("]"):
        return (host[1:-1], int(port)) if _is_address(host[1:-1], 6) else None
    if re.fullmatch(r"[0-9.]+", host):
        return (host, int(port)) if _is_address(host, 4) else None
    return (host, int(port)) if _HOST.fullmatch(host) else None


def _is_address(host: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(host).version == version
    except ValueError:
        return False


def _is_unspecified(host: str) -> bool:
    return any(_is_address(host, version) for version in (4, 6)) and ipaddress.ip_address(host).is_unspecified


def _wrong(name: str, value: object, more: str = "") -> ConfigError:
    return ConfigError(f"cluster.{name}", value, more or allowed_of(ClusterSettings, name))


def _secret(cluster: ClusterSettings) -> Iterator[ConfigError]:
    path, content = str(cluster.secret_file.path), cluster.secret_file.content
    if content is None:
        yield _wrong("secret_file", path, f"this file cannot be read{_why_unread(cluster.secret_file)}")
    elif not cluster.secrets:
        yield _wrong("secret_file", path, "this file is empty")
    elif len(cluster.secrets) > 2:
        yield _wrong("secret_file", path, f"this file has {len(cluster.secrets)} lines: it must have one or two")
    elif not all(map(_SECRET.fullmatch, cluster.secrets)):
        allowed = f"each line of this file must have at least {SECRET_CHARACTERS_MIN} printable ASCII characters"
        yield _wrong("secret_file", path, allowed)


def _why_unread(file: PemFile) -> str:
    try:
        file.read()
    except OSError as error:
        return f" ({error.strerror})"
    except ValueError as error:
        return f": {error}"
    return ""


def _members(cluster: ClusterSettings) -> Iterator[ConfigError]:
    if bool(cluster.members) == bool(cluster.redis):
        more = "the members are found by cluster.members or by cluster.redis: give one of the two"
        yield _wrong("members", cluster.members or None, more)
    seen = set[str]()
    for i, entry in enumerate(cluster.members):
        place = place_of(entry.removeprefix(_BY_NAME))
        if place is None or _is_unspecified(place[0]):
            yield _wrong(f"members[{i}]", entry, "host:port, [address]:port or dns://name:port; ports are 1 to 65535")
        elif entry.lower() in seen:
            yield _wrong(f"members[{i}]", entry, "this is a member already")
        seen.add(entry.lower())


class RedisUrl(NamedTuple):
    """The parts of `cluster.redis`. `service`: the places are Sentinels'."""

    places: tuple[tuple[str, int], ...]
    service: str | None
    database: int
    tls: bool


def redis_url(text: str) -> RedisUrl | None:
    """Return the parts of a URL; None if it is not allowed."""
    scheme, _, rest = text.partition("://")
    hosts, _, path = rest.partition("/")
    usual, is_sentinel = (26379, True) if scheme in _OF_SENTINELS else (6379, False)
    service, _, database = path.partition("/") if is_sentinel else ("", "", path)
    named = (
        one if re.search(r":[0-9]+$", one) and not one.endswith("]") else f"{one}:{usual}" for one in hosts.split(",")
    )
    places = tuple(place for one in named if (place := place_of(one)) is not None)
    is_whole = len(places) == len(hosts.split(",")) and (is_sentinel or len(places) == 1)
    if scheme not in ("redis", "rediss", *_OF_SENTINELS) or not is_whole or not re.fullmatch("[0-9]{0,5}", database):
        return None
    if is_sentinel and not re.fullmatch(r"[A-Za-z0-9._-]+", service):
        return None
    return RedisUrl(places, service or None, int(database or 0), scheme in ("rediss", "sentinels"))


def _redis(cluster: ClusterSettings) -> Iterator[ConfigError]:
    if not cluster.redis:
        for name in ("redis_user", "redis_password", "sentinel_password"):
            if getattr(cluster, name) is not None:
                yield ConfigError(f"cluster.{name}", Hidden(), "remove it, or give cluster.redis")
        return
    if cluster.sentinel_password is not None and not cluster.redis.startswith(_OF_SENTINELS):
        yield ConfigError("cluster.sentinel_password", Hidden(), "remove it, or name Sentinels in cluster.redis")
    if "@" in cluster.redis:
        problem = "cluster.redis has a user or password in it"
        yield ConfigError("cluster.redis", Hidden(), "give redis_user and redis_password_file", problem=problem)
    elif redis_url(cluster.redis) is None:
        yield _wrong("redis", cluster.redis)
    elif not all(importlib.util.find_spec(name) for name in ("redis", "hiredis")):
        yield _wrong("redis", cluster.redis, "install what it needs: pip install 'forebay[cluster]'")


def _ports(settings: Settings, cluster: ClusterSettings) -> Iterator[ConfigError]:
    listen, advertise = place_of(cluster.listen), place_of(cluster.advertise)
    if listen is None:
        yield _wrong("listen", cluster.listen)
    else:
        for table, host, port in (
            ("server", settings.server.host, settings.server.port),
            ("admin", settings.admin.host, settings.admin.port),
        ):
            if port == listen[1] and (host == listen[0] or {"0.0.0.0", "::"} & {host, listen[0]}):
                yield _wrong("listen", cluster.listen, f"{table}.port has this port already: choose another")
    if listen is None:
        return  # the own address may follow from it
    if not cluster.advertise:
        yield _wrong("advertise", None, "give it: this machine has no default route")
    elif advertise is None or _is_unspecified(advertise[0]):
        yield _wrong("advertise", cluster.advertise)
    elif is_loopback(advertise[0]):
        others = [place_of(one.removeprefix(_BY_NAME)) for one in cluster.members]
        if any(one is not None and not is_loopback(one[0]) for one in others):
            yield _wrong("advertise", cluster.advertise)
