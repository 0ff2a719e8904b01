"""One question to the origin for all who ask the same at the same time, in one process.

All ranks of a job list the same prefix when it starts. Who comes while the answer is on its way may have it too, unless
anything was written through this gateway since the question was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from gateway.metadata.listing.batches import Asked
from gateway.metadata.listing.bounds import Bound

T = TypeVar("T")


class SharedQuestions(Generic[T]):
    """Those under way."""

    def __init__(self) -> None:
        self._running: dict[Hashable, tuple[Asked, asyncio.Task[T]]] = {}

    async def ask(
        self, question: Hashable, asked: Asked, bound: Bound, send: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """The answer to `question`, sent by `send` unless somebody's is under way that was sent recently enough.

        `asked` is the present moment. Whoever leaves, the answer is waited for and learned; raises as `send` does.
        """
        running = self._running.get(question)
        if running is not None and _is_as_good(running[0], asked, bound):
            return await asyncio.shield(running[1])
        task = asyncio.create_task(send(), name="listing question")
        self._running[question] = asked, task
        task.add_done_callback(lambda done: self._done(question, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Give up those that nobody waits for any more."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, question: Hashable, done: asyncio.Task[T]) -> None:
        if self._running.get(question, (None, None))[1] is done:
            del self._running[question]
        if not done.cancelled():
            done.exception()  # looked at: those who waited have it, if any are left


def _is_as_good(earlier: Asked, now: Asked, bound: Bound) -> bool:
    """Whether nothing was written between the two moments, and the earlier one is fresh enough."""
    return earlier.number == now.number >= 0 and bound.allows(earlier.learned, now.learned)
