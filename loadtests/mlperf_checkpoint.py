"""MLPerf Storage's checkpointing workload, Llama 3 8B on one node: eight processes write it ten times, then read it.

    python -m loadtests.mlperf_checkpoint [--rounds 10] [--scale 1] [--record]

Followed (Rules.md of MLPerf Storage, chapter 4; the "subset" form): eight ranks, 1x1x8 with ZeRO 3, so that each has an
eighth of 104.7 GiB; all writes come first, a checkpoint after another, then all reads; each write is acknowledged only
when it is synced (rule 4.3.2), which `write = "back"` does for every part; between the two phases what lies in the page
cache is dropped (4.3.1; this takes root); what is reported is the mean over the checkpoints, of the slowest rank.
`--rounds` is the number of checkpoints; the rules want ten.

Not followed: this is not `mlpstorage` and DLIO, but the same traffic by the harness's own writers and readers, so no
result here is an MLPerf result. **`--scale 1` is 1/100 of the size, 1.05 GiB**; 100 is the real one, for a node with
room for ten times 105 GiB. A rank's state is one object in parts of 8 MiB, where DLIO writes one file for model and one
for optimizer. What is written is the same part again and again, and what is read is thrown away. Meanwhile the bucket
gets 125 MB/s in the background, so the reads find some of it flushed and some not yet.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

from loadtests.harness import command, fio, machine, tools
from loadtests.harness.checkpoints import PART_BYTES, CheckpointSaver, keys_of
from loadtests.harness.command import Options, progress
from loadtests.harness.content import BUCKET
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import Interval, mean_of
from loadtests.harness.ranks import ranks
from loadtests.harness.report import Measured, Report, Verdict
from loadtests.harness.saver import Part, Saver
from loadtests.harness.sink import SinkOrigin
from loadtests.restore_storm import RESTORED

_RANKS = 8
_CHECKPOINT_BYTES = 104.7 * 1024**3
_SMALLER = 100
_LINK_BYTES_PER_SECOND = 125e6
_GIB = 1024**3


def test(options: Options) -> Report:
    parts = max(1, round(_CHECKPOINT_BYTES * options.scale / _SMALLER / _RANKS / PART_BYTES))
    saver = CheckpointSaver(_RANKS, parts)
    size_gib = saver.size_bytes / _GIB
    title = f"MLPerf Storage checkpointing, 8B on one node, {size_gib:.3g} GiB of 104.7, {options.rounds} checkpoints"
    report = Report("mlperf_checkpoint", title, options.command("mlperf_checkpoint"))
    with ExitStack() as stack:
        origin = stack.enter_context(SinkOrigin())
        cores = machine.all_cores()
        room = f"{round(size_gib * (options.rounds + 2)) + 2}GiB"
        slot = RESTORED | {"buffer": room}
        of = gateway(origin, slot=slot, cache={"persistent": True}, capacity=room, cores=cores)
        ours: Gateway = stack.enter_context(of)
        os.sched_setaffinity(0, cores)
        readers = stack.enter_context(ranks(_RANKS, ours.address))
        _learn(ours, origin)
        began = time.perf_counter()
        writes = []
        for number in range(options.rounds):
            progress(f"checkpoint {number + 1}: written")
            writes.append(saver.save(ours.address, _prefix(number)))
        ours.forget_pages()
        reads = []
        for number in range(options.rounds):
            progress(f"checkpoint {number + 1}: read")
            paths = [[f"/{BUCKET}/{key}"] for key in keys_of(_prefix(number), _RANKS)]
            reads.append(readers.restore(paths).last_seconds)
        total_seconds = time.perf_counter() - began
        bare = _bare(ours, saver.size_bytes, report)
    written = [size_gib / seconds for seconds in writes]
    read = [size_gib / seconds for seconds in reads]
    report.tables = [
        Measured("checkpoints", "GiB/s", {"write": written, "read": read, **bare}),
        Measured("checkpoints", "s", {"write": writes, "read": reads}),
    ]
    report.verdicts = [
        Verdict("write, GiB/s", mean_of(written)),
        Verdict("read, GiB/s", mean_of(read)),
        Verdict("first write to last read, s", Interval(total_seconds, None, None)),
    ]
    report.notes.append("Not an MLPerf result: the workload is followed, the tool and the size are not.")
    return report


def _prefix(number: int) -> str:
    return f"llama3-8b/step-{number}"


def _learn(ours: Gateway, origin: SinkOrigin) -> None:
    """The first write to a bucket goes through."""
    first = Saver(ours.address, Part.of(b""))
    first.put("first", b"x")
    first.close()
    origin.pace(_LINK_BYTES_PER_SECOND)


def _bare(ours: Gateway, size_bytes: int, report: Report) -> dict[str, list[float]]:
    """What fio reads of as much on the same disk."""
    if absent := tools.missing("fio"):
        report.notes += absent
        return {}
    files = [ours.process.directory.parent / f"fio-{rank}.data" for rank in range(_RANKS)]
    for file in files:
        with file.open("wb") as written:
            for _ in range(size_bytes // _RANKS // PART_BYTES):
                written.write(os.urandom(PART_BYTES))
            os.fsync(written.fileno())
    return {"fio, direct read": [fio.sequential_read_bytes_per_second(*files) / _GIB]}


if __name__ == "__main__":
    command.main(test, __doc__)
