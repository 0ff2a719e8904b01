"""Ratios of paired rounds with their 95% interval.

Rounds of one run are interleaved (A, B, A, B, ...), so a pair shares the machine's mood of that moment: the logarithm
of its ratio is averaged over the pairs, with Student's t for the few pairs there are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 0.975 quantile of Student's t for 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean (geometric, but of differences) and its 95% interval; the ends are None where one round gives none."""

    middle: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{number(self.middle)} (one round: no interval)"
        return f"{number(self.middle)} [{number(self.low)}, {number(self.high)}]"


def number(value: float) -> str:
    """Three significant digits, or all digits before the point; no exponent."""
    if not 0.001 <= abs(value) < 100:
        return "0" if value == 0 else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1g}"
    return f"{value:.3g}"


def t_975(freedom: int) -> float:
    """The 0.975 quantile of Student's t; beyond the table by its first-order expansion around the normal quantile."""
    if freedom < 1:
        raise ValueError(f"{freedom} degrees of freedom")
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom)


def mean_of(values: Sequence[float]) -> Interval:
    """The geometric mean of positive values."""
    logs = [math.log(value) for value in values]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return Interval(math.exp(middle), None, None)
    half = t_975(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The ratio of two interleaved series, round by round. Raises ValueError when they are of different lengths."""
    return mean_of([mine / other for mine, other in zip(ours, theirs, strict=True)])


def difference_of(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The arithmetic mean of the differences of two interleaved series. Raises as `ratio_of`."""
    differences = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    middle = statistics.fmean(differences)
    if len(differences) < 2:
        return Interval(middle, None, None)
    half = t_975(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return Interval(middle, middle - half, middle + half)


def lowest(series: Mapping[str, Sequence[float]]) -> str:
    """The name whose geometric mean is the lowest: the best peer where less is better."""
    return min(series, key=lambda name: mean_of(series[name]).middle)


def highest(series: Mapping[str, Sequence[float]]) -> str:
    """The name whose geometric mean is the highest."""
    return max(series, key=lambda name: mean_of(series[name]).middle)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    if not values or not 0 < share <= 1:
        raise ValueError("needs values, and a share above 0 and at most 1")
    return sorted(values)[math.ceil(share * len(values)) - 1]
