"""How connections are shared out: by whom a request was sent, in turns, with a bounded wait.

A connection is held as long as its request lasts, and some last as long as their clients like. So nobody gets all of
them, however many requests wait: a quarter is left to others. Of that share, streamed uploads get a part.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import NamedTuple

from gateway.errors import OriginBusy


class Claim(NamedTuple):
    """On whose account a connection is taken, and whether for as long as a client likes (a streamed upload)."""

    account: str = ""
    is_lasting: bool = False


class FairShares:
    """At most `total` claims are granted at a time. Event loop only.

    Accounts take turns, and within an account who came first is first. Nobody waits who could be granted now.
    """

    def __init__(self, total: int, wait_seconds_max: float) -> None:
        self._total = total
        self._wait_seconds_max = wait_seconds_max
        self._of_one_account_max = max(1, total - total // 4)
        self._lasting_of_one_account_max = max(1, total // 2)
        self._lasting_max = max(1, total * 3 // 4)
        self._granted = 0
        self._lasting = 0
        self._of_account: dict[str, int] = {}
        self._lasting_of_account: dict[str, int] = {}
        self._waiting: OrderedDict[Claim, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def granted(self) -> int:
        """How many claims hold a connection now."""
        return self._granted

    def take_now(self, claim: Claim) -> bool:
        """Have `claim` granted if it need not wait. Every grant ends with `give_back`."""
        if not self._is_free(claim):
            return False
        self._count(claim, 1)
        return True

    async def take(self, claim: Claim) -> None:
        """Wait until `claim` is granted; OriginBusy when that takes too long. Who is cancelled has none."""
        if self.take_now(claim):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(claim, deque()).append(turn)
        try:
            async with asyncio.timeout(self._wait_seconds_max):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.give_back(claim)
            else:
                self._forget(claim, turn)
            if isinstance(error, TimeoutError):
                raise OriginBusy(f"no connection to the origin was free for {self._wait_seconds_max:g} s") from None
            raise

    def give_back(self, claim: Claim) -> None:
        """The connection is free again."""
        self._count(claim, -1)
        while (lucky := next(filter(self._is_free, self._waiting), None)) is not None:
            self._grant(lucky)

    def _grant(self, claim: Claim) -> None:
        waiting = self._waiting[claim]
        turn = waiting.popleft()
        if waiting:
            self._waiting.move_to_end(claim)
        else:
            del self._waiting[claim]
        if not turn.done():
            turn.set_result(None)
            self._count(claim, 1)

    def _count(self, claim: Claim, change: int) -> None:
        self._granted += change
        _add(self._of_account, claim.account, change)
        if claim.is_lasting:
            self._lasting += change
            _add(self._lasting_of_account, claim.account, change)

    def _is_free(self, claim: Claim) -> bool:
        account = claim.account
        if self._granted >= self._total or self._of_account.get(account, 0) >= self._of_one_account_max:
            return False
        if not claim.is_lasting:
            return True
        of_account = self._lasting_of_account.get(account, 0)
        return of_account < self._lasting_of_one_account_max and self._lasting < self._lasting_max

    def _forget(self, claim: Claim, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(claim)
        if waiting is not None and turn in waiting:
            waiting.remove(turn)
            if not waiting:
                del self._waiting[claim]


def _add(counts: dict[str, int], account: str, change: int) -> None:
    count = counts.get(account, 0) + change
    if count:
        counts[account] = count
    else:
        del counts[account]
