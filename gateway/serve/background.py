"""The background process: the admin port, and in time whatever is done while nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from gateway.control.app import control_app
from gateway.control.state import CURRENT
from gateway.serve.orders import Orders

_GRACE_SECONDS = 5


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: the child's own stop event decides."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_admin(orders: Orders) -> None:
    """Serve the admin port until told to stop."""
    app = control_app(orders.handover.settings, CURRENT, orders.handover.metrics_directory)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
    )
    serving = asyncio.create_task(server.serve(orders.listeners))
    orders.ready()
    stopping = asyncio.create_task(orders.stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    stopping.cancel()
    await serving
