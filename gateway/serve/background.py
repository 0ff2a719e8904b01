"""The background process: the admin port, the leases of bandwidth, and whatever is done while nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import uvicorn

from gateway.app import survey_blocks
from gateway.clock import SystemClock
from gateway.config import Settings
from gateway.control.app import control_app
from gateway.control.state import CURRENT
from gateway.errors import ForebayError
from gateway.metering import lease_server
from gateway.serve.lease_channels import books_ends
from gateway.serve.orders import Orders

_GRACE_SECONDS = 5
_SURVEY_PAUSE_SECONDS = 30

_log = structlog.get_logger("forebay.background")


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: the child's own stop event decides."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_background(orders: Orders) -> None:
    """Deal out bandwidth, serve the admin port, and survey the cache directory where needed, until told to stop."""
    handover = orders.handover
    with lease_server(handover.settings, books_ends(handover.leases), SystemClock()):
        await _serve_admin(orders)


async def _serve_admin(orders: Orders) -> None:
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
    surveying = asyncio.create_task(_survey(orders.handover.settings))
    orders.ready()
    stopping = asyncio.create_task(orders.stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    stopping.cancel()
    surveying.cancel()
    await serving
    await asyncio.gather(surveying, return_exceptions=True)


async def _survey(settings: Settings) -> None:
    """Until the index is complete: what fails is tried again, for meanwhile blocks that are there count as misses."""
    while True:
        try:
            await survey_blocks(settings)
        except ForebayError as error:
            _log.warning("the survey of the cache directory goes on later", error=str(error))
            await asyncio.sleep(_SURVEY_PAUSE_SECONDS)
        else:
            return
