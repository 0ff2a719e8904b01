"""The price of a warm request: server CPU of HEADs, of GETs with the heads of real clients, of RetinaNet's images.

    python -m loadtests.price [--seconds 3] [--rounds 5] [--scale 1] [--record]

HEAD: beside a bare uvicorn, which knows nothing and answers the same bytes. GETs of 100 KiB: with the heads of boto3,
the AWS CRT and s5cmd, as they were recorded, beside those of `wrk` here, which have four fields. RetinaNet: GETs of
322,957 bytes, and how many accelerators a core would feed by MLPerf Storage's constants, were there no network: of
2,000 images again and again, and of 17,000 in turn, more than a process has prepared, as in an epoch (at full scale).
2,000 keys, 16 connections; every request has its own key, date and signature, which Forebay verifies; everything is
cached and in the page cache. CPU of Forebay is its worker's alone, and with the client's. One round is run before that
does not count.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from loadtests.harness import command, warm
from loadtests.harness.bare_uvicorn import BareUvicorn, Fields
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import Contender, turn
from loadtests.harness.content import Family
from loadtests.harness.gateway import Gateway, WorkerOf, gateway
from loadtests.harness.headers_only import head_client, signed_heads
from loadtests.harness.intervals import mean_of, number, ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.report import Measured, Report, Verdict, at_most
from loadtests.harness.trainer import RETINANET
from tests.support.client_heads import CLIENT_HEADS, Signing
from tests.support.gateway_process import ORIGIN_KEYS

_CONNECTIONS = 16
_SIZE_BYTES = 100 * 1024
_WHOLE_BYTES = 8 * 1024 * 1024
_CLIENTS = ("boto3", "AWS CRT", "s5cmd")
_HEAD, _BARE = "HEAD, forebay", "HEAD, bare uvicorn"
_PLAIN, _IMAGES, _EPOCH = "GET of 100 KiB, four fields", "image, again and again", "image, once an epoch"
_EPOCH_IMAGES = 17_000
"""More than the answers that one process keeps prepared (docs/decisions/0029-prepared-requests.md)."""


@dataclass(frozen=True, slots=True)
class _Round:
    """One kind of request and who answers it."""

    name: str
    run: Callable[[warm.Result], None]


def test(options: Options) -> Report:
    small = Family("small/", options.of(2_000, least=200), _SIZE_BYTES)
    images = Family("images/", options.of(2_000, least=200), RETINANET.record_bytes)
    epoch = Family("epoch/", _EPOCH_IMAGES if options.scale >= 1 else 0, RETINANET.record_bytes)
    report = Report("price", "The price of a warm request, 16 connections", options.command("price"))
    with ExitStack() as stack:
        origin = stack.enter_context(LoadOrigin([small, images, epoch]))
        ours = stack.enter_context(gateway(origin, capacity="12GiB"))
        for objects in (small, images, epoch):
            progress(f"filling {objects}")
            for _ in range(2):
                warm.fill(ours, _work(objects))
        bare = stack.enter_context(BareUvicorn(_fields(ours, small)))
        clients = _of_clients(ours, small)
        rounds = [
            _heads(WorkerOf(ours, _HEAD), small, options.seconds),
            _heads(_Bare(bare), small, options.seconds),
            *(_gets(ours, name, small, requests, options.seconds) for name, requests in clients.items()),
            _gets(ours, _IMAGES, images, _signed(ours, images), options.seconds),
            *([_gets(ours, _EPOCH, epoch, _signed(ours, epoch), options.seconds)] if epoch.count else []),
        ]
        result = warm.Result([warm.WHOSE_CPU])
        for count in range(options.rounds + 1):
            for one in turn(rounds, count):
                progress(f"round {count}: {one.name}")
                one.run(result if count else warm.Result([]))
    return _finish(report, result)


@dataclass(frozen=True, slots=True)
class _Bare:
    """The bare application as a contender, by the name of its figure."""

    of: BareUvicorn
    name: str = _BARE

    @property
    def url(self) -> str:
        return self.of.url

    @property
    def address(self) -> tuple[str, int]:
        return self.of.address

    def cpu_seconds(self) -> float:
        return self.of.cpu_seconds()


def _finish(report: Report, result: warm.Result) -> Report:
    cpu, both = result.cpu_microseconds, result.with_client_cpu_microseconds
    report.verdicts = [
        Verdict("server CPU per HEAD, forebay / bare uvicorn", ratio_of(cpu[_HEAD], cpu[_BARE]), at_most(0.8)),
        Verdict("the same, server and client", ratio_of(both[_HEAD], both[_BARE])),
    ]
    for name in _CLIENTS:
        ratio = ratio_of(cpu[name], cpu[_PLAIN])
        report.verdicts.append(Verdict(f"server CPU per GET, heads of {name} / four fields", ratio, at_most(1.2)))
        together = ratio_of(both[name], both[_PLAIN])
        report.verdicts.append(Verdict("the same, server and client", together))
    for name in (_IMAGES, _EPOCH) if _EPOCH in cpu else (_IMAGES,):
        per_core = [1e6 / microseconds for microseconds in cpu[name]]
        fed = [rate / RETINANET.demand_records_per_second for rate in per_core]
        report.verdicts.append(Verdict(f"GETs a CPU second of the worker, 322,957 bytes, {name}", mean_of(per_core)))
        report.verdicts.append(Verdict(f"accelerators (B200, RetinaNet) that a core feeds, {name}", mean_of(fed)))
    report.tables = [
        Measured("server CPU per request", "µs", cpu),
        Measured("CPU per request, server and client", "µs", both),
        Measured("throughput", "requests/s", result.requests_per_second),
    ]
    demand = f"{number(RETINANET.demand_records_per_second)} images a second"
    report.notes = [*result.notes, f"RetinaNet on a B200 asks for {demand} (MLPerf Storage v3.0; see trainer.py)."]
    return report


def _work(objects: Family) -> warm.Workload:
    return warm.Workload(objects, _WHOLE_BYTES, connections=_CONNECTIONS, requests=0)


def _signed(ours: Gateway, objects: Family) -> list[bytes]:
    return _work(objects).signed("{}:{}".format(*ours.address))


def _fields(ours: Gateway, objects: Family) -> Fields:
    """Of the answer to a HEAD, but the date."""
    with head_client(ours.address, 1) as client:
        [head] = client.once(signed_heads(ours.address, objects)[:1])
    pairs = [line.partition(": ") for line in head.decode("latin-1").split("\r\n")[1:-2]]
    return [(name, value) for name, _, value in pairs]


def _of_clients(ours: Gateway, objects: Family) -> Mapping[str, list[bytes]]:
    """Requests for each object in turn, dated over the last ten minutes; by the name of the figure."""
    host = "{}:{}".format(*ours.address)
    signing, now = Signing(*ORIGIN_KEYS, host), time.time()
    found = {_PLAIN: _signed(ours, objects)}
    for name in _CLIENTS:
        kind = CLIENT_HEADS[name]
        found[name] = [
            kind.head(signing, objects.path(one), now - one % 600, values={"amz-sdk-invocation-id": f"{one:036x}"})
            for one in range(objects.count)
        ]
    return found


def _gets(ours: Gateway, name: str, objects: Family, requests: list[bytes], seconds: float) -> _Round:
    """Each round goes on where the one before has ended."""
    worker, work = WorkerOf(ours, name), _work(objects)
    following = deque(requests)

    def run(result: warm.Result) -> None:
        following.rotate(-warm.round_of(worker, work, list(following), seconds, result))

    return _Round(name, run)


def _heads(one: Contender, objects: Family, seconds: float) -> _Round:
    requests = signed_heads(one.address, objects)

    def run(result: warm.Result) -> None:
        with head_client(one.address, _CONNECTIONS) as client:
            before, client_before = one.cpu_seconds(), time.process_time()
            answered = client.run(requests, seconds)
            used, client_used = one.cpu_seconds() - before, time.process_time() - client_before
        result.cpu_microseconds[one.name].append(used / answered * 1e6)
        result.with_client_cpu_microseconds[one.name].append((used + client_used) / answered * 1e6)
        result.requests_per_second[one.name].append(answered / seconds)

    return _Round(one.name, run)


if __name__ == "__main__":
    command.main(test, __doc__)
