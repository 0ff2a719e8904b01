"""Indexes as the admin port and `forebay status` show them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.admin.app import control_app
from gateway.admin.backends import Backends, StateHolder
from gateway.api.documents import Index
from gateway.cli.looks import show_status
from gateway.config import Settings
from gateway.config.live import LiveSettings
from gateway.jobs.indexing.crawl import IndexStatus
from tests.support.admin_documents import status


class OneIndex:
    """As `jobs.indexing.indexes.Indexes`, of one slot."""

    def __init__(self, progress: IndexStatus, now: float = 1000.0) -> None:
        self._progress = progress
        self._now = now

    def documents(self) -> list[Index]:
        return [self._progress.document(self._now)]


def progress(**more: Any) -> IndexStatus:
    return IndexStatus("data", "s3://b/data/", 60.0, 30.0, **more)


def test_there_are_none_before_the_directory_is_open(tmp_path: Path) -> None:
    """503, and none in the status."""
    lent = Backends()
    app = control_app(LiveSettings(Settings()), StateHolder(), tmp_path, lent)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:9001") as client:
            return await client.get("/api/v1/indexes")

    assert asyncio.run(ask()).status_code == 503
    lent.indexes = OneIndex(progress())  # type: ignore[assignment]
    answer = asyncio.run(ask())
    assert answer.status_code == 200
    assert [one["slot"] for one in answer.json()["indexes"]] == ["data"]


@pytest.mark.parametrize(
    ("known_since", "complete", "age_seconds"), [(950.0, True, 50.0), (930.0, False, 70.0), (None, True, None)]
)
def test_an_index_that_has_become_too_old_is_not_complete(
    known_since: float | None, complete: bool, age_seconds: float | None
) -> None:
    """Though nobody has looked since; what is of unknown age is complete in immutable slots."""
    document = progress(complete=True, known_since=known_since).document(1000.0)
    assert (document.complete, document.age_seconds) == (complete, age_seconds)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (progress(), "index of data: not complete"),
        (progress(state="inventory", inventory="s3://l/m"), "index of data: not complete; reading the inventory"),
        (progress(state="crawling", keys=1234), "index of data: not complete; crawling, 1,234 keys so far"),
        (
            progress(state="crawling", complete=True, known_since=962.0, keys=5, keys_before=9000),
            "index of data: complete, 0:00:38 old; crawling, 5 of about 9,000 keys so far",
        ),
        (
            progress(state="waiting", complete=True, known_since=999.0, keys_before=9000),
            "index of data: complete, 0:00:01 old; 9,000 keys",
        ),
        (
            progress(state="failing", error="the origin answered 403 to LIST", inventory_error="it is of bucket c"),
            "index of data: not complete; the origin answered 403 to LIST; inventory not used: it is of bucket c",
        ),
    ],
)
def test_status_says_how_an_index_stands(found: IndexStatus, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each."""
    show_status(status(indexes=[one.model_dump() for one in OneIndex(found).documents()]))
    assert line in capsys.readouterr().out.splitlines()
