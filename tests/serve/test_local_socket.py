"""The local socket of a gateway that runs: its file, restarts, and the room of evicted files."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.local import Reader
from forebay.s3_get import Credentials
from gateway.core.errors import StartupError
from gateway.serve.listeners import open_local
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.strict_origin import StrictOrigin

SIZE_BYTES = 100 * 1024
KEYS = ("reader", "reader-secret-0123456789")


def config_of(origin: StrictOrigin, path: Path) -> dict[str, Any]:
    return {
        "origin": origin.settings,
        "server": {"local_socket": str(path), "workers": 2},
        "credentials": [{"access_key_id": KEYS[0], "secret_access_key": KEYS[1], "allow": ["s3://"]}],
        "slots": [{"name": "data", "prefix": "s3://bucket/", "consistency": "immutable"}],
    }


def reader_of(gateway: GatewayProcess, path: Path) -> Reader:
    return Reader(socket_path=str(path), endpoint_url=gateway.s3_url, credentials=Credentials(*KEYS))


def until_local(reader: Reader, keys: list[str]) -> list[bytes]:
    """Read until nothing comes by HTTP."""
    deadline = time.monotonic() + ANSWER_SECONDS_MAX
    while True:
        before = reader.http_reads
        found = [bytes(one) for one in reader.read_many(keys)]
        if reader.http_reads == before:
            return found
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_it_outlives_workers_and_gateways(tmp_path: Path) -> None:
    """Owner and group may connect; a killed worker or gateway costs its clients a detour by HTTP; a socket that is left
    of a killed gateway makes room; an orderly end removes it."""
    path = tmp_path / "read.sock"
    with StrictOrigin() as origin:
        bodies = [random.Random(number).randbytes(SIZE_BYTES) for number in range(20)]
        for number, body in enumerate(bodies):
            origin.model.put("bucket", f"k{number}", body)
        keys = [f"bucket/k{number}" for number in range(20)]
        with GatewayProcess(config_of(origin, path), directory=tmp_path / "cache") as gateway:
            mode = path.stat().st_mode
            assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o660)
            reader = reader_of(gateway, path)
            assert until_local(reader, keys) == bodies
            for number in range(2):
                gateway.kill_worker(number)
                assert [bytes(one) for one in reader.read_many(keys)] == bodies
            assert until_local(reader, keys) == bodies
            reader.close()
            gateway.kill()
            gateway.start()
            again = reader_of(gateway, path)
            assert until_local(again, keys) == bodies
            gateway.terminate()
            assert not path.exists()
            again.close()


HOLDER = """
import os, sys, time
from forebay.local import Reader
from forebay.s3_get import Credentials
path, url, *keys = sys.argv[1:]
reader = Reader(socket_path=path, endpoint_url=url, credentials=Credentials(*os.environ["KEYS"].split()))
while reader.http_reads or not reader.local_reads:
    reader.http_reads = 0
    reader.read_many(keys)
    time.sleep(0.05)
print("holds", len(reader._link.files), flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_a_client_that_is_killed_gives_room_back_at_once(tmp_path: Path) -> None:
    """An evicted file takes room as long as a client holds it; with the client, that ends."""
    path = tmp_path / "read.sock"
    with StrictOrigin() as origin:
        size_bytes = 16 * 2**20
        origin.model.put_generated("bucket", "large", size_bytes, 1)
        with GatewayProcess(config_of(origin, path), directory=tmp_path / "cache") as gateway:
            command = [sys.executable, "-c", HOLDER, str(path), gateway.s3_url, "bucket/large"]
            environment = os.environ | {"KEYS": " ".join(KEYS)}
            holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            try:
                assert holder.stdout is not None
                assert holder.stdout.readline().startswith("holds")
                url = f"{gateway.admin_url}/api/v1/evict"
                answer = httpx.post(url, json={"prefix": "s3://bucket/large"}, timeout=60)
                assert answer.status_code == 202, answer.text
                until(lambda: held_bytes(holder.pid) >= size_bytes)
            finally:
                holder.send_signal(signal.SIGKILL)
                holder.communicate()
            until(lambda: not any(held_bytes(pid) for pid in gateway.worker_pids() if pid is not None))


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ANSWER_SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def held_bytes(pid: int) -> int:
    """Bytes of unlinked block files that a process has open."""
    found = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            facts = descriptor.stat()
            if stat.S_ISREG(facts.st_mode) and not facts.st_nlink and "/blocks/" in os.readlink(descriptor):
                found += facts.st_size
    return found


def test_a_socket_is_not_taken_from_another_gateway(tmp_path: Path) -> None:
    """Nor does the gateway remove a file that is no socket; the message names the setting."""
    path = tmp_path / "read.sock"
    first = open_local(path)
    with pytest.raises(StartupError, match=r"server\.local_socket"):
        open_local(path)
    first.close()
    open_local(path).close()  # whoever left it is gone
    other = tmp_path / "file"
    other.write_text("x")
    with pytest.raises(StartupError, match=r"server\.local_socket"):
        open_local(other)
    assert other.read_text() == "x"
    with pytest.raises(StartupError, match="directory"):
        open_local(tmp_path / "missing" / "read.sock")
