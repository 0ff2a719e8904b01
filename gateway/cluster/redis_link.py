"""A process's one connection to the primary of Redis or Valkey, over which it asks what has gathered.

Requests never touch the connection: they put a question into the queue and wait for its answer, so a request may leave
at any time. While an answer is on its way questions gather; the next call of the script carries them all. An answer is
given to those who wait for it where it arrives; a task only connects, and runs what is asked seldom.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import field
from functools import partial
from typing import Any, Final, NamedTuple

from hiredis import HiredisError, Reader, ReplyError, pack_command
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from xxhash import xxh3_64_hexdigest

from gateway.cluster.scripts import ASK, SCRIPTS, Script, Word
from gateway.core.clock import Clock
from gateway.core.errors import RegistryAway
from gateway.core.model import immutable

ANSWER_SECONDS_MAX = 1.0
CONNECT_SECONDS_MAX = 2.0
"""For connection, TLS, authentication and handshake together."""

PAUSE_SECONDS_MIN: Final = 0.1
PAUSE_SECONDS_MAX: Final = 2.0
"""Between two connections that failed. Meanwhile questions fail at once."""

BATCH_WORDS_MAX: Final = 1500
QUEUE_WORDS_MAX: Final = 100_000
REASON_CHARACTERS_MAX: Final = 200

OTHER_RUN: Final = "this process asks another run of Redis than this node believes"

_NOTHING_YET: Final = object()
_NO_SCRIPT: Final = "NOSCRIPT"
_KEEPS: Final = "noeviction"
_HANDSHAKE: Final = Script("handshake", "")
_RUN, _VERSION = re.compile("[0-9a-f]{40}"), re.compile(r"(\d+)\.(\d+)")
_OLDEST: Final = {"valkey_version": (7, 2), "redis_version": (7, 0)}


@immutable
class RedisPlace:
    """The address of the primary, or of the Sentinels that know it.

    `service`: the name by which Sentinels at `places` know the primary; None: the first place is the primary's. `ca`:
    PEM certificates to trust instead of the system's.
    """

    places: tuple[tuple[str, int], ...]
    service: str | None = None
    database: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: str | None = None


class Answer(NamedTuple):
    """`run`: the primary's. `floor`: stamps up to this number may be gone."""

    run: str
    floor: int
    value: Any


class _Question(NamedTuple):
    script: Script
    words: Sequence[Word]
    run: str
    """The only run that it may reach; empty: any."""

    answer: asyncio.Future[Answer]


