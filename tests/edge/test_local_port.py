"""The local socket: who may connect, and what the gateway shows whom (docs/semantics.md, clause 15)."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from forebay import local as client
from forebay import wire
from forebay.s3_get import Credentials
from gateway.edge.access import ConfiguredKeyring, Key
from gateway.edge.local_port import CONNECTIONS_MAX, GRACE_SECONDS, HELD_MAX, LEASE_SECONDS, STRANGERS_MAX
from gateway.policy.callers import Callers, CallersPlan, Limits
from gateway.policy.slots import EVERYTHING, Grant, Prefix
from gateway.telemetry import metrics
from tests.support.asgi import ACCESS_KEY_ID, SECRET_ACCESS_KEY, call
from tests.support.gateway_app import BLOCK_SIZE_BYTES, GatewayApp, gateway_app
from tests.support.local_reads import KEYS, Stranger, local_gateway
from tests.support.set_clock import SetClock
from tests.support.slots import Slot
from tests.support.waiting import until

FIXED = Slot("data", Prefix.parse("s3://bucket/data/"), consistency="immutable")
NARROW = Credentials("NARROW", "narrow-secret")
TEAM = Credentials("TEAM", "team-secret")
KEYRING = ConfiguredKeyring(
    [
        Key(ACCESS_KEY_ID, SECRET_ACCESS_KEY, None, EVERYTHING),
        Key(NARROW.access_key_id, NARROW.secret_access_key, None, Grant([Prefix.parse("s3://bucket/data/mine/")])),
        Key(TEAM.access_key_id, TEAM.secret_access_key, None, Grant([Prefix.parse("s3://bucket/data/")])),
    ]
)


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


async def fill(gateway: GatewayApp, *keys: str, size: int = 1000) -> None:
    """Bring objects to disk, by their numbers' bytes."""
    for number, key in enumerate(keys):
        gateway.origin.put("bucket", key, content(size, number))
        await call(gateway.app, "GET", f"/bucket/{key}")
    await gateway.blocks.settle()


async def test_a_read_comes_from_files_once_it_is_cached(tmp_path: Path) -> None:
    """14 First by HTTP, which fills the cache; then from the files: small objects, large ones, and ranges of them."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        sizes = [1, 1000, BLOCK_SIZE_BYTES, 3 * BLOCK_SIZE_BYTES + 17, 40 * BLOCK_SIZE_BYTES + 1]
        bodies = [content(size, size) for size in sizes]
        keys = [f"bucket/data/{size}" for size in sizes]
        for key, body in zip(keys, bodies, strict=True):
            gateway.origin.put("bucket", key.partition("/")[2], body)
        reader = local.reader()
        assert await local.read(reader, *keys) == bodies
        assert (reader.local_reads, reader.http_reads) == (0, len(sizes))
        await gateway.blocks.settle()
        await local.warm(reader, *keys)
        before = reader.http_reads
        assert await local.read(reader, *keys, *keys) == bodies * 2
        for first, size in ((0, 10), (5, 1), (BLOCK_SIZE_BYTES - 3, 7), (100_000, 2 * BLOCK_SIZE_BYTES), (7, 0)):
            ranged = await local.read(reader, (keys[4], first, size), (keys[3], first, size))
            stop = first + size if size else None
            assert ranged == [bodies[4][first:stop], bodies[3][first:stop]]
        assert reader.http_reads == before


@pytest.mark.slow
async def test_more_than_one_question_holds_is_asked_in_several(tmp_path: Path) -> None:
    """64 reads a question, and as many descriptors as one answer carries: all is read all the same."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        keys = [f"data/{number}" for number in range(12)]
        await fill(gateway, *keys, size=17 * BLOCK_SIZE_BYTES)
        names, reader = [f"bucket/{key}" for key in keys], local.reader()
        await local.warm(reader, *names)
        bodies = [content(17 * BLOCK_SIZE_BYTES, number) for number in range(12)]
        assert await local.read(reader, *names * 12) == bodies * 12
        assert reader._link is not None
        assert len(reader._link.files) <= HELD_MAX


