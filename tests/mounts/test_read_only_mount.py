"""`forebay mount --read-only`, mounted: other programs read what lies in the bucket, from the gateway's files."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.demo.ports import free_port
from tests.clients.boto import boto3_client
from tests.mounts.work import MIB, content
from tests.support.gateway_process import GatewayProcess
from tests.support.mounts import Mount
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import eventually

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

BUCKET = "train"
SECONDS = 60.0
OBJECTS = {
    **{f"data/{number % 3}/{number}": content(str(number), 1000 * number) for number in range(60)},
    "data/large": content("large", 30 * MIB + 5),
    "data/empty": b"",
}

TREE = """
import hashlib, json, os, sys
found = {}
for above, _, names in os.walk(sys.argv[1]):
    for name in names:
        path = os.path.join(above, name)
        with open(path, "rb") as file:
            content = file.read()
        assert len(content) == os.stat(path).st_size, path
        found[os.path.relpath(path, sys.argv[1])] = hashlib.sha256(content).hexdigest()
print(json.dumps(found))
"""

MAPPED = """
import hashlib, mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
    print(hashlib.sha256(mapped).hexdigest(), mapped[-5:].hex())
"""

OVERWRITTEN = """
import errno, sys
import boto3
path, url, bucket, key = sys.argv[1:]
client = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
with open(path, "rb", buffering=0) as file:
    assert file.read(10) == b"1" * 10
    client.put_object(Bucket=bucket, Key=key, Body=b"2" * 5_000_000)
    file.seek(2_000_000)
    try:
        found = file.read(10)
    except OSError as error:
        assert error.errno == errno.ESTALE, error
    else:
        assert found == b"1" * 10, found
with open(path, "rb") as file:
    assert file.read() == b"2" * 5_000_000
client.delete_object(Bucket=bucket, Key=key)
try:
    open(path, "rb")
except FileNotFoundError:
    print("gone")
"""

PACED_MOUNT = """
import sys, time
from pathlib import Path
from forebay.tree import Tree
from gateway.cli import main
_, directory, prefix, where = sys.argv
directory, asked = Path(directory), Tree._asked
def paced(self, path):
    entry = asked(self, path)
    if entry is not None and (directory / "is paced").exists():
        version = "old" if entry.size_bytes == 1000 else "new"
        (directory / version).touch()
        while not (directory / f"{version} may go").exists():
            time.sleep(0.01)
    return entry
Tree._asked = paced
sys.argv = ["forebay", "mount", prefix, where, "--read-only", "--foreground", "--remember", "6s"]
main()
"""
"""Holds what it has found out until the test lets it go."""

ASK = """
import os, sys
from pathlib import Path
directory = Path(sys.argv[1])
os.stat(sys.argv[2])
(directory / "is paced").touch()
while not (directory / "old").exists():
    size = os.stat(sys.argv[2]).st_size
print(size)
"""
"""Goes on until the kernel's knowledge is over, and it asks the mount."""

ASK_AND_READ = """
import os, sys
os.stat(sys.argv[2])
with open(sys.argv[2], "rb") as file:
    print(len(file.read()))
"""

FAILS = """
import errno, sys
try:
    open(sys.argv[1], "rb")
except OSError as error:
    print(errno.errorcode[error.errno])
"""

REFUSED = """
import errno, os, sys
refused = []
for operation in (lambda: open(sys.argv[1] + "/new", "wb"), lambda: os.remove(sys.argv[1] + "/empty"),
                  lambda: os.mkdir(sys.argv[1] + "/d"), lambda: open(sys.argv[1] + "/empty", "r+b")):
    try:
        operation()
    except OSError as error:
        refused.append(errno.errorcode[error.errno])
print(*refused)
"""


@pytest.fixture(scope="module")
def local_socket(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("socket") / "read.sock")


@pytest.fixture(scope="module")
def gateway(local_socket: str) -> Iterator[GatewayProcess]:
    with StrictOrigin() as origin:
        origin.model.create_bucket(BUCKET)
        for key, data in OBJECTS.items():
            origin.model.put(BUCKET, key, data)
        config: dict[str, Any] = {
            "origin": origin.settings,
            "server": {"local_socket": local_socket, "port": free_port()},
            "cache": {"capacity": "1GiB"},
            "slots": [{"name": "data", "prefix": f"s3://{BUCKET}/data/", "consistency": "immutable"}],
        }
        with GatewayProcess(config) as running:
            yield running


@pytest.fixture(scope="module")
def mount(gateway: GatewayProcess, local_socket: str) -> Iterator[Mount]:
    made = Mount("forebay", gateway.s3_url, BUCKET, (ACCESS_KEY_ID, SECRET_ACCESS_KEY))
    made.options = ["--remember", "0s"]
    made.environment["FOREBAY_LOCAL_SOCKET"] = local_socket
    with made as mounted:
        yield mounted


