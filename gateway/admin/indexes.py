"""Indexes of slots over the admin port: how complete, and how old."""

from __future__ import annotations

from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.responses import json_answer, problem


class Indexes(Protocol):
    """The indexes themselves (`jobs.indexing.indexes.Indexes`)."""

    def documents(self) -> list[dict[str, Any]]: ...


class IndexHolder:
    """Where the background process puts its indexes once the cache directory is open."""

    def __init__(self) -> None:
        self._indexes: Indexes | None = None

    def apply_settings(self, indexes: Indexes | None) -> None:
        self._indexes = indexes

    def documents(self) -> list[dict[str, Any]] | None:
        """How each stands; None while the directory is not open."""
        return None if self._indexes is None else self._indexes.documents()

    async def list(self, _request: Request) -> Response:
        """Every index."""
        documents = self.documents()
        if documents is None:
            return problem(503, "the cache directory is not open yet")
        return json_answer({"indexes": documents})