async def test_strangers_get_nothing(tmp_path: Path) -> None:
    """15.1 A wrong secret, an unknown key, another's proof, no HELLO, nonsense: the connection ends, unanswered."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        await fill(gateway, "data/a")
        ask = bytes([wire.RESOLVE]) + wire.pack_read(b"bucket/data/a", 0, 0)
        for credentials, secret in ((KEYS, "another"), (Credentials("NOBODY", "x"), None), (KEYS, "")):
            stranger = Stranger(local.path)
            assert (await stranger.greets(credentials, secret))[0] == wire.REFUSED
            stranger.says(ask)
            assert await stranger.hears() == b""
            stranger.close()
        rng = random.Random(7)
        for said in (ask, b"\0", bytes([wire.HELLO]), rng.randbytes(500), bytes(wire.MESSAGE_BYTES_MAX + 1)):
            stranger = Stranger(local.path)
            await stranger.hears()
            stranger.says(said)
            heard = await stranger.hears()
            assert not heard or heard[0] == wire.REFUSED
            assert not stranger.descriptors
            stranger.close()
        one, other = Stranger(local.path), Stranger(local.path)
        nonce = (await one.hears())[len(wire.GREETING) :]
        await other.hears()
        name = KEYS.access_key_id.encode()
        proof = wire.proof(KEYS.secret_access_key, nonce, KEYS.access_key_id, "")
        other.says(bytes([wire.HELLO]) + wire.LENGTHS.pack(len(name), 0, 0) + name + proof)
        assert (await other.hears())[0] == wire.REFUSED
        one.close()
        other.close()
        stranger = Stranger(local.path)
        assert await stranger.greets(agent="a" * wire.HELLO_BYTES_MAX) == b""  # the gateway would have to keep it
        stranger.close()


async def test_messages_of_callers_may_be_anything(tmp_path: Path) -> None:
    """What a caller says may end its own connection, and does nothing to others."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        await fill(gateway, "data/a")
        reader, rng = local.reader(), random.Random(11)
        await local.warm(reader, "bucket/data/a")
        read = wire.pack_read(b"bucket/data/a", 0, 0)
        cut_off = metrics.LOCAL_CUT_OFF.value("protocol")
        for said in (bytes([wire.RESOLVE]) + read * 65, bytes([wire.REPORT]) + read * 2, bytes([wire.REPORT, 0])):
            stranger = Stranger(local.path)
            await stranger.greets()
            stranger.says(said)
            assert await stranger.hears() == b""
            stranger.close()
        assert metrics.LOCAL_CUT_OFF.value("protocol") == cut_off + 3
        for number in range(60):
            stranger = Stranger(local.path)
            await stranger.greets()
            kind = rng.choice([wire.RESOLVE, wire.RELEASE, wire.REPORT, 99])
            mutated = bytearray(bytes([kind]) + read * rng.choice([1, 2, 65, 70]))
            for _ in range(rng.choice([0, 1, 5])):
                mutated[rng.randrange(1, len(mutated))] = rng.randrange(256)
            stranger.says(bytes(mutated[: rng.randrange(1, len(mutated) + 1)]))
            if number % 10 == 0:
                assert await local.read(reader, "bucket/data/a") == [content(1000)]
            stranger.close()
        assert await local.read(reader, "bucket/data/a") == [content(1000)]


async def test_a_flood_of_connections_is_bounded(tmp_path: Path) -> None:
    """15.4 Strangers displace each other, and no caller; silent ones are cut off after a while."""
    clock = SetClock()
    async with gateway_app(tmp_path, slots=[FIXED], clock=clock) as gateway, local_gateway(gateway) as local:
        await fill(gateway, "data/a")
        reader = local.reader()
        await local.warm(reader, "bucket/data/a")
        strangers = []
        for _ in range(200):
            strangers.append(Stranger(local.path))
            await asyncio.sleep(0)
        await until(lambda: len(local.port._all) >= STRANGERS_MAX)
        assert len(local.port._all) <= STRANGERS_MAX + 2 < CONNECTIONS_MAX
        assert await local.read(reader, "bucket/data/a") == [content(1000)]
        assert reader.http_reads <= 2
        clock.ahead_seconds += 60
        local.port.sweep()
        await until(lambda: not any(one.key is None for one in local.port._all))
        for stranger in strangers:
            stranger.close()


