"""Azurite, Microsoft's own emulator of Azure Blob (npm), which keeps all in memory."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.demo.ports import free_port
from tests.support.waiting import eventually

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""What every Azurite has (learn.microsoft.com/azure/storage/common/storage-use-azurite)."""

_PROGRAM = "node_modules/azurite/dist/src/blob/main.js"


@contextmanager
def running_azurite(directory: Path) -> Iterator[str]:
    """Its address. AssertionError where node or Azurite is missing: `make test-azure` installs it."""
    node, folder = shutil.which("node"), Path(os.environ.get("FOREBAY_AZURITE", ".venv/azurite"))
    assert node is not None, "no node: make test-azure"
    assert (folder / _PROGRAM).exists(), f"no {folder / _PROGRAM}: make test-azure"
    port = free_port()
    command = [node, str((folder / _PROGRAM).resolve()), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with (directory / "azurite.log").open("wb") as log:
        process = subprocess.Popen([*command, "--inMemoryPersistence"], cwd=directory, stdout=log, stderr=log)
    try:
        eventually(lambda: _answers(port), seconds=60)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
