"""Flushes and checkpoints over all nodes: this node asks the others, and tells of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import Request

from gateway.admin.backends import Backends, opened
from gateway.admin.operations import CLOSED, GUARDED, KIND, TEXT, RefusedRequest, body, operation
from gateway.admin.writeback import CHECKPOINTS_OF_ALL, THROUGH_MAX, posted_document, posted_text
from gateway.api import documents as to
from gateway.api.documents import PREFIX
from gateway.cluster.members import Member
from gateway.config.live import LiveSettings
from gateway.core.clock import Clock
from gateway.core.errors import RegistryAway
from gateway.policy.registry import StoreAnswer, StoreQuestion
from gateway.policy.slots import Prefix
from gateway.writeback.admin.checkpoint_parts import PartsPage, Told, joined
from gateway.writeback.admin.checkpoints import check_states
from gateway.writeback.admin.queries import to_token

if TYPE_CHECKING:
    from gateway.cluster.stores import PeerStores
    from gateway.writeback.admin.writeback_admin import NoWriteback, WritebackAdmin

Found = TypeVar("Found", to.FlushProgress, PartsPage)

PAGE = 100

_ASKED = {
    **GUARDED,
    400: "What is given is wrong; the message says how.",
    404: "This node is in no cluster.",
    **CLOSED,
}
_BEGUN = {
    "type": "array",
    "description": "as the answer before has it, to look again: address → through, is_name",
    "items": {
        "type": "object",
        "required": ["address", "through", "is_name"],
        "properties": {
            "address": TEXT,
            "through": {"type": "integer", "minimum": 0, "maximum": THROUGH_MAX},
            "is_name": {"type": "boolean"},
        },
    },
}


class ClusterReportsApi:
    def __init__(self, live: LiveSettings, lent: Backends, clock: Clock) -> None:
        self._live = live
        self._lent = lent
        self._clock = clock

    @property
    def _parts(self) -> tuple[to.NodeProblem, WritebackAdmin | NoWriteback, PeerStores]:
        """Return this node's name, its buffer, and the others'."""
        cluster = self._live.now.cluster
        if cluster is None:
            raise RefusedRequest(404, "this node is in no cluster: its settings have no [cluster]")
        own = to.NodeProblem(node=cluster.node, address=cluster.advertise, problem="")
        return own, self._lent.writeback or opened(None), opened(self._lent.stores)

    @operation(
        "POST /api/v1/cluster/flush",
        "Flush now what is pending on all nodes; with `begun`, tell what is left of that.",
        to.ClusterFlush,
        {**_ASKED, **KIND},
        202,
        body=body("prefix", prefix=PREFIX, begun=_BEGUN),
    )
    async def flush(self, request: Request) -> to.ClusterFlush:
        own, backend, stores = self._parts
        document = await posted_document(request)
        prefix, begun = Prefix.parse(posted_text(document, "prefix")), _begun_of(document)
        before = begun.get(own.address)
        here = await (backend.flush(prefix) if before is None else _left_here(backend, prefix, before))

        def question(address: str) -> StoreQuestion:
            through, is_name = begun.get(address, (None, False))
            keys = (str(prefix),)
            return StoreQuestion(verb="flush", bucket=prefix.bucket, keys=keys, through=through, is_name=is_name)

        found = [to.NodeFlush(node=own.node, address=own.address, problem=None, progress=here)]
        for member, answer in await stores.ask_each(question):
            progress, problem = _read(to.FlushProgress, answer)
            found.append(to.NodeFlush(node=member.name, address=member.address, problem=problem, progress=progress))
        return to.ClusterFlush(nodes=found)

    @operation(
        "GET /api/v1/cluster/checkpoints",
        "Checkpoints over all nodes, and their state.",
        to.ClusterCheckpoints,
        _ASKED,
        parameters=CHECKPOINTS_OF_ALL,
    )
    async def checkpoints(self, request: Request) -> to.ClusterCheckpoints:
        own, backend, stores = self._parts
        prefix, after = Prefix.parse(request.query_params.get("prefix", "s3://")), request.query_params.get("after", "")
        states = check_states(state for state in request.query_params.get("state", "").split(",") if state)
        question = StoreQuestion(verb="checkpoints", bucket=prefix.bucket, keys=(str(prefix), after))
        pages = {own.node: await backend.parts(prefix, after, PAGE)}
        unanswered, asked = list[to.NodeProblem](), dict[str, Member]()
        for member, answer in await stores.ask_each(lambda _: question):
            page, problem = _read(PartsPage, answer)
            if page is not None:
                pages[member.name], asked[member.name] = page, member
            else:
                unanswered.append(to.NodeProblem(node=member.name, address=member.address, problem=problem or ""))
        now, until = self._clock.now(), min((one.following for one in pages.values() if one.following), default=None)
        places = {part.place for page in pages.values() for part in page.parts}
        shown = sorted(place for place in places if until is None or place <= until)
        reads = await self._reads(own.node, backend, stores, asked, shown)
        found = list[to.Checkpoint]()
        for place in shown:
            told = [
                Told(node, part, page.now - now if node != own.node else 0.0, reads.get(node, {}))
                for node, page in pages.items()
                for part in page.parts
                if part.place == place
            ]
            told += [
                Told(node, told[0].part.model_copy(update={"objects": (), "uploads": ()}), page.now - now, reads[node])
                for node, page in pages.items()
                if node in reads and node not in {one.node for one in told}
            ]
            found.append(joined(told, now))
        return to.ClusterCheckpoints(
            checkpoints=[one for one in found if not states or one.state in states],
            next=to_token(*until) if until is not None else None,
            unanswered=unanswered,
        )

    async def _reads(
        self,
        own: str,
        backend: WritebackAdmin | NoWriteback,
        stores: PeerStores,
        asked: Mapping[str, Member],
        places: Sequence[tuple[str, str]],
    ) -> dict[str, dict[str, Any]]:
        """Return each node's passes of files of these checkpoints; nobody is told where that cannot be known."""
        found, buckets = dict[str, dict[str, Any]](), dict[str, list[str]]()
        for bucket, prefix in places:
            buckets.setdefault(bucket, []).append(prefix)
        for bucket, prefixes in buckets.items():
            found.setdefault(own, {}).update(await backend.reads_of(bucket, prefixes))
            question = StoreQuestion(verb="reads", bucket=bucket, keys=tuple(prefixes))
            questions = {one.address: question for one in asked.values()}
            for member, answer in await stores.ask_each(questions.get):
                if isinstance(answer, StoreAnswer) and answer.document:
                    found.setdefault(member.name, {}).update(orjson.loads(answer.document))
        return found


def _begun_of(document: Mapping[str, Any]) -> dict[str, tuple[int, bool]]:
    begun = document.get("begun", [])
    try:
        found = {one["address"]: (one["through"], one["is_name"]) for one in begun}
    except (TypeError, KeyError):
        raise ValueError("begun must be a list of address, through and is_name") from None
    for through, is_name in found.values():
        if type(through) is not int or not 0 <= through <= THROUGH_MAX or not isinstance(is_name, bool):
            raise ValueError("begun must say what the answer before has said")
    return found


async def _left_here(
    backend: WritebackAdmin | NoWriteback, prefix: Prefix, before: tuple[int, bool]
) -> to.FlushProgress:
    through, is_name = before
    return await backend.progress(prefix, through, is_name=is_name)


def _read(kind: type[Found], answer: StoreAnswer | RegistryAway) -> tuple[Found | None, str | None]:
    if isinstance(answer, RegistryAway):
        return None, str(answer)
    try:
        return kind.model_validate_json(answer.document), None
    except ValidationError:
        return None, "this node does not understand its answer: is it of the same version?"
