"""The listing index on disk: what is landed, what is believed, what own writes do to it, in one process and in two."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import StoreUnavailable
from gateway.core.model import Homes
from gateway.disk.lmdb_environment import NEW_ENGINE, OLD_ENGINE
from gateway.metadata import catalog as catalog_module
from gateway.metadata.catalog import Catalog
from gateway.metadata.listing import dirty_keys, store
from gateway.metadata.listing import index as index_module
from gateway.metadata.listing.dirty_keys import OwnWrite
from gateway.metadata.listing.index import AuthoritativeEntry, FoundPage, ListingIndex, NeedsLookup, found_of
from gateway.metadata.listing.pages import END, ListRequest, key_successor, prefix_end
from gateway.metadata.listing.ranges import Batch, KeyBound, QueryStamp
from gateway.metadata.listing.records import numbered, pack, template_of, unpack
from gateway.metadata.opening import OpenCatalog, open_directory
from gateway.policy.slots import Slots
from gateway.s3.list_result import EntryTemplate, ListedEntry, ListedPage
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.origin import MemoryOrigin
from tests.support.prepared_process import PreparedProcess
from tests.support.stopped_process import stopped_writer

ROOT = Path(__file__).resolve().parents[3]
STANDARD = EntryTemplate("", None, "<StorageClass>STANDARD</StorageClass>")
GLACIER = EntryTemplate("", None, "<StorageClass>GLACIER</StorageClass>")
FOR_EVER = KeyBound(math.inf, math.inf)


def entry(key: bytes, size_bytes: int = 1, template: EntryTemplate = STANDARD) -> ListedEntry:
    return ListedEntry(key, "2026-01-01T00:00:00.000Z", f'"{size_bytes:032x}"', size_bytes, template)


def page(*entries: ListedEntry) -> ListedPage:
    return ListedPage(sorted(entries), [], None)


@dataclass
class Bench:
    """An index, and what a test does with it."""

    opened: OpenCatalog
    index: ListingIndex
    clock: ManualClock

    async def learn(
        self, *entries: ListedEntry, asked: QueryStamp | None = None, wanted: ListRequest | None = None
    ) -> None:
        asked = asked or self.index.asked("b")
        self.index.learn("b", wanted or ListRequest(), found_of(page(*entries)), asked, merge_seconds=0.0)
        await self.index.settle()

    async def write(self, *keys: str) -> None:
        """An own write, from its beginning to its end."""
        await self.index.end_write(await self.index.begin_write("b", keys))

    async def land(
        self,
        keys: Sequence[bytes],
        start: bytes | None = None,
        stop: bytes | None = None,
        *,
        templates: Sequence[EntryTemplate] = (STANDARD,),
        merge_seconds: float = 0.0,
    ) -> list[bytes]:
        """What a crawl finds from `start`, the first key, to `stop`, the place behind the last one."""
        start, stop = keys[0] if start is None else start, stop or key_successor(keys[-1])
        listed, asked = [(key, pack(entry(key), 0)) for key in keys], self.index.asked("b")
        return await self.index.land(Batch("b", start, stop, listed, templates, asked, merge_seconds))

    def keys(self, wanted: ListRequest | None = None, **truths: ListedEntry | None) -> list[bytes] | NeedsLookup | None:
        """What is listed; `truths` by key."""
        found = self.find(wanted, **truths)
        return [key for key, _ in found.page.keys] if isinstance(found, FoundPage) else found

    def find(self, wanted: ListRequest | None = None, **truths: ListedEntry | None) -> FoundPage | NeedsLookup | None:
        told = {key.encode(): AuthoritativeEntry(one) for key, one in truths.items()}
        return self.index.find("b", wanted or ListRequest(), FOR_EVER, with_owner=False, truths=told)


@asynccontextmanager
async def playing(directory: Path, *, size_bytes_max: int = store.SIZE_BYTES_MAX) -> AsyncIterator[Bench]:
    opened = open_directory(directory, Homes("origin"))
    opened.listing._size_bytes_max = size_bytes_max
    clock = ManualClock()
    index = ListingIndex(opened, opened.epochs, clock)
    try:
        yield Bench(opened, index, clock)
    finally:
        await index.close()
        opened.close()


async def test_nothing_is_known_before_it_is_learned(tmp_path: Path) -> None:
    """Neither of the bucket, nor of the rest of it."""
    async with playing(tmp_path / "c") as one:
        assert one.keys() is None
        await one.learn(entry(b"a/1"), wanted=ListRequest(b"a/"))
        assert one.keys() is None
        assert one.keys(ListRequest(b"a/")) == [b"a/1"]
        assert one.keys(ListRequest(b"a/2")) == []
        assert one.index.find("c", ListRequest(b"a/"), FOR_EVER, with_owner=False) is None


async def test_what_is_listed_of_a_bucket_that_moves_is_forgotten(tmp_path: Path) -> None:
    """And of no other."""

    def is_known(homes: Homes) -> bool:
        opened = open_directory(tmp_path / "c", homes)
        try:
            index = ListingIndex(opened, opened.epochs, ManualClock())
            return isinstance(index.find("b", ListRequest(), FOR_EVER, with_owner=False, truths={}), FoundPage)
        finally:
            opened.close()

    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"a"))
    assert is_known(Homes("origin", {"c": "elsewhere"}))
    assert not is_known(Homes("origin", {"b": "elsewhere"}))


async def test_it_survives_an_orderly_end_and_a_boot(tmp_path: Path) -> None:
    """As the catalog does; an unclean boot drops it."""
    directory = tmp_path / "c"
    async with playing(directory) as one:
        await one.learn(entry(b"a"))
    (directory / "BOOT").write_bytes(b"another boot\n")
    async with playing(directory) as one:
        assert one.keys() == [b"a"]
    (directory / "BOOT").write_bytes(b"another boot\n")
    (directory / "CLEAN").unlink()
    async with playing(directory) as one:
        assert one.keys() is None


@pytest.mark.parametrize("name", ["listing", "dirty"])
@pytest.mark.parametrize("harm", ["noise", "gone"])
async def test_files_that_are_not_whole_drop_everything(tmp_path: Path, name: str, harm: str) -> None:
    """Without dirty keys the index could not be believed, nor the other way round."""
    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"a"))
    if harm == "noise":
        (tmp_path / "c" / name / "data.mdb").write_bytes(b"no index" * 4096)
    else:
        (tmp_path / "c" / name).rename(tmp_path / "elsewhere")
    async with playing(tmp_path / "c") as one:
        assert one.keys() is None
        await one.learn(entry(b"b"))
        assert one.keys() == [b"b"]


async def test_a_written_key_does_not_count_until_its_truth_is_told(tmp_path: Path) -> None:
    """From before the write on; the truth is then kept."""
    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"a"), entry(b"b"))
        own = await one.index.begin_write("b", ["b", "c"])
        assert one.keys() == NeedsLookup([b"b", b"c"])
        await one.index.end_write(own)
        asked = one.index.asked("b")
        assert one.keys(b=None, c=entry(b"c", 2)) == [b"a", b"c"]
        one.index.learn_truth("b", b"b", AuthoritativeEntry(None), asked)
        one.index.learn_truth("b", b"c", AuthoritativeEntry(entry(b"c", 2)), asked)
        await one.index.settle()
        assert one.keys() == [b"a", b"c"]


async def test_a_truth_that_comes_late_says_nothing_of_what_is_known_since(tmp_path: Path) -> None:
    """Its key was listed after the truth was asked for: it would count for as fresh as that listing."""
    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"a", 1))
        await one.write("a")
        asked = one.index.asked("b")
        await one.clock.advance(1.0)
        await one.learn(entry(b"a", 3))
        one.index.learn_truth("b", b"a", AuthoritativeEntry(entry(b"a", 2)), asked)
        one.index.learn_truth("b", b"a", AuthoritativeEntry(None), asked)
        await one.index.settle()
        found = one.find()
        assert isinstance(found, FoundPage)
        assert found.page.keys == [(b"a", pack(entry(b"a", 3), 0))]


@pytest.mark.parametrize("moment", ["before", "during", "between two", "after"])
async def test_only_what_was_asked_after_a_write_settles_it(tmp_path: Path, moment: str) -> None:
    """Page or truth, of before or during the write: both leave the mark, and the index as it is."""
    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"a", 1))
        asked = {"before": one.index.asked("b")}
        own = await one.index.begin_write("b", ["a"])
        asked["during"] = one.index.asked("b")
        another = await one.index.begin_write("b", ["a"])
        await one.index.end_write(own)
        asked["between two"] = one.index.asked("b")
        await one.index.end_write(another)
        asked["after"] = one.index.asked("b")
        one.index.learn_truth("b", b"a", AuthoritativeEntry(entry(b"a", 2)), asked[moment])
        await one.index.settle()
        assert one.keys() == ([b"a"] if moment == "after" else NeedsLookup([b"a"]))
        await one.learn(entry(b"a", 3), entry(b"b"), asked=asked[moment])
        assert one.keys() == ([b"a", b"b"] if moment == "after" else NeedsLookup([b"a"]))


async def test_a_page_on_its_way_does_not_undo_a_settled_write(tmp_path: Path) -> None:
    """As long as one may be; what takes longer is not learned at all."""
    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"a", 1))
        asked = one.index.asked("b")
        await one.write("a")
        one.index.learn_truth("b", b"a", AuthoritativeEntry(None), one.index.asked("b"))
        await one.index.settle()
        for _ in range(8):
            one.opened.listing.sweep(one.clock.monotonic())
        await one.learn(entry(b"a", 1), asked=asked)
        assert one.keys() == []
        await one.clock.advance(dirty_keys.PAGE_SECONDS_MAX + 1)
        for _ in range(8):
            one.opened.listing.sweep(one.clock.monotonic())
        assert not one.opened.dirty.not_told("b", b"a", b"b", 0, one.clock.monotonic()), "the clean key is gone"
        await one.learn(entry(b"a", 1), asked=asked)
        assert one.keys() == []


async def test_the_truth_may_be_of_a_kind_that_is_not_known_yet(tmp_path: Path) -> None:
    """A process that has just started merges it with records whose forms it has not read."""
    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"a", template=STANDARD), entry(b"b", template=GLACIER))
        await one.index.begin_write("b", ["c"])
    async with playing(tmp_path / "c") as one:
        other = EntryTemplate("", None, "<StorageClass>OTHER</StorageClass>")
        found = one.find(c=entry(b"c", template=other))
        assert isinstance(found, FoundPage)
        templates = [found.templates[int.from_bytes(record[6:8], "little")] for _, record in found.page.keys]
        assert templates == [STANDARD, GLACIER, other]


async def test_owners_are_asked_for_when_they_are_not_known(tmp_path: Path) -> None:
    """What was learned without them answers nobody who wants them."""
    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"a"))
        assert one.index.find("b", ListRequest(), FOR_EVER, with_owner=True) is None
        await one.learn(entry(b"a", template=EntryTemplate("", "<Owner/>", "")))
        assert isinstance(one.index.find("b", ListRequest(), FOR_EVER, with_owner=True), FoundPage)


async def test_where_a_write_cannot_be_noted_everything_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk must not keep an own write from being seen: what was known before, and was asked during it."""

    monkeypatch.setattr(dirty_keys, "_MAP_BYTES", 2**20)
    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"a"))
        with pytest.raises(lmdb.MapFullError):
            one.opened.dirty.begin(OwnWrite("b", [b"%01000d" % number for number in range(10_000)]), 0.0)
        own = await one.index.begin_write("b", [f"{number:01000}" for number in range(10_000)])
        assert one.keys() is None
        await one.learn(entry(b"a"))
        assert one.keys() == [b"a"]
        await one.index.end_write(own)
        assert one.keys() is None
        await one.learn(entry(b"a"))
        assert one.keys() == [b"a"]


