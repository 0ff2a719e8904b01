"""The demo runs from end to end, says so when something fails, and leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_LIMIT_SECONDS = 250

# The same job as `forebay demo`, with less of everything.
_SMALL = """
import sys
from gateway.demo import main
from gateway.demo.dataset import Workload
sizes = dict(image_bytes=20_000, shard_count=4, images_per_shard=30, file_count=12, checkpoint_bytes=11_000_000)
workload = Workload(**sizes, first_byte_seconds=0.005)
sys.exit(main(json="--json" in sys.argv, workload=workload, nodes=2 if "--nodes" in sys.argv else 1))
"""


@dataclass(frozen=True, slots=True)
class Run:
    """A demo in a process of its own; everything that it starts inherits its mark and its directory."""

    process: subprocess.Popen[str]
    directory: Path
    mark: str

    def finish(self) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        output, errors = self.process.communicate(timeout=_LIMIT_SECONDS)
        return self.process.returncode, output, errors

    def wait_for_line(self, pattern: str) -> None:
        """Read standard error until a line matches."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if re.search(pattern, line):
                return
        raise AssertionError(f"no line matches {pattern!r}")

    def left_behind(self) -> list[str]:
        """Command lines of processes with the mark, and paths in the directory."""
        processes = [_command(entry) for entry in Path("/proc").iterdir() if self._is_marked(entry)]
        return processes + [str(path) for path in self.directory.iterdir()]

    def _is_marked(self, entry: Path) -> bool:
        try:
            return self.mark.encode() in (entry / "environ").read_bytes()
        except OSError:
            return False


def _command(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return "(gone)"


@contextmanager
def _demo(directory: Path, *arguments: str, **environment: str) -> Iterator[Run]:
    mark = f"DEMO_TEST_MARK={uuid.uuid4().hex}"
    directory.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", _SMALL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(directory)} | environment | dict([mark.split("=")]),
    )
    try:
        yield Run(process, directory, mark)
    finally:
        process.kill()
        process.communicate()


def test_the_whole_job_on_small_data(tmp_path: Path) -> None:
    """Every step is named, every reread came from cache, nothing is left; --json prints one document with each round's
    seconds, and nothing else. A user's own AWS settings have no say.
    """
    misleading = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_PROFILE": "none-such", "FOREBAY_SERVER__PORT": "1"}
    with _demo(tmp_path / "demo", "--json", **misleading) as run:
        code, output, errors = run.finish()
        assert code == 0, errors
        assert run.left_behind() == []
    for step in ("upload 4 shards", "read 12 files, Forebay, round 3", "restore a checkpoint, Forebay, round 3"):
        assert step in errors
    results = {one["what"]: one for one in json.loads(output)["results"]}
    assert set(results) >= {"list 16 objects", "read 4 shards", "read 12 files", "save a checkpoint", "restore it"}
    assert results["read 4 shards"]["hit_ratio"] == 1.0
    for one in results.values():
        assert len(one["direct_seconds"]) == len(one["forebay_seconds"]) == 3
        assert all(seconds > 0 for seconds in one["direct_seconds"] + one["forebay_seconds"])


def test_12_1_the_bucket_sends_a_data_set_to_a_cluster_once(tmp_path: Path) -> None:
    """And to each of the same nodes, if they are alone. Nothing is left.

    On a busy machine a node that answers late is passed over; `tests/cluster` holds the exact count.
    """
    with _demo(tmp_path / "demo", "--json", "--nodes") as run:
        code, output, errors = run.finish()
        assert code == 0, errors
        assert run.left_behind() == []
    report = json.loads(output)
    assert [one["what"] for one in report["epochs"]] == [
        f"{name}, epoch {number}" for name in ("alone", "cluster") for number in (1, 2)
    ]
    sent = [one["bucket_bytes"] / report["bytes"] for one in report["epochs"]]
    assert sent[:2] == pytest.approx([2, 0], abs=0.02)
    assert 1 <= sent[2] < 2
    assert sent[3] < 1


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGINT, "forebay demo:"),
        (signal.SIGTERM, "upload 4 shards"),
        (signal.SIGHUP, "save a checkpoint, the bucket, round 1"),
    ],
)
def test_a_signal_ends_it_and_leaves_nothing(number: signal.Signals, line: str, tmp_path: Path) -> None:
    """Ctrl-C, SIGTERM and a closed terminal, at the start and in the middle: 128 + n, no process, no file."""
    with _demo(tmp_path / "demo") as run:
        run.wait_for_line(line)
        run.process.send_signal(number)
        code, output, errors = run.finish()
        assert (code, output) == (128 + number, "")
        assert "interrupted" in errors
        assert run.left_behind() == []


def test_children_end_with_a_demo_that_is_killed(tmp_path: Path) -> None:
    """kill -9 leaves no process either, only its temporary directory."""
    with _demo(tmp_path / "demo") as run:
        run.wait_for_line("upload 4 shards")
        run.process.kill()
        run.process.wait()
        deadline = time.monotonic() + _LIMIT_SECONDS
        while processes := [one for one in run.left_behind() if not one.startswith(str(run.directory))]:
            assert time.monotonic() < deadline, processes


def test_a_failure_is_explained_with_the_log(tmp_path: Path) -> None:
    """When Forebay cannot start the exit code is 1, and the reason is on standard error with the end of its log."""
    program = _SMALL.replace("import sys\n", "import sys\nimport gateway.demo.stack as stack\n", 1).replace(
        "sizes =", 'stack.REGION = "not a region"\nsizes =', 1
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        check=False,
    )
    assert result.returncode == 1
    assert "origin.region" in result.stderr
    assert "forebay demo failed: forebay ended with code" in result.stderr
    assert list(tmp_path.iterdir()) == []
