"""The systemd unit is one that systemd accepts, is confined, and its times are those of the gateway."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.config.settings import Settings
from gateway.config.units import parse_duration_seconds
from tests.test_deploy import DEPLOY

SYSTEMD = DEPLOY / "systemd"
TARGETS = ("sysinit", "basic", "shutdown", "multi-user", "network-online")
_BEYOND_GRACE_SECONDS = 15.0
"""What the supervisor takes at most behind server.shutdown_grace: for its workers, then for the background process."""


def settings_of(path: Path) -> dict[str, list[str]]:
    """Every value of a key, in order."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def verified(root: Path, more: str = "") -> str:
    """What `systemd-analyze verify` has to say of the unit and its drop-in, installed below `root`."""
    units = root / "etc" / "systemd" / "system"
    (units / "forebay.service.d").mkdir(parents=True)
    text = (SYSTEMD / "forebay.service").read_text(encoding="utf-8")
    (units / "forebay.service").write_text(text + more, encoding="utf-8")
    shutil.copy(SYSTEMD / "forebay-drain.conf", units / "forebay.service.d" / "drain.conf")
    for target in TARGETS:
        (units / f"{target}.target").write_text("[Unit]\nDescription=stands for systemd's own\n", encoding="utf-8")
    for program in ("opt/forebay/bin/forebay", "bin/kill"):
        (root / program).parent.mkdir(parents=True)
        (root / program).touch(0o755)
    done = subprocess.run(
        ["systemd-analyze", "verify", f"--root={root}", "forebay.service"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.deploy
def test_systemd_accepts_the_unit_and_the_drop_in(tmp_path: Path) -> None:
    """No key that it does not know, no program that is missing, no value that it cannot read."""
    assert verified(tmp_path) == ""


@pytest.mark.deploy
def test_systemd_would_find_something(tmp_path: Path) -> None:
    """A misspelt key is named: the test above can fail."""
    assert "WantedBi" in verified(tmp_path, "WantedBi=multi-user.target\n")


def test_a_stop_is_given_the_time_that_it_takes() -> None:
    """systemd kills no gateway that still answers requests, and with the drop-in none that still flushes."""
    unit, drain = settings_of(SYSTEMD / "forebay.service"), settings_of(SYSTEMD / "forebay-drain.conf")
    stop_seconds = Settings().server.shutdown_grace_seconds + _BEYOND_GRACE_SECONDS
    assert parse_duration_seconds(unit["TimeoutStopSec"][0]) > stop_seconds
    command = shlex.split(drain["ExecStop"][0].removeprefix("-"))
    assert command[:-1] == ["/opt/forebay/bin/forebay", "flush", "s3://", "--wait", "--timeout"]
    drain_seconds = parse_duration_seconds(command[-1])
    assert parse_duration_seconds(drain["TimeoutStopSec"][0].replace("min", "m")) > drain_seconds + stop_seconds


def test_the_unit_and_its_files_agree() -> None:
    """User, settings and directories are the same in the unit, sysusers.d and tmpfiles.d."""
    unit = settings_of(SYSTEMD / "forebay.service")
    assert unit["Type"] == ["notify"]
    assert unit["KillMode"] == ["mixed"]  # else systemd ends the workers before the supervisor has them drain
    assert unit["ExecStart"] == ["/opt/forebay/bin/forebay serve"]
    assert unit["Environment"] == ["FOREBAY_CONFIG=/etc/forebay/forebay.toml"]
    users = (SYSTEMD / "forebay.sysusers").read_text(encoding="utf-8").splitlines()
    assert f"u {unit['User'][0]} " in users[-1]
    rows = [line.split() for line in (SYSTEMD / "forebay.tmpfiles").read_text(encoding="utf-8").splitlines()]
    directories = {row[1]: row[2:5] for row in rows if row[0] == "d"}
    assert directories["/var/lib/forebay"] == [unit["StateDirectoryMode"][0], unit["User"][0], unit["Group"][0]]
    assert directories["/etc/forebay"] == ["0750", "root", unit["Group"][0]]


def test_the_service_cannot_do_what_it_does_not_need() -> None:
    """No capability, no new privilege, no writing but below /var/lib/forebay, no system call of administrators."""
    unit = settings_of(SYSTEMD / "forebay.service")
    assert unit["CapabilityBoundingSet"] == [""]
    assert unit["NoNewPrivileges"] == ["yes"]
    assert unit["ProtectSystem"] == ["strict"]
    assert unit["SystemCallFilter"] == ["@system-service", "~@privileged"]
    assert "ReadWritePaths" not in unit
    assert "ProcSubset" not in unit  # the gateway reads /proc/sys/kernel/random/boot_id
