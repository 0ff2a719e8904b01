"""tensorstore's S3 key-value store, and zarr arrays on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.boto import read
from tests.clients.commands import client_environment
from tests.clients.conftest import Endpoint
from tests.clients.content import MIB, ODD_KEYS, random_bytes
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, Origin
from tests.clients.trees import read_bucket
from tests.clients.warmth import put_all, reads_at

pytestmark = pytest.mark.clients


@pytest.fixture
def spec(http_endpoint: Endpoint, bucket: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A key-value store in the bucket. The keys come from the environment, the endpoint does not."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
    return _spec(http_endpoint.url, bucket)


def _spec(url: str, bucket: str) -> dict[str, Any]:
    return {
        "driver": "s3",
        "bucket": bucket,
        "endpoint": url,
        "aws_region": REGION,
        "aws_credentials": {"type": "environment"},
        "context": {"s3_request_retries": {"max_retries": 1}},
    }


@pytest.fixture
def store(spec: dict[str, Any]) -> Any:
    import tensorstore

    return tensorstore.KvStore.open(spec).result()


def test_values_round_trip(store: Any, direct: Any, bucket: str, origin: Origin) -> None:
    """A value written is at the origin; read again it comes from cache."""
    for size in (1, 114_660, 11 * MIB + 3):
        content = random_bytes(size)
        store.write("value+é", content).result()
        assert read(direct, bucket, "value+é") == content
        for _ in range(2):
            with reads_at(origin, bucket) as reads:
                assert store.read("value+é").result().value == content
        assert reads == []


def test_an_empty_value(store: Any, direct: Any, bucket: str) -> None:
    """Nothing is a value too, and not a missing one."""
    store.write("empty", b"").result()
    found = store.read("empty").result()
    assert (found.state, found.value) == ("value", b"")
    assert read(direct, bucket, "empty") == b""


def test_a_value_that_must_be_new(store: Any, direct: Any, bucket: str) -> None:
    """If-None-Match: * lets one writer win; the other one is told, and the winner's bytes stay."""
    from tensorstore import KvStore

    missing = store.read("new").result().stamp.generation
    first = store.write("new", b"first", if_equal=missing).result()
    second = store.write("new", b"second", if_equal=missing).result()
    assert first.generation not in (b"", missing)
    assert isinstance(second, KvStore.TimestampedStorageGeneration)
    assert second.generation == b""  # tensorstore's word for a condition that did not hold
    assert store.read("new").result().value == b"first" == read(direct, bucket, "new")


def test_a_value_that_must_be_unchanged(store: Any, direct: Any, bucket: str) -> None:
    """If-Match with the ETag of what was read: kept for the current one, refused for the one before."""
    store.write("value", b"one").result()
    one = store.read("value").result().stamp.generation
    assert store.write("value", b"two", if_equal=one).result().generation != b""
    assert store.write("value", b"three", if_equal=one).result().generation == b""
    assert store.read("value").result().value == b"two" == read(direct, bucket, "value")


def test_conditional_reads(store: Any, bucket: str) -> None:
    """A reader that has the current version is told so instead of being sent it, cold and warm."""
    store.write("value", b"content").result()
    generation = store.read("value").result().stamp.generation
    for _ in range(2):
        assert store.read("value", if_not_equal=generation).result().state == "unspecified"


def _sayable(key: str) -> bool:
    """tensorstore's curl resolves `.` and `..` parts before it sends the path."""
    return all(part not in (".", "..") for part in key.split("/"))


def test_odd_keys(store: Any, direct: Any, bucket: str) -> None:
    """Each key is written, listed and read as that key."""
    keys = [key for key in ODD_KEYS if _sayable(key)]
    for key in keys:
        store.write(key, key.encode()).result()
    assert read_bucket(direct, bucket) == {key: key.encode() for key in keys}
    assert {key: store.read(key).result().value for key in keys} == {key: key.encode() for key in keys}
    assert {key.decode() for key in store.list().result()} == set(keys)


def test_deleting_ranges(store: Any, direct: Any, bucket: str) -> None:
    """delete_range removes the keys below a prefix and no others; reading them says missing."""
    from tensorstore import KvStore

    put_all(direct, bucket, {"a/1": b"1", "a/2": b"2", "b/1": b"3"})
    assert store.read("a/1").result().value == b"1"
    store.delete_range(KvStore.KeyRange("a/", "a0")).result()
    assert read_bucket(direct, bucket) == {"b/1": b"3"}
    assert store.read("a/1").result().state == "missing"
    store.write("b/1", None).result()
    assert read_bucket(direct, bucket) == {}


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_arrays_round_trip(driver: str, spec: dict[str, Any], direct: Any, bucket: str, origin: Origin) -> None:
    """An array written in chunks, one part of it changed, is read back equal, the second time from cache."""
    import numpy
    import tensorstore

    expected = numpy.random.default_rng(1).integers(0, 2**31, size=(600, 500), dtype=numpy.int32)
    kvstore: dict[str, Any] = {**spec, "path": "array/"}
    context = kvstore.pop("context")
    kept = {"driver": driver, "kvstore": kvstore}
    array = tensorstore.open(
        {**kept, "context": context}, create=True, dtype=tensorstore.int32, shape=expected.shape
    ).result()
    array.write(expected).result()
    expected[100:200, 37:450] = 7
    array[100:200, 37:450].write(numpy.full((100, 413), 7, dtype=numpy.int32)).result()
    assert any(key.startswith("array/") for key in read_bucket(direct, bucket))
    for _ in range(2):
        with reads_at(origin, bucket) as reads:
            found = tensorstore.open({**kept, "context": context}).result().read().result()
            assert numpy.array_equal(found, expected)
    assert reads == []
    straight = {**kept, "kvstore": {**kvstore, "endpoint": origin.url}, "context": context}
    assert numpy.array_equal(tensorstore.open(straight).result().read().result(), expected)


_OVER_HTTPS = """
import json, sys, tensorstore
store = tensorstore.KvStore.open(json.loads(sys.argv[1])).result()
content = sys.stdin.buffer.read()
store.write("over https", content).result()
sys.stdout.buffer.write(store.read("over https").result().value)
"""


def test_https(https_endpoint: Endpoint, direct: Any, bucket: str, tmp_path: Path) -> None:
    """In a process of its own: tensorstore reads which certificates to trust from the environment, once."""
    content = random_bytes(MIB + 1)
    environment = client_environment(https_endpoint.url, https_endpoint.ca_file, tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", _OVER_HTTPS, json.dumps(_spec(https_endpoint.url, bucket))],
        env=environment | {"TENSORSTORE_CA_BUNDLE": os.fspath(https_endpoint.ca_file or "")},
        input=content,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout == content == read(direct, bucket, "over https")
