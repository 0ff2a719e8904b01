"""Prepared requests: the gateway answers a repeated request without going the whole way again.

    a head of a kind that was authenticated before    its values, its signature verified (s3/prepared_head.py)
    an object that this caller has read before        the common parts of its answers (operations/prepared_reads.py)
    all that this depends on is as it was             head, and span of a file, to be sent

Any other request goes the whole way, which reports errors. The checks are the same: each time the signature is
verified, with the current keys and rights, and pending writes, catalog and index are looked up; only results that
follow from the same bytes are not computed again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from gateway.core import cancellation
from gateway.core.errors import ClientDisconnected, S3Error
from gateway.core.model import MissReason, ObjectKey
from gateway.edge.access import Caller, Key, authorise
from gateway.edge.asgi import CACHE_LINES, S3App
from gateway.edge.response import answer_lines, next_request_id, plain_head
from gateway.operations.cold_reads import ColdAnswer, ColdRead, begin_cold_read
from gateway.operations.origin_rights import right_to_read
from gateway.operations.prepared_reads import (
    PendingAnswer,
    PreparedAnswer,
    PreparedRead,
    Reads,
    TallyOf,
    prepare_read,
)
from gateway.operations.read_wishes import is_plain
from gateway.origin.client import ACCOUNT
from gateway.policy.remembered_rights import Right
from gateway.policy.slots import Grant, Slot
from gateway.s3.prepared_head import HeadValues, PreparedHead, prepare
from gateway.s3.requests import Operation, S3Request, parse_query, strip_signature_parameters, understood
from gateway.shared.recent_requests import MINUTE_SECONDS, FinishedRequest
from gateway.telemetry import metrics
from gateway.telemetry.request_counts import BROKEN_OFF, CLIENT_LEFT, AnswerTally, count_request
from gateway.telemetry.tracing import TRACE

_HEADS_MAX = 1024
"""Kinds of heads that a process keeps, most of them of some 4 KiB: a few of each client, day and credential."""

_HEAD_BYTES_MAX = 8192
"""Limit of a kept head; one with a session token and a long key is shorter. Servers may allow a megabyte."""

_OF_CONNECTION_MAX = 8
"""Kinds that one connection is compared with. It begins with those that others have used last."""

_LEARNED_BY_CONNECTION_MAX = 16
"""A client whose heads differ in what is taken for fixed is not looked at for ever."""

_OBJECTS_MAX = 16_384
_KEPT_ONE_IN = 16
"""One in so many objects is kept of those that return after more requests than there are places: a larger data set is
read in turn, or shuffled, again and again, and each kept object would displace one that is read sooner."""

_SLICE = 1024
"""Requests that count as one time. A byte has the last 255."""

_ASKED_PLACES = 1 << 20
"""A byte each: data sets of a million objects are known to have been asked for before. A power of two."""
_ASKED_AT_MOST, _ASKED_AGAIN = 255, 128

_KNOWN_IN_A_ROW, _TRIED_ONE_IN = 8, 16

_PATH_BYTES_MAX = 3200
"""Room for a bucket and a key of 1,024 bytes, all of them encoded."""

LAID_SECONDS = 0.25
"""Longest delay of counts."""

_QUERIES = frozenset({b"", b"x-id=GetObject", b"x-id=HeadObject"})
_IDS = ([("x-id", "GetObject")], [("x-id", "HeadObject")])
_HIT = b"x-forebay-cache: hit\r\n"

Client = tuple[str, int]
"""Address and port."""


class _KnownReads(NamedTuple):
    """An object as a caller may read it."""

    access_key_id: str
    grant: Grant
    read: Reads
    right: Right | None
    """That the origin must have granted; None: the grant is enough."""


class Question(NamedTuple):
    """A request whose answer is waited for."""

    pending: PendingAnswer
    access_key_id: str
    place: object

    def close(self) -> None:
        """Drop it unanswered. Idempotent."""
        self.pending.close()


class PreparedRequests:
    """Prepared requests of one process, for authenticated callers alone. Call `close` at the end."""

    def __init__(self, app: S3App) -> None:
        self.app = app
        self._services = app.services
        self._authenticator = app.authenticator
        self._heads: dict[object, PreparedHead] = {}
        self._objects: dict[object, _KnownReads | None] = {}
        """Prepared objects; None: the place is free for the same object again."""
        self._places: list[object] = []
        """The keys of `_objects`, each once, to draw one from."""
        self._dice = random.Random()
        self._asked = bytearray(_ASKED_PLACES)
        """Count of requests for each object that is not prepared, by its hash."""
        self._count = 0
        self._slices = bytearray(_ASKED_PLACES)
        """Time of the last request for each object without a place, by its hash; 0: none is known."""
        self._tallies: dict[tuple[str, Operation, str, int, bool, MissReason | None], AnswerTally] = {}
        self._tally_of: dict[str, TallyOf] = {}
        """By credential: one for all that are kept."""
        self._laying: asyncio.TimerHandle | None = None
        self._known_in_a_row = 0
        """Requests for objects that turned out to be known, since the last for one that was not."""

        self.generation = 0
        """Generation of heads: those of earlier generations are not answered."""

        self.latest: list[PreparedHead] = []
        """The kinds that were learned last, or used last by a connection that had not had them yet."""

    def close(self) -> None:
        if self._laying is not None:
            self._laying.cancel()
            self._lay()

    def known(self, learned: PreparedHead) -> PreparedHead:
        """Return another connection's equal kind, or keep this one for others."""
        if len(self._heads) >= _HEADS_MAX:
            self._heads.clear()
        head = self._heads.setdefault((learned.prefix, learned.pieces, learned.tail), learned)
        put_first(self.latest, head)
        return head

    def forget(self) -> None:
        """Slots, rights, keys or limits were changed: all is worked out anew, and heads are learned anew."""
        for place in self._objects:
            self._objects[place] = None
        self._heads.clear()
        self.latest.clear()
        self.generation += 1

    def keep_tallies(self, slots: Collection[str], credentials: Collection[str]) -> None:
        """Count no more by earlier slots and credentials, except these."""
        if self._laying is not None:
            self._laying.cancel()
        self._lay()
        gone = [key for key in self._tallies if key[2] not in slots or key[0] not in credentials]
        for key in gone:
            del self._tallies[key]
        for credential in [one for one in self._tally_of if one not in credentials]:
            del self._tally_of[credential]

    def answer(self, head: PreparedHead, values: HeadValues) -> PreparedAnswer | Question | None:
        """Return the answer to a request with these values, or a question to `ask` first; None: take the full way."""
        if len(values.raw_path) > _PATH_BYTES_MAX:
            return None
        self._count += 1
        place = head.asker, values.raw_path
        known = self._objects.get(place)
        if known is None and not self._is_worth_it(place):
            return None
        key = self._authenticator.key_of(head, values)
        if key is None or (head.authorization is None and self._is_limited(key, head)) or not _is_bare(head, values):
            return None
        if known is not None and known.read.is_pending():
            return None
        is_of_key = known is not None and known.access_key_id == key.access_key_id and known.grant is key.grant
        is_new = known is None or not is_of_key or not known.read.holds()
        if known is None or is_new:
            known = self._learned(place, head, values, key)
            if known is None:
                return None
        if known.right is not None and not self._services.rights.holds(known.right):
            return None
        answer = known.read.answer(head.conditions(values))
        if isinstance(answer, PendingAnswer):
            return Question(answer, key.access_key_id, place)
        if is_new and answer is not None:
            self._was_worth_it(place)
        return answer

    def local_read(self, place: tuple[str, bytes], key: Key) -> Reads | None:
        """Return the read of an object by a client that reads files itself; None: the full way answers it, by HTTP.

        `place` are the caller's access key and the object's name, a slash between bucket and key. Where the origin
        judges callers there is none: a descriptor cannot be taken back.
        """
        self._count += 1
        known = self._objects.get(place)
        if known is not None and known.access_key_id == key.access_key_id and known.grant is key.grant:
            if known.read.is_pending():
                return None
            if known.read.holds():
                return known.read
        made = self._local(place, key)
        if made is None:
            self._drop(place)
        elif known is not None or self._is_worth_it(place):
            self._keep(place, made)
        return made.read if made is not None else None

    def _local(self, place: tuple[str, bytes], key: Key) -> _KnownReads | None:
        try:
            bucket, _, name = place[1].decode().partition("/")
            request = S3Request("GET", b"", b"", "", {}, bucket, name, (), Operation.GET_OBJECT)
            authorise(request, key.grant, self._services.slots)
        except (S3Error, UnicodeDecodeError):
            return None
        is_by_origin = self._services.slots.find(bucket, name).authorization == "origin"
        return None if is_by_origin or not name else self._prepared_of(request, key)

    def sent_local(self, sent: Sequence[tuple[PreparedRead, int]], began: float, access_key_id: str) -> None:
        """Count reads whose bytes, so many of each, a client reads itself: answers to GETs."""
        seconds = time.perf_counter() - began
        sums: dict[AnswerTally, tuple[int, int]] = {}
        is_told_of = self.app.is_told_of(seconds, "200")
        for read, sent_bytes in sent:
            tally = read.handed_out(sent_bytes)
            answers, total_bytes = sums.get(tally, (0, 0))
            sums[tally] = answers + 1, total_bytes + sent_bytes
            if is_told_of:
                key, credential = read.key, self._authenticator.credential_of(access_key_id)
                what = tally.operation, key.bucket, key.key, tally.slot, tally.status, "hit", None, None
                self.app.tell(FinishedRequest(*what, seconds, sent_bytes, 0, credential, next_request_id(), "local"))
        for tally, (answers, total_bytes) in sums.items():
            self._add(tally, seconds, total_bytes, answers)

    def begin_ask(self, question: Question, on_end: Callable[[PreparedAnswer | None], None]) -> bool:
        """Ask without a wait, and call `on_end`: with None, or if this returns False, call `ask`."""
        ACCOUNT.set(question.access_key_id)
        TRACE.set(None)

        def ended(answer: PreparedAnswer | None) -> None:
            metrics.REQUESTS_IN_FLIGHT.add(-1)
            if answer is not None:
                self._was_worth_it(question.place)
            on_end(answer)

        is_begun = question.pending.begin(ended)
        metrics.REQUESTS_IN_FLIGHT.add(is_begun)
        return is_begun

    def left(self, question: Question, began: float, client: Client | None) -> None:
        """End a question that was begun: the client has left."""
        metrics.REQUESTS_IN_FLIGHT.add(-1)
        question.close()
        pending = question.pending
        self.not_answered(CLIENT_LEFT, pending.key, pending.slot, question.access_key_id, began, client)

    async def ask(self, question: Question, began: float, client: Client | None) -> PreparedAnswer | None:
        """Return the answer to a question; None: the full way answers, by what the origin has said.

        To be called in a task of the request's own, which ends when the client leaves.
        """
        ACCOUNT.set(question.access_key_id)
        TRACE.set(None)
        pending, answer = question.pending, None
        metrics.REQUESTS_IN_FLIGHT.add(1)
        try:
            cancellation.register_request(anywhere=True)
            answer = await pending.ask()
        except (ClientDisconnected, asyncio.CancelledError) as error:
            is_left = isinstance(error, ClientDisconnected) or cancellation.is_current_left()
            if pending.is_known:
                metrics.CATALOG_LOOKUPS.add(1, pending.slot, "hit")
            status = CLIENT_LEFT if is_left else BROKEN_OFF
            self.not_answered(status, pending.key, pending.slot, question.access_key_id, began, client)
            raise
        except Exception:
            self.app.log.exception("a prepared answer failed")
        finally:
            metrics.REQUESTS_IN_FLIGHT.add(-1)
            if answer is None:
                pending.close()
        if answer is None:
            self._drop(question.place)
        else:
            self._was_worth_it(question.place)
        return answer

    def begin_cold(
        self, head: PreparedHead, values: HeadValues, began: float, on_end: Callable[[ColdRequest], None]
    ) -> ColdRequest | None:
        """Ask the origin for an unknown object, and call `on_end`; None: take the full way.

        While all other objects turn out to be known, this is tried less often.
        """
        if head.asker[2] != "GET" or len(values.raw_path) > _PATH_BYTES_MAX:
            return None
        if self._known_in_a_row >= _KNOWN_IN_A_ROW and self._count % _TRIED_ONE_IN:
            return None
        key = self._authenticator.key_of(head, values)
        if key is None or self._is_limited(key, head) or not _is_bare(head, values):
            return None
        request = self._understood(head, values, key)
        if request is None:
            return None
        if head.conditions_at:
            request = replace(request, headers={**request.headers, **head.conditions(values)})
        ACCOUNT.set(key.access_key_id)
        TRACE.set(None)
        cold = ColdRequest(self, key.access_key_id, began)
        read = begin_cold_read(self._services, request, lambda _: on_end(cold))
        if read is None:
            self._known_in_a_row += 1
            return None
        self._known_in_a_row, cold.read = 0, read
        metrics.REQUESTS_IN_FLIGHT.add(1)
        return cold

    def not_answered(
        self, status: str, key: ObjectKey, slot: str, access_key_id: str, began: float, client: Client | None
    ) -> None:
        """Count a GET that ended before it was answered."""
        seconds, remote = time.perf_counter() - began, client[0] if client is not None else None
        count_request(Operation.GET_OBJECT, slot, status, None, seconds)
        who = self._authenticator.credential_of(access_key_id), next_request_id(), remote
        what = Operation.GET_OBJECT, key.bucket, key.key, slot, status
        self.app.tell(FinishedRequest(*what, None, None, None, seconds, 0, 0, *who))

    def begin(self, answer: PreparedAnswer) -> tuple[str, bytes]:
        """Another request id, and the lines of an answer's head that have it."""
        request_id = next_request_id()
        if answer.file is not None and self._services.reads is not None:
            self._services.reads.begin(answer.file)
        return request_id, answer_lines(answer.head.lines, request_id, _HIT)

    def sent(
        self, answer: PreparedAnswer, request_id: str, began: float, sent_bytes: int, client: Client | None
    ) -> None:
        """All of an answer is sent to a client, `sent_bytes` of it are its body's."""
        seconds, tally = time.perf_counter() - began, answer.tally
        self._add(tally, seconds, sent_bytes)
        self._over(answer, tally.status, request_id, seconds, sent_bytes, client)

    def _over(
        self,
        answer: PreparedAnswer,
        status: str,
        request_id: str,
        seconds: float,
        sent_bytes: int,
        client: Client | None,
    ) -> None:
        if answer.file is not None and self._services.reads is not None:
            self._services.reads.end(answer.file, sent_bytes)
        if answer.span is not None:
            answer.span.close()
        if self.app.is_told_of(seconds, status):
            tally, key, remote = answer.tally, answer.key, client[0] if client is not None else None
            what, who = (tally.operation, key.bucket, key.key, tally.slot), (tally.credential, request_id, remote)
            self.app.tell(FinishedRequest(*what, status, "hit", None, None, seconds, sent_bytes, 0, *who))

    def sent_cold(
        self,
        read: ColdRead,
        answer: ColdAnswer,
        access_key_id: str,
        request_id: str,
        began: float,
        client: Client | None,
    ) -> None:
        credential, status, sent_bytes = (
            self._authenticator.credential_of(access_key_id),
            answer.head.status,
            len(answer.body),
        )
        tally = self._tally(credential, Operation.GET_OBJECT, read.slot, status, answer.reason)
        self._add(tally, seconds := time.perf_counter() - began, sent_bytes)
        if self.app.is_told_of(seconds, tally.status):
            what = tally.operation, read.key.bucket, read.key.key, tally.slot, tally.status, "miss", answer.reason, None
            who = credential, request_id, client[0] if client is not None else None
            self.app.tell(FinishedRequest(*what, seconds, sent_bytes, 0, *who))

    def _add(self, tally: AnswerTally, seconds: float, sent_bytes: int, answers: int = 1) -> None:
        tally.add(seconds, sent_bytes, answers)
        if self._laying is None:
            self._laying = asyncio.get_running_loop().call_later(LAID_SECONDS, self._lay)

    async def go_on(
        self,
        answer: PreparedAnswer,
        request_id: str,
        began: float,
        rest: Callable[[], Awaitable[None]],
        sent_bytes: Callable[[], int],
        client: Client | None,
    ) -> None:
        """Wait for `rest`, which sends what the kernel did not take at once; raises what it raises."""
        status = None
        try:
            await rest()
        except ClientDisconnected:
            status = CLIENT_LEFT
            raise
        except asyncio.CancelledError:
            status = CLIENT_LEFT if cancellation.is_current_left() else answer.tally.status
            raise
        except Exception as error:
            status = BROKEN_OFF
            if answer.span is not None:
                answer.span.failed(error)
            self.app.log.warning("answer broken off", request_id=request_id, exc_info=error)
            raise
        finally:
            if status is None:
                self.sent(answer, request_id, began, sent_bytes(), client)
            else:
                tally, seconds = answer.tally, time.perf_counter() - began
                if answer.span is not None:
                    metrics.CACHE_HIT_BYTES.add(answer.span.span.count, tally.slot)
                if tally.is_known:
                    metrics.CATALOG_LOOKUPS.add(1, tally.slot, "hit")
                count_request(tally.operation, tally.slot, status, "hit", seconds, sent_bytes(), 0, tally.credential)
                self._over(answer, status, request_id, seconds, sent_bytes(), client)

    def _lay(self) -> None:
        self._laying = None
        if int(time.time()) // MINUTE_SECONDS != self.app.recent.minute:
            self.app.recent.look()
        for tally in self._tallies.values():
            tally.lay()

    def _tally(
        self, credential: str, operation: Operation, slot: Slot, status: int, reason: MissReason | None = None
    ) -> AnswerTally:
        is_known = slot.consistency != "strict" and reason is None
        key = credential, operation, slot.name, status, is_known, reason
        found = self._tallies.get(key)
        if found is None:
            of_slot = operation, slot.name, str(status)
            found = AnswerTally(*of_slot, is_known=is_known, credential=credential, reason=reason)
            self._tallies[key] = found
        return found

    def _is_worth_it(self, place: object) -> bool:
        """Return True if it is worth preparing what `place` names.

        Not the first time, and ever more seldom if that fails, at last each 128th time.
        """
        number = hash(place) % _ASKED_PLACES
        asked = self._asked[number]
        self._asked[number] = asked + 1 if asked < _ASKED_AT_MOST else _ASKED_AGAIN
        return asked > 0 and asked & (asked - 1) == 0

    def _is_limited(self, key: Key, head: PreparedHead) -> bool:
        callers = self.app.callers
        if callers is None:
            return False
        credential = self._authenticator.credential_of(key.access_key_id)
        return callers.find(credential, head.request.headers.get("user-agent", "")) is not None

    def _was_worth_it(self, place: object) -> None:
        self._asked[hash(place) % _ASKED_PLACES] = 1

    def _learned(self, place: object, head: PreparedHead, values: HeadValues, key: Key) -> _KnownReads | None:
        known = self._prepared(head, values, key)
        if known is None:
            self._drop(place)
            return None
        self._keep(place, known)
        return known

    def _drop(self, place: object) -> None:
        if place in self._objects:
            self._objects[place] = None

    def _keep(self, place: object, known: _KnownReads) -> None:
        places, draw = self._places, self._dice.random
        if place not in self._objects:
            if len(places) < _OBJECTS_MAX:
                places.append(place)
            elif self._comes_soon(place) or draw() * _KEPT_ONE_IN < 1:
                at = int(draw() * len(places))
                self._objects.pop(places[at], None)
                places[at] = place
            else:
                return
        self._objects[place] = known

    def _comes_soon(self, place: object) -> bool:
        """Return True if an object returns after fewer requests than there are places. Call this each time it comes."""
        number, now = hash(place) % _ASKED_PLACES, 1 + self._count // _SLICE % 255
        last = self._slices[number]
        self._slices[number] = now
        return last > 0 and (now - last) % 255 * _SLICE < _OBJECTS_MAX

    def _prepared(self, head: PreparedHead, values: HeadValues, key: Key) -> _KnownReads | None:
        request = self._understood(head, values, key)
        return self._prepared_of(request, key) if request is not None else None

    def _prepared_of(self, request: S3Request, key: Key) -> _KnownReads | None:
        services = self._services
        credential = self._authenticator.credential_of(key.access_key_id)
        tally = self._tally_of.setdefault(credential, partial(self._tally, credential))
        read = prepare_read(services, request, tally)
        if read is None:
            return None
        return _KnownReads(key.access_key_id, key.grant, read, self._right(request, key))

    def _understood(self, head: PreparedHead, values: HeadValues, key: Key) -> S3Request | None:
        """Return a request that its caller may make; None: the full way refuses it."""
        of_first = head.request
        try:
            request = understood(
                of_first.method,
                values.raw_path,
                values.raw_query,
                of_first.host,
                of_first.headers,
                self.app.base_domains,
            )
            authorise(request, key.grant, self._services.slots)
        except S3Error:
            return None
        return request

    def _right(self, request: S3Request, key: Key) -> Right | None:
        slot = self._services.slots.find(request.bucket or "", request.key or "")
        if slot.authorization != "origin" or key.pair is None:
            return None
        return right_to_read(request, key.access_key_id, self._services.rights)


