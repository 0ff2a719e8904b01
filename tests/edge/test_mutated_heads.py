"""Millions of changed heads: what is prepared takes none that the whole way refuses, and none for another one.

Heads of real clients and of generated ones are changed by chance and on purpose, and many are signed again by somebody
who has the secret: as the whole way understands them, or as the kind of head that they fit. Whatever the short way
accepts, the whole way accepts, for the same caller and as the same request. Kinds of heads are learned from changed
heads, too. FOREBAY_HEAD_MUTATIONS and FOREBAY_HEAD_SEED prolong and repeat it, batch by batch; with FOREBAY_HEAD_RECORD
(a file) it goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from urllib.parse import quote

import pytest

from gateway.core.errors import S3Error
from gateway.edge import prepared
from gateway.edge.access import Authenticator, Caller, ConfiguredKeyring, Key, authorise
from gateway.edge.asgi import S3App
from gateway.edge.prepared import ConnectionHeads, PreparedRequests
from gateway.edge.request_parsing import HeadParser, RequestHead
from gateway.operations.context import AppContext
from gateway.operations.read_wishes import is_plain
from gateway.policy.slots import Grant, Prefix, Slots
from gateway.s3.prepared_head import Conditions, HeadValues, PreparedHead
from gateway.s3.requests import S3Request, encode_path, parse_request, strip_signature_parameters
from gateway.s3.signature_v4 import canonical_path, canonical_query, format_timestamp, sign, signing_key, string_to_sign
from tests.s3.test_prepared_head import NAMES, Client
from tests.support.client_heads import CLIENT_HEADS, REGION, Signing
from tests.support.head_mutations import first_head, mutated
from tests.support.manual_clock import ManualClock

MUTATIONS = int(os.environ.get("FOREBAY_HEAD_MUTATIONS", "8000"))
SEED = int(os.environ.get("FOREBAY_HEAD_SEED", random.SystemRandom().randrange(2**32)))
RECORD = os.environ.get("FOREBAY_HEAD_RECORD", "")

BATCH, SESSION = 10_000, 200
"""Mutations that follow from one seed, and those that share kinds of heads, keys and a day."""

BASE_DOMAINS = ("s3.example",)
SLOTS = Slots([])
CONDITIONS = ("range", "if-match", "if-none-match")
HOST = "127.0.0.1:9000"


Maker = Callable[[float], bytes]
"""A fresh head of one kind, signed at a time."""


class Difference(AssertionError):
    """The short way says something that the whole way does not."""


class Accepted(NamedTuple):
    """What the short way makes of a head: what its object was asked for, and what it was asked for now."""

    head: PreparedHead
    values: HeadValues
    key: Key
    request: S3Request
    conditions: Conditions


class Whole(NamedTuple):
    """What the whole way makes of it."""

    head: RequestHead
    request: S3Request
    caller: Caller


class Reading:
    """In the place of a `PreparedRead`: there is every object, and it stays as it is."""

    def __init__(self, request: S3Request) -> None:
        self.request = request

    def is_pending(self) -> bool:
        return False

    def holds(self) -> bool:
        return True

    def answer(self, conditions: Conditions) -> tuple[S3Request, Conditions]:
        """Range, If-Match, If-None-Match."""
        return self.request, conditions


class Asking(PreparedRequests):
    """Prepares everything the first time; says what it has understood in place of an answer."""

    key: Key

    def answer(self, head: PreparedHead, values: HeadValues) -> Any:
        said: Any = super().answer(head, values)
        return None if said is None else Accepted(head, values, self.key, *said)

    def _is_worth_it(self, place: object) -> bool:
        return True


class NotingAuthenticator(Authenticator):
    """Tells `asking` whom it has found."""

    asking: Asking

    def key_of(self, head: PreparedHead, values: HeadValues) -> Key | None:
        key = super().key_of(head, values)
        if key is not None:
            self.asking.key = key
        return key


@pytest.fixture(autouse=True)
def _every_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        prepared, "prepare_read", lambda _, request, __: Reading(request) if request.key is not None else None
    )


def keys_of(rng: random.Random) -> list[Key]:
    """Two callers, one of whom may be revoked, with secrets and rights of the moment."""
    rights = (("a", "b"), rng.choice([("b",), ("a", "b"), ("c",)]))
    grants = [Grant([Prefix.parse(f"s3://bucket/{name}") for name in some], read_only=True) for some in rights]
    keys = [Key(name, f"{name}-{rng.randrange(3)}", None, one) for name, one in zip(("AK", "BK"), grants, strict=True)]
    return keys[: rng.choice([1, 2, 2, 2, 2])]


class Ways:
    """Both ways of one gateway, and the law between them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.seen = rng, Counter[str]()
        self.clock = ManualClock()
        self.clock.set_wall(rng.choice([rng.uniform(0, 10**7), 86_400 * rng.randrange(99) - rng.randrange(1200)]))
        self.keys = keys_of(rng)
        self.authenticator = NotingAuthenticator(ConfiguredKeyring(self.keys), self.clock)
        services = cast(AppContext, SimpleNamespace(slots=SLOTS))
        self.asking = self.authenticator.asking = Asking(S3App(services, self.authenticator, BASE_DOMAINS, "0"))
        self.reconnect()

    def rotate(self) -> None:
        """Under the kinds of heads that are known."""
        self.keys = keys_of(self.rng)
        self.authenticator._keyring = ConfiguredKeyring(self.keys)

    def reconnect(self) -> None:
        self.heads = ConnectionHeads(self.asking)

    def secret(self) -> str:
        """Mostly the right one of somebody."""
        return self.rng.choice([*(key.secret_access_key for key in self.keys)] * 10 + ["another"])

    def whole_way(self, raw: bytes) -> Whole | None:
        """None: it is refused."""
        try:
            return self._whole_way(raw)
        except S3Error:
            return None

    def _whole_way(self, raw: bytes) -> Whole:
        head = HeadParser(max_bytes=64 * 1024, max_headers=100).parse(raw)
        target = head.target
        request = parse_request(head.method, target.raw_path, target.raw_query, head.headers, BASE_DOMAINS)
        caller = self.authenticator.authenticate(request)
        authorise(request, caller.grant, SLOTS)
        return Whole(head, request, caller)

    def judge(self, raw: bytes) -> bool:
        """Hold the short way to the law, and let it learn; whether it accepts."""
        accepted = cast("Accepted | None", self.heads.answer(raw))
        if accepted is None:
            if self.rng.random() < 0.1:
                self.learn(raw)
            return False
        found = self.whole_way(raw)
        wrong = "the whole way refuses it" if found is None else difference(accepted, found)
        if wrong:
            raise Difference(f"{wrong}: {raw!r}, by the kind {accepted.head.pieces!r}{accepted.head.tail!r}")
        return True

    def learn(self, raw: bytes) -> None:
        found = self.whole_way(raw)
        if found is not None:
            self.seen["by the whole way alone"] += 1
            self.heads.learn(raw, found.request, found.caller, keep_alive=found.head.keep_alive)

    def signed_as_understood(self, raw: bytes) -> bytes:
        """With the signature that the whole way asks for, where that is all that it misses."""
        try:
            self._whole_way(raw)
        except S3Error as error:
            text, said = (error.elements.get(name, "") for name in ("StringToSign", "SignatureProvided"))
            scope = text.split("\n")[2].split("/") if text else []
            if len(scope) >= 4 and said:
                secret = self.secret_of(error.elements["AWSAccessKeyId"])
                signature = sign(signing_key(secret, scope[0], scope[1]), text)
                return raw.replace(said.encode("latin-1"), signature.encode(), 1)
        return raw

    def signed_as_it_fits(self, raw: bytes) -> bytes | None:
        """With the signature that a kind of head asks for, which it fits; None: it fits none that is signed so."""
        for head in self.heads._heads:
            values, by = head.match(raw), head.authorization
            if values is None or by is None:
                continue
            date, said = values.fields[head.date_at], values.fields[head.signature_at]
            path, query = canonical_path(values.raw_path).encode(), canonical_query(values.raw_query).encode()
            canonical = head.canonical % (path, query, *[values.fields[number] for number in head.signed])
            digest = hashlib.sha256(canonical).hexdigest()
            text = string_to_sign(date.decode("latin-1"), by.scope, digest)
            signature = sign(signing_key(self.secret_of(by.access_key_id), by.date, by.region), text)
            return raw.replace(said, signature.encode(), 1)
        return None

    def secret_of(self, access_key_id: str) -> str:
        right = [key.secret_access_key for key in self.keys if key.access_key_id == access_key_id]
        return right[0] if right and self.rng.random() < 0.95 else self.secret()


