"""Builds the library, where there is a C compiler: `python -m gateway.md5_lanes.build` puts it where it is looked for.

Needs nothing but Python and the compiler, no headers of Python either: the installation calls it (hatch_build.py).
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("md5_lanes.c")
LIBRARY = Path(__file__).with_name("md5_lanes.lib")
"""Not `.so`: Python would take that for a module."""

_SECONDS_MAX = 60.0
_FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")


def build(library: Path) -> str | None:
    """Make the library, and None; or why there is none, and no file."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        return f"{platform.machine()} on {sys.platform} has no lanes for it"
    unfinished = library.with_name(f"{library.name}.{os.getpid()}")
    command = [*shlex.split(os.environ.get("CC", "cc")), *_FLAGS, str(SOURCE), "-o", str(unfinished)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS_MAX)  # noqa: S603 - the user's own CC
        unfinished.replace(library)  # a process may have the former one mapped
    except (OSError, subprocess.SubprocessError) as error:
        unfinished.unlink(missing_ok=True)
        return f"{shlex.join(command[:1])}: {error}"
    return None


if __name__ == "__main__":
    sys.exit(build(LIBRARY))
