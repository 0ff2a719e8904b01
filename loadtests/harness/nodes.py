"""Gateways that read from each other, before one origin."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gateway.cluster.members import Member
from gateway.cluster.placement import Placement
from gateway.core.model import ObjectKey
from loadtests.harness import machine
from loadtests.harness.content import BUCKET
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.server_process import held_port

_SECRET = "the secret of the cluster under test, 32 characters or more"
_KNOWN_SECONDS_MAX = 30.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a cluster, all of one weight."""

    gateways: Sequence[Gateway]
    addresses: Sequence[str]

    def owned_by(self, number: int, paths: Sequence[str]) -> list[str]:
        """Return the objects whose first block a node owns."""
        placement = Placement(Member(address, address) for address in self.addresses)

        def owner(path: str) -> str:
            return placement.owners(ObjectKey(BUCKET, path.removeprefix(f"/{BUCKET}/")), 0)[0].name

        return [path for path in paths if owner(path) == self.addresses[number]]

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send a signal to all processes of a node."""
        for pid in machine.tree(self.gateways[number].process.pid):
            os.kill(pid, what)


@contextmanager
def nodes(origin: LoadOrigin, count: int, *, redis: str | None = None, **settings: Any) -> Iterator[Nodes]:
    """`count` gateways, made as `gateway(origin, **settings)` makes one, that all know each other, from Redis' URL."""
    with ExitStack() as stack:
        secret = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-load-"))) / "secret"
        secret.write_text(_SECRET, encoding="utf-8")
        secret.chmod(0o600)
        holders = [stack.enter_context(held_port()) for _ in range(count)]
        addresses = ["{}:{}".format(*holder.getsockname()) for holder in holders]
        started = []
        for number, address in enumerate(addresses):
            cluster: Mapping[str, Any] = {
                "name": "load",
                "node": f"node-{number}",
                "secret_file": str(secret),
                "listen": address,
                "advertise": address,
                "weight": 1,
                **({"members": addresses} if redis is None else {"redis": redis}),
            }
            one = gateway(origin, name=f"node {number}", cluster=cluster, names_threads=True, **settings)
            started.append(stack.enter_context(one))
        for one_of_them in started:
            _wait_until_known(one_of_them, count)
        yield Nodes(started, addresses)


def _wait_until_known(one: Gateway, count: int) -> None:
    """Until a node has heard from all others: what it asks them then is not the first thing that it asks them."""
    deadline = time.monotonic() + _KNOWN_SECONDS_MAX
    with httpx.Client(trust_env=False) as client:
        while time.monotonic() < deadline:
            members = client.get(f"{one.process.admin_url}/api/v1/cluster").json()["members"]
            if sum(member["state"] == "up" for member in members) == count:
                return
            time.sleep(_POLL_SECONDS)
    raise RuntimeError(f"{one.name} has not heard from all others: {members}")