def difference(accepted: Accepted, found: Whole) -> str:
    """What the two ways do not understand alike; empty: nothing."""
    kind, values, key, asked, conditions = accepted
    head, request, caller = found
    both = {
        "the caller": (key.access_key_id, caller.access_key_id),
        "the rights": (id(key.grant), id(caller.grant)),
        "the signature": (kind.authorization is not None, caller.authorization is not None),
        "the end of the head": ((0, False, True), (head.body_length, head.expects_continue, head.keep_alive)),
        "the version": ((None, "1.1"), (head.target.authority, head.version)),
        "method and host": ((asked.method, asked.host), (request.method, request.host)),
        "the target": ((values.raw_path, values.raw_query), (request.raw_path, request.raw_query)),
        "what is asked for": (_asked(asked), _asked(request)),
        "checksums": (kind.asker[3], request.headers.get("x-amz-checksum-mode")),
        "the fields": (kind.headers(values), request.headers),
        "conditions": (
            dict(conditions),
            {name: request.headers[name] for name in CONDITIONS if name in request.headers},
        ),
        "nothing else": (True, is_plain(request) and (not request.query or is_id_or_signature(request))),
    }
    return ", ".join(f"{name}: {one!r} / {two!r}" for name, (one, two) in both.items() if one != two)


