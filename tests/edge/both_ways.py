"""Clients of a gateway's two ways: the short one, of what is prepared and of first reads, and the whole one.

A `Pair` is one gateway with a port for each way. `Twins` are two gateways that differ in nothing but the way, each
before an origin of its own: so they also show what each way asks of the origin, and what it leaves behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from gateway.blocks.plan import holding
from gateway.core.model import ObjectKey
from gateway.edge import prepared
from gateway.edge.access import ConfiguredKeyring, Key
from gateway.edge.prepared import PreparedRequests
from gateway.edge.s3_server import TlsFiles
from gateway.metadata.catalog import BegunHead, ObjectHead
from gateway.metadata.store import CatalogUpdate, CatalogWriter
from gateway.operations.cold_reads import ColdRead
from gateway.origin.client import Origin
from gateway.policy.callers import Callers
from gateway.policy.slots import EVERYTHING, Grant, Prefix
from gateway.s3.requests import encode_path
from gateway.s3.signature_v4 import sign_headers
from gateway.telemetry import metrics
from gateway.telemetry.metric_kinds import Counter as Counted
from tests.origin.spoken_origin import Fault, SpokenOrigin
from tests.origin.told_origin import Reach, ToldOrigin, told_origin
from tests.simulation.virtual_time import VirtualClock
from tests.support.certificates import tls_files
from tests.support.gateway_app import BLOCK_SIZE_BYTES, GatewayApp, gateway_app
from tests.support.memory_origin import MemoryOrigin
from tests.support.serving import PATIENCE_SECONDS, Serving, Wire, serving
from tests.support.set_clock import SetClock
from tests.support.slots import Slot
from tests.support.snapshots import freeze

SIZES = (1, 1000, BLOCK_SIZE_BYTES, 3 * BLOCK_SIZE_BYTES + 17)
SLOTS = (
    Slot("fixed", Prefix.parse("s3://bucket/d/"), consistency="immutable"),
    Slot("aging", Prefix.parse("s3://bucket/t/"), consistency="ttl", metadata_ttl_seconds=60.0),
    Slot("buffered", Prefix.parse("s3://bucket/w/"), consistency="ttl", metadata_ttl_seconds=60.0, write="back"),
    Slot("frozen", Prefix.parse("s3://bucket/s/"), "read-only", "snapshot", snapshot="v1"),
    Slot("asked", Prefix.parse("s3://bucket/y/"), consistency="strict", write="back"),
    Slot("default", Prefix(""), consistency="strict"),
)
FIXED_KEYS = ("d/a", "d/b c", "d/=%", "t/a", "t/b", "w/a", "w/b", "s/a", "s/b", "x/a", "x/b c", "y/a", "y/b")
WAYS = ("fast", "slow")

IDENTITY = re.compile(rb"(x-amz-request-id: |x-amz-id-2: forebay/|date: )[^\r]*\r\n")
BROKEN_OFF = b"a body that was broken off"
ERROR_IDS = re.compile(rb"<(RequestId|HostId|ServerTime)>[^<]*<")


class ChangingKeyring:
    """Whose keys are others from time to time."""

    def __init__(self) -> None:
        self.secrets = {"ALL": "first-secret", "SOME": "second-secret"}
        self.rotations = 0
        self._keys = ConfiguredKeyring(self._made(("d/", "t/")))

    def _made(self, prefixes: tuple[str, ...]) -> list[Key]:
        some = Grant([Prefix.parse(f"s3://bucket/{prefix}") for prefix in prefixes], read_only=True)
        return [Key("ALL", self.secrets["ALL"], None, EVERYTHING), Key("SOME", self.secrets["SOME"], None, some)]

    def change(self, prefixes: tuple[str, ...], *, rotate: bool) -> None:
        if rotate:
            self.rotations += 1
            self.secrets = {name: f"{name}-{self.rotations}" for name in self.secrets}
        self._keys = ConfiguredKeyring(self._made(prefixes))

    def find(self, access_key_id: str, session_token: str | None) -> Key:
        return self._keys.find(access_key_id, session_token)


@dataclass(frozen=True)
class Asked:
    """A request as a client makes it; `style` is how it writes its heads."""

    method: str
    key: str
    fields: dict[str, str]
    query: str = ""
    who: str = "ALL"
    style: str = "botocore"
    body: bytes = b""


def presigned(asked: Asked, secret: str) -> bytes:
    """As botocore makes it, at the time that it takes for now."""
    host = "127.0.0.1:9000"
    query = f"?{asked.query}" if asked.query else ""
    request = AWSRequest(asked.method, f"http://{host}{encode_path('bucket', asked.key)}{query}")
    S3SigV4QueryAuth(Credentials(asked.who, secret), "s3", "us-east-1", 60 if asked.key == "d/a" else 86_400).add_auth(
        request
    )
    lines = [f"{name}: {value}\r\n" for name, value in {"host": host, **asked.fields}.items()]
    return f"{asked.method} {request.url.partition(host)[2]} HTTP/1.1\r\n{''.join(lines)}\r\n".encode("latin-1")


def head_of(asked: Asked, secret: str, now: float) -> bytes:
    if asked.style == "presigned":
        return presigned(asked, secret)
    host = "bucket.s3.local" if asked.style == "host" else "127.0.0.1:9000"
    path = encode_path("bucket", asked.key)
    path = path.removeprefix("/bucket") if asked.style == "host" else path
    fields = {"host": host, **asked.fields}
    query = [tuple(pair.split("=")) for pair in asked.query.split("&")] if asked.query else []
    added, _ = sign_headers(
        asked.method,
        path,
        query,  # type: ignore[arg-type]
        fields,
        payload_hash=hashlib.sha256(asked.body).hexdigest(),
        access_key_id=asked.who,
        secret=secret,
        session_token=None,
        region="us-east-1",
        now=now,
    )
    values = {**fields, **added, "user-agent": f"client ({asked.style})"}
    if asked.body:
        values["content-length"] = str(len(asked.body))
    names = sorted(values) if asked.style == "botocore" else sorted(values, reverse=True)
    lines = [f"{name.title() if asked.style == 'go' else name}: {values[name]}\r\n" for name in names]
    target = f"{path}?{asked.query}" if asked.query else path
    return f"{asked.method} {target} HTTP/1.1\r\n{''.join(lines)}\r\n".encode("latin-1") + asked.body


@dataclass(frozen=True)
class Certificate:
    """Of both ports, and who trusts it."""

    files: TlsFiles
    trusting: ssl.SSLContext


def certificate_in(directory: Path) -> Certificate:
    authority, trusting = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(trusting)
    return Certificate(tls_files(authority.issue_cert("localhost"), directory), trusting)


Answer = tuple[bytes, bytes]
"""Head and body."""


@dataclass
class Talker:
    """A client with a connection to each of some ports. `options` are the connections'."""

    ports: Mapping[str, Serving]
    options: Mapping[str, Any]
    wires: dict[str, Wire] = field(default_factory=dict, init=False)

    async def said(self, way: str, raw: bytes) -> Answer | None:
        """Return the answer; BROKEN_OFF for a body that is not whole. None: the connection was closed without one."""
        wire = self.wires.get(way)
        if wire is None:
            wire = self.wires[way] = await self.ports[way].connect(**self.options)
        await wire.say(raw)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                head = await wire.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.leave(way)
            return None
        fields = {
            name.decode(): value.decode("latin-1")
            for name, _, value in (f.partition(b": ") for f in head.split(b"\r\n"))
        }
        is_bodiless = raw.startswith(b"HEAD ") or head[9:12] in (b"304", b"204")
        try:
            body = b"" if is_bodiless else await wire.body(fields)
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.leave(way)
            return head, BROKEN_OFF
        if "connection" in fields:
            await self.leave(way)
        return head, body

    async def leave(self, way: str) -> None:
        if way in self.wires:
            await self.wires.pop(way).close()