class RedisLink:
    """The questions of one process to the primary. Event loop only. Its owner runs `run` as a task."""

    def __init__(self, place: RedisPlace, prefix: str, clock: Clock, store: str = "") -> None:
        """`prefix`: what all keys begin with. `store`: this node's, which all questions name."""
        self._place = place
        self._prefix = prefix
        self._clock = clock
        self.store = store
        self._queue: deque[_Question] = deque()
        self._queued_words = 0
        self._is_busy = False
        """Something is asked, or will be in the next turn of the loop."""
        self._asked: list[_Question] = []
        self._patience: _Patience | None = None
        self._for_task: list[_Question] = []
        self._task_has_work = asyncio.Event()
        self._primary: Primary | None = None
        self._to_close: list[Primary] = []
        self._is_outdated = False
        self._pause_seconds = PAUSE_SECONDS_MIN
        self._again_at = 0.0
        self.about: Mapping[str, str] = {}
        """The fields of INFO, as the server told them in the last handshake."""
        self.problem = ""
        """Why the last call failed; empty: it did not."""

    async def ask(self, question: Sequence[Word], run: str = "") -> Answer:
        """Ask one of the questions that ASK takes. Raise RegistryAway, also if the primary is of another run."""
        return await self.call(ASK, question, run)

    async def call(self, script: Script, words: Sequence[Word], run: str = "") -> Answer:
        """Run a script. Raise RegistryAway."""
        if self._primary is None and self._clock.monotonic() < self._again_at:
            raise RegistryAway(self.problem)
        if self._queued_words > QUEUE_WORDS_MAX:
            raise RegistryAway("too many questions to Redis wait")
        loop = asyncio.get_running_loop()
        question = _Question(script, words, run, loop.create_future())
        self._queue.append(question)
        self._queued_words += len(words)
        if not self._is_busy:
            self._is_busy = True
            loop.call_soon(self._go_on)  # with what else is asked in this turn
        return await question.answer

    async def run_of_primary(self) -> str:
        """Return the run as the primary tells it now. Raise RegistryAway."""
        return (await self.call(_HANDSHAKE, ())).run

    @property
    def run_of_connection(self) -> str:
        """Return the run that the next question goes to; empty: it is not known yet."""
        return self._primary.run if self._primary is not None and not self._is_outdated else ""

    def renew(self) -> None:
        """Connect anew before the next call: the server may be another one, or no primary any more."""
        self._is_outdated = True

    async def run(self) -> None:
        """Connect, and run what is not asked often, for ever."""
        try:
            while True:
                await self._task_has_work.wait()
                self._task_has_work.clear()
                await self._close_old()
                batch, self._for_task = self._for_task, []
                if batch:
                    await self._answer(batch)
        finally:
            self._fail("this process ends", [*self._asked, *self._for_task])
            self._again_at = math.inf
            await self._close_old()

    def _go_on(self) -> None:
        """Ask what has gathered, if anything has."""
        batch = self._next_batch()
        if self._primary is not None and not self._is_outdated:
            batch = _meant_for(self._primary.run, batch)
        if not batch and self._queue:
            asyncio.get_running_loop().call_soon(self._go_on)
            return
        self._is_busy = bool(batch)
        if not batch:
            return
        if self._primary is None or self._is_outdated or batch[0].script is not ASK:
            self._leave_to_task(batch)
            return
        self._asked = batch
        self._patience = _Patience(ANSWER_SECONDS_MAX, self._lose_patience)
        self._primary.ask(self._words_of(batch), partial(self._take, self._primary))

    def _take(self, primary: Primary, reply: Any) -> None:
        if primary is not self._primary:
            return  # it was given up meanwhile
        batch = self._end_asked()
        if isinstance(reply, Exception):
            if str(reply).startswith(_NO_SCRIPT):
                self._leave_to_task(batch)
            else:
                self._fail(_reason(reply), batch)
        else:
            self._give(primary.run, batch, reply)

    def _lose_patience(self) -> None:
        self._fail(_reason(TimeoutError()), self._end_asked())

    def _end_asked(self) -> list[_Question]:
        batch, self._asked = self._asked, []
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        return batch

    def _leave_to_task(self, batch: list[_Question]) -> None:
        self._for_task = batch
        self._task_has_work.set()

    def _give(self, run: str, batch: list[_Question], reply: Any) -> None:
        """Give a call's answers to those who wait for them. `reply`: the floor, and an answer to each."""
        try:
            floor, values = reply
            answers = [
                (question.answer, Answer(run, int(floor), value)) for question, value in zip(batch, values, strict=True)
            ]
        except (TypeError, ValueError):
            self._fail("it gives an answer to another question", batch)
            return
        self.problem, self._pause_seconds = "", PAUSE_SECONDS_MIN
        for future, answer in answers:
            if not future.done():
                future.set_result(answer)
        self._go_on()

    def _next_batch(self) -> list[_Question]:
        """Take the next questions that one call can carry. Nobody waits for a cancelled one."""
        batch: list[_Question] = []
        words = 0
        while self._queue and words < BATCH_WORDS_MAX:
            if batch and (self._queue[0].script is not ASK or batch[0].script is not ASK):
                break
            question = self._queue.popleft()
            self._queued_words -= len(question.words)
            if not question.answer.done():
                batch.append(question)
                words += len(question.words)
        return batch

    def _words_of(self, batch: list[_Question]) -> list[Word]:
        return [self.store, *(word for one in batch for word in one.words)]

    async def _answer(self, batch: list[_Question]) -> None:
        try:
            primary = await self._connected()
            batch = _meant_for(primary.run, batch)
            if not batch:
                self._go_on()
                return
            async with _patient(ANSWER_SECONDS_MAX):
                if batch[0].script is ASK:
                    reply = await primary.call(ASK, self._words_of(batch))
                elif batch[0].script is _HANDSHAKE:
                    self.about = await primary.shake_hands()
                    reply = 0, [None]
                else:
                    reply = 0, [await primary.call(batch[0].script, batch[0].words)]
        except Exception as error:  # noqa: BLE001 - those who wait get the error, and the next call begins anew
            self._fail(_reason(error), batch)
        except BaseException:
            self._fail("this process ends", batch)
            raise
        else:
            self._give(primary.run, batch, reply)

    async def _connected(self) -> Primary:
        if self._is_outdated:
            self._give_up()
            await self._close_old()
        if self._primary is None:
            async with asyncio.timeout(CONNECT_SECONDS_MAX):
                self._primary = await connected(self._place, self._prefix)
        return self._primary

    def _give_up(self) -> None:
        if self._primary is not None:
            self._to_close.append(self._primary)
            self._task_has_work.set()
        self._primary, self._is_outdated = None, False

    async def _close_old(self) -> None:
        while self._to_close:
            await self._to_close.pop().close()

    def _fail(self, reason: str, batch: list[_Question]) -> None:
        """Fail all questions, and connect anew after a pause: the server may still carry out what it was sent."""
        self.problem = reason
        self._again_at = self._clock.monotonic() + self._pause_seconds
        self._pause_seconds = min(PAUSE_SECONDS_MAX, 2 * self._pause_seconds)
        for question in (*batch, *self._queue):
            if not question.answer.done():
                question.answer.set_exception(RegistryAway(reason))
        self._queue.clear()
        self._queued_words = 0
        self._is_busy = False
        self._end_asked()
        self._give_up()


