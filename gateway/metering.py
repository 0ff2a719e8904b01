"""From settings to ceilings, and to what each process of a gateway needs to keep them together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from socket import socket

from gateway.clock import Clock
from gateway.config import OriginSettings, Settings, SlotSettings
from gateway.counting import WorkerMetrics
from gateway.origin.metered import OriginMeter
from gateway.policy.bandwidth import Bandwidth, Ceiling
from gateway.policy.lease_channel import LeaseHolder, LeaseServer, channel
from gateway.policy.leases import Lessee, static_shares


def ceilings_of(settings: Settings) -> list[Ceiling]:
    """Every ceiling that is set, in the same order in all processes of one gateway."""
    link, slots = _ceilings(None, settings.origin), [_ceilings(slot.name, slot) for slot in settings.slots]
    return [ceiling for group in (link, *slots) for ceiling in group]


def _ceilings(slot: str | None, settings: OriginSettings | SlotSettings) -> Iterator[Ceiling]:
    if settings.read_bandwidth_bytes_per_second is not None:
        yield Ceiling("read", slot, settings.read_bandwidth_bytes_per_second)
    if settings.write_bandwidth_bytes_per_second is not None:
        yield Ceiling("write", slot, settings.write_bandwidth_bytes_per_second)


@asynccontextmanager
async def origin_meter(
    settings: Settings, metrics: WorkerMetrics, clock: Clock, lease_end: socket | None
) -> AsyncIterator[OriginMeter]:
    """One process's meter. Leases come over `lease_end`, and nothing waits for them; without it, shares are static."""
    ceilings = ceilings_of(settings)
    if not ceilings:
        yield OriginMeter(metrics)
        return
    rates = [one.bytes_per_second for one in ceilings]
    holders = settings.server.workers + 1  # the background process is one too
    if lease_end is None:
        yield OriginMeter(metrics, Bandwidth(ceilings, static_shares(rates, holders), clock))
        return
    lessee = Lessee(rates, holders, clock.monotonic())
    bandwidth = Bandwidth(ceilings, lessee.rates(clock.monotonic()), clock)
    holding = asyncio.create_task(LeaseHolder(bandwidth, lessee, lease_end, clock, metrics.bandwidth_leased).run())
    try:
        yield OriginMeter(metrics, bandwidth)
    finally:
        holding.cancel()
        await asyncio.wait((holding,))


def lease_channel(settings: Settings) -> tuple[socket, socket] | None:
    """A holder's end and the book's, to be made before both; None where there is nothing to ask for."""
    return channel() if ceilings_of(settings) else None


@contextmanager
def lease_server(settings: Settings, ends: Mapping[str, socket], clock: Clock) -> Iterator[None]:
    """While this lasts, the ceilings are dealt out to the holders whose channels end here."""
    if not ends:
        yield
        return
    server = LeaseServer([one.bytes_per_second for one in ceilings_of(settings)], ends, clock)
    server.start()
    try:
        yield
    finally:
        server.stop()
