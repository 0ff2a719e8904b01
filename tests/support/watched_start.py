"""`python -m gateway` that writes to the file `VISITED` which files below `gateway/` its first process has run."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

import tests.support.prepared_gateway  # noqa: F401 - what is only loaded is not run
from gateway.cli.commands import main as forebay
from tests.support.visited_files import Watch


def main() -> None:
    watch, supervisor = Watch(), os.getpid()
    with watch.visits() as found:
        atexit.register(
            lambda: os.getpid() == supervisor and Path(os.environ["VISITED"]).write_text("\n".join(found.files))
        )
        forebay()


if __name__ == "__main__":
    main()
