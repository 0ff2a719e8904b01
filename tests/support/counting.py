"""Read the metrics that a test's gateway counts in this process. Each test begins at zero (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.telemetry.metric_kinds import Counter, Gauge, Histogram, Known, Metric
from gateway.telemetry.metric_reading import exposition_parts


def counted(metric: Metric, **labels: str) -> float:
    """Return the sum of a metric's numbers with these labels; for a histogram, the number of events."""
    return sum(by_label(metric, *metric.labels[:1], **labels).values())


def by_label(metric: Metric, label: str = "", **labels: str) -> dict[str, float]:
    """Return the same for each value of one label, without those that are 0."""
    found = dict[str, float]()
    for label_values, value in metric.kept().items():
        of = dict(zip(metric.labels, label_values, strict=True))
        if labels.items() <= of.items():
            number = sum(one.get() for one in value[1]) if isinstance(metric, Histogram) else value.get()
            found[of.get(label, "")] = found.get(of.get(label, ""), 0.0) + number
    return {name: number for name, number in found.items() if number}


def exposition(directory: Path, known: Known | None = None) -> bytes:
    """Return what the admin port answers."""
    return b"".join(exposition_parts(directory, known))


def on_count(patch: pytest.MonkeyPatch, metric: Counter | Gauge, told: Callable[..., object]) -> None:
    """Have `told` called with the amount and the labels whenever a metric counts."""
    add = metric.add

    def counting(amount: float, *label_values: str) -> None:
        add(amount, *label_values)
        told(amount, *label_values)

    patch.setattr(metric, "add", counting)
