"""HDFS by its REST interface: versions, listings, reads that datanodes break off, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.clock import SystemClock
from gateway.core.errors import OriginBodyError, OriginUnreachable
from gateway.origin.client import OriginSettings
from gateway.origin.stores.face import StoreOrigin
from gateway.origin.stores.webhdfs.store import WebHdfsStore
from tests.origin.origins import ask, xml
from tests.origin.stores.test_directory_listings import KEYS, PREFIXES, all_pages, without_files_that_are_directories
from tests.support.directory_origin import BUCKET
from tests.support.memory_origin import MemoryOrigin
from tests.support.webhdfs import Asked, Node, WebHdfsCluster, silent

LARGE = bytes(range(256)) * 4096


@pytest.fixture(scope="module")
def running() -> Iterator[WebHdfsCluster]:
    with WebHdfsCluster(page=3) as one:
        yield one


@pytest.fixture
def cluster(running: WebHdfsCluster) -> WebHdfsCluster:
    running.root = Node(children={"data": Node(children={BUCKET: Node(children={})})})
    running.on_asked = lambda _: None
    for table in (running.cut_after, running.refused, running.asked):
        table.clear()
    running.is_http_fs = False
    running.domain = "127.0.0.1"
    return running


@asynccontextmanager
async def reached(cluster: WebHdfsCluster, user: str = "", **given: object) -> AsyncIterator[StoreOrigin]:
    endpoint_url = f"webhdfs://{user}{cluster.namenode}/data"
    of_origin = OriginSettings(
        endpoint_url=endpoint_url,
        **{"first_byte_timeout_seconds": 2.0, "stall_timeout_seconds": 2.0, **given},  # type: ignore[arg-type]
    )
    origin = StoreOrigin(WebHdfsStore(of_origin, SystemClock()), SystemClock(), name="hdfs")
    try:
        yield origin
    finally:
        await origin.aclose()


async def test_a_file_is_an_object(cluster: WebHdfsCluster) -> None:
    """Whole, in ranges, under a condition; from a datanode, where the namenode sends the reader."""
    cluster.put(f"/data/{BUCKET}/a b/é€#?%41", LARGE, modified=1_700_000_000_123)
    async with reached(cluster, "alice@") as origin:
        key = "a b/é€#?%41"
        head = await ask(origin, "HEAD", BUCKET, key)
        assert (head.status, head.headers["content-length"]) == (200, str(len(LARGE)))
        assert head.headers["last-modified"] == "Tue, 14 Nov 2023 22:13:20 GMT"
        whole = await ask(origin, "GET", BUCKET, key)
        assert (whole.body, whole.headers["etag"]) == (LARGE, head.headers["etag"])
        pinned = {"if-match": head.headers["etag"], "range": "bytes=1000-300000"}
        part = await ask(origin, "GET", BUCKET, key, headers=pinned)
        assert (part.status, part.body) == (206, LARGE[1000:300001])
        assert (await ask(origin, "GET", BUCKET, key, headers={"if-match": '"other"'})).status == 412
    assert {one.query.get("user.name") for one in cluster.asked if one.who == "namenode"} == {"alice"}
    assert cluster.operations("datanode 0") == ["OPEN", "OPEN"]


async def test_each_change_is_another_version(cluster: WebHdfsCluster) -> None:
    """A new file under the name, a longer one, a later one; not one that was only looked at."""
    node, path, etags = Node(), f"/data/{BUCKET}/k", list[str]()
    changes: list[dict[str, object]] = [{}, {}, {"data": b"other"}, {"modified": 5}, {"data": b"longer"}]
    async with reached(cluster) as origin:
        for change in changes:
            node = cluster.put(path, b"bytes") if not change else node
            for name, value in change.items():
                setattr(node, name, value)
            etags.append((await ask(origin, "HEAD", BUCKET, "k")).headers["etag"])
            assert etags[-1] == (await ask(origin, "HEAD", BUCKET, "k")).headers["etag"]
    assert len({*etags}) == 4, "what HDFS cannot do, other bytes at the same length and time, is not seen"
    assert not any("-" in etag[-4:] or len(etag) == 34 for etag in etags), "no client takes it for an MD5"


async def test_what_is_no_file_is_no_object(cluster: WebHdfsCluster) -> None:
    """A directory, a name below a file, one that HDFS cannot have; and a bucket that is not there says so."""
    cluster.put(f"/data/{BUCKET}/dir/file", b"x")
    cluster.put(f"/data/{BUCKET}/link", b"", kind="SYMLINK")
    async with reached(cluster) as origin:
        for key in ("dir", "dir/", "dir/file/x", "none", "a:b", "a//b", "../x", "link"):
            answer = await ask(origin, "GET", BUCKET, key)
            assert (answer.status, b"<Code>NoSuchKey</Code>" in answer.body) == (404, True), key
        assert b"<Code>NoSuchBucket</Code>" in (await ask(origin, "GET", "another", "k")).body
        assert b"<Name>bucket</Name>" in (await ask(origin, "GET")).body


@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST"])
async def test_nothing_is_written(cluster: WebHdfsCluster, method: str) -> None:
    """It is refused, before anything is asked of HDFS."""
    query = [("uploads", None)] if method == "POST" else []
    async with reached(cluster) as origin:
        answer = await ask(origin, method, BUCKET, "k", query=query, body=b"x" if method == "PUT" else b"")
        assert (answer.status, b"only reads" in answer.body) == (403, True)
        assert (await ask(origin, "GET", BUCKET, query=[("uploads", None)])).status == 200
    assert "CREATE" not in cluster.operations()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    keys=st.sets(KEYS, max_size=12).map(without_files_that_are_directories),
    prefix=PREFIXES,
    after=PREFIXES,
    delimiter=st.sampled_from(["", "/"]),
    limit=st.integers(1, 5),
)
def test_a_tree_is_listed_as_s3_lists_its_keys(
    running: WebHdfsCluster, keys: set[str], prefix: str, after: str, delimiter: str, limit: int
) -> None:
    """Whatever its names, in pages that a namenode cuts elsewhere than the reader."""
    query = {"prefix": prefix, "start-after": after, "delimiter": delimiter, "max-keys": str(limit)}
    running.root = Node(children={"data": Node(children={BUCKET: Node(children={})})})
    model = MemoryOrigin(SystemClock())
    model.create_bucket(BUCKET)

    async def both() -> tuple[list[list[str]], list[list[str]]]:
        for key in keys:
            running.put(f"/data/{BUCKET}/{key}", b"")
            model.put(BUCKET, key, b"")
        async with reached(running) as origin:
            return await all_pages(origin, query), await all_pages(model, query)

    found, expected = asyncio.run(both())
    assert found == expected


async def test_a_page_asks_about_as_much_as_it_shows(cluster: WebHdfsCluster) -> None:
    """A directory of many names is not read from its beginning for each page."""
    cluster.page = 100
    try:
        for number in range(1000):
            cluster.put(f"/data/{BUCKET}/dir/part-{number:05}.bin", b"x")
        async with reached(cluster) as origin:
            query = [("list-type", "2"), ("start-after", "dir/part-00800.bin"), ("max-keys", "50")]
            found = xml((await ask(origin, "GET", BUCKET, query=query)).body).findall("Contents/Key")
        assert [node.text for node in found] == [f"dir/part-{number:05}.bin" for number in range(801, 851)]
        assert len(cluster.asked) <= 8
    finally:
        cluster.page = 3


async def test_a_delimiter_that_is_no_slash_is_refused(cluster: WebHdfsCluster) -> None:
    """To roll up by another, all would have to be read."""
    async with reached(cluster) as origin:
        answer = await ask(origin, "GET", BUCKET, query=[("list-type", "2"), ("delimiter", "-")])
        assert answer.status == 501


@pytest.mark.parametrize("cut", [0, 1, 300_000])
async def test_a_datanode_that_breaks_off_is_left_out(cluster: WebHdfsCluster, cut: int) -> None:
    """The rest comes from another one, from the byte on where it stopped."""
    cluster.put(f"/data/{BUCKET}/k", LARGE)
    cluster.cut_after["datanode 0"] = cut
    async with reached(cluster) as origin:
        assert (await ask(origin, "GET", BUCKET, "k")).body == LARGE
    assert int(cluster.asked[-2].query["offset"]) <= max(1, cut)
    assert cluster.asked[-2].who == "datanode 1"


@pytest.mark.slow
async def test_a_datanode_that_says_nothing_is_left_out(cluster: WebHdfsCluster) -> None:
    """After the time for the first byte."""
    cluster.put(f"/data/{BUCKET}/k", LARGE)
    cluster.on_asked = silent(8.0, "datanode 0")
    async with reached(cluster, first_byte_timeout_seconds=1.0) as origin:
        assert (await ask(origin, "GET", BUCKET, "k")).body == LARGE


async def test_a_namenode_that_says_nothing_is_away(cluster: WebHdfsCluster) -> None:
    """Within a bound."""
    cluster.on_asked = silent(2.0, "namenode")
    async with reached(cluster, first_byte_timeout_seconds=0.2, max_attempts=2) as origin:
        with pytest.raises(OriginUnreachable):
            await ask(origin, "HEAD", BUCKET, "k")


@pytest.mark.parametrize(
    ("status", "exception", "code"),
    [(401, "SecurityException", "AccessDenied"), (403, "AccessControlException", "AccessDenied")],
)
async def test_a_refusal_is_told(cluster: WebHdfsCluster, status: int, exception: str, code: str) -> None:
    """Kerberos, which Forebay does not speak; want of rights."""
    cluster.put(f"/data/{BUCKET}/k", b"x")
    cluster.refused["namenode"] = status, exception
    async with reached(cluster) as origin:
        answer = await ask(origin, "GET", BUCKET, "k")
        assert (answer.status, code.encode() in answer.body) == (403, True)
        assert ("Kerberos" in answer.body.decode()) is (status == 401)


@pytest.mark.parametrize(("status", "exception"), [(403, "StandbyException"), (403, "IOException"), (503, "")])
async def test_what_passes_is_tried_again(cluster: WebHdfsCluster, status: int, exception: str) -> None:
    """A namenode on standby, for instance: it is no refusal, and no absence."""
    cluster.put(f"/data/{BUCKET}/k", b"x")
    cluster.refused["namenode"] = status, exception

    def heals(_: Asked) -> None:
        if len(cluster.asked) == 2:
            cluster.refused.clear()

    cluster.on_asked = heals
    async with reached(cluster) as origin:
        assert (await ask(origin, "GET", BUCKET, "k")).body == b"x"


async def test_a_redirect_leads_to_datanodes_only(cluster: WebHdfsCluster) -> None:
    """16.5 Elsewhere it is not followed: a namenode that somebody has taken over opens no other door."""
    cluster.put(f"/data/{BUCKET}/k", b"x")
    cluster.domain = "localhost"
    async with reached(cluster, max_attempts=1) as origin:
        with pytest.raises(OriginUnreachable, match="set datanodes"):
            await ask(origin, "GET", BUCKET, "k")
        assert "datanode 0" not in {one.who for one in cluster.asked}
    async with reached(cluster, datanodes=("localhost",)) as origin:
        assert (await ask(origin, "GET", BUCKET, "k")).body == b"x"


@pytest.mark.parametrize("change", ["replaced", "deleted", "longer"])
async def test_a_file_that_changes_while_it_is_read_gives_no_whole_answer(cluster: WebHdfsCluster, change: str) -> None:
    """Whatever the datanode sent: its last bytes are not handed on."""
    path = f"/data/{BUCKET}/k"
    node = cluster.put(path, LARGE)

    def changes(asked: Asked) -> None:
        if change == "deleted" and asked.who == "namenode" and cluster.operations("datanode 0"):
            cluster.on_asked = lambda _: None
            cluster.remove(path)
        elif change == "replaced" and asked.who == "datanode 0":
            cluster.put(path, LARGE)
        elif change == "longer" and asked.who == "datanode 0":
            node.data += b"more"

    cluster.on_asked = changes
    async with reached(cluster) as origin:
        with pytest.raises(OriginBodyError, match="changed while"):
            await ask(origin, "GET", BUCKET, "k")


async def test_http_fs_gives_the_bytes_itself(cluster: WebHdfsCluster) -> None:
    """And no ids of files: length and time are the version."""
    cluster.is_http_fs = True
    cluster.put(f"/data/{BUCKET}/k", LARGE)
    async with reached(cluster) as origin:
        first = await ask(origin, "GET", BUCKET, "k", headers={"range": "bytes=5-9"})
        assert (first.body, cluster.operations("datanode 0")) == (LARGE[5:10], [])
        cluster.put(f"/data/{BUCKET}/k", LARGE, modified=7)
        assert (await ask(origin, "HEAD", BUCKET, "k")).headers["etag"] != first.headers["etag"]
