"""Which files were read since the index was last told, and how often: in memory, so that a hit writes nothing."""

from __future__ import annotations

from collections import OrderedDict

FILES_NOTED_MAX = 65_536


class AccessLog:
    """Files in the order of their last use; beyond FILES_NOTED_MAX the oldest uses are forgotten.

    Noted on the event loop and taken by the index thread: every single step on the dictionary is atomic.
    """

    def __init__(self) -> None:
        self._noted: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, file: str) -> None:
        self._noted[file] = self._noted.pop(file, 0) + 1
        if len(self._noted) > FILES_NOTED_MAX:
            self.take(1)

    def take(self, count_max: int) -> list[tuple[str, int]]:
        """Up to `count_max` of the files with the number of their uses, the oldest first; they are the caller's now."""
        taken: list[tuple[str, int]] = []
        while len(taken) < count_max:
            try:
                taken.append(self._noted.popitem(last=False))
            except KeyError:  # the other thread may have had the last one
                break
        return taken