@dataclass
class Pair(Talker):
    """Both ways of one gateway."""

    gateway: GatewayApp
    clock: SetClock
    keyring: ChangingKeyring

    @property
    def fast(self) -> Serving:
        return self.ports["fast"]

    @property
    def slow(self) -> Serving:
        return self.ports["slow"]

    async def ask(self, asked: Asked, way: str = "slow") -> Answer | None:
        return await self.said(way, head_of(asked, self.keyring.secrets[asked.who], self.clock.now()))

    async def read(self, key: str, *, times: int = 1, method: str = "GET") -> bytes:
        """Return the body of the last of so many answers by the short way."""
        answer = None
        for _ in range(times):
            answer = await self.settled(self.ask(Asked(method, key, {}), "fast"))
        assert answer is not None
        return answer[1]

    async def settled(self, saying: Awaitable[Answer | None]) -> Answer | None:
        """Wait for what is being learned first: until then, answers have other fields."""
        await settle(self.gateway)
        return await saying


async def settle(gateway: GatewayApp) -> None:
    await gateway.catalog.settle()
    await gateway.blocks.settle()


@asynccontextmanager
async def pair(
    directory: Path, rng: random.Random, *, sizes: tuple[int, ...] = SIZES, certificate: Certificate | None = None
) -> AsyncIterator[Pair]:
    clock, keyring = SetClock(), ChangingKeyring()
    async with gateway_app(directory, slots=SLOTS, clock=clock, keyring=keyring, writeback=True) as gateway:
        await fill(gateway, rng, sizes)
        async with both_ports(gateway, clock, keyring, certificate) as both:
            yield both


