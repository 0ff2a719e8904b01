"""Requests of late over the admin port: the slowest, those that failed or were refused, and failures of the origin."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.responses import json_answer, number, problem
from gateway.shared.recent_requests import recent_requests

LIMIT, LIMIT_MAX = 20, 1000
"""Of each list."""


class RequestsApi:
    """The endpoint."""

    def __init__(self, shared_directory: Path) -> None:
        self._directory = shared_directory

    async def list(self, request: Request) -> Response:
        """`?limit=`: so many of each kind at most."""
        try:
            limit = number(request, "limit", 1, LIMIT_MAX, LIMIT)
        except ValueError as error:
            return problem(400, str(error))
        return json_answer(await self.document(limit))

    async def document(self, limit: int) -> dict[str, Any]:
        return await asyncio.to_thread(recent_requests, self._directory, limit, time.time())
