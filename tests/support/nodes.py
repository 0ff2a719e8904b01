"""Whole gateways of one cluster, before one origin that notes what it is asked for.

with nodes(tmp_path, 3) as cluster:
    keys = cluster.store("k", [100_000])
    assert cluster.read(0, keys[0]) in ("miss", "peer")
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from gateway.app.cluster import MEMBERSHIP
from gateway.cluster.members import Member
from gateway.cluster.placement import Placement
from gateway.core.model import ObjectKey
from gateway.demo.ports import free_port
from gateway.s3.headers import first_and_last
from tests.support.asgi import signed_headers
from tests.support.gateway_process import GatewayProcess, to_toml
from tests.support.names import looked_up_in, tell
from tests.support.network import HOST, Machine, Network
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import SECONDS_MAX, eventually

BUCKET = "bucket"
SECRET = "the secret of the cluster: 32 characters or more"
PATIENCE_SECONDS = 60.0
PEER_PORT = 9002
BLOCK = 1024 * 1024
_CHUNK_BYTES = 64 * 1024
FOR_CLIENTS = {"x-forebay-cache", "x-forebay-origin-request-id", "x-forebay-request-id", "x-forebay-durable"}
"""What an answer says of Forebay; all else is between nodes."""

READ_ONLY: Mapping[str, Any] = {
    "name": "data",
    "prefix": f"s3://{BUCKET}/",
    "mode": "read-only",
    "consistency": "ttl",
    "metadata_ttl": "1h",
}
"""The slot of a data set."""

PASSING = {**READ_ONLY, "copies": "none"}
"""What others own is asked of them each time."""

SIZES = [10, 70_000, 300_000, BLOCK, 5 * BLOCK + 1] * 4
"""Of a data set: what is small, and what has several blocks."""

SENT = 'forebay_cluster_peer_bytes_total{direction="sent",slot="data"}'

READERS = 3
"""Threads that a load has for each node."""


class PeerName:
    """A name that stands for the peer ports of nodes, each on an address of its own."""

    def __init__(self, directory: Path, count: int) -> None:
        port = free_port()
        self.file = directory / "names.json"
        self.addresses = [f"127.0.0.{11 + number}:{port}" for number in range(count)]
        self.entry = f"dns://localhost:{port}"

    def tell(self, addresses: Sequence[str] | None) -> None:
        """Have the name stand for these from now on; None: nobody can find out for which."""
        hosts = None if addresses is None else [one.partition(":")[0] for one in addresses]
        tell(self.file, {"localhost": hosts})

    def looked_up_at(self) -> int:
        file = looked_up_in(self.file)
        return file.stat().st_mtime_ns if file.exists() else 0


@dataclass(eq=False)
class Node:
    """One gateway, and a client of it. `address` is its peer port's."""

    address: str
    config: dict[str, Any]
    gateway: GatewayProcess
    machine: Machine | None = None
    _is_started: bool = False
    _is_stopped: bool = False

    def __post_init__(self) -> None:
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS, limits=limits)

    def start(self) -> None:
        self.gateway.__enter__()
        self._is_started = True

    def restart(self, members: Sequence[str], member_for_seconds: float) -> float:
        """End it, and start it with these members, as one that has been a member for so long; seconds of the start."""
        self.gateway.terminate()
        self.config["cluster"]["members"] = list(members)
        self.gateway.config_file.write_text(to_toml(self.config), encoding="utf-8")
        note = self.gateway.directory / MEMBERSHIP
        noted = orjson.loads(note.read_bytes())
        note.write_bytes(orjson.dumps({**noted, "since": noted["seen"] - member_for_seconds}))
        began = time.monotonic()
        self.gateway.start()
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL all its processes at once."""
        pids = [*_children(self.gateway.pid), self.gateway.pid]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop all its processes, until they are to continue."""
        self._is_stopped = True
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._is_stopped = False
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in (self.gateway.pid, *_children(self.gateway.pid)):
            os.kill(pid, number)

    def close(self) -> None:
        self.client.close()
        if self._is_stopped:
            self.go_on()
        if self._is_started:
            self.gateway.__exit__(*sys.exc_info())

    def request(self, method: str, key: str, **options: Any) -> httpx.Response:
        return self.client.request(method, f"{self.gateway.s3_url}/{BUCKET}/{key}", **options)

    def signed(self, method: str, key: str, headers: Mapping[str, str], *, sign_key: Sequence[str]) -> httpx.Response:
        """A request that is signed by a key pair."""
        host = self.gateway.s3_url.removeprefix("http://")
        pair = {"access_key_id": sign_key[0], "secret_access_key": sign_key[1]}
        said = signed_headers(method, f"/{BUCKET}/{key}", headers, b"", host=host, **pair)
        return self.request(method, key, headers=said)

    def metric(self, name: str) -> float:
        """The value of a metric with its labels."""
        text = self.client.get(f"{self.gateway.admin_url}/metrics").text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name} "))


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *_children(int(child))]
    return found


