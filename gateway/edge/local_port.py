"""The local socket: clients of this machine ask where bytes lie, and read the files themselves (docs/local-reads.md).

    HELLO → the key's proof → RESOLVE → prepared.py: version, rights, place → descriptors → answer

Prepared reads decide, as they do for a GET. What they do not answer at once, or what a client may not be shown, is
`absent`: the client asks by HTTP, which fills the cache, reports errors and waits for limits.

A descriptor keeps its file's room on disk. So a client releases files that it has not used for a while: one that does
not is cut off, and its process gets no descriptor for some time.
"""

from __future__ import annotations

import array
import asyncio
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import structlog

from forebay import wire
from gateway.core.clock import Clock
from gateway.core.errors import ForebayError, S3Error
from gateway.core.model import ObjectKey
from gateway.edge.access import Key
from gateway.edge.asgi import passes_at_once
from gateway.edge.prepared import PreparedRequests
from gateway.edge.s3_server import ConnectionCounts, Listener
from gateway.operations.local_reads import HandedOut, LocalFiles, Place, PreparedRead, Reads, SharedRead, StrictRead
from gateway.origin.client import ACCOUNT
from gateway.policy.callers import Admission, CallerLimits
from gateway.telemetry import metrics
from gateway.telemetry.tracing import TRACE

CONNECTIONS_MAX = 1024
STRANGERS_MAX = 64
"""Connections of a worker, and those among them that have proved no key yet."""

HELD_MAX = 512
"""Files that one connection may hold: some 40 KiB of this process's memory."""

LEASE_SECONDS = 30
GRACE_SECONDS = 5
"""A client must have released a file that it has not used for so long; some seconds later it is cut off."""

HELLO_SECONDS = 10
SWEEP_SECONDS = 2.5
REFUSED_SECONDS = 300.0
"""Seconds for which a process that was cut off gets no descriptor."""

_CREDENTIALS = struct.Struct("3i")
_ABSENT, _LATER = bytes([wire.ABSENT]), bytes([wire.LATER])

_log = structlog.get_logger("forebay.local")


_Read = tuple[Reads | None, int, int, HandedOut | None]
"""A read of a RESOLVE: first byte and number of bytes; without a HandedOut it is absent."""

_ABSENT_READ: _Read = (None, 0, 0, None)
_TO_ASK_AGAIN: _Read = (None, 0, -1, None)


class _Connection:
    __slots__ = ("access_key_id", "agent", "answering", "connection", "held", "key", "nonce", "pid", "since", "token")

    def __init__(self, connection: socket.socket, since: float) -> None:
        self.connection = connection
        self.since = since
        self.nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self.key: Key | None = None
        self.access_key_id = ""
        self.token: str | None = None
        self.agent = ""
        self.held: dict[bytes, float] = {}
        """The client's files, and when each was used last."""
        self.answering: asyncio.Task[None] | None = None
        facts = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid: int = _CREDENTIALS.unpack(facts)[0]


