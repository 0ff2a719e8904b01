"""Whole gateways of one cluster, with a real Redis: what is written through one is read through the others at once.

`FOREBAY_CLUSTER_PAIRS` is how many reads are judged, `FOREBAY_CLUSTER_SEED` decides what is done;
`FOREBAY_CLUSTER_RECORD` is a file that names the rounds that were done, which are not done again.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.with_redis import PREFIXES, writing
from tests.support.cluster_load import Report, Task, load
from tests.support.memory_origin.faults import Answer, Call, Delay, Unreachable
from tests.support.nodes import BUCKET, Nodes
from tests.support.redis_server import RedisServer

PAIRS = int(os.environ.get("FOREBAY_CLUSTER_PAIRS", "300"))
SEED = os.environ.get("FOREBAY_CLUSTER_SEED") or str(random.randrange(2**32))
RECORD = os.environ.get("FOREBAY_CLUSTER_RECORD", "")
ROUND_PAIRS = 5000
FAULTY_ONE_IN = 100

PLAIN: Mapping[str, Any] = {"name": "plain", "prefix": f"s3://{BUCKET}/plain/", "mode": "read-write"}
"""Strict, and written through: it asks nobody but the bucket."""


def disturb(cluster: Nodes, seed: str) -> None:
    """Have the bucket fail now and then: late, busy, or cut off before or after the deed."""
    dice = random.Random(seed)

    def hits(_: Call) -> bool:
        return dice.randrange(FAULTY_ONE_IN) == 0

    for effect in (Delay(0.3), Answer(503, "SlowDown"), Unreachable(), Unreachable(late=True)):
        cluster.origin.model.inject(hits, effect, times=None)


def check(report: Report) -> None:
    assert not report.wrong, "\n".join(report.wrong)


@pytest.mark.slow
def test_12_4_a_write_is_seen_on_the_other_nodes_at_once(tmp_path: Path, redis: RedisServer) -> None:
    """By GET, HEAD and LIST; also while the bucket fails now and then: then a node may refuse, and never be stale."""
    done = set(Path(RECORD).read_text().split()) if RECORD and Path(RECORD).exists() else set()
    pairs, outcomes, refused = Counter[str](), Counter[str](), 0
    rounds = max(1, PAIRS // ROUND_PAIRS)
    with writing(tmp_path, redis.url, 3, PLAIN, workers=2) as cluster:
        urls = [node.gateway.s3_url for node in cluster.nodes]
        for number in range(rounds):
            if str(number) in done:
                continue
            seed = f"{SEED}-{number}"
            cluster.origin.model.faults.clear()
            if number % 2:
                disturb(cluster, seed)
            task = Task(urls, seed, [*PREFIXES, PLAIN["name"]], pairs=PAIRS // rounds)
            with load(task) as [one]:
                cluster.wait_until(lambda: not one.goes_on, seconds=3600)
                report = one.end()
            check(report)
            pairs, outcomes = pairs + Counter(report.pairs), outcomes + Counter(report.outcomes)
            refused += len(report.refused)
            assert number % 2 or not report.refused, report.refused[:10]
            if RECORD:
                with Path(RECORD).open("a") as file:
                    file.write(f"{number}\n")
            print(f"seed {SEED}: {pairs.total()} pairs, {refused} refused, {dict(outcomes)}", flush=True)
    print(f"{dict(sorted(pairs.items()))}")
    assert pairs.total() >= PAIRS or done
    assert (outcomes["back absorbed"] and outcomes["strict absorbed"]) or done