async def write_many(one: Bench, keys: Iterable[str], *, at_once: int = 50) -> None:
    """Own writes, a thousand a second."""
    following = iter(keys)
    while batch := list(islice(following, at_once)):
        own = await one.index.begin_write("b", batch)
        await one.clock.advance(at_once / 1000)
        await one.index.end_write(own)
    await one.index.settle()


def dirty_count(one: Bench) -> int:
    with one.opened.dirty.written("b") as written:
        return len(written(b"", END, 10**9))


@pytest.mark.slow
async def test_writes_to_prefixes_that_nobody_lists_void_nothing_else(tmp_path: Path) -> None:
    """However many: what is listed is answered from the index, before, meanwhile and after, and few keys stay dirty."""
    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"set/a"), wanted=ListRequest(b"set/"))
        epoch = one.opened.epochs.of_bucket("b")
        for step in range(10):
            await write_many(one, (f"runs/{step}/{number:05}" for number in range(20_000)))
            assert one.keys(ListRequest(b"set/")) == [b"set/a"]
            await one.learn(entry(b"set/a"), wanted=ListRequest(b"set/"))  # and it can be learned anew
        assert one.keys(ListRequest(b"set/")) == [b"set/a"]
        assert one.opened.epochs.of_bucket("b") == epoch
        assert dirty_count(one) < dirty_keys.DIRTY_KEYS_MAX
        await write_many(one, ["set/b"] * 200, at_once=1)
        assert one.keys(ListRequest(b"set/")) == NeedsLookup([b"set/b"])


