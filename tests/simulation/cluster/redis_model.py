"""What the registry's scripts mean (gateway/cluster/scripts.py), over plain Python: a server, its runs and failovers.

A test holds it equal to a real server (tests/cluster/test_scripts.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.cluster import scripts
from gateway.cluster.redis_link import OTHER_RUN, Answer
from gateway.cluster.scripts import Script, Word
from gateway.core.errors import RegistryAway
from gateway.core.model import CLAIMS_MAX

Entry = tuple[int, int, bytes, bytes]
Name = tuple[bytes, bytes]
"""A bucket and a key."""

_NOTHING: Entry = (0, 0, b"-", b"")


@dataclass
class Content:
    """What a failover may lose the last of."""

    sequence: int = 0
    floor: int = 0
    entries: dict[bytes, dict[bytes, Entry]] = field(default_factory=dict)
    stamps: dict[Name, int] = field(default_factory=dict)
    pending: dict[bytes, set[Name]] = field(default_factory=dict)
    stores: set[bytes] = field(default_factory=set)
    members: dict[bytes, bytes] = field(default_factory=dict)
    published: dict[bytes, int] = field(default_factory=dict)
    version: int = 0
    alive: dict[bytes, int] = field(default_factory=dict)
    away: dict[bytes, int] = field(default_factory=dict)
    acknowledging: set[bytes] = field(default_factory=set)
    signed: set[bytes] = field(default_factory=set)
    complete: bool = False
    run: bytes = b""
    first_beat: int = 0
    horizons: dict[bytes, int] = field(default_factory=dict)
    seen: dict[bytes, int] = field(default_factory=dict)


def _without(tokens: bytes, token: bytes) -> list[bytes]:
    """Return the claims of other writes."""
    return [one for one in tokens.split(b",") if one != b"-" and not _has(one, token)]


def _has(tokens: bytes, token: bytes) -> bool:
    return any(token in (one, one.rpartition(b"#")[0]) for one in tokens.split(b","))


def _words(words: Sequence[Word]) -> list[bytes]:
    return [one if isinstance(one, bytes) else str(one).encode("utf-8", "surrogatepass") for one in words]


class RedisModel:
    """A server. `now_ms` is its clock."""

    def __init__(self, run: str = f"{1:016x}") -> None:
        self.run = run
        self.now_ms = 1_000_000
        self.skew_ms = 0
        self.content = Content()
        self._replica = copy.deepcopy(self.content)

    def replicate(self) -> None:
        """Let the replica have all that there is until now."""
        self._replica = copy.deepcopy(self.content)

    def replica(self) -> Content:
        """Return what the replica has."""
        return copy.deepcopy(self._replica)

    def fail_over(self, run: str) -> None:
        """The replica becomes the primary: what it has not got is lost."""
        self.run, self.content = run, self.replica()

    def restart_empty(self, run: str) -> None:
        self.run, self.content = run, Content()
        self.replicate()

    def call(self, script: Script, words: Sequence[Word]) -> Any:
        """Return what the server replies."""
        run = {scripts.ASK.name: self._ask, scripts.BEAT.name: self._beat, scripts.FORGET.name: self._forget}
        return run[script.name](_words(words))

    # Entries

    def _read(self, name: Name) -> Entry:
        return self.content.entries.get(name[0], {}).get(name[1], _NOTHING)

    def _value(self, name: Name) -> bytes | None:
        entry = self._read(name)
        return None if entry is _NOTHING else b"%d %d %s %s" % entry

    def _write(self, name: Name, entry: Entry) -> None:
        self.content.entries.setdefault(name[0], {})[name[1]] = entry

    def _count(self) -> int:
        self.content.sequence += 1
        return self.content.sequence

    def _stamp(self, name: Name, sequence: int, rest: tuple[int, bytes, bytes]) -> None:
        self.content.stamps[name] = sequence
        self._write(name, (sequence, *rest))

    def _claim(self, own: bytes, name: Name, token: bytes, sequence: int) -> None:
        stamp, before, tokens, _ = self._read(name)
        claims = [*_without(tokens, token)[1 - CLAIMS_MAX :], b"%s#%d" % (token, sequence)]
        self.content.stores.add(own)
        self.content.pending.setdefault(own, set()).add(name)
        self._write(name, (stamp, before or sequence, b",".join(claims), own))

    def _put(self, own: bytes, name: Name, token: bytes, order: int) -> None:
        stamp, _, tokens, store = self._read(name)
        if store not in (b"", own) and int(tokens.rpartition(b"#")[2]) < order:
            self.content.pending[store].discard(name)
            self._write(name, (stamp, 0, b"-", b""))
            store = b""
        if store == b"" or (store == own and not _has(tokens, token)):
            self._claim(own, name, token, self._count())

    def _settle(self, own: bytes, name: Name, token: bytes) -> None:
        stamp, claim, tokens, store = self._read(name)
        if store != own or not _has(tokens, token):
            return
        if left := _without(tokens, token):
            self._write(name, (stamp, claim, b",".join(left), own))
        else:
            self.content.pending[own].discard(name)
            self._stamp(name, self._count(), (0, b"-", b""))

    # Scripts

    def _ask(self, words: list[bytes]) -> Any:
        own, at, answers = words[0], 1, []
        while at < len(words):
            count = int(words[at + 2])
            answers.append(self._answer(own, words[at], words[at + 1], words[at + 3 : at + 3 + count]))
            at += 3 + count
        return [self.content.floor, answers]

    def _answer(self, own: bytes, verb: bytes, bucket: bytes, words: list[bytes]) -> Any:
        if verb == b"rows":
            return self._rows(bucket, *words)
        if verb == b"own":
            behind = words[0][1:]
            found = sorted(b"\0".join(one) for one in self.content.pending.get(own, ()))
            page = [one.split(b"\0", 1) for one in found if one > behind][: int(words[1])]
            return [[bucket, key, self._read((bucket, key))[2]] for bucket, key in page]
        if verb == b"holders":
            return self._holders(own, *words)
        if verb == b"above":
            self.content.sequence = max(self.content.sequence, int(words[0]))
            return 0
        if verb in (b"look", b"stamp"):
            names = [(bucket, key) for key in words]
            sequence = self._count() if verb == b"stamp" else 0
            for name in names if sequence else ():
                self._stamp(name, sequence, self._read(name)[1:])
            return [self._value(name) for name in names]
        if verb == b"put":
            self.content.stores.add(own)
            for key, token, order in zip(words[::3], words[1::3], words[2::3], strict=True):
                self._put(own, (bucket, key), token, int(order))
            return 0
        claims = [((bucket, key), token) for key, token in zip(words[::2], words[1::2], strict=True)]
        if verb == b"claim":
            if all(self._read(name)[3] in (b"", own) for name, _ in claims):
                sequence = self._count()
                values = []
                for name, token in claims:
                    self._claim(own, name, token, sequence)
                    values.append(self._value(name))
                return values
            return [self._value(name) for name, _ in claims]
        for name, token in claims:
            self._settle(own, name, token)
        return 0

    def _holders(self, own: bytes, start: bytes, stop: bytes) -> Any:
        has = self.content
        has.stores = {one for one in has.stores if has.pending.get(one)}
        names = {one: [b"\0".join(name) for name in has.pending[one]] for one in has.stores if one != own}
        return sorted(one for one, found in names.items() if any(start[1:] <= name < stop[1:] for name in found))

    def _rows(self, bucket: bytes, start: bytes, stop: bytes, count: bytes) -> Any:
        keys = sorted(self.content.entries.get(bucket, {}))
        keys = [one for one in keys if one >= start[1:] and (stop == b"+" or one < stop[1:])][: int(count)]
        return [keys, [self._value((bucket, key)) for key in keys]]

    def _beat(self, words: list[bytes]) -> Any:
        node, info, acknowledges, run, signs, seen, horizon, held, lease, first, away, *others = words
        has, now = self.content, self.now_ms
        if has.run != run:
            has.run, has.first_beat, has.complete, has.signed = run, now, False, set()
            has.horizons, has.seen = {}, {}
        has.first_beat = min(has.first_beat, now)
        for moments in (has.alive, has.away):
            moments.update({other: now for other, at in moments.items() if at > now})
        for name, told in zip(others[::2], others[1::2], strict=True):
            if name not in has.members:
                has.members[name], has.away[name] = told, now
                has.acknowledging.add(name)
                has.version += 1
        has.version += node not in has.alive or node in has.away
        has.away.pop(node, None)
        has.alive[node] = now
        if has.members.get(node) != info:
            has.version += 1
            has.members[node], has.published[node] = info, has.version
        (has.acknowledging.add if acknowledges == b"1" else has.acknowledging.discard)(node)
        for other in [one for one, at in has.alive.items() if at <= now - int(lease)]:
            for of_living in (has.alive, has.horizons, has.seen):
                of_living.pop(other, None)
            has.away[other] = now
            has.version += 1
        for other in [one for one, at in has.away.items() if at <= now - int(away) and one not in has.acknowledging]:
            for of_all in (has.members, has.published, has.away):
                of_all.pop(other, None)
            has.version += 1
        if signs == b"1":
            has.signed.add(node)
        missing = set() if has.complete else has.acknowledging - has.signed
        if not missing and signs == b"1" and has.first_beat <= now - int(first):
            has.complete = True
        has.seen[node], has.horizons[node] = int(seen), int(horizon)
        has.floor = max(has.floor, min(has.horizons.values()))
        swept = sorted((stamp, b"\0".join(name)) for name, stamp in has.stamps.items() if stamp <= has.floor)
        swept = swept[: scripts.SWEPT_MAX]
        for _, joined in swept:
            bucket, key = joined.split(b"\0", 1)
            entry = self._read((bucket, key))
            del has.stamps[bucket, key]
            if entry[3]:
                self._write((bucket, key), (0, *entry[1:]))
            else:
                del has.entries[bucket][key]
        members = [one for pair in has.members.items() for one in pair] if held and has.version != int(held) else None
        is_known = min(has.seen.values()) >= has.published.get(node, 0)
        of_run = [int(node in has.signed), int(has.complete), len(missing), sorted(missing)]
        return [has.sequence, has.floor, len(swept), has.version, int(is_known), *of_run, members]

    def _forget(self, words: list[bytes]) -> Any:
        (node, own, only_asks), has = words, self.content
        if node in has.alive:
            return -1
        left = self.content.pending.get(own, set())
        if only_asks == b"1":
            return len(left)
        for joined in sorted(b"\0".join(one) for one in left)[:500]:
            bucket, key = joined.split(b"\0", 1)
            left.discard((bucket, key))
            self._stamp((bucket, key), self._count(), (0, b"-", b""))
        if not left:
            for of_all in (has.members, has.published, has.away):
                of_all.pop(node, None)
            has.acknowledging.discard(node)
            has.signed.discard(node)
            has.version += 1
        return len(left)


class ModelLink:
    """As `RedisLink`, to a model. `problem`: why it cannot be reached."""

    def __init__(self, model: RedisModel, store: str) -> None:
        self.model = model
        self.store = store
        self.problem = ""
        self.about: Mapping[str, str] = {}
        self.run_of_connection = ""

    async def run_of_primary(self) -> str:
        self._check()
        return self.run_of_connection

    async def ask(self, question: Sequence[Word], run: str = "") -> Answer:
        self._check()
        if run not in ("", self.run_of_connection):
            raise RegistryAway(OTHER_RUN)
        floor, (value,) = self.model.call(scripts.ASK, [self.store, *question])
        return Answer(self.run_of_connection, int(floor), value)

    async def call(self, script: Script, words: Sequence[Word]) -> Answer:
        self._check()
        return Answer(self.run_of_connection, 0, self.model.call(script, words))

    def renew(self) -> None:
        self.run_of_connection = ""

    def _check(self) -> None:
        if self.problem:
            raise RegistryAway(self.problem)
        if self.run_of_connection != self.model.run:
            broken, self.run_of_connection = self.run_of_connection, self.model.run
            if broken:
                raise RegistryAway("the connection has broken")
