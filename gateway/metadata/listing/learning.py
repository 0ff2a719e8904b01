"""Which parts of the key space a page of the origin tells everything about. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.metadata.listing.pages import Wanted
from gateway.metadata.listing.places import behind, behind_all


def told_by(
    wanted: Wanted, keys: Sequence[bytes], prefixes: Sequence[bytes], *, is_last: bool
) -> list[tuple[bytes, bytes]]:
    """Start and stop of each, for an answer to `wanted` with these keys and common prefixes; `is_last` when it ends.

    What lies under a common prefix is not told, nor what lies under one that is left out because it is not greater
    than the place before.
    """
    if wanted.limit == 0:
        return []
    start, stop = wanted.start, wanted.stop
    left_out = wanted.rolled_up(wanted.after) if wanted.after.startswith(wanted.prefix) else None
    if left_out is not None:
        start = max(start, behind_all(left_out))
    if not is_last:
        stop = max(behind(keys[-1]) if keys else b"", behind_all(prefixes[-1]) if prefixes else b"")
    parts = []
    for prefix in prefixes:
        if start < prefix:
            parts.append((start, prefix))
        start = max(start, behind_all(prefix))
    if start < stop:
        parts.append((start, stop))
    return parts