@pytest.mark.slow
async def test_writes_to_what_was_listed_once_void_only_their_surroundings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are too many, the directories that they lie in are known no more; what lies beside them is."""
    monkeypatch.setattr(dirty_keys, "DIRTY_KEYS_MAX", 5000)
    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"a/1"), entry(b"m/1"), entry(b"z/1"))
        epoch = one.opened.epochs.of_bucket("b")
        await write_many(one, (f"m/{number:05}" for number in range(20_000)))
        assert one.opened.epochs.of_bucket("b") == epoch
        assert dirty_count(one) < 6000
        assert [one.keys(ListRequest(prefix)) for prefix in (b"a/", b"z/")] == [[b"a/1"], [b"z/1"]]
        assert one.keys(ListRequest(b"m/")) is None
        await one.learn(entry(b"m/1"), wanted=ListRequest(b"m/"))
        assert one.keys(ListRequest(b"m/")) == [b"m/1"]


async def test_too_many_dirty_keys_are_got_over_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket is void with each write while there are far too many of them, and no longer than for some hundred."""
    monkeypatch.setattr(dirty_keys, "DIRTY_KEYS_MAX", 1000)
    async with playing(tmp_path / "c") as one:
        for number in range(0, 2000, 100):
            many = OwnWrite("b", [b"k%05d" % one for one in range(number, number + 100)])
            one.opened.dirty.begin(many, 0.0)
            one.opened.dirty.end(many, 0.0)
        await one.learn(entry(b"set/a"), wanted=ListRequest(b"set/"))
        own = await one.index.begin_write("b", ["runs/1"])
        assert one.keys(ListRequest(b"set/")) is None
        await one.index.end_write(own)
    async with playing(tmp_path / "c") as one:
        await write_many(one, (f"runs/{number}" for number in range(500)), at_once=1)
        await one.learn(entry(b"set/a"), wanted=ListRequest(b"set/"))
        await write_many(one, (f"runs/{number}" for number in range(500)), at_once=1)
        assert one.keys(ListRequest(b"set/")) == [b"set/a"]
        assert dirty_count(one) < 1100


