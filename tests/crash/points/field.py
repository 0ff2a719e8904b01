"""A real gateway whose processes are killed at chosen calls, its origin, and what its client may expect."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.writeback.journal.records import State, unpack_write
from loadtests.harness.server_process import held_port
from tests.crash.points.client import BUCKET, PATIENCE_SECONDS, Client, Interrupted, SentAway
from tests.crash.points.ledger import Difference, Ledger
from tests.crash.points.scenarios import SCENARIOS, Run, Scenario
from tests.support.gateway_process import GatewayProcess
from tests.support.kill_points import Fired, KillPoints
from tests.support.processes import children_of, is_over, kill_if_there
from tests.support.strict_origin import StrictOrigin

WORKERS = 2
SLOTS = {
    "strict": {"consistency": "strict"},
    "ttl": {"consistency": "ttl", "metadata_ttl": "1h"},
}
"""In turn. With `ttl` whatever is remembered and was not voided would be found."""

BY_NAME = {one.name: one for one in SCENARIOS}
_LOOK_SECONDS = 0.01

_OPEN = "upload_id IS NOT NULL AND pending = 0 AND state < 3"
"""Of uploads that are open."""

PROBE_NAME = ".forebay/conditions-"
"""In the keys of gateway/writeback/flushing/condition_probe.py."""


@dataclass(frozen=True, slots=True)
class Point:
    """Where to kill: at the `number`th call of the scenario's role, before or after it, it or all processes."""

    scenario: str
    number: int
    after: bool
    everybody: bool

    def __str__(self) -> str:
        when, who = ("after" if self.after else "before"), ("all" if self.everybody else "one")
        return f"{self.scenario}:{self.number}:{when}:{who}"

    @classmethod
    def parsed(cls, text: str) -> Point:
        scenario, number, when, who = text.split(":")
        return cls(scenario, int(number), when == "after", who == "all")


