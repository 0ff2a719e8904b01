"""The limits of bandwidth, request rates and callers, as the settings say, in the memory that all processes share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from gateway.config import CallerLimitSettings, OriginSettings, Settings, SlotSettings
from gateway.config.live import LiveSettings, Numbers
from gateway.config.settings import signers
from gateway.core.clock import Clock
from gateway.core.errors import StartupError
from gateway.origin.client import Direction
from gateway.origin.traffic_meter import LinkEnd, in_all
from gateway.policy import bandwidth, callers, request_rates
from gateway.policy.bandwidth import Bandwidth, BandwidthShare, Ceiling
from gateway.policy.callers import OWN, UNSIGNED, CallerClass, Callers, CallersPlan, Limits
from gateway.policy.capacity_controller import TICK_SECONDS
from gateway.policy.request_rates import RequestRates
from gateway.policy.slots import DEFAULT_SLOT
from gateway.shared.arena import SharedCells, make_shared_memory
from gateway.telemetry import metric_kinds, metrics
from gateway.telemetry.metrics import USED_BY_ALL

_BANDWIDTH, _REQUEST_RATES, _CALLERS = range(3)


def make_memory(settings: Settings, numbers: Numbers, now: float) -> int:
    """Return a descriptor of the memory of all processes of a gateway, for as long as it runs. OSError."""
    processes = _processes(settings)
    return make_shared_memory(sum(_rows_of_parts(numbers, processes)), processes, now)


def _rows_of_parts(numbers: Numbers, processes: int) -> tuple[int, int, int]:
    return (
        bandwidth.rows_for(numbers.slots.most),
        request_rates.rows_for(numbers.slots.most, processes),
        callers.rows_for(numbers.credentials.most, numbers.classes.most),
    )


def _processes(settings: Settings) -> int:
    """Count the workers and the background process, which has the greatest number."""
    return settings.server.workers + 1


class SharedLimits:
    """Bandwidth and request rates, as process number `process` keeps them with all others; they follow the settings.

    Without a memory, this process is the only one. Event loop only.
    """

    def __init__(self, live: LiveSettings, clock: Clock, process: int) -> None:
        """StartupError if the memory is of another version or configuration."""
        self._live = live
        self._clock = clock
        settings, numbers = live.now, live.numbers
        processes = _processes(settings) if live.memory is not None else 1
        self._rows = rows = _rows_of_parts(numbers, processes)
        if live.memory is None:
            self._cells = SharedCells.of_one_process(sum(rows), clock.monotonic())
        else:
            try:
                with open(live.memory, "r+b", buffering=0) as file:
                    self._cells = SharedCells.attach(file.fileno(), sum(rows), processes, min(process, processes - 1))
            except (OSError, ValueError) as error:
                raise StartupError(f"{error}: start the gateway again") from None
        self.bandwidth = Bandwidth(
            ceilings_of(settings), clock, self._part(_BANDWIDTH), shares_of(settings), numbers.slots, live.generation
        )
        self.request_rates = RequestRates(
            weights_of(settings),
            clock,
            self._part(_REQUEST_RATES),
            wait_seconds_max=settings.origin.connection_wait_seconds,
            buckets_told=buckets_told(settings),
            slots=numbers.slots,
        )
        self._callers: Callers | None = None
        self._cells.follow(live.generation)

    def callers(self) -> Callers:
        """Return the limits of callers, for a worker; call it once."""
        numbers, cells = self._live.numbers, self._part(_CALLERS)
        of = numbers.credentials, numbers.classes, self._live.generation
        self._callers = Callers(callers_plan(self._live.now), self._clock, cells, *of)
        return self._callers

    def apply_settings(self) -> None:
        settings, numbers, generation = self._live.now, self._live.numbers, self._live.generation
        self.bandwidth.apply_settings(ceilings_of(settings), shares_of(settings), numbers.slots, generation)
        self.request_rates.apply_settings(weights_of(settings), numbers.slots, buckets_told(settings))
        if self._callers is not None:
            of = numbers.credentials, numbers.classes, generation
            self._callers.apply_settings(callers_plan(settings), *of)
        self._cells.follow(generation)

    def _part(self, which: int) -> SharedCells:
        return self._cells.part(sum(self._rows[:which]), self._rows[which])


def buckets_told(settings: Settings) -> set[str]:
    return {slot.prefix.bucket for slot in settings.slots} - {""}


def callers_plan(settings: Settings) -> CallersPlan:
    """Return the limits of callers."""
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

    def __init__(self, bandwidth: Bandwidth, origins: Sequence[LinkEnd], clock: Clock, *, tells: bool) -> None:
        """`origins` are all that this process talks to, over one link; more may come. One process `tells` metrics."""
        self._bandwidth = bandwidth
        self._origins = origins
        self._clock = clock
        self._tells = tells
        self._finding: asyncio.Task[None] | None = None
        self.apply_settings()

    def apply_settings(self) -> None:
        if self._finding is None and self._bandwidth.found:
            self._finding = asyncio.create_task(self._find(), name="capacity of the link")

    async def close(self) -> None:
        """Idempotent."""
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.gather(self._finding, return_exceptions=True)

    async def _find(self) -> None:
        told = set[Direction]()
        while self._bandwidth.found:
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
    """Return every ceiling."""
    groups = [_ceilings(None, settings.origin), *(_ceilings(slot.name, slot) for slot in settings.slots)]
    return [ceiling for group in groups for ceiling in group]


def shares_of(settings: Settings) -> list[BandwidthShare]:
    """Return each slot's share of the link."""
    shares = list[BandwidthShare]()
    for slot in settings.slots:
        shares.append(BandwidthShare("read", slot.name, slot.weight, slot.read_guarantee_bytes_per_second))
        shares.append(BandwidthShare("write", slot.name, slot.weight, slot.write_guarantee_bytes_per_second))
    return shares


def weights_of(settings: Settings) -> dict[str, int]:
    """Return each slot's weight for request rates."""
    return {slot.name: slot.weight for slot in settings.slots}


def _ceilings(slot: str | None, settings: OriginSettings | SlotSettings) -> Iterator[Ceiling]:
    read, write = settings.read_bandwidth_bytes_per_second, settings.write_bandwidth_bytes_per_second
    if read is not None:
        yield Ceiling("read", slot, None if read == "auto" else read)
    if write is not None:
        yield Ceiling("write", slot, None if write == "auto" else write)
