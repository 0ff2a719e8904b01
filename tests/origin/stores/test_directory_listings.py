"""D6: listings in S3's order, whatever the tree, with bounded memory."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.clock import SystemClock
from gateway.jobs.listing import fetch_page
from gateway.metadata.listing.records import packed_page
from gateway.origin.client import Origin, OriginRequest, Purpose, WrappedResponse, page_rows_of
from gateway.origin.stores.directory import walk
from gateway.origin.stores.directory.key_paths import OWN
from gateway.origin.stores.directory.walk import Directories
from gateway.policy.slots import Prefix
from gateway.s3.list_result import ListedPage, parse_listed_page
from tests.origin.origins import ask, xml
from tests.origin.stores.asking import put
from tests.support.directory_origin import BUCKET, DirectoryOrigin
from tests.support.memory_origin import MemoryOrigin
from tests.support.rights import with_plain_rights

NAMES = st.sampled_from(["a", "a-", "a.", "a0", "b", "-", ".x", "é", "\U00010000", "\uff01", "a b", "z" * 200])
KEYS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
PREFIXES = st.one_of(st.just(""), KEYS, KEYS.map(lambda key: f"{key}/"), st.sampled_from(["a", "a/", "//", "../", "z"]))


def without_files_that_are_directories(keys: set[str]) -> set[str]:
    return {key for key in keys if not any(other.startswith(f"{key}/") for other in keys)}


async def all_pages(origin: Origin, query: dict[str, str]) -> list[list[str]]:
    """Every page: prefixes and keys in the order of their bytes."""
    pages, token = list[list[str]](), ""
    while True:
        asked = {"list-type": "2", **query, **({"continuation-token": token} if token else {})}
        answer = await ask(origin, "GET", BUCKET, query=list(asked.items()))
        assert answer.status == 200
        root = xml(answer.body)
        found = [*root.findall("Contents/Key"), *root.findall("CommonPrefixes/Prefix")]
        pages.append(sorted((node.text or "" for node in found), key=str.encode))
        token = root.findtext("NextContinuationToken") or ""
        if not token:
            return pages


@pytest.mark.slow
@example(keys={"a", "a-"}, prefix="", after="", delimiter="a", limit=1, names_max=1000)
@given(
    keys=st.sets(KEYS, max_size=12).map(without_files_that_are_directories),
    prefix=PREFIXES,
    after=PREFIXES,
    delimiter=st.sampled_from(["", "/", "-", "a", "a/"]),
    limit=st.integers(1, 5),
    names_max=st.sampled_from([2, 3, 1000]),
)
def test_a_tree_is_listed_as_s3_lists_its_keys(
    keys: set[str], prefix: str, after: str, delimiter: str, limit: int, names_max: int
) -> None:
    """Pages by prefix, delimiter, start and size are those of the same keys in memory, with room for few names too."""
    query = {"prefix": prefix, "start-after": after, "delimiter": delimiter, "max-keys": str(limit)}

    async def both() -> tuple[list[list[str]], list[list[str]]]:
        root = Path(tempfile.mkdtemp(dir="/dev/shm"))
        model = MemoryOrigin(SystemClock())
        model.create_bucket(BUCKET)
        nas = DirectoryOrigin(root)
        nas.files._files._directories = Directories(lambda _: None, names_max=names_max)
        try:
            for key in keys:
                nas.write(key, b"")
                model.put(BUCKET, key, b"")
            return await all_pages(nas, query), await all_pages(model, query)
        finally:
            await nas.aclose()
            shutil.rmtree(root)

    found, expected = asyncio.run(both())
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("names_max", [1000, 1_000_000])
async def test_a_directory_with_many_names_is_listed_whole(
    nas: DirectoryOrigin, names_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each name once and in order, however few names there is room for; and while it does not change, it is read once
    for each part that is kept."""
    names = [f"{number * 7919 % 5000:05}" for number in range(5000)]
    for name in names:
        (nas.bucket / name).touch()
    os.utime(nas.bucket, (1, 1))
    monkeypatch.setattr(walk, "SETTLE_SECONDS", -3600.0)
    directories = nas.files._files._directories = Directories(lambda _: None, names_max=names_max)
    reads = list[bytes]()
    read = directories._read

    def counted(directory: int, after: bytes, low: bytes, *, is_root: bool) -> object:
        reads.append(after)
        return read(directory, after, low, is_root=is_root)

    monkeypatch.setattr(directories, "_read", counted)
    pages = await all_pages(nas, {"max-keys": "1000"})
    assert [key for page in pages for key in page] == sorted(names)
    assert len(reads) == 1 if names_max > 5000 else 5 < len(reads) < 30


async def test_empty_directories_are_listed_as_objects(nas: DirectoryOrigin) -> None:
    """As `dir/`, and only while they are empty; with a delimiter as a common prefix."""
    (nas.bucket / "a" / "b").mkdir(parents=True)
    nas.write("c/file", b"")
    assert await all_pages(nas, {}) == [["a/b/", "c/file"]]
    assert await all_pages(nas, {"delimiter": "/"}) == [["a/", "c/"]]
    assert await all_pages(nas, {"prefix": "a/b/", "delimiter": "/"}) == [["a/b/"]]
    assert await all_pages(nas, {"start-after": "a/b/"}) == [["c/file"]]


