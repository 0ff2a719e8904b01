"""`python -m tools.incident_drill`: twelve incidents on real gateways, and whether what these say leads to the cause.

Exit code 1 where a sentence is missing that leads to a cause, where an acknowledged byte is, or where an incident did
not end. The disk that fills up is a file system in memory: root mounts it, and everybody else within a user namespace,
in which the whole drill then runs (`unshare`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tools.incident_drill.alerting import Alerting, prometheus
from tools.incident_drill.incidents import INCIDENTS, Incident, small_disk
from tools.incident_drill.scene import Account, Missed, staged
from tools.incident_drill.transcript import missing_clues, page, transcript

_NO_PROMETHEUS = "There was no Prometheus on this machine (Debian: `apt-get install prometheus`): no alert is shown."
_NO_MOUNTS = "Nothing can be mounted on this machine (neither root nor user namespaces): the disk was not filled."


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.incident_drill", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("--only", action="append", choices=[one.name for one in INCIDENTS], help="this one; repeatable")
    parser.add_argument("--at-once", type=int, default=4, metavar="NUMBER", help="so many side by side (4)")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the transcript there, and not to the terminal"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was said there")
    parser.add_argument("--may-mount", choices=["yes", "no"], help=argparse.SUPPRESS)
    parser.add_argument("--page", action="store_true", help="print docs/incident-drill.md, without a drill")
    options = parser.parse_args(arguments)
    if options.page:
        sys.stdout.write(page(INCIDENTS))
        return 0
    if options.may_mount is None:
        return _in_own_mounts(arguments)
    may_mount = options.may_mount == "yes"
    wanted = [one for one in INCIDENTS if options.only is None or one.name in options.only]
    played = [one for one in wanted if may_mount or not one.needs_mount]
    notes = [_NO_MOUNTS] if len(played) < len(wanted) else []
    began = time.monotonic()
    with ExitStack() as undo:
        directory = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="forebay-drill-")))
        alerting = undo.enter_context(prometheus(directory / "prometheus"))
        accounts = _played(played, directory, alerting, options.at_once)
    if alerting is None:
        notes.append(_NO_PROMETHEUS)
    text = transcript(played, accounts, notes)
    if options.write is not None:
        options.write.parent.mkdir(exist_ok=True)
        options.write.write_text(text, encoding="utf-8")
    elif options.json is None:
        sys.stdout.write(text)
    if options.json is not None:
        document = {"alerts": alerting is not None, "incidents": [one.as_dict() for one in accounts], "notes": notes}
        options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    is_well = _told(played, accounts, notes, with_alerts=alerting is not None)
    sys.stderr.write(f"{time.monotonic() - began:.0f} seconds\n")
    return 0 if is_well else 1


def _in_own_mounts(arguments: Sequence[str]) -> int:
    """Once more, where what is mounted goes with the process; without mounts where that cannot be."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    again = [sys.executable, "-m", "tools.incident_drill", *arguments, "--may-mount"]
    with tempfile.TemporaryDirectory() as name:
        trial = ["mount", "-t", "tmpfs", "-o", "size=65536", "tmpfs", name]
        may_mount = (
            shutil.which("unshare") is not None
            and subprocess.run([*unshare, "--", *trial], capture_output=True, check=False).returncode == 0
        )
    command = [*unshare, "--", *again, "yes"] if may_mount else [*again, "no"]
    return subprocess.run(command, check=False).returncode


def _played(incidents: Sequence[Incident], directory: Path, alerting: Alerting | None, at_once: int) -> list[Account]:
    with ThreadPoolExecutor(at_once) as threads:
        try:
            return list(threads.map(lambda one: _play(one, directory / one.name, alerting), incidents))
        except KeyboardInterrupt:
            threads.shutdown(cancel_futures=True)  # those that have begun end in good order
            raise


def _play(incident: Incident, directory: Path, alerting: Alerting | None) -> Account:
    account, began = Account(incident.name), time.monotonic()
    with ExitStack() as undo:
        if incident.needs_mount:
            undo.enter_context(small_disk(directory))
        else:
            directory.mkdir()
        try:
            with staged(account, directory, incident.stage(directory), alerting) as scene:
                incident.play(scene)
        except (Missed, AssertionError) as error:
            account.failed = str(error)
    account.seconds = time.monotonic() - began
    sys.stderr.write(f"{incident.name}: {account.seconds:.0f} seconds\n")
    return account


def _told(
    incidents: Sequence[Incident], accounts: Sequence[Account], notes: Sequence[str], *, with_alerts: bool
) -> bool:
    """What is wrong, on standard error; whether nothing is."""
    wrong = []
    for incident, account in zip(incidents, accounts, strict=True):
        missing = missing_clues(incident, account, with_alerts=with_alerts)
        wrong += [f"{incident.name}: {clue.where} does not say {clue.says!r}" for clue in missing]
        wrong += [f"{incident.name}: lost: {one}" for one in account.lost]
        if account.failed is not None:
            wrong.append(f"{incident.name}: {account.failed}")
    for line in (*notes, *wrong):
        sys.stderr.write(f"{line}\n")
    return not wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
