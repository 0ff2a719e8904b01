"""The long campaign: `make campaign` runs every part with one seed, and `--list` shows the parts and their settings.

A part that passed with a seed is not run again: after a failure, the same command continues with the part that failed.
The seed decides what is done, but not how processes interleave, so a failure comes again usually, not always.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

RECORDS = Path(".campaign")
QUICK = "not clients and not torch and not radosgw and not browser and not deploy and not api"


class Part(NamedTuple):
    """One step of the campaign. `{seed}` and `{record}` (a path) are filled into settings and arguments."""

    name: str
    what: str
    settings: Mapping[str, str]
    arguments: Sequence[str]
    module: str = "pytest"


PARTS = (
    Part(
        "generated",
        "every generated test",
        {"FOREBAY_SIMULATION_HISTORIES": "4"},
        ["-m", QUICK, "--hypothesis-seed={seed}"],
    ),
    Part(
        "harmed",
        "what other nodes send, harmed",
        {"FOREBAY_HARMED_ANSWERS": "10000", "FOREBAY_HARMED_SEED": "{seed}"},
        ["--timeout=3600", "tests/cluster/test_harmed_answers.py"],
    ),
    Part(
        "node-pairs",
        "writes through one of three nodes, read through the others at once; every second round the bucket fails",
        {
            "FOREBAY_CLUSTER_PAIRS": "100000",
            "FOREBAY_CLUSTER_SEED": "{seed}",
            "FOREBAY_CLUSTER_RECORD": "{record}",
        },
        ["-s", "--timeout=36000", "tests/cluster/test_nodes_pairs.py"],
    ),
    Part(
        "redis-failures",
        "Redis stopped, frozen, restarted empty, failed over with lost writes, under load of three nodes",
        {
            "FOREBAY_REDIS_FAILURES": "200",
            "FOREBAY_CLUSTER_SEED": "{seed}",
            "FOREBAY_CLUSTER_RECORD": "{record}",
        },
        ["-s", "tests/cluster/test_nodes_redis_failures.py", "-k", "under_load"],
    ),
    Part(
        "transparency-nodes",
        "the table of requests, each sent to the next of three nodes",
        {"FOREBAY_TRANSPARENCY_NODES": "3"},
        ["--timeout=3600", "tests/scenarios/test_transparency.py", "-k", "strict"],
    ),
    Part(
        "markers",
        "500 histories of three nodes: no marker is visible before what was acknowledged before it",
        {"FOREBAY_MARKERS_GROUPS": "10", "FOREBAY_MARKERS_SEED": "{seed}"},
        ["--timeout=3600", "-m", "slow", "tests/operations/test_markers_over_nodes.py"],
    ),
    Part(
        "growth",
        "running time of the parsers",
        {"FOREBAY_GROWTH_EXAMPLES": "100"},
        ["--timeout=3600", "--hypothesis-seed={seed}", "tests/test_growth.py"],
    ),
    Part(
        "fuzz", "every parser and whole connections", {}, ["--seconds", "14400", "--seed", "{seed}"], "tests.fuzz.run"
    ),
    Part(
        "simulation",
        "1,000,000 steps of the write-back's life",
        {},
        ["--seed", "{seed}", "--steps", "1000000", "--processes", "{processes}", "--record", "{record}"],
        "tests.simulation",
    ),
    Part(
        "listing",
        "random pages of LIST against the origin's own; FOREBAY_LISTING_ORIGIN: memory, strict, moto or a URL",
        {"FOREBAY_LISTING_EXAMPLES": "16000"},
        ["--timeout=7200", "--hypothesis-seed={seed}", "tests/scenarios/test_listing.py"],
    ),
    Part(
        "listing-staleness",
        "pages of LIST beside writes of others",
        {"FOREBAY_LISTING_EXAMPLES": "3000"},
        ["--timeout=3600", "--hypothesis-seed={seed}", "tests/semantics/test_listing_staleness.py"],
    ),
    Part(
        "listing-moto",
        "random pages of LIST against moto's",
        {"FOREBAY_LISTING_EXAMPLES": "1500", "FOREBAY_LISTING_ORIGIN": "moto"},
        ["--timeout=3600", "--hypothesis-seed={seed}", "tests/scenarios/test_listing.py", "-k", "every_page"],
    ),
    Part(
        "staleness",
        "histories of outside and own writes, events and pauses: no read beyond its slot's bound",
        {"FOREBAY_STALENESS_EXAMPLES": "5000"},
        ["--timeout=7200", "--hypothesis-seed={seed}", "tests/semantics/test_staleness_histories.py"],
    ),
    Part(
        "transparency",
        "random histories, told to an origin and to a gateway in front of a like one",
        {"FOREBAY_TRANSPARENCY_HISTORIES": "10000", "FOREBAY_TRANSPARENCY_SEED": "{seed}"},
        ["--timeout=7200", "tests/scenarios/test_transparency_random.py", "-k", "many"],
    ),
    Part(
        "transparency-moto",
        "the whole table of requests with moto as the origin",
        {"FOREBAY_TRANSPARENCY_MOTO_OF": "1"},
        ["tests/scenarios/test_transparency.py", "-k", "moto"],
    ),
    Part(
        "prepared",
        "requests, faults of the origin and changes: prepared, cold and strict reads equal those of all steps",
        {"FOREBAY_PREPARED_STEPS": "500000", "FOREBAY_PREPARED_SEED": "{seed}"},
        ["-s", "--timeout=36000", "tests/edge/test_both_ways.py", "-k", "both_ways"],
    ),
    Part(
        "mutated-heads",
        "changed heads: the prepared path accepts none that the full path refuses, and takes none for another",
        {"FOREBAY_HEAD_MUTATIONS": "10000000", "FOREBAY_HEAD_SEED": "{seed}", "FOREBAY_HEAD_RECORD": "{record}"},
        ["-s", "--timeout=36000", "tests/edge/test_mutated_heads.py"],
    ),
    Part(
        "large-objects",
        "an object of many GiB, read and written in bounded memory",
        {"FOREBAY_LARGE_GIB": "10"},
        ["tests/scenarios/test_large_objects.py"],
    ),
    Part(
        "races",
        "requests that race on few keys, judged by a model",
        {"FOREBAY_STEPS": "50000", "FOREBAY_SEED": "{seed}"},
        ["tests/scenarios/test_races.py"],
    ),
    Part(
        "block-kills",
        "`kill -9` of processes that share a block cache, at any step",
        {"FOREBAY_BLOCK_KILLS": "300"},
        ["tests/blocks/test_processes.py"],
    ),
    Part(
        "kills",
        "`kill -9` of workers, the background process, everybody",
        {"FOREBAY_KILLS": "500", "FOREBAY_KILL_SEED": "{seed}"},
        ["tests/crash/test_kills.py"],
    ),
    Part(
        "stops",
        "any process stopped (SIGSTOP) for ten seconds, a worker for ever: the others answer as before",
        {"FOREBAY_STOPS": "500", "FOREBAY_STOP_SEED": "{seed}"},
        ["-s", "tests/crash/test_stops.py"],
    ),
    Part(
        "resizes",
        "slots that come, change and go under load, with kills: nothing lost, accounts exact against the disk",
        {"FOREBAY_RESIZES": "2000", "FOREBAY_RESIZE_SEED": "{seed}"},
        ["-s", "tests/serve/test_resizing.py"],
    ),
    Part(
        "arrivals",
        "jobs that arrive at random in simulated processes: each gets its share of the link",
        {"FOREBAY_ARRIVALS_EXAMPLES": "1000"},
        ["--timeout=7200", "--hypothesis-seed={seed}", "tests/policy/test_fair_shares.py", "-k", "random_arrivals"],
    ),
    Part(
        "shares",
        "1,000 slots in 64 simulated processes (100 in 6 without the setting)",
        {"FOREBAY_SHARE_SLOTS": "1000"},
        ["--timeout=3600", "tests/policy/test_fair_shares.py", "-k", "many_slots"],
    ),
    Part(
        "harms",
        "files flipped, torn, swapped, removed under a running gateway",
        {"FOREBAY_HARMS": "10000", "FOREBAY_HARM_SEED": "{seed}"},
        ["tests/crash/test_harms.py"],
    ),
    Part(
        "device-damage",
        "bytes that change on the device, memory taken away, outsiders reading first (root)",
        {"FOREBAY_DAMAGES": "20000", "FOREBAY_DAMAGE_SEED": "{seed}"},
        ["-s", "tests/crash/test_device_damage.py"],
    ),
    Part(
        "directory-puts",
        "two gateways with one directory: of conditional PUTs that race, one wins",
        {"FOREBAY_DIRECTORY_PUTS": "10000"},
        ["-m", "slow", "tests/semantics/test_directories.py", "-k", "one_wins"],
    ),
    Part(
        "directory-kills",
        "a writer to a directory, killed at each change: on disk and in memory, with attributes and without",
        {"FOREBAY_DIRECTORY_KILLS": "1"},
        ["tests/origin/stores/test_directory_kills.py"],
    ),
    Part(
        "leavers",
        "clients that leave at any moment, beside others whose every byte is judged (root)",
        {"FOREBAY_LEAVERS": "1000000", "FOREBAY_LEAVER_SEED": "{seed}"},
        ["-s", "tests/crash/test_leavers.py"],
    ),
    Part(
        "buffer-histories",
        "write-back: histories of writes, flushes, restarts, failures and writes of others, judged by a model",
        {"FOREBAY_ABSORB_EXAMPLES": "6000"},
        ["-s", "--timeout=7200", "--hypothesis-seed={seed}", "tests/operations/writeback/test_histories.py"],
    ),
    Part(
        "buffer-kills",
        "`kill -9` of the buffer alone at each call that changes a file or sends something",
        {
            "FOREBAY_BUFFER_KILLS": "500",
            "FOREBAY_BUFFER_KILL_POINTS": "3000",
            "FOREBAY_KILL_SEED": "{seed}",
        },
        ["--timeout=3600", "tests/crash/test_buffer_kills.py"],
    ),
    Part(
        "journal-flips",
        "bits of the journal that flip",
        {"FOREBAY_JOURNAL_FLIPS": "3000", "FOREBAY_JOURNAL_SEED": "{seed}"},
        ["--timeout=3600", "tests/writeback/journal/test_integrity_check.py", "-k", "flipped"],
    ),
    Part(
        "kill-points",
        "`kill -9` of one process or all at each such call of a running gateway; FOREBAY_KILL_ONLY: these points",
        {"FOREBAY_KILL_POINTS": "100000", "FOREBAY_KILL_SEED": "{seed}", "FOREBAY_KILL_RECORD": "{record}"},
        ["tests/crash/test_kill_points.py"],
    ),
    Part(
        "strict-disk",
        "power cuts of a disk that keeps what was synced and nothing else",
        {"FOREBAY_STRICT_CUTS": "10000", "FOREBAY_KILL_SEED": "{seed}"},
        ["--timeout=7200", "tests/crash/test_strict_disk.py"],
    ),
    Part(
        "checkpoint-kills",
        "kills and power cuts of a gateway while checkpoints are saved and the bucket is watched (root)",
        {
            "FOREBAY_CHECKPOINT_KILLS": "100",
            "FOREBAY_CHECKPOINT_POWER_CUTS": "100",
            "FOREBAY_KILL_SEED": "{seed}",
        },
        ["tests/crash/test_checkpoint_kills.py"],
    ),
    Part(
        "gateway-power-cuts",
        "power cuts of an ext4 under a running gateway (root)",
        {"FOREBAY_GATEWAY_POWER_CUTS": "300", "FOREBAY_KILL_SEED": "{seed}"},
        ["tests/crash/test_gateway_power_cuts.py"],
    ),
    Part(
        "buffer-power-cuts",
        "power cuts of an ext4 under the buffer alone (root)",
        {"FOREBAY_POWER_CUTS": "3000", "FOREBAY_KILL_SEED": "{seed}"},
        ["--timeout=7200", "tests/crash/test_buffer_power_cuts.py"],
    ),
)


def main() -> int:
    options = _parsed()
    if options.list:
        print("\n".join(_descriptions()))
        return 0
    seed = options.seed or secrets.randbelow(2**32)
    done = RECORDS / str(seed)
    done.mkdir(parents=True, exist_ok=True)
    print(f"campaign: SEED={seed}, done so far: {' '.join(sorted(os.listdir(done)))}", flush=True)
    for part in PARTS:
        if (done / part.name).exists():
            continue
        filled = {"seed": str(seed), "processes": str(options.processes), "record": f"{done}.{part.name}"}
        if not _passes(part, filled):
            print(f"campaign: {part.name} failed; from here on again: make campaign SEED={seed}", file=sys.stderr)
            return 1
        (done / part.name).touch()
    shutil.rmtree(done)
    for record in RECORDS.glob(f"{seed}.*"):
        record.unlink()
    print("campaign: all parts passed")
    return 0


def _passes(part: Part, filled: Mapping[str, str]) -> bool:
    settings = {name: value.format_map(filled) for name, value in part.settings.items()}
    command = ["-m", part.module, *(one.format_map(filled) for one in part.arguments)]
    print("campaign:", *(f"{name}={value}" for name, value in settings.items()), *command[1:], flush=True)
    return subprocess.run([sys.executable, *command], env={**os.environ, **settings}, check=False).returncode == 0


def _descriptions() -> Iterator[str]:
    for part in PARTS:
        yield f"{part.name}: {part.what}"
        settings = [f"{name}={value}" for name, value in part.settings.items()]
        yield "    " + shlex.join([*settings, "python", "-m", part.module, *part.arguments])


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat the campaign with this seed (else: a new one, printed)")
    parser.add_argument("--processes", type=int, default=2, help="how many processes the simulation takes")
    parser.add_argument("--list", action="store_true", help="print the parts, their settings and commands, and end")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