async def test_the_narrowest_rights_show_nothing_else(tmp_path: Path) -> None:
    """15.2 A descriptor shows all that its file holds: a caller who may not read all of the slot gets none of a
    segment, and reads what it may by HTTP. One who may read the slot gets a segment when nothing more comes into it."""
    async with gateway_app(tmp_path, slots=[FIXED], keyring=KEYRING) as gateway, local_gateway(gateway) as local:
        await fill(gateway, "data/mine/a", "data/other/b", size=1000)
        await fill(gateway, "data/mine/large", size=3 * BLOCK_SIZE_BYTES)
        mine, names = content(1000), ["bucket/data/mine/a", "bucket/data/other/b"]
        narrow, team = Stranger(local.path), Stranger(local.path)
        await narrow.greets(NARROW)
        await team.greets(TEAM)
        assert await narrow.asks(*names) == [False, False]
        assert await team.asks(*names) == [False, False]  # more may come into it, when there are other slots
        seal(gateway)
        assert await narrow.asks(*names) == [False, False]
        assert not narrow.descriptors
        assert await team.asks(*names) == [True, True]
        assert len(team.descriptors) == 1
        narrow.close()
        team.close()
        reader = local.reader(NARROW)
        assert await local.read(reader, "bucket/data/mine/a") == [mine]
        try:
            await local.read(reader, "bucket/data/other/b")
        except PermissionError:
            pass
        else:
            raise AssertionError("it may not read this")


async def test_a_large_object_is_in_files_of_its_own(tmp_path: Path) -> None:
    """So a caller with the narrowest rights gets these; of another's objects it gets none."""
    large = Slot("data", Prefix.parse("s3://bucket/data/"), consistency="immutable")
    size = 2**22
    async with (
        gateway_app(tmp_path, slots=[large], keyring=KEYRING, block_size_bytes=2**21) as gateway,
        local_gateway(gateway) as local,
    ):
        for key in ("data/mine/large", "data/other/large"):
            gateway.origin.put("bucket", key, content(size))
            await call(gateway.app, "GET", f"/bucket/{key}")
        await gateway.blocks.settle()
        narrow = Stranger(local.path)
        await narrow.greets(NARROW)
        assert await narrow.asks("bucket/data/other/large") == [False]
        await until_given(narrow, "bucket/data/mine/large")
        shown = b"".join(os.pread(one, 2**22, 0) for one in narrow.descriptors)
        assert b"mine/large" in shown
        assert b"other" not in shown
        narrow.close()


async def test_a_segment_of_earlier_slots_is_judged_by_what_is_in_it(tmp_path: Path) -> None:
    """15.2 Slots may have been others when a segment was written: whoever may read all of today's slot may still not
    see what lies beside it."""
    wide = Slot("data", Prefix.parse("s3://bucket/data/"), consistency="immutable")
    narrow_slot = Slot("data", Prefix.parse("s3://bucket/data/mine/"), consistency="immutable")
    async with gateway_app(tmp_path, slots=[wide]) as gateway:
        await fill(gateway, "data/mine/a", "data/other/b")
        origin = gateway.origin
    async with (
        gateway_app(tmp_path, slots=[narrow_slot], keyring=KEYRING, origin=origin) as gateway,
        local_gateway(gateway) as local,
    ):
        await call(gateway.app, "GET", "/bucket/data/mine/a")
        narrow, everybody = Stranger(local.path), Stranger(local.path)
        await narrow.greets(NARROW)
        await everybody.greets()
        assert await everybody.asks("bucket/data/mine/a") == [True]
        assert await narrow.asks("bucket/data/mine/a") == [False]
        assert not narrow.descriptors
        narrow.close()
        everybody.close()


