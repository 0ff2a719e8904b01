"""Whole gateways of one cluster under load, while Redis stops, stands still, starts empty, or fails over.

`FOREBAY_REDIS_FAILURES` is how often, `FOREBAY_CLUSTER_SEED` decides how; `FOREBAY_CLUSTER_RECORD` is a file that names
the failures that were tried, which are not tried again.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.cluster.with_redis import PREFIXES, is_ready, state, writing
from tests.support.cluster_load import Load, Report, Task, digest_of, load
from tests.support.connections import answering_aside
from tests.support.nodes import BUCKET, PATIENCE_SECONDS, READ_ONLY, Nodes
from tests.support.redis_server import RedisPair, RedisServer, Wire

FAILURES = int(os.environ.get("FOREBAY_REDIS_FAILURES", "2"))
SEED = os.environ.get("FOREBAY_CLUSTER_SEED") or str(random.randrange(2**32))
RECORD = os.environ.get("FOREBAY_CLUSTER_RECORD", "")
ROUND_FAILURES = 10
NODES = 3
AWAY_SECONDS_MAX = 8.0
CALM_SECONDS = 2.0
DATA = {**READ_ONLY, "prefix": f"s3://{BUCKET}/data/"}


@dataclass
class Tried:
    """A failure: when it began and when Redis was back, and after how many seconds each node believed it."""

    how: str
    began: float
    back: float
    believed_seconds: list[float] = field(default_factory=list)


@dataclass
class Failing:
    """Lets Redis fail."""

    pair: RedisPair
    dice: random.Random

    def stop(self) -> float:
        """Stop it, and start it empty."""
        self.pair.primary.stop()
        return self._back(self.pair.primary.start)

    def restart(self) -> float:
        """Start it anew at once, empty."""
        self.pair.primary.restart()
        return time.monotonic()

    def freeze(self) -> float:
        """Let it stand still, and go on with all that it had."""
        self.pair.primary.freeze()
        return self._back(self.pair.primary.go_on)

    def fail_over(self) -> float:
        """To a replica that lacks what was written last."""
        self.pair.cut()
        time.sleep(self.dice.uniform(0.1, 1.0))
        self.pair.primary.stop()
        back = self._back(self.pair.fail_over)
        self.pair.replica.start()
        return back

    def _back(self, begin_again: Callable[[], None]) -> float:
        time.sleep(self.dice.uniform(0.0, AWAY_SECONDS_MAX))
        begin_again()
        return time.monotonic()


def try_failure(cluster: Nodes, failing: Failing, running: Load) -> Tried:
    """Let Redis fail once, and wait until all nodes believe it again."""
    how = failing.dice.choice((failing.stop, failing.restart, failing.freeze, failing.fail_over))
    began, failed_at = time.monotonic(), 0.0 if how == failing.freeze else time.time()
    tried = Tried(how.__name__, began, how())
    for number in range(NODES):

        def is_believed_again(number: int = number) -> bool:
            """Whether a node believes Redis, and has not just not noticed yet that it is another one."""
            since = (state(cluster[number])["redis"] or {}).get("since") or 0.0
            return is_ready(cluster, number, NODES) and since > failed_at

        cluster.wait_until(
            lambda: is_believed_again() or not running.goes_on,
            seconds=5 * PATIENCE_SECONDS,
        )
        tried.believed_seconds.append(time.monotonic() - tried.back)
    failing.pair.follow()
    time.sleep(CALM_SECONDS)
    return tried


def check(cluster: Nodes, report: Report) -> None:
    """No answer was stale, and the bucket gets all that was acknowledged."""
    assert not report.wrong, "\n".join(report.wrong)
    pending = [f'forebay_writeback_pending_objects{{slot="{prefix}"}}' for prefix in PREFIXES]
    for node in cluster.nodes:
        cluster.wait_until(lambda: sum(map(node.metric, pending)) == 0)  # noqa: B023
    bucket = cluster.origin.model.buckets[BUCKET].objects
    for key, may_be in report.truth.items():
        found = digest_of(cluster.content(key)) if key in bucket else None
        assert found in [one.digest for one in may_be], f"seed {SEED}: the bucket has another {key}"


def resumed_seconds(report: Report, tried: Tried) -> float:
    """Return after how many seconds each node has answered a write with success."""
    after = [(at - tried.began, node) for at, node, _ in report.written if at >= tried.began]
    return max(min((seconds for seconds, one in after if one == node), default=float("inf")) for node in range(NODES))


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * FAILURES)
def test_12_11_redis_may_fail_in_any_way_under_load(tmp_path: Path) -> None:
    """Nothing is stale, nothing is lost, read-only slots notice nothing, and writes soon go on."""
    done = set(Path(RECORD).read_text().split()) if RECORD and Path(RECORD).exists() else set()
    all_tried = list[Tried]()
    resumed, pairs = list[float](), Counter[str]()
    with RedisPair(tmp_path) as pair, writing(tmp_path, pair.url, NODES, DATA) as cluster:
        keys = cluster.store("data/k", [1000, 70_000, 300_000, 3_000_000] * 3)
        data = {key: digest_of(cluster.content(key)) for key in keys}
        urls = [node.gateway.s3_url for node in cluster.nodes]
        for number in range(-(-FAILURES // ROUND_FAILURES)):
            if str(number) in done:
                continue
            seed = f"{SEED}-{number}"
            failing, tried = Failing(pair, random.Random(seed)), list[Tried]()
            with load(Task(urls, seed, PREFIXES, data=data)) as [running]:
                time.sleep(CALM_SECONDS)
                while len(tried) < min(FAILURES, ROUND_FAILURES) and running.goes_on:
                    tried.append(try_failure(cluster, failing, running))
                report = running.end()
            for one in tried:
                print(f"  {one.began:.3f} {one.how}, back {one.back:.3f}, believed {one.believed_seconds}", flush=True)
            check(cluster, report)
            resumed += [resumed_seconds(report, one) for one in tried]
            all_tried, pairs = all_tried + tried, pairs + Counter(report.pairs)
            if RECORD:
                with Path(RECORD).open("a") as file:
                    file.write(f"{number}\n")
            slowest = max(report.data_seconds)
            print(f"seed {SEED}: {len(all_tried)} failures, {pairs.total()} pairs, {len(report.refused)} refused")
            print(f"  {report.data_reads} reads of what nobody writes, the slowest {slowest:.2f} s", flush=True)
            for one, after in zip(tried, resumed[-len(tried) :], strict=True):
                seconds = max(one.believed_seconds)
                away = one.back - one.began
                print(f"  {one.how}: away {away:.1f} s, writes after {after:.1f} s, believed after {seconds:.1f} s")
    assert not [seconds for seconds in resumed if seconds == float("inf")]


Harm = tuple[Callable[[], object], Callable[[], object], str]


@contextmanager
def harms(directory: Path, server: RedisServer, wire: Wire) -> Iterator[dict[str, Harm]]:
    """Yield by name how to harm Redis, how to mend it, and what nodes say of it."""

    def told(**options: object) -> Callable[[], None]:
        def tell() -> None:
            with server.client as client:
                for name, value in options.items():
                    client.config_set(name.replace("_", "-"), value)

        return tell

    def locked() -> None:
        told(requirepass="another-password")()
        with Redis(port=server.port, password="another-password") as client:
            client.client_kill_filter(_type="normal", skipme=True)

    def unlocked() -> None:
        with Redis(port=server.port, password="another-password") as client:
            client.config_set("requirepass", "")

    def demoted() -> None:
        with server.client as client:
            client.replicaof("127.0.0.1", other.port)

    def promoted() -> None:
        with server.client as client:
            client.replicaof("NO", "ONE")

    def wired(mode: Any) -> Harm:
        return partial(setattr, wire, "mode", mode), partial(setattr, wire, "mode", "pass"), "no answer in time"

    (directory / "other").mkdir()
    with RedisServer(directory / "other") as other:
        yield {
            "full": (told(maxmemory=1), told(maxmemory=0), "memory"),
            "evicting": (
                told(maxmemory=2**30, maxmemory_policy="allkeys-lru"),
                told(maxmemory=0, maxmemory_policy="noeviction"),
                "maxmemory-policy is allkeys-lru",
            ),
            "without its replicas": (told(min_replicas_to_write=1), told(min_replicas_to_write=0), "replicas"),
            "demoted": (demoted, promoted, "no primary|read only replica"),
            "locked": (locked, unlocked, "(?i)authentication"),
            "silent": wired("hang"),
            "dripping": wired("drip"),
            "slow": wired("late"),
        }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_12_11_a_redis_that_is_no_help_is_away_and_nodes_say_why(tmp_path: Path, redis: RedisServer) -> None:
    wire = Wire(redis)
    with (
        answering_aside(wire.carry) as port,
        writing(tmp_path, f"redis://127.0.0.1:{port}", 2, DATA) as cluster,
        harms(tmp_path, redis, wire) as found,
    ):
        [key] = cluster.store("data/k", [70_000])
        for name, (harm, mend, said) in found.items():
            harm()
            for number in range(2):
                problems = list[str]()

                def is_said(number: int = number, said: str = said, problems: list[str] = problems) -> bool:
                    problems.append(str(state(cluster[number])["redis"]["problem"]))
                    return re.search(said, problems[-1]) is not None

                cluster.wait_until(is_said)
            for prefix in PREFIXES:
                target, content = f"{prefix}/{name}", random.randbytes(1000)
                cluster.wait_until(
                    lambda: cluster[0].request("PUT", target, content=content).status_code == 200  # noqa: B023
                )
                assert cluster[1].request("GET", target).content == content
            assert cluster.read(1, key) in ("hit", "miss", "peer")
            mend()
            for number in range(2):
                cluster.wait_until(lambda: is_ready(cluster, number, 2))  # noqa: B023
