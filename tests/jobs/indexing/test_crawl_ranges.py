"""Cutting a key space into shares: nothing is left out, nothing is listed twice, and many find something to do."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.jobs.indexing.key_ranges import (
    KEPT_MAX,
    KEY_BYTES_MAX,
    CharacterStatistics,
    CrawlRange,
    CrawlRanges,
    SplitPoints,
    cuts,
)
from gateway.metadata.listing.pages import END, key_successor
from tests.support.listing_model import KEY, KEYS


def crawl(
    keys: Collection[str], *, listers: int, page: int, split_points: Sequence[bytes] = ()
) -> tuple[list[bytes], int, int]:
    """All that is listed, in rounds in which every lister asks for one page; how many rounds and pages."""
    there = sorted(key.encode() for key in keys)
    shares = CrawlRanges([CrawlRange(b"", END, "")], split_points)
    working: list[CrawlRange | None] = [None] * listers
    listed: list[bytes] = []
    rounds = pages = 0
    while shares.left:
        rounds += 1
        for number, share in enumerate(working):
            working[number] = share or shares.take(working.count(None))
        assert any(working), "nobody has anything to do, and it is not done"
        for number, share in enumerate(working):
            if share is not None:
                pages += 1
                working[number] = None if _list(shares, share, there, page, listed) else share
    return listed, rounds, pages


def _list(shares: CrawlRanges, share: CrawlRange, there: list[bytes], page: int, listed: list[bytes]) -> bool:
    """One page of the origin's, as a crawl takes it in; whether the share is done."""
    first = bisect_right(there, share.after.encode()) if share.after else 0
    found = there[first : first + page]
    ours = [key for key in found if key < share.stop]
    is_all = first + page >= len(there) or len(ours) < len(found)
    listed += ours
    return shares.listed(share, ours, share.stop if is_all else min(share.stop, key_successor(found[-1])))


@given(KEYS, st.integers(1, 9), st.integers(1, 5), st.lists(KEY.map(str.encode), max_size=8))
def test_every_key_is_listed_once(keys: set[str], listers: int, page: int, split_points: list[bytes]) -> None:
    """Whatever they are made of, however many list, and whatever split_points say."""
    listed, _, _ = crawl(keys, listers=listers, page=page, split_points=sorted(split_points))
    assert sorted(listed) == sorted(key.encode() for key in keys)


HARD_TO_CUT = {
    "numbers": [f"{number:06d}" for number in range(50_000)],
    "one directory, far down": [f"a/b/c/{number:06d}" for number in range(50_000)],
    "a long prefix": [f"{'x' * 500}{number:07d}" for number in range(50_000)],
    "classes": [f"train/n{number * 7919 % 10**8:08d}/{n}.JPEG" for number in range(1, 501) for n in range(100)],
    "hexadecimal": [f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}" for number in range(50_000)],
    "dates": [
        f"logs/2026/{m:02}/{d:02}/{h:02}/{n:02}"
        for m in range(1, 13)
        for d in range(1, 29)
        for h in range(24)
        for n in range(6)
    ],
    "most in one of many": [f"a/{number:07d}" for number in range(48_000)] + [f"m/{number}" for number in range(2_000)],
    "beyond ASCII": [f"{chr(0x4E00 + number * 37 % 20_000)}/é{number:05}" for number in range(50_000)],
}


@pytest.mark.parametrize("keys", HARD_TO_CUT.values(), ids=HARD_TO_CUT.keys())
def test_many_listers_are_many_times_as_fast(keys: list[str]) -> None:
    """Of whatever kind keys are, and with nothing known of them: 16 listers need less than a sixth of the rounds."""
    listed, rounds, pages = crawl(keys, listers=16, page=100)
    serial = len(keys) / 100
    assert len(listed) == len(keys)
    assert rounds < serial / 6
    assert pages < 2 * serial


def test_landmarks_need_no_guesses() -> None:
    """With those of an earlier crawl nearly every page brings keys from the first round on."""
    keys = [f"a/b/c/{number:06d}" for number in range(50_000)]
    _, rounds, pages = crawl(keys, listers=16, page=100, split_points=[key.encode() for key in keys[99::100]])
    assert rounds <= 500 / 16 + 3
    assert pages < 1.05 * 500


@given(KEY, st.one_of(KEY.map(str.encode), st.just(END)), st.integers(1, 20), st.lists(KEY, max_size=5), st.booleans())
def test_guesses_are_keys_between(last: str, stop: bytes, count: int, seen: list[str], is_reached: bool) -> None:
    """In order, key_successor the last key seen, and so that something may lie between them and the stop."""
    statistics = CharacterStatistics()
    statistics.see([key.encode() for key in (last, *seen)])
    found = [guess.encode() for guess in cuts(last, stop, count, statistics, is_reached=is_reached)]
    assert len(found) <= count
    assert found == sorted(set(found))
    assert all(last.encode() < guess and key_successor(guess) < stop for guess in found)


def test_what_was_added_between_landmarks_is_cut_too() -> None:
    """A directory that came in after them does not keep one lister busy while the others wait."""
    before = [f"a/{number:06d}" for number in range(2_000)]
    added = [f"b/c/{number:06d}" for number in range(50_000)]
    split_points = [key.encode() for key in before[99::100]]
    listed, rounds, _ = crawl([*before, *added], listers=16, page=100, split_points=split_points)
    assert len(listed) == len(before) + len(added)
    assert rounds < 520 / 5


def test_no_guess_is_longer_than_a_key_may_be() -> None:
    """A greater character can take more bytes."""
    last = "a" * (KEY_BYTES_MAX - 1) + "b"
    statistics = CharacterStatistics()
    statistics.see([last.encode(), ("a" * (KEY_BYTES_MAX - 2) + "é").encode()])
    found = cuts(last, END, 2000, statistics, is_reached=False)
    assert found
    assert max(len(guess.encode()) for guess in found) <= KEY_BYTES_MAX


def test_a_share_that_was_cut_ends_where_the_next_begins() -> None:
    """And who lists it needs to be told nothing."""
    shares = CrawlRanges([CrawlRange(b"", END, "")])
    first = shares.take()
    assert first is not None
    assert shares.take() is None, "nothing can be cut before anything is seen"
    shares.listed(first, [b"k1", b"k2"], key_successor(b"k2"))
    second = shares.take()
    assert second is not None
    assert second.stop == END
    assert first.stop <= second.start == key_successor(second.after.encode())


def test_landmarks_stay_few_and_even() -> None:
    """However many pages there are, in whatever order they come."""
    split_points = SplitPoints()
    for number in range(10 * KEPT_MAX):
        split_points.add(b"%09d" % (number * 7919 % (10 * KEPT_MAX)))
    kept = split_points.sorted()
    assert KEPT_MAX / 4 < len(kept) <= KEPT_MAX
    assert list(kept) == sorted(kept)
    gaps = [int(other) - int(one) for one, other in pairwise(kept)]
    assert max(gaps) < 20 * (10 * KEPT_MAX / len(kept))
