"""The link to Redis: real servers in every condition, and a wire in between that harms what passes."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme

from gateway.cluster import redis_link
from gateway.cluster.redis_link import PAUSE_SECONDS_MAX, QUEUE_WORDS_MAX, Primary, RedisLink, RedisPlace
from gateway.cluster.scripts import BEAT, FORGET, Entry, Script, prefix_of, question, rows_question
from gateway.core.errors import RegistryAway
from tests.cluster.test_scripts import NODES, Dice, Pair
from tests.support.connections import answering
from tests.support.manual_clock import ManualClock
from tests.support.redis_server import RedisServer, Wire, programs

PREFIX = prefix_of("train")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine answers take longer. Tests of answers that never come say how long they wait."""
    monkeypatch.setattr(redis_link, "CONNECT_SECONDS_MAX", 30.0)
    monkeypatch.setattr(redis_link, "ANSWER_SECONDS_MAX", 30.0)


def place(server: RedisServer, **more: object) -> RedisPlace:
    return RedisPlace((("127.0.0.1", server.port),), **more)  # type: ignore[arg-type]


@asynccontextmanager
async def linked(where: RedisPlace) -> AsyncIterator[tuple[RedisLink, ManualClock]]:
    clock = ManualClock()
    link = RedisLink(where, PREFIX, clock, "store")
    task = asyncio.create_task(link.run())
    try:
        yield link, clock
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def laid(wire: Wire) -> AsyncIterator[RedisPlace]:
    async with answering(wire.carry) as port:
        yield RedisPlace((("127.0.0.1", port),))


async def stamp(link: RedisLink, key: str = "key") -> int:
    """Put a stamp; its number."""
    return Entry.read((await link.ask(question("stamp", "bucket", [key]))).value[0]).stamp


async def away(link: RedisLink) -> str:
    """Ask in vain; the reason."""
    with pytest.raises(RegistryAway) as raised:
        await stamp(link)
    assert link.problem == str(raised.value)
    return link.problem


async def test_what_gathers_while_an_answer_is_on_its_way_is_asked_in_one_call(server: RedisServer) -> None:
    """Each gets its own answer, in the order in which they asked."""
    async with linked(place(server)) as (link, _):
        await stamp(link)
        with server.client as client:
            client.config_resetstat()
            first = asyncio.create_task(stamp(link, "first"))
            await asyncio.sleep(0)
            numbers = await asyncio.gather(first, *(stamp(link, f"key-{number}") for number in range(50)))
            assert numbers == list(range(numbers[0], numbers[0] + 51))
            assert client.info("commandstats")["cmdstat_evalsha"]["calls"] <= 3


async def test_a_request_that_leaves_harms_nobody(server: RedisServer) -> None:
    async with linked(place(server)) as (link, _):
        await stamp(link)
        asked = [asyncio.create_task(stamp(link, f"key-{number}")) for number in range(20)]
        await asyncio.sleep(0)
        for one in asked[::2]:
            one.cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in answers[::2])
        numbers = [one for one in answers[1::2] if isinstance(one, int)]
        assert numbers == sorted(set(numbers))
        assert len(numbers) == 10


async def test_the_queue_is_bounded(server: RedisServer) -> None:
    async with linked(place(server)) as (link, _):
        full = asyncio.create_task(link.ask(["look", "bucket", 1, *(["key"] * QUEUE_WORDS_MAX)]))
        await asyncio.sleep(0)
        with pytest.raises(RegistryAway, match="too many questions"):
            await stamp(link)
        full.cancel()


