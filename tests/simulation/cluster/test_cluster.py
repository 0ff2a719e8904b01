"""A short sample of the simulated cluster, and that each of its rules sees what breaks it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import structlog

from gateway.blocks import complete_ranges
from gateway.blocks.plan import ReadPlan
from gateway.cluster import cluster_origin
from gateway.cluster.cluster_origin import ClusterOrigin, ClusterRoles, _Rationed
from gateway.cluster.members import View
from gateway.config import SlotSettings
from gateway.core.errors import OriginBusy
from gateway.metadata import catalog as catalog_module
from gateway.metadata import entries
from gateway.metadata.ages import AnswerAges
from gateway.metadata.catalog import Catalog
from gateway.metadata.entries import CatalogEntry, Freshness, ObservedAt
from gateway.origin import peer_protocol as peer
from gateway.origin.client import OriginRequest
from gateway.origin.retry import CircuitBreaker
from gateway.shared.seen_nonces import SeenNonces
from gateway.telemetry import metrics
from tests.simulation.cluster.judge import CLUSTER_RULES
from tests.simulation.cluster.node import NodeClock
from tests.simulation.cluster.wires import KINDS
from tests.simulation.cluster.world import ClusterWorld, play_cluster
from tests.simulation.dialects import CLUSTER
from tests.simulation.virtual_time import VirtualClock
from tests.simulation.world import Setting
from tests.support.counting import by_label

SEED = int(os.environ.get("FOREBAY_SIMULATION_SEED", "20261128"))
HISTORIES = int(os.environ.get("FOREBAY_SIMULATION_HISTORIES", "2"))
HISTORIES_UNTIL_SEEN = 20

Patch = pytest.MonkeyPatch


def told(world: ClusterWorld) -> str:
    return "\n".join([*world.said[-60:], *(f"{world.seed}: {one}" for one in world.judge.violations)])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What gateways log of all that goes wrong takes longer than what they do."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rules_hold() -> None:
    for seed in range(SEED, SEED + HISTORIES):
        world = play_cluster(Setting(seed, CLUSTER, 40))
        assert not world.judge.violations, told(world)
        assert world.judge.answered["200"] > 20


@pytest.mark.slow
def test_a_seed_replays() -> None:
    setting = Setting(SEED, CLUSTER, 8)
    assert play_cluster(setting).said == play_cluster(setting).said


# What is broken, of each rule


def damage_is_not_looked_for(patch: Patch) -> None:
    for module in ("origin_gets", "large_block_fetch", "small_block_fetch"):
        patch.setattr(f"gateway.blocks.{module}.is_as_promised", lambda *_: True)


def clocks_go_slowly(patch: Patch) -> None:
    patch.setattr(NodeClock, "monotonic", lambda clock: VirtualClock.monotonic(clock) / 10)


def own_writes_are_not_forgotten(patch: Patch) -> None:
    patch.setattr(Catalog, "forget", lambda *_: None)
    patch.setattr(Catalog, "begin_write", lambda *_: ())
    patch.setattr(Catalog, "end_write", lambda *_: None)


def the_bucket_is_not_asked_for_others(patch: Patch) -> None:
    async def by_ration(*_: Any) -> Any:
        raise OriginBusy("no")

    patch.setattr(ClusterOrigin, "_by_ration", by_ration)


def owners_are_asked_late(patch: Patch) -> None:
    real = ClusterOrigin._of_owners

    async def of_owners(origin: ClusterOrigin, request: Any) -> Any:
        await asyncio.sleep(40.0)
        return await real(origin, request)

    patch.setattr(ClusterOrigin, "_of_owners", of_owners)


def nobody_owns_anything(patch: Patch) -> None:
    patch.setattr(ClusterRoles, "headers", lambda _, __, ___, headers, ____: headers)


def nonces_are_not_remembered(patch: Patch) -> None:
    patch.setattr(SeenNonces, "accept", lambda *_: True)


def the_ration_is_kept(patch: Patch) -> None:
    patch.setattr(_Rationed, "_ended", lambda _: None)


def what_peers_say_is_fresh(patch: Patch) -> None:
    patch.setattr(ObservedAt, "before", lambda asked, _: asked)


def ages_are_not_sent(patch: Patch) -> None:
    real = ClusterOrigin._to_peer

    def to_peer(origin: ClusterOrigin, request: OriginRequest, more: Mapping[str, str]) -> OriginRequest:
        request = real(origin, request, more)
        return replace(request, headers={name: one for name, one in request.headers.items() if name != peer.MAX_AGE})

    patch.setattr(ClusterOrigin, "_to_peer", to_peer)


def absences_are_believed_for_too_long(patch: Patch) -> None:
    real = entries.freshness

    def freshness(entry: CatalogEntry, slot: SlotSettings, **now: Any) -> Freshness:
        return real(entry, slot, **now) if entry.head is not None else Freshness.FRESH

    patch.setattr(catalog_module, "freshness", freshness)
    patch.setattr(AnswerAges, "allow", lambda *_: True)


def silence_is_forgotten(patch: Patch) -> None:
    patch.setattr(CircuitBreaker, "probe_failed", lambda *_, **__: None)


def busy_nodes_are_not_waited_for(patch: Patch) -> None:
    patch.setattr(cluster_origin, "_BUSY", frozenset())


def busy_nodes_are_waited_for_for_ever(patch: Patch) -> None:
    patch.setattr(cluster_origin, "BUSY_SECONDS_MAX", 1e6)


def owners_before_are_not_asked(patch: Patch) -> None:
    patch.setattr(View, "owner_before", lambda *_: None)


def peers_are_served_as_clients(patch: Patch) -> None:
    def plan(*arguments: Any, **named: Any) -> ReadPlan:
        made = ReadPlan(*arguments, **named)
        made.roles = made.dependencies.roles
        return made

    patch.setattr(complete_ranges, "ReadPlan", plan)


def peers_tell_versions_everywhere(patch: Patch) -> None:
    patch.setattr(catalog_module, "may_be_remembered", lambda _, headers: catalog_module.is_plainly_asked(headers))


WRITES: Mapping[str, float] = {"read": 20.0, "put": 5.0, "change": 5.0, "pass_time": 2.0}
AGES: Mapping[str, float] = {"read": 30.0, "change": 2.0}
ABSENCES: Mapping[str, float] = {"read": 20.0, "rush": 6.0, "change": 3.0, "delete": 4.0}
BUSY: Mapping[str, float] = {"read": 20.0, "busy": 4.0, "pass_time": 3.0}
MOVES: Mapping[str, float] = {"read": 30.0, "rush": 5.0, "leave": 0.5, "join": 1.0, "pass_time": 2.0}
MEMBERS: Mapping[str, float] = {"read": 20.0, "members": 3.0, "evict": 5.0}
LINKS: Mapping[str, float] = {"read": 20.0, "cut_node": 3.0, "heal": 1.0, "pass_time": 1.0}


@dataclass(frozen=True)
class Case:
    """A rule, what is broken, and the kind of history in which that shows."""

    rule: str
    broken: Callable[[Patch], None]
    often: Mapping[str, float] = field(default_factory=lambda: LINKS)
    steps: int = 40
    consistency: Literal["strict", "ttl"] | None = None
    first: int = 0
    """The seed with which to begin: it showed soon when this was written, and others are tried where it does not."""


CASES = (
    Case("no wrong byte", damage_is_not_looked_for, first=4),
    Case("reads are as young as promised", clocks_go_slowly, WRITES, 150, "ttl"),
    Case("reads are as young as promised", what_peers_say_is_fresh, AGES, 200, "ttl", 3),
    Case("reads are as young as promised", absences_are_believed_for_too_long, ABSENCES, 250, "ttl"),
    Case("each question once", ages_are_not_sent, {"read": 20.0, "pass_time": 5.0}, 40, "ttl", 1),
    Case("own writes are read", own_writes_are_not_forgotten, WRITES, 150, "ttl", 3),
    Case("what the bucket has is answered", the_bucket_is_not_asked_for_others, first=4),
    Case("nobody waits for long", owners_are_asked_late),
    Case("each byte once", nobody_owns_anything, {"read": 20.0, "pass_time": 5.0}),
    Case("each byte once", owners_before_are_not_asked, MOVES, 100),
    Case("each byte once", busy_nodes_are_not_waited_for, BUSY, first=10),
    Case("nobody waits for long", busy_nodes_are_waited_for_for_ever, BUSY),
    Case("who is silent is asked no more", silence_is_forgotten, first=4),
    Case("who is asked asks nobody to ask", peers_are_served_as_clients, MEMBERS, first=3),
    Case("peers tell versions only where nobody writes", peers_tell_versions_everywhere),
    Case("no request counts twice", nonces_are_not_remembered),
    Case("nothing is held in quiet", the_ration_is_kept, first=4),
)


HAPPENS = frozenset(
    {
        *KINDS,
        *("answer 200", "answer 206", "answer 404", "answer 416", "answer 503", "answer 504"),
        *("answer 206 to only cached", "answer 404 to only cached", "nodes come and go in quiet"),
    }
)
REASONS = frozenset({"unreachable", "busy", "bucket-away", "damaged"})
"""Why the bucket is asked for bytes of others. Two owners seldom refuse at once; an owner knows nothing too old."""

ALL_HAPPENS_IN: tuple[tuple[int, Mapping[str, float], int], ...] = (
    (0, {"read": 20.0, "rush": 5.0, "link": 8.0, "evict": 4.0, "heal": 1.0, "pass_time": 1.0}, 60),
    (1, {"read": 20.0, "rush": 4.0, "cut_bucket": 4.0, "link": 3.0, "evict": 6.0, "heal": 2.0}, 60),
    (1, {"read": 20.0, "busy": 8.0, "evict": 10.0, "heal": 1.0}, 60),
    (1, MOVES, 100),
)
"""Each entry adds a number to the seed, says how often each action comes, and counts the steps.

