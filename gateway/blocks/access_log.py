"""Which files were read since the index was last told: in memory, so that a hit writes nothing."""

from __future__ import annotations

from collections import OrderedDict

FILES_NOTED_MAX = 65_536


class AccessLog:
    """Files in the order of their last use; beyond FILES_NOTED_MAX the oldest uses are forgotten. Event loop only."""

    def __init__(self) -> None:
        self._noted: OrderedDict[str, None] = OrderedDict()

    def note(self, file: str) -> None:
        self._noted[file] = None
        self._noted.move_to_end(file)
        if len(self._noted) > FILES_NOTED_MAX:
            self._noted.popitem(last=False)

    def take(self, count_max: int) -> list[str]:
        """Up to `count_max` of the files, the oldest use first; they are the caller's now."""
        count = min(count_max, len(self._noted))
        return [self._noted.popitem(last=False)[0] for _ in range(count)]
