"""Training epochs with MLPerf's constants, warm through Forebay against direct: accelerator utilisation and speed-up.

    python -m loadtests.training [--rounds 5] [--scale 1] [--record]

Direct is an origin with 30 ms latency and 200 requests per second for all connections of this node. Compute is slept.
For unet3d the accelerator is half as fast as an H100, its files a tenth and its compute a tenth, so that one client
core can carry the demand; ResNet-50 and CosmoFlow are unscaled. The last table varies latency and loaders.
"""

from __future__ import annotations

from loadtests.harness import command
from loadtests.harness.command import Options, progress
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.report import Measured, Report, Target, Verdict, at_least
from loadtests.harness.trainer import COSMOFLOW, RESNET50, TEXT, UNET3D, Epoch, Model, train

_LOADERS = 8
_LATENCY_SECONDS = 0.030
_REQUESTS_PER_SECOND = 200.0
_CURVE_LATENCIES = (0.010, 0.030, 0.100)
_CURVE_LOADERS = (4, 16)
_TEXT_TOLERANCE = 0.02

Pair = tuple[list[Epoch], list[Epoch]]


def models(options: Options) -> list[Model]:
    """What is replayed, at the scale asked for."""
    return [
        UNET3D.scaled(slower=2, smaller=10, records=options.of(280, least=70)),
        RESNET50.scaled(records=RESNET50.batch * options.of(10, least=3)),
        COSMOFLOW.scaled(records=options.of(800, least=200)),
        TEXT.scaled(records=options.of(40, least=10)),
    ]


def test(options: Options) -> Report:
    report = Report("training", "Training epochs with MLPerf's constants", options.command("training"))
    replayed = models(options)
    utilisation: dict[str, list[float]] = {}
    with LoadOrigin([one.data() for one in replayed]) as origin, gateway(origin, capacity="16GiB") as ours:
        for model in replayed:
            progress(f"{model.name}: filling")
            origin.shape()
            train(ours.address, model, loaders=_LOADERS, seed=0)
            warm, direct = _pairs(ours, origin, model, options.rounds)
            utilisation[f"{model.name}, forebay warm"] = [one.utilisation for one in warm]
            utilisation[f"{model.name}, direct"] = [one.utilisation for one in direct]
            report.verdicts += _verdicts(model, warm, direct)
        curve = _curve(ours, origin, replayed[1])
    report.tables = [
        Measured("accelerator utilisation", "share", utilisation),
        Measured("ResNet-50: speed-up of a warm epoch over direct", "times", curve),
    ]
    report.notes = [f"{one.name} demands {one.demand_bytes_per_second / 1e6:,.0f} MB/s" for one in replayed]
    return report


def _pairs(ours: Gateway, origin: LoadOrigin, model: Model, rounds: int) -> Pair:
    warm, direct = [], []
    for number in range(rounds):
        progress(f"{model.name}: round {number + 1}")
        warm.append(train(ours.address, model, loaders=_LOADERS, seed=number + 1))
        direct.append(_direct(origin, model, _LATENCY_SECONDS, _LOADERS, number + 1))
    return warm, direct


def _direct(origin: LoadOrigin, model: Model, latency_seconds: float, loaders: int, seed: int) -> Epoch:
    origin.shape(latency_seconds=latency_seconds, requests_per_second=_REQUESTS_PER_SECOND)
    return train(origin.address, model, loaders=loaders, seed=seed)


def _verdicts(model: Model, warm: list[Epoch], direct: list[Epoch]) -> list[Verdict]:
    speed_up = ratio_of([one.seconds for one in direct], [one.seconds for one in warm])
    if model.name == TEXT.name:
        what = "text (bound by compute): speed-up over direct"
        low, high = Target(1 - _TEXT_TOLERANCE, at_most=False), Target(1 + _TEXT_TOLERANCE, at_most=True)
        return [Verdict(what, speed_up, low), Verdict(what, speed_up, high)]
    busy = ratio_of([one.utilisation for one in warm], [1.0] * len(warm))
    return [
        Verdict(f"{model.name}: accelerator utilisation of a warm epoch", busy, at_least(0.9)),
        Verdict(f"{model.name}: speed-up over direct", speed_up),
    ]


def _curve(ours: Gateway, origin: LoadOrigin, model: Model) -> dict[str, list[float]]:
    """One pair of epochs each."""
    short = model.scaled(records=3 * model.batch)
    speed_up: dict[str, list[float]] = {}
    for latency_seconds in _CURVE_LATENCIES:
        for loaders in _CURVE_LOADERS:
            name = f"{latency_seconds * 1e3:.0f} ms, {loaders} loaders"
            progress(f"curve: {name}")
            warm = train(ours.address, short, loaders=loaders, seed=1)
            direct = _direct(origin, short, latency_seconds, loaders, 1)
            speed_up[name] = [direct.seconds / warm.seconds]
    return speed_up


if __name__ == "__main__":
    command.main(test, __doc__)
