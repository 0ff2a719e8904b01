"""Server CPU of a warm 100 KiB GET with many slots and pins, against the same with one slot and no pin.

    python -m loadtests.many_slots [--seconds 3] [--rounds 5] [--scale 1] [--record]

1,000 slots and 1,000 pins (times the scale), in the bucket that is read from, over 2,000 keys and 16 connections; each
request has its own key, date and signature. The slots and pins are beside the keys: no request is answered by them.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import httpx

from loadtests.harness import command, warm
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.content import BUCKET, Family
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.report import Measured, Report, Verdict, at_most

_SIZE_BYTES = 100 * 1024
_KEYS = 2_000
_FILLS = 3
_PAUSE_SECONDS = 0.05


def test(options: Options) -> Report:
    count = options.of(1_000, least=10)
    objects = Family("small/", _KEYS, _SIZE_BYTES)
    work = warm.Workload(objects, 8 * 1024 * 1024, connections=16, requests=0)
    title = f"100 KiB warm GET beside {count:,} slots and {count:,} pins"
    report = Report("many_slots", title, options.command("many_slots"))
    many, few = f"{count:,} slots and pins", "one slot"
    others = [{"name": f"other-{number}", "prefix": f"s3://{BUCKET}/other/{number}/"} for number in range(count)]
    with ExitStack() as stack:
        origin = stack.enter_context(LoadOrigin([objects]))
        gateways = [
            stack.enter_context(gateway(origin, name=few)),
            stack.enter_context(gateway(origin, name=many, more_slots=others)),
        ]
        progress(f"pinning {count:,} prefixes")
        _pin(gateways[1], count)
        result = warm.Result([warm.WHOSE_CPU])
        requests = {one.name: work.signed("{}:{}".format(*one.address)) for one in gateways}
        for one in gateways:
            for _ in range(_FILLS):
                warm.fill(one, work)
        for number in range(options.rounds):
            for one in turn(gateways, number):
                progress(f"round {number + 1}: {one.name}")
                warm.round_of(one, work, requests[one.name], options.seconds, result)
    cpu = result.cpu_microseconds
    report.verdicts = [Verdict(f"CPU per request, {many} / {few}", ratio_of(cpu[many], cpu[few]), at_most(1.1))]
    report.tables = [
        Measured("server CPU per request", "µs", cpu),
        Measured("throughput", "requests/s", result.requests_per_second),
    ]
    report.notes = result.notes
    return report


def _pin(one: Gateway, count: int) -> None:
    """Prefixes with nothing under them; a gateway that has enough to do is asked again."""
    with httpx.Client(base_url=one.process.admin_url, trust_env=False, timeout=60) as client:
        for number in range(count):
            while True:
                answer = client.post("/api/v1/pin", json={"prefix": f"s3://{BUCKET}/small/none-{number}/"})
                if answer.status_code != 429:
                    break
                time.sleep(_PAUSE_SECONDS)
            answer.raise_for_status()
        pins = client.get("/api/v1/pins").json()["pins"]
        if len(pins) != count:
            raise RuntimeError(f"{len(pins)} prefixes are pinned, not {count}")


if __name__ == "__main__":
    command.main(test, __doc__)
