"""Changed settings for a gateway that is at work: read anew, checked, and refused as a whole where they cannot be.

The file is read anew when the supervisor gets SIGHUP; slots besides are set and removed over the admin port, and kept
in the overlay (config/overlay.py). All of this blocks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import orjson

from gateway.config import Settings
from gateway.config.loading import LoadedSettings, load_settings
from gateway.config.overlay import SlotTable, fitting, read_overlay, restart_needed, with_overlay, write_overlay
from gateway.config.problems import SettingsError
from gateway.errors import ForebayError
from gateway.serve.recovering import recover_buffer
from gateway.writeback import DIRECTORY

SLOTS_MORE = 64
"""So many slots more than at the start, and twice as many, there is room for while a gateway runs."""


FILES_SECONDS_MAX = 10.0
"""So long files may take that settings are read from or written to: one may lie on a mount that hangs, or be a pipe."""

T = TypeVar("T")


class ChangeRefused(ForebayError):
    """Nothing has changed, and why."""


class FileThreads:
    """Reads or writes files of settings on threads that nobody waits for when they hang: no later change, and not the
    end of the process. Event loop only."""

    def __init__(self, hanging_max: int, seconds_max: float = FILES_SECONDS_MAX) -> None:
        """`hanging_max` threads may hang, until nothing is begun any more."""
        self._hanging_max = hanging_max
        self._seconds_max = seconds_max
        self._begun: list[concurrent.futures.Future[Any]] = []

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` gives or raises; ChangeRefused where it takes too long, or too much of before still does."""
        self._begun = [one for one in self._begun if not one.done()]
        if len(self._begun) >= self._hanging_max:
            raise ChangeRefused("files of the settings, or the disk, have not answered since an earlier change")
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                done.set_exception(error)

        self._begun.append(done)
        threading.Thread(target=run, name="files of settings", daemon=True).start()
        finished, _ = await asyncio.wait((asyncio.wrap_future(done),), timeout=self._seconds_max)
        if not finished:
            raise ChangeRefused(f"files of the settings, or the disk, have not answered within {self._seconds_max:g} s")
        return finished.pop().result()


@dataclass(frozen=True, slots=True)
class SlotChange:
    """What is asked over the admin port: `slot` is what the slot `name` is to be; None: it is to go. `asked` is the id
    of the question, `remote` the address that asked."""

    asked: str
    name: str
    slot: Mapping[str, Any] | None
    remote: str | None = None

    def to_line(self) -> str:
        document = {"asked": self.asked, "name": self.name, "slot": self.slot, "remote": self.remote}
        return orjson.dumps(document).decode()

    @property
    def operation(self) -> str:
        """As the admin port was asked for it."""
        return f"{'DELETE' if self.slot is None else 'PUT'} /api/v1/slots/{quote(self.name, safe='')}"

    @classmethod
    def from_line(cls, line: str) -> SlotChange:
        return cls(**orjson.loads(line))


