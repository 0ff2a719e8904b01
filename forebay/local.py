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
from functools import cache, partial
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
_STARTS = range(0, 4 * _CHUNK, _CHUNK)
_STEP_BYTES = 4 * _CHUNK
"""Bytes that are verified while the processor's cache still has them."""

_TIMEVAL = struct.Struct("@ll")

_Crc32c = Callable[[Any, int], int]


def _crc32c() -> _Crc32c | None:
    for module, name in (
        ("_awscrt", "checksums_crc32c"),  # without the call in between
        ("awscrt.checksums", "crc32c"),
        ("crc32c", "crc32c"),
    ):
        with suppress(ImportError, AttributeError):
            found: _Crc32c = getattr(__import__(module, fromlist=[name]), name)
            return found
    with suppress(ImportError):
        value = __import__("google_crc32c").value
        return lambda content, _: int(value(content))
    return None


@cache
def _unpack_checksums(count: int) -> Callable[[bytearray, int], tuple[int, ...]]:
    return struct.Struct(f"<{count}I").unpack_from


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


_Extent = tuple[_File, int, int, tuple[int, ...]]
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
        self._received = bytearray(_RECEIVED_MAX)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        patience = _TIMEVAL.pack(int(ANSWER_SECONDS), int(ANSWER_SECONDS % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # the kernel's: Python's own polls before each call
            self._socket.setsockopt(socket.SOL_SOCKET, option, patience)
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
        answer, passed, now = self._received, self._answer(bytes([wire.RESOLVE]) + b"".join(reads)), time.monotonic()
        _, count, new = wire.ANSWER.unpack_from(answer)
        at, files = wire.ANSWER.size + new * wire.FILE_ID_BYTES, self.files
        found: list[_Found | int] = []
        if new:
            self._take(bytes(answer[wire.ANSWER.size : at]), passed, now)
        for _ in range(count):
            if answer[at] != wire.GIVEN:
                found.append(answer[at])
                at += 1
                continue
            _, etag_size, extents_count, size_bytes, given = _unpack_object(answer, at)
            at += wire.OBJECT.size + etag_size
            etag, before = bytes(answer[at - etag_size : at]), 0
            extents: list[_Extent] = []
            for number in range(extents_count):
                file_id, offset, length, skip = _unpack_extent(answer, at)
                at += wire.EXTENT.size
                chunks = -(-length // _CHUNK)
                file = files.get(file_id)
                if file is not None:
                    file.used = now
                    extents.append((file, offset, length, _unpack_checksums(chunks)(answer, at)))
                if not number:
                    before = skip
                at += 4 * chunks
            is_whole = len(extents) == extents_count
            found.append((etag, size_bytes, given, before, extents) if is_whole else wire.ABSENT)
        if len(files) > self._files_max:
            self.release(len(files) - self._files_max)
        return found

    def _take(self, ids: bytes, passed: Sequence[tuple[int, int, bytes]], now: float) -> None:
        """Keep the files that came with an answer: the last are missing if this process has no room for them."""
        descriptors, at = array.array("i"), 0
        for _, _, data in passed:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        for descriptor in descriptors:
            self.files[ids[at : at + wire.FILE_ID_BYTES]] = _File(descriptor, now)
            at += wire.FILE_ID_BYTES
        if ids[at:]:
            self._send(bytes([wire.RELEASE]) + ids[at:])

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

    def _answer(self, question: bytes) -> Sequence[tuple[int, int, bytes]]:
        """Receive the answer; return what came with it."""
        if self._is_asked:
            raise NoGateway("the answer to an earlier question was not taken")
        self._is_asked = True
        self._send(question)
        try:
            size, passed, _, _ = self._socket.recvmsg_into([self._received], _ROOM_FOR_FILES, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise NoGateway(str(error)) from error
        if not size or self._received[0] != question[0]:
            raise NoGateway("the gateway closed the connection")
        self._is_asked = False
        return passed

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
        self._options = {name: value for name, value in locals().items() if name != "self"}
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

    def __reduce__(self) -> tuple[Callable[[], Reader], tuple[()]]:
        return partial(Reader, **self._options), ()

    def read(self, key: str, first: int = 0, count: int = 0, *, etag: str = "") -> memoryview:
        """Return bytes of one object; `count` 0: to the end. Raises as `read_many`.

        With an `etag`, quotes included, another version is an error: ReadError, of status 412.
        """
        return self._read_many([(key, first, count)], etag)[0]

    def read_into(self, target: memoryview, key: str, first: int = 0, *, etag: str = "") -> None:
        """Fill `target` with bytes of an object, which must have as many; otherwise as `read`.

        They are verified when this returns; if it raises, `target` may hold anything.
        """
        if target:
            (found,) = self._read_many([(key, first, len(target))], etag, target)
            if len(found) != len(target):
                raise ReadError(f"{key}: it ends after {first + len(found)} bytes", 416)
            if found.obj is not target.obj:
                target[:] = found

    def begin(self, key: str, count: int) -> tuple[str, int, memoryview] | None:
        """Return ETag, size and the first bytes of an object whose bytes are in files here; None: HTTP tells."""
        found = self._ask([wire.pack_read(*_read_of(key, 0, count))]) if self._is_possible else None
        if not found or isinstance(found[0], int):
            return None
        etag, size_bytes, given, skip, extents = found[0]
        content = memoryview(bytearray(given))
        try:
            self._load(extents, skip, content)
        except (Damaged, OSError):
            return None
        self.local_reads += 1
        return etag.decode("latin-1"), size_bytes, content

    def read_many(self, keys: Sequence[str | tuple[str, int, int]]) -> list[memoryview]:
        """Return the bytes of objects, in order. A key is `bucket/key`, or `s3://bucket/key` or `forebay://bucket/key`.

        With (key, first, count) a range is read, as far as the object goes; `count` 0: to its end. Each result is of
        one version of its object. Raises FileNotFoundError, PermissionError, and ReadError for other refusals.
        """
        return self._read_many(keys, "")

    def _read_many(
        self, keys: Sequence[str | tuple[str, int, int]], etag: str, target: memoryview | None = None
    ) -> list[memoryview]:
        reads = [_read_of(key, 0, 0) if isinstance(key, str) else _read_of(*key) for key in keys]
        results: list[memoryview | None] = [None] * len(reads)
        if self._is_possible:
            for begin in range(0, len(reads), wire.KEYS_MAX):
                numbers = range(begin, min(len(reads), begin + wire.KEYS_MAX))
                self._read_local(numbers, reads, results, etag.encode(), target)
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
        target: memoryview | None = None,
    ) -> None:
        """Read what the gateway has, of this version if an ETag is given. What stays None is for HTTP.

        `target` is memory for one read; it may have wrong bytes if the result stays None.
        """
        while numbers:
            packed = [wire.pack_read(*reads[number]) for number in numbers]
            found = self._ask(packed)
            if found is None or all(one == wire.LATER for one in found):
                return
            size = sum([one[2] for one in found if not isinstance(one, int)])
            room = self._room(size) if target is None and size <= POOLED_BYTES_MAX else None
            stop = 0
            later: list[int] = []
            for number, one, asked in zip(numbers, found, packed, strict=True):
                if isinstance(one, int):
                    if one == wire.LATER:
                        later.append(number)
                    continue
                version, size_bytes, given, before, extents = one
                begin, stop = stop, stop + given
                if etag and version != etag:
                    continue
                name, first, count = reads[number]
                total = min(count or size_bytes, size_bytes - first)
                if target is not None:
                    content = target[:total]
                elif room is not None and given == total:
                    content = room[begin:stop]
                else:
                    content = memoryview(bytearray(total))
                try:
                    self._load(extents, before, content if given == total else content[:given])
                except Damaged:
                    self._report(asked)
                    continue
                except OSError:
                    continue  # the gateway's way, by HTTP, tells what is wrong
                if given == total or self._read_rest(name, first, content, given, version):
                    results[number] = content
            numbers = later

    def _read_rest(self, name: bytes, first: int, whole: memoryview, done: int, etag: bytes) -> bool:
        """Read what a question did not give, of the same version. False: it must come by HTTP."""
        step = done
        while done < len(whole):
            rest = name, first + done, min(len(whole) - done, step)
            results: list[memoryview | None] = [None]
            self._read_local([0], [rest], results, etag, whole[done : done + rest[2]])
            if results[0] is None:
                return False
            done += rest[2]
        return True

    def _load(self, extents: Sequence[_Extent], skip: int, content: memoryview) -> None:
        """Fill `content` with the bytes of the extents behind the first `skip`, verified. Raises Damaged, OSError."""
        crc32c, preadv, at = self._crc32c, os.preadv, 0
        for file, offset, length, checksums in extents:
            for start in range(0, length, _STEP_BYTES):
                size = min(_STEP_BYTES, length - start)
                part = content[at : at + size]
                into = part if len(part) == size and not skip else self._room(size)
                if preadv(file.descriptor, (into,), offset + start) != size:
                    raise Damaged
                if crc32c is not None:
                    for first, expected in zip(_STARTS, checksums[start // _CHUNK :], strict=False):
                        if crc32c(into[first : first + _CHUNK], 0) != expected:
                            raise Damaged
                if into is not part:
                    part = part[: size - skip]
                    part[:] = into[skip : skip + len(part)]
                    skip = 0
                at += len(part)

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
                    if is_new or isinstance(error.__cause__, BlockingIOError):  # it took too long
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


def _read_of(key: str, first: int, count: int) -> tuple[bytes, int, int]:
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