async def test_who_loses_rights_sees_nothing_that_comes_later(tmp_path: Path) -> None:
    """15.2 A caller with all rights may hold a segment that is not sealed. Nothing is appended to it any more once
    settings, and with them rights, have changed."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        await fill(gateway, "data/a")
        stranger = Stranger(local.path)
        await stranger.greets()
        await until_given(stranger, "bucket/data/a")
        (held,) = stranger.descriptors
        before = os.fstat(held).st_size
        await fill(gateway, "data/b")
        assert os.fstat(held).st_size > before
        before = os.fstat(held).st_size
        await gateway.blocks.apply_settings(2**30)
        await fill(gateway, "data/c")
        assert os.fstat(held).st_size == before
        stranger.close()


async def test_where_the_origin_judges_nobody_gets_a_descriptor(tmp_path: Path) -> None:
    """15.2 A descriptor cannot be taken back, and the origin may change its mind; nor does a file that holds such
    objects beside others go to anybody."""
    judged = Slot("judged", Prefix.parse("s3://bucket/data/judged/"), consistency="immutable", authorization="origin")
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway:
        await fill(gateway, "data/a", "data/judged/b")
        origin = gateway.origin
    async with gateway_app(tmp_path, slots=[FIXED, judged], origin=origin) as gateway, local_gateway(gateway) as local:
        for key in ("data/a", "data/judged/b"):
            await call(gateway.app, "GET", f"/bucket/{key}")
        stranger = Stranger(local.path)
        await stranger.greets()
        assert await stranger.asks("bucket/data/a", "bucket/data/judged/b") == [False, False]
        assert not stranger.descriptors
        stranger.close()


async def test_a_descriptor_cannot_be_used_to_write(tmp_path: Path) -> None:
    """15.2 It is read-only, and has a description of its own: the gateway does not see what a client does to that."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        await fill(gateway, "data/a")
        stranger = Stranger(local.path)
        await stranger.greets()
        await until_given(stranger, "bucket/data/a")
        (descriptor,) = stranger.descriptors
        try:
            os.pwrite(descriptor, b"x", 0)
        except OSError:
            pass
        else:
            raise AssertionError("it could be written to")
        os.lseek(descriptor, 100, os.SEEK_SET)
        assert (await call(gateway.app, "GET", "/bucket/data/a")).body == content(1000)
        stranger.close()


async def test_a_revoked_key_ends_its_connection(tmp_path: Path) -> None:
    """15.1 A connection is as good as its key is now."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        await fill(gateway, "data/a")
        stranger = Stranger(local.path)
        await stranger.greets()
        await until_given(stranger, "bucket/data/a")
        gateway.app.authenticator.apply_settings(
            ConfiguredKeyring([Key(ACCESS_KEY_ID, "new-secret", None, EVERYTHING)])
        )
        stranger.says(bytes([wire.RESOLVE]) + wire.pack_read(b"bucket/data/a", 0, 0))
        assert await stranger.hears() == b""
        stranger.close()


async def test_a_client_that_lets_go_of_nothing_is_cut_off(tmp_path: Path) -> None:
    """15.4 Leases bound the room: a file that was not used for 30 s must be released; a client that keeps it is cut
    off, and its process gets no descriptor for a while. Use renews the lease."""
    clock = SetClock()
    clock.stop()
    async with gateway_app(tmp_path, slots=[FIXED], clock=clock) as gateway, local_gateway(gateway) as local:
        await fill(gateway, "data/a")
        stranger, cut_off = Stranger(local.path), metrics.LOCAL_CUT_OFF.value("lease")
        await stranger.greets()
        await until_given(stranger, "bucket/data/a")
        for _ in range(5):
            clock.ahead_seconds += LEASE_SECONDS
            local.port.sweep()
            assert await stranger.asks("bucket/data/a") == [True]
        clock.ahead_seconds += LEASE_SECONDS + GRACE_SECONDS + 1
        local.port.sweep()
        assert await stranger.hears() == b""
        again = Stranger(local.path)
        assert (await again.greets())[0] == wire.REFUSED
        assert metrics.LOCAL_CUT_OFF.value("lease") == cut_off + 1
        clock.ahead_seconds += 400
        local.port.sweep()
        later = Stranger(local.path)
        assert (await later.greets())[0] == wire.HELLO
        for one in (stranger, again, later):
            one.close()


def test_a_reader_is_never_late() -> None:
    """15.4 However long it waits for an answer, it has released its files before the gateway cuts it off."""
    assert client.UNUSED_SECONDS + client.LOOK_SECONDS + client.ANSWER_SECONDS < LEASE_SECONDS + GRACE_SECONDS


async def test_limits_of_callers_hold(tmp_path: Path) -> None:
    """15.5 A read beyond its caller's limits is absent: by HTTP it waits for its turn."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        await fill(gateway, "data/a")
        plan = CallersPlan([(ACCESS_KEY_ID, Limits(requests_per_second=3.0))], [], 5.0)
        gateway.app.callers = Callers(plan, gateway.app.services.clock)
        stranger = Stranger(local.path)
        await stranger.greets()
        await until_given(stranger, "bucket/data/a")
        given = await stranger.asks(*["bucket/data/a"] * 40)
        assert 0 <= sum(given) < 12
        stranger.close()