class Field:
    """Where it happens."""

    def __init__(self, gateway: GatewayProcess, origin: StrictOrigin, points: KillPoints, seed: int) -> None:
        self.gateway = gateway
        self.origin = origin
        self.client = Client(gateway.s3_url, Ledger())
        self._points = points
        self._seed = seed
        self._runs = self._looks = 0
        self._is_down = False
        self._killed: list[int] = []

    @classmethod
    @contextmanager
    def opened(cls, scratch: Path, directory: Path, seed: int) -> Iterator[Field]:
        """With a bucket of which the gateway knows that it can be written back."""
        with held_port() as holder, StrictOrigin() as origin, KillPoints.made(scratch, directory) as points:
            origin.model.create_bucket(BUCKET)
            port = holder.getsockname()[1]
            with (
                GatewayProcess(_config(origin, port), directory=directory, environment=points.environment) as gateway,
                gateway.explaining(),
            ):
                field = cls(gateway, origin, points, seed)
                field.client.put("strict/first", b"x")
                field.client.delete("strict/first")
                field.client.ledger.forget()
                yield field

    def count(self, scenario: Scenario) -> int:
        """How many calls there are to die at."""
        run = self.new_run(f"count-{scenario.name}")
        scenario.before(run)
        self._points.arm(scenario.role, within=scenario.within)
        scenario.act(run)
        seen = self._points.disarm()
        self.verify(run)
        return seen

    def kill(self, point: Point) -> Fired | None:
        """Run a scenario, die at the point, and look whether all is as it may be. None: it did not come to that."""
        scenario = BY_NAME[point.scenario]
        run = self.new_run(str(point).replace(":", "-"))
        scenario.before(run)
        besides = [self.gateway.pid, *children_of(self.gateway.pid)] if point.everybody else []
        self._points.arm(scenario.role, point.number, after=point.after, besides=besides, within=scenario.within)
        try:
            scenario.act(run)
        except Interrupted as error:
            if self._points.fired is None and not isinstance(error, SentAway):
                raise Difference(f"interrupted, and nobody was killed: {error}") from error
        self._points.disarm()
        fired = self._points.fired
        self.origin.settle()
        if self._is_down or (fired is not None and point.everybody):
            self.gateway.wait()
            self.gateway.start()
            self._is_down = False
        self.verify(run)
        if fired is not None:
            self._persist(scenario, run)
            self.verify(run)
        if fired is not None and fired.call in ("fdatasync", "unlink"):
            self._until(lambda: not self._unknown_files(), "no unknown file is left", self._unknown_files)
        return fired

    def _persist(self, scenario: Scenario, run: Run) -> None:
        """The client goes on, again and again where it is sent away."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return scenario.rest(run)
            except Interrupted as error:
                if time.monotonic() > deadline:
                    raise Difference(f"the client is always sent away: {error}") from error
                time.sleep(0.05)

    def new_run(self, of: str) -> Run:
        self._runs += 1
        dice = random.Random(f"{self._seed} {of}")
        name = f"{self._prefixes[self._runs % len(SLOTS)]}{self._runs:04}-{of}"
        return Run(self.client, self.origin, dice, name, self.flushed, self.fall, self.rise)

    @property
    def _prefixes(self) -> list[str]:
        """Of the keys that are used until the next look at everything."""
        return [f"{slot}/{self._looks:03}/" for slot in SLOTS]

    def kill_all(self) -> None:
        """All processes of the gateway; children that notice the end of the first one may be gone by themselves."""
        self._killed = [self.gateway.pid, *children_of(self.gateway.pid)]
        for pid in self._killed:
            kill_if_there(pid)

    def fall(self) -> None:
        """Kill all processes; return when they have let go of their files."""
        if not self._killed:
            self.kill_all()
        while not all(map(is_over, self._killed)):
            time.sleep(_LOOK_SECONDS)
        self._killed.clear()
        self._is_down = True
        self.gateway.wait()

    def rise(self) -> None:
        """Interrupted when it does not come up."""
        try:
            self.gateway.start()
        except AssertionError as error:
            raise Interrupted(str(error)) from error
        self._is_down = False

    def verify(self, run: Run) -> None:
        ledger = self.client.ledger
        for key in [key for key in ledger.keys if key.startswith(run.name)]:
            self.client.check(key)
        for upload_id, upload in ledger.uploads.items():
            if upload.key.startswith(run.name):
                self.client.check_upload(upload_id)
                upload.fits(ledger.may_be(upload.key)[0])

    # In the end

    def flushed(self) -> None:
        """Return when nothing is pending; Interrupted when nobody is left who could see to it."""
        self._until(lambda: self._pending() + self._doomed() == 0, "everything is flushed")

    def check_all(self) -> None:
        """Everything, on every worker and at the origin; nothing is left here; then it is forgotten."""
        self._abort_all()
        self.flushed()
        self._until(self._are_ready, "all processes are ready")
        for _ in range(2):  # before and after it was looked at: what is read may be cached
            for number in range(WORKERS):
                with self._only(number):
                    self._check_worker()
        self._check_origin()
        self._until(lambda: not self._staged(), "no staged file is left", self._staged)
        for table, condition in (("parts", "1"), ("files", "1"), ("writes", _OPEN)):
            if self._rows(table, condition):
                raise Difference(f"the journal's table {table} is not empty")
        self._looks += 1
        self.client.ledger.forget()
        self.origin.model.buckets[BUCKET].objects.clear()
        self.origin.model.buckets[BUCKET].sorted_keys.clear()

    def _abort_all(self) -> None:
        """What clients have begun and never ended, whether they know it or not."""
        with closing(self._journal()) as journal:
            opened = journal.execute(f"SELECT upload_id, CAST(key AS TEXT) FROM writes WHERE {_OPEN}").fetchall()
        for upload_id, key in opened:
            known = self.client.ledger.uploads.get(upload_id)
            if known is not None and not known.may_be_open:
                raise Difference(f"an upload of {key} that is over is open in the journal")
            self.client.inherit(upload_id, key)
            self.client.abort(upload_id)

    def _check_worker(self) -> None:
        ledger = self.client.ledger
        listed = {key: entry for prefix in self._prefixes for key, entry in self.client.listed(prefix).items()}
        expected = {key: (state.etag, len(state.content)) for key, (state,) in ledger.keys.items() if state is not None}
        if listed != expected:
            raise Difference(f"listed: {_difference(listed, expected)}")
        for key in ledger.keys:
            ledger.saw(key, self.client.found(key))

    def _check_origin(self) -> None:
        found = {
            key: (one.etag, one.content.read(0, one.size_bytes))
            for key, one in self.origin.model.buckets[BUCKET].objects.items()
            if PROBE_NAME not in key  # by which it is found out what the bucket honours: a killed one leaves it a while
        }
        expected = {
            key: (state.etag, state.content) for key, (state,) in self.client.ledger.keys.items() if state is not None
        }
        if found != expected:
            raise Difference(f"at the origin: {_difference(found, expected)}")

    def _are_ready(self) -> bool:
        return all(one["ready"] for one in self.gateway.status()["gateway"]["processes"])

    @contextmanager
    def _only(self, number: int) -> Iterator[None]:
        """No worker takes a connection but this one."""
        others = [pid for worker, pid in enumerate(self.gateway.worker_pids()) if worker != number and pid is not None]
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)

    def _unknown_files(self) -> list[str]:
        """That the journal does not name: a process that was killed has left them, until the next is there."""
        with closing(self._journal()) as journal:
            named = {name for (name,) in journal.execute("SELECT name FROM files")}
        return [name for name in self._staged() if name not in named]

    def _staged(self) -> list[str]:
        root = self.gateway.directory / "writeback" / "staged"
        return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]

    def _journal(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self.gateway.directory}/writeback/journal?mode=ro", uri=True, timeout=10)

    def _pending(self) -> int:
        return self._rows("writes", "pending = 1")

    def _doomed(self) -> int:
        """How many uploads the gateway is to abort at the origin now.

        It does not know the ids of some yet, and leaves one that may be another writer's alone for half a day:
        finding.py looks at those in the end.
        """
        with closing(self._journal()) as journal:
            found = journal.execute("SELECT id, record FROM writes WHERE state = ?", (State.ABORTING,)).fetchall()
        writes = [unpack_write(*row) for row in found]
        return sum(one.origin_upload_id is not None and one.asked is None for one in writes)

    def _rows(self, table: str, condition: str) -> int:
        with closing(self._journal()) as journal:
            count: int = journal.execute(f"SELECT count(*) FROM {table} WHERE {condition}").fetchone()[0]
            return count

    def _until(self, reached: Callable[[], bool], what: str, left: Callable[[], Any] = lambda: "") -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not reached():
            if not Path(f"/proc/{self.gateway.pid}/exe").exists():
                raise Interrupted("the gateway is dead")
            if time.monotonic() > deadline:
                raise Difference(f"it never came to it that {what}: {left()}")
            time.sleep(_LOOK_SECONDS)


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    keys = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
    return "; ".join(f"{key}: {str(found.get(key))[:80]}, not {str(expected.get(key))[:80]}" for key in keys[:5])


def _config(origin: StrictOrigin, port: int) -> dict[str, Any]:
    """The port stays the same over restarts, as it does for those who use the gateway."""
    return {
        "server": {"port": port, "workers": WORKERS, "allow_unsigned": True},
        "origin": origin.settings,
        "cache": {"persistent": True},
        "slots": [
            {"name": slot, "prefix": f"s3://{BUCKET}/{slot}/", "write": "back", **settings}
            for slot, settings in SLOTS.items()
        ],
    }
