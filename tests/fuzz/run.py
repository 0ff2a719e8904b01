"""Coverage-guided fuzzing with atheris: `python -m tests.fuzz.run --seconds 300`, or one `--target` of it.

Each target has a process of its own, which ends at the first defect and keeps the input. What is found goes to
`corpus/` once it is mended, so that `make test` sends it for ever.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

INPUT_BYTES_MAX = 4096
MEMORY_MIB_MAX = 1024
ONE_INPUT_SECONDS_MAX = 30
_RUNS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", help="a name of tests/fuzz/targets.py; all where none is given")
    parser.add_argument("--seconds", type=float, default=120, help="for all targets together")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="printed; 0 is random")
    parser.add_argument("--found", type=Path, default=Path(".fuzz"), help="where inputs are kept from run to run")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        _fuzz(options.target[0], options.found, options.seconds, options.seed)
        return 0
    return _all(options.target, options.seconds, options.seed, options.found)


def _all(names: Sequence[str] | None, seconds: float, seed: int, found: Path) -> int:
    from tests.fuzz.targets import NAMES

    try:
        import atheris  # noqa: F401
    except ImportError:
        sys.stderr.write("fuzzing needs atheris, of the extra `dev`; there is none for this Python\n")
        return 1
    names = names or NAMES
    sys.stdout.write(f"fuzzing {len(names)} targets for {seconds:g} seconds; again: --seed {seed}\n")
    executions, failed = 0, []
    for name in names:
        done = _one(name, seconds / len(names), seed, found)
        runs = _RUNS.search(done.stderr)
        count = int(runs[1]) if runs is not None else 0
        executions += count
        sys.stdout.write(f"{name:32} {count:>10,} executions  {'ok' if done.returncode == 0 else 'FAILED'}\n")
        sys.stdout.flush()
        if done.returncode:
            failed.append(name)
            sys.stderr.write(done.stderr[-4000:])
    sys.stdout.write(json.dumps({"executions": executions, "failed": failed, "seed": seed}) + "\n")
    return 1 if failed else 0


def _one(name: str, seconds: float, seed: int, found: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz.run", "--inside", "--target", name]
    command += ["--seconds", str(seconds), "--seed", str(seed), "--found", str(found)]
    begun = time.monotonic()
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False)
    assert time.monotonic() - begun > 0
    return done


def _fuzz(name: str, found: Path, seconds: float, seed: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["gateway"]):
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