@dataclass(eq=False)
class Nodes:
    """The cluster."""

    origin: StrictOrigin
    nodes: list[Node]
    secret_file: Path

    def __getitem__(self, number: int) -> Node:
        return self.nodes[number]

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self.nodes]

    def store(self, prefix: str, sizes: Sequence[int]) -> list[str]:
        """Put objects in the bucket, each time with other contents; their keys."""
        keys = [f"{prefix}{number}" for number in range(len(sizes))]
        for key, size_bytes in zip(keys, sizes, strict=True):
            self.origin.model.put(BUCKET, key, os.urandom(size_bytes))
        return keys

    def content(self, key: str) -> bytes:
        return self.origin.model.data(BUCKET, key)

    def size_bytes(self, keys: Sequence[str]) -> int:
        return sum(len(self.content(key)) for key in keys)

    def read(self, number: int, key: str) -> str:
        """Read an object whole, and compare each byte; where it came from."""
        content, answer = self.content(key), self.nodes[number].request("GET", key)
        assert answer.status_code == 200, f"{key} of node {number}: {answer.text}"
        assert answer.content == content, f"{key} of node {number}"
        assert not [name for name in answer.headers if name.startswith("x-forebay-") and name not in FOR_CLIENTS]
        return str(answer.headers["x-forebay-cache"].partition(";")[0])

    def epoch(self, keys: Sequence[str], of: Sequence[int], *, threads_each: int = 2) -> Spent:
        """Let these nodes read all objects at the same time, each in an order of its own; what it costs the bucket."""
        orders = {number: random.sample(keys, len(keys)) for number in of}
        asked = len(self.origin.request_lines)
        with ThreadPoolExecutor(threads_each * len(of)) as pool:
            reads = [pool.submit(self.read, number, orders[number][i]) for i in range(len(keys)) for number in of]
            seen = {one.result() for one in reads}
        return Spent(*self.asked(asked), seen)

    def askers(self, keys: Sequence[str]) -> set[str]:
        """Return the nodes that have asked the bucket for any of these objects, by what they call themselves there."""
        self.origin.settle()
        lines = {f"GET /{BUCKET}/{key}".encode() for key in keys}
        requests = zip(self.origin.request_lines, self.origin.request_headers, strict=True)
        return {dict(fields)[b"x-forebay-hop"].decode() for line, fields in requests if line in lines}

    def asked_by(self, number: int, key: str = "asked") -> set[str]:
        """Return who asks the bucket for a new object that is read through a node."""
        self.origin.model.put(BUCKET, key, os.urandom(1000))
        self.read(number, key)
        return self.askers([key])

    def asked(self, since: int = 0) -> tuple[int, int]:
        """Return how many questions about objects the bucket got since its request of this number, and how many bytes
        nodes wanted.

        What one node asks for twice counts once: it asks again where an answer is late, on a busy machine.
        """
        self.origin.settle()
        questions, chunks = set[tuple[str, bytes]](), dict[tuple[str, bytes, int], int]()
        requests = list(zip(self.origin.request_lines, self.origin.request_headers, strict=True))[since:]
        for line, fields in requests:
            method, key = line.partition(b" ")[0], line.removeprefix(b"GET ").removeprefix(f"/{BUCKET}/".encode())
            if b"/bucket/" not in line:
                continue
            headers = {name.decode(): value.decode("latin-1") for name, value in fields}
            node = headers["x-forebay-hop"]
            if "if-match" not in headers:
                questions.add((node, line))
            if method == b"GET":
                size_bytes = len(self.content(key.decode()))
                first, last = first_and_last(headers.get("range")) or (0, None)
                stop = min(size_bytes, size_bytes if last is None else last + 1)
                for chunk in range(first // _CHUNK_BYTES, -(-stop // _CHUNK_BYTES)):
                    chunks[node, key, chunk] = min(_CHUNK_BYTES, size_bytes - chunk * _CHUNK_BYTES)
        return len(questions), sum(chunks.values())

    def grown(self, keys: Sequence[str]) -> Spent:
        """Let two nodes of four read objects, start the others, and let all read them; what that costs the bucket."""
        probes = {number: self.owned_by(number, "probe", 100) for number in (2, 3)}
        for key in (*probes[2], *probes[3]):
            self.origin.model.put(BUCKET, key, key.encode())
        self.epoch([*probes[2], *probes[3]], [0])
        self.epoch(keys, [0, 1])
        for node in self.nodes[:2]:
            node.restart(self.addresses, member_for_seconds=3600)
        for node in self.nodes[2:]:
            node.start()
        for number, probes_of_it in probes.items():  # they ask the owners before when they know their age
            self.wait_for_states(number, ["up"] * 4)
            left = iter(probes_of_it)
            self.wait_until(lambda: self.read(number, next(left)) == "peer")  # noqa: B023 - called here
        return self.epoch(keys, range(4))

    def owned_by(self, number: int, prefix: str, count: int, *, second: int | None = None) -> list[str]:
        """Return keys whose first block a node owns if all are members; with `second`, and which is second."""
        placement = Placement(Member(address, address) for address in self.addresses)
        owners = [self.addresses[one] for one in (number, second) if one is not None]
        keys = (f"{prefix}{i}" for i in itertools.count())
        of_key = ((key, placement.owners(ObjectKey(BUCKET, key), 0)) for key in keys)
        own = (key for key, both in of_key if [one.address for one in both[: len(owners)]] == owners)
        return list(itertools.islice(own, count))

    def wait_until(self, is_so: Callable[[], bool], *, seconds: float = SECONDS_MAX) -> None:
        eventually(is_so, seconds=seconds)

    def wait_for_states(self, number: int, states: Sequence[str]) -> None:
        """Until a node tells these states of the members."""
        client, url = self[number].client, f"{self[number].gateway.admin_url}/api/v1/cluster"
        self.wait_until(lambda: [one["state"] for one in client.get(url).json()["members"]] == list(states))


@dataclass(frozen=True)
class Spent:
    """What the bucket was asked for; and what clients were told of where their bytes came from."""

    questions: int
    size_bytes: int
    seen: set[str]


class Load:
    """Reads that go on until they are enough, each compared."""

    def __init__(self, cluster: Nodes, keys: list[str]) -> None:
        self._cluster = cluster
        self._keys = keys
        self._over = threading.Event()
        self.count = 0

    def read(self, number: int, seed: int) -> None:
        choice = random.Random(seed)
        while not self._over.is_set():
            for key in choice.sample(self._keys, len(self._keys)):
                self._cluster.read(number, key)
                self.count += 1

    def end(self) -> None:
        self._over.set()

    def more(self, count: int) -> None:
        """Return when so many more reads are over."""
        enough = self.count + count
        self._cluster.wait_until(lambda: self.count >= enough or self._over.is_set())


@contextmanager
def load(cluster: Nodes, keys: list[str], of: list[int]) -> Iterator[Load]:
    """Let clients of these nodes read all the time; AssertionError at the end if a read was not right."""
    reading = Load(cluster, keys)
    with ThreadPoolExecutor(READERS * len(of)) as pool:

        def ended(one: Future[None]) -> None:
            if one.exception() is not None:
                reading.end()

        reads = [pool.submit(reading.read, number, seed) for seed in range(READERS) for number in of]
        for one in reads:
            one.add_done_callback(ended)
        try:
            yield reading
        finally:
            reading.end()
    for one in reads:
        one.result()


@contextmanager
def nodes(
    directory: Path,
    count: int,
    slots: Sequence[Mapping[str, Any]] = (READ_ONLY,),
    *,
    running: int | None = None,
    views: Mapping[int, Sequence[int]] | None = None,
    of_one: Mapping[int, Mapping[str, Any]] | None = None,
    network: Network | None = None,
    peers: PeerName | None = None,
    **tables: Mapping[str, Any],
) -> Iterator[Nodes]:
    """Yield a cluster of `count` nodes, of which the first `running` run.

    `views`: whom a node has for members, if not those that run. `peers`: by which they find each other instead.
    `tables`: more settings; `of_one`: of one node. With a `network`, each node is a machine of it.
    """
    secret_file = directory / "secret"
    secret_file.write_text(SECRET)
    secret_file.chmod(0o600)
    running = count if running is None else running
    machines = [network.machine() if network is not None else None for _ in range(count)]
    addresses = [f"{one.host}:{PEER_PORT}" if one is not None else f"127.0.0.1:{free_port()}" for one in machines]
    if peers is not None:
        addresses = peers.addresses
        peers.tell(addresses[:running])
    with StrictOrigin(host=HOST if network is not None else "127.0.0.1") as origin, ExitStack() as undo:
        origin.model.create_bucket(BUCKET)
        cluster = Nodes(origin, [], secret_file)
        keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
        for number, (address, machine) in enumerate(zip(addresses, machines, strict=True)):
            open_to_all = {"host": machine.host, "insecure": True} if machine is not None else {}
            members = (views or {}).get(number, range(running if number < running else count))
            config: dict[str, Any] = {
                "server": {"port": 0, "allow_unsigned": True, "workers": 1, **open_to_all},
                "admin": {"port": 0, **open_to_all},
                "origin": {"endpoint_url": origin.endpoint_url, **keys},
                "cache": {"directory": str(directory / str(number)), "block_size": "1MiB", "capacity": "256MiB"},
                "slots": [dict(slot) for slot in slots],
                "cluster": {
                    "name": "train",
                    "secret_file": str(secret_file),
                    "listen": address,
                    "advertise": address,
                    "members": [addresses[one] for one in members] if peers is None else [peers.entry],
                },
            }
            for more in (tables, (of_one or {}).get(number, {})):
                for name, table in more.items():
                    config[name] = table if isinstance(table, list) else {**config.get(name, {}), **table}
            gateway = GatewayProcess(
                config,
                directory=Path(config["cache"]["directory"]),
                namespace=machine.namespace if machine is not None else None,
                names=peers.file if peers is not None else None,
            )
            cluster.nodes.append(undo.enter_context(closing(Node(address, config, gateway, machine))))
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(Node.start, cluster.nodes[:running]))
        yield cluster
