"""A link between this process and an origin whose capacity can be changed, and whose queue is measured.

It is a pair of virtual network devices, in network namespaces of their own, and a process that carries packets between
them (link_relay.py). So what is tried is the kernel's own TCP over some distance, and nothing else on the machine is
touched. Needs root.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from loadtests.harness.origin import LoadOrigin
from loadtests.harness.server_process import ServerProcess
from loadtests.harness.sink import SinkOrigin
from loadtests.harness.tools import Missing

Direction = Literal["read", "write"]

GATEWAY_ADDRESS, ORIGIN_ADDRESS = "10.255.255.1", "10.255.255.2"
_DISTANCE_SECONDS = 0.01
"""One way."""

_PACKET_BYTES = 9000
_REPOSITORY = Path(__file__).resolve().parents[2]
_NAMESPACE = "/proc/thread-self/ns/net"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Passed:
    """What has passed in one direction, in whole packets, and for how long each of them had to wait for its turn."""

    size_bytes: int
    lost_packets: int
    delays: Sequence[float]


class ShapedLink:
    """`with ShapedLink() as link:`; what the same thread starts inside is on the gateway's side. Missing."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._far = 0
        self._relay: subprocess.Popen[str]
        self._asking = threading.Lock()

    @property
    def far_prefix(self) -> Sequence[str]:
        """What runs a command on the origin's side."""
        return ["nsenter", "--target", str(self._far), "--net"]

    def limit(self, bytes_per_second: float) -> None:
        """What each direction bears from now on."""
        with self._asking:
            self._say(f"limit read {bytes_per_second}\nlimit write {bytes_per_second}\n")

    def take(self, direction: Direction) -> Passed:
        """What has passed since the last time."""
        with self._asking:
            self._say(f"take {direction}\n")
            assert self._relay.stdout is not None
            told = json.loads(self._relay.stdout.readline())
        return Passed(told["bytes"], told["lost_packets"], told["delays"])

    def _say(self, text: str) -> None:
        assert self._relay.stdin is not None
        self._relay.stdin.write(text)
        self._relay.stdin.flush()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._make(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _make(self, stack: ExitStack) -> None:
        for tool in ("unshare", "nsenter", "ip"):
            if shutil.which(tool) is None:
                raise Missing(f"{tool} is needed to make a link")
        before = os.open(_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, before)
        if _libc.unshare(_CLONE_NEWNET):
            raise Missing(f"no network namespace can be made here: {os.strerror(ctypes.get_errno())}; run as root")
        stack.callback(_libc.setns, before, 0)
        holder = stack.enter_context(subprocess.Popen(["unshare", "--net", "sleep", "infinity"]))
        stack.callback(holder.kill)
        self._far = holder.pid
        _wait_for_namespace(self._far)
        near, far = (
            _device("near", GATEWAY_ADDRESS, ()),
            _in_namespace(self._far, lambda: _device("far", ORIGIN_ADDRESS, self.far_prefix)),
        )
        command = [sys.executable, "-m", "loadtests.harness.link_relay", str(near), str(far), str(_DISTANCE_SECONDS)]
        self._relay = subprocess.Popen(
            command, cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(near, far)
        )
        stack.enter_context(self._relay)  # ends with its standard input
        os.close(near)
        os.close(far)


def _wait_for_namespace(process: int) -> None:
    own, deadline = os.readlink(_NAMESPACE), time.monotonic() + 10.0
    while os.readlink(f"/proc/{process}/ns/net") == own:
        if time.monotonic() > deadline:
            raise RuntimeError("no network namespace for the origin")
        time.sleep(0.01)


def _device(name: str, address: str, prefix: Sequence[str]) -> int:
    """The descriptor of a new one, in the namespace of this thread, which `prefix` runs commands in."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (
        ["link", "set", "lo", "up"],
        ["link", "set", name, "mtu", str(_PACKET_BYTES), "txqueuelen", "10000", "up"],
        ["address", "add", f"{address}/24", "dev", name],
        # The usual one, which fills every queue that it finds.
        ["route", "replace", "10.255.255.0/24", "dev", name, "congctl", "cubic"],
    ):
        subprocess.run([*prefix, "ip", *command], check=True)
    return descriptor


def _in_namespace(process: int, make: Callable[[], int]) -> int:
    """What is made in the network namespace of a process: by a thread of its own, for that is what has one."""
    made = list[int]()

    def go() -> None:
        with open(f"/proc/{process}/ns/net", "rb") as namespace:
            if _libc.setns(namespace.fileno(), 0) == 0:
                made.append(make())

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    if not made:
        raise RuntimeError("no network device on the origin's side")
    return made[0]


class _Far(ServerProcess):
    """An origin on the other side of a link."""

    link: ShapedLink

    @property
    def address(self) -> tuple[str, int]:
        return ORIGIN_ADDRESS, self.port

    @property
    def url(self) -> str:
        return f"http://{ORIGIN_ADDRESS}:{self.port}"

    def command(self) -> Sequence[str]:
        port = str(self.port)
        address = f"{ORIGIN_ADDRESS}:{port}"
        return [*self.link.far_prefix, *(address if one == port else one for one in super().command())]


class FarLoadOrigin(_Far, LoadOrigin):
    """As `LoadOrigin`, on the other side of `link`."""


class FarSinkOrigin(_Far, SinkOrigin):
    """As `SinkOrigin`, on the other side of `link`."""
