"""`forebay explain`: why an object is answered from this node, or is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.admin.formatting import age_text, counted, size_text
from gateway.cli.common import AdminUrlOption, ConfigOption, JsonOption, admin_client, print_json, printable
from gateway.cli.tables import print_text

if TYPE_CHECKING:
    from gateway.api import documents as to

ObjectArgument = Annotated[str, typer.Argument(metavar="s3://BUCKET/KEY", help="The object.")]

_BELIEVED = {
    "fresh": "answers HEAD and GET without the origin",
    "stale": "the origin is asked first; it answers where the origin does not",
    "useless": "too old, or of a slot that asks each time: the origin is asked",
    "unknown": "the origin is asked",
}


def explain(
    key: ObjectArgument, config: ConfigOption = None, admin_url: AdminUrlOption = None, json: JsonOption = False
) -> None:
    """Say what the gateway knows of an object, which blocks are here, and why the others are not. Asks no origin."""
    answer = admin_client(admin_url, config).explain(key)
    if json:
        print_json(answer.document())
        return
    for name, text in _lines(answer):
        print_text(f"{name:<9}{printable(text)}", indent=9)


def _lines(found: to.Explanation) -> Iterator[tuple[str, str]]:
    slot, known, held = found.slot, found.known, found.held
    yield "object", f"s3://{found.bucket}/{found.key}"
    yield "slot", f"{slot.name} ({slot.prefix}), {slot.mode}, {_consistency(slot)}, write {slot.write}"
    if slot.authorization == "origin":
        ttl = f"{slot.authorization_ttl_seconds or 0.0:g} s"
        yield "allowed", f"to callers to whom the origin allows it, too: its yes counts for {ttl}"
    yield "version", _version(known)
    if found.pending is not None:
        yield "pending", _pending(found.pending)
    for pin in found.pins:
        yield "pinned", f"by {pin}: it is not evicted"
    if found.blocks is not None:
        yield from _blocks(found.blocks, known.bytes or 0)
    total = f"{counted(held.blocks, 'block')}, {size_text(held.bytes)}"
    yield "held", f"{total}, of all versions together" if held.blocks else "nothing of any version"
    yield "kept", "yes" if found.why_not_kept is None else f"no: {found.why_not_kept}"


def _consistency(slot: to.ExplainedSlot) -> str:
    if slot.snapshot is not None:
        return f"frozen by the snapshot {slot.snapshot}"
    return f"ttl {slot.metadata_ttl_seconds or 0.0:g} s" if slot.consistency == "ttl" else slot.consistency


def _version(known: to.KnownVersion) -> str:
    if known.by is None:
        return f"not known: {_BELIEVED['unknown']}"
    what = f"{known.etag}, {size_text(known.bytes or 0)}" if known.exists else "there is none"
    if known.by == "snapshot":
        return f"{what}, by the snapshot"
    age = "of unknown age" if known.age_seconds is None else f"learned {known.age_seconds:.0f} s ago"
    return f"{what}, {age}: {_BELIEVED[known.state]}"


def _pending(write: to.PendingObject) -> str:
    what = "a deletion" if write.deleted else f"{write.etag}, {size_text(write.bytes or 0)}"
    why = f": {write.reason}" if write.reason else ""
    return f"{what}, {write.state}, acknowledged {age_text(write.acknowledged_at)} ago{why}"


def _blocks(blocks: to.ExplainedBlocks, size_bytes: int) -> Iterator[tuple[str, str]]:
    text = f"{blocks.here:,} of {counted(blocks.total, 'block')} here"
    if blocks.partly_here:
        text += f", {blocks.partly_here:,} in part"
    text += f", {size_text(blocks.bytes_here)} of {size_text(size_bytes)}"
    if blocks.looked_at < blocks.total:
        text += f" (the first {blocks.looked_at:,} were looked at)"
    yield "blocks", text
    if blocks.evicted:
        yield "evicted", f"{counted(blocks.evicted, 'block')}, as far as is remembered"
    for first, last in blocks.missing:
        yield "missing", f"bytes {first}-{last}"
