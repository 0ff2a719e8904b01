from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from loadtests.harness import machine
from loadtests.harness.content import Family, load_object
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.peers import JuiceFS
from loadtests.harness.stream import stream_seconds

pytestmark = pytest.mark.clients

OBJECTS = Family("small/", 3, 5_000_000)


def test_juicefs_reads_what_was_written_through_it_and_leaves_nothing() -> None:
    """Warm from its disk; cold again from the origin once told to forget; at the end no process and no file is left."""
    with LoadOrigin([]) as origin, JuiceFS(origin) as juicefs:
        juicefs.take(OBJECTS)
        _read(juicefs)
        before = origin.settled_counts().sent_bytes
        _read(juicefs)
        assert origin.settled_counts().sent_bytes == before
        juicefs.forget()
        _read(juicefs)
        assert origin.settled_counts().sent_bytes >= before + OBJECTS.count * OBJECTS.size_bytes
        assert juicefs.cpu_seconds() > 0
        assert juicefs._process is not None
        root, directory = juicefs._process.pid, juicefs.directory
        pids = machine.tree(root)
    assert not directory.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(juicefs.address)


def _read(juicefs: JuiceFS) -> None:
    for path in OBJECTS.paths():
        assert stream_seconds(juicefs.address, load_object(path, OBJECTS.size_bytes)) > 0


def test_juicefs_acknowledges_before_the_origin_has_it() -> None:
    """With write-back a write returns at a stopped link, and arrives later."""
    with LoadOrigin([]) as origin, JuiceFS(origin, writes_back=True) as juicefs:
        origin.shape(latency_seconds=5)
        began = time.monotonic()
        juicefs.take(Family("one/", 1, 1000))
        assert time.monotonic() - began < 5
