"""A setting that is gone, or another, behind a restart: what it has left on disk goes without it.

The table of docs/on-disk-format.md ("What a setting leaves behind") names who clears each of these away.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.serve.test_local_writes import checkpoints, save
from tests.serve.test_writeback import Client, gateway_of
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import eventually

BACK = {"name": "back", "prefix": "s3://bucket/back/"}


@pytest.fixture
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as one:
        one.model.create_bucket("bucket")
        yield one


def gateway(origin: StrictOrigin, directory: Path, *slots: dict[str, Any], **changed: Any) -> GatewayProcess:
    return gateway_of(origin, directory, slots=list(slots), **changed)


def pinned_bytes(one: GatewayProcess) -> int:
    return int(one.status()["cache"]["pinned_bytes"])


def kept(directory: Path) -> list[str]:
    """The prefixes that the file of pins names as kept."""
    try:
        return list(orjson.loads((directory / "blocks" / "PINS").read_bytes()).get("kept", []))
    except FileNotFoundError:
        return []


@pytest.mark.slow
@pytest.mark.parametrize(
    "after",
    [
        [],
        [{**BACK, "write": "through"}],
        [{**BACK, "write": "back"}],
        [{**BACK, "prefix": "s3://bucket/other/", "write": "back", "keep_last": 1}],
        [{**BACK, "write": "back", "keep_last": 1}],
    ],
    ids=["no slot", "a slot that writes through", "no keep_last", "another prefix", "the same"],
)
def test_11_7_what_keep_last_kept_can_be_evicted_when_it_is_gone(
    origin: StrictOrigin, tmp_path: Path, after: list[dict[str, Any]]
) -> None:
    """11.7 Whichever way it goes: with the slot, with its writing back, with its prefix, or alone."""
    directory, stays = tmp_path / "cache", after == [{**BACK, "write": "back", "keep_last": 1}]
    with gateway(origin, directory, {**BACK, "write": "back", "keep_last": 1}) as one:
        client = Client(one)
        client.put("first", b"x")
        save(client, 1, os.urandom(100_000))
        eventually(lambda: checkpoints(one)["step-1"]["state"] == "durable")
        eventually(lambda: checkpoints(one)["step-1"]["kept"])
        eventually(lambda: pinned_bytes(one) > 0)
    with gateway(origin, directory, *after) as one:
        if not stays:
            eventually(lambda: not kept(directory))
            eventually(lambda: pinned_bytes(one) == 0)
        else:
            eventually(lambda: checkpoints(one)["step-1"]["kept"])
            assert (len(kept(directory)), pinned_bytes(one) > 0) == (1, True)


@pytest.mark.slow
def test_files_of_settings_that_are_gone_go_with_the_next_start(origin: StrictOrigin, tmp_path: Path) -> None:
    """The write-back buffer with its reserve, once nothing is in it; what the cache holds of a slot, which the slots
    of its keys have then; scratch of inventories, and what was begun by workers that are no more."""
    directory = tmp_path / "cache"
    indexed = {"name": "data", "prefix": "s3://bucket/data/", "consistency": "immutable", "index": True}
    origin.model.put("bucket", "data/one", b"x" * 10_000)
    with gateway(origin, directory, {**BACK, "write": "back"}, indexed, server=server(3)) as one:
        client = Client(one)
        client.put("first", b"x")
        save(client, 1)
        eventually(lambda: checkpoints(one)["step-1"]["state"] == "durable")
        assert client.ask("GET", "data/one").status_code == 200
        eventually(lambda: used_bytes(one, "data") > 0)
    (directory / "jobs" / "inventories" / "left").mkdir(parents=True)
    left = directory / "blocks" / "partial" / "w2" / "left"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"x")
    with gateway(origin, directory, server=server(1)) as one:
        assert not (directory / "writeback").exists()
        assert not (directory / "jobs" / "inventories").exists()
        assert not left.exists()
        eventually(lambda: used_bytes(one, "default") > 0)
        assert used_bytes(one, "data") == 0
        assert one.status()["indexes"] == []
        assert Client(one).ask("GET", "?prefix=data/").headers["x-forebay-cache"] in ("bypass", "forwarded", "miss")


@pytest.mark.slow
def test_a_slot_of_the_overlay_that_the_file_has_too_can_be_removed(origin: StrictOrigin, tmp_path: Path) -> None:
    """It stays on disk, and each start says so, until somebody deletes it: it was asked for by hand."""
    directory = tmp_path / "cache"
    with gateway(origin, directory) as one:
        slot = {"prefix": "s3://bucket/back/"}
        httpx.put(f"{one.admin_url}/api/v1/slots/back", json=slot, timeout=ANSWER_SECONDS_MAX).raise_for_status()
    with gateway(origin, directory, BACK) as one:
        assert "back" in one.log
        httpx.delete(f"{one.admin_url}/api/v1/slots/back", timeout=ANSWER_SECONDS_MAX).raise_for_status()
    with gateway(origin, directory) as one:
        names = [slot["name"] for slot in one.status()["slots"]]
        assert "back" not in names


def server(workers: int) -> dict[str, Any]:
    return {"workers": workers, "allow_unsigned": True}


def used_bytes(one: GatewayProcess, slot: str) -> int:
    answer = httpx.get(f"{one.admin_url}/metrics", timeout=ANSWER_SECONDS_MAX).raise_for_status()
    found = [
        line for line in answer.text.splitlines() if line.startswith(f'forebay_cache_usage_bytes{{slot="{slot}"}}')
    ]
    return int(float(found[0].rpartition(" ")[2])) if found else 0
