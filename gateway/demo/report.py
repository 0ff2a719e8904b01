"""The demo's last word: what was measured, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.table import Table

from gateway.demo.clients import hit_ratio
from gateway.demo.epochs import Reading
from gateway.demo.workload import Workload


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same work twice straight to the bucket and twice through Forebay.

    `rereads` says that the second round reads what the first one read, so that it can come from cache.
    """

    what: str
    direct: Sequence[Reading]
    forebay: Sequence[Reading]
    rereads: bool

    @property
    def direct_seconds(self) -> float:
        """The mean of both rounds: nothing differs between them."""
        return fmean(reading.seconds for reading in self.direct)

    @property
    def speedup(self) -> float:
        """How many times faster the second round through Forebay is than going straight to the bucket."""
        return self.direct_seconds / self.forebay[-1].seconds

    @property
    def second_hit_ratio(self) -> float:
        return hit_ratio(self.forebay[-1].cache)

    def as_dict(self) -> dict[str, object]:
        return {
            "what": self.what,
            "bytes": self.direct[-1].size_bytes,
            "direct_seconds": [reading.seconds for reading in self.direct],
            "forebay_seconds": [reading.seconds for reading in self.forebay],
            "speedup": self.speedup,
            "cache": [dict(reading.cache) for reading in self.forebay],
            "second_hit_ratio": self.second_hit_ratio if self.rereads else None,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the demo measured."""

    workload: Workload
    comparisons: Sequence[Comparison]

    def not_from_cache(self) -> list[Comparison]:
        """Second reads that were not answered from this node's disk throughout: there must be none."""
        return [one for one in self.comparisons if one.rereads and one.second_hit_ratio < 1.0]

    def as_dict(self) -> dict[str, object]:
        return {
            "first_byte_seconds": self.workload.first_byte_seconds,
            "connection_bytes_per_second": self.workload.connection_bytes_per_second,
            "readers": self.workload.readers,
            "results": [one.as_dict() for one in self.comparisons],
        }

    def table(self) -> Table:
        """Times and rates; `faster` compares the second round through Forebay with the direct one."""
        table = Table(title="The same job, straight to the bucket and through Forebay", caption=self._caption())
        table.add_column("")
        for heading in ("direct", "Forebay, 1st", "Forebay, 2nd", "faster", "from cache"):
            table.add_column(heading, justify="right")
        for one in self.comparisons:
            table.add_row(*_row(one))
        return table

    def _caption(self) -> str:
        return (
            f"The bucket answers after {self.workload.first_byte_seconds * 1000:.0f} ms and gives "
            f"{self.workload.connection_bytes_per_second / 1e6:.0f} MB/s per connection; "
            f"{self.workload.readers} readers. Every byte was verified.\n"
            "Through Forebay, each GET first asks the bucket for the object's current ETag; saves are written back.\n"
            "faster = direct ÷ Forebay, 2nd"
        )


def _row(one: Comparison) -> tuple[str, ...]:
    first, second = one.forebay
    size = one.direct[-1].size_bytes
    return (
        one.what,
        _cell(one.direct_seconds, size),
        _cell(first.seconds, size),
        _cell(second.seconds, size),
        f"{one.speedup:.1f} x",
        f"{one.second_hit_ratio:.0%}" if one.rereads else "",
    )


def _cell(seconds: float, size_bytes: int) -> str:
    if not size_bytes:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s, {size_bytes / seconds / 1e6:.0f} MB/s"


def next_steps(command: str) -> str:
    """What a person tries after the demo. `command` is how `forebay` was called."""
    return f"""\
Next:
  1. Start Forebay in front of your own bucket (it takes credentials and region from your AWS settings):
       {command} serve
  2. In the shell of a job, with the same credentials:
       export AWS_ENDPOINT_URL_S3=http://127.0.0.1:9000
  3. Read something twice, and look at what happened:
       aws s3 cp s3://YOUR-BUCKET/SOME-OBJECT - | wc -c
       curl -s http://127.0.0.1:9001/metrics | grep forebay_
README.md says how to point each client at it, and what Forebay promises."""
