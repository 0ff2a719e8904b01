"""How listers share what is left of a key space: who is idle takes the second part of what seems longest. Pure.

A share is a part of the key space that one lister goes through from its start to its stop. Nothing need be known of the
keys: what a lister has gone through without coming to the end is the measure of what is left, and where to cut is
guessed (splitting.py). `landmarks` of an earlier crawl or an inventory, where there are some, tell both better.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.jobs.indexing.splitting import Alphabet, cuts
from gateway.metadata.listing.pages import key_successor

_GUESSES_MIN = 4
"""Where it is not even known whether there are keys behind, so many questions are asked at once."""

_RUN_BETWEEN_LANDMARKS = 4
"""Pages without a landmark among them, where there are some: so much has been added there that it is worth guessing."""

_SAMPLES = 32
"""Keys of a page whose characters are looked at."""


@dataclass(eq=False, slots=True)
class Share:
    """[start, stop) of the key space; the keys behind the key `after` are to be listed. `start` moves on with them.

    `run`: pages since the share was last cut. `is_seen`: `after` is a key of the origin's, and not a guess.
    `is_reached`: there are keys at or behind `stop`. `before`: the share that ends where this one begins, until keys
    are found here.
    """

    start: bytes
    stop: bytes
    after: str
    run: int = 0
    is_seen: bool = False
    is_reached: bool = False
    before: Share | None = None


class Shares:
    """What is left to list."""

    def __init__(self, parts: Sequence[Share], landmarks: Sequence[bytes] = ()) -> None:
        self._landmarks = landmarks
        self._run_min = _RUN_BETWEEN_LANDMARKS if landmarks else 1
        self._waiting = list(reversed(parts))
        self._active: list[Share] = []
        self._alphabet = Alphabet()

    @property
    def left(self) -> int:
        """Shares that are not done."""
        return len(self._waiting) + len(self._active)

    def take(self, idle: int = 1) -> Share | None:
        """Something to list for one of so many who are idle; None: nothing can be cut now."""
        if not self._waiting:
            self._cut(idle)
        if not self._waiting:
            return None
        share = self._waiting.pop()
        self._active.append(share)
        return share

    def listed(self, share: Share, keys: Sequence[bytes], reach: bytes) -> bool:
        """A page has told all up to `reach`, with these keys; whether the share is done."""
        share.start = reach
        if share.before is not None:
            self._alphabet.tried(len(share.after) - 1, found=bool(keys))
        if keys:
            self._alphabet.see(keys[:: len(keys) // _SAMPLES + 1])
            share.after, share.is_seen = keys[-1].decode(), True
            if share.before is not None:
                share.before.is_reached = True
        share.before = None
        share.run += 1
        if reach < share.stop:
            return False
        self._active.remove(share)
        return True

    def _cut(self, idle: int) -> None:
        """Have something wait, if anything can be cut."""
        marked = max(self._active, key=self._marks_in, default=None)
        if marked is not None and self._marks_in(marked) > 1:
            self._cut_at(marked, [self._middle(marked)])
            return
        for share in sorted(self._active, key=lambda one: one.run, reverse=True):
            if not share.is_seen or share.run < self._run_min:
                continue
            count = idle if share.is_reached else max(idle, _GUESSES_MIN)
            guesses = cuts(share.after, share.stop, count, self._alphabet, is_reached=share.is_reached)
            if guesses:
                self._cut_at(share, guesses)
                return

    def _cut_at(self, share: Share, guesses: Sequence[str]) -> None:
        """Parts begin behind the guesses: a listing can begin behind a key, not at it. The first is the lister's."""
        stop, is_reached, before = share.stop, share.is_reached, share
        for guess in guesses:
            place = key_successor(guess.encode())
            before.stop, before.is_reached = place, False
            before = Share(place, stop, guess, is_reached=is_reached, before=before)
            self._waiting.append(before)
        share.run = 0

    def _marks_in(self, share: Share) -> int:
        return self._end_of_marks(share) - bisect_right(self._landmarks, share.start)

    def _middle(self, share: Share) -> str:
        first, end = bisect_right(self._landmarks, share.start), self._end_of_marks(share)
        return self._landmarks[(first + end) // 2].decode()

    def _end_of_marks(self, share: Share) -> int:
        """One that the share stops just behind is no cut of it."""
        return bisect_left(self._landmarks, share.stop.removesuffix(b"\0"))
