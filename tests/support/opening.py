"""What a coroutine test works on, to be opened in the test's event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol


class Closable(Protocol):
    """Works in one event loop."""

    def close(self) -> Coroutine[Any, Any, None]: ...


@dataclass(frozen=True)
class Opening:
    """Fixtures return it; the test gets what it opens."""

    open: Callable[[], Closable]


async def run_with_opened(test: Callable[..., Coroutine[Any, Any, None]], arguments: dict[str, Any]) -> None:
    opened = {name: one.open() for name, one in arguments.items() if isinstance(one, Opening)}
    try:
        await test(**arguments | opened)
    finally:
        for one in opened.values():
            await one.close()