async def test_clean_keys_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all of what is written is listed at once, a thousand keys a second."""
    monkeypatch.setattr(dirty_keys, "DIRTY_KEYS_MAX", 1000)
    async with playing(tmp_path / "c") as one:
        for number in range(200):
            await write_many(one, (f"{number:03}/{one:02}" for one in range(50)))
            await one.learn(wanted=ListRequest(b"%03d/" % number))
        assert one.keys(ListRequest(b"007/")) == []
        clean = one.opened.dirty.not_told("b", b"", END, 0, one.clock.monotonic())
        assert len(clean) < 1100


async def test_what_is_let_go_of_is_not_brought_back_by_a_page_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page asked for before a write whose key is dirty no more is not learned, however young it is."""
    monkeypatch.setattr(dirty_keys, "DIRTY_KEYS_MAX", 100)
    async with playing(tmp_path / "c") as one:
        asked = one.index.asked("b")
        await write_many(one, [f"{number:04}" for number in range(1000)], at_once=1)
        assert dirty_count(one) < 150
        await one.learn(entry(b"0000"), asked=asked)
        assert one.keys() is None
        await one.learn(entry(b"0000"))
        assert one.keys() == [b"0000"]


async def test_known_keys_stay_dirty_where_they_are_few(tmp_path: Path) -> None:
    """However old: the index has not caught up with them."""
    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"a"))
        await one.write("a")
        for _ in range(16):
            one.opened.listing.sweep(1e6)
        assert one.keys() == NeedsLookup([b"a"])