class ColdRequest:
    """A GET of an unknown object that waits for the origin, without a task. Close it in the end."""

    __slots__ = ("_access_key_id", "_prepared", "began", "read")

    def __init__(self, prepared: PreparedRequests, access_key_id: str, began: float) -> None:
        self._prepared = prepared
        self._access_key_id = access_key_id
        self.began = began
        self.read: ColdRead

    def answer(self, *, may_send: bool) -> ColdAnswer | None:
        """Return the answer, when the origin has answered; None: the full way goes on."""
        metrics.REQUESTS_IN_FLIGHT.add(-1)
        try:
            return self.read.answer() if may_send else None
        except Exception:
            self._prepared.app.log.exception("a cold answer failed")
            return None

    def head(self, answer: ColdAnswer, request_id: str, default_lines: bytes) -> bytes:
        lines = answer_lines(answer.head.lines, request_id, CACHE_LINES["miss", answer.reason])
        return plain_head(answer.head.status, lines + default_lines, answer.head.length_bytes)

    def sent(self, answer: ColdAnswer, request_id: str, client: Client | None) -> None:
        """Count an answer that is sent."""
        self._prepared.sent_cold(self.read, answer, self._access_key_id, request_id, self.began, client)

    def left(self, client: Client | None) -> None:
        """End it: the client has left."""
        metrics.REQUESTS_IN_FLIGHT.add(-1)
        self.read.close()
        key, slot = self.read.key, self.read.slot.name
        self._prepared.not_answered(CLIENT_LEFT, key, slot, self._access_key_id, self.began, client)


