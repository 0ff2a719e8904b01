"""Processes stopped (SIGSTOP) at any moment: they live, hold what they hold, and do not turn (semantics.md, 5.2, 5.3).

Any one process for ten seconds, while clients read what is cold and warm, and write; then a worker for ever. Requests
that are not the stopped process's own are answered as before within five seconds, and every answer is right, those of
the process that wakes up again too. The schedule comes from a seed, which a failure prints; FOREBAY_STOP_SEED and
FOREBAY_STOPS repeat or lengthen a run.
"""

from __future__ import annotations

import http.client
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.crash.test_kills import children_of
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.content import GeneratedContent
from tests.support.strict_origin import StrictOrigin

STOPS = int(os.environ.get("FOREBAY_STOPS", "1"))
SEED = int(os.environ.get("FOREBAY_STOP_SEED", random.SystemRandom().randrange(2**32)))
STOP_SECONDS = 10.0
SECONDS_MAX = 240 + STOPS * 20

RECOVERY_SECONDS = 5.0
"""So long after a stop, requests may take longer than usual: as long as this, and what a busy machine adds."""

BUSY_SECONDS = 3.0
USUAL_SECONDS = 1.0
"""What 99 of 100 requests take at most when nothing is stopped, or five times what they have taken before the stop."""

STARTED_SECONDS = 0.1
"""A request that was begun so long after a stop cannot be the stopped process's own."""

WORKERS = 4
CLIENTS = 8
BUCKET = "bucket"
SMALL, LARGE = 60_000, 1_234_567
BLOCK_SIZE_BYTES = 256 * 1024
PACKED_BYTES_MAX = 64 * 1024
ORIGIN_LATENCY_SECONDS, ORIGIN_BYTES_PER_SECOND = 0.05, 4e6
"""So slow that most stops meet a process that fetches what others wait for."""

CAPACITY_BYTES = 256 * BLOCK_SIZE_BYTES
"""Cold objects do not all fit: every run evicts."""

COLD_AT_ONCE = 6
"""Clients choose among so many cold objects, one after another taken out: they meet on each."""


@dataclass
class Request:
    what: str
    began: float
    ended: float
    outcome: str


@dataclass
class Crowd:
    """Clients at work, each with a connection of its own for each request, until `over`."""

    s3_url: str
    origin: StrictOrigin
    seed: int
    requests: list[Request] = field(default_factory=list)
    under_way: dict[int, float] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    _cold: list[str] = field(default_factory=list)
    _made: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._work, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.over.set()
            for thread in threads:
                thread.join()

    def ended_since(self, start: float, stop: float) -> list[Request]:
        """The requests that were begun in a time and have ended."""
        with self._lock:
            return [one for one in self.requests if start <= one.began < stop]

    def under_way_since(self, start: float, stop: float) -> list[float]:
        """When those were begun in a time that have not ended yet."""
        with self._lock:
            return [began for began in self.under_way.values() if start <= began < stop]

    def _work(self, number: int) -> None:
        rng, address = random.Random(self.seed + number), urlsplit(self.s3_url)
        assert address.hostname is not None
        written = b""
        while not self.over.is_set():
            what = rng.choices(("cold", "warm", "write", "own"), (6, 3, 1, 1))[0]
            key, expected = f"own/{number}", written
            if what == "cold":
                key, expected = self._cold_object(rng)
            elif what == "warm":
                key, expected = "warm", bytes(GeneratedContent(SMALL, 1).read(0, SMALL))
            elif what == "write":
                expected = rng.randbytes(5000)
            elif not written:
                continue
            began = time.monotonic()
            with self._lock:
                self.under_way[number] = began
            connection = http.client.HTTPConnection(address.hostname, address.port or 80, timeout=60)
            try:
                outcome = _exchange(connection, what, key, expected)
            finally:
                connection.close()
            if what == "write":
                written = expected if outcome == "right" else b""
            with self._lock:
                del self.under_way[number]
                self.requests.append(Request(what, began, time.monotonic(), outcome))
            time.sleep(0.01)

    def _cold_object(self, rng: random.Random) -> tuple[str, bytes]:
        with self._lock:
            while len(self._cold) < COLD_AT_ONCE:
                key = f"cold/{self._made}"
                self.origin.model.put_generated(BUCKET, key, _size_of(key), seed=self._made)
                self._cold.append(key)
                self._made += 1
            place = rng.randrange(COLD_AT_ONCE)
            key = self._cold.pop(place) if rng.random() < 0.1 else self._cold[place]
        size_bytes = _size_of(key)
        return key, bytes(GeneratedContent(size_bytes, int(key.removeprefix("cold/"))).read(0, size_bytes))


def _size_of(key: str) -> int:
    return LARGE if int(key.removeprefix("cold/")) % 3 == 0 else SMALL


