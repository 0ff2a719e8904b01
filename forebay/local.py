"""Reads of objects from the files of a gateway on the same machine (docs/local-reads.md).

    reader = Reader()
    first, second = reader.read_many(["bucket/train/0001.jpg", "bucket/train/0002.jpg"])

The gateway says where the bytes lie, and hands over the files' descriptors; the reader verifies the CRC32C of each
64 KiB. What the gateway does not have, or may not show, comes by HTTP. So does everything without a gateway here.
"""

from __future__ import annotations

import array
import os
import resource
import socket
import struct
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from forebay import wire
from forebay.s3_get import Credentials, HttpReads
from forebay.s3_get import ReadError as ReadError

SOCKET_PATH = "/run/forebay/read.sock"
"""The gateway's socket; FOREBAY_LOCAL_SOCKET and `Reader` may name another one."""

ENDPOINT_URL = "http://127.0.0.1:9000"

ANSWER_SECONDS = 6.0
"""A reader that waits releases nothing: with UNUSED_SECONDS and LOOK_SECONDS, this is less than the gateway waits."""

BUSY_SECONDS = 0.1
"""A read waits so long for another thread's question, which may wait for the origin; then it goes by HTTP."""

AGAIN_SECONDS = 1.0
"""Seconds before a gateway that was not there is looked for again; reads go by HTTP meanwhile."""

UNUSED_SECONDS = 24.0
LOOK_SECONDS = 2.5
"""A file that was not used for so long is closed; seconds between two looks. The gateway waits for 35 seconds."""

POOLED_MAX, POOLED_BYTES_MAX = 16, 64 * 1024**2
"""Pieces of memory that a reader keeps for its next results."""
_ROOM_BYTES = 256 * 1024
_RECEIVED_MAX = wire.MESSAGE_BYTES_MAX
_ROOM_FOR_FILES = socket.CMSG_SPACE(4 * wire.FILES_MAX)
_CHUNK = wire.CHUNK_BYTES
_unpack_object, _unpack_extent = wire.OBJECT.unpack_from, wire.EXTENT.unpack_from
_CRCS = [struct.Struct(f"<{count}I") for count in range(33)]
_STEP_BYTES = 32 * _CHUNK


def _crc32c() -> Callable[[Any], int] | None:
    for module, name in (("awscrt.checksums", "crc32c"), ("google_crc32c", "value"), ("crc32c", "crc32c")):
        try:
            found: Callable[[Any], int] = getattr(__import__(module, fromlist=[name]), name)
        except ImportError:
            continue
        return found
    return None


class _File:
    """A descriptor, closed when the last reader has let go of it."""

    __slots__ = ("descriptor", "used")

    def __init__(self, descriptor: int, used: float) -> None:
        self.descriptor = descriptor
        self.used = used

    def close(self) -> None:
        descriptor, self.descriptor = getattr(self, "descriptor", -1), -1  # it may have been interrupted when made
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = close

    def is_over(self, unused_since: float) -> bool:
        return self.used < unused_since or not os.fstat(self.descriptor).st_nlink


_Extent = tuple[_File, int, int, bytes]
"""File, offset, length, and the checksums of its chunks."""

_Found = tuple[bytes, int, int, int, list[_Extent]]
"""ETag, size of the object, number of bytes given, number of bytes before these in the extents, and the extents."""


class Damaged(Exception):
    """Bytes of a file are not those that the gateway wrote."""


class NoGateway(Exception):
    """There is no gateway to ask now."""


