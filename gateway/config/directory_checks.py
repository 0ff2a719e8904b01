"""Rules for origins that are no S3: directories, of this machine or of HDFS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gateway.config.entries import BucketSettings
from gateway.config.fields import directory_of, is_store, is_webhdfs
from gateway.config.settings import OriginSettings, Settings
from gateway.core.errors import ConfigError

_OF_S3 = "remove this: the origin is a directory, and nothing is signed there"
_OF_HDFS = "the origin is no HDFS: remove this"
_OF_DIRECTORY = "the origin is no directory (file://): remove this"


def directory_problems(settings: Settings) -> Iterator[ConfigError]:
    yield from _of_main(settings)
    for i, bucket in enumerate(settings.buckets):
        directory, key = directory_of(bucket.endpoint_url), f"buckets[{i}]"
        if bucket.datanodes and not is_webhdfs(bucket.endpoint_url):
            yield ConfigError(f"{key}.datanodes", str(bucket.datanodes), _OF_HDFS)
        if directory is None:
            yield from _directory_only(key, bucket)
        if not is_store(bucket.endpoint_url):
            continue
        if directory is not None and bucket.endpoint_url != settings.origin.endpoint_url:
            yield from _unusable(f"{key}.endpoint_url", directory, settings.cache.directory)
        inherited = (None, settings.origin.addressing_style, settings.origin.dialect, "auto")
        for name in ("origin_credentials", "addressing_style", "dialect", *(("ca_bundle",) if directory else ())):
            if (value := getattr(bucket, name)) not in inherited:
                yield ConfigError(f"{key}.{name}", str(value), _OF_S3)
    yield from _of_slots(settings)


def _of_main(settings: Settings) -> Iterator[ConfigError]:
    origin = settings.origin
    directory = directory_of(origin.endpoint_url)
    if origin.datanodes and not is_webhdfs(origin.endpoint_url):
        yield ConfigError("origin.datanodes", str(origin.datanodes), _OF_HDFS)
    if directory is None:
        yield from _directory_only("origin", origin)
    if not is_store(origin.endpoint_url):
        return
    if directory is not None:
        yield from _unusable("origin.endpoint_url", directory, settings.cache.directory)
    of_network = ("ca_bundle", "proxy") if directory is not None else ()
    for name in ("access_key_id", "session_token", "profile", *of_network):
        if getattr(origin, name) is not None:
            yield ConfigError(f"origin.{name}", None, _OF_S3, problem=f"origin.{name} is set")
    if not settings.credentials and not settings.server.allow_unsigned:
        yield ConfigError(
            "credentials",
            None,
            "a directory has no key that callers could sign with: give them [[credentials]], or set "
            "server.allow_unsigned = true",
        )


def _directory_only(key: str, one: BucketSettings | OriginSettings) -> Iterator[ConfigError]:
    if one.symlinks is not None:
        yield ConfigError(f"{key}.symlinks", one.symlinks, _OF_DIRECTORY)
    if one.file_mode is not None:
        yield ConfigError(f"{key}.file_mode", f"{one.file_mode:04o}", _OF_DIRECTORY)


def _of_slots(settings: Settings) -> Iterator[ConfigError]:
    for i, slot in enumerate(settings.slots):
        bucket = slot.prefix.bucket
        homes = [settings.homes.of(bucket or ""), *(settings.homes.by_bucket.values() if not bucket else ())]
        if not any(map(is_store, homes)):
            continue
        if bucket and is_webhdfs(homes[0]) and slot.write != "through":
            yield ConfigError(f"slots[{i}].write", slot.write, "through: the origin is HDFS, which is only read")
        if slot.authorization == "origin":
            yield ConfigError(
                f"slots[{i}].authorization", "origin", "gateway: the origin is a directory, and judges no callers"
            )
        if bucket and slot.origin_credentials is not None:
            yield ConfigError(f"slots[{i}].origin_credentials", slot.origin_credentials, _OF_S3)


def _unusable(key: str, directory: Path, cache: Path) -> Iterator[ConfigError]:
    if not directory.is_dir():
        yield ConfigError(key, f"file://{directory}", "this must be a directory, and there is none: is it mounted?")
        return
    if not os.access(directory, os.R_OK | os.X_OK):
        yield ConfigError(key, f"file://{directory}", "this directory cannot be read by the gateway's user")
    origin, own = directory.resolve(), cache.resolve()
    if origin == own or origin in own.parents or own in origin.parents:
        yield ConfigError(
            key, f"file://{directory}", f"must not be in cache.directory ({cache}), nor have it within: choose another"
        )
