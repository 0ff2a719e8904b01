"""obstore (the Rust object_store), over http and https."""

from __future__ import annotations

import io
from datetime import timedelta
from typing import Any

import pytest

from tests.clients.anybody import fetch
from tests.clients.boto import read
from tests.clients.conftest import Endpoint
from tests.clients.content import MIB, ODD_KEYS, random_bytes
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, Origin
from tests.clients.trees import read_bucket
from tests.clients.warmth import put_all, reads_at

pytestmark = pytest.mark.clients


@pytest.fixture
def store(endpoint: Endpoint, bucket: str) -> Any:
    """A store with an endpoint and keys; one attempt only."""
    from obstore.store import S3Store

    return S3Store(
        bucket,
        endpoint=endpoint.url,
        access_key_id=ACCESS_KEY_ID,
        secret_access_key=SECRET_ACCESS_KEY,
        region=REGION,
        client_options=_client_options(endpoint),
        retry_config={"max_retries": 0},
    )


def _client_options(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.ca_file is None:
        return {"allow_http": True}
    return {"root_certificate": endpoint.ca_file.read_bytes()}


def test_objects_round_trip(store: Any, direct: Any, bucket: str, origin: Origin) -> None:
    """Put whole or in parts, an object is at the origin; got again it comes from cache."""
    for size in (0, 1, 114_660, 23 * MIB + 11):
        content = random_bytes(size)
        store.put("object", content, chunk_size=5 * MIB, max_concurrency=3)
        assert read(direct, bucket, "object") == content
        for _ in range(2):
            with reads_at(origin, bucket) as reads:
                assert bytes(store.get("object").bytes()) == content
        assert reads == []


def test_ranges(store: Any, direct: Any, bucket: str) -> None:
    """Single ranges, several at once, offsets and suffixes are the object's bytes."""
    content = random_bytes(17 * MIB)
    direct.put_object(Bucket=bucket, Key="object", Body=content)
    ranges = [(0, 1), (8 * MIB - 3, 8 * MIB + 4), (16 * MIB, 17 * MIB), (5, 9 * MIB)]
    for start, end in ranges:
        assert bytes(store.get_range("object", start=start, end=end)) == content[start:end]
    several = store.get_ranges("object", starts=[start for start, _ in ranges], ends=[end for _, end in ranges])
    assert [bytes(one) for one in several] == [content[start:end] for start, end in ranges]
    assert bytes(store.get("object", options={"range": {"suffix": 9}}).bytes()) == content[-9:]
    assert bytes(store.get("object", options={"range": {"offset": 9 * MIB}}).bytes()) == content[9 * MIB :]


def test_files(store: Any, direct: Any, bucket: str) -> None:
    """A writer uploads parts, a reader seeks in them."""
    import obstore

    content = random_bytes(11 * MIB + 5)
    with obstore.open_writer(store, "file", buffer_size=5 * MIB) as writer:
        writer.write(content)
    assert direct.head_object(Bucket=bucket, Key="file")["ETag"].endswith('-3"')
    assert read(direct, bucket, "file") == content
    reader = obstore.open_reader(store, "file")
    reader.seek(-7, io.SEEK_END)
    assert bytes(reader.read()) == content[-7:]


def _normal(key: str) -> bool:
    """object_store has paths: no empty, `.` or `..` parts, no control characters."""
    return all(part not in ("", ".", "..") for part in key.split("/")) and "\t" not in key


def test_odd_keys(store: Any, direct: Any, bucket: str) -> None:
    """Each key that obstore lets through is written and read as that key."""
    keys = [key for key in ODD_KEYS if _normal(key)]
    for key in keys:
        store.put(key, key.encode())
    content = read_bucket(direct, bucket)
    assert sorted(content.values()) == sorted(key.encode() for key in keys)
    assert {key: bytes(store.get(key).bytes()) for key in keys} == {key: key.encode() for key in keys}


def test_head_and_listings(store: Any, direct: Any, bucket: str) -> None:
    """What head and list say is what the origin says."""
    content = put_all(direct, bucket, {name: name.encode() for name in ("a/1", "a/b/2", "a/two words", "é+top")})
    heads = {key: direct.head_object(Bucket=bucket, Key=key) for key in content}
    expected = {key: (len(content[key]), head["ETag"], head["LastModified"]) for key, head in heads.items()}
    listed = store.list().collect()
    assert {one["path"]: (one["size"], one["e_tag"], _seconds(one["last_modified"])) for one in listed} == expected
    for key, what in expected.items():
        head = store.head(key)
        assert (head["size"], head["e_tag"], head["last_modified"]) == what
    folder = store.list_with_delimiter("a")
    assert list(folder["common_prefixes"]) == ["a/b"]
    assert {one["path"] for one in folder["objects"]} == {"a/1", "a/two words"}


def _seconds(moment: Any) -> Any:
    return moment.replace(microsecond=0)  # listings have milliseconds where HEAD has none


def test_copies_renames_and_deletes(store: Any, direct: Any, bucket: str) -> None:
    """Each ends in the state it names, one key or many at once."""
    put_all(direct, bucket, {f"a/{name}": name.encode() for name in ("one", "two", "three", "four")})
    store.copy("a/one", "b/one+é")
    store.rename("a/two", "b/two")
    assert bytes(store.get("b/two").bytes()) == b"two"
    store.delete(["a/one", "a/three"])
    assert read_bucket(direct, bucket) == {"a/four": b"four", "b/one+é": b"one", "b/two": b"two"}
    with pytest.raises(FileNotFoundError):
        store.get("a/one")


def test_conditional_puts(store: Any, direct: Any, bucket: str) -> None:
    """ "create" is refused for what exists, "update" with an ETag that is no longer the object's."""
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    first = store.put("object", b"first", mode="create")
    with pytest.raises(AlreadyExistsError):
        store.put("object", b"again", mode="create")
    store.put("object", b"second", mode={"e_tag": first["e_tag"]})
    with pytest.raises(PreconditionError):
        store.put("object", b"third", mode={"e_tag": first["e_tag"]})
    assert bytes(store.get("object").bytes()) == b"second" == read(direct, bucket, "object")


def test_conditional_gets(store: Any, direct: Any, bucket: str) -> None:
    """If-Match and If-None-Match, cold and warm."""
    from obstore.exceptions import NotModifiedError, PreconditionError

    etag = direct.put_object(Bucket=bucket, Key="object", Body=b"content")["ETag"]
    for _ in range(2):
        assert bytes(store.get("object", options={"if_match": etag}).bytes()) == b"content"
        with pytest.raises(NotModifiedError):
            store.get("object", options={"if_none_match": etag})
        with pytest.raises(PreconditionError):
            store.get("object", options={"if_match": '"another"'})


def test_a_signed_url(store: Any, endpoint: Endpoint, direct: Any, bucket: str) -> None:
    """The URL that obstore signs gives the object to anybody."""
    import obstore

    direct.put_object(Bucket=bucket, Key="with space+plus", Body=b"content")
    url = obstore.sign(store, "GET", "with space+plus", timedelta(minutes=5))
    for _ in range(2):
        assert fetch(url, endpoint.ca_file) == b"content"


def test_the_environment_is_heard(
    http_endpoint: Endpoint, direct: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What README says: AWS_ENDPOINT_URL and allow_http."""
    from obstore.store import S3Store

    monkeypatch.setenv("AWS_ENDPOINT_URL", http_endpoint.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
    monkeypatch.setenv("AWS_REGION", REGION)
    S3Store(bucket, client_options={"allow_http": True}).put("object", b"content")
    assert read(direct, bucket, "object") == b"content"