class _Link:
    """A connection to the gateway, and the files that came over it. Not thread-safe: `Reader` locks it."""

    def __init__(self, path: str, credentials: Credentials, agent: str) -> None:
        self.files: dict[bytes, _File] = {}
        self._is_asked = False
        """True while an answer is to come, also once a signal has interrupted the reader that waited for it."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_SECONDS)
        try:
            self._socket.connect(path)
            greeting = self._socket.recv(_RECEIVED_MAX)
            if len(greeting) != len(wire.GREETING) + wire.NONCE_BYTES or not greeting.startswith(wire.GREETING):
                raise NoGateway(f"{path} speaks another protocol, or its gateway has no room")
            name, secret, token = credentials
            texts = [text.encode() for text in (name, token, agent)]
            head = bytes([wire.HELLO]) + wire.LENGTHS.pack(*map(len, texts))
            proof = wire.proof(secret, greeting[len(wire.GREETING) :], name, token)
            self._socket.sendall(b"".join((head, *texts, proof)))
            welcome = self._socket.recv(_RECEIVED_MAX)
            if welcome[:1] != bytes([wire.HELLO]):
                raise NoGateway(
                    f"{path}: {welcome[1:].decode(errors='replace') or 'the gateway closed the connection'}"
                )
            _, held_max, _ = wire.WELCOME.unpack(welcome)
        except OSError as error:
            self._socket.close()
            raise NoGateway(f"{path}: {error.strerror or error}") from error
        except BaseException:
            self._socket.close()
            raise
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._files_max = max(1, min(held_max, soft // 2) - wire.FILES_MAX)

    def resolve(self, reads: Sequence[bytes]) -> list[_Found | int]:
        """Return what the gateway has of each read, or wire.ABSENT or wire.LATER."""
        answer, passed = self._answer(b"".join((bytes([wire.RESOLVE]), *reads)))
        _, count, new = wire.ANSWER.unpack_from(answer)
        at, now = wire.ANSWER.size, time.monotonic()
        if new:
            descriptors = array.array("i")
            for _, _, data in passed:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
            for descriptor in descriptors:  # the last are missing if this process has no room for them
                self.files[answer[at : at + wire.FILE_ID_BYTES]] = _File(descriptor, now)
                at += wire.FILE_ID_BYTES
            lost = answer[at : at + (new - len(descriptors)) * wire.FILE_ID_BYTES]
            if lost:
                self._send(bytes([wire.RELEASE]) + lost)
            at += len(lost)
        found = list[_Found | int]()
        for _ in range(count):
            if answer[at] != wire.GIVEN:
                found.append(answer[at])
                at += 1
                continue
            _, etag_size, extents_count, size_bytes, given = _unpack_object(answer, at)
            at += wire.OBJECT.size + etag_size
            etag, extents, first_skip = answer[at - etag_size : at], list[_Extent](), 0
            for number in range(extents_count):
                file_id, offset, length, skip = _unpack_extent(answer, at)
                at += wire.EXTENT.size
                stop = at + 4 * -(-length // _CHUNK)
                file = self.files.get(file_id)
                if file is not None:
                    file.used = now
                    extents.append((file, offset, length, answer[at:stop]))
                if not number:
                    first_skip = skip
                at = stop
            is_whole = len(extents) == extents_count
            found.append((etag, size_bytes, given, first_skip, extents) if is_whole else wire.ABSENT)
        if len(self.files) > self._files_max:
            self.release(len(self.files) - self._files_max)
        return found

    def release(self, count: int = 0, unused_since: float = 0.0) -> None:
        """Close files, and tell the gateway: so many, or those not used since then, or evicted, as they take room."""
        by_use = sorted(self.files, key=lambda one: self.files[one].used)
        going = by_use[:count]
        if not count:
            going = [one for one in by_use if self.files[one].is_over(unused_since)]
        for one in going:
            del self.files[one]
        if going:
            self._send(b"".join((bytes([wire.RELEASE]), *going)))

    def report(self, read: bytes) -> None:
        """Tell the gateway of wrong bytes; it has dropped them when this returns."""
        self._answer(bytes([wire.REPORT]) + read)

    def _answer(self, question: bytes) -> tuple[bytes, list[tuple[int, int, bytes]]]:
        if self._is_asked:
            raise NoGateway("the answer to an earlier question was not taken")
        self._is_asked = True
        self._send(question)
        try:
            answer, passed, _, _ = self._socket.recvmsg(_RECEIVED_MAX, _ROOM_FOR_FILES, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise NoGateway(str(error)) from error
        if answer[:1] != question[:1]:
            raise NoGateway("the gateway closed the connection")
        self._is_asked = False
        return answer, passed

    def _send(self, message: bytes) -> None:
        try:
            self._socket.send(message)
        except OSError as error:
            raise NoGateway(str(error)) from error

    def close(self) -> None:
        self._socket.close()
        self.files.clear()


class Reader:
    """Reads objects. Threads may share it; a fork's child begins with a connection of its own. It can be pickled.

    Without arguments, it finds everything where S3 clients do: keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,
    the gateway's address in AWS_ENDPOINT_URL_S3.
    """

    def __init__(
        self,
        *,
        socket_path: str | None = None,
        endpoint_url: str | None = None,
        credentials: Credentials | None = None,
        region: str | None = None,
        verify: bool = True,
        http_threads: int = 16,
        user_agent: str = "forebay-local",
    ) -> None:
        """`verify` False: trust files and memory. `http_threads`: reads by HTTP at a time."""
        self._options = (socket_path, endpoint_url, credentials, region, verify, http_threads, user_agent)
        environment = os.environ
        self._path = socket_path or environment.get("FOREBAY_LOCAL_SOCKET", SOCKET_PATH)
        found = credentials or Credentials.found()
        if found is None:
            raise ValueError("no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        self.credentials = found
        given_url = endpoint_url or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        self.endpoint_url = given_url or ENDPOINT_URL
        self.region = region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
        self.http = HttpReads(self.endpoint_url, found, self.region, user_agent)
        self._agent = user_agent
        self._crc32c = _crc32c() if verify else None
        self._is_possible = not verify or self._crc32c is not None
        self._http_threads = http_threads
        self._said = False
        self.local_reads = self.http_reads = 0
        """Number of reads from files, and by HTTP."""
        self._begin()
        _readers.add(self)

    def _begin(self) -> None:
        self._lock, self._pool_lock = threading.RLock(), threading.Lock()
        self._link: _Link | None = None
        self._again_at = 0.0
        self._executor: ThreadPoolExecutor | None = None
        self._keeper: threading.Thread | None = None
        self._pool: list[bytearray] = []

    def __getstate__(self) -> tuple[Any, ...]:
        return self._options

    def __setstate__(self, options: tuple[Any, ...]) -> None:
        names = ("socket_path", "endpoint_url", "credentials", "region", "verify", "http_threads", "user_agent")
        self.__init__(**dict(zip(names, options, strict=True)))  # type: ignore[misc]

    def read(self, key: str, first: int = 0, count: int = 0, *, etag: str = "") -> memoryview:
        """Return bytes of one object; `count` 0: to the end. Raises as `read_many`.

        With an `etag`, quotes included, another version is an error: ReadError, of status 412.
        """
        return self._read_many([(key, first, count)], etag)[0]

    def read_many(self, keys: Sequence[str | tuple[str, int, int]]) -> list[memoryview]:
        """Return the bytes of objects, in order. A key is `bucket/key`, or `s3://bucket/key` or `forebay://bucket/key`.

        With (key, first, count) a range is read, as far as the object goes; `count` 0: to its end. Each result is of
        one version of its object. Raises FileNotFoundError, PermissionError, and ReadError for other refusals.
        """
        return self._read_many(keys, "")

    def _read_many(self, keys: Sequence[str | tuple[str, int, int]], etag: str) -> list[memoryview]:
        reads = [_name_of(key, 0, 0) if isinstance(key, str) else _name_of(*key) for key in keys]
        results: list[memoryview | None] = [None] * len(reads)
        if self._is_possible:
            for begin in range(0, len(reads), wire.KEYS_MAX):
                self._read_local(range(begin, min(len(reads), begin + wire.KEYS_MAX)), reads, results, etag.encode())
        else:
            self._say("no CRC32C here: install awscrt")
        missing = [number for number, result in enumerate(results) if result is None]
        self.local_reads += len(reads) - len(missing)
        if missing:
            self.http_reads += len(missing)
            gets = [(os.fsdecode(reads[number][0]), *reads[number][1:], etag) for number in missing]
            for number, body in zip(missing, self._by_http(gets), strict=True):
                results[number] = body
        return results  # type: ignore[return-value]

    def close(self) -> None:
        """Let go of all files and connections. The next read begins anew."""
        with self._lock:
            self._drop_link()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        self.http.close()

    # Files

    def _read_local(
        self,
        numbers: Sequence[int],
        reads: Sequence[tuple[bytes, int, int]],
        results: list[memoryview | None],
        etag: bytes,
    ) -> None:
        """Read what the gateway has, of this version if an ETag is given. What stays None is for HTTP."""
        packed = [wire.pack_read(*reads[number]) for number in numbers]
        while numbers:
            found = self._ask(packed)
            if found is None or (later := [at for at, one in enumerate(found) if one == wire.LATER]) == [
                *range(len(found))
            ]:
                return
            sizes = [sum([extent[2] for extent in one[4]]) if isinstance(one, tuple) else 0 for one in found]
            room, at = self._room(sum(sizes)), 0
            for number, one, asked, size in zip(numbers, found, packed, sizes, strict=True):
                if isinstance(one, tuple) and (not etag or one[0] == etag):
                    results[number] = self._content(reads[number], one, asked, room[at : at + size])
                at += size
            numbers, packed = [numbers[at] for at in later], [packed[at] for at in later]

    def _content(
        self, read: tuple[bytes, int, int], found: _Found, packed: bytes, content: memoryview
    ) -> memoryview | None:
        """Return the bytes of a read, brought into `content`; None: by HTTP."""
        etag, size_bytes, given, skip, extents = found
        name, first, count = read
        try:
            self._load(extents, content)
        except Damaged:
            self._report(packed)
            return None
        except OSError:
            return None  # the gateway's way, by HTTP, tells what is wrong
        if given != len(content):
            content = content[skip : skip + given]
        total = size_bytes - first
        if 0 < count < total:
            total = count
        return content if given == total else self._with_rest(name, first, content, total, etag)

    def _with_rest(self, name: bytes, first: int, content: memoryview, total: int, etag: bytes) -> memoryview | None:
        """Return a read that was given in part together with its rest, of the same version."""
        whole, done = memoryview(bytearray(total)), len(content)
        whole[:done] = content
        results: list[memoryview | None] = [None]
        while done < total:
            rest = name, first + done, min(total - done, len(content))
            self._read_local([0], [rest], results, etag)
            if results[0] is None:
                return None
            whole[done : done + rest[2]] = results[0]
            done, results = done + rest[2], [None]
        return whole

    def _load(self, extents: Sequence[_Extent], content: memoryview) -> None:
        """Fill `content` with the bytes of the extents, verified. Raises Damaged, OSError."""
        at = 0
        for file, offset, length, checksums in extents:
            if length <= _STEP_BYTES:
                part = content[at : at + length] if len(content) > length else content
                self._verify(part, os.preadv(file.descriptor, [part], offset), checksums)
            else:
                for start in range(0, length, _STEP_BYTES):  # what was read is verified while the processor has it
                    part = content[at + start : at + min(start + _STEP_BYTES, length)]
                    known = checksums[start // _CHUNK * 4 : (start + _STEP_BYTES) // _CHUNK * 4]
                    self._verify(part, os.preadv(file.descriptor, [part], offset + start), known)
            at += length

    def _verify(self, content: memoryview, got: int, checksums: bytes) -> None:
        if got != len(content):
            raise Damaged
        crc32c, at = self._crc32c, 0
        if crc32c is not None:
            for expected in _CRCS[len(checksums) // 4].unpack(checksums):
                if crc32c(content[at : at + _CHUNK]) != expected:
                    raise Damaged
                at += _CHUNK

    def _room(self, size: int) -> memoryview:
        """Return memory that no result uses any more, as fresh memory costs more than what is read into it."""
        with self._pool_lock:
            pool = self._pool
            for number in range(len(pool)):
                if size <= len(pool[number]) <= 2 * size + _ROOM_BYTES and _references(pool, number) == _UNUSED:
                    return memoryview(pool[number])[:size]
            pool.append(bytearray(-(-size // _ROOM_BYTES) * _ROOM_BYTES))
            made = memoryview(pool[-1])[:size]
            while len(pool) > POOLED_MAX or sum(map(len, pool)) > POOLED_BYTES_MAX:
                del pool[0]
        return made

    # The gateway

    def _ask(self, reads: Sequence[bytes]) -> list[_Found | int] | None:
        """Ask the gateway; None: it is not there, or another thread waits for it."""
        try:
            if not self._lock.acquire(timeout=BUSY_SECONDS):
                return None
            for _ in range(2):  # one that has started again does not know the link
                is_new = self._link is None
                try:
                    return self._linked().resolve(reads)
                except (NoGateway, struct.error, IndexError) as error:  # or it speaks another protocol
                    self._drop_link()
                    if is_new or isinstance(error.__cause__, TimeoutError):
                        return None
            return None
        finally:
            with suppress(RuntimeError):  # it is not held; an interrupt must not leave it held
                self._lock.release()

    def _report(self, read: bytes) -> None:
        with self._lock:
            try:
                self._linked().report(read)
            except NoGateway:
                self._drop_link()

    def _linked(self) -> _Link:
        if self._link is None:
            if time.monotonic() < self._again_at:
                raise NoGateway(f"{self._path}: there was no gateway a moment ago")
            try:
                self._link = _Link(self._path, self.credentials, self._agent)
            except NoGateway as error:
                self._again_at = time.monotonic() + AGAIN_SECONDS
                self._say(str(error))
                raise
            if self._keeper is None:
                self._keeper = threading.Thread(target=_keep, args=(weakref.ref(self),), daemon=True, name="forebay")
                self._keeper.start()
        return self._link

    def _drop_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _let_go(self) -> None:
        """Close the files that were not used for a while, and evicted ones."""
        with self._lock:
            if self._link is not None:
                try:
                    self._link.release(unused_since=time.monotonic() - UNUSED_SECONDS)
                except NoGateway:
                    self._drop_link()

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            warnings.warn(f"Forebay reads by HTTP, not from local files: {why}", RuntimeWarning, stacklevel=4)

    # HTTP

    def _by_http(self, gets: Sequence[tuple[str, int, int, str]]) -> Iterator[memoryview]:
        if len(gets) == 1:
            return iter([self.http.get(*gets[0])])
        with self._pool_lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._http_threads, thread_name_prefix="forebay-http")
            executor = self._executor
        return executor.map(lambda get: self.http.get(*get), gets)


def _references(pool: list[bytearray], number: int) -> int:
    return sys.getrefcount(pool[number])


_UNUSED = _references([bytearray(1)], 0)


def _name_of(key: str, first: int, count: int) -> tuple[bytes, int, int]:
    if key.startswith(("s3://", "forebay://")):
        key = key.partition("://")[2]
    if first < 0 or count < 0:
        raise ValueError(f"no range of bytes: {first}, {count}")
    return key.encode("utf-8", "surrogateescape"), first, count


def _keep(reader: weakref.ref[Reader]) -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        found = reader()
        if found is None:
            return
        found._let_go()
        del found


_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


def _after_fork() -> None:
    for reader in list(_readers):
        link = reader._link
        reader._begin()
        reader.http.close()
        if link is not None:
            for file in link.files.values():  # copies of the parent's, which its threads may have been reading
                file.close()
            link.close()


os.register_at_fork(after_in_child=_after_fork)