def _exchange(connection: http.client.HTTPConnection, what: str, key: str, expected: bytes) -> str:
    """right, broken (no answer, half of one, or the server's own trouble), or wrong and how."""
    try:
        method, content = ("PUT", expected) if what == "write" else ("GET", None)
        connection.request(method, f"/{BUCKET}/{key}", content)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException):
        return "broken"
    if answer.status >= 500:
        return f"broken with {answer.status}"
    if answer.status != 200:
        return f"wrong status {answer.status}"
    return "right" if what == "write" or body == expected else f"wrong bytes: {len(body)} of {len(expected)}"


@pytest.fixture
def running() -> Iterator[tuple[GatewayProcess, StrictOrigin]]:
    with StrictOrigin() as origin:
        origin.latency_seconds, origin.bytes_per_second = ORIGIN_LATENCY_SECONDS, ORIGIN_BYTES_PER_SECOND
        origin.model.create_bucket(BUCKET)
        origin.model.put_generated(BUCKET, "warm", SMALL, seed=1)
        config: dict[str, dict[str, Any]] = {
            "server": {"workers": WORKERS, "allow_unsigned": True},
            "origin": origin.settings,
            "cache": {
                "capacity": str(CAPACITY_BYTES),
                "block_size": str(BLOCK_SIZE_BYTES),
                "small_object_max": str(PACKED_BYTES_MAX),
            },
        }
        with GatewayProcess(config) as gateway:
            yield gateway, origin


@contextmanager
def stopped(pid: int) -> Iterator[float]:
    """A process stands still while this lasts; since when."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        if os.path.exists(f"/proc/{pid}"):
            os.kill(pid, signal.SIGCONT)


def check(crowd: Crowd, usual: float, since: float, until: float) -> None:
    """What was asked while a process stood still was answered: at first a little late, then as before."""
    recovered = since + RECOVERY_SECONDS
    early = crowd.ended_since(since + STARTED_SECONDS, recovered)
    late = crowd.ended_since(recovered, until)
    assert [one for one in (*early, *late) if one.outcome != "right"] == []
    assert max((one.ended - one.began for one in early), default=0.0) < RECOVERY_SECONDS + BUSY_SECONDS
    waiting = crowd.under_way_since(since + STARTED_SECONDS, until - RECOVERY_SECONDS)
    assert waiting == [], f"{len(waiting)} requests that are not the stopped process's own wait"
    assert p99(late) < max(USUAL_SECONDS, 5 * usual), sorted(one.ended - one.began for one in late)[-10:]
    assert len(late) > 20, "the clients hardly got through: this run shows nothing"


def p99(requests: list[Request]) -> float:
    taken = sorted(one.ended - one.began for one in requests)
    return taken[int(len(taken) * 0.99)] if taken else 0.0


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
def test_5_2_stopped_processes_cost_their_own_requests_only(running: tuple[GatewayProcess, StrictOrigin]) -> None:
    """Any process for ten seconds, a worker for ever: the others answer rightly, and soon as fast as before."""
    gateway, origin = running
    print(f"replay with FOREBAY_STOP_SEED={SEED} FOREBAY_STOPS={STOPS}")
    schedule, crowd = random.Random(SEED), Crowd(gateway.s3_url, origin, SEED)
    with gateway.explaining(), crowd.at_work():
        begun = time.monotonic()
        time.sleep(3.0)
        for _ in range(STOPS):
            time.sleep(schedule.uniform(0.5, 2.0))
            usual = p99(crowd.ended_since(max(begun, time.monotonic() - 30), time.monotonic()))
            processes = [(gateway.pid, "supervisor"), *children_of(gateway.pid)]
            workers = [one for one in processes if one[1].startswith("worker")]
            pid, name = schedule.choice(workers if schedule.random() < 0.7 else processes)
            with stopped(pid) as since:
                time.sleep(STOP_SECONDS)
                print(f"stopped {name}, usual p99 {usual:.3f} s")
                check(crowd, usual, since, time.monotonic())
            begun = time.monotonic()
        number = schedule.randrange(WORKERS)
        for_ever(gateway, crowd, number)
    outcomes = [one.outcome for one in crowd.requests]
    assert not [one for one in outcomes if one.startswith("wrong")]
    broken = [one for one in crowd.requests if one.outcome != "right"]
    assert len(broken) <= CLIENTS, broken
    assert gateway.terminate() == 0


def for_ever(gateway: GatewayProcess, crowd: Crowd, number: int) -> None:
    """A worker that does not wake up any more is ended, and comes back as another process."""
    pid = gateway.worker_pids()[number]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    since = time.monotonic()
    time.sleep(STOP_SECONDS)
    check(crowd, p99(crowd.ended_since(since - 20, since)), since, time.monotonic())
    gateway.wait_for_worker(number, other_than=pid)
    assert time.monotonic() - since < 50
    assert "a process hangs and is killed" in gateway.log
