"""HEAD from the catalog: a server's CPU against a bare uvicorn answer, and what a ttl epoch asks after a LIST.

    python -m loadtests.heads [--seconds 3] [--rounds 5] [--scale 1] [--record]

10,000 keys in turn over 16 connections, each request with its own key, date and signature, which Forebay verifies. The
bare application knows nothing and answers the same bytes. `as listed`: what is remembered is older than metadata_ttl,
and a LIST since then has shown that it is the same. The epoch: every object once, its metadata remembered and too old.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from loadtests.harness import command, machine
from loadtests.harness.bare_uvicorn import BareUvicorn, Fields
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.content import BUCKET, Family
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.headers_only import head_client
from loadtests.harness.intervals import mean_of, ratio_of
from loadtests.harness.lister import lister
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.report import Measured, Report, Verdict, at_most
from loadtests.harness.signed_requests import Signer

_CONNECTIONS = 16
_SIZE_BYTES = 100 * 1024
_TTL_SECONDS = 15
"""Longer than the measurements of a round take together."""
_REMEMBERED = "forebay"
_LISTED = "forebay, as listed"
_BARE = "bare uvicorn"

Series = dict[str, list[float]]
CpuSeconds = Callable[[], float]
Address = tuple[str, int]


def test(options: Options) -> Report:
    objects = Family("small/", options.of(10_000, least=500), _SIZE_BYTES)
    report = Report("heads", f"HEAD from the catalog over {objects.count:,} keys", options.command("heads"))
    cpu: Series = {_REMEMBERED: [], _LISTED: [], _BARE: []}
    with ExitStack() as stack:
        origin = stack.enter_context(LoadOrigin([objects]))
        ours = stack.enter_context(gateway(origin))
        listed = stack.enter_context(
            gateway(origin, name=_LISTED, slot={"consistency": "ttl", "metadata_ttl": f"{_TTL_SECONDS}s"})
        )
        progress("filling")
        head = _once(ours.address, objects)[0]
        _once(listed.address, objects)
        bare = stack.enter_context(BareUvicorn(_fields(head)))
        _check_size(head, _once(bare.address, objects)[0])
        servers = {
            _REMEMBERED: (ours.address, lambda: machine.cpu_seconds(ours.worker_pid)),
            _LISTED: (listed.address, lambda: machine.cpu_seconds(listed.worker_pid)),
            _BARE: (bare.address, bare.cpu_seconds),
        }
        asked: Series = {"without a LIST": [], "after a LIST": []}
        for number in range(options.rounds):
            progress(f"round {number + 1}")
            time.sleep(_TTL_SECONDS)
            asked["without a LIST"].append(_epoch(origin, listed, objects))
            time.sleep(_TTL_SECONDS)
            _list(listed)
            asked["after a LIST"].append(_epoch(origin, listed, objects))
            for name in turn(list(cpu), number):
                address, used = servers[name]
                cpu[name].append(_cpu_microseconds(address, used, objects, options.seconds))
    return _finish(report, cpu, asked)


def _finish(report: Report, cpu: Series, asked: Series) -> Report:
    bound = at_most(2)
    report.verdicts = [
        Verdict("server CPU per HEAD, forebay / bare uvicorn", ratio_of(cpu[_REMEMBERED], cpu[_BARE]), bound),
        Verdict("the same as listed", ratio_of(cpu[_LISTED], cpu[_BARE])),
        Verdict("HEADs at the origin, in thousandths of a ttl epoch after a LIST", mean_of(asked["after a LIST"])),
    ]
    report.tables = [
        Measured("server CPU per HEAD", "µs", cpu),
        Measured("HEADs at the origin in a ttl epoch", "thousandths of the objects, and one", asked),
    ]
    return report


def _signed(address: Address, objects: Family) -> list[bytes]:
    """Dated over the last ten minutes: no two in a row alike."""
    signer, now = Signer("{}:{}".format(*address)), time.time()
    return [signer.get(objects.path(number), at=now - number % 600, method="HEAD") for number in range(objects.count)]


def _fields(head: bytes) -> Fields:
    lines = head.decode("latin-1").split("\r\n")[1:-2]
    pairs = [line.partition(": ") for line in lines]
    return [(name, value) for name, _, value in pairs]


def _check_size(ours: bytes, bare: bytes) -> None:
    if len(ours) != len(bare):
        raise RuntimeError(f"the answers are not of the same size:\n{ours!r}\n{bare!r}")


def _list(one: Gateway) -> None:
    with lister(one.address, BUCKET) as through:
        for _ in through.pages("small/"):
            pass


def _once(address: Address, objects: Family) -> list[bytes]:
    """The head of every object."""
    with head_client(address, _CONNECTIONS) as client:
        return client.once(_signed(address, objects))


def _epoch(origin: LoadOrigin, listed: Gateway, objects: Family) -> float:
    """Every object once; how many in a thousand the origin was asked for, and one, as no figure may be 0."""
    before = origin.counts().heads
    _once(listed.address, objects)
    return 1 + 1000 * (origin.counts().heads - before) / objects.count


def _cpu_microseconds(address: Address, used: CpuSeconds, objects: Family, seconds: float) -> float:
    requests = _signed(address, objects)
    with head_client(address, _CONNECTIONS) as client:
        before = used()
        answered = client.run(requests, seconds)
        return (used() - before) / answered * 1e6


if __name__ == "__main__":
    command.main(test, __doc__)
