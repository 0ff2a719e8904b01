"""The origin of a node in a cluster: what another node looks after is asked there, all else of the bucket.

COPY → the first owner, the second, then the bucket by ration
a block of this node's own → who owned it before, if the members have just changed, then the bucket
all else → the bucket
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal, NoReturn, TypeAlias

import structlog

from gateway.cluster.members import View
from gateway.cluster.peers import PeerAnswer, Peers
from gateway.core import cancellation
from gateway.core.clock import Clock
from gateway.core.errors import OriginBodyError, OriginBusy, OriginUnreachable, OwnersAway
from gateway.core.model import ByteRange, Homes, ObjectKey, ObjectVersion
from gateway.origin import peer_protocol as peer
from gateway.origin.client import (
    BegunRead,
    FromPeer,
    OnEnd,
    Origin,
    OriginRequest,
    OriginResponse,
    WrappedResponse,
    begin_read_of,
)
from gateway.origin.peer_protocol import COPY, COPY_ALONE, FROM_BUCKET
from gateway.origin.receive_buffer import ReceiveBuffer
from gateway.origin.retry import retry_after_seconds
from gateway.policy.slots import Prefix
from gateway.s3.headers import first_and_last, parse_content_range
from gateway.s3.origin_habits import check_head
from gateway.shared.peer_bytes import PeerBytes
from gateway.telemetry import metrics
from gateway.telemetry.logs import RateLimitedLog

BUSY_SECONDS_MAX: Final = 8.0
"""Seconds for which one request waits for peers that are busy."""

BUSY_SECONDS: Final = 0.1
"""The least seconds between two requests to a busy peer."""

FOLLOWED_MAX: Final = 6
"""Nodes that a request asks one after the other because the one before has named them."""

CACHED_SECONDS_MAX: Final = 5.0
"""Seconds for which a node is waited for that is asked for what is on its disk."""

RATION_SECONDS_MAX: Final = 60.0
"""Seconds for which a request waits for its part of the ration."""

UNREAD_SECONDS_MAX: Final = 1.0
"""Seconds, in all, for which an answer keeps its part of the ration while it waits for its reader."""

UNPINS_AT_ONCE: Final = 64

_BODY = frozenset({200, 206})
_BUSY, _ASK_OTHERS = frozenset({429, 503}), 303
_NO_HEADERS: Final[Mapping[str, str]] = {}
_LAST: Final[Mapping[str, str]] = {peer.LAST: "1"}

Reason: TypeAlias = Literal["unreachable", "busy", "refused", "bucket-away", "old", "damaged"]

_log = RateLimitedLog(structlog.get_logger("forebay.cluster"))


@dataclass(frozen=True, slots=True)
class ClusterRoles:
    """As `peer_protocol.Roles`, by the present view."""

    view: Callable[[], View]

    def headers(self, key: ObjectKey, number: int, headers: Mapping[str, str], slot: str) -> Mapping[str, str]:
        view = self.view()
        owners = view.owners(key, number)
        if not owners or owners[0] is view.me:
            return headers
        return {**headers, COPY: "1"} if headers else COPY_ALONE

    def owners(self, key: ObjectKey, number: int) -> tuple[tuple[str, bool], ...]:
        view = self.view()
        return tuple((one.address, one is view.me) for one in view.owners(key, number))

    def owns(self, key: ObjectKey, number: int) -> bool:
        return self.view().owns(key, number)


@dataclass(eq=False, slots=True)
class ClusterOrigin:
    """`Origin` of one process; its answers say with `from_peer` if another node gave them.

    `block_size_of` takes the name of a slot. `fallback_requests` is how many requests for other nodes' blocks may be
    with the bucket at once.
    """

    bucket: Origin
    peers: Peers
    view: Callable[[], View]
    block_size_of: Callable[[str], int]
    homes: Homes
    clock: Clock
    fallback_requests: int
    received: PeerBytes = field(default_factory=PeerBytes)
    _ration: asyncio.Semaphore = field(init=False)
    _bucket_is_away: bool = False
    """The last request by ration got no answer."""

    def __post_init__(self) -> None:
        self._ration = asyncio.Semaphore(self.fallback_requests)

    async def send(self, request: OriginRequest) -> OriginResponse:
        """As `Origin.send`."""
        copy = request.headers.get(COPY)
        if copy is None:
            before = self._owner_before(request)
            answer = await self._of_takers((before,), set(), request, peer.CACHED) if before is not None else None
            return answer or await self.bucket.send(request)
        why: Reason = "damaged"
        if copy != FROM_BUCKET:
            told = await self._of_owners(request)
            if not isinstance(told, str):
                return told
            if request.method == "HEAD" and request.size_bytes is not None:
                self._refuse_to_keep(request, told)
            why = told
        return await self._by_ration(_to_bucket(request), why)

    def begin_read(self, request: OriginRequest, on_end: OnEnd) -> BegunRead | None:
        """As `BeginRead`: a peer is waited for."""
        if COPY in request.headers or self._owner_before(request) is not None:
            return None
        return begin_read_of(self.bucket)(request, on_end)

    async def unpin(self, prefix: Prefix) -> dict[str, bool | None]:
        """Unpin a prefix on all other nodes. Return which had it pinned over the cluster; None: it does not answer."""
        view, told = self.view(), dict[str, bool | None]()
        others = [one.address for one in view.members if one is not view.me]
        for first in range(0, len(others), UNPINS_AT_ONCE):
            some = others[first : first + UNPINS_AT_ONCE]
            told |= zip(some, await asyncio.gather(*(self._unpin_at(one, prefix) for one in some)), strict=True)
        return told

    async def _unpin_at(self, address: str, prefix: Prefix) -> bool | None:
        request = OriginRequest("HEAD", prefix.bucket, f"{prefix.key_prefix}-")
        told = await self.peers.ask(address, self._to_peer(request, {peer.UNPIN: str(len(prefix.key_prefix))}))
        if told is None:
            return None
        await told.aclose()
        return {200: True, 404: False}.get(told.status)

    async def aclose(self) -> None:
        """Do nothing: the bucket's origin and the peers are closed by who made them."""

    # Whom to ask

    async def _of_owners(self, request: OriginRequest) -> OriginResponse | Reason:
        """Return the answer of the first owner that has one, or of the bucket if this node is one; else why not."""
        why: Reason = "unreachable"
        view = self.view()
        deadline = self.clock.monotonic() + BUSY_SECONDS_MAX
        for owner in view.owners(*self._place(request)):
            if owner is view.me:
                return await self.bucket.send(_to_bucket(request))
            told = await self._asked(owner.address, request, deadline)
            if isinstance(told, PeerAnswer) and told.status == _ASK_OTHERS:
                await told.aclose()
                of_taker = await self._of_takers(self._named(told), {owner.address}, request, peer.TAKEN)
                told = of_taker or await self._asked(owner.address, request, deadline, _LAST)
            if not isinstance(told, str):
                return told
            why = told
            if told == "bucket-away" and self._bucket_is_away:
                break  # the second owner would ask the same bucket
        return why

    def _refuse_to_keep(self, request: OriginRequest, why: Reason) -> NoReturn:
        """Say that no owner has kept a block; it makes no sense to ask again at once for what is not to pass soon."""
        owners = " and ".join(one.address for one in self.view().owners(*self._place(request)))
        text = f"{owners} cannot be asked to keep the blocks that they own: {why}"
        raise (OriginUnreachable if why in ("busy", "bucket-away") else OwnersAway)(text)

    async def _of_takers(
        self, named: Sequence[str], asked: set[str], request: OriginRequest, only: str
    ) -> PeerAnswer | None:
        """Return the bytes of a node that has them on its disk: of those named, or of those that these name."""
        for _ in range(FOLLOWED_MAX):
            others = [one for one in named if one not in asked]
            if not others:
                break
            address = random.choice(others)
            asked.add(address)
            try:
                async with asyncio.timeout(CACHED_SECONDS_MAX):
                    told = await self._asked(address, request, 0.0, {peer.ONLY: only})
            except TimeoutError:
                self.peers.leave_out(address)
                break
            if isinstance(told, str):
                break
            if told.status in _BODY:
                return told
            await told.aclose()
            named, only = self._named(told), peer.TAKEN
        return None

    def _named(self, answer: PeerAnswer) -> list[str]:
        view = self.view()
        others = {one.address for one in view.members if one is not view.me}
        return [one for one in map(str.strip, answer.told.get(peer.ASK, "").split(",")) if one in others]

    def _owner_before(self, request: OriginRequest) -> str | None:
        """Return the address of who owned this node's block before, if such a node can be asked for these bytes."""
        if request.method != "GET" or request.bucket is None or request.key is None:
            return None
        if request.size_bytes is None and request.ages is None:
            return None
        asked = _range(request)
        if asked is None or asked.first % peer.CHUNK_BYTES:
            return None
        key, number = self._place(request)
        if asked.last // self.block_size_of(request.slot) != number:
            return None
        member = self.view().owner_before(key, number)
        return member.address if member is not None and not self.peers.is_away(member) else None

    def _place(self, request: OriginRequest) -> tuple[ObjectKey, int]:
        asked = _range(request)
        number = asked.first // self.block_size_of(request.slot) if asked is not None else 0
        return ObjectKey(request.bucket or "", request.key or ""), number

    # Questions and answers

    async def _asked(
        self, address: str, request: OriginRequest, deadline: float, more: Mapping[str, str] = _NO_HEADERS
    ) -> PeerAnswer | Reason:
        """Return a peer's answer, which may name others unless it must not, or why there is none of use."""
        has_waited = False
        while True:
            began = self.clock.monotonic()
            answer = await self.peers.ask(address, self._to_peer(request, more))
            if answer is None:
                return "unreachable"
            if answer.status == _ASK_OTHERS and more is not _LAST:
                return answer
            if answer.status not in _BUSY:
                why = self._judge(address, answer, request, self.clock.monotonic() - began)
                if why is not None:
                    await answer.aclose()
                return why or answer
            await answer.aclose()
            asked = retry_after_seconds(answer.headers, self.clock.now()) or 0.0
            seconds = min(max(asked, BUSY_SECONDS), deadline - self.clock.monotonic())
            if seconds <= 0 or self.peers.is_left_out(address):
                if has_waited:
                    self.peers.leave_out(address)
                return "busy"
            has_waited = True
            with cancellation.turn():
                await self.clock.sleep(seconds)

    def _to_peer(self, request: OriginRequest, more: Mapping[str, str]) -> OriginRequest:
        me = self.view().me
        headers = {
            **request.headers,
            peer.PEER: peer.VERSION,
            peer.HOME: peer.home_digest(self.homes.of(request.bucket or "")),
            peer.PURPOSE: request.purpose.value,
            peer.NONCE: peer.new_nonce(),
            **more,
        }
        headers.pop(COPY, None)
        if me is not None:
            headers[peer.FROM] = me.address
        if request.size_bytes is not None:
            headers[peer.SIZE] = str(request.size_bytes)
        else:
            headers[peer.MAX_AGE] = f"{request.ages.seconds_max if request.ages is not None else 0.0:.3f}"
        return replace(request, headers=headers, begun=None)

    def _judge(self, address: str, answer: PeerAnswer, request: OriginRequest, seconds: float) -> Reason | None:
        """Set the facts that an answer tells, and count its bytes; or return why it is of no use."""
        status, age_seconds, checksums = answer.status, 0.0, answer.checksums
        if not _may_be(status, request):
            return "bucket-away" if status == peer.BUCKET_AWAY else "refused"
        if request.size_bytes is None:
            age_seconds = _age(answer)
            is_of_now = age_seconds <= seconds
            if not is_of_now and not (request.ages and request.ages.allow(status, answer.headers, age_seconds)):
                return "old"
        if request.method == "HEAD" or status not in _BODY:
            answer.from_peer = FromPeer(age_seconds)
            return None
        if checksums is None or not answer.headers.get("etag"):
            return "refused"
        asked = _range(request)
        if request.size_bytes is not None and asked is not None:
            key = ObjectKey(request.bucket or "", request.key or "")
            version = ObjectVersion(key, request.headers.get("if-match", ""), request.size_bytes)
            try:
                check_head(status, answer.headers, version, asked)
            except OriginBodyError:
                return "refused"
        doubt = partial(self._doubt, address, answer.headers, request)
        answer.from_peer = FromPeer(age_seconds, checksums, doubt, partial(self.peers.leave_out, address))
        metrics.CLUSTER_PEER_BYTES.add(answer.length_bytes, request.slot, "received")
        self.received.add(address, answer.length_bytes)
        return None

    def _doubt(self, address: str, told: Mapping[str, str], request: OriginRequest) -> None:
        """Count bytes that are not what the peer promised, and have it look at its copy."""
        metrics.CLUSTER_DAMAGED.add(1)
        fields = {"address": address, "bucket": request.bucket, "key": request.key}
        _log.error("bytes of another node came damaged: the bucket gives them", address, **fields)
        try:
            body, size_bytes = parse_content_range(told.get("content-range", ""))
        except OriginBodyError:
            return  # a whole object: its block is looked at when it is read
        headers = {"if-match": told["etag"], "range": f"bytes={body.first}-{body.last}"}
        asked = replace(request, method="HEAD", headers=headers, size_bytes=size_bytes)
        self.peers.tell(address, self._to_peer(asked, {peer.DOUBT: "1"}))

    # The bucket

    async def _by_ration(self, request: OriginRequest, reason: Reason) -> OriginResponse:
        metrics.CLUSTER_FALLBACK_REQUESTS.add(1, reason)
        try:
            with cancellation.turn():
                async with asyncio.timeout(RATION_SECONDS_MAX):
                    await self._ration.acquire()
        except TimeoutError:
            raise OriginBusy("the bucket is asked for too many blocks of other nodes") from None
        try:
            response = await self.bucket.send(request)
        except BaseException as error:
            self._ration.release()
            if isinstance(error, OriginUnreachable) and not isinstance(error, OriginBusy):
                self._bucket_is_away = True
            raise
        self._bucket_is_away = False
        return _Rationed(response, self._ration)


