"""Steps that read, each judged as soon as it is answered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace

from defusedxml.ElementTree import fromstring

from tests.scenarios.races.caller import Broken, Caller
from tests.scenarios.races.history import STRICT, Bounds
from tests.scenarios.races.world import World
from tests.support.cache_label import cache_label

RANGE_BYTES_MAX = 200_000
CROWD = 6


async def get(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    """The whole object."""
    with world.reading(key) as sent:
        try:
            answer = await caller.call("GET", world.target(key))
        except Broken as broken:
            world.broke(key, sent, broken)
        else:
            world.saw_object(key, sent, answer)


async def get_range(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    """A range that begins within the object, as far as anybody knows."""
    newest = world.values.get(world.histories[key].newest() or "")
    first = rng.randrange(newest.size_bytes) if newest and newest.size_bytes else 0
    asked = first, first + rng.randrange(RANGE_BYTES_MAX)
    with world.reading(key) as sent:
        try:
            answer = await caller.call("GET", world.target(key), b"", f"Range: bytes={asked[0]}-{asked[1]}")
        except Broken as broken:
            world.broke(key, sent, broken, asked)
        else:
            world.saw_object(key, sent, answer, asked)


async def get_if_changed(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    """304 says as much as the object itself: this version is the current one."""
    known = world.histories[key].newest() or '"0123456789abcdef0123456789abcdef"'
    with world.reading(key) as sent:
        try:
            answer = await caller.call("GET", world.target(key), b"", f"If-None-Match: {known}")
        except Broken as broken:
            world.broke(key, sent, broken)
            return
        if answer.status == 304:
            world.saw(key, sent, known, "304")
        else:
            world.saw_object(key, sent, answer)


async def head(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    with world.reading(key) as sent:
        try:
            answer = await caller.call("HEAD", world.target(key))
        except Broken as broken:
            world.broke(key, sent, broken)
        else:
            world.saw_head(key, sent, answer)


async def leave_early(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    """Ask for the object and go: a fill that has begun goes on without its reader."""
    await caller.call_and_leave(world.target(key))


async def crowd(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    """Several clients at once want the whole object: of a cold one, all but one follow a fill."""
    with ExitStack() as connections:
        async with asyncio.TaskGroup() as group:
            for _ in range(CROWD):
                group.create_task(get(world, connections.enter_context(closing(caller.another())), rng, key))


async def list_keys(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    """A listing with a strict part is the origin's own (3.9): right about every key at once, whatever the slot."""
    await _list(world, caller, key, "", dict.fromkeys(world.histories, STRICT))


async def list_directory(world: World, caller: Caller, rng: random.Random, key: str) -> None:
    """A listing of one slot may be the index's: what it leaves out is as old as what it says, own writes are in it."""
    prefix = key[: key.index("/") + 1]
    bounds = {
        other: replace(history.bounds, absence_seconds=history.bounds.presence_seconds)
        for other, history in world.histories.items()
        if other.startswith(prefix)
    }
    await _list(
        world, caller, key, f"&prefix={prefix}{rng.choice(['', '&encoding-type=url', '&fetch-owner=true'])}", bounds
    )


async def _list(world: World, caller: Caller, key: str, query: str, bounds: Mapping[str, Bounds]) -> None:
    """One page of all there is, judged by the bounds of each key that it is about."""
    sent = world.now()
    for other in bounds:
        world.histories[other].reads_sent.append(sent)
    try:
        answer = await caller.call("GET", f"/{world.bucket}?list-type=2{query}")
        if answer.status != 200:
            world.unexpected(key, "LIST", answer)
        world.counts[f"list {cache_label(answer)}"] += 1
        found = _entries(answer.body)
        for other, bound in bounds.items():
            world.saw(other, sent, found.get(other), "LIST", bounds=bound)
    except Broken as broken:
        world.counts["broken lists"] += 1
        if not world.breaks_allowed:
            world.wrong(key, f"a listing broke: {broken}")
    finally:
        for other in bounds:
            world.histories[other].reads_sent.remove(sent)


def _entries(document: bytes) -> dict[str, str]:
    """ETags by key."""
    root = fromstring(document)
    namespace = root.tag.partition("}")[0] + "}" if root.tag.startswith("{") else ""
    entries = root.iter(f"{namespace}Contents")
    return {str(entry.findtext(f"{namespace}Key")): str(entry.findtext(f"{namespace}ETag")) for entry in entries}
