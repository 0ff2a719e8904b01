"""Why an object is answered from this node, or is not, over the admin port."""

from __future__ import annotations

from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.responses import json_answer, problem
from gateway.admin.writeback import WritebackHolder
from gateway.core.errors import BufferUnavailable, S3Error, SnapshotError, StoreUnavailable
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix


class Explains(Protocol):
    """Who looks (`jobs.explaining.Explainer`)."""

    async def explain(self, key: ObjectKey) -> dict[str, Any]: ...


class ExplainHolder:
    """Where the background process puts it once the cache directory is open."""

    def __init__(self) -> None:
        self.explainer: Explains | None = None


class ExplainApi:
    """The endpoint."""

    def __init__(self, holder: ExplainHolder, writeback: WritebackHolder) -> None:
        self._holder = holder
        self._writeback = writeback

    async def show(self, request: Request) -> Response:
        """`?object=s3://bucket/key`: what is known of it, and what is here."""
        explainer = self._holder.explainer
        try:
            asked = Prefix.parse(request.query_params.get("object", ""))
        except ValueError as error:
            return problem(400, str(error))
        if not asked.bucket or not asked.key_prefix:
            return problem(400, f"{str(asked)!r} names no object: s3://bucket/key")
        if explainer is None:
            return problem(503, "the cache directory is not open yet")
        key = ObjectKey(asked.bucket, asked.key_prefix)
        try:
            document = await explainer.explain(key) | {"pending": await self._pending(key)}
        except (SnapshotError, S3Error) as error:
            return problem(409, str(error))
        except (StoreUnavailable, BufferUnavailable) as error:
            return problem(503, str(error))
        exists, pending = document["known"]["exists"], document["pending"]
        is_written = pending is not None and not pending["deleted"]
        if document["why_not_kept"] is None and not (exists or document["held"]["blocks"] or is_written):
            document["why_not_kept"] = "nothing is known of it yet" if exists is None else "there is no such object"
        return json_answer(document)

    async def _pending(self, key: ObjectKey) -> dict[str, Any] | None:
        """The first write of the key that the origin does not have yet; it is the first under its own prefix."""
        backend = self._writeback.backend
        if backend is None:
            return None
        page = await backend.objects(Prefix(*key), "", 1)
        found: list[dict[str, Any]] = [one for one in page["objects"] if one["key"] == key.key]
        return found[0] if found else None