The first seed showed everything when this was written.
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_that_can_go_wrong_does() -> None:
    seen, reasons, before = Counter[str](), set[str](), by_label(metrics.CLUSTER_FALLBACK_REQUESTS, "reason")
    for seed in range(SEED, SEED + HISTORIES_UNTIL_SEEN):
        for more, often, steps in ALL_HAPPENS_IN:
            seen += play_cluster(Setting(seed + more, CLUSTER, steps, often=often)).wires.seen
        now = by_label(metrics.CLUSTER_FALLBACK_REQUESTS, "reason")
        reasons = {one for one in now if now[one] > before.get(one, 0)}
        if set(seen) >= HAPPENS and reasons >= REASONS:
            return
    raise AssertionError(f"never seen: {HAPPENS - set(seen)}, {REASONS - reasons}")


def test_every_rule_has_a_case() -> None:
    assert {one.rule for one in CASES} == set(CLUSTER_RULES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=[one.broken.__name__ for one in CASES])
def test_what_is_broken_is_seen(case: Case, monkeypatch: Patch) -> None:
    like = Setting(0, CLUSTER, case.steps, [case.rule], often=case.often, consistency=case.consistency)
    settings = [replace(like, seed=seed) for seed in range(case.first, case.first + HISTORIES_UNTIL_SEEN)]
    assert not play_cluster(settings[0]).judge.violations
    case.broken(monkeypatch)
    assert any(play_cluster(one).judge.violations for one in settings)
