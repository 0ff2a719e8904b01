"""Makes the limits of bandwidth, request rates and callers from the settings, in memory that processes share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from os import PathLike

from gateway.config import CallerLimitSettings, OriginSettings, Settings, SlotSettings
from gateway.config.settings import signers
from gateway.core.clock import Clock
from gateway.core.errors import StartupError
from gateway.origin.client import Direction
from gateway.origin.traffic_meter import LinkEnd, in_all
from gateway.policy.bandwidth import Bandwidth, BandwidthShare, Ceiling, cells_for
from gateway.policy.callers import OWN, UNSIGNED, CallerClass, Callers, CallersPlan, Limits
from gateway.policy.capacity_controller import TICK_SECONDS
from gateway.policy.request_rates import RequestRates
from gateway.policy.request_rates import cells_for as cells_for_rates
from gateway.policy.slots import DEFAULT_SLOT
from gateway.policy.token_bucket import SharedCells, make_shared_memory
from gateway.telemetry import metric_kinds, metrics
from gateway.telemetry.metrics import USED_BY_ALL


def make_shared_bandwidth(settings: Settings, clock: Clock) -> int | None:
    """Return a descriptor of the memory for the ceilings of all processes; None without ceilings. OSError."""
    ceilings = ceilings_of(settings)
    if not ceilings:
        return None
    return make_shared_memory(cells_for(ceilings, shares_of(settings)), _processes(settings), clock.monotonic())


BandwidthPlan = tuple[Sequence[Ceiling], Sequence[BandwidthShare]]


def bandwidth_plan(settings: Settings) -> BandwidthPlan:
    return ceilings_of(settings), shares_of(settings)


def begin_bandwidth_as(before: BandwidthPlan, descriptor: int, settings: Settings, made: int, clock: Clock) -> None:
    """Start the ceilings in new memory with the levels of those in force: a change of settings resets none."""

    def opened(plan: BandwidthPlan, memory: int) -> Bandwidth:
        return Bandwidth(plan[0], clock, SharedCells.attach(memory, cells_for(*plan), _processes(settings), 0), plan[1])

    opened(bandwidth_plan(settings), made).begin_as(opened(before, descriptor))


def bandwidth_of(
    settings: Settings, clock: Clock, *, process: int = 0, shared: PathLike[str] | None = None
) -> Bandwidth | None:
    """Return the ceilings and shares as process number `process` keeps them; None if there are none.

    `shared` is a path to open the memory of `make_shared_bandwidth`; without, this process is the only one.
    StartupError if it is of another version or configuration.
    """
    ceilings = ceilings_of(settings)
    if not ceilings:
        return None
    shares, cells = shares_of(settings), None
    if shared is not None:
        processes = _processes(settings)
        try:
            cells = _attached(shared, cells_for(ceilings, shares), processes, min(process, processes - 1))
        except (OSError, ValueError) as error:
            raise StartupError(f"{error}: start the gateway again") from None
    return Bandwidth(ceilings, clock, cells, shares)


def make_shared_request_rates(settings: Settings, clock: Clock) -> int:
    """Return a descriptor of the memory for the request rates of all processes. OSError."""
    processes = _processes(settings)
    return make_shared_memory(cells_for_rates(len(weights_of(settings)), processes), processes, clock.monotonic())


def request_rates_of(
    settings: Settings, clock: Clock, *, process: int = 0, shared: PathLike[str] | None = None
) -> RequestRates:
    """Return the request rates, as process number `process` keeps them, for an origin that refuses too many requests.

    `shared` and StartupError as in `bandwidth_of`, for the memory of `make_shared_request_rates`.
    """
    weights, cells = weights_of(settings), None
    if shared is not None:
        processes = _processes(settings)
        try:
            cells = _attached(shared, cells_for_rates(len(weights), processes), processes, min(process, processes - 1))
        except (OSError, ValueError) as error:
            raise StartupError(f"{error}: start the gateway again") from None
    return RequestRates(
        weights,
        clock,
        cells,
        wait_seconds_max=settings.origin.connection_wait_seconds,
        buckets_told=buckets_told(settings),
    )


def buckets_told(settings: Settings) -> set[str]:
    return {slot.prefix.bucket for slot in settings.slots} - {""}


def _attached(shared: PathLike[str], rows: int, processes: int, process: int) -> SharedCells:
    descriptor = os.open(shared, os.O_RDWR | os.O_CLOEXEC)
    try:
        return SharedCells.attach(descriptor, rows, processes, process)
    finally:
        os.close(descriptor)


def make_shared_callers(settings: Settings, clock: Clock) -> int | None:
    """Return a descriptor of the memory for the limits of callers; None: there are none. OSError."""
    rows = callers_plan(settings).rows
    return make_shared_memory(rows, settings.server.workers, clock.monotonic()) if rows else None


def callers_of(
    settings: Settings, clock: Clock, *, worker: int = 0, shared: PathLike[str] | None = None
) -> Callers | None:
    """Return the limits of callers, as worker number `worker` keeps them; None: there are none.

    `shared` is a path to open the memory of `make_shared_callers`; without, this process is the only one. StartupError
    as `bandwidth_of`.
    """
    plan = callers_plan(settings)
    if not plan.rows:
        return None
    cells = None
    if shared is not None:
        try:
            cells = _attached(shared, plan.rows, settings.server.workers, worker)
        except (OSError, ValueError) as error:
            raise StartupError(f"{error}: start the gateway again") from None
    return Callers(plan, clock, cells)


def callers_plan(settings: Settings) -> CallersPlan:
    """Return the limits of callers, in the same order in all workers of one gateway."""
    return CallersPlan(
        [(one.access_key_id, _limits_of(one)) for one in settings.credentials],
        [CallerClass(one.name, _limits_of(one), one.app, one.product) for one in settings.caller_classes],
        settings.server.caller_wait_seconds,
    )


def names_in_metrics(settings: Settings) -> tuple[set[str], set[str]]:
    """Return the names of slots and of credentials, including those that stand for none."""
    slots = {DEFAULT_SLOT.name, *(slot.name for slot in settings.slots)}
    return slots, {OWN, UNSIGNED, *(one.access_key_id for one in settings.credentials)}


def keep_names_in_metrics(settings: Settings) -> None:
    """Sum up the counts of slots, credentials and classes that no longer exist."""
    classes = {one.name for one in settings.caller_classes}
    users = (USED_BY_ALL, *(one.used_by for one in signers(settings)))
    metric_kinds.keep_names(*names_in_metrics(settings), classes, buckets_told(settings), users)


def _limits_of(one: CallerLimitSettings) -> Limits:
    return Limits(
        one.max_concurrent_requests,
        one.requests_per_second,
        one.read_bandwidth_bytes_per_second,
        one.write_bandwidth_bytes_per_second,
    )


class CapacityFinder:
    """This process's part in finding the capacity of the link, if the settings say so. Event loop only."""

    def __init__(self, origins: Sequence[LinkEnd], clock: Clock, *, tells: bool) -> None:
        """`origins` are all that this process talks to, over one link; more may come. One process `tells` metrics."""
        self._origins = origins
        self._clock = clock
        self._tells = tells
        self._bandwidth: Bandwidth | None = None
        self._finding: asyncio.Task[None] | None = None

    def apply_settings(self, bandwidth: Bandwidth | None) -> None:
        """Put these ceilings in force. The capacity found before holds for them."""
        if bandwidth is not None and self._bandwidth is not None:
            bandwidth.continue_from(self._bandwidth)
        self._bandwidth = bandwidth
        if self._finding is None and bandwidth is not None and bandwidth.found:
            self._finding = asyncio.create_task(self._find(), name="capacity of the link")

    async def close(self) -> None:
        """Idempotent."""
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.gather(self._finding, return_exceptions=True)

    async def _find(self) -> None:
        told = set[Direction]()
        while self._bandwidth is not None and self._bandwidth.found:
            due = self._clock.monotonic() + TICK_SECONDS
            await self._clock.sleep(TICK_SECONDS)
            bandwidth, now = self._bandwidth, self._clock.monotonic()
            bandwidth.find_capacity(in_all([one.traffic() for one in self._origins]), now - due)
            window_bytes = bandwidth.window_bytes()
            if window_bytes is not None:
                for one in self._origins:
                    one.limit_windows(window_bytes)
            told = self._tell(bandwidth, told, now)
        self._finding = None
        for direction in told:
            _tell_link(direction)

    def _tell(self, bandwidth: Bandwidth, told: set[Direction], now: float) -> set[Direction]:
        if not self._tells:
            return told
        for direction, link in bandwidth.found.items():
            found = link.found(now)
            _tell_link(direction, found.capacity, found.delay_seconds)
        for direction in told.difference(bandwidth.found):
            _tell_link(direction)
        return set(bandwidth.found)