def is_id_or_signature(request: S3Request) -> bool:
    """Whether the query changes nothing."""
    return all(name == "x-id" for name, _ in strip_signature_parameters(request.query))


def _asked(request: S3Request) -> tuple[object, str | None, str | None]:
    return request.operation, request.bucket, request.key


def any_key(rng: random.Random) -> str:
    return rng.choice("aaabbbbc") + "".join(rng.choices("abcxyz019é ~+%/?#=&.-_;:@!$'()*,", k=rng.randrange(16)))


def any_range(rng: random.Random) -> str:
    first = rng.randrange(10 ** rng.randrange(1, 12))
    return rng.choice([f"bytes={first}-{first + rng.randrange(10**6)}", f"bytes={first}-", "bytes=-5"])


def any_query(rng: random.Random) -> str:
    return rng.choice([*[""] * 6, *["x-id=GetObject", "x-id=HeadObject"] * 2, "partNumber=1&versionId=a%20b"])


def recorded(rng: random.Random, ways: Ways) -> Maker:
    """Heads of a real client."""
    kind = CLIENT_HEADS[rng.choice([*CLIENT_HEADS])]
    by = Signing(rng.choice(["AK", "BK"]), "", HOST)

    def fresh(now: float) -> bytes:
        signing = Signing(by.access_key_id, ways.secret_of(by.access_key_id), by.host)
        values = {"range": any_range(rng), "amz-sdk-invocation-id": f"{rng.getrandbits(64):x}"}
        path = encode_path("bucket", any_key(rng))
        return kind.head(signing, path, now, raw_query=any_query(rng) if rng.random() < 0.2 else "", values=values)

    return fresh


def generated(rng: random.Random, ways: Ways) -> Maker:
    """Heads of a client that might be."""
    order = rng.sample([*NAMES], len(NAMES))
    is_lower, signs_all, base_domain = (rng.random() < 0.5 for _ in range(3))
    names = [name for name in ("range", "if-match", "if-none-match", "amz-sdk-request", "accept") if rng.random() < 0.4]
    method = rng.choice(["GET", "GET", "HEAD"])

    def fresh(now: float) -> bytes:
        client = Client(tuple(order), is_lower, signs_all, ways.secret_of("AK"), base_domain)
        more = {name: any_range(rng) if name == "range" else f'"{rng.getrandbits(32):x}"' for name in names}
        return client.head(now, any_key(rng), method, any_query(rng), more)

    return fresh


def presigned(rng: random.Random, ways: Ways) -> Maker:
    """Heads whose target says who has signed them."""
    lines = "".join(
        f"{line}\r\n" for line in ("Range: bytes=0-9", "User-Agent: x", "Accept: */*") if rng.random() < 0.6
    )

    def fresh(now: float) -> bytes:
        moment = format_timestamp(now)
        credential = quote(f"AK/{moment[:8]}/{REGION}/s3/aws4_request", safe="")
        query = (
            f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={credential}&X-Amz-Date={moment}"
            f"&X-Amz-Expires={rng.choice([60, 900, 86_400])}&X-Amz-SignedHeaders=host&X-Amz-Signature={'0' * 64}"
        )
        target = f"{encode_path('bucket', any_key(rng))}?{query}"
        return ways.signed_as_understood(f"GET {target} HTTP/1.1\r\nHost: {HOST}\r\n{lines}\r\n".encode("latin-1"))

    return fresh


