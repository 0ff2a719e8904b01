"""The least that answers over uvicorn: an ASGI application that says the same head to whatever is asked.

python -m loadtests.harness.bare_uvicorn PORT FIELDS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from loadtests.harness.server_process import ServerProcess

_REPOSITORY = Path(__file__).resolve().parents[2]

Fields = Sequence[tuple[str, str]]


class BareUvicorn(ServerProcess):
    """Answers 200 without a body, with these fields and a date; httptools, asyncio's loop, no log, no middleware."""

    name = "bare uvicorn"

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self._fields = json.dumps([[name, value] for name, value in fields if name != "date"])

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "loadtests.harness.bare_uvicorn", str(self.port), self._fields]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(_REPOSITORY)}


def main(port: int, fields: Fields) -> None:
    start = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields],
    }
    body = {"type": "http.response.body", "body": b""}

    async def app(scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        await send(start)
        await send(body)

    uvicorn.run(
        app,
        port=port,
        http="httptools",
        loop="asyncio",
        lifespan="off",
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