async def test_a_new_file_is_in_the_next_listing(nas: DirectoryOrigin) -> None:
    """Names that are kept are read anew when their directory has changed, within the same tick too."""
    for number in range(20):
        nas.write(f"{number:02}", b"")
        assert await all_pages(nas, {}) == [[f"{one:02}" for one in range(number + 1)]]


async def test_what_may_not_be_read_is_left_out_of_a_listing(nas: DirectoryOrigin) -> None:
    """13.6 A file, a directory, and what lies in a directory that may be read and not entered; the rest is listed."""
    for key, place, mode in (("file", "file", 0), ("closed/file", "closed", 0), ("names/file", "names", 0o444)):
        nas.write(key, b"")
        (nas.bucket / place).chmod(mode)
    nas.write("open", b"")
    page = with_plain_rights(partial(nas.files._files.list, BUCKET, b"", b"", b"", 1000))
    assert [one.key for one in page.entries if not isinstance(one, bytes)] == [b"open"]
    assert nas.skipped == {"unreadable": 3}


@pytest.mark.parametrize(
    "more", [{}, {"delimiter": "/"}, {"prefix": "dir/"}, {"start-after": "dir/b"}, {"max-keys": "1"}]
)
async def test_rows_say_what_the_document_says(nas: DirectoryOrigin, more: dict[str, str]) -> None:
    """Who would only parse the document takes the rows, and no document is made."""
    nas.write("dir/a", b"a")
    nas.write("é & b", b"bb")
    await put(nas, "dir/c", b"ccc", content_type="text/plain", x_amz_storage_class="COLD")
    query = [("list-type", "2"), ("encoding-type", "url"), ("fetch-owner", "true"), *more.items()]
    read = await ask(nas, "GET", BUCKET, query=query)
    async with await nas.send(OriginRequest("GET", BUCKET, None, query, takes_rows=True)) as answer:
        rows, document = page_rows_of(WrappedResponse(answer)), await answer.read(1)
    assert rows is not None
    assert rows._replace(is_url_encoded=True) == parse_listed_page(read.body, with_owner=True)
    assert document == b""


async def test_a_crawl_takes_rows(nas: DirectoryOrigin) -> None:
    nas.write("a", b"a")
    page = await fetch_page(nas, Prefix(BUCKET), slot="default", purpose=Purpose.REFRESH, with_owner=True)
    assert isinstance(page, ListedPage)
    found = packed_page(page, b"b")
    assert [key for key, _ in found.listed] == [b"a"]
    assert packed_page(page, b"a").is_cut


@pytest.mark.parametrize(
    "query",
    [{}, {"max-keys": "1"}, {"max-keys": "2", "start-after": "a/in/deep/"}, {"prefix": "a/in/"}, {"prefix": "b/up/"}],
)
async def test_linked_directories_are_entered_if_they_are_to_be(file_system: Path, query: dict[str, str]) -> None:
    """Those in the bucket, by each way that leads there; not those that the way is in already, nor Forebay's own."""
    nas = DirectoryOrigin(file_system, symlinks="follow")
    for key in ("a/file", "b/deep/file", "z", f"{OWN}/tmp/hidden", "../outside/hidden"):
        nas.write(key, b"")
    links = {"a/in": "../b", "b/up": "../a", "own": OWN, "out": "../outside", "again": "a/file", "none": "no"}
    for name, target in links.items():
        (nas.bucket / name).symlink_to(target)
    found = [key for page in await all_pages(nas, query) for key in page]
    expected = ["a/file", "a/in/deep/file", "again", "b/deep/file", "b/up/file", "z"]
    after, prefix = query.get("start-after", ""), query.get("prefix", "")
    assert found == [key for key in expected if key > after and key.startswith(prefix)]
    for key in found:
        assert (await ask(nas, "GET", BUCKET, key)).status == 200
    nas.files.threads.end()


async def test_a_link_that_leads_elsewhere_now_is_listed_anew(
    file_system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory has not changed by that."""
    monkeypatch.setattr(walk, "SETTLE_SECONDS", -3600.0)
    nas = DirectoryOrigin(file_system, symlinks="follow")
    nas.write("a/one", b"")
    (nas.bucket / "b").symlink_to("hub/now")
    (nas.bucket / "hub").mkdir()
    (nas.bucket / "hub" / "now").symlink_to("../a/one")
    assert await all_pages(nas, {"prefix": "b"}) == [["b"]]
    (nas.bucket / "hub" / "new").symlink_to("../a")
    (nas.bucket / "hub" / "new").rename(nas.bucket / "hub" / "now")
    assert await all_pages(nas, {"prefix": "b"}) == [["b/one"]]
    nas.files.threads.end()
