"""LIST where a part of what is asked for is frozen by snapshots; where all of it is, the origin is asked nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

from gateway.errors import SnapshotUnusable, StoreUnavailable
from gateway.metadata.listing.index import Found
from gateway.metadata.listing.pages import Keys, Listed, ListRequest, Page, take
from gateway.metadata.listing.ranges import Bound
from gateway.metadata.listing.records import pack, template_of, templates_of, with_template
from gateway.metadata.snapshots.registry import OpenSnapshot, unusable
from gateway.operations.exchange import Exchange
from gateway.operations.frozen.mixing import Mixing
from gateway.operations.frozen.places import Part, before, parts
from gateway.operations.list_objects import Listing, ListOutcome, list_reply, origin_page, wanted_of
from gateway.operations.plain import is_plain
from gateway.operations.reply import Answer, Reply
from gateway.policy.slots import Slot
from gateway.s3.error_codes import s3_error
from gateway.s3.list_query import ListQuery, list_query
from gateway.s3.list_result import EntryTemplate, ListedEntry, ListedPage, PageChain

_COSTS_NOTHING = frozenset({"x-amz-request-payer"})


class _Frozen(NamedTuple):
    """A LIST, and what of the bucket it is about."""

    listing: Listing
    parts: Sequence[Part]
    slots: Sequence[Slot]


def list_frozen(exchange: Exchange) -> Answer:
    """The page, whichever version and parameters; 501 for what only the origin could judge."""
    request = exchange.request
    if not is_plain(request, besides=_COSTS_NOTHING):
        raise s3_error("NotImplemented", "A part of this listing is frozen by a snapshot, which knows no such header.")
    query = list_query(request)
    frozen = _frozen(exchange, query, wanted_of(query))
    shelf = exchange.services.snapshots
    shelved = [one for slot in frozen.slots if (one := shelf.of(slot)) is not None]
    if _is_mixed(frozen) or len(shelved) < len(frozen.slots):
        return _answered(frozen)
    return list_reply(frozen.listing, _of_one(frozen, shelved), "hit")


async def frozen_page(exchange: Exchange, query: ListQuery, wanted: ListRequest) -> tuple[Found, ListOutcome]:
    """A page of what is frozen in part or wholly, and how it came about."""
    return await _page(_frozen(exchange, query, wanted))


def _frozen(exchange: Exchange, query: ListQuery, wanted: ListRequest) -> _Frozen:
    bucket = exchange.request.bucket or ""
    found = parts(exchange.services.slots, bucket, wanted.start, max(wanted.start, wanted.stop))
    slots = {part.slot.name: part.slot for part in found if part.slot is not None}
    return _Frozen(Listing(exchange, bucket, query, wanted, Bound(0.0, 0.0)), found, tuple(slots.values()))


def _is_mixed(frozen: _Frozen) -> bool:
    return any(part.slot is None for part in frozen.parts) or len(frozen.slots) > 1


async def _answered(frozen: _Frozen) -> Reply:
    found, outcome = await _page(frozen)
    return list_reply(frozen.listing, found, outcome)


async def _page(frozen: _Frozen) -> tuple[Found, ListOutcome]:
    shelf = frozen.listing.exchange.services.snapshots
    shelved = [shelf.of(slot) or await shelf.opened(slot) for slot in frozen.slots]
    return await _mixed(frozen, shelved) if _is_mixed(frozen) else (_of_one(frozen, shelved), "hit")


def _of_one(frozen: _Frozen, shelved: Sequence[OpenSnapshot]) -> Found:
    if not shelved:
        return Found(Page(), ())  # nothing can lie where it begins
    snapshot, wanted = shelved[0].snapshot, frozen.listing.wanted
    try:
        with snapshot.data.keys() as keys:
            page = take(keys, wanted, wanted.stop)
            if page is None:
                raise SnapshotUnusable("a page could not be taken from it")
        check_templates(page.keys, snapshot.data.templates)
    except (StoreUnavailable, SnapshotUnusable) as error:
        raise unusable(shelved[0].manifest.name, error) from error
    return Found(page, snapshot.data.templates)


def check_templates(listed: Sequence[Listed], templates: Sequence[EntryTemplate]) -> None:
    """SnapshotUnusable when a record names a template that is not there."""
    if max(templates_of(listed), default=-1) >= len(templates):
        raise SnapshotUnusable("a record names a template that is not there")


async def _mixed(frozen: _Frozen, shelved: Sequence[OpenSnapshot]) -> tuple[Found, ListOutcome]:
    """Of several snapshots, or of what is frozen and what is not."""
    listing, templates = frozen.listing, list[EntryTemplate]()
    with ExitStack() as stack:
        readers = {}
        for slot, one in zip(frozen.slots, shelved, strict=True):
            stack.enter_context(listing.exchange.services.snapshots.holding(one))
            readers[slot.name] = _Renumbering(one, len(templates)).read
            templates += one.snapshot.data.templates
        numbers = {template: number for number, template in enumerate(templates)}

        def numbered(entry: ListedEntry) -> Listed:
            number = numbers.setdefault(entry.template, len(templates))
            if number == len(templates):
                templates.append(entry.template)
            return entry.key, pack(entry, number)

        async def ask(place: bytes, wanted: ListRequest) -> ListedPage:
            return await _told(listing, place, wanted)

        page = await Mixing(listing.wanted, ask, readers, numbered).fill(frozen.parts)
    outcome: ListOutcome = "partial" if any(part.slot is None for part in frozen.parts) else "hit"
    return Found(page, templates), outcome


class _Renumbering:
    """A snapshot's keys, the numbers of their templates counted on from `first`."""

    def __init__(self, shelved: OpenSnapshot, first: int) -> None:
        self._shelved = shelved
        self._first = first

    def read(self, start: bytes, stop: bytes, count: int) -> list[Listed]:
        """S3Error when the snapshot turns out to be damaged."""
        data = self._shelved.snapshot.data
        try:
            with data.keys() as keys:
                found = _read(keys, start, stop, count)
            check_templates(found, data.templates)
        except (StoreUnavailable, SnapshotUnusable) as error:
            raise unusable(self._shelved.manifest.name, error) from error
        return [(key, with_template(record, self._first + template_of(record))) for key, record in found]


def _read(keys: Keys, start: bytes, stop: bytes, count: int) -> list[Listed]:
    return keys.read(start, stop, count)


async def _told(listing: Listing, place: bytes, wanted: ListRequest) -> ListedPage:
    """What the origin lists from `place` on; pages on which there is nothing of it are followed by the next."""
    if place > wanted.prefix:
        wanted = replace(wanted, after=before(place).encode())
    token, chain = None, PageChain()
    while True:
        page = await origin_page(listing, wanted, token)
        token = page.next_token
        entries = [entry for entry in page.entries if entry.key >= place]
        prefixes = [prefix for prefix in page.prefixes if prefix >= place]
        if entries or prefixes or token is None:
            return ListedPage(entries, prefixes, token)
        chain.follow((), token)
