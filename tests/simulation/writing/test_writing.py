"""A short sample of simulated nodes that write, and that each of the rules sees what breaks it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from gateway.cluster import registry_beats, scripts
from gateway.cluster.earlier_writes import EarlierWrites
from gateway.cluster.redis_registry import RedisRegistry
from gateway.cluster.registry_beats import RegistryBeats
from gateway.cluster.stores import AskAll
from gateway.core.model import Claim, Known, ObjectKey
from gateway.operations import cluster_writes
from gateway.operations.cluster_writes import ClusterWrites
from gateway.origin.client import OriginRequest
from gateway.s3.xml import text_of
from gateway.writeback import order
from tests.simulation.clients import PART_BYTES
from tests.simulation.cluster import redis_model
from tests.simulation.cluster.test_cluster import quiet
from tests.simulation.dialects import DIALECTS, WRITING
from tests.simulation.origins import SENDER, ProcessOrigin, SimulatedOrigin
from tests.simulation.test_rules import commits_are_lost, nobody_else_is_thought_of, others_are_seen_where_nobody_is
from tests.simulation.traffic import Traffic
from tests.simulation.virtual_time import VirtualClock, VirtualTimeLoop
from tests.simulation.world import Setting
from tests.simulation.writing.judge import WRITING_RULES, Question, SharedHistory, Try, WritingJudge
from tests.simulation.writing.servers import Connected
from tests.simulation.writing.world import BUCKET, WritingWorld, play_writing

__all__ = ["quiet"]

SEED = int(os.environ.get("FOREBAY_SIMULATION_SEED", "20261129"))
HISTORIES = int(os.environ.get("FOREBAY_SIMULATION_HISTORIES", "2"))
HISTORIES_UNTIL_SEEN = 40

Patch = pytest.MonkeyPatch


def told(world: WritingWorld) -> str:
    return "\n".join([*world.said[-60:], *(f"seed {world.seed}: {one}" for one in world.judge.violations)])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rules_hold() -> None:
    for seed in range(SEED, SEED + HISTORIES):
        world = play_writing(Setting(seed, WRITING, 50))
        assert not world.judge.violations, told(world)
        assert world.answered["HEAD 200"] > 5


@pytest.mark.slow
def test_a_seed_replays() -> None:
    setting = Setting(SEED, WRITING, 15)
    assert play_writing(setting).said == play_writing(setting).said


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_it_is_the_node_that_has_an_upload_of_which_conflicts_come(monkeypatch: Patch, cut: int) -> None:
    """One node flushes a key, and another that the bucket does not answer acknowledges an upload of it: a conflict
    (12.14). The node that is asked for the Complete hands it on, and what that one sees of the bucket means nothing."""

    async def run(world: WritingWorld) -> None:
        first, has_it, asked = nodes = list(world.nodes.values())
        await asyncio.gather(*(one.boot() for one in nodes))
        await asyncio.sleep(15.0)
        for node in nodes:
            assert await world._put(node, "back/known", world.value())
        await asyncio.sleep(60.0)
        key, part = "back/k0", world.value().ljust(PART_BYTES)
        begun = await world.ask(has_it, "POST", f"/{key}?uploads")
        upload_id = text_of(begun.body, "UploadId") if begun is not None else None
        stored = await world.ask(asked, "PUT", f"/{key}?partNumber=1&uploadId={upload_id}", part)
        assert await world._put(first, key, world.value())
        await asyncio.sleep(2.0)
        nodes[cut].is_cut_from_bucket = True
        assert upload_id is not None
        assert stored is not None
        await world._complete(asked, key, upload_id, [(stored.headers["etag"], part)])
        attempts = world.judge.of(BUCKET, key).tries()
        assert [(one.acknowledged, one.absorbed) for one in attempts] == [(True, True)] * 2
        assert [one.is_blind for one in attempts] == [False, cut == 1]
        await world._end()
        assert bool(world.kept().conflicts) == (cut == 1)

    monkeypatch.setattr(WritingWorld, "run", run)
    world = play_writing(Setting(SEED, WRITING))
    assert not world.judge.violations, told(world)


def test_a_write_with_a_condition_may_wait_for_a_conflict_beside_it(monkeypatch: Patch) -> None:
    """As a marker does: on another node, for as long as nobody decides."""

    async def run(world: WritingWorld) -> None:
        has_it, other, _ = nodes = list(world.nodes.values())
        await asyncio.gather(*(one.boot() for one in nodes))
        await asyncio.sleep(15.0)
        for node in nodes:
            assert await world._put(node, "back/known", world.value())
        world._calm_at = world.clock.monotonic()
        await asyncio.sleep(60.0)
        assert await world._put(has_it, "back/o0", world.value())
        world.origin.write_as_others(BUCKET, "back/o0", b"theirs")
        await asyncio.sleep(10.0)
        assert world.kept().conflicts == {(BUCKET, "back/o0")}
        assert not await world._put(other, "back/new", world.value(), If_None_Match="*")
        assert world.answered["PUT 503"] == 1

    monkeypatch.setattr(WritingWorld, "run", run)
    world = play_writing(Setting(SEED, WRITING))
    assert not world.judge.violations, told(world)


@pytest.mark.parametrize(
    ("is_blind", "arrived", "may_conflict"), [(True, 10.0, True), (False, 10.0, False), (True, 1.0, False)]
)
def test_a_node_without_the_bucket_may_meet_what_another_has_flushed_seconds_before(
    *, is_blind: bool, arrived: float, may_conflict: bool
) -> None:
    """12.14 (c) However long before that it was acknowledged."""
    history = SharedHistory(arrived=[(arrived, b"earlier")])
    earlier = Try(b"earlier", 0.5, 0.6, acknowledged=True, absorbed=True, node="a")
    history.attempts += [earlier, Try(b"later", 12.0, 12.1, acknowledged=True, absorbed=True, is_blind=is_blind)]
    assert history.may_conflict(b"earlier", unclear_seconds=5.0) == may_conflict


ASKED_IN_TIME = Question(1.5, "fixed/k0")


@pytest.mark.parametrize("asked", [ASKED_IN_TIME, Question(1.5, "fixed/", is_list=True)])
@pytest.mark.parametrize("answered_first", [False, True])
def test_until_a_write_is_answered_a_node_may_show_what_it_has_learned_since_that_began(
    asked: Question, *, answered_first: bool
) -> None:
    """12.14 Although another node has shown the write already."""
    assert not wrong_where_older_is_shown(asked, answered_first=answered_first)


@pytest.mark.parametrize(
    ("asked", "how"),
    [
        (Question(0.5, "fixed/k0"), {}),  # before the node told the others that it began the write
        (Question(2.05, "fixed/k0"), {}),  # after the bucket had it
        (Question(1.5, "fixed/k1"), {}),
        (ASKED_IN_TIME, {"arrives": False}),  # another node has it pending
        (ASKED_IN_TIME, {"absorbed": True}),
    ],
)
@pytest.mark.parametrize("answered_first", [False, True])
def test_what_was_seen_stays_where_nothing_was_learned_meanwhile(
    asked: Question, how: Mapping[str, bool], *, answered_first: bool
) -> None:
    assert wrong_where_older_is_shown(asked, answered_first=answered_first, **how) == ["what was seen stays"]


def wrong_where_older_is_shown(
    asked: Question, *, answered_first: bool, arrives: bool = True, absorbed: bool = False
) -> list[str]:
    """A write begins at 1.0, the bucket has it at 2.0, a node shows it at 2.1, and it is answered at 2.5. A read that
    began at 2.2 shows the version before, at a node that has asked that of the bucket."""
    with closing(VirtualTimeLoop()) as loop:
        judge = WritingJudge(
            SimulatedOrigin(DIALECTS["aws"], VirtualClock(loop), Random(0), _nothing, Traffic(_nothing))
        )
        judge.questions_of = lambda node: [asked] if node == "asks" else []
        write = Try(b"new", 1.0, absorbed=absorbed, seen_at=2.1)
        history = judge.of(BUCKET, "fixed/k0")
        history.attempts += [Try(b"old", 0.0, 0.1, acknowledged=True), write]
        history.arrived += [(0.05, b"old"), (2.0, b"new")][: 2 if arrives else 1]

        def answer() -> None:
            write.ended, write.acknowledged = 2.5, True
            judge.answered_write(BUCKET, "fixed/k0", write)

        def show() -> None:
            judge.shown(BUCKET, "fixed/k0", b"old", "asks", 2.2, "HEAD")

        for step in (answer, show) if answered_first else (show, answer):
            step()
        return [one.rule for one in judge.violations]


def _nothing(*_: object) -> None:
    """Do nothing, so that no node is told."""


# What is broken, of each rule


def changes_are_not_applied(patch: Patch) -> None:
    async def apply(*_: Any) -> None:
        """As if this process had heard of no change."""

    patch.setattr(ClusterWrites, "apply", apply)


def claims_are_not_made(patch: Patch) -> None:
    async def claim(registry: RedisRegistry, claim: Claim) -> Known:
        return (await registry.look([claim.key]))[0]

    async def confirm(*_: Any) -> None:
        """Nobody was told of anything."""

    patch.setattr(RedisRegistry, "claim", claim)
    patch.setattr(RedisRegistry, "confirm", confirm)


def no_other_node_is_asked(patch: Patch) -> None:
    async def look(_: AskAll, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        return [Known(stamp=None) for _ in keys]

    patch.setattr(AskAll, "look", look)


def what_goes_with_a_run_is_remembered(patch: Patch) -> None:
    async def begin_anew(beats: RegistryBeats, sequence: int) -> None:
        beats._is_outdated, beats._horizon = False, sequence

    patch.setattr(RegistryBeats, "_begin_anew", begin_anew)


def the_end_of_a_write_is_not_told(patch: Patch) -> None:
    async def end(*_: Any) -> None:
        """Who has asked the bucket meanwhile goes on with that."""

    patch.setattr(RedisRegistry, "end", end)


def the_beginning_of_a_write_is_not_told(patch: Patch) -> None:
    """Who remembers the version before shows it while others see the new one at the bucket already, for longer."""
    real = RedisRegistry.begin

    async def end(registry: RedisRegistry, keys: Sequence[ObjectKey]) -> None:
        await asyncio.sleep(0.5)
        await real(registry, keys)

    patch.setattr(RedisRegistry, "end", end)
    patch.setattr(RedisRegistry, "begin", RedisRegistry.look)


def nodes_sign_before_they_tell(patch: Patch) -> None:
    async def put_all(*_: Any) -> None:
        """Another time."""

    patch.setattr(RegistryBeats, "_put_all", put_all)


def an_emptied_server_still_answers(patch: Patch) -> None:
    patch.setattr(Connected, "_knows", lambda *_: True)


def claims_are_not_confirmed(patch: Patch) -> None:
    async def confirm(*_: Any) -> None:
        """Whatever has become of Redis."""

    patch.setattr(RedisRegistry, "confirm", confirm)


def only_the_last_claim_of_a_key_is_kept(patch: Patch) -> None:
    """Whichever write is committed last."""
    patch.setattr(redis_model, "_without", lambda *_: [])


def who_is_away_is_not_told_of(patch: Patch) -> None:
    patch.setattr(RegistryBeats, "_others", lambda *_: [])


def conditions_are_dropped(patch: Patch) -> None:
    real = ProcessOrigin.send

    async def send(origin: ProcessOrigin, request: OriginRequest) -> Any:
        headers = {name: value for name, value in request.headers.items() if name != "if-none-match"}
        return await real(origin, replace(request, headers=headers))

    patch.setattr(ProcessOrigin, "send", send)


def what_is_done_is_sent_again(patch: Patch) -> None:
    """By a rogue, in the name of a background process."""
    real = ProcessOrigin.send

    async def again(origin: ProcessOrigin, request: OriginRequest) -> None:
        stored = origin._shared.current(request.bucket or "", request.key or "")
        await asyncio.sleep(15.0)
        token = SENDER.set("background")
        if stored is not None:
            origin._shared.inner.buckets[request.bucket or ""].put(stored)
        SENDER.reset(token)

    async def send(origin: ProcessOrigin, request: OriginRequest) -> Any:
        response = await real(origin, request)
        if request.method == "PUT" and request.key and response.status == 200 and not request.query:
            ROGUES.add(asyncio.get_running_loop().create_task(again(origin, request)))
        return response

    patch.setattr(ProcessOrigin, "send", send)


ROGUES: set[asyncio.Task[None]] = set()


def answers_break(patch: Patch) -> None:
    real = ClusterWrites.look

    async def look(writes: ClusterWrites, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        if any(key.key.endswith("k1") for key in keys):
            raise ZeroDivisionError
        return await real(writes, keys)

    patch.setattr(ClusterWrites, "look", look)


def markers_go_at_once(patch: Patch) -> None:
    patch.setattr(order, "is_marker", lambda *_: False)


def markers_heed_their_own_node_only(patch: Patch) -> None:
    async def earlier(*_: Any, **__: Any) -> None:
        """As if no other node had anything pending."""

    patch.setattr(EarlierWrites, "earlier", earlier)


def claims_stay(patch: Patch) -> None:
    async def withdraw(*_: Any) -> None:
        """Nobody looks for them."""

    patch.setattr(RegistryBeats, "settle", lambda *_: None)
    patch.setattr(RegistryBeats, "_withdraw", withdraw)


def no_run_is_ever_complete(patch: Patch) -> None:
    patch.setattr(scripts, "FIRST_SECONDS", 1e6)


def beats_end(patch: Patch) -> None:
    patch.setattr(registry_beats, "BEAT_SECONDS", 30.0)


def writes_wait_for_ever(patch: Patch) -> None:
    patch.setattr(cluster_writes, "PATIENCE_SECONDS", 1e6)


READS: Mapping[str, float] = {"put": 8.0, "race": 4.0, "read": 10.0, "look_around": 10.0, "pass_time": 2.0}
RACES: Mapping[str, float] = {"race": 10.0, "look_around": 4.0, "pass_time": 0.5}
REDIS: Mapping[str, float] = {**READS, "cut_redis": 1.5, "restart_redis": 2.0, "fail_over": 2.0, "heal": 3.0}
OVERTAKING: Mapping[str, float] = {"race": 12.0, "put": 12.0, "look_around": 8.0, "slow_disk": 3.0, "pass_time": 0.5}
AWAY: Mapping[str, float] = {**READS, "trouble": 2.0, "cut_bucket": 2.0, "heal": 1.5}
SAVES: Mapping[str, float] = {"save": 12.0, "trouble": 2.0, "heal": 0.7, "pass_time": 2.0}
"""Each object is written once, and stays pending."""


@dataclass(frozen=True)
class Case:
    """A rule, what is broken, and the kind of history in which that shows."""

    rule: str
    broken: Callable[[Patch], None]
    often: Mapping[str, float] = field(default_factory=lambda: REDIS)
    steps: int = 60
    first: int = 0
    """The seed with which to begin: it showed soon when this was written, and others are tried where it does not."""


CASES = (
    Case("answered writes are read", changes_are_not_applied, READS),
    Case("answered writes are read", claims_are_not_made, AWAY),
    Case("answered writes are read", no_other_node_is_asked, {**AWAY, "cut_redis": 2.0}),
    Case("answered writes are read", what_goes_with_a_run_is_remembered, first=7),
    Case("answered writes are read", an_emptied_server_still_answers, {**READS, "restart_redis": 4.0}, 100, first=13),
    Case("answered writes are read", the_end_of_a_write_is_not_told, READS),
    Case("answered writes are read", only_the_last_claim_of_a_key_is_kept, OVERTAKING, 100),
    Case("what was seen stays", the_beginning_of_a_write_is_not_told, RACES, 120),
    Case("nothing is lost", commits_are_lost, AWAY),
    Case("nothing comes back", what_is_done_is_sent_again, AWAY),
    Case("others are kept", nobody_else_is_thought_of, {**AWAY, "others_write": 6.0}),
    Case("conflicts are with others", others_are_seen_where_nobody_is, READS),
    Case("created once", conditions_are_dropped, {"create": 5.0, "pass_time": 1.0}),
    Case("markers come last", markers_go_at_once, {**AWAY, "save": 10.0}),
    Case("markers come last", markers_heed_their_own_node_only, {**AWAY, "save": 10.0}),
    Case("who is believed knows", nodes_sign_before_they_tell, {**AWAY, "restart_redis": 2.0}, first=5),
    Case("who is believed knows", claims_are_not_confirmed, {**SAVES, "fail_over": 3.0, "slow_disk": 3.0}, first=7),
    Case("who is believed knows", who_is_away_is_not_told_of, {**SAVES, "kill_node": 2.0, "restart_redis": 2.0}),
    Case("nothing is left", claims_stay, READS),
    Case("all is well in quiet", no_run_is_ever_complete),
    Case("all is well in quiet", beats_end),
    Case("nobody waits for long", writes_wait_for_ever, AWAY),
    Case("requests do not fail inside", answers_break, READS),
)


def test_every_rule_has_a_case() -> None:
    assert {one.rule for one in CASES} == set(WRITING_RULES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=[f"{one.broken.__name__} {one.rule}" for one in CASES])
def test_what_is_broken_is_seen(case: Case, monkeypatch: Patch) -> None:
    like = Setting(0, WRITING, case.steps, [case.rule], often=case.often)
    settings = [replace(like, seed=seed) for seed in range(case.first, case.first + HISTORIES_UNTIL_SEEN)]
    assert not play_writing(settings[0]).judge.violations
    case.broken(monkeypatch)
    assert any(play_writing(one).judge.violations for one in settings)
