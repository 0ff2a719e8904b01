"""Which origin a buffer's writes were acknowledged for: they go to no other.

Buckets of the same names at another endpoint are other buckets, of which nothing is known.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from gateway.durable import write_durably
from gateway.errors import BufferUnavailable, StartupError
from gateway.writeback.opening import Recovered, prepare

FILE = "origin"


def keep_to_origin(directory: Path, endpoint_url: str, held: Recovered) -> None:
    """Return when the buffer is of this origin; one of another is made anew where it holds nothing.

    StartupError, and nothing is touched, where it does. BufferUnavailable when the disk fails. Blocks.
    """
    try:
        named = _named(directory)
        if named == endpoint_url:
            return
        if named is not None:
            if held.pending or held.uploads or held.orphans:
                raise StartupError(_refusal(directory, named, endpoint_url, held))
            shutil.rmtree(directory)
            prepare(directory)
        write_durably(directory / FILE, f"{endpoint_url}\n".encode())
    except OSError as error:
        raise BufferUnavailable(f"the write-back buffer {directory} cannot be used: {error}") from error


def _named(directory: Path) -> str | None:
    try:
        return (directory / FILE).read_text("utf-8", "replace").removesuffix("\n")
    except FileNotFoundError:
        return None


def _refusal(directory: Path, named: str, endpoint_url: str, held: Recovered) -> str:
    return (
        f"origin.endpoint_url is {endpoint_url!r}, and the write-back buffer {directory} holds what was acknowledged "
        f"for {named!r} and is not there yet ({held.pending} objects, {held.uploads} open uploads): nothing was "
        f"changed. Start with {named!r} and have it flushed (`forebay flush --wait`); where both are names of one and "
        f"the same store, write the new one into {directory / FILE}"
    )