async def fill(gateway: GatewayApp, rng: random.Random, sizes: Sequence[int]) -> None:
    for key in FIXED_KEYS:
        gateway.origin.put("bucket", key, rng.randbytes(rng.choice(sizes)), {"content-type": "image/jpeg"})
    await freeze(gateway, "v1", "s3://bucket/s/")


@asynccontextmanager
async def both_ports(
    gateway: GatewayApp, clock: SetClock, keyring: ChangingKeyring, certificate: Certificate | None = None
) -> AsyncIterator[Pair]:
    async with port_of(gateway, "fast", certificate) as fast, port_of(gateway, "slow", certificate) as slow:
        yield Pair({"fast": fast, "slow": slow}, options_of(certificate), gateway, clock, keyring)


@asynccontextmanager
async def port_of(gateway: GatewayApp, way: str, certificate: Certificate | None) -> AsyncIterator[Serving]:
    requests = PreparedRequests(gateway.app) if way == "fast" else None
    async with serving(
        gateway.app, prepared=requests, tls=certificate.files if certificate is not None else None
    ) as port:
        yield port
    if requests is not None:
        requests.close()  # nothing is kept back that was counted


def options_of(certificate: Certificate | None) -> dict[str, Any]:
    return {} if certificate is None else {"ssl": certificate.trusting, "server_hostname": "localhost"}


def lay_counts(ports: Mapping[str, Serving]) -> None:
    """Have the short way count what it keeps back."""
    prepared = ports["fast"].server._prepared
    assert prepared is not None
    prepared._lay()


# Two gateways


@dataclass
class Twin:
    """A gateway, and its origin."""

    gateway: GatewayApp
    origin: SpokenOrigin
    client: ToldOrigin

    async def settle(self) -> None:
        assert self.gateway.warm_ups is not None
        await self.gateway.warm_ups.settle()
        await settle(self.gateway)
        await self.origin.settle()
        await settle(self.gateway)


def put(key: str, content: bytes, twin: Twin) -> None:
    twin.origin.memory.put("bucket", key, content)


class Told(NamedTuple):
    """What came of a request: the answer, what the origin was asked, and what the gateway has counted and knows."""

    answer: object
    asked: object
    attempts: object
    counts: object
    known: object

    @property
    def is_broken_off(self) -> bool:
        return isinstance(self.answer, tuple) and self.answer[1] == BROKEN_OFF


@dataclass
class Twins(Talker):
    """Both ways, each of a gateway of its own."""

    twins: Mapping[str, Twin]
    clock: SetClock
    keyring: ChangingKeyring
    seen: Counter[str]
    """What there was of each; also answers by the short way, by their kinds."""

    async def ask(self, asked: Asked, fault: Fault | None = None) -> bytes:
        """Ask both, as `compare`."""
        raw = head_of(asked, self.keyring.secrets[asked.who], self.clock.now())
        return await self.compare(raw, asked.key, fault)

    async def compare(self, raw: bytes, key: str, fault: Fault | None = None) -> bytes:
        """Say a request to both, and compare what comes of it. Return the status."""
        fast, slow = [await self._told(way, raw, key, fault) for way in WAYS]
        if fast.is_broken_off and slow.is_broken_off:
            assert fast.answer == slow.answer
            await self._realign(ObjectKey("bucket", key))
            return b""
        for name, one, other in zip(Told._fields, fast, slow, strict=True):
            assert one == other, f"{name} of {raw!r} with {fault}:\n{one}\n{other}"
        return fast.answer[0][9:12] if isinstance(fast.answer, tuple) else b""

    async def _realign(self, key: ObjectKey) -> None:
        """Forget an object: how far its blocks had come when its answer broke off is chance."""
        numbers = max(next(twin.origin.memory._face._numbers) for twin in self.twins.values())
        for twin in self.twins.values():
            twin.origin.memory._face._numbers = count(numbers)
            await twin.gateway.blocks.invalidate(key)
            twin.gateway.catalog.forget(key)
            await twin.settle()

    async def _told(self, way: str, raw: bytes, key: str, fault: Fault | None) -> Told:
        twin = self.twins[way]
        twin.origin.begin(replace(fault) if fault is not None else None)
        attempts, outcomes = len(twin.client.attempts), len(twin.client.outcomes)
        before = counts()
        answer = await self.said(way, raw)
        await self.ports[way].requests(0)
        await twin.settle()
        lay_counts(self.ports)
        changes = {name: value - before.get(name, 0.0) for name, value in counts().items()}
        if answer is not None:
            answer = IDENTITY.sub(b"", answer[0]), ERROR_IDS.sub(b"", answer[1])
        return Told(
            answer,
            sorted(twin.origin.heard, key=repr),
            (
                sorted((one.method, str(one.status), one.slot, one.purpose) for one in twin.client.attempts[attempts:]),
                twin.client.outcomes[outcomes:],
            ),
            {name: value for name, value in changes.items() if value},
            known(twin.gateway, key),
        )

    async def change(self, do: Callable[[Twin], object]) -> None:
        for way in WAYS:
            twin = self.twins[way]
            twin.origin.begin(None)
            found = do(twin)
            if isinstance(found, Awaitable):
                await found
            await twin.settle()


