"""The other nodes' buffers. This node sends them requests about what is pending there, or asks all of them.

`AskAll` needs no service besides the nodes. Each look asks all members, so a member that does not answer stands in the
way; nobody can say when a key was changed, so what is remembered does not count.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import structlog

from gateway.cluster.members import Member, View
from gateway.cluster.peers import Peers
from gateway.core.errors import OriginBodyError, RegistryAway
from gateway.core.model import Claim, Homes, Known, ObjectKey
from gateway.origin import peer_protocol as peer
from gateway.origin.client import OriginRequest, OriginResponse, Purpose
from gateway.policy.registry import KEYS_MAX, KnownKeys, StoreAnswer, StoreQuestion, StoreUpload
from gateway.policy.slots import Slot
from gateway.telemetry.logs import RateLimitedLog

ANSWER_BYTES_MAX: Final = 4 * 1024**2
ASKED_AT_ONCE: Final = 32

SECONDS_MAX: Final = 5.0
"""Seconds in which a node must answer a question about its buffer."""

_UNHEARD = "a node does not hear that keys have changed"
_log = RateLimitedLog(structlog.get_logger("forebay.cluster"))


@dataclass(eq=False, slots=True)
class PeerStores:
    """As `policy.registry.Stores`, over the peer ports of the members of the present view."""

    peers: Peers
    view: Callable[[], View]
    homes: Homes
    _seen: View | None = None
    _strangers: dict[str, Member] = field(default_factory=dict)
    """Nodes that the present view lacks, and that others have told of, by address."""

    def others(self) -> list[Member]:
        view = self.view()
        if view is not self._seen:
            self._seen, self._strangers = view, {}
        return [*(one for one in view.members if one is not view.me), *self._strangers.values()]

    def is_known(self, store: str) -> bool:
        return any(one.store == store for one in self.others())

    def name_of(self, store: str) -> str:
        """As `Stores.name_of`."""
        return next((one.name for one in self.others() if one.store == store), store)

    async def send(self, store: str, request: OriginRequest) -> OriginResponse | None:
        """As `Stores.send`."""
        member = self._member_of(store)
        headers = {**request.headers, **self._addressed(store, request.bucket or "")}
        request = OriginRequest(
            request.method,
            request.bucket,
            request.key,
            request.query,
            headers,
            request.body,
            Purpose.FORWARD,
            request.slot,
            sent_once=True,
        )
        answer = await self.peers.ask(member.address, request)
        if answer is None:
            raise RegistryAway(f"the node at {member.address} does not answer")
        if answer.told.get(peer.STORE) == peer.NOT_PENDING:
            await answer.aclose()
            return None
        if answer.status == 421:
            await answer.aclose()
            raise RegistryAway(f"the node at {member.address} has another buffer, or another bucket of that name")
        return answer

    async def tell(self, store: str, question: StoreQuestion) -> StoreAnswer:
        """As `Stores.tell`."""
        return await self.ask(self._member_of(store).address, store, question)

    async def ask(self, address: str, store: str, question: StoreQuestion) -> StoreAnswer:
        """Return the answer of the node at an address. RegistryAway."""
        headers = self._addressed(store, question.bucket)
        body = question.model_dump_json().encode()
        request = OriginRequest("PUT", "-", "store", (), headers, body, Purpose.FORWARD, sent_once=True)
        try:
            async with asyncio.timeout(SECONDS_MAX):
                answer = await self.peers.ask(address, request)
                if answer is None:
                    raise RegistryAway(f"{self._called(address)} does not answer")
                async with answer:
                    content = await answer.read(ANSWER_BYTES_MAX)
                if answer.status != 200:
                    raise RegistryAway(f"{self._called(address)} answers {answer.status}")
                if peer.chunk_checksums(content) != answer.checksums:
                    raise RegistryAway(f"the answer of {self._called(address)} came damaged")
                return StoreAnswer.model_validate_json(content)
        except (TimeoutError, OriginBodyError, ValueError) as error:
            raise RegistryAway(f"{self._called(address)} gives no answer: {error}") from error

    async def forget(self, bucket: str, keys: Sequence[str]) -> None:
        """As `Stores.forget`."""
        for question in _questions("forget", [ObjectKey(bucket, key) for key in keys]):
            addresses = [one.address for one in self.others()]
            asking = (self.ask(one, peer.ANY_STORE, question) for one in addresses)
            answers = await asyncio.gather(*asking, return_exceptions=True)
            for address, answer in zip(addresses, answers, strict=True):
                if isinstance(answer, RegistryAway):
                    _log.warning(_UNHEARD, address, address=address, error=str(answer))
                elif isinstance(answer, BaseException):
                    raise answer

    async def uploads(self, bucket: str, prefix: str, start: str) -> tuple[Sequence[StoreUpload], str | None]:
        """As `Stores.uploads`."""
        answers = await self.ask_all(StoreQuestion(verb="uploads", bucket=bucket, keys=(prefix, start)))
        ends = [answer.end for answer in answers if answer.end is not None]
        return [upload for answer in answers for upload in answer.uploads], min(ends, default=None, key=str.encode)

    async def at_origin(self, bucket: str, keys: Sequence[str]) -> frozenset[str]:
        """As `Stores.at_origin`."""
        found = set[str]()
        for first in range(0, len(keys), KEYS_MAX):
            some = tuple(keys[first : first + KEYS_MAX])
            answers = await self.ask_all(StoreQuestion(verb="at-origin", bucket=bucket, keys=some))
            found.update(name for answer in answers for name in answer.names)
        return frozenset(found)

    async def ask_all(self, question: StoreQuestion) -> list[StoreAnswer]:
        """Return the answers of all other members, and of those that only others know. RegistryAway: one is missing."""
        found = list[StoreAnswer]()
        for _, answer in await self.ask_each(lambda _: question, at_once=sys.maxsize):
            if isinstance(answer, RegistryAway):
                raise answer
            found.append(answer)
        return found

    async def ask_each(
        self, question_for: Callable[[str], StoreQuestion | None], *, at_once: int = ASKED_AT_ONCE
    ) -> list[tuple[Member, StoreAnswer | RegistryAway]]:
        """Ask all other members, and those that only others know; return the answers, or why there is none.

        `question_for` returns the question for an address; None: it is not asked.
        """
        asked, known = dict[str, StoreAnswer | RegistryAway | None](), dict[str, Member]()
        told = set[str]()
        while True:
            known |= {one.address: one for one in self.others()}
            addresses = sorted((known.keys() | told) - asked.keys())[:at_once]
            if not addresses:
                break
            digest = _digest(self._addresses() | told)
            questions = {one: question for one in addresses if (question := question_for(one)) is not None}
            asking = (
                self.ask(one, peer.ANY_STORE, question.model_copy(update={"members": digest}))
                for one, question in questions.items()
            )
            answers = dict(zip(questions, await asyncio.gather(*asking, return_exceptions=True), strict=True))
            for address in addresses:
                answer = answers.get(address)
                if not isinstance(answer, StoreAnswer | RegistryAway | None):
                    raise answer
                asked[address] = answer
                told |= set(answer.members) if isinstance(answer, StoreAnswer) else set()
            own = self.view().me
            told -= {own.address} if own is not None else set()
        for address in told - {one.address for one in self.view().members}:
            answer = asked[address]
            known[address] = Member(address, address, store=answer.store if isinstance(answer, StoreAnswer) else "")
            if isinstance(answer, StoreAnswer):
                self._strangers[address] = known[address]
        return [(known[one], answer) for one, answer in asked.items() if answer is not None]

    def members(self) -> tuple[str, Sequence[str]]:
        """As `Stores.members`."""
        addresses = self._addresses()
        return _digest(addresses), sorted(addresses)

    def _called(self, address: str) -> str:
        name = next((one.name for one in self.others() if one.address == address), address)
        return f"the node at {address}" if name == address else f"the node {name} at {address}"

    def _addresses(self) -> set[str]:
        return {one.address for one in self.view().members} | self._strangers.keys()

    def _member_of(self, store: str) -> Member:
        for member in self.others():
            if member.store == store:
                return member
        raise RegistryAway(f"no member of the cluster has the buffer {store}")

    def _addressed(self, store: str, bucket: str) -> dict[str, str]:
        home = peer.home_digest(self.homes.of(bucket))
        return {peer.PEER: peer.VERSION, peer.HOME: home, peer.NONCE: peer.new_nonce(), peer.STORE: store}


class AskAll:
    """As `policy.registry.Registry`, by asking all members each time. Nothing can be claimed."""

    def __init__(self, stores: PeerStores, asks: Callable[[Slot], bool]) -> None:
        self._stores = stores
        self.asks = asks

    async def look(self, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        known = dict.fromkeys(keys, Known(stamp=None))
        for question in _questions("entries", keys):
            for answer in await self._stores.ask_all(question):
                for key, entry in zip(question.keys, answer.entries, strict=True):
                    if entry is not None:
                        known[ObjectKey(question.bucket, key)] = Known(answer.store, stamp=None)
        return [known[key] for key in keys]

    async def rows(self, bucket: str, start: bytes, stop: bytes) -> KnownKeys:
        question = StoreQuestion(verb="names", bucket=bucket, keys=(start.decode("latin-1"), stop.decode("latin-1")))
        answers = await self._stores.ask_all(question)
        found = {name.encode(): Known(answer.store, stamp=None) for answer in answers for name in answer.names}
        last = [answer.names[-1].encode() for answer in answers if len(answer.names) == KEYS_MAX]
        end = min(last, default=None)
        rows = [(name, found[name]) for name in sorted(found) if end is None or name <= end]
        return KnownKeys(rows, end + b"\0" if end is not None else None, has_changes=False)

    async def holders(self, bucket: str, start: bytes, stop: bytes) -> Sequence[str]:
        places = (start.decode("latin-1"), stop.decode("latin-1"))
        answers = await self._stores.ask_all(StoreQuestion(verb="names", bucket=bucket, keys=places))
        return [answer.store for answer in answers if answer.names]

    async def begin(self, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        known = await self.look(keys)
        if all(one.store is None for one in known):
            await self.end(keys)
        return known

    async def end(self, keys: Sequence[ObjectKey]) -> None:
        for question in _questions("forget", keys):
            await self._stores.ask_all(question)

    can_claim = False

    async def claim(self, claim: Claim) -> Known:
        raise RegistryAway("the registry of pending writes is away")

    async def confirm(self, claim: Claim, known: Known, claimed_at: float) -> bool:
        """Do nothing: others ask all nodes, and so find what is pending here."""
        return False

    async def release(self, claim: Claim) -> None:
        """Do nothing: nothing was claimed."""


def _digest(addresses: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(sorted(addresses)).encode(), digest_size=8).hexdigest()


def _questions(verb: Literal["entries", "forget"], keys: Sequence[ObjectKey]) -> Iterator[StoreQuestion]:
    by_bucket: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        by_bucket[key.bucket].append(key.key)
    for bucket, names in by_bucket.items():
        for at in range(0, len(names), KEYS_MAX):
            yield StoreQuestion(verb=verb, bucket=bucket, keys=tuple(names[at : at + KEYS_MAX]))
