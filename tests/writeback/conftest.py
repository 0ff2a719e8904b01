"""Tests of the buffer may be coroutines. What `opening` gives them is opened and closed in their event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.support.flushing import Buffer
from tests.support.opening import Opening
from tests.support.writeback_admin import AdminHarness


@pytest.fixture
def buffer(tmp_path: Path) -> Opening:
    return Opening(lambda: Buffer(tmp_path))


@pytest.fixture
def harness(tmp_path: Path) -> Opening:
    return Opening(lambda: AdminHarness(tmp_path))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(_run(pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in names}))
    return True


async def _run(test: Callable[..., Coroutine[Any, Any, None]], arguments: dict[str, Any]) -> None:
    opened = {name: one.open() for name, one in arguments.items() if isinstance(one, Opening)}
    try:
        await test(**arguments | opened)
    finally:
        for one in opened.values():
            await one.close()