def run(mount: Mount, program: str, path: str, *arguments: str) -> str:
    return mount.run(sys.executable, "-c", program, mount.where / path, *arguments, timeout_seconds=SECONDS)


def test_files_are_objects(mount: Mount) -> None:
    """Names, sizes and bytes, of many small ones and a large one, twice: from the bucket, and from the cache."""
    for _ in range(2):
        found = json.loads(run(mount, TREE, "data"))
        assert found == {key[5:]: hashlib.sha256(data).hexdigest() for key, data in OBJECTS.items()}


def test_a_file_can_be_mapped(mount: Mount) -> None:
    """As safetensors and torch.load(mmap=True) do."""
    data = OBJECTS["data/large"]
    assert run(mount, MAPPED, "data/large").split() == [hashlib.sha256(data).hexdigest(), data[-5:].hex()]


def test_an_object_that_is_overwritten_is_never_mixed(mount: Mount, gateway: GatewayProcess) -> None:
    """A program that has the file open gets its version or an error; one that opens it then, the new one."""
    client = boto3_client(gateway.s3_url)
    client.put_object(Bucket=BUCKET, Key="strict/k", Body=b"1" * 3_000_000)
    assert run(mount, OVERWRITTEN, "strict/k", gateway.s3_url, BUCKET, "strict/k") == "gone\n"


def test_nothing_can_be_changed(mount: Mount) -> None:
    assert run(mount, REFUSED, "data").split() == ["EROFS"] * 4


def test_the_library_is_the_one_that_can_let_the_kernel_forget(mount: Mount) -> None:
    """s3fs brings libfuse 2, and lies on this machine."""
    (pid,) = mount.daemons()
    libraries = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    assert "libfuse3.so" in libraries
    assert "libfuse.so" not in libraries


def test_the_older_of_two_answers_does_not_cut_the_newer_version_off(
    gateway: GatewayProcess, mount: Mount, tmp_path: Path
) -> None:
    """Two programs ask for a file's size at once. The kernel takes the first answer, the old one, and not the other."""
    client, where = boto3_client(gateway.s3_url), tmp_path / "mount"
    where.mkdir()
    client.put_object(Bucket=BUCKET, Key="race/k", Body=b"1" * 1000)

    def python(program: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, str(tmp_path), *map(str, arguments)]
        return subprocess.Popen(command, env=mount.environment, stdout=subprocess.PIPE, text=True)

    server = python(PACED_MOUNT, f"s3://{BUCKET}/race", where)
    try:
        eventually(lambda: f" {where} " in Path("/proc/self/mounts").read_text(encoding="utf-8"), "not mounted")
        first = python(ASK, where / "k")
        eventually((tmp_path / "old").exists, "the first did not ask")
        client.put_object(Bucket=BUCKET, Key="race/k", Body=b"2" * 10_000)
        second = python(ASK_AND_READ, where / "k")
        eventually((tmp_path / "new").exists, "the second did not ask")
        (tmp_path / "old may go").touch()
        assert first.communicate(timeout=SECONDS)[0] == "1000\n"
        (tmp_path / "new may go").touch()
        assert second.communicate(timeout=SECONDS)[0] == "10000\n"
    finally:
        server.kill()
        server.communicate()
        subprocess.run(["umount", "--lazy", str(where)], timeout=SECONDS, check=False)


def test_a_gateway_that_comes_back_is_used_again(mount: Mount, gateway: GatewayProcess) -> None:
    """Meanwhile what is asked fails, and nothing waits for ever."""
    gateway.kill()
    try:
        assert run(mount, FAILS, "data/large") == "EIO\n"
    finally:
        gateway.start()
    data = OBJECTS["data/large"]
    assert run(mount, MAPPED, "data/large").split() == [hashlib.sha256(data).hexdigest(), data[-5:].hex()]


def test_what_cannot_be_mounted_is_said(mount: Mount, gateway: GatewayProcess, tmp_path: Path) -> None:
    """At once, and not by a mount in which each file fails."""
    for keys, arguments, said in (
        ({}, ["s3://nowhere"], "NoSuchBucket"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, [f"s3://{BUCKET}"], "SignatureDoesNotMatch"),
        ({}, [f"s3://{BUCKET}", "--endpoint-url", "http://127.0.0.1:1"], "127.0.0.1:1"),
    ):
        command = ["forebay", "mount", arguments[0], str(tmp_path), "--read-only", *arguments[1:]]
        environment = {**mount.environment, **keys}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 1
        assert said in done.stderr
        assert "Traceback" not in done.stderr
