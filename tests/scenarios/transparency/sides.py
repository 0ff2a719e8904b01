"""The two sides of a comparison: an origin asked directly, and a like one asked through a gateway.

With FOREBAY_TRANSPARENCY_NODES=3, the gateway is a cluster of which each node gets every third request.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from xml.sax.saxutils import unescape

from gateway.demo.stack import DemoProcess
from tests.scenarios.transparency.signing import KeyPair, wire_bytes
from tests.scenarios.transparency.steps import Step, put
from tests.scenarios.transparency.wire import Answer, Connection
from tests.support.gateway_process import GatewayProcess
from tests.support.one_address import one_address
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

NODES = int(os.environ.get("FOREBAY_TRANSPARENCY_NODES", "1"))
VIRTUAL_DOMAIN = "s3.local"

MOTO_KEYS = KeyPair("moto-key", "moto-secret-0123456789")


@dataclass
class Side:
    """One endpoint, and what has been captured from its answers in the current case."""

    connection: Connection
    keys: KeyPair
    variables: dict[str, str] = field(default_factory=dict)

    def ask(self, step: Step) -> Answer:
        answer = self.ask_again(step, self.variables)
        self._capture(step, answer)
        return answer

    def ask_again(self, step: Step, variables: Mapping[str, str]) -> Answer:
        """Without capturing: the same request as when `variables` were what had been captured."""
        return self.connection.exchange(step.method, wire_bytes(step, variables, self.connection.host, self.keys))

    def wire_bytes(self, step: Step) -> bytes:
        """The request as this side would send it now."""
        return wire_bytes(step, self.variables, self.connection.host, self.keys)

    def _capture(self, step: Step, answer: Answer) -> None:
        for name, element in step.capture.items():
            _, found, rest = answer.body.decode("utf-8", "replace").partition(f"<{element}>")
            self.variables[name] = unescape(rest.partition("<")[0], {"&quot;": '"'}) if found else f"no-{element}"


@dataclass
class Pair:
    """Both sides, and the way around the gateway to the origin behind it."""

    direct: Side
    through: Side
    behind: Side
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def fresh_bucket(self, given: tuple[Step, ...] = ()) -> None:
        """A new bucket of the same name and content at both origins; what was captured is forgotten."""
        bucket = f"case-{next(self.numbers)}"
        for side in (self.direct, self.through, self.behind):
            side.variables = {"bucket": bucket}
        for side in (self.direct, self.behind):
            for step in (put("/{bucket}", b""), *given):
                answer = side.ask(step)
                assert answer.status < 300, f"{step} was refused: {answer}"
        self.through.variables = dict(self.behind.variables)

    def names(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        return self.direct.variables, self.through.variables


@contextmanager
def running_pair(kind: str, directory: Path) -> Iterator[Pair]:
    """Two origins of this kind ("strict" or "moto"), one of them behind a gateway."""
    with ExitStack() as stack:
        urls, keys = _origins(kind, directory, stack)
        yield stack.enter_context(pair_of(urls, keys, directory))


@contextmanager
def pair_of(urls: Sequence[str], keys: KeyPair, directory: Path) -> Iterator[Pair]:
    """A gateway in front of the second of two running origins, which both know this key pair."""
    with ExitStack() as stack:
        config = _config(urls[1], keys)
        if NODES == 1:
            url = stack.enter_context(GatewayProcess(config)).s3_url
        else:
            url = stack.enter_context(one_address(directory, config, NODES)).s3_url
        direct, behind = (Connection(url, awaits_end=False) for url in urls)
        through = Connection(url, awaits_end=True)
        sides = [Side(stack.enter_context(connection), keys) for connection in (direct, through, behind)]
        yield Pair(sides[0], sides[1], sides[2])


def _origins(kind: str, directory: Path, stack: ExitStack) -> tuple[list[str], KeyPair]:
    if kind == "strict":
        strict = [stack.enter_context(StrictOrigin()) for _ in range(2)]
        return [one.endpoint_url for one in strict], KeyPair(ACCESS_KEY_ID, SECRET_ACCESS_KEY)
    return [stack.enter_context(_moto(directory, number)) for number in range(2)], MOTO_KEYS


@contextmanager
def _moto(directory: Path, number: int) -> Iterator[str]:
    """moto's server in a process of its own: two in one process would share their buckets."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    ready, log = re.compile(r"listening on (\d+)"), directory / f"moto-{number}.log"
    process = DemoProcess("moto", ["gateway.demo.bucket"], ready, environment | {"TMPDIR": str(directory)}, log)
    try:
        yield f"http://127.0.0.1:{process.wait_until_ready()[1]}"
    finally:
        process.stop()


def _config(origin_url: str, keys: KeyPair) -> dict[str, dict[str, object]]:
    return {
        "server": {"base_domains": [VIRTUAL_DOMAIN]},
        "origin": {
            "endpoint_url": origin_url,
            "region": "us-east-1",
            "access_key_id": keys.access_key_id,
            "secret_access_key": keys.secret_access_key,
        },
        "cache": {"capacity": "512MiB"},
    }
