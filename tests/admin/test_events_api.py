"""Events over the admin port: who may, what is refused, what is answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from gateway.admin.app import control_app, describe
from gateway.admin.backends import Backends, StateHolder
from gateway.admin.jobs import DOCUMENT_BYTES_MAX
from gateway.config import AdminSettings, Settings
from gateway.config.live import LiveSettings
from gateway.s3.events import ObjectEvent
from gateway.telemetry.metrics import ORIGIN_EVENTS

TOKEN = "a-token-of-sixteen-characters-or-more"
JSON = {"content-type": "application/json"}


class Recorded:
    """Applies events by taking note of them; those of the bucket `frozen` it leaves alone."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    async def apply(self, events: Sequence[ObjectEvent]) -> list[str | None]:
        self.keys += [event.key for event in events if event.bucket != "frozen"]
        return ["the slot is frozen" if event.bucket == "frozen" else None for event in events]

    async def forget_bucket(self, bucket: str) -> None:
        raise AssertionError(bucket)

    forget_elsewhere = forget_bucket


Scenario = Callable[[httpx.AsyncClient, Recorded], Awaitable[None]]


def play(tmp_path: Path, scenario: Scenario, *, token: str | None = None, is_open: bool = True) -> None:
    async def run() -> None:
        recorded = Recorded()
        settings = Settings(admin=AdminSettings(token=SecretStr(token) if token else None))
        lent = Backends(changes=recorded if is_open else None)
        app = control_app(LiveSettings(settings), StateHolder(), tmp_path, lent)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:9001") as client:
            await scenario(client, recorded)

    asyncio.run(run())


def record(key: str, bucket: str = "bucket") -> dict[str, Any]:
    return {
        "eventSource": "aws:s3",
        "eventName": "ObjectCreated:Put",
        "s3": {"bucket": {"name": bucket}, "object": {"key": key}},
    }


async def post(client: httpx.AsyncClient, document: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    return await client.post("/api/v1/events", content=content, headers=headers or JSON)


def test_each_event_has_its_result(tmp_path: Path) -> None:
    """Applied, ignored and malformed ones side by side, in order, as described and as counted."""

    async def scenario(client: httpx.AsyncClient, recorded: Recorded) -> None:
        before = ORIGIN_EVENTS.value("applied")
        answer = await post(client, {"Records": [record("a%2Fb+c"), record("x", "frozen"), record(""), record("d")]})
        document = answer.json()
        assert answer.status_code == 200
        assert recorded.keys == ["a/b c", "d"]
        assert [one["outcome"] for one in document["results"]] == ["applied", "ignored", "malformed", "applied"]
        assert (document["applied"], document["ignored"], document["malformed"]) == (2, 1, 1)
        assert document["results"][1]["why"] == "the slot is frozen"
        assert document["results"][2]["place"] == "the document.Records[2].s3.object.key"
        described = describe()["paths"]["/api/v1/events"]["post"]["responses"]["200"]["content"]["application/json"]
        assert set(document) == set(described["schema"]["properties"])
        assert {name for one in document["results"] for name in one} == set(
            described["schema"]["properties"]["results"]["items"]["properties"]
        )
        assert ORIGIN_EVENTS.value("applied") == before + 2

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("document", "word"),
    [
        (b"no", "the document is not JSON"),
        ({"Records": [record("")]}, "the document.Records[0].s3.object.key"),
        (b" " * (DOCUMENT_BYTES_MAX + 1), "longer than"),
    ],
)
def test_a_document_of_nothing_but_mistakes_is_refused(tmp_path: Path, document: Any, word: str) -> None:
    """400 says where."""

    async def scenario(client: httpx.AsyncClient, recorded: Recorded) -> None:
        answer = await post(client, document)
        assert answer.status_code == 400
        assert word in answer.json()["error"]
        assert recorded.keys == []

    play(tmp_path, scenario)


def test_sns_confirmations_are_answered_and_followed_nowhere(tmp_path: Path) -> None:
    """SNS sends text/plain and a header of its own; no URL is ever fetched."""

    async def scenario(client: httpx.AsyncClient, recorded: Recorded) -> None:
        headers = {"content-type": "text/plain; charset=UTF-8", "x-amz-sns-message-type": "SubscriptionConfirmation"}
        document = {"Type": "SubscriptionConfirmation", "SubscribeURL": "http://127.0.0.1:1/", "Message": "…"}
        answer = await post(client, document, headers)
        assert (answer.status_code, answer.json()["ignored"]) == (200, 1)
        assert "confirm it yourself" in answer.json()["results"][0]["why"]

    play(tmp_path, scenario)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_web_page_could_send_is_refused(tmp_path: Path, content_type: str) -> None:
    """415 for types that browsers send to other sites without asking."""

    async def scenario(client: httpx.AsyncClient, recorded: Recorded) -> None:
        answer = await post(client, {"Records": [record("a")]}, {"content-type": content_type})
        assert (answer.status_code, recorded.keys) == (415, [])

    play(tmp_path, scenario)


def test_the_token_is_asked_for(tmp_path: Path) -> None:
    """As for everything that changes something; so is a host of this machine without one."""

    async def with_token(client: httpx.AsyncClient, recorded: Recorded) -> None:
        assert (await post(client, {"Records": [record("a")]})).status_code == 401
        answer = await post(client, {"Records": [record("a")]}, JSON | {"authorization": f"Bearer {TOKEN}"})
        assert (answer.status_code, recorded.keys) == (200, ["a"])

    async def without(client: httpx.AsyncClient, recorded: Recorded) -> None:
        answer = await post(client, {"Records": [record("a")]}, JSON | {"host": "evil.example:9001"})
        assert (answer.status_code, recorded.keys) == (403, [])

    play(tmp_path, with_token, token=TOKEN)
    play(tmp_path, without)


def test_before_the_directory_is_open_it_is_to_be_sent_again(tmp_path: Path) -> None:
    """503: SNS, SQS and EventBridge try again."""

    async def scenario(client: httpx.AsyncClient, recorded: Recorded) -> None:
        assert (await post(client, {"Records": [record("a")]})).status_code == 503

    play(tmp_path, scenario, is_open=False)