async def test_a_process_that_is_stopped_holds_up_no_write_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each own write is visible at once; the first waits a little, the others do not. Then all is as before."""
    monkeypatch.setattr(index_module, "NOTE_SECONDS_MAX", 0.2)
    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"a"))
        with stopped_writer(tmp_path / "c" / "dirty", engine=NEW_ENGINE) as stopped:
            started = time.monotonic()
            for _ in range(100):
                own = await one.index.begin_write("b", ["a"])
                assert one.keys() is None
                await one.learn(entry(b"a"))
                assert one.keys() == [b"a"]
                await one.index.end_write(own)
                assert one.keys() is None
            assert time.monotonic() - started < 10
            os.kill(stopped.pid, signal.SIGCONT)
            stopped.wait()
        monkeypatch.setattr(index_module, "NOTE_SECONDS_MAX", 60.0)  # a slow disk is another matter
        await one.write("a")
        await one.learn(entry(b"a"), entry(b"b"))
        await one.write("b")
        assert one.keys() == NeedsLookup([b"b"]), "noted again"


async def test_a_process_that_is_stopped_holds_up_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not kept, and the origin is asked again; a crawl is told so; nothing waits at the end."""
    monkeypatch.setattr(index_module, "LAND_SECONDS_MAX", 0.2)
    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"a"))
        with stopped_writer(tmp_path / "c" / "listing", engine=NEW_ENGINE):
            started = time.monotonic()
            for _ in range(10):
                await one.learn(entry(b"a"), entry(b"b"))
                assert one.keys() == [b"a"]
            with pytest.raises(lmdb.Error):
                await one.index.land(Batch("b", b"", END, [], [], one.index.asked("b"), 0.0))
            assert not await one.index.close()
            assert time.monotonic() - started < 10