def _tell_link(direction: Direction, capacity: float | None = None, delay_seconds: float | None = None) -> None:
    metrics.LINK_CAPACITY.set(capacity or 0.0, direction)
    metrics.LINK_DELAY.set(delay_seconds or 0.0, direction)


def ceilings_of(settings: Settings) -> list[Ceiling]:
    """Return every ceiling, in the same order in all processes of one gateway."""
    groups = [_ceilings(None, settings.origin), *(_ceilings(slot.name, slot) for slot in settings.slots)]
    return [ceiling for group in groups for ceiling in group]


def shares_of(settings: Settings) -> list[BandwidthShare]:
    """Return each slot's share of the link, in the same order in all processes of one gateway."""
    shares = [BandwidthShare("read", DEFAULT_SLOT.name), BandwidthShare("write", DEFAULT_SLOT.name)]
    for slot in settings.slots:
        shares.append(BandwidthShare("read", slot.name, slot.weight, slot.read_guarantee_bytes_per_second))
        shares.append(BandwidthShare("write", slot.name, slot.weight, slot.write_guarantee_bytes_per_second))
    return shares


def weights_of(settings: Settings) -> list[tuple[str, int]]:
    """Return each slot's weight for request rates, in the same order in all processes of one gateway."""
    return [(DEFAULT_SLOT.name, 1), *((slot.name, slot.weight) for slot in settings.slots)]


def _processes(settings: Settings) -> int:
    """Count the workers and the background process, which has the greatest number."""
    return settings.server.workers + 1


def _ceilings(slot: str | None, settings: OriginSettings | SlotSettings) -> Iterator[Ceiling]:
    read, write = settings.read_bandwidth_bytes_per_second, settings.write_bandwidth_bytes_per_second
    if read is not None:
        yield Ceiling("read", slot, None if read == "auto" else read)
    if write is not None:
        yield Ceiling("write", slot, None if write == "auto" else write)
