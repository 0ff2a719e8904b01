"""A network of namespaces on a bridge, in which ways can be cut, and machines delayed.

with Network() as network:
    one, two = network.machine(), network.machine()
    network.cut(one, two)

While it lasts, this thread, and all threads that it starts, are on the bridge. The namespaces have no names: they end
with the processes in them. Netem is no part of every kernel, so what delays is a thread between two taps.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Self

from tests.support.network_namespace import OWN, enter, enter_new
from tests.support.prepared_process import start_forker
from tests.support.root import require_root_marker

HOST = "10.77.0.254"
"""The address of this thread: the bucket's, and the clients'."""

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES_MAX = 65536


@dataclass(frozen=True)
class Machine:
    """A namespace: its path, and its addresses."""

    namespace: str
    host: str
    mac: str = ""

    def run(self, *command: str) -> None:
        _run("nsenter", f"--net={self.namespace}", *command)


class Network:
    def __init__(self) -> None:
        self._undo = ExitStack()
        self._machines: list[Machine] = []

    def __enter__(self) -> Self:
        require_root_marker()
        start_forker()  # its processes are those of all tests
        with self._undo as undo:
            undo.callback(enter, self._held(OWN))
            self._here = self._begun()
            _run("ip", "link", "add", "bridge", "type", "bridge")
            _run("ip", "address", "add", f"{HOST}/24", "dev", "bridge")
            _run("ip", "link", "set", "bridge", "up")
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def machine(self) -> Machine:
        """Return a new one, connected to the bridge."""
        number, namespaces = len(self._machines) + 1, list[str]()
        beginning = threading.Thread(target=lambda: namespaces.append(self._begun()))
        beginning.start()
        beginning.join()
        machine, link = Machine(namespaces[0], f"10.77.0.{number}", f"02:00:00:00:00:{number:02x}"), f"link{number}"
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
        _run("ip", "link", "set", link, "master", "bridge", "up")
        machine.run("ip", "address", "add", f"{machine.host}/24", "dev", "eth0")
        machine.run("ip", "link", "set", "eth0", "address", machine.mac, "up")
        self._machines.append(machine)
        return machine

    def cut(self, sender: Machine, receiver: Machine | None, port: int | None = None) -> None:
        """Lose all packets from one to the other (None: here), or those to a port, until `heal`."""
        to = self._local if receiver is None else receiver
        what = f"ip saddr {sender.host} " + (f"tcp dport {port} " if port is not None else "")
        to.run("nft", "add table ip cuts")
        to.run("nft", "add chain ip cuts input { type filter hook input priority 0 ; }")
        to.run("nft", f"add rule ip cuts input {what} drop")

    def heal(self) -> None:
        for machine in (self._local, *self._machines):
            machine.run("nft", "flush", "ruleset")

    @contextmanager
    def delayed(self, machine: Machine, seconds: float) -> Iterator[None]:
        """Delay all that a machine sends, as netem does."""
        with ExitStack() as undo:
            ends = [_tap(undo, name) for name in ("inside", "outside")]
            _run("ip", "link", "set", "outside", "master", "bridge", "up")
            _run("ip", "link", "set", "inside", "address", machine.mac, "netns", machine.namespace)
            over, ending = os.pipe()
            delaying = threading.Thread(target=_delay, args=(*ends, over, seconds), daemon=True)
            delaying.start()
            undo.callback(os.close, over)
            undo.callback(delaying.join)
            undo.callback(os.close, ending)
            machine.run("sh", "-c", _MOVED.format(before="eth0", after="inside", host=machine.host))
            undo.callback(machine.run, "sh", "-c", _MOVED.format(before="inside", after="eth0", host=machine.host))
            yield

    @property
    def _local(self) -> Machine:
        return Machine(self._here, HOST)

    def _begun(self) -> str:
        """Bring this thread into a new namespace, and return its path."""
        enter_new()
        _run("ip", "link", "set", "lo", "up")
        return self._held(OWN)

    def _held(self, namespace: str) -> str:
        """Keep a namespace until the end; its path."""
        descriptor = os.open(namespace, os.O_RDONLY)
        self._undo.callback(os.close, descriptor)
        return f"/proc/{os.getpid()}/fd/{descriptor}"


_MOVED = """set -e
ip address flush dev {before}
ip link set {before} down
ip address add {host}/24 dev {after}
ip link set {after} up
"""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr}"


def _tap(undo: ExitStack, name: str) -> int:
    """Make a network card whose packets are read from a descriptor, and written to it."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    undo.callback(os.close, descriptor)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


def _delay(inside: int, outside: int, over: int, seconds: float) -> None:
    """Pass frames on until `over` ends: from outside at once, from inside later."""
    waiting = deque[tuple[float, bytes]]()
    while True:
        pause_seconds = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([inside, outside, over], [], [], pause_seconds)
        if over in readable:
            return
        if outside in readable:
            _write(inside, os.read(outside, _FRAME_BYTES_MAX))
        if inside in readable:
            waiting.append((time.monotonic() + seconds, os.read(inside, _FRAME_BYTES_MAX)))
        while waiting and waiting[0][0] <= time.monotonic():
            _write(outside, waiting.popleft()[1])


def _write(tap: int, frame: bytes) -> None:
    with suppress(OSError):  # the card is down: the frame is lost, as on a cable
        os.write(tap, frame)