_NOT_COMPARED = {metrics.PREPARED_REQUESTS}


def counts() -> dict[tuple[str, ...], float]:
    """All counters but those of time."""
    counters = [one for one in metrics.DECLARED if isinstance(one, Counted) and one not in _NOT_COMPARED]
    return {
        (one.name, *labels): value.get()
        for one in counters
        if one.unit != "seconds"
        for labels, value in list(one.kept().items())
    }


def known(gateway: GatewayApp, name: str) -> list[object]:
    """Return what catalog and index know of an object, and of its bucket."""
    key, catalog, blocks = ObjectKey("bucket", name), gateway.catalog, gateway.blocks
    held = holding(blocks._dependencies, key)
    sizes = {kind: list(sizes) for kind, sizes in catalog.sizes_seen._kinds.items()}
    return [catalog._lookup(key), catalog.last_learned(key), catalog.habits("bucket"), sizes, catalog._refused, held]


def _land(writer: CatalogWriter, update: CatalogUpdate) -> None:
    """Write at once: what is asked next must not race with the catalog's thread."""
    assert writer._store is not None
    writer._store.land([update])


WILLING = {"_TRIED_ONE_IN": 1, "_OF_CONNECTION_MAX": 64, "_LEARNED_BY_CONNECTION_MAX": 10_000}
"""Bounds with which the short way is tried each time."""


@contextmanager
def short_answers() -> Iterator[Counter[str]]:
    """Have the short way tried each time. Count its answers, and what it leaves to the whole one."""
    taken = Counter[str]()
    cold, asked, sent = ColdRead.answer, BegunHead.answer, PreparedRequests.sent

    def cold_answer(read: ColdRead) -> Any:
        answer = cold(read)
        taken["cold" if answer is not None else "cold, left"] += 1
        return answer

    def asked_answer(begun: BegunHead) -> Any:
        answer = asked(begun)
        taken["asked" if isinstance(answer, ObjectHead) else "asked, left"] += 1
        return answer

    def sent_answer(requests: PreparedRequests, *arguments: Any) -> None:
        taken["prepared"] += 1
        sent(requests, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ColdRead, "answer", cold_answer)
        patch.setattr(BegunHead, "answer", asked_answer)
        patch.setattr(PreparedRequests, "sent", sent_answer)
        patch.setattr(CatalogWriter, "add", _land)
        for name, value in WILLING.items():
            patch.setattr(prepared, name, value)
        yield taken


Through = Callable[[Origin], Origin]


@asynccontextmanager
async def twins(
    directory: Path,
    seed: int,
    *,
    certificate: Certificate | None = None,
    slots: Sequence[Slot] = SLOTS,
    through: Through = lambda origin: origin,
    callers: Callable[[], Callers] | None = None,
    sizes: Sequence[int] = SIZES,
    reach: Reach | None = None,
    **of_origin: object,
) -> AsyncIterator[Twins]:
    """Both gateways with the same objects. `through` stands between a gateway and its origin; `reach` and
    `of_origin` are as of `told_origin`."""
    clock, keyring, made = SetClock(), ChangingKeyring(), dict[str, tuple[Twin, Serving]]()
    clock.stop()
    loop = asyncio.get_running_loop()
    reach = replace(reach or Reach(), patience_seconds=600.0, clock=lambda: VirtualClock(loop))
    given: dict[str, Any] = {
        "max_attempts": 2,
        "backoff_base_seconds": 0.001,
        "stall_timeout_seconds": 1.0,
        **of_origin,
    }
    async with AsyncExitStack() as stack:
        taken = stack.enter_context(short_answers())
        for way in WAYS:
            memory = MemoryOrigin(clock)
            origin = SpokenOrigin(memory)
            client = await stack.enter_async_context(told_origin(origin, reach, **given))
            origin.follow(client)
            gateway = await stack.enter_async_context(
                gateway_app(
                    directory / way,
                    origin=memory,
                    through=through(client.origin),
                    slots=slots,
                    clock=clock,
                    keyring=keyring,
                    writeback=True,
                )
            )
            if callers is not None:
                gateway.app.callers = callers()
            await fill(gateway, random.Random(seed), sizes)
            port = await stack.enter_async_context(port_of(gateway, way, certificate))
            made[way] = Twin(gateway, origin, client), port
        ports = {way: port for way, (_, port) in made.items()}
        yield Twins(
            ports, options_of(certificate), {way: twin for way, (twin, _) in made.items()}, clock, keyring, taken
        )
