"""The short way by whatever leads to an origin, and under whatever limits: with the same results, or not taken."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme

from gateway.disk.pem import PemFile
from gateway.origin import signing
from gateway.origin.client import KeyPair
from gateway.origin.signing import StaticCredentials
from gateway.origin.traffic_meter import MeteredOrigin, OriginMeter
from gateway.policy.callers import CallerClass, Callers, CallersPlan, Limits
from tests.edge.both_ways import Asked, Twins, put, twins
from tests.origin.test_proxies import tunnelling
from tests.origin.told_origin import Reach
from tests.support.manual_clock import ManualClock


async def read(both: Twins, prefix: str, **fields: str) -> None:
    """First reads, and reads of a `strict` slot, by the same kind of head."""
    fields = {name.replace("_", "-"): value for name, value in fields.items()}
    for number in range(4):
        key, content = f"d/{prefix}{number}", f"{number}".encode() * 500
        await both.change(partial(put, key, content))
        for asked in (Asked("GET", key, fields), Asked("GET", "x/a", fields), Asked("GET", "x/a", fields)):
            assert await both.ask(asked) == b"200"


def took_short_way(both: Twins) -> bool:
    """Whether both kinds of reads did, or none."""
    cold, asked = both.seen["cold"] > 0, both.seen["asked"] > 0
    assert cold == asked, both.seen
    return cold


@dataclass
class Lent:
    """A source that lends a pair, and another one each time where it `renews`."""

    renews: bool
    _lent: int = 0

    async def current(self) -> KeyPair:
        self._lent += self.renews
        return KeyPair(f"AKIA{self._lent}", "secret", f"token-{self._lent}")

    __hash__ = object.__hash__


@dataclass
class Gate:
    """Limits that let everything pass at once, or after a wait."""

    is_open: bool
    passed: list[object] = field(default_factory=list)

    def passes(self, *what: object) -> bool:
        self.passed += what
        return self.is_open

    async def wait(self, *_: object) -> None:
        await asyncio.sleep(0)

    async def take(self, *_: object) -> tuple[float, float]:
        await asyncio.sleep(0)
        return 0.0, 0.0

    def charge(self, *_: object) -> None: ...
    def refused(self, *_: object) -> None: ...
    def answered(self, *_: object) -> None: ...
    def slowed(self, *_: object) -> None: ...
    def limiter(self, *_: object) -> Gate:
        return self


def limited_callers(*limited: str, agent: str | None = None) -> Callable[[], Callers]:
    classes = [CallerClass("class", Limits(5), product=agent)] if agent is not None else []
    plan = CallersPlan([(name, Limits(5)) for name in limited], classes, 5.0)
    return lambda: Callers(plan, ManualClock())


TEMPORARY = KeyPair("ASIA", "secret", "token")
REACHED: Mapping[str, tuple[bool, dict[str, Any]]] = {
    "a pair of temporary keys": (
        True,
        {"reach": Reach(credentials=lambda: StaticCredentials(KeyPair("A", "s", "token")))},
    ),
    "a forward proxy": (True, {"reach": Reach(url="http://origin.test"), "proxy": "http://u:p@127.0.0.1:{port}"}),
    "virtual hosts": (
        True,
        {
            "reach": Reach(url="http://origin.test"),
            "proxy": "http://127.0.0.1:{port}",
            "addressing_style": "virtual",
        },
    ),
    "a rate with room": (True, {"reach": Reach(rates=Gate(True))}),
    "a rate without room": (False, {"reach": Reach(rates=Gate(False))}),
    "a ceiling with room": (True, {"through": lambda origin: MeteredOrigin(origin, OriginMeter(Gate(True)))}),
    "others are limited": (True, {"callers": limited_callers("SOME")}),
    "the caller is limited": (False, {"callers": limited_callers("ALL")}),
    "its class is limited": (False, {"callers": limited_callers(agent="client")}),
}


@pytest.mark.parametrize("name", REACHED)
async def test_it_is_taken_or_not(tmp_path: Path, name: str) -> None:
    is_short, options = REACHED[name]
    async with twins(tmp_path, 1, sizes=(1000,), **options) as both:
        await read(both, "a")
        assert took_short_way(both) is is_short


async def test_bytes_without_room_under_a_ceiling_wait_on_the_whole_way(tmp_path: Path) -> None:
    """They have come, and are not asked for again."""
    through = lambda origin: MeteredOrigin(origin, OriginMeter(Gate(False)))  # noqa: E731
    async with twins(tmp_path, 1, sizes=(1000,), through=through) as both:
        await read(both, "a")
        assert both.seen["cold"] == 0 < both.seen["cold, left"]
        assert both.seen["asked"] > 0, "a HEAD has no bytes"


@pytest.mark.parametrize("tunnel", [False, True], ids=["directly", "through a tunnel"])
async def test_an_origin_with_a_certificate_of_its_own_authority(tmp_path: Path, tunnel: bool) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    bundle = PemFile(tmp_path / "ca.pem", authority.cert_pem.bytes())
    reach, heads = Reach(url="https://127.0.0.1:{port}", tls=context), list[bytes]()
    async with tunnelling(heads, b"HTTP/1.1 200 Connection established\r\n\r\n") as proxy:
        options: dict[str, Any] = {"proxy": proxy} if tunnel else {}
        async with twins(tmp_path, 1, sizes=(1000,), reach=reach, ca_bundle=bundle, **options) as both:
            await read(both, "a")
            assert took_short_way(both)
    assert len(heads) == 2 * tunnel


@pytest.mark.parametrize("renews", [False, True])
async def test_a_pair_that_is_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renews: bool) -> None:
    """It is believed for a while. Then the next one is waited for, and signs."""
    monkeypatch.setattr(signing, "_BELIEVED_SECONDS", 0.0 if renews else 3600.0)
    async with twins(tmp_path, 1, sizes=(1000,), reach=Reach(credentials=lambda: Lent(renews))) as both:
        await read(both, "a")
        assert took_short_way(both) is not renews


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "is_short"),
    [
        ({"x_amz_checksum_mode": "ENABLED"}, True),
        ({"x_amz_request_payer": "requester"}, False),
        ({"x_amz_expected_bucket_owner": "123456789012"}, False),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
async def test_fields_that_the_origin_judges(tmp_path: Path, fields: dict[str, str], is_short: bool) -> None:
    """They go along with each question. Where they ask for more than checksums, no head with them is prepared."""
    async with twins(tmp_path, 1, sizes=(1000,)) as both:
        await read(both, "a", **fields)
        await read(both, "b", **fields)
        await read(both, "c", **fields)
        assert took_short_way(both) is is_short