@dataclass
class Session:
    """Some clients of one gateway, and what is made of their heads."""

    ways: Ways
    makers: Sequence[Maker]

    def fresh(self) -> bytes:
        rng, now = self.ways.rng, self.ways.clock.now()
        late = rng.choice([0.0] * 12 + [-rng.uniform(880, 920), rng.uniform(880, 920), -43_200.0, 86_400.0])
        return rng.choice(self.makers)(now + late)

    def connect(self) -> None:
        """Anew; the first heads are whole ones."""
        ways = self.ways
        ways.reconnect()
        for make in self.makers:
            ways.learn(make(ways.clock.now()))
            ways.seen["whole heads accepted"] += ways.judge(make(ways.clock.now()))

    def run(self, count: int) -> None:
        rng, ways = self.ways.rng, self.ways
        self.connect()
        heads = [self.fresh() for _ in range(24)]
        for _ in range(count):
            dice = rng.random()
            if dice < 0.003:
                ways.rotate()
            elif dice < 0.02:
                self.connect()
            elif dice < 0.2:
                heads[rng.randrange(len(heads))] = self.fresh()
            raw = self.changed(rng.choice(heads), heads)
            passed = rng.choice([0.0] * 45 + [-901.0, -899.0, 899.0, 901.0, 86_400.0])
            ways.clock.set_wall(passed)  # it is sent again then
            is_accepted = ways.judge(raw)
            ways.clock.set_wall(-passed)
            ways.seen["mutated"] += 1
            ways.seen["accepted by both"] += is_accepted
            if is_accepted and rng.random() < 0.1:
                heads[rng.randrange(len(heads))] = raw

    def changed(self, head: bytes, others: Sequence[bytes]) -> bytes:
        """And signed again, or not."""
        rng, ways = self.ways.rng, self.ways
        raw = first_head(mutated(rng, head, others))
        if rng.random() < 0.3:
            return raw
        fitting = ways.signed_as_it_fits(raw)
        if fitting is not None:
            ways.seen["signed as it fits a kind"] += 1
            return fitting
        again = ways.signed_as_understood(raw)
        ways.seen["signed as it is understood"] += again != raw
        return again


def batch(seed: int, number: int, count: int) -> Counter[str]:
    """Mutations that follow from the two numbers; what there was of each. Raises Difference."""
    rng, seen = random.Random(f"{seed} {number}"), Counter[str]()
    for first in range(0, count, SESSION):
        ways = Ways(rng)
        kinds = rng.choices([recorded, generated, presigned], [5, 4, 1], k=6)
        try:
            Session(ways, [kind(rng, ways) for kind in kinds]).run(min(SESSION, count - first))
        except Difference as error:
            error.add_note(f"FOREBAY_HEAD_SEED={seed}, batch {number}")
            raise
        seen += ways.seen
    return seen


def batches(seed: int, mutations: int) -> Iterator[tuple[int, int]]:
    """Number and size of each."""
    for number in range(-(-mutations // BATCH)):
        yield number, min(BATCH, mutations - number * BATCH)


def recorded_batches(seed: int) -> dict[int, Counter[str]]:
    lines = Path(RECORD).read_text(encoding="utf-8").splitlines() if RECORD and Path(RECORD).exists() else []
    return {said["batch"]: Counter(said["seen"]) for said in map(json.loads, lines) if said["seed"] == seed}


@pytest.mark.slow
def test_nothing_is_taken_for_what_it_is_not() -> None:
    done = recorded_batches(SEED)
    for number, count in batches(SEED, MUTATIONS):
        if number not in done:
            done[number] = batch(SEED, number, count)
            if RECORD:
                with Path(RECORD).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"seed": SEED, "batch": number, "seen": done[number]}) + "\n")
    seen = sum(done.values(), Counter[str]())
    print(f"seed {SEED}: {dict(seen)}, differences: 0")
    assert seen["mutated"] >= MUTATIONS
    assert seen["accepted by both"] > MUTATIONS / 40
    assert seen["by the whole way alone"] > MUTATIONS / 100


class Anything(frozenset[bytes]):
    """Has whatever it is asked for."""

    def __contains__(self, _: object) -> bool:
        return True


@pytest.mark.parametrize(
    ("target", "loosened"),
    [
        ("s3.prepared_head.PreparedHead.verified", lambda *_: True),
        ("s3.prepared_head._VALUE", re.compile(rb"[^\r]*")),
        ("s3.prepared_head._TARGET", re.compile(rb"(/[^? ]*)(?:\?([^ ]*))?")),
        ("s3.prepared_head.CLOCK_SKEW_SECONDS_MAX", 2000),
        ("edge.prepared._QUERIES", Anything()),
        ("edge.prepared.authorise", lambda *_: None),
    ],
)
def test_each_loosened_rule_is_found(target: str, loosened: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of how a head is compared: within some thousand mutations."""
    monkeypatch.setattr(f"gateway.{target}", loosened)
    with pytest.raises(Difference):
        batch(1, 0, 30_000)