def _meant_for(run: str, batch: list[_Question]) -> list[_Question]:
    """Return the questions that may reach a run. The others fail unsent: it would carry out what they ask."""
    for question in batch:
        if question.run not in ("", run) and not question.answer.done():
            question.answer.set_exception(RegistryAway(OTHER_RUN))
    return [question for question in batch if question.run in ("", run)]


def _reason(error: Exception) -> str:
    reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    return reason[:REASON_CHARACTERS_MAX]


class _Patience:
    """Calls `lose` after some seconds, but not before what arrived while the event loop stood still has been read."""

    def __init__(self, seconds: float, lose: Callable[[], None]) -> None:
        self._loop, self._lose = asyncio.get_running_loop(), lose
        self._timer = self._loop.call_later(seconds, self._look_again)

    def cancel(self) -> None:
        self._timer.cancel()

    def _look_again(self) -> None:
        late_seconds = self._loop.time() - self._timer.when()
        self._timer = self._loop.call_later(late_seconds, self._lose)


@asynccontextmanager
async def _patient(seconds: float) -> AsyncIterator[None]:
    async with asyncio.timeout(None) as limit:
        patience = _Patience(seconds, lambda: limit.reschedule(0))
        try:
            yield
        finally:
            patience.cancel()


class _Wire(asyncio.Protocol):
    """Commands and their replies over a connection that redis-py has made.

    redis-py reads a reply through asyncio's streams, which takes two turns of the loop more.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reader = Reader(notEnoughData=_NOTHING_YET)
        self._takers: deque[Callable[[Any], None]] = deque()
        self._transport: asyncio.Transport = connection._writer.transport
        self._is_lost = False
        self._transport.set_protocol(self)

    def send(self, words: Sequence[Word], take: Callable[[Any], None]) -> None:
        """Send a command. `take` gets the reply, or an exception."""
        if self._transport.is_closing():
            take(ConnectionError("the connection is closed"))
            return
        try:
            command = pack_command(tuple(words))  # type: ignore[arg-type]
        except (TypeError, UnicodeError) as error:
            take(error)
            return
        self._takers.append(take)
        self._transport.write(command)

    async def close(self) -> None:
        self._takers.clear()
        self._abort()  # redis-py would first send the rest: to a server that stands still, that never ends
        await self._connection.disconnect(nowait=True)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOTHING_YET:
                self._takers.popleft()(reply)
        except (HiredisError, IndexError) as error:
            self._abort()
            self._tell(ConnectionError(f"it does not speak Redis' protocol: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._tell(ConnectionError(f"the connection was closed: {error}" if error else "the connection was closed"))

    def _abort(self) -> None:
        if not self._is_lost:  # asyncio's transport fails when it is told to end once more
            self._transport.abort()

    def _tell(self, error: Exception) -> None:
        takers, self._takers = self._takers, deque()
        for take in takers:
            take(error)


class Primary:
    """A connection to a primary that has said so. `run` names its process since it became one, lost or evicted data."""

    def __init__(self, connection: Connection, prefix: str) -> None:
        self._wire = _Wire(connection)
        self._prefix = prefix
        self._mark = b""
        self.run = ""

    async def begin(self) -> None:
        """Make ready for calls. Raise RegistryAway if it is no primary, or too old."""
        await self.shake_hands()
        for script in SCRIPTS:
            await self._send("SCRIPT", "LOAD", script.text)

    async def shake_hands(self) -> Mapping[str, str]:
        """Find out its run, and return what it says of itself.

        The run is another one after a demotion, and once it has evicted something or was flushed, even if process and
        connection have stayed.
        """
        about = await self._info("server", "clients", "memory", "stats", "replication")
        name, oldest = next((one for one in _OLDEST.items() if one[0] in about), ("", (0, 0)))
        version = _VERSION.match(about.get(name, ""))
        if version is None or (int(version[1]), int(version[2])) < oldest:
            raise RegistryAway(f"it is of version {about.get(name, 'unknown')}: Redis 7.0 or Valkey 7.2 is needed")
        if about.get("role") != "master":
            raise RegistryAway(f"it is no primary: its role is {about.get('role', 'unknown')!r}")
        policy = about.get("maxmemory_policy", _KEEPS)
        if policy != _KEEPS and about.get("maxmemory", "0") != "0":
            raise RegistryAway(f"it may drop entries when it is full: maxmemory-policy is {policy}, not {_KEEPS}")
        of_process, of_primary = about.get("run_id", ""), about.get("master_replid", "")
        if not (_RUN.fullmatch(of_process) and _RUN.fullmatch(of_primary)):
            raise RegistryAway("it does not name its run: is there a proxy in between?")
        own = os.urandom(8)
        self._mark = await self._send("SET", self._prefix + "i", own, "NX", "GET") or own
        self.run = xxh3_64_hexdigest(f"{of_process}{of_primary}{about.get('evicted_keys', 0)}{self._mark.hex()}")
        return about

    async def call(self, script: Script, words: Sequence[Word]) -> Any:
        words = (*words, self._mark)
        try:
            return await self._send("EVALSHA", script.sha, 1, self._prefix, *words)
        except ReplyError as error:
            if not str(error).startswith(_NO_SCRIPT):
                raise
            # Somebody has flushed the scripts.
            return await self._send("EVAL", script.text, 1, self._prefix, *words)

    def ask(self, words: Sequence[Word], take: Callable[[Any], None]) -> None:
        """Run ASK. `take` gets its answer, or an exception, where it arrives."""
        self._wire.send(("EVALSHA", ASK.sha, 1, self._prefix, *words, self._mark), take)

    async def close(self) -> None:
        """Close the connection without waiting."""
        await self._wire.close()

    async def _info(self, *sections: str) -> Mapping[str, str]:
        try:
            text = (await self._send("INFO", *sections)).decode(errors="replace")
        except ReplyError as error:
            raise RegistryAway(f"it does not tell its state, as Redis 7.0 does: {error}") from error
        return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    async def _send(self, *words: Word) -> Any:
        came: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._wire.send(words, lambda reply: None if came.done() else came.set_result(reply))
        reply = await came
        if isinstance(reply, Exception):
            raise reply
        return reply


async def connected(place: RedisPlace, prefix: str) -> Primary:
    """Return the primary. Raise RegistryAway, OSError, RedisError or ReplyError."""
    host, port = place.places[0] if place.service is None else await _primary_of(place, place.service)
    primary = Primary(await _connection(host, port, place), prefix)
    try:
        await primary.begin()
    except BaseException:
        await primary.close()
        raise
    return primary


async def _primary_of(place: RedisPlace, service: str) -> tuple[str, int]:
    """Return where the first Sentinel that answers has the primary."""
    problem = "no Sentinel answers"
    sentinel = RedisPlace((), password=place.sentinel_password, tls=place.tls, ca=place.ca)
    for host, port in place.places:
        try:
            async with asyncio.timeout(CONNECT_SECONDS_MAX / 2 / len(place.places)):
                asked = Primary(await _connection(host, port, sentinel), "")
                try:
                    found = await asked._send("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
                finally:
                    await asked.close()
        except (TimeoutError, OSError, RedisError, ReplyError) as error:
            problem = f"no Sentinel answers: {error or 'no answer in time'}"
            continue
        if found is not None:
            return found[0].decode(), int(found[1])
        problem = f"the Sentinel {host}:{port} knows no {service!r}"
    raise RegistryAway(problem)


async def _connection(host: str, port: int, place: RedisPlace) -> Connection:
    options: dict[str, Any] = {"host": host, "port": port, "db": place.database, "protocol": 2}
    options |= {"username": place.user, "password": place.password, "retry": Retry(NoBackoff(), 0)}
    options |= {"socket_timeout": None}  # callers limit the time of what they ask as a whole
    connection = SSLConnection(ssl_ca_data=place.ca, **options) if place.tls else Connection(**options)
    try:
        await connection.connect()
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    return connection
