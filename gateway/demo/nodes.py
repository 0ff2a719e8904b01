"""`forebay demo --nodes N`: nodes read one data set, each alone, then as a cluster; what the bucket sends of it."""

from __future__ import annotations

import json
import re
import secrets
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from gateway.demo.clients import CacheTally, Reader, s3_client, upload
from gateway.demo.dataset import DATA_PREFIX, StoredObject, Workload, files, shards
from gateway.demo.ports import free_port
from gateway.demo.report import Narrator
from gateway.demo.stack import REGION, DemoError, Interruptions, Servers, started_servers

NODES_WORKLOAD = Workload(shard_count=8, file_count=200)
_EPOCHS = 2

_FEW = 0.02
"""More than this share of the data set that comes a second time is worth a remark."""

_MEET_SECONDS = 60.0

_BYTES_FROM_BUCKET = re.compile(rb'^forebay_origin_bytes_total\{[^}]*direction="read"[^}]*\} (\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Epoch:
    """All nodes have read all objects once, at the same time, each in an order of its own."""

    what: str
    seconds: float
    bucket_bytes: int
    """Bytes that the bucket has sent to all nodes."""


@dataclass(frozen=True, slots=True)
class NodesReport:
    """The epochs of nodes that stand alone, then those of the same nodes as a cluster."""

    nodes: int
    size_bytes: int
    epochs: Sequence[Epoch]

    def as_dict(self) -> dict[str, Any]:
        return {"nodes": self.nodes, "bytes": self.size_bytes, "epochs": [asdict(one) for one in self.epochs]}

    @property
    def problem(self) -> str | None:
        """Return the broken promise of the cluster in words, or None."""
        alone, cluster = self.epochs[0].bucket_bytes, self.epochs[_EPOCHS].bucket_bytes
        if cluster >= alone:
            return f"the bucket sent {cluster} bytes to the cluster, and no more than {alone} to nodes that stood alone"
        return None

    @property
    def remark(self) -> str:
        """Say what the bucket has sent more than once; empty if nothing."""
        again = sum(one.bucket_bytes for one in self.epochs[_EPOCHS:]) - self.size_bytes
        if again <= _FEW * self.size_bytes:
            return ""
        return f" The bucket sent {again / 1e6:.1f} MB again: a node passes over one that answers late."

    def table(self) -> Table:
        size = f"{self.size_bytes / 1e6:.0f} MB"
        table = Table(
            title=f"{self.nodes} nodes read the same {size}, each in an order of its own",
            caption=f"Every byte was verified.{self.remark}",
            caption_justify="left",
            box=box.SIMPLE,
        )
        table.add_column("")
        for heading in ("time", "from the bucket", "of the data set"):
            table.add_column(heading, justify="right")
        for one in self.epochs:
            share = f"{one.bucket_bytes / self.size_bytes:.2f} x"
            table.add_row(one.what, f"{one.seconds:.1f} s", f"{one.bucket_bytes / 1e6:.0f} MB", share)
        return table


def run_nodes(count: int, workload: Workload, narrator: Narrator, interruptions: Interruptions) -> NodesReport:
    """Do it all; DemoError at the first wrong byte."""
    narrator.say(f"forebay demo: a bucket at a distance, and {count} nodes that read the same data set")
    with started_servers(interruptions) as servers:
        try:
            return _Demo(count, workload, narrator, interruptions, servers).run()
        except DemoError as error:
            raise DemoError(str(error), error.log or servers.logs()) from error
        except Exception as error:
            raise DemoError(f"{type(error).__name__}: {error}", servers.logs()) from error


@dataclass(frozen=True, slots=True)
class _Node:
    url: str
    admin_url: str

    def has_met(self, count: int) -> bool:
        """Return True if `count` nodes answer it, itself among them."""
        with urllib.request.urlopen(f"{self.admin_url}/api/v1/cluster", timeout=30) as answer:  # noqa: S310 - our own
            states = [str(one["state"]) for one in json.load(answer)["members"]]
        return states.count("up") == count

    def bytes_from_bucket(self) -> int:
        with urllib.request.urlopen(f"{self.admin_url}/metrics", timeout=30) as answer:  # noqa: S310 - our own
            return sum(int(float(one)) for one in _BYTES_FROM_BUCKET.findall(answer.read()))


@dataclass(frozen=True, slots=True)
class _Demo:
    count: int
    workload: Workload
    narrator: Narrator
    interruptions: Interruptions
    servers: Servers

    def run(self) -> NodesReport:
        workload, narrator, servers = self.workload, self.narrator, self.servers
        with narrator.step("start the bucket"):
            bucket_url = servers.start_bucket(workload)
        client = s3_client(bucket_url, servers.keys, workload.readers)
        client.create_bucket(Bucket=workload.bucket)
        planned = [*shards(workload), *files(workload)]
        size_bytes, epochs = sum(one.size_bytes for one in planned), list[Epoch]()
        with narrator.step(f"upload {len(planned)} objects", size_bytes) as advance:
            stored = upload(client, workload.bucket, planned, workload.readers, advance)
        for name, how in (("alone", "each alone"), ("cluster", "as a cluster")):
            with ExitStack() as undo:
                with narrator.step(f"start {self.count} nodes, {how}"):
                    nodes = self._started(bucket_url, name)
                    if name == "cluster":
                        self._wait_until_all_have_met(nodes)
                undo.callback(self._stop)
                for number in range(1, _EPOCHS + 1):
                    with narrator.step(what := f"{name}, epoch {number}"):
                        epochs.append(self._epoch(what, nodes, stored, number))
        return NodesReport(self.count, size_bytes, epochs)

    def _started(self, bucket_url: str, name: str) -> list[_Node]:
        secret = self.servers.directory / "secret"
        secret.write_text(secrets.token_hex(32), encoding="ascii")
        secret.chmod(0o600)
        peers, nodes = [f"127.0.0.1:{free_port()}" for _ in range(self.count)], []
        for number, peer in enumerate(peers, start=1):
            config = self.servers.directory / f"{name}-{number}.toml"
            text = _CONFIG.format(url=bucket_url, bucket=self.workload.bucket, cache=config.with_suffix(""))
            if name == "cluster":
                text += _CLUSTER.format(secret=secret, number=number, peer=peer, members=json.dumps(peers))
            config.write_text(text, encoding="utf-8")
            ready = self.servers.start_forebay(config)
            nodes.append(_Node(ready[1], ready[2]))
        return nodes

    def _wait_until_all_have_met(self, nodes: Sequence[_Node]) -> None:
        """Wait, as the first nodes take those that have not started yet for silent, and pass them over for a while."""
        deadline = time.monotonic() + _MEET_SECONDS
        for node in nodes:
            while not node.has_met(len(nodes)):
                if time.monotonic() > deadline:
                    raise DemoError(f"the nodes have not met within {_MEET_SECONDS:g} seconds")
                time.sleep(0.1)

    def _stop(self) -> None:
        with self.interruptions.held():
            for process in self.servers.processes[-self.count :]:
                process.stop()

    def _epoch(self, what: str, nodes: Sequence[_Node], stored: Sequence[StoredObject], number: int) -> Epoch:
        workload, before = self.workload, sum(node.bytes_from_bucket() for node in nodes)
        clients = [s3_client(node.url, self.servers.keys, workload.readers) for node in nodes]
        readers = [Reader(client, CacheTally(), workload.bucket, workload.readers) for client in clients]
        begun = time.perf_counter()
        with ThreadPoolExecutor(len(nodes)) as threads:
            reading = [
                threads.submit(reader.epoch, stored, workload.seed + number * len(nodes) + place, lambda _: None)
                for place, reader in enumerate(readers)
            ]
            for one in reading:
                one.result()
        seconds = time.perf_counter() - begun
        return Epoch(what, seconds, sum(node.bytes_from_bucket() for node in nodes) - before)


_CONFIG = f"""\
[server]
port = 0
[admin]
port = 0
[origin]
endpoint_url = "{{url}}"
region = "{REGION}"
[cache]
directory = "{{cache}}"
capacity = "1GiB"
[[slots]]
name = "data"
prefix = "s3://{{bucket}}/{DATA_PREFIX}"
mode = "read-only"
consistency = "ttl"
metadata_ttl = "10m"
"""

_CLUSTER = """\
[cluster]
name = "demo"
secret_file = "{secret}"
node = "node-{number}"
listen = "{peer}"
advertise = "{peer}"
members = {members}
"""
