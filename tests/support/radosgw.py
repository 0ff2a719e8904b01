"""A Ceph Object Gateway (https://docs.ceph.com/en/reef/man/8/radosgw/) with a monitor and one OSD in memory.

Debian's packages radosgw, ceph-mon, ceph-osd and ceph-common have the programs. They run as any user, from one
directory, and listen on 127.0.0.1 only.
"""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from gateway.demo.ports import free_port

PROGRAMS = ("ceph-authtool", "monmaptool", "ceph-mon", "ceph", "ceph-osd", "radosgw-admin", "radosgw")

_CLUSTER, _DISK = "11111111-2222-3333-4444-555555555555", "22222222-2222-3333-4444-555555555555"
_STEP_SECONDS, _START_SECONDS, _STOP_SECONDS = 120.0, 180.0, 30.0

_CONFIG = """[global]
fsid = {cluster}
mon_host = v2:127.0.0.1:{port}
mon_initial_members = a
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_objectstore = memstore
memstore_device_bytes = 1073741824
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 2000
mon_data = {directory}/mon
osd_data = {directory}/osd
rgw_data = {directory}/rgw
run_dir = {directory}
log_file = {directory}/$name.log
admin_socket = {directory}/$name.asok
pid_file =
keyring = {directory}/keyring
public_network = 127.0.0.0/8
rgw_dns_name =
rgw_enable_usage_log = false
"""


@contextmanager
def running_radosgw(directory: Path, access_key_id: str, secret_access_key: str) -> Iterator[str]:
    """Its URL, with one user who has this key pair.

    AssertionError where a program is missing, or does not do its work.
    """
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    assert not missing, f"not installed: {', '.join(missing)} (Debian: radosgw ceph-mon ceph-osd ceph-common)"
    port, s3_port = free_port(), free_port()
    (directory / "ceph.conf").write_text(_CONFIG.format(cluster=_CLUSTER, port=port, directory=directory))
    for name in ("mon", "osd", "rgw"):
        (directory / name).mkdir()
    with ExitStack() as running:
        _make_keys(directory)
        address = f"[v2:127.0.0.1:{port}]"
        _run(directory, ["monmaptool", "--create", "--addv", "a", address, "--fsid", _CLUSTER, "monmap"])
        _run(directory, ["ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap", "--keyring", "keyring"])
        running.enter_context(_started(directory, ["ceph-mon", "-i", "a", "-f"]))
        _run(directory, ["ceph", "osd", "new", _DISK])
        _run(directory, ["ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", _DISK])
        running.enter_context(_started(directory, ["ceph-osd", "-i", "0", "-f"]))
        keys = [f"--access-key={access_key_id}", f"--secret-key={secret_access_key}"]
        _run(directory, ["radosgw-admin", "user", "create", "--uid=u", "--display-name=u", *keys])
        frontend = f"--rgw_frontends=beast endpoint=127.0.0.1:{s3_port}"
        process = running.enter_context(_started(directory, ["radosgw", "-f", "-n", "client.admin", frontend]))
        url = f"http://127.0.0.1:{s3_port}"
        _wait_until_it_answers(url, process, directory)
        yield url


def _make_keys(directory: Path) -> None:
    everything = ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"]
    making = ["ceph-authtool", "keyring", "--gen-key", "-n"]
    _run(directory, [*making[:1], "--create-keyring", *making[1:], "mon.", "--cap", "mon", "allow *"])
    _run(directory, [*making, "client.admin", *everything])
    _run(directory, [*making, "osd.0", "--cap", "mon", "allow profile osd", *everything[3:]])


def _run(directory: Path, command: Sequence[str]) -> None:
    of_ceph = [] if command[0] in ("ceph-authtool", "monmaptool") else ["-c", "ceph.conf"]
    done = subprocess.run(
        [command[0], *of_ceph, *command[1:]], cwd=directory, capture_output=True, text=True, timeout=_STEP_SECONDS
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"


@contextmanager
def _started(directory: Path, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    with (directory / f"{command[0]}.out").open("wb") as output:
        process = subprocess.Popen(
            [command[0], "-c", "ceph.conf", *command[1:]], cwd=directory, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], directory: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(url):
        is_over = process.poll() is not None or time.monotonic() > deadline
        assert not is_over, (directory / "radosgw.out").read_text()[-2000:]
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        with closing(urllib.request.urlopen(url, timeout=_STOP_SECONDS)):
            return True
    except urllib.error.URLError:
        return False