def _is_bare(head: PreparedHead, values: HeadValues) -> bool:
    """Return whether a request has no parameters but a presigned one's signature."""
    return values.raw_query in _QUERIES or (head.authorization is None and _is_only_signed(values))


def _is_only_signed(values: HeadValues) -> bool:
    asked = strip_signature_parameters(parse_query(values.raw_query))
    return not asked or asked in _IDS


def put_first(heads: list[PreparedHead], head: PreparedHead) -> None:
    """Move it to the front, or in, and the last one out."""
    if head in heads:
        heads.remove(head)
    heads.insert(0, head)
    del heads[_OF_CONNECTION_MAX:]


class ConnectionHeads:
    """The kinds that one connection has sent, the last one first."""

    __slots__ = ("_generation", "_heads", "_is_known", "_last", "_learned", "prepared")

    def __init__(self, prepared: PreparedRequests) -> None:
        self.prepared = prepared
        self._generation = prepared.generation
        self._heads = list(prepared.latest)
        self._learned = 0
        self._last: tuple[PreparedHead, HeadValues] | None = None
        self._is_known = False
        """True if the last compared head is of a known kind."""

    @property
    def may_learn(self) -> bool:
        return not self._is_known and self._learned < _LEARNED_BY_CONNECTION_MAX

    def answer(self, raw: bytes) -> PreparedAnswer | Question | None:
        """Return the prepared answer to a whole head, or the question that must be asked before."""
        self._is_known = False
        if self._generation != self.prepared.generation:
            self._generation, self._learned = self.prepared.generation, 0
            self._heads = list(self.prepared.latest)
        for number, head in enumerate(self._heads):
            values = head.match(raw)
            if values is not None:
                self._is_known = True
                if number:
                    put_first(self._heads, head)
                self._last = head, values
                return self.prepared.answer(head, values)
        self._last = None
        return None

    def begin_cold(self, began: float, on_end: Callable[[ColdRequest], None]) -> ColdRequest | None:
        """As `PreparedRequests.begin_cold`, of the head that `answer` had no answer for."""
        last, self._last = self._last, None
        return self.prepared.begin_cold(*last, began, on_end) if last is not None else None

    def learn(self, raw: bytes, request: S3Request, caller: Caller, *, keep_alive: bool) -> None:
        """Learn a head that was parsed, and whose signature holds."""
        if caller.seed is None or not keep_alive or len(raw) > _HEAD_BYTES_MAX or not is_plain(request):
            return
        if any(head.match(raw) is not None for head in self._heads):
            return
        self._learned += 1
        learned = prepare(raw, request, caller.authorization)
        if learned is not None:
            put_first(self._heads, self.prepared.known(learned))
