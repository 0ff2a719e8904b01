"""Changed settings for a gateway that is at work: read anew, checked, and refused as a whole where they cannot be.

The file is read anew when the supervisor gets SIGHUP; slots besides are set and removed over the admin port, and kept
in the overlay (config/overlay.py). All of this blocks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import orjson
import structlog

from gateway.config import Settings
from gateway.config.live import Numbers
from gateway.config.loading import LoadedSettings, load_settings
from gateway.config.overlay import (
    NAME,
    SlotTable,
    changed_keys,
    fitting,
    read_overlay,
    restart_needed,
    with_overlay,
    write_overlay,
)
from gateway.config.problems import SettingsError
from gateway.core.errors import ForebayError
from gateway.serve.claim import recover_buffer
from gateway.writeback import DIRECTORY

FILES_SECONDS_MAX = 10.0
"""Seconds for reading or writing files of settings: one may lie on a mount that hangs, or be a pipe."""

T = TypeVar("T")

_log = structlog.get_logger("forebay.serve")


class ChangeRefused(ForebayError):
    """The change is refused, and the settings are as before; the message says why."""


class FileThreads:
    """Threads for files of settings. A hanging one delays no later change nor the process's end. Event loop only."""

    def __init__(self, hanging_max: int, seconds_max: float = FILES_SECONDS_MAX) -> None:
        """`hanging_max` threads may hang, until nothing is begun any more."""
        self._hanging_max = hanging_max
        self._seconds_max = seconds_max
        self._begun: list[_FileWork[Any]] = []

    @property
    def hang(self) -> bool:
        """True while work is under way, also if it was given up."""
        return any(not one.is_over for one in self._begun)

    async def run(self, work: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Run `work` on a thread; return or raise its result. ChangeRefused: it or earlier work takes too long.

        `undo` follows if it ends after that, as a refused change must not last.
        """
        self._begun = [one for one in self._begun if not one.is_over]
        if len(self._begun) >= self._hanging_max:
            raise ChangeRefused("an earlier change still waits for the files of the settings, or for the disk")
        begun = _FileWork(work, undo)
        self._begun.append(begun)
        threading.Thread(target=begun.run, name="files of settings", daemon=True).start()
        waiting = asyncio.wrap_future(begun.done)
        finished, _ = await asyncio.wait((waiting,), timeout=self._seconds_max)
        if not finished and begun.give_up():
            raise ChangeRefused(
                f"the files of the settings, or the disk, have not answered within {self._seconds_max:g} s"
            )
        return await waiting


class _FileWork(Generic[T]):
    """One piece of work on a thread, which its caller may give up."""

    def __init__(self, work: Callable[[], T], undo: Callable[[], None]) -> None:
        self._work, self._undo = work, undo
        self._deciding = threading.Lock()
        self._given_up = False
        self._is_undone = False
        self.done: concurrent.futures.Future[T] = concurrent.futures.Future()

    @property
    def is_over(self) -> bool:
        return self.done.done() or self._is_undone

    def run(self) -> None:
        try:
            outcome = self._work()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._end(partial(self.done.set_exception, error))
        else:
            self._end(partial(self.done.set_result, outcome))

    def _end(self, tell: Callable[[], None]) -> None:
        with self._deciding:
            if not self._given_up:
                tell()
                return
        try:
            self._undo()
        finally:
            self._is_undone = True

    def give_up(self) -> bool:
        """Wait no more; False where it has just come to its end."""
        with self._deciding:
            self._given_up = not self.done.done()
            return self._given_up


@dataclass(frozen=True, slots=True)
class SlotChange:
    """A question over the admin port, with its id `asked` and the asker's address `remote`.

    `slot` is the new slot `name`; None: remove it. Without a name the settings are read again.
    """

    asked: str
    name: str | None
    slot: Mapping[str, Any] | None
    remote: str | None = None

    def to_line(self) -> str:
        document = {"asked": self.asked, "name": self.name, "slot": self.slot, "remote": self.remote}
        return orjson.dumps(document).decode()

    @property
    def operation(self) -> str:
        """As the admin port was asked for it."""
        if self.name is None:
            return "POST /api/v1/reload"
        return f"{'DELETE' if self.slot is None else 'PUT'} /api/v1/slots/{self.name}"

    @classmethod
    def from_line(cls, line: str) -> SlotChange:
        return cls(**orjson.loads(line))


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Settings that may come into force; `overlay` is the slots to write down for that; None: as it is."""

    settings: Settings
    numbers: Numbers
    warnings: Sequence[str]
    overlay: Sequence[SlotTable] | None
    overlay_before: Sequence[SlotTable] = ()

    def keep(self) -> None:
        """Write the overlay down; ChangeRefused, and then it is as it was. Blocks."""
        if self.overlay is None:
            return
        directory = self.settings.cache.directory
        try:
            write_overlay(directory, self.overlay)
        except OSError as error:
            self.undo()  # when the last step has failed, the file is the new one
            raise ChangeRefused(f"the change cannot be written to {directory}: {error.strerror}") from error

    def undo(self) -> None:
        """Restore the overlay as it was before `keep`; log an error if the disk fails. Blocks."""
        directory = self.settings.cache.directory
        try:
            if read_overlay(directory) != list(self.overlay_before):
                write_overlay(directory, self.overlay_before)
        except (OSError, SettingsError) as error:
            _log.error(
                "slots of a change that was refused may come into force with the next change or start",
                file=str(directory / NAME),
                error=str(error),
            )


@dataclass(frozen=True, slots=True)
class Reloader:
    """The sources of settings: a file, if there is one, and the environment."""

    path: Path | None
    environment: Mapping[str, str]

    @property
    def shown_path(self) -> str | None:
        """The file, as text: names of files may be no text."""
        return None if self.path is None else os.fsencode(self.path.absolute()).decode(errors="backslashreplace")

    def load(
        self,
        running: Settings,
        numbers: Numbers,
        change: SlotChange | None,
        known: Sequence[SlotTable] | None = None,
    ) -> Reloaded:
        """Return the settings from now on, with `change`. ChangeRefused where they cannot be; nothing has changed yet.

        `numbers` are those of the `running` settings. `known` is the overlay where the file cannot be believed; None:
        it is read.
        """
        directory = running.cache.directory
        try:
            base = load_settings(self.path, self.environment, running=running)
            before = read_overlay(directory) if known is None else known
            overlay = before if change is None or change.name is None else self._changed(base, before, change)
            loaded = with_overlay(self.path, self.environment, base, overlay)
            _refuse_restarts(running, loaded.settings)
            changed = _with_room(numbers, loaded.settings)
            _refuse_unflushed(running, loaded.settings)
            self._recover_buffer(running, loaded.settings)
        except SettingsError as error:
            raise ChangeRefused("; ".join(str(problem) for problem in error.problems)) from error
        except OSError as error:
            raise ChangeRefused(f"settings cannot be read anew: {error}") from error
        return Reloaded(loaded.settings, changed, loaded.warnings, None if change is None else overlay, before)

    def _changed(self, base: LoadedSettings, overlay: Sequence[SlotTable], change: SlotChange) -> list[SlotTable]:
        """Return the overlay with `change`. SettingsError if the slot cannot be beside those in force."""
        is_configured = any(slot.name == change.name for slot in base.settings.slots)
        others = [slot for slot in overlay if slot["name"] != change.name]
        assert change.name is not None  # noqa: S101 - what has none changes no slot
        if change.slot is None and len(others) == len(overlay) and not is_configured:
            raise ChangeRefused(f"there is no slot {change.name!r}")
        if is_configured and (change.slot is not None or len(others) == len(overlay)):
            raise ChangeRefused(
                f"the configuration has the slot {change.name!r}: change it there, and send the gateway SIGHUP"
            )
        if change.slot is None:
            return others
        in_force = [
            slot for slot in fitting(self.path, self.environment, base, overlay)[1] if slot["name"] != change.name
        ]
        in_force.append({**change.slot, "name": change.name})
        load_settings(self.path, self.environment, more_slots=in_force, running=base.settings)
        # Slots out of force come last: they take nothing away from those in force.
        return [*in_force, *(slot for slot in others if slot not in in_force)]

    def _recover_buffer(self, running: Settings, settings: Settings) -> None:
        if any(slot.is_buffered for slot in running.slots) or (running.cache.directory / DIRECTORY).exists():
            return
        problem = recover_buffer(settings)
        if problem is not None:
            raise ChangeRefused(problem)


def _with_room(numbers: Numbers, settings: Settings) -> Numbers:
    """Return the numbers for these settings; ChangeRefused."""
    for kind, numbering, count in (
        ("slots", numbers.slots, len(settings.slots)),
        ("credentials", numbers.credentials, len(settings.credentials)),
        ("caller_classes", numbers.classes, len(settings.caller_classes)),
    ):
        if count > numbering.most:
            raise ChangeRefused(f"there is room for {numbering.most} {kind} until the gateway is started again")
    return numbers.changed(settings)


def _refuse_restarts(running: Settings, settings: Settings) -> None:
    keys = restart_needed(running, settings)
    if keys:
        changed = changed_keys(running, settings)
        live = [key for key in changed if not any((key.partition(" ")[2] or key) in one for one in keys)]
        besides = f"; without these it could take {', '.join(live)}" if live else ""
        raise ChangeRefused(f"these take a new start of the gateway: {', '.join(keys)}{besides}")


def _refuse_unflushed(running: Settings, settings: Settings) -> None:
    """Raise ChangeRefused while a slot that goes has data that only this node has, however it writes now."""
    left = {slot.name: slot.prefix for slot in settings.slots}
    gone = [slot for slot in running.slots if left.get(slot.name) != slot.prefix]
    journal = running.cache.directory / DIRECTORY / "journal"
    if not gone or not journal.exists():
        return
    import sqlite3

    from gateway.writeback.journal.files import Files
    from gateway.writeback.journal.schema import connect_reading

    try:
        with closing(connect_reading(str(journal))) as connection:
            usage_of = Files(connection).usages()
    except sqlite3.Error as error:
        raise ChangeRefused(
            f"the slot {gone[0].name!r} stays: {journal} cannot be read for what the origin lacks of it ({error})"
        ) from error
    for slot in gone:
        usage = usage_of.get(slot.name)
        if usage is not None and usage.local_objects:
            raise ChangeRefused(
                f"the slot {slot.name!r} has {usage.local_objects} objects and {usage.local_bytes} bytes that are "
                "never sent to the origin: delete them, or wait until they expire, then remove it"
            )
        if usage is not None and (usage.objects or usage.staged_bytes):
            raise ChangeRefused(
                f"the slot {slot.name!r} has {usage.objects} objects and {usage.staged_bytes} bytes that the "
                f'origin does not have: set write = "through", have them flushed (forebay flush --wait '
                f"{slot.prefix}), then remove it"
            )
