"""Fills on their way into the catalog: alone at once, many together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast

import lmdb
import pytest

from gateway.core.model import ObjectKey
from gateway.metadata import store as landing
from gateway.metadata.entries import CatalogEntry, ObservedAt
from gateway.metadata.store import LANDED_PER_TRANSACTION, WAITING_MAX, CatalogStore, CatalogUpdate, CatalogWriter
from gateway.telemetry import metrics


class Store:
    """Notes what is written together; fails where it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.fails = False

    def land(self, fills: Sequence[CatalogUpdate]) -> None:
        if self.fails:
            raise lmdb.DiskError("full")
        self.batches.append([fill.key.key for fill in fills])


def fill(number: int) -> CatalogUpdate:
    return CatalogUpdate(ObjectKey("bucket", f"k{number}"), CatalogEntry(ObservedAt(0, time.monotonic(), 1)))


def new() -> tuple[CatalogWriter, Store]:
    store = Store()
    return CatalogWriter(cast(CatalogStore, store)), store


@pytest.mark.slow
async def test_who_comes_alone_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is written at once; what comes behind it in a moment, in one transaction."""
    monkeypatch.setattr(landing, "GATHERING_SECONDS", 0.5)
    one, store = new()
    one.add(fill(0))
    while not store.batches:  # noqa: ASYNC110 - a thread brings it about
        await asyncio.sleep(0)
    for number in range(1, 6):
        one.add(fill(number))
        await asyncio.sleep(0)
    await one.settle()
    assert store.batches == [["k0"], ["k1", "k2", "k3", "k4", "k5"]]


async def test_a_crowd_is_written_in_short_transactions_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is gathered where enough waits already; all of it, in order."""
    monkeypatch.setattr(landing, "GATHERING_SECONDS", 0.01)
    one, store = new()
    count = 5 * LANDED_PER_TRANSACTION + 3
    for number in range(count):
        one.add(fill(number))
    started = time.monotonic()
    await one.settle()
    assert [key for batch in store.batches for key in batch] == [f"k{number}" for number in range(count)]
    assert max(map(len, store.batches)) == LANDED_PER_TRANSACTION
    assert len(store.batches) == 6
    assert time.monotonic() - started < 5
    assert metrics.CATALOG_NOT_KEPT.value() == 0


async def test_what_is_too_much_or_does_not_go_to_disk_is_counted() -> None:
    """Its objects are asked for again, and it shows."""
    one, store = new()
    for number in range(WAITING_MAX + 7):
        one.add(fill(number))
    assert metrics.CATALOG_NOT_KEPT.value() == 7
    store.fails = True
    await one.settle()
    assert metrics.CATALOG_NOT_KEPT.value() == WAITING_MAX + 7
    store.fails = False
    one.add(fill(0))
    await one.settle()
    assert store.batches == [["k0"]]
