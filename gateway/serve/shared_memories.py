"""Memory in which all processes count, made by the supervisor for settings, and opened by the others through it.

Of settings that change it is made anew. That of the last ones stays: for processes that have not changed yet, and for
settings that come back, which keep their memory; for a process may never have seen what was between. Memory that
begins as the one in force stands is always made anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.config import Settings
from gateway.config.live import SharedMemoryName
from gateway.core.clock import Clock, SystemClock
from gateway.core.errors import StartupError

MEMORIES_KEPT = 4


@dataclass(frozen=True, slots=True)
class _Memory:
    plan: object
    descriptor: int
    name: SharedMemoryName


class SharedMemories:
    """Shared memories of one kind. One thread."""

    def __init__(
        self,
        make: Callable[[Settings, Clock], int | None],
        plan_of: Callable[[Settings], Any],
        begin_as: Callable[[Any, int, Settings, int, Clock], None] | None = None,
    ) -> None:
        """Keep memories by `make` (a descriptor; None: no shared memory) from what `plan_of` picks of the settings.

        `begin_as` gets plan and descriptor of the memory in force, and settings and descriptor of the new one.
        """
        self._begin_as = begin_as
        self._in_force: SharedMemoryName | None = None
        self._make = make
        self._plan_of = plan_of
        self._made = 0
        self._told: list[_Memory] = []
        """Memories told to processes, the latest last."""
        self._untold: _Memory | None = None

    def made(self, settings: Settings) -> SharedMemoryName | None:
        """Return a memory for these settings, which stays only if it is `told`; None: none is needed.

        Raises OSError, and StartupError if no process could open it.
        """
        plan = self._plan_of(settings)
        in_force = [one for one in self._told if one.name == self._in_force]
        for one in self._told if self._begin_as is None else in_force:
            if one.plan == plan:
                return one.name
        self._forget_untold()
        descriptor = self._make(settings, SystemClock())
        if descriptor is None:
            return None
        try:
            path = f"/proc/{_own_number()}/fd/{descriptor}"
            if self._begin_as is not None and in_force:
                self._begin_as(in_force[0].plan, in_force[0].descriptor, settings, descriptor, SystemClock())
        except BaseException:
            os.close(descriptor)
            raise
        self._made += 1
        self._untold = _Memory(plan, descriptor, SharedMemoryName(path, self._made))
        return self._untold.name

    def told(self, name: SharedMemoryName | None) -> None:
        """Note that processes were told of the memory `made` last: it stays while it is in force, and longer."""
        if self._untold is not None and self._untold.name == name:
            self._told.append(self._untold)
            self._untold = None
        self._forget_untold()
        self._in_force = name
        self._told.sort(key=lambda one: one.name == name)  # the one in force comes last, the others stay in order
        for old in self._told[:-MEMORIES_KEPT]:
            os.close(old.descriptor)
        del self._told[:-MEMORIES_KEPT]

    def _forget_untold(self) -> None:
        if self._untold is not None:
            os.close(self._untold.descriptor)
            self._untold = None

    def close(self) -> None:
        self._forget_untold()
        for one in self._told:
            os.close(one.descriptor)
        self._told.clear()


def _own_number() -> str:
    """Return this process's id in /proc, which may be of another namespace than its own id: pid_namespaces(7)."""
    try:
        return os.readlink("/proc/self")
    except OSError as error:
        raise StartupError("/proc is not mounted here: all processes find the limits that they share there") from error
