"""Coverage-guided fuzzing with atheris: `python -m tests.fuzz.run --seconds 300`, or one `--target` of it.

What is fuzzed is instrumented and imported once. Each target then has a forked process of its own, one for each core
at a time. It ends at the first defect and keeps the input. What is found goes to `corpus/` once it is mended, so that
`make test` sends it for ever.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

INPUT_BYTES_MAX = 4096
MEMORY_MIB_MAX = 1024
ONE_INPUT_SECONDS_MAX = 30
_RUNS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", help="a name of tests/fuzz/targets.py; all where none is given")
    parser.add_argument("--seconds", type=float, default=120, help="for all targets together")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="printed; 0 is random")
    parser.add_argument("--found", type=Path, default=Path(".fuzz"), help="where inputs are kept from run to run")
    options = parser.parse_args()
    return _all(options.target, options.seconds, options.seed, options.found)


def _all(names: Sequence[str] | None, seconds: float, seed: int, found: Path) -> int:
    try:
        import atheris
    except ImportError:
        sys.stderr.write("fuzzing needs atheris, of the extra `dev`; there is none for this Python\n")
        return 1
    with atheris.instrument_imports(include=["gateway"]):
        from tests.fuzz import targets
    names = list(names or targets.NAMES)
    at_a_time = min(len(names), os.cpu_count() or 1)
    sys.stdout.write(f"fuzzing {len(names)} targets for {seconds:g} seconds; again: --seed {seed}\n")
    executions, failed = 0, []
    running: dict[int, tuple[str, Path]] = {}
    with tempfile.TemporaryDirectory() as reports:
        waiting = list(enumerate(names))
        while waiting or running:
            while waiting and len(running) < at_a_time:
                number, name = waiting.pop(0)
                report = Path(reports) / str(number)
                running[_forked(name, seconds * at_a_time / len(names), seed, found, report)] = (name, report)
            process, status = os.wait()
            name, report = running.pop(process)
            said = report.read_text(errors="replace")
            runs = _RUNS.search(said)
            count = int(runs[1]) if runs is not None else 0
            executions += count
            ended_well = status == 0 and count > 0
            sys.stdout.write(f"{name:32} {count:>10,} executions  {'ok' if ended_well else 'FAILED'}\n")
            sys.stdout.flush()
            if not ended_well:
                failed.append(name)
                sys.stderr.write(said[-4000:])
    sys.stdout.write(json.dumps({"executions": executions, "failed": sorted(failed), "seed": seed}) + "\n")
    return 1 if failed else 0


def _forked(name: str, seconds: float, seed: int, found: Path, report: Path) -> int:
    """The process that fuzzes this target; what it says goes to `report`."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    try:
        descriptor = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        tempfile.tempdir = str(report.parent)  # the fuzzer ends the process: whoever waits for it clears away
        _fuzz(name, found, seconds, seed)
    except SystemExit:
        sys.stderr.flush()
        ctypes.CDLL(None).exit(1)  # the way out on which the fuzzer keeps the input that it found
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)  # the fuzzer itself ends the process where nothing was found


def _fuzz(name: str, found: Path, seconds: float, seed: int) -> None:
    import atheris

    from tests.fuzz import targets

    kept = found / targets.directory_name(name)
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as beginnings, targets.target(name) as check:
        for number, seed_input in enumerate(targets.seeds(name)):
            (Path(beginnings) / str(number)).write_bytes(seed_input)
        flags = [
            f"-max_total_time={max(1, int(seconds))}",
            f"-seed={seed}",
            f"-max_len={INPUT_BYTES_MAX}",
            f"-rss_limit_mb={MEMORY_MIB_MAX}",
            f"-timeout={ONE_INPUT_SECONDS_MAX}",
            f"-artifact_prefix={found}/failed-{targets.directory_name(name)}-",
            "-print_final_stats=1",
            "-verbosity=1",
        ]
        atheris.Setup([sys.argv[0], *flags, str(kept), beginnings], check, enable_python_coverage=True)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
