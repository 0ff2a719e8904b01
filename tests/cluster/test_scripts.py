"""The registry's scripts, as a real server runs them, and their model, which the simulator uses: both do the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis

from gateway.cluster import scripts
from gateway.cluster.scripts import ASK, BEAT, FORGET, SCRIPTS, Beat, Beaten, Entry, Script, Word
from gateway.core.model import CLAIMS_MAX
from tests.simulation.cluster.redis_model import RedisModel
from tests.support.redis_server import RedisServer, programs

PREFIX = scripts.prefix_of("train")
NODES = [f"node-{number}" for number in range(5)]
MARK = b"the mark"
BUCKETS = ["one", "two"]
VERBS = ("look", "stamp", "claim", "put", "settle", "rows", "own", "holders", "above")
KEYS = [f"{name}{more}" for name in ("a", "a/b", "ä", "b", "b\0c") for more in ("", "/", "-1", "-2")]


@pytest.fixture(scope="module", params=sorted(programs()))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    directory = tmp_path_factory.mktemp("redis")
    with RedisServer(directory, program=programs()[request.param]) as started, started.client as client:
        yield client


class Pair:
    """A server and a model of it, which are asked the same at the same time."""

    def __init__(self, server: redis.Redis) -> None:
        server.flushall()
        server.set(f"{PREFIX}i", MARK)
        self.server = server
        clock = "redis.call('LRANGE', fb .. 'time', 0, 1)"
        self._hashes = {one.name: server.script_load(one.text.replace("redis.call('TIME')", clock)) for one in SCRIPTS}
        self.model = RedisModel()
        self._set_clock()

    def _set_clock(self) -> None:
        now = self.model.now_ms
        with self.server.pipeline() as steps:
            steps.delete(f"{PREFIX}time").rpush(f"{PREFIX}time", now // 1000, now % 1000 * 1000).execute()

    def advance(self, milliseconds: int) -> None:
        self.model.now_ms += milliseconds
        self._set_clock()

    def call(self, script: Script, words: Sequence[Word]) -> Any:
        real = self.server.evalsha(self._hashes[script.name], 1, PREFIX, *words, MARK)
        model = self.model.call(script, words)
        if script is BEAT:
            real, model = (in_order(Beaten(*one)) for one in (real, model))
        assert real == model, f"{script.name} {words}"
        return real


def in_order(beaten: Beaten) -> Beaten:
    """Redis tells sets and hashes in any order."""
    told = beaten.members
    pairs = sorted(zip(told[::2], told[1::2], strict=True)) if told is not None else None
    members = None if pairs is None else [one for pair in pairs for one in pair]
    return beaten._replace(missing=sorted(beaten.missing), members=members)


class Dice(random.Random):
    """Random words for the scripts."""

    def ask(self) -> list[Word]:
        questions = [word for _ in range(self.randint(1, 4)) for word in self.question()]
        return [f"store-{self.randint(0, 2)}", *questions]

    def question(self) -> list[Word]:
        verb, bucket = self.choice(list(VERBS)), self.choice(BUCKETS)
        keys = [scripts.key_bytes(one) for one in self.sample(KEYS, self.randint(1, 4))]
        if verb == "rows":
            return scripts.rows_question(bucket, self.choice(keys), self.choice([None, self.choice(KEYS).encode()]))
        if verb == "holders":
            stop = self.choice([b"\xff", self.choice(KEYS).encode()])
            return scripts.holders_question(bucket, self.choice([b"", *keys]), stop)
        if verb == "above":
            return scripts.question(verb, "", [self.randint(0, 3000)])
        if verb == "own":
            return scripts.own_question(self.choice([None, (bucket.encode(), self.choice(keys))]))
        tokens = ["t1", "t2", f"t1#{self.randint(1, 99)}"]
        if verb in ("look", "stamp"):
            return scripts.question(verb, bucket, keys)
        words = list[Word]()
        for one in keys:
            words += [one, self.choice(tokens)]
            words += [self.randint(0, 1000)] if verb == "put" else []
        return scripts.question(verb, bucket, words)

    def beat(self, pair: Pair) -> list[Word]:
        has = pair.model.content
        others = [(name, b"told") for name in self.sample(NODES, self.randint(0, 2))] if self.random() < 0.1 else []
        return Beat(
            node=self.choice(NODES),
            info=b"info %d" % self.randint(1, 2),
            acknowledges=self.random() < 0.5,
            run=f"run-{1 + (self.random() < 0.03)}",
            signs=self.random() < 0.6,
            seen=max(0, has.version - self.randint(0, 2)),
            horizon=max(0, has.sequence - self.randint(0, 30)),
            has=self.choice([None, max(0, has.version - self.randint(0, 1))]),
            others=others,
        ).words()


def play(server: redis.Redis, seed: int, steps: int) -> Pair:
    """Let both do random things; both must do the same."""
    dice, pair = Dice(seed), Pair(server)
    for _ in range(steps):
        kind = dice.random()
        if kind < 0.75:
            pair.call(ASK, dice.ask())
        elif kind < 0.98:
            pair.advance(
                dice.choice([0, 10, 1500, 6000, dice.choice([700_000, -3_600_000]) if dice.random() < 0.05 else 0])
            )
            pair.call(BEAT, dice.beat(pair))
        else:
            pair.call(FORGET, [dice.choice(NODES), f"store-{dice.randint(0, 2)}", dice.randint(0, 1)])
    return pair


def test_a_claim_is_over_that_is_earlier_than_another_stores_write(server: redis.Redis) -> None:
    """12.4 A failover has lost its end, and the later claim of the store that tells now what it has pending."""
    pair = Pair(server)

    def store_of(order: int) -> bytes:
        pair.call(ASK, ["two", *scripts.question("put", "bucket", ["key", "t2", order])])
        return Entry.read(pair.call(ASK, ["two", *scripts.question("look", "bucket", ["key"])])[1][0][0]).store

    pair.call(ASK, ["one", *scripts.question("claim", "bucket", ["key", "t1"])])
    assert [store_of(order) for order in (0, 1, 2)] == [b"one", b"one", b"two"]
    [[refused], owned] = pair.call(
        ASK, ["one", *scripts.question("claim", "bucket", ["key", "t3"]), *scripts.own_question(None)]
    )[1]
    assert (Entry.read(refused).store, owned) == (b"two", [])


def test_the_model_does_what_a_server_does(server: redis.Redis) -> None:
    play(server, 1, 1500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_the_model_does_what_a_server_does_for_long(server: redis.Redis, seed: int) -> None:
    play(server, seed, 5000)


def test_the_last_claims_of_a_key_are_kept(server: redis.Redis) -> None:
    """What is settled later settles no others."""
    pair, count = Pair(server), CLAIMS_MAX + 2
    for number in range(count):
        words: list[Word] = ["key", f"t{number}"]
        [value] = pair.call(ASK, ["own", *scripts.question("claim", "one", words)])[1][0]
    assert Entry.read(value).tokens == b",".join(b"t%d#%d" % (one, one + 1) for one in range(2, count))
    for number in range(count):
        assert server.zcard(f"{PREFIX}s:own") == 1
        pair.call(ASK, ["own", *scripts.question("settle", "one", ["key", f"t{number}"])])
    assert server.zcard(f"{PREFIX}s:own") == 0


def test_what_is_left_in_the_server_is_what_the_registry_has(server: redis.Redis) -> None:
    """Entries, their order, stamps and stores' lists belong to each other; nothing is left behind when all is swept."""
    pair = play(server, 99, 300)
    for bucket in BUCKETS:
        keys = server.zrange(f"{PREFIX}k:{bucket}", 0, -1)
        assert sorted(server.hkeys(f"{PREFIX}e:{bucket}")) == keys
        for key in keys:
            stamp, claim, tokens, store = Entry.read(server.hget(f"{PREFIX}e:{bucket}", key))
            name = bucket.encode() + b"\0" + key
            assert server.zscore(f"{PREFIX}t", name) == (stamp or None)
            assert (claim > 0) == bool(store)
            if store:
                assert server.zscore(f"{PREFIX}s:{store.decode()}", name) == 0
                words = [word for token in tokens.split(b",") for word in (key, token)]
                pair.call(ASK, [store, *scripts.question("settle", bucket, words)])
    pair.advance(6000)
    beat = Beat("node-0", b"", False, pair.model.content.run.decode(), True, 0, pair.model.content.sequence, None)
    pair.call(BEAT, beat.words())
    assert [name for name in server.scan_iter(f"{PREFIX}[ekst]*") if b"time" not in name] == []