def slots_max(settings: Settings) -> int:
    """How many slots there may be while a gateway runs that was started with these."""
    return 2 * len(settings.slots) + SLOTS_MORE


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Settings that may be in force from now on; `overlay` is what is to be kept of slots for that; None: as it is."""

    settings: Settings
    warnings: Sequence[str]
    overlay: Sequence[SlotTable] | None

    def keep(self) -> None:
        """Write the overlay down; ChangeRefused, and then it is as it was. Blocks."""
        if self.overlay is None:
            return
        directory = self.settings.cache.directory
        try:
            write_overlay(directory, self.overlay)
        except OSError as error:
            raise ChangeRefused(f"{directory} does not take what was set: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Reloader:
    """Where settings come from: a file, if there is one, and the environment."""

    path: Path | None
    environment: Mapping[str, str]

    def load(self, running: Settings, change: SlotChange | None, count_max: int) -> Reloaded:
        """The settings from now on, with `change`. ChangeRefused where they cannot be; nothing has changed yet."""
        directory = running.cache.directory
        try:
            base = load_settings(self.path, self.environment, running=running)
            overlay: Sequence[SlotTable] = read_overlay(directory)
            if change is not None:
                overlay = self._changed(base, overlay, change)
            loaded = with_overlay(self.path, self.environment, base, overlay)
            _refuse_restarts(running, loaded.settings)
            if len(loaded.settings.slots) > count_max:
                raise ChangeRefused(f"there is room for {count_max} slots until the gateway is started again")
            _refuse_unflushed(running, loaded.settings)
            self._recover_buffer(running, loaded.settings)
        except SettingsError as error:
            raise ChangeRefused("; ".join(str(problem) for problem in error.problems)) from error
        except OSError as error:
            raise ChangeRefused(f"settings cannot be read anew: {error}") from error
        return Reloaded(loaded.settings, loaded.warnings, None if change is None else overlay)

    def _changed(self, base: LoadedSettings, overlay: Sequence[SlotTable], change: SlotChange) -> list[SlotTable]:
        """The overlay with `change`. SettingsError where the slot cannot be beside those that are in force."""
        is_configured = any(slot.name == change.name for slot in base.settings.slots)
        others = [slot for slot in overlay if slot["name"] != change.name]
        if change.slot is None and len(others) == len(overlay) and not is_configured:
            raise ChangeRefused(f"there is no slot {change.name!r}")
        if is_configured and (change.slot is not None or len(others) == len(overlay)):
            raise ChangeRefused(
                f"the configuration has the slot {change.name!r}: change it there, and have it read by SIGHUP"
            )
        if change.slot is None:
            return others
        in_force = [
            slot for slot in fitting(self.path, self.environment, base, overlay)[1] if slot["name"] != change.name
        ]
        in_force.append({**change.slot, "name": change.name})
        load_settings(self.path, self.environment, more_slots=in_force, running=base.settings)
        # What is not in force comes last: it takes nothing away from what is.
        return [*in_force, *(slot for slot in others if slot not in in_force)]

    def _recover_buffer(self, running: Settings, settings: Settings) -> None:
        """The first slot that writes back: nobody has the buffer open."""
        if any(slot.write == "back" for slot in running.slots) or (running.cache.directory / DIRECTORY).exists():
            return
        problem = recover_buffer(settings)
        if problem is not None:
            raise ChangeRefused(problem)


def _refuse_restarts(running: Settings, settings: Settings) -> None:
    keys = restart_needed(running, settings)
    if keys:
        raise ChangeRefused(f"start the gateway again for these to be in force: {', '.join(keys)}")


def _refuse_unflushed(running: Settings, settings: Settings) -> None:
    """What only this node has of a slot must be at the origin before the slot goes, however it writes now."""
    left = {slot.name: slot.prefix for slot in settings.slots}
    gone = [slot for slot in running.slots if left.get(slot.name) != slot.prefix]
    journal = running.cache.directory / DIRECTORY / "journal"
    if not gone or not journal.exists():
        return
    import sqlite3

    from gateway.writeback.journal.schema import connect_reading
    from gateway.writeback.journal.view import JournalView

    try:
        with closing(connect_reading(str(journal))) as connection:
            usage_of = JournalView(connection).usages()
    except sqlite3.Error as error:
        raise ChangeRefused(
            f"{journal} does not tell what the origin lacks of the slot {gone[0].name!r} ({error}): it stays"
        ) from error
    for slot in gone:
        usage = usage_of.get(slot.name)
        if usage is not None and (usage.objects or usage.staged_bytes):
            raise ChangeRefused(
                f"the slot {slot.name!r} has {usage.objects} objects and {usage.staged_bytes} bytes that the "
                f'origin does not have: set write = "through", have them flushed (forebay flush --wait '
                f"{slot.prefix}), then remove it"
            )