async def test_a_server_that_stands_still_is_given_up_and_asked_again_after_a_pause(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile questions fail at once: nobody waits twice."""
    async with linked(place(server)) as (link, clock):
        await stamp(link)
        server.freeze()
        try:
            monkeypatch.setattr(redis_link, "ANSWER_SECONDS_MAX", 0.1)
            assert await away(link) == "no answer in time"
            monkeypatch.setattr(redis_link, "ANSWER_SECONDS_MAX", 30.0)
            assert await asyncio.wait_for(away(link), 10.0) == "no answer in time"
        finally:
            server.go_on()
        await clock.advance(PAUSE_SECONDS_MAX)
        await stamp(link)
        assert link.problem == ""


async def test_pauses_grow_and_a_good_answer_ends_them(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    async with linked(place(server)) as (link, clock):
        waited = []
        for _ in range(6):
            assert "connecting" in await away(link)
            waited.append(link._again_at - clock.monotonic())
            await clock.advance(waited[-1])
        assert waited == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
        with server:
            await stamp(link)
        assert "closed" in await away(link)
        assert link._again_at - clock.monotonic() == pytest.approx(0.1)


async def test_an_answer_that_came_while_the_event_loop_stood_still_is_in_time(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that takes several turns of the loop to read, and one that a task waits for."""
    send = redis_link._Wire.send

    def stand_still(wire: Any, words: Any, take: Any) -> None:
        send(wire, words, take)
        monkeypatch.setattr(redis_link._Wire, "send", send)
        time.sleep(0.6)

    async with linked(place(server)) as (link, _):
        keys = [f"{number:03}" + "x" * 2000 for number in range(500)]
        await link.ask(question("stamp", "bucket", keys))
        monkeypatch.setattr(redis_link, "ANSWER_SECONDS_MAX", 0.2)
        calls = [
            lambda: stamp(link),
            lambda: link.ask(rows_question("bucket", b"", b"y")),
            lambda: link.call(FORGET, ["nobody", "no-store", 0]),
            link.run_of_primary,
        ]
        for call in calls:
            monkeypatch.setattr(redis_link._Wire, "send", stand_still)
            await call()


async def test_a_connection_that_is_given_up_is_closed_although_not_all_is_sent(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stands still would never take the rest. Nor does its end disturb the event loop."""
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    async with linked(place(server)) as (link, _):
        await stamp(link)
        assert link._primary is not None
        connection = link._primary._wire._transport.get_extra_info("socket")
        server.freeze()
        try:
            monkeypatch.setattr(redis_link, "ANSWER_SECONDS_MAX", 0.1)
            with pytest.raises(RegistryAway, match="no answer in time"):
                await link.ask(question("look", "bucket", ["x" * 30_000_000]))
            await asyncio.sleep(0.1)
            assert connection.fileno() == -1
        finally:
            server.go_on()
        await asyncio.sleep(0.1)
    assert problems == []


async def test_a_server_that_hangs_up_before_it_has_all_disturbs_nothing_but_the_question(server: RedisServer) -> None:
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    wire = Wire(server)
    is_asked = asyncio.Event()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing = asyncio.ensure_future(wire.carry(reader, writer))
        await is_asked.wait()
        passing.cancel()
        await asyncio.gather(passing, return_exceptions=True)
        writer.write_eof()
        await asyncio.sleep(0.2)
        while await reader.read(1 << 20):
            pass

    async with answering(carry) as port, linked(RedisPlace((("127.0.0.1", port),))) as (link, _):
        await stamp(link)
        asked = asyncio.create_task(link.ask(question("look", "bucket", ["x" * 30_000_000])))
        await asyncio.sleep(0)
        is_asked.set()
        with pytest.raises(RegistryAway, match="closed"):
            await asked
        await asyncio.sleep(0.1)
    assert problems == []


async def test_an_answer_that_drips_is_no_answer(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts for the whole of it."""
    wire = Wire(server)
    async with laid(wire) as where, linked(where) as (link, clock):
        await stamp(link)
        wire.mode = "drip"
        monkeypatch.setattr(redis_link, "ANSWER_SECONDS_MAX", 0.3)
        assert await away(link) == "no answer in time"
        wire.mode = "pass"
        monkeypatch.setattr(redis_link, "ANSWER_SECONDS_MAX", 30.0)
        await clock.advance(PAUSE_SECONDS_MAX)
        await stamp(link)


async def test_an_answer_that_is_cut_is_none_and_the_next_connection_begins_anew(server: RedisServer) -> None:
    """No answer of a question ends up at another."""
    wire = Wire(server)
    async with laid(wire) as where, linked(where) as (link, clock):
        before = await stamp(link)
        wire.mode = "cut"
        assert "closed" in await away(link)
        wire.mode = "pass"
        await clock.advance(PAUSE_SECONDS_MAX)
        assert await stamp(link) == before + 2, "what was asked in vain was carried out all the same"


async def test_what_does_not_speak_the_protocol_is_no_server(server: RedisServer) -> None:
    wire = Wire(server)
    async with laid(wire) as where, linked(where) as (link, clock):
        await stamp(link)
        wire.mode = "garble"
        assert "protocol" in await away(link)
        wire.mode = "pass"
        await clock.advance(PAUSE_SECONDS_MAX)
        await stamp(link)


async def test_a_question_to_another_run_is_not_carried_out(server: RedisServer) -> None:
    """Over a new connection and over one that has answered; questions to this run, and those behind it, are."""
    async with linked(place(server)) as (link, _):
        for number in range(2):
            asked = [
                asyncio.create_task(link.ask(question("claim", "bucket", [f"{name}-{number}", "token"]), run))
                for name, run in (("other", "0" * 16), ("any", ""), ("own", link.run_of_connection), ("more", "1"))
            ]
            answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30.0)
            assert [isinstance(one, RegistryAway) for one in answers] == [True, False, False, True]
            with pytest.raises(RegistryAway, match="another run"):
                await link.ask(question("claim", "bucket", [f"alone-{number}", "token"]), "2")
        found = await link.ask(question("look", "bucket", ["other-0", "other-1", "more-0", "more-1", "alone-1"]))
        assert found.value == [None] * 5


async def test_a_word_that_cannot_be_sent_fails_at_once(server: RedisServer) -> None:
    async with linked(place(server)) as (link, clock):
        await stamp(link)
        with pytest.raises(RegistryAway, match="surrogates"):
            await link.ask(question("look", "bucket", ["\ud800"]))
        await clock.advance(PAUSE_SECONDS_MAX)
        await stamp(link)


@pytest.mark.slow
async def test_a_server_that_wants_a_password_gets_it_and_nobody_reads_it(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--requirepass", "right-password") as server:
        for password, word in (("wrong-password", "invalid"), (None, "required")):
            async with linked(place(server, password=password)) as (link, _):
                reason = await away(link)
                assert word in reason.lower()
                assert "wrong-password" not in reason
        async with linked(place(server, password="right-password", user="default")) as (link, _):
            await stamp(link)


async def test_an_answer_that_is_none_is_told_to_who_waits(server: RedisServer) -> None:
    """And the link goes on."""
    async with linked(place(server)) as (link, clock):
        two = [*question("look", "bucket", ["one"]), *question("look", "bucket", ["two"])]
        for _ in ("with the first connection", "with one that has answered"):
            with pytest.raises(RegistryAway, match="another question"):
                await link.ask(two)
            await clock.advance(PAUSE_SECONDS_MAX)
            await stamp(link)


@pytest.mark.parametrize("reply", [None, 7, [b"x", []], [0, None], [0, [b"1", b"2"]]])
async def test_a_reply_that_no_script_gives_is_told_to_who_waits(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, reply: object
) -> None:
    async with linked(place(server)) as (link, clock):
        await stamp(link)
        with monkeypatch.context() as patched:
            patched.setattr(Primary, "ask", lambda _self, _words, take: take(reply))
            assert "another question" in await away(link)
        await clock.advance(PAUSE_SECONDS_MAX)
        await stamp(link)


async def test_who_asks_when_the_link_has_ended_does_not_wait(server: RedisServer) -> None:
    async with linked(place(server)) as (link, _):
        asked = asyncio.create_task(stamp(link))
        await asyncio.sleep(0)
    for one in (asked, asyncio.create_task(stamp(link))):
        with pytest.raises(RegistryAway, match="this process ends"):
            await asyncio.wait_for(one, 10.0)


async def test_a_user_with_the_rights_that_the_documentation_lists_is_enough(tmp_path: Path) -> None:
    """For all that the scripts do, as often as they are called at random."""
    page = (Path(__file__).parents[2] / "docs/security.md").read_text()
    (rights,) = (line.strip() for line in page.splitlines() if line.strip().startswith("ACL SETUSER"))
    with RedisServer(tmp_path) as server, server.client as client:
        client.execute_command(*rights.replace("PASSWORD", "word").split())
        dice, model = Dice(5), Pair(client)
        async with linked(place(server, user="forebay", password="word", database=0)) as (link, _):
            for _ in range(300):
                await link.ask(dice.question())
                await link.call(BEAT, dice.beat(model))
                await link.call(FORGET, [dice.choice(NODES), "store-1", 0])
        async with linked(place(server, user="forebay", password="word", database=1)) as (link, _):
            await stamp(link)


async def test_a_replica_is_refused_and_so_is_a_primary_that_has_become_one(
    server: RedisServer, tmp_path: Path
) -> None:
    """Its scripts would read an older state."""
    with RedisServer(tmp_path) as other, other.client as client:
        async with linked(place(other)) as (link, clock):
            await stamp(link)
            client.replicaof("127.0.0.1", server.port)
            assert "read only replica" in await away(link)
            await clock.advance(PAUSE_SECONDS_MAX)
            assert "no primary" in await away(link)


async def test_a_primary_without_its_replicas_and_a_full_one_refuse_what_only_reads(tmp_path: Path) -> None:
    for more, word in ((("--min-replicas-to-write", "1"), "replicas"), (("--maxmemory", "1"), "memory")):
        with RedisServer(tmp_path, *more) as server:
            async with linked(place(server)) as (link, _):
                with pytest.raises(RegistryAway, match=word):
                    await link.ask(question("look", "bucket", ["key"]))


async def test_a_server_that_may_evict_is_refused_and_one_that_has_is_another_run(tmp_path: Path) -> None:
    """Entries are gone that nodes have put there, and nothing else tells."""
    with RedisServer(tmp_path) as server, server.client as client:
        async with linked(place(server)) as (link, clock):
            run = await link.run_of_primary()
            client.config_set("maxmemory-policy", "allkeys-lru")
            assert await link.run_of_primary() == run, "it never drops anything: it has no limit"
            client.set("some", "key")
            client.config_set("maxmemory", 1)
            while client.info("stats")["evicted_keys"] == 0:  # it evicts when it is asked something
                with contextlib.suppress(redis.ResponseError):
                    client.set("other", "key")
            with pytest.raises(RegistryAway, match="maxmemory-policy is allkeys-lru"):
                await link.run_of_primary()
            client.config_set("maxmemory", 0)
            await clock.advance(PAUSE_SECONDS_MAX)
            assert await link.run_of_primary() != run


async def test_a_server_that_somebody_empties_is_another_run(server: RedisServer) -> None:
    """Process, primary and connection stay; what nodes have put there is gone."""
    async with linked(place(server)) as (link, _):
        run = await link.run_of_primary()
        assert await link.run_of_primary() == run
        with server.client as client:
            client.flushall()
        assert await link.run_of_primary() != run


async def test_a_server_that_somebody_has_emptied_answers_nothing_more(server: RedisServer) -> None:
    """12.4 Changes are missing there: no answer counts and nothing is written, also once others know the new run."""
    async with linked(place(server)) as (link, clock), linked(place(server)) as (other, _):
        for is_found_by_other in (False, True):
            await stamp(link)
            with server.client as client:
                client.flushall()
                if is_found_by_other:
                    await other.run_of_primary()
                assert await away(link) == "EMPTIED somebody has emptied the server"
                assert client.dbsize() == is_found_by_other
            await clock.advance(PAUSE_SECONDS_MAX)


@pytest.mark.parametrize("script", [BEAT, FORGET], ids=lambda script: script.name)
async def test_a_server_that_somebody_has_emptied_learns_nothing_of_its_members(
    server: RedisServer, script: Script
) -> None:
    """12.4 A beat would tell a node that it is the only one: it names those that it knew with the first of a run."""
    async with linked(place(server)) as (link, _):
        await link.run_of_primary()
        with server.client as client:
            client.flushall()
            with pytest.raises(RegistryAway, match="emptied"):
                await link.call(script, ["node", "b", "1", "run", "1", "0", "0", "", "5", "5", "5"])
            assert client.dbsize() == 0


async def test_scripts_that_somebody_flushes_are_sent_again(server: RedisServer) -> None:
    async with linked(place(server)) as (link, _):
        await stamp(link)
        with server.client as client:
            client.script_flush()
        await stamp(link)
        assert (await link.call(FORGET, ["nobody", "no-store", 0])).value == 0


async def test_a_server_that_starts_again_or_is_promoted_again_is_another_run(
    server: RedisServer, tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as other, other.client as client:
        async with linked(place(other)) as (link, clock):
            look = question("look", "bucket", ["key"])
            runs = [(await link.ask(look)).run, (await link.ask(look)).run]
            assert runs[0] == runs[1]
            other.restart()
            assert "closed" in await away(link)
            await clock.advance(PAUSE_SECONDS_MAX)
            runs.append((await link.ask(look)).run)
            client.replicaof("127.0.0.1", server.port)
            client.replicaof("NO", "ONE")
            link.renew()
            runs.append((await link.ask(look)).run)
            assert len(set(runs)) == 3, "the process is the same, and may have lost what the primary between had"


async def test_a_server_that_is_too_old_or_hides_its_run_is_refused(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_link, "_OLDEST", {"redis_version": (99, 0)})
    async with linked(place(server)) as (link, _):
        assert "is needed" in await away(link)
    monkeypatch.setattr(redis_link, "_OLDEST", {"redis_version": (7, 0)})
    monkeypatch.setattr(redis_link, "_RUN", re.compile("none"))
    async with linked(place(server)) as (link, _):
        assert "proxy" in await away(link)


async def test_the_primary_is_found_by_sentinels(server: RedisServer, tmp_path: Path) -> None:
    """Those that do not answer, and those that do not know it, are passed over."""
    config = tmp_path / "sentinel.conf"
    config.write_text(f"sentinel monitor ours 127.0.0.1 {server.port} 1\n")
    silent = RedisServer(tmp_path)
    with RedisServer.sentinel(config) as sentinel:
        places = (("127.0.0.1", silent.port), ("127.0.0.1", sentinel.port))
        async with linked(RedisPlace(places, "ours")) as (link, _):
            await stamp(link)
        async with linked(RedisPlace(places, "theirs")) as (link, _):
            assert "knows no 'theirs'" in await away(link)
    async with linked(RedisPlace(places, "ours")) as (link, _):
        assert "no Sentinel answers" in await away(link)


def tls_options(authority: trustme.CA, directory: Path) -> list[str]:
    """What a server on this machine needs to speak TLS."""
    paths = {name: str(directory / name) for name in ("cert", "key", "ca")}
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(paths["cert"])
    issued.private_key_pem.write_to_path(paths["key"])
    authority.cert_pem.write_to_path(paths["ca"])
    files = ("--tls-cert-file", paths["cert"], "--tls-key-file", paths["key"], "--tls-ca-cert-file", paths["ca"])
    return [*files, "--tls-auth-clients", "no"]


of_redis = pytest.mark.skipif("redis" not in programs(), reason="the other one is built without TLS")


@of_redis
async def test_tls_is_verified(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    options = tls_options(authority, tmp_path)
    with RedisServer(tmp_path, *options, program=programs()["redis"], tls=True) as server:
        for trusted, ends in ((authority, True), (other, False)):
            where = RedisPlace((("127.0.0.1", server.tls_port),), tls=True, ca=trusted.cert_pem.bytes().decode())
            async with linked(where) as (link, _):
                if ends:
                    await stamp(link)
                else:
                    assert "certificate verify failed" in (await away(link)).lower()


@of_redis
async def test_sentinels_have_a_password_of_their_own_and_speak_tls_as_the_primary_does(tmp_path: Path) -> None:
    authority, program = trustme.CA(), programs()["redis"]
    options, ca = tls_options(authority, tmp_path), authority.cert_pem.bytes().decode()
    with RedisServer(tmp_path, *options, "--requirepass", "of-redis", program=program, tls=True) as server:
        config = tmp_path / "sentinel.conf"
        lines = [
            *(f"{name.removeprefix('--')} {value}" for name, value in zip(options[::2], options[1::2], strict=True)),
            "tls-replication yes",
            "requirepass of-sentinels",
            f"sentinel monitor ours 127.0.0.1 {server.tls_port} 1",
            "sentinel auth-pass ours of-redis",
        ]
        config.write_text("\n".join(lines) + "\n")
        with RedisServer.sentinel(config, tls=True, program=program) as sentinel:
            for password, ends in (("of-sentinels", True), ("of-redis", False)):
                places = (("127.0.0.1", sentinel.tls_port),)
                where = RedisPlace(places, "ours", password="of-redis", sentinel_password=password, tls=True, ca=ca)
                async with linked(where) as (link, _):
                    if ends:
                        await stamp(link)
                    else:
                        assert "no Sentinel answers" in await away(link)
