"""The short way says, asks, counts and learns what the whole way does, whatever is asked, and whatever the origin says.

Twins (both_ways.py) get the same history of requests, changed requests, faults of the origin and changes between them.
Time passes only while all wait, so that no machine is too slow to tell what is stuck from what is late.
FOREBAY_PREPARED_STEPS and FOREBAY_PREPARED_SEED prolong and repeat it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gateway.core.model import ObjectKey
from gateway.metadata.catalog import HABITS_SECONDS
from gateway.writeback.journal.buckets import LastOwnWrite
from tests.edge.both_ways import FIXED_KEYS, SIZES, WAYS, Asked, Twin, Twins, certificate_in, head_of, known, put, twins
from tests.origin.spoken_origin import SPOILT, STUCK, Fault
from tests.support.gateway_app import BLOCK_SIZE_BYTES
from tests.support.head_mutations import first_head, mutated
from tests.support.patient_loop import run_patiently

STEPS = int(os.environ.get("FOREBAY_PREPARED_STEPS", "600"))
SEED = int(os.environ.get("FOREBAY_PREPARED_SEED", "1"))
HISTORY_STEPS = 1000
"""Steps that follow from one seed."""

PENDING = ("w/", "y/")


def any_request(rng: random.Random, key: str, etag: str) -> Asked:
    fields: dict[str, str] = {}
    if rng.random() < 0.4:
        size = BLOCK_SIZE_BYTES
        first = rng.choice([0, 1, rng.randrange(size), size - 1, size, 3 * size])
        last = first + rng.choice([-1, 0, 9, 999, size, 10**9])
        some = [f"bytes={first}-{last}"] * 6 + [f"bytes={first}-", "bytes=-5", "bytes=-0", "bytes=0-1,4-5", "x"]
        fields["range"] = rng.choice(some)
    if rng.random() < 0.2:
        said = rng.choice([etag, etag, '"other"', f"W/{etag}", f'"a", {etag}', "*", etag.strip('"'), OWN_ETAG])
        fields[rng.choice(["if-match", "if-none-match"])] = said
    if rng.random() < 0.2:
        fields["x-amz-checksum-mode"] = rng.choice(["ENABLED"] * 8 + ["enabled", "x"])
    if rng.random() < 0.1:
        name, value = rng.choice(ODD_FIELDS)
        fields[name] = value
    style = rng.choice(["botocore"] * 9 + ["go", "host", "presigned"])
    if style == "botocore":
        fields |= {"amz-sdk-invocation-id": f"{rng.getrandbits(64):x}", "amz-sdk-request": "attempt=1"}
    if rng.random() < 0.05:
        fields["traceparent"] = f"00-{rng.getrandbits(128):032x}-{rng.getrandbits(64):016x}-01"
        fields["x-amzn-trace-id"] = f"Root=1-{rng.getrandbits(64):x}"
    method = rng.choice(["GET"] * 4 + ["HEAD"])
    query = rng.choice(
        [""] * 20 + [f"x-id={method.title()}Object", "x-id=GetObject", "response-content-type=a", "acl="]
    )
    return Asked(method, key, fields, query, rng.choice(["ALL"] * 9 + ["SOME"]), style)


def without_what_waits(both: Twins, asked: Asked) -> Asked:
    """What only the origin can answer of something pending waits for its flush, and nothing is flushed here."""
    buffer = both.twins["slow"].gateway.buffer
    if buffer is None or not buffer.may_be_pending(ObjectKey("bucket", asked.key)):
        return asked
    return replace(asked, query="", fields={"range": "bytes=0-9"} if "range" in asked.fields else {})


OWN_ETAG = '"of-this-node"'
ODD_FIELDS = (
    ("if-modified-since", "Mon, 01 Jan 2001 00:00:00 GMT"),
    ("if-unmodified-since", "Mon, 01 Jan 2001 00:00:00 GMT"),
    ("if-range", '"other"'),
    ("cache-control", "no-cache"),
    ("origin", "http://elsewhere"),
    ("content-type", "a/b"),
    ("x-amz-request-payer", "requester"),
    ("x-amz-expected-bucket-owner", "123456789012"),
    ("x-amz-user-agent", "x"),
)


async def changed(rng: random.Random, both: Twins) -> str:
    """Something happens to both gateways, or at both origins."""
    key, content = rng.choice(FIXED_KEYS), rng.randbytes(rng.choice(SIZES))
    if rng.random() < 0.5:
        key = new_key(rng)
    object_key, kind = ObjectKey("bucket", key), rng.choice(CHANGES)
    if kind == "own":
        await both.ask(Asked("PUT", key, {}, body=content))
    elif kind == "deleted":
        if not key.startswith(PENDING):
            await both.ask(Asked("DELETE", key, {}))
    elif kind == "later":
        both.clock.ahead_seconds += rng.choice([1, 30, 61, 700])
    elif kind in ("rotated", "rights"):
        both.keyring.change(rng.choice([("d/",), ("d/", "t/"), ("w/",)]), rotate=kind == "rotated")
    else:
        own = LastOwnWrite(both.clock.now(), etag_of(both, key), answered=OWN_ETAG)
        await both.change(lambda twin: CHANGED[kind](twin, object_key, content, own))
    return kind


def _distrusted(twin: Twin) -> None:
    for lease in list(twin.gateway.blocks._dependencies.open_files._leases.values()):
        lease.file.distrust()


def _weak(twin: Twin) -> None:
    dialect = twin.origin.memory.dialect
    dialect.has_weak_etags = not dialect.has_weak_etags


def _rangeless(twin: Twin) -> None:
    dialect = twin.origin.memory.dialect
    dialect.knows_ranges = not dialect.knows_ranges


CHANGED: Mapping[str, Callable[[Twin, ObjectKey, bytes, LastOwnWrite], object]] = {
    "foreign": lambda twin, key, content, _: twin.origin.memory.put("bucket", key.key, content),
    "removed": lambda twin, key, *_: twin.origin.memory.buckets["bucket"].remove(key.key),
    "dropped": lambda twin, key, *_: twin.gateway.blocks.invalidate(key),
    "forgotten": lambda twin, key, *_: twin.gateway.catalog.forget(key),
    "snapshots": lambda twin, *_: twin.gateway.snapshots.changes.tell(),
    "untrusted": lambda twin, *_: _distrusted(twin),
    "weak": lambda twin, *_: _weak(twin),
    "rangeless": lambda twin, *_: _rangeless(twin),
    "named here": lambda twin, key, _, own: twin.gateway.buffer and twin.gateway.buffer.record_own_write(key, own),
}
CHANGES = ("own", "own", "deleted", "later", "rotated", "rights", *CHANGED, "foreign", "dropped")


def new_key(rng: random.Random) -> str:
    return f"{rng.choice('ddttxxwy')}/{rng.randrange(400)}.{rng.choice(['jpg', 'tar'])}"


def etag_of(both: Twins, key: str) -> str:
    found = both.twins["slow"].origin.memory.buckets["bucket"].objects.get(key)
    return found.etag if found is not None else '"none"'


def any_fault(rng: random.Random) -> Fault:
    name, is_once = rng.choice([*SPOILT]), rng.random() < 0.5
    times = 1 if is_once or name in STUCK else rng.choice([2, 99])
    return Fault(name, rng.choice(["GET", "HEAD", "GET HEAD"]), times, rng.random())


async def step(rng: random.Random, both: Twins, latest: list[Asked], heads: list[bytes]) -> str:
    dice = rng.random()
    if dice < 0.03:
        return await changed(rng, both)
    if latest and dice < 0.4:
        asked = rng.choice(latest)
    else:
        key = rng.choice(FIXED_KEYS) if dice < 0.55 else new_key(rng)
        if dice > 0.57 and dice < 0.96 and etag_of(both, key) == '"none"':
            content = rng.randbytes(rng.choice(SIZES))
            await both.change(lambda twin: twin.origin.memory.put("bucket", key, content, {"x-amz-meta-a": "b"}))
        asked = any_request(rng, key, etag_of(both, key))
    asked = without_what_waits(both, asked)
    latest[:] = [*latest[-19:], asked]
    late = rng.choice([0.0] * 60 + [-880.0, -920.0, 880.0, 920.0])
    raw = head_of(asked, both.keyring.secrets[asked.who], both.clock.now() + late)
    heads[:] = [*heads[-19:], raw]
    if rng.random() < 0.05:
        raw = first_head(mutated(rng, raw, heads))
        if any(name in raw.lower() for name in (b"content-length", b"transfer-encoding", b"expect")):
            return "waits for a body"
    if rng.random() < 0.05:
        for way in WAYS:
            await both.leave(way)
    fault = any_fault(rng) if rng.random() < 0.15 else None
    if fault is not None:
        both.seen[f"fault: {fault.name}"] += 1
    return (await both.compare(raw, asked.key, fault)).decode()


async def history(directory: Path, steps: int, seed: int, *, encrypted: bool = False) -> Counter[str]:
    """Requests, mutations, faults and changes; what there was of each. Raises with the step at which ways differ."""
    rng, latest, heads = random.Random(seed), list[Asked](), list[bytes]()
    certificate = certificate_in(directory) if encrypted else None
    async with twins(directory, seed, certificate=certificate) as both:
        for number in range(steps):
            try:
                both.seen[await step(rng, both, latest, heads)] += 1
            except BaseException as error:
                error.add_note(f"FOREBAY_PREPARED_SEED={seed} encrypted={encrypted}, at step {number}")
                raise
        for key in FIXED_KEYS:
            one, other = (known(both.twins[way].gateway, key) for way in WAYS)
            assert one == other, key
    return both.seen


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_both_ways_say_the_same(tmp_path: Path, encrypted: bool) -> None:
    """Whatever is asked, and whatever happens in between; and the short way is used."""
    seen, steps = Counter[str](), STEPS // 3 if encrypted else STEPS
    for number, first in enumerate(range(0, steps, HISTORY_STEPS)):
        with TemporaryDirectory(dir=tmp_path) as directory:
            count = min(HISTORY_STEPS, steps - first)
            seen += run_patiently(history(Path(directory), count, SEED + number, encrypted=encrypted))
    print(f"seed {SEED}: {dict(sorted(seen.items()))}, differences: 0")
    if not encrypted:
        assert min(seen[name] for name in ("200", "206", "prepared")) > steps / 50
        assert min(seen[name] for name in ("cold", "asked", "cold, left")) > steps / 200
        assert min(seen[name] for name in ("304", "412", "403")) > 0


async def test_a_range_that_only_the_origin_can_judge_costs_a_strict_read_one_request(tmp_path: Path) -> None:
    async with twins(tmp_path, 1, sizes=(1000,)) as both:
        for asked in ("bytes=0-9", "bytes=0-9", "bytes=0-9", "bytes=0-9", "bytes=0-1,4-5", "x"):
            await both.ask(Asked("GET", "x/a", {"range": asked}))
        assert both.seen["asked"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_each_fault_of_first_and_strict_reads(tmp_path: Path, times: int) -> None:
    run_patiently(each_fault(tmp_path, times))


async def each_fault(directory: Path, times: int) -> None:
    async with twins(directory, 1, sizes=(1000,)) as both:
        strict = Asked("GET", "x/a", {})
        for number, name in enumerate(("warm", *SPOILT)):
            fault = Fault(name, "GET HEAD", 1 if name in STUCK else times) if number else None
            first = Asked("GET", f"d/{number}", {})
            await both.change(partial(put, first.key, b"content of it"))
            for asked in (first, strict):
                await both.ask(asked, fault)
                both.clock.ahead_seconds += HABITS_SECONDS + 1  # what it has shown of the bucket is forgotten
                await both.ask(asked)
        assert both.seen["cold"] + both.seen["cold, left"] >= len(SPOILT)