@pytest.mark.slow
@pytest.mark.parametrize(("part", "engine"), [("index", OLD_ENGINE), ("listing", NEW_ENGINE), ("dirty", NEW_ENGINE)])
def test_a_start_does_not_wait_for_ever_for_a_stopped_process(
    tmp_path: Path, part: str, engine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails in time, as with a disk that fails."""
    monkeypatch.setattr(catalog_module, "OPENING_SECONDS_MAX", 0.5)
    slots = Slots([])

    async def start() -> None:
        origin, clock = MemoryOrigin(ManualClock()), ManualClock()
        catalog = await Catalog.open(tmp_path / "c", origin, homes=Homes("origin"), clock=clock, slots=slots)
        await catalog.close()

    asyncio.run(start())
    with stopped_writer(tmp_path / "c" / part, engine=engine), pytest.raises(StoreUnavailable):
        asyncio.run(start())
    for thread in [one for one in threading.enumerate() if one.name == "opening the catalog"]:
        thread.join(30)
    gc.collect()  # LMDB takes a file for open still that has the number of one that was left open, and is removed


OTHER = """
import os, signal, sys
from pathlib import Path
from gateway.metadata.listing.dirty_keys import OwnWrite
from gateway.metadata.opening import open_directory
from gateway.core.model import Homes
catalog = open_directory(Path(sys.argv[1]), Homes("origin"))
own = OwnWrite("b", [b"a"])
catalog.dirty.begin(own, 0.0)
if "end" in sys.argv:
    catalog.dirty.end(own, 0.0)
if "die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
catalog.close()
"""


def other(directory: Path, *steps: str) -> None:
    """Another process that has the directory open writes `a`."""
    with PreparedProcess(["-c", OTHER, directory, *steps]) as process:
        status = process.wait(60)
    assert status == 0 or "die" in steps


@pytest.mark.slow
@pytest.mark.parametrize("steps", [["end"], ["end", "die"], ["die"]])
async def test_another_processs_write_is_seen_though_it_is_killed(tmp_path: Path, steps: Sequence[str]) -> None:
    """Killed in the midst of it, its key is asked about each time; after the next start, once."""
    async with playing(tmp_path / "c") as one:
        await one.learn(entry(b"a", 1))
        other(tmp_path / "c", *steps)
        assert one.keys() == NeedsLookup([b"a"])
        await one.learn(entry(b"a", 2))
        assert one.keys() == (NeedsLookup([b"a"]) if steps == ["die"] else [b"a"])
    async with playing(tmp_path / "c") as one:
        if steps == ["die"]:
            assert one.keys() == NeedsLookup([b"a"])
            await one.learn(entry(b"a", 2))
        assert one.keys() == [b"a"]


# --- landing ----------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """What was told last of each place, and which places were told of at all."""

    told: dict[bytes, int] = field(default_factory=dict)
    known: set[bytes] = field(default_factory=set)

    def learn(self, within: Iterable[bytes], there: dict[bytes, int]) -> None:
        for place in within:
            self.known.add(place)
            self.told.pop(place, None)
            if place in there:
                self.told[place] = there[place]


PLACES = [b"%03d" % number for number in range(400)]
STEP = st.tuples(
    st.integers(0, len(PLACES) - 1),
    st.integers(1, len(PLACES)),
    st.dictionaries(st.sampled_from(PLACES), st.integers(1, 9)) | st.just(dict.fromkeys(PLACES, 1)),
    st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(STEP, max_size=8))
async def test_each_place_is_listed_as_it_was_told_last(steps: list[tuple[int, int, dict[bytes, int], bool]]) -> None:
    """Whatever ranges are landed, larger than a transaction or smaller, over others or beside them."""

    def check(one: Bench, model: Model, start: bytes, stop: bytes) -> None:
        with one.opened.listing.view("b") as view:
            assert view is not None
            found = {key: int.from_bytes(record[8:14], "little") for key, record in view.read(start, stop, 1000)}
        assert found == {key: size for key, size in model.told.items() if start <= key < stop}

    with tempfile.TemporaryDirectory() as directory:
        async with playing(Path(directory) / "c") as one:
            model = Model()
            for first, count, there, is_forgotten in steps:
                within = PLACES[first : first + count]
                start, stop = within[0], prefix_end(within[-1])
                if is_forgotten:
                    one.opened.listing.forget("b", start, stop)
                    model.known -= set(within)
                    continue
                listed = [(key, pack(entry(key, there[key]), 0)) for key in within if key in there]
                changed = await one.index.land(Batch("b", start, stop, listed, [STANDARD], one.index.asked("b"), 0.0))
                assert {key for key in changed if key in model.known} == {
                    key
                    for key in within
                    if key in model.known and key in model.told and model.told[key] != there.get(key)
                }
                model.learn(within, there)
                check(one, model, start, stop)
            for place in PLACES:
                known = one.keys(ListRequest(place))
                assert known == (None if place not in model.known else [place] if place in model.told else [])


@pytest.mark.slow
async def test_the_index_keeps_to_its_size_and_never_lies(tmp_path: Path) -> None:
    """What has no room is not known any more, as a whole: a listing with gaps in it is none."""
    async with playing(tmp_path / "c", size_bytes_max=2**20) as one:
        for start in range(0, 40_000, 1000):
            keys = [b"%08d" % number for number in range(start, start + 1000)]
            await one.land(keys, merge_seconds=1.0)
        statistics = one.opened.listing.statistics()
        assert statistics["size_bytes"] < 2**20 + 2**17
        assert 10_000 < statistics["keys"] < 25_000
        known = 0
        for number in range(0, 40_000, 100):
            found = one.keys(ListRequest(b"%06d" % (number // 100)))
            known += found is not None
            assert found in (None, [b"%08d" % one for one in range(number, number + 100)])
        assert 100 < known < 250


@pytest.mark.slow
async def test_a_page_of_a_thousand_common_prefixes_is_learned_at_once(tmp_path: Path) -> None:
    """Its gaps go into a few transactions, and once every directory was listed, so is all above them."""
    async with playing(tmp_path / "c") as one:
        prefixes = [b"%04d/" % number for number in range(1000)]
        wanted = ListRequest(delimiter=b"/")
        told = ListedPage([entry(b"between-%04d" % number) for number in range(100)], prefixes, None)
        one.index.learn("b", wanted, found_of(told), one.index.asked("b"), merge_seconds=0.0)
        before = one.opened.listing._environment.info()["last_txnid"]
        await one.index.settle()
        assert one.opened.listing._environment.info()["last_txnid"] - before < 100
        assert one.keys(ListRequest(b"between-")) == [b"between-%04d" % number for number in range(100)]
        assert one.find(wanted) is None
        for prefix in prefixes:
            await one.learn(entry(prefix + b"x"), wanted=ListRequest(prefix))
        found = one.find(wanted)
        assert isinstance(found, FoundPage)
        assert (len(found.page.prefixes), found.page.is_truncated) == (1000, True)


async def test_a_sorted_build_takes_little_room(tmp_path: Path) -> None:
    """At most 130 bytes for each key of 55."""
    async with playing(tmp_path / "c") as one:
        for start in range(0, 20_000, 1000):
            keys = [
                b"imagenet/train/class%04d/n%08d_image%012d.JPEG" % (n // 1000, n, n)
                for n in range(start, start + 1000)
            ]
            await one.land(keys, merge_seconds=1.0)
        assert len(keys[0]) >= 55
        statistics = one.opened.listing.statistics()
        assert statistics["keys"] == 20_000
        assert statistics["size_bytes"] / 20_000 < 130


@pytest.mark.parametrize("streams", [1, 4])
async def test_what_lands_in_many_places_at_once_is_packed_as_well(tmp_path: Path, streams: int) -> None:
    """A crawl lands keys in order, but here and there, and in front of others: no page is left half empty."""
    async with playing(tmp_path) as one:
        each, at_once = 4000 // streams, 500
        await one.land([b"zzz"], stop=END)
        for first in range(0, each, at_once):
            for stream in range(streams):
                keys = [b"%054d" % (stream * each + n) for n in range(first, min(first + at_once, each))]
                await one.land(keys, merge_seconds=math.inf)
        assert one.opened.listing.statistics()["keys"] == 4001
        assert one.opened.listing.statistics()["size_bytes"] < 130 * 4001


async def test_a_form_that_has_changed_is_no_change_of_the_object(tmp_path: Path) -> None:
    """A listing with owners, or of a bucket whose checksums are told now: kept, but nothing to drop blocks for."""
    async with playing(tmp_path) as one:
        await one.learn(entry(b"a"), entry(b"b"))
        assert await one.land([b"a", b"b"], b"", END, templates=[GLACIER]) == []
        found = one.find()
        assert isinstance(found, FoundPage)
        assert {found.templates[int.from_bytes(record[6:8], "little")] for _, record in found.page.keys} == {GLACIER}


def restored_until(number: int) -> EntryTemplate:
    return EntryTemplate("", None, f"<RestoreStatus><RestoreExpiryDate>{number}</RestoreExpiryDate></RestoreStatus>")


@pytest.mark.slow
@pytest.mark.parametrize("count", [5000, 70_000])
async def test_any_number_of_forms_is_kept(tmp_path: Path, count: int) -> None:
    """Of entries that each have one of their own; what they say comes back to the letter, and stays as it is."""
    entries = [entry(b"%06d" % number, number, restored_until(number)) for number in range(count)]

    async def land(one: Bench, first: int) -> list[bytes]:
        some = entries[first : first + 1000]
        listed, templates = numbered(some)
        start = b"" if first == 0 else key_successor(entries[first - 1].key)
        stop = END if first + 1000 >= count else key_successor(some[-1].key)
        return await one.index.land(Batch("b", start, stop, listed, templates, one.index.asked("b"), math.inf))

    async with playing(tmp_path / "c") as one:
        for first in range(0, count, 1000):
            assert await land(one, first) == []
        assert await land(one, 0) == [], "nothing has changed"
        listed, after = list[ListedEntry](), b""
        while True:
            found = one.find(ListRequest(after=after))
            assert isinstance(found, FoundPage)
            listed += [unpack(key, record, found.templates) for key, record in found.page.keys]
            if not found.page.is_truncated:
                break
            after = found.page.last
        assert listed == entries
        last = entries[-1]
        assert one.index.entry("b", last.key.decode(), FOR_EVER) == AuthoritativeEntry(last)
        await one.write("000000")
        found = one.find(ListRequest(b"00000"), **{"000000": entry(b"000000", 1, restored_until(count))})
        assert isinstance(found, FoundPage)
        assert found.templates[template_of(found.page.keys[0][1])] == restored_until(count)

    async with playing(tmp_path / "c") as one:
        strange = ListedEntry(b"~", "yesterday", "no digest", 7, restored_until(count + 1))
        await one.learn(strange, wanted=ListRequest(b"~"))
        assert one.index.entry("b", "~", FOR_EVER) == AuthoritativeEntry(strange)
        changed = ListedEntry(b"~", "today", "no digest", 7, restored_until(count + 2))
        records, templates = numbered([changed])
        batch = Batch("b", b"~", END, records, templates, one.index.asked("b"), 0.0)
        assert await one.index.land(batch) == [b"~"]
