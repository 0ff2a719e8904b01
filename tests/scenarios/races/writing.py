"""Steps that write: own ones through the gateway, and those of others straight at the origin."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from defusedxml.ElementTree import fromstring

from tests.scenarios.races.caller import Answer, Broken, Caller
from tests.scenarios.races.history import State, Write
from tests.scenarios.races.world import World
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.store import StoredObject
from tests.support.strict_origin import StrictOrigin

REFUSED = frozenset({404, 409, 412})
"""Answers that say that nothing was written."""


async def put(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    value = world.new_value(rng)
    await _write(world, caller.call("PUT", world.target(key), value.content), {key: value.etag})


async def put_if_absent(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    """Judged by the origin: refused where something is there."""
    value = world.new_value(rng)
    call = caller.call("PUT", world.target(key), value.content, "If-None-Match: *")
    await _write(world, call, {key: value.etag}, refusable=True)


async def put_half(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    """A body that breaks off stores nothing (4.2): no history knows of this value, so nobody may ever see it."""
    await caller.send_half(world.target(key), world.new_value(rng).content or b"x")


async def put_in_parts(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    """A multipart upload of one part: another ETag, and it is there when it is completed."""
    value = world.new_value(rng)
    try:
        begun = await caller.call("POST", f"{world.target(key)}?uploads")
        upload = _text(begun, "UploadId")
        part = f"{world.target(key)}?partNumber=1&uploadId={upload}"
        await _succeed(world, key, caller.call("PUT", part, value.content))
    except Broken as broken:
        _excuse(world, key, broken)
        return
    document = f"<Part><PartNumber>1</PartNumber><ETag>{value.etag}</ETag></Part>"
    body = f"<CompleteMultipartUpload>{document}</CompleteMultipartUpload>".encode()
    complete = caller.call("POST", f"{world.target(key)}?uploadId={upload}", body)
    await _write(world, complete, {key: value.etag_of_one_part}, refusable=world.breaks_allowed)


async def copy(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    """From any key, of a version that was there a moment ago: refused where it is not there any more."""
    source = rng.choice([other for other in world.histories if other != key])
    state = world.histories[source].newest()
    if state is None:
        return await put(world, caller, rng, key)
    headers = f"x-amz-copy-source: {world.target(source)}", f"x-amz-copy-source-if-match: {state}"
    call = caller.call("PUT", world.target(key), b"", *headers)
    return await _write(world, call, {key: world.values[state].etag}, refusable=True)


async def rename(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    """Forwarded, and changes two keys, one of which only a header names."""
    source = rng.choice([other for other in world.own if other != key])
    state = world.histories[source].newest()
    if state is None:
        return await put(world, caller, rng, key)
    headers = f"x-amz-rename-source: {world.target(source)}", f"x-amz-rename-source-if-match: {state}"
    call = caller.call("PUT", f"{world.target(key)}?renameObject", b"", *headers)
    return await _write(world, call, {key: state, source: None}, refusable=True)


async def delete(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    await _write(world, caller.call("DELETE", world.target(key)), {key: None})


async def delete_several(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    """DeleteObjects: the keys are in the body."""
    keys = {key, *rng.sample(world.own, k=rng.randint(0, 2))}
    entries = "".join(f"<Object><Key>{one}</Key></Object>" for one in sorted(keys))
    body = f"<Delete>{entries}</Delete>".encode()
    digest = base64.b64encode(hashlib.md5(body).digest()).decode()
    call = caller.call("POST", f"/{world.bucket}?delete", body, f"Content-MD5: {digest}")
    await _write(world, call, dict.fromkeys(keys))


async def tag(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    """A forwarded write that changes no bytes."""
    body = b"<Tagging><TagSet><Tag><Key>k</Key><Value>v</Value></Tag></TagSet></Tagging>"
    try:
        answer = await caller.call("PUT", f"{world.target(key)}?tagging", body)
    except Broken as broken:
        _excuse(world, key, broken)
        return
    if answer.status not in (200, 404):
        world.unexpected(key, "PutObjectTagging", answer)


@dataclass(frozen=True, slots=True)
class Outside:
    """Writes straight at the origin, which nobody tells the gateway about."""

    origin: StrictOrigin

    async def put(self, world: World, caller: Caller, rng: random.Random, key: str) -> None:
        value = world.new_value(rng)
        bucket = self.origin.model.buckets[world.bucket]
        stored = StoredObject(key, BytesContent(value.content), value.etag, self.origin.clock.now())
        await self._write(world, key, value.etag, lambda: bucket.put(stored))

    async def delete(self, world: World, caller: Caller, rng: random.Random, key: str) -> None:
        bucket = self.origin.model.buckets[world.bucket]
        await self._write(world, key, None, lambda: bucket.remove(key))

    async def _write(self, world: World, key: str, state: State, change: Callable[[], None]) -> None:
        write = world.begin(key, state, own=False)
        await asyncio.to_thread(self.origin.run_inside, change)
        world.end(key, write)


async def _write(world: World, call: Awaitable[Answer], states: dict[str, State], *, refusable: bool = False) -> None:
    """Carry out a write that leaves `states`; one without an answer may take effect at any time, or never."""
    writes = {key: world.begin(key, state) for key, state in states.items()}
    first = next(iter(states))
    try:
        answer = await call
    except Broken as broken:
        _excuse(world, first, broken)
        return
    if refusable and answer.status in REFUSED:
        world.counts["refused writes"] += 1
        _each(world.take_back, writes)
    elif answer.status not in (200, 204) or b"<Error>" in answer.body:
        world.unexpected(first, f"a write of {states}", answer)
    else:
        world.counts["writes"] += 1
        _each(world.end, writes)
        _compare_etag(world, first, answer, states[first])


def _each(action: Callable[[str, Write], None], writes: dict[str, Write]) -> None:
    for key, write in writes.items():
        action(key, write)


def _compare_etag(world: World, key: str, answer: Answer, state: State) -> None:
    """Where a write's answer names an ETag, it is the one that reads will show."""
    named = answer.etag or (_text(answer, "ETag") if b"<ETag>" in answer.body else state)
    if named != state:
        world.wrong(key, f"a write of {state} was answered with {named}")


def _excuse(world: World, key: str, broken: Broken) -> None:
    world.counts["broken writes"] += 1
    if not world.breaks_allowed:
        world.wrong(key, f"a write broke: {broken}")


async def _succeed(world: World, key: str, call: Awaitable[Answer]) -> None:
    answer = await call
    if answer.status != 200:
        world.unexpected(key, "a part of an upload", answer)


def _text(answer: Answer, name: str) -> str:
    """The text of the first element with this name."""
    found = (node.text for node in fromstring(answer.body).iter() if node.tag.rpartition("}")[2] == name)
    return next(found) or ""