async def test_a_strict_slot_asks_the_origin_about_each_read(tmp_path: Path) -> None:
    """14 As a GET does: what others have changed is seen at once, and an origin that is away is an error."""
    strict = Slot("data", Prefix.parse("s3://bucket/data/"), consistency="strict")
    async with gateway_app(tmp_path, slots=[strict]) as gateway, local_gateway(gateway) as local:
        await fill(gateway, "data/a")
        reader = local.reader()
        await local.warm(reader, "bucket/data/a")
        asked, before = len(gateway.origin.calls), reader.http_reads
        assert await local.read(reader, "bucket/data/a") == [content(1000)]
        assert (len(gateway.origin.calls) - asked, reader.http_reads) == (1, before)
        gateway.origin.put("bucket", "data/a", b"changed")
        assert await local.read(reader, "bucket/data/a") == [b"changed"]
        gateway.origin.buckets["bucket"].remove("data/a")
        try:
            await local.read(reader, "bucket/data/a")
        except FileNotFoundError:
            return
        raise AssertionError("it is gone")


async def test_a_pending_object_comes_by_http(tmp_path: Path) -> None:
    """14 The buffer has its bytes; before and behind the flush the reader gets what was acknowledged last."""
    buffered = Slot("data", Prefix.parse("s3://bucket/data/"), consistency="ttl", write="back")
    async with gateway_app(tmp_path, slots=[buffered], writeback=True) as gateway, local_gateway(gateway) as local:
        await fill(gateway, "data/a")
        reader = local.reader()
        await local.warm(reader, "bucket/data/a")
        for body in (b"first", b"second", b"third"):
            answer = await call(gateway.app, "PUT", "/bucket/data/a", {}, body)
            assert await local.read(reader, "bucket/data/a") == [body]
        assert answer.headers["x-forebay-cache"] == "absorbed"  # the first ones told how the bucket makes ETags


async def test_a_read_counts_as_a_get(tmp_path: Path) -> None:
    """15.5 In requests, bytes sent and hits of its slot and caller, as if it had come by HTTP."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        await fill(gateway, "data/a")
        reader = local.reader()
        await local.warm(reader, "bucket/data/a")
        local.prepared.close()
        counted = [
            metrics.REQUESTS.value("GetObject", "data", "200", "hit"),
            metrics.SENT_BYTES.value("GetObject", "data"),
            metrics.CACHE_HIT_BYTES.value("data"),
            metrics.CALLER_SENT_BYTES.value(ACCESS_KEY_ID),
            metrics.LOCAL_READS.value("given"),
        ]
        assert await local.read(reader, *["bucket/data/a"] * 10) == [content(1000)] * 10
        local.prepared.close()
        after = [
            metrics.REQUESTS.value("GetObject", "data", "200", "hit"),
            metrics.SENT_BYTES.value("GetObject", "data"),
            metrics.CACHE_HIT_BYTES.value("data"),
            metrics.CALLER_SENT_BYTES.value(ACCESS_KEY_ID),
            metrics.LOCAL_READS.value("given"),
        ]
        assert [new - old for new, old in zip(after, counted, strict=True)] == [10, 10_000, 10_000, 10_000, 10]


def seal(gateway: GatewayApp) -> None:
    """As after some seconds without a new block."""
    for writer in gateway.blocks._dependencies.writers:
        writer._appender.seal()


async def until_given(stranger: Stranger, name: str) -> None:
    for _ in range(200):
        if await stranger.asks(name) == [True]:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{name} is not given")
