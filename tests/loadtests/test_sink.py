"""The origin that takes writes: what it says of them is what S3 says, and its link is as fast as it is told."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from loadtests.harness.content import Family, load_object
from loadtests.harness.saver import Part, Saver, at_once
from loadtests.harness.sink import SinkOrigin

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def origin() -> Iterator[SinkOrigin]:
    with SinkOrigin() as one:
        yield one


def of(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def test_objects_have_the_etags_of_their_bytes(origin: SinkOrigin) -> None:
    """Whether the sender tells the MD5, and the bytes never leave the kernel, or not."""
    told = {"content-md5": base64.b64encode(bytes.fromhex(of(CONTENT))).decode()}
    with httpx.Client(base_url=origin.url, trust_env=False, timeout=60) as client:
        for name, headers in (("a", {}), ("b", told)):
            assert client.head(f"/load/{name}").status_code == 404
            assert client.put(f"/load/{name}", content=CONTENT, headers=headers).headers["etag"] == f'"{of(CONTENT)}"'
            head = client.head(f"/load/{name}")
            assert (head.headers["etag"], head.headers["content-length"]) == (f'"{of(CONTENT)}"', str(len(CONTENT)))
        assert client.delete("/load/a").status_code == 204
        assert client.head("/load/a").status_code == 404
    assert origin.objects() == 1


@pytest.mark.parametrize("tells_md5", [True, False])
def test_uploads_in_parts_have_theirs(origin: SinkOrigin, tells_md5: bool) -> None:
    """Of the parts that came; one that is over is known no more."""
    saver = Saver(origin.address, Part.of(CONTENT), tells_md5=tells_md5)
    saver.save("model", 3)
    etag = f'"{of(3 * bytes.fromhex(of(CONTENT)))}-3"'
    assert httpx.head(f"{origin.url}/load/model", trust_env=False, timeout=60).headers["etag"] == etag
    with pytest.raises(RuntimeError, match="NoSuchUpload"):
        saver.complete()
    saver.close()


def test_objects_of_its_families_can_be_read() -> None:
    """Whole and in ranges, beside what is written; it counts how often it was asked for bytes."""
    made_up = Family("read/", 2, 600_000)
    of_it = load_object(made_up.path(1), made_up.size_bytes)
    with SinkOrigin([made_up]) as origin, httpx.Client(base_url=origin.url, trust_env=False, timeout=60) as client:
        assert client.put("/load/a", content=CONTENT).status_code == 200
        head = client.head(of_it.path)
        assert (head.headers["etag"], head.headers["content-length"], origin.gets()) == (of_it.etag, "600000", 0)
        assert client.get(of_it.path).content == bytes(of_it.piece(0, 600_000))
        part = client.get(of_it.path, headers={"range": "bytes=300000-300009"})
        assert (part.status_code, part.content) == (206, bytes(of_it.piece(300_000, 10)))
        assert client.get("/load/read/000002.bin").status_code == 404
        assert (origin.gets(), origin.objects()) == (2, 1)


def test_what_it_keeps_is_counted_in_bytes(origin: SinkOrigin) -> None:
    """An object that is written again counts once, one that is deleted not at all."""
    before = origin.kept_bytes()
    saver = Saver(origin.address, Part.of(CONTENT))
    for size_bytes in (10, 30):
        saver.put("counted", bytes(size_bytes))
    saver.save("in-parts", 2)
    saver.close()
    origin.until_it_keeps(before + 30 + 2 * len(CONTENT), 10)
    assert httpx.delete(f"{origin.url}/load/counted", trust_env=False).status_code == 204
    assert origin.kept_bytes() - before == 2 * len(CONTENT)


def test_all_connections_share_one_link(origin: SinkOrigin) -> None:
    """Two senders at once take as long as one that sends as much."""
    origin.pace(20e6)
    savers = [Saver(origin.address, Part.of(CONTENT), tells_md5=True) for _ in range(2)]
    seconds = at_once([lambda one=one, n=n: one.save(f"o{n}", 2) for n, one in enumerate(savers)])  # type: ignore[misc]
    assert seconds >= 4 * len(CONTENT) / 20e6 * 0.9
    for one in savers:
        one.close()


def test_what_fails_on_a_thread_is_raised(origin: SinkOrigin) -> None:
    """A load test whose writers fail has no figures."""
    reached = threading.Event()

    def fail() -> None:
        raise RuntimeError("no answer")

    with pytest.raises(RuntimeError, match="no answer"):
        at_once([reached.set, fail])
    assert reached.is_set()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="0 of 1"):
        origin.until_it_has(1, 0.05)
    assert time.monotonic() - began < 10