class LocalPort:
    """The local socket of one worker. Event loop only."""

    def __init__(
        self,
        prepared: PreparedRequests,
        sockets: Sequence[socket.socket],
        clock: Clock,
        counts: ConnectionCounts | None = None,
    ) -> None:
        """Serve `sockets`. `counts` are shared with the workers that accept from them, too; None: there are none."""
        self._prepared = prepared
        self._app = prepared.app
        self._files = LocalFiles(prepared.app.services)
        self._clock = clock
        self._counts = counts
        self._listeners = [Listener(one, self._on_connection, self._is_others_turn) for one in sockets]
        self._all: dict[_Connection, None] = {}
        self._refused: dict[int, float] = {}
        """Processes that were cut off, and until when each is refused."""
        self._buffer = bytearray(wire.MESSAGE_BYTES_MAX)

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then close all connections: their clients go on by HTTP."""
        self._tell_count()
        stopped = asyncio.create_task(stop.wait())
        try:
            while not stopped.done():
                for listener in self._listeners:
                    listener.resume()  # one that found no descriptor has paused
                pause = asyncio.ensure_future(self._clock.sleep(SWEEP_SECONDS))
                await asyncio.wait((stopped, pause), return_when=asyncio.FIRST_COMPLETED)
                pause.cancel()
                self.sweep()
        finally:
            stopped.cancel()
            for listener in self._listeners:
                listener.close()
            for one in list(self._all):
                self._close(one)
            if self._counts is not None:
                self._counts.leave()

    def sweep(self) -> None:
        """Cut off strangers that say nothing, and clients that keep files too long."""
        now = self._clock.monotonic()
        self._refused = {pid: until for pid, until in self._refused.items() if until > now}
        for one in list(self._all):
            if one.key is None and now - one.since > HELLO_SECONDS:
                self._close(one, "stranger")
            elif one.held and now - min(one.held.values()) > LEASE_SECONDS + GRACE_SECONDS:
                _log.warning("a local client keeps files too long", process=one.pid, files=len(one.held))
                if one.pid:
                    self._refused[one.pid] = now + REFUSED_SECONDS
                self._close(one, "lease")

    def _is_others_turn(self) -> bool:
        return self._counts is not None and self._counts.others_have_fewer(len(self._all))

    def _tell_count(self) -> None:
        if self._counts is not None:
            self._counts.tell(len(self._all))

    def _on_connection(self, connection: socket.socket) -> None:
        strangers = [one for one in self._all if one.key is None] if len(self._all) >= STRANGERS_MAX else []
        if len(strangers) >= STRANGERS_MAX:
            self._close(strangers[0], "crowd")
        if len(self._all) >= CONNECTIONS_MAX:
            connection.close()
            metrics.LOCAL_CUT_OFF.add(1, "crowd")
            return
        connection.setblocking(False)
        one = _Connection(connection, self._clock.monotonic())
        self._all[one] = None
        self._tell_count()
        metrics.LOCAL_CONNECTIONS.add(1)
        asyncio.get_running_loop().add_reader(connection.fileno(), self._readable, one)
        self._send(one, wire.GREETING + one.nonce)

    def _close(self, one: _Connection, reason: str | None = None) -> None:
        """Close a connection; with a `reason` the gateway cuts it off."""
        if one not in self._all:
            return
        del self._all[one]
        self._tell_count()
        asyncio.get_running_loop().remove_reader(one.connection.fileno())
        if one.answering is not None:
            one.answering.cancel()
        one.connection.close()
        metrics.LOCAL_CONNECTIONS.add(-1)
        if reason is not None:
            metrics.LOCAL_CUT_OFF.add(1, reason)

    def _send(self, one: _Connection, message: bytes, descriptors: Sequence[int] = ()) -> None:
        try:
            if descriptors:
                passed = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors)
                one.connection.sendmsg([message], [passed])
            else:
                one.connection.send(message)
        except (BlockingIOError, InterruptedError):  # it asks without taking answers
            self._close(one, "protocol")
        except OSError:
            self._close(one)

    def _readable(self, one: _Connection) -> None:
        try:
            size = one.connection.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size = 0
        if not size:
            self._close(one)
            return
        try:
            if size == len(self._buffer):
                raise ValueError("a message is too long")
            self._take(one, bytes(memoryview(self._buffer)[:size]))
        except S3Error as error:
            self._refuse(one, error.message)
        except (ValueError, struct.error):
            self._close(one, "protocol")
        except Exception:  # noqa: BLE001 - one client's message must not end the port
            _log.exception("a local read failed")
            self._close(one)

    def _take(self, one: _Connection, message: bytes) -> None:
        kind = message[0]
        if one.key is None:
            self._hello(one, message)
        elif kind == wire.RESOLVE:
            self._resolve(one, message)
        elif kind == wire.RELEASE:
            for at in range(1, len(message), wire.FILE_ID_BYTES):
                one.held.pop(message[at : at + wire.FILE_ID_BYTES], None)
        elif kind == wire.REPORT:
            (read,) = wire.reads_of(message)
            self._go_on(one, self._check(one, self._key(one), *read))
        else:
            raise ValueError("a message of no kind")

    # Who is it?

    def _hello(self, one: _Connection, message: bytes) -> None:
        if message[0] != wire.HELLO or len(message) > wire.HELLO_BYTES_MAX:
            raise ValueError("no HELLO")
        texts, at = list[str](), 1 + wire.LENGTHS.size
        for length in wire.LENGTHS.unpack_from(message, 1):
            texts.append(message[at : at + length].decode())
            at += length
        access_key_id, token, agent = texts
        key = self._app.authenticator.key_named(access_key_id, token or None)
        expected = wire.proof(key.secret_access_key, one.nonce, access_key_id, token)
        if not hmac.compare_digest(expected, message[at:]):
            self._refuse(one, "the secret access key is another one")
        elif one.pid in self._refused:
            self._refuse(one, "this process kept files too long; it may try again in some minutes")
        else:
            one.key, one.access_key_id, one.token, one.agent = key, access_key_id, token or None, agent
            self._send(one, wire.WELCOME.pack(wire.HELLO, HELD_MAX, LEASE_SECONDS))

    def _refuse(self, one: _Connection, why: str) -> None:
        self._send(one, bytes([wire.REFUSED]) + why.encode())
        self._close(one, "stranger")

    def _key(self, one: _Connection) -> Key:
        """Return the caller's key as it is now; S3Error when it is gone, or another one."""
        assert one.key is not None  # noqa: S101 - `_take` asks
        key = self._app.authenticator.key_named(one.key.access_key_id, one.token)
        if key.secret_access_key != one.key.secret_access_key:
            raise ValueError("the key has changed")
        return key

    # Where are the bytes?

    def _resolve(self, one: _Connection, message: bytes) -> None:
        began, key, held = time.perf_counter(), self._key(one), one.held
        must_wait, local_read, access_key_id = False, self._prepared.local_read, one.access_key_id
        reads: list[_Read] = []
        for name, first, count in wire.reads_of(message):
            read, given = local_read((access_key_id, name), key), None
            if isinstance(read, PreparedRead):
                given = read.hand_out(first, count)
                if given is not None:
                    for file_id in given.files:
                        must_wait = must_wait or file_id not in held
            elif read is not None:
                must_wait = True
            reads.append((read, first, count, given))
        if must_wait:
            self._go_on(one, self._resolve_later(one, key, reads, began))
        else:
            self._answer(one, key, reads, {}, began)

    def _go_on(self, one: _Connection, work: Coroutine[Any, Any, None]) -> None:
        """Do what must be waited for; until it is done, no other message of the connection is read."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(one.connection.fileno())

        async def run() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except Exception:  # noqa: BLE001 - as in `_readable`
                _log.exception("a local read failed")
                one.answering = None
                self._close(one)
            if one in self._all:
                one.answering = None
                loop.add_reader(one.connection.fileno(), self._readable, one)

        one.answering = loop.create_task(run())

    async def _resolve_later(self, one: _Connection, key: Key, reads: Sequence[_Read], began: float) -> None:
        ACCOUNT.set(key.access_key_id)
        TRACE.set(None)
        reads = await asyncio.gather(*(_asked(read) for read in reads))
        new, whole = dict[bytes, Place](), set[bytes]()
        for number, (read, _, _, given) in enumerate(reads):
            missing = {place.file_id: place for place in given.places if place.file_id not in one.held} if given else {}
            if new and len(new) + len(missing) > wire.FILES_MAX:
                reads[number:] = [_TO_ASK_AGAIN] * (len(reads) - number)
                break
            if len(one.held) + len(new) + len(missing) > HELD_MAX:
                reads[number] = _ABSENT_READ
                continue
            new |= missing
            if isinstance(read, PreparedRead) and read.may_be_shown(key.grant):
                whole |= missing.keys()
        slots, grant = self._app.services.slots, key.grant

        def may_read(found: ObjectKey) -> bool:
            return grant.covers(*found) and slots.find(*found).authorization != "origin"

        everything = grant.covers_everything and not slots.any_by_origin
        opened = await self._files.open(new, whole, None if everything else may_read)
        try:
            self._answer(one, key, reads, {file_id: lease.descriptor for file_id, lease in opened.items()}, began)
        finally:
            for lease in opened.values():
                lease.close()

    def _answer(
        self, one: _Connection, key: Key, reads: Sequence[_Read], new: Mapping[bytes, int], began: float
    ) -> None:
        limits = None
        if self._app.callers is not None:
            credential = self._app.authenticator.credential_of(key.access_key_id)
            limits = self._app.callers.find(credential, one.agent)
        now, held, absent, size = self._clock.monotonic(), one.held, 0, len(reads) + 1024
        admissions: list[Admission] = []
        parts: list[bytes] = []
        sent: list[tuple[Any, int]] = []
        if new:
            held.update(dict.fromkeys(new, now))
        for one_read in reads:
            read, _, _, given = one_read
            if one_read is _TO_ASK_AGAIN or (given is not None and size + len(given.packed) > wire.MESSAGE_BYTES_MAX):
                parts.append(_LATER)
            elif given is None or not (limits is None or _is_admitted(limits, given.size_bytes, admissions)):
                parts.append(_ABSENT)
                absent += 1
            else:
                for file_id in given.files:
                    if file_id not in held:
                        parts.append(_ABSENT)
                        absent += 1
                        break
                    held[file_id] = now
                else:
                    parts.append(given.packed)
                    size += len(given.packed)
                    sent.append((read, given.size_bytes))
        head = wire.ANSWER.pack(wire.RESOLVE, len(parts), len(new))
        self._send(one, b"".join((head, *new, *parts)), list(new.values()))
        for admission in admissions:
            admission.leave()
        metrics.LOCAL_READS.add(len(sent), "given")
        if absent:
            metrics.LOCAL_READS.add(absent, "absent")
        self._prepared.sent_local(sent, began, key.access_key_id)

    # Wrong bytes

    async def _check(self, one: _Connection, key: Key, name: bytes, first: int, count: int) -> None:
        read, *_ = await _asked((self._prepared.local_read((key.access_key_id, name), key), first, count, None))
        if isinstance(read, PreparedRead) and (given := read.hand_out(first, count)) is not None:
            metrics.LOCAL_READS.add(1, "damaged")
            slot = self._app.services.slots.find(*read.key)
            await self._files.drop_if_damaged(given.places, slot.name)
        self._send(one, bytes([wire.REPORT]))


async def _asked(unasked: _Read) -> _Read:
    """Ask the origin about an object of a `strict` slot, other nodes about one that they may write."""
    read, first, count, _ = unasked
    if not isinstance(read, (StrictRead, SharedRead)):
        return unasked
    try:
        found = await read.asked()
    except ForebayError:  # the reader by HTTP gets it
        found = None
    return found, first, count, found.hand_out(first, count) if found is not None else None


def _is_admitted(limits: CallerLimits, count: int, admissions: list[Admission]) -> bool:
    """Enter a read under its caller's limits, if that needs no wait."""
    admission = limits.enter_now("read", count)
    if admission is None:
        return False
    admissions.append(admission)
    return passes_at_once(admission, count)
