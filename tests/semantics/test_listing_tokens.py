"""Clause 9.3 of docs/semantics.md: continuation tokens, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.origin.origins import xml
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.listing_scenarios import (
    IMMUTABLE,
    LIST,
    TTL,
    another_worker,
    ask,
    names,
    playing,
    token_of,
)
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.faults import AlterBody, on


@pytest.mark.parametrize(
    "query", ["max-keys=-1", "max-keys=a", "max-keys=1.5", "max-keys=3000000000", "encoding-type=b"]
)
async def test_9_3_what_cannot_be_meant_is_refused(tmp_path: Path, query: str) -> None:
    """With InvalidArgument, in both versions."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        for target in (f"/bucket?{query}", f"{LIST}&{query}"):
            answer = await ask(gateway, target)
            assert (answer.status, b"<Code>InvalidArgument</Code>" in answer.body) == (400, True)


async def test_9_3_tokens_survive_a_restart_a_change_of_worker_and_a_change_of_source(tmp_path: Path) -> None:
    """9.3 Every page is asked of another gateway or worker; some answer from the index, some ask the origin."""

    async def pages(gateway: GatewayApp, clock: ManualClock, token: str | None, seen: list[str]) -> str | None:
        async with another_worker(gateway, clock) as other:
            for app in (gateway.app, other):
                more = "" if token is None else f"&continuation-token={token}"
                answer = await ask(gateway, f"{LIST}&max-keys=1&delimiter=/{more}", app=app)
                seen += names(answer)
                if xml(answer.body).findtext("IsTruncated") == "false":
                    return None
                token = token_of(answer)
            return token

    clock, seen, token = ManualClock(), list[str](), None
    async with gateway_app(tmp_path, slots=[TTL], clock=clock, allow_unsigned=True) as gateway:
        origin = gateway.origin
        for key in ("a/1", "a/2", "b", "c/1", "d/1", "e"):
            origin.put("bucket", key, b"")
        await ask(gateway, f"{LIST}&prefix=b")
        token = await pages(gateway, clock, None, seen)
    for _ in range(3):
        async with gateway_app(tmp_path, origin=origin, slots=[TTL], clock=clock, allow_unsigned=True) as gateway:
            if token is not None:
                token = await pages(gateway, clock, token, seen)
    assert (token, seen) == (None, ["a/", "b", "c/", "d/", "e"])


@pytest.mark.parametrize("token", ["nonsense", "1AAAAA", "YS8x", "%00"])
async def test_9_3_a_token_that_is_none_is_refused(tmp_path: Path, token: str) -> None:
    """9.3 InvalidArgument, 400; an empty one is none at all, and echoed."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        answer = await ask(gateway, f"{LIST}&continuation-token={token}")
        assert (answer.status, b"<Code>InvalidArgument</Code>" in answer.body) == (400, True)
        empty = await ask(gateway, f"{LIST}&continuation-token=")
        assert names(empty) == ["a/1", "a/2", "b", "c/1"]
        assert xml(empty.body).findtext("ContinuationToken") == ""


# --- own writes -------------------------------------------------------------------------------------------------------


async def test_9_3_an_origin_that_does_not_list_in_order_is_not_believed(tmp_path: Path) -> None:
    """9.3 A place in its listing would mean nothing."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        swap = AlterBody(lambda body: body.replace(b"<Key>b<", b"<Key>zzz<"))
        gateway.origin.inject(on(), swap, times=None)
        assert (await ask(gateway)).status == 503
