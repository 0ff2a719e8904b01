"""Titles of the gateway's processes in `ps` and `top`, such as `forebay: supervisor` and `forebay: worker 0`."""

from __future__ import annotations

import os


def set_process_title(name: str) -> None:
    """Show this process as `forebay: NAME`; `worker0` is shown as `worker 0`.

    The title takes the place of the command line. /proc/PID/environ stays as it is: setproctitle would otherwise use
    its room, too, and a process could not be found by its environment any more.
    """
    os.environ["SPT_NOENV"] = "1"
    try:
        from setproctitle import setproctitle  # looks at the variable when it is loaded

        setproctitle(f"forebay: {name.replace('worker', 'worker ')}")
    finally:
        del os.environ["SPT_NOENV"]