class _Rationed(WrappedResponse):
    """An answer of the bucket that has a part of the ration until it ends, or its reader has let it wait for too long.

    Then it is the reader, and not the bucket, that others would wait for.
    """

    def __init__(self, response: OriginResponse, ration: asyncio.Semaphore) -> None:
        super().__init__(response)
        self._held: asyncio.Semaphore | None = ration
        self._loop = asyncio.get_running_loop()
        self._left_seconds = UNREAD_SECONDS_MAX
        self._waits()

    async def stream(self, buffer: ReceiveBuffer | None = None) -> AsyncGenerator[bytes | memoryview, None]:
        pieces = super().stream(buffer)
        try:
            while True:
                self._is_read()
                try:
                    piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                self._waits()
                yield piece
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()

    async def read(self, limit_bytes: int) -> bytes:
        self._is_read()
        return await super().read(limit_bytes)

    def _waits(self) -> None:
        self._waits_since = self._loop.time()
        self._waiting = self._loop.call_later(self._left_seconds, self._ended)

    def _is_read(self) -> None:
        self._waiting.cancel()
        self._left_seconds = max(0.0, self._left_seconds - (self._loop.time() - self._waits_since))

    def whole(self) -> memoryview | None:
        body = super().whole()
        if body is not None:
            self._ended()
        return body

    async def aclose(self) -> None:
        try:
            await super().aclose()
        finally:
            self._ended()

    def _ended(self) -> None:
        self._waiting.cancel()
        held, self._held = self._held, None
        if held is not None:
            held.release()


def _to_bucket(request: OriginRequest) -> OriginRequest:
    headers = {name: value for name, value in request.headers.items() if name not in (COPY, peer.PIN)}
    return replace(request, headers=headers)


def _range(request: OriginRequest) -> ByteRange | None:
    first, last = first_and_last(request.headers.get("range")) or (0, None)
    return ByteRange(first, last) if last is not None else None


def _may_be(status: int, request: OriginRequest) -> bool:
    """Return True if a question may be answered so."""
    asked = request.headers
    match status:
        case 200:
            return request.size_bytes is None or "range" in asked
        case 201:
            return request.size_bytes is not None and request.method == "HEAD"
        case 206 | 416:
            return "range" in asked
        case 304:
            return "if-none-match" in asked or "if-modified-since" in asked
        case 409:  # the disk has no room for a pin
            return peer.PIN in asked
        case 412:
            return "if-match" in asked or "if-unmodified-since" in asked
    return status == 404


def _age(answer: PeerAnswer) -> float:
    """Return the age that an answer tells; NaN if it tells none."""
    try:
        seconds = float(answer.told.get(peer.AGE, ""))
    except ValueError:
        return math.nan
    return seconds if 0 <= seconds < math.inf else math.nan
