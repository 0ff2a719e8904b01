"""Saving checkpoints of a job of eight ranks: how long, what it costs, what a kill -9 loses, what the job loses by it.

    python -m loadtests.checkpoint_save [--rounds 5] [--scale 1] [--record]

A checkpoint is what PyTorch DCP writes: eight files of 256 MiB in parts of 8 MiB, a connection a rank, then
`.metadata`. It goes straight to an origin that takes 125 MB/s over all connections; through Forebay with
`write = "back"`; and, where they are installed, through `rclone serve s3` with `--vfs-cache-mode writes`, which uploads
a second later, and JuiceFS's gateway with `--writeback`, which uploads blocks of 4 MiB in its own format.

*Seconds* are until the manifest is acknowledged, *CPU* that of the server's processes until the origin has everything.
*Lost*: right after the acknowledgement all processes of the server are killed (SIGKILL), it is started again on the
same directory, and what the origin does not have of the checkpoint a time later, ten times the transfer's, is lost. (A
power cut is another matter: Forebay has synced what it acknowledges, the others have not.) *The job*: 8 ranks compute
(sleep), and stop together to save; what the saves take is lost, told per hour of training at that interval, which gives
the link time enough to carry a checkpoint before the next. All on all cores.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from loadtests.harness import command, machine
from loadtests.harness.checkpoints import CheckpointSaver
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import Contender, those_installed, turn
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import Interval, ratio_of
from loadtests.harness.peers import JuiceFS, Rclone
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most
from loadtests.harness.saver import Part, Saver
from loadtests.harness.sink import SinkOrigin
from loadtests.restore_storm import RESTORED

_RANKS = 8
_PARTS = 32
_LINK_BYTES_PER_SECOND = 125e6
_FLUSHED_SECONDS_MAX = 300.0
_SAVES = 3
_COMPUTE_FACTOR = 1.5
"""Between two saves the job computes for so many times what the link needs for a checkpoint."""

_HOUR = 3600.0
_GIB = 1024**3

_OURS, _DIRECT = "forebay", "direct"

_Series = dict[str, list[float]]


class _Bench:
    """Everything that is started, and what was found."""

    def __init__(self, stack: ExitStack, options: Options) -> None:
        self.origin = stack.enter_context(SinkOrigin())
        cores = machine.all_cores()

        def rclone() -> Rclone:
            return Rclone(self.origin, takes_writes=True, write_back="1s", cores=cores)

        peers, self.notes = stack.enter_context(
            those_installed([rclone, lambda: JuiceFS(self.origin, writes_back=True, cores=cores)])
        )
        ours = gateway(self.origin, slot=RESTORED, cache={"persistent": True}, cores=cores)
        self.ours: Gateway = stack.enter_context(ours)
        self.servers: dict[str, Contender] = {_OURS: self.ours, **{peer.name: peer for peer in peers}}
        self.saver = CheckpointSaver(_RANKS, options.of(_PARTS))
        self.direct = CheckpointSaver(_RANKS, options.of(_PARTS), tells_md5=True)
        self.seconds: _Series = defaultdict(list)
        self.durable: _Series = defaultdict(list)
        self.cpu: _Series = defaultdict(list)
        self.lost: dict[str, int] = {}
        self.stalled: _Series = {}
        self._kept_bytes = 0

    @property
    def transfer_seconds(self) -> float:
        """What the link needs for a checkpoint."""
        return self.saver.size_bytes / _LINK_BYTES_PER_SECOND

    def learn(self) -> None:
        """The first write to a bucket goes through."""
        first = Saver(self.ours.address, Part.of(b""))
        first.put("first", b"x")
        first.close()
        self._kept_bytes = 1
        self.origin.pace(_LINK_BYTES_PER_SECOND)

    def names(self) -> list[str]:
        return [_DIRECT, *self.servers]

    def save(self, name: str, prefix: str) -> float:
        """Seconds until it is acknowledged."""
        self._kept_bytes += self.saver.size_bytes
        if name == _DIRECT:
            return self.direct.save(self.origin.address, prefix)
        return self.saver.save(self.servers[name].address, prefix)

    def drain(self) -> None:
        self.origin.until_it_keeps(self._kept_bytes, _FLUSHED_SECONDS_MAX)

    def round(self, number: int) -> None:
        for name in turn(self.names(), number):
            progress(f"round {number + 1}: {name}")
            server = self.servers.get(name)
            before, began = server.cpu_seconds() if server is not None else 0.0, time.perf_counter()
            self.seconds[name].append(self.save(name, f"{name.split()[0]}/step-{number}"))
            self.drain()
            self.durable[name].append(time.perf_counter() - began)
            if server is not None:
                self.cpu[name].append((server.cpu_seconds() - before) / (self.saver.size_bytes / _GIB))

    def kill_after_a_save(self, name: str) -> None:
        """Count the bytes that the origin lacks of a checkpoint whose server was killed once it had acknowledged it."""
        progress(f"{name}: killed right after the acknowledgement")
        server = self.servers[name]
        self._kept_bytes = self.origin.kept_bytes()  # a server may keep something of its own there
        self.save(name, f"{name.split()[0]}/killed")
        if isinstance(server, Gateway):
            server.process.kill()
            server.process.start()
        elif isinstance(server, Rclone | JuiceFS):
            server.kill_and_restart()
        deadline = time.monotonic() + max(10.0, 10 * self.transfer_seconds)
        while (found := self.origin.kept_bytes()) < self._kept_bytes and time.monotonic() < deadline:
            time.sleep(0.1)
        self.lost[name] = max(0, self._kept_bytes - found)

    def train(self, name: str) -> None:
        """A job that saves `_SAVES` times: seconds that each save has cost it, per hour."""
        progress(f"{name}: a job that saves")
        interval_seconds = _COMPUTE_FACTOR * self.transfer_seconds
        lost: list[float] = []
        for number in range(_SAVES):
            time.sleep(interval_seconds)  # the ranks compute
            began = time.perf_counter()
            self.save(name, f"{name.split()[0]}/job-{number}")
            stall_seconds = time.perf_counter() - began
            lost.append(_HOUR * stall_seconds / (interval_seconds + stall_seconds))
        self.stalled[name] = lost
        self.drain()


@contextmanager
def _bench(options: Options) -> Iterator[_Bench]:
    with ExitStack() as stack:
        bench = _Bench(stack, options)
        bench.learn()
        yield bench


def test(options: Options) -> Report:
    with _bench(options) as bench:
        size_gib = bench.saver.size_bytes / _GIB
        title = f"A job of {_RANKS} ranks saves checkpoints of {size_gib:.3g} GiB, bucket at 125 MB/s"
        report = Report("checkpoint_save", title, options.command("checkpoint_save"))
        for number in range(options.rounds):
            bench.round(number)
        for name in bench.names():
            bench.train(name)
        for name in bench.servers:
            bench.kill_after_a_save(name)
        interval_seconds = _COMPUTE_FACTOR * bench.transfer_seconds
    seconds, stalled = bench.seconds, bench.stalled
    report.tables = [
        Measured(f"time lost to saving, a save each {interval_seconds:.3g} s of computing", "s/hour", stalled),
        Measured("a save, until acknowledged", "s", seconds),
        Measured("the origin has it", "s", bench.durable),
        Measured("server CPU until the origin has it", "s/GiB", bench.cpu),
    ]
    report.verdicts = [
        Verdict("save, direct / forebay", ratio_of(seconds[_DIRECT], seconds[_OURS]), at_least(3)),
        Verdict("the job's lost time, direct / forebay", ratio_of(stalled[_DIRECT], stalled[_OURS]), at_least(3)),
        Verdict("the origin has it, forebay / direct", ratio_of(bench.durable[_OURS], bench.durable[_DIRECT])),
        *(
            Verdict(
                f"{name}: bytes of {bench.saver.size_bytes:,} lost by a kill -9 after the acknowledgement",
                Interval(float(lost), None, None),
                at_most(0) if name == _OURS else None,
            )
            for name, lost in bench.lost.items()
        ),
    ]
    report.verdicts += [
        Verdict(f"save, {peer} / forebay", ratio_of(seconds[peer], seconds[_OURS]))
        for peer in (Rclone.name, JuiceFS.name)
        if peer in seconds
    ]
    report.notes = bench.notes
    return report


if __name__ == "__main__":
    command.main(test, __doc__)
