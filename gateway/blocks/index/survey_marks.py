"""Which directories of data files the index has still to be told of (upkeep/survey.py). Index thread only."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.blocks.index import records, tables
from gateway.blocks.index.index import BlockIndex

_FINGERPRINT = b"slots"


def slots_are(index: BlockIndex, fingerprint: bytes) -> bool:
    """Whether files are on the accounts that slots with this fingerprint give them, or will be after a survey."""
    with index.reading() as ledger:
        return tables.get(ledger.transaction, ledger.tables.counters, _FINGERPRINT) == fingerprint


def begin_survey(index: BlockIndex, fingerprint: bytes, unknown_bytes: Mapping[int, int], first_tick: int = 0) -> None:
    """Have directories surveyed; `unknown_bytes` says of each what lies in it beside what the index knows.

    One that waits for a survey already keeps what was said of it.
    """
    with index.writing() as ledger:
        for number, count in unknown_bytes.items():
            packed = records.pack_counter(count)
            ledger.transaction.put(bytes([number]), packed, db=ledger.tables.survey, overwrite=False)
        ledger.transaction.put(_FINGERPRINT, fingerprint, db=ledger.tables.counters)
        ledger.begin_ticks_at(max(first_tick, ledger.next_tick(0)))


def unsurveyed(index: BlockIndex) -> list[int]:
    """The directories that are still to be surveyed."""
    with index.reading() as ledger:
        return [key[0] for key in tables.keys(ledger.transaction, ledger.tables.survey)]


def surveyed(index: BlockIndex, directory: int) -> None:
    """A directory holds nothing that the index does not know."""
    with index.writing() as ledger:
        ledger.transaction.delete(bytes([directory]), db=ledger.tables.survey)
