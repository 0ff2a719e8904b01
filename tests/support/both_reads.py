"""Each plain GET of a test, made through the local socket as well: both ways must give the same."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from forebay import wire
from forebay.local import NoGateway, Reader, _Link
from forebay.s3_get import Credentials
from gateway.edge.asgi import S3App
from gateway.edge.local_port import LocalPort
from gateway.edge.prepared import PreparedRequests
from gateway.serve.listeners import open_local
from tests.support.asgi import ACCESS_KEY_ID, SECRET_ACCESS_KEY

_prepared: WeakKeyDictionary[S3App, PreparedRequests] = WeakKeyDictionary()
"""They last as long as a gateway: what is prepared must hold, or be prepared anew."""

given = 0
"""The number of GETs that the local socket gave, too."""


async def read_beside(
    app: object, target: str, headers: Mapping[str, str], credentials: Mapping[str, str]
) -> tuple[int, str, bytes] | None:
    """What the local socket gives of a GET, as status, ETag and bytes; None: nothing, or the GET is not a plain one.

    The origin is not asked: tests count its questions.
    """
    global given
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", "bytes=0-0"))
    if not isinstance(app, S3App) or "?" in target or asked is None or not headers.keys() <= {"Range"}:
        return None
    bucket, _, key = unquote(target)[1:].partition("/")
    if app.services.slots.find(bucket, key).consistency == "strict":
        return None
    first, last = map(int, asked.groups()) if "Range" in headers else (0, -1)
    prepared = _prepared.setdefault(app, PreparedRequests(app))
    with tempfile.TemporaryDirectory(prefix="forebay-") as directory:
        path = Path(directory, "read.sock")
        stop, port = asyncio.Event(), LocalPort(prepared, [open_local(path)], app.services.clock)
        serving = asyncio.create_task(port.serve(stop))
        await asyncio.sleep(0)
        own = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY, **credentials}
        keys = Credentials(own["access_key_id"], own["secret_access_key"], own.get("session_token") or "")
        read = wire.pack_read(f"{bucket}/{key}".encode("utf-8", "surrogateescape"), first, last + 1 - first)
        try:
            found = await asyncio.to_thread(_read, str(path), keys, read)
        finally:
            stop.set()
            await serving
            prepared._tallies.clear()  # nothing is counted twice
    if found is not None:
        given += 1
        return 206 if "Range" in headers else 200, *found
    return None


def _read(path: str, keys: Credentials, read: bytes) -> tuple[str, bytes] | None:
    try:
        link = _Link(path, keys, "test")
    except NoGateway:
        return None
    try:
        (found,) = link.resolve([read])
        if isinstance(found, int):
            return None
        etag, size_bytes, given_bytes, skip, extents = found
        if read[10:18] == bytes(8) and given_bytes < size_bytes:
            return None
        content = memoryview(bytearray(given_bytes))
        Reader(credentials=keys)._load(extents, skip, content)
        return etag.decode("latin-1"), bytes(content)
    except NoGateway:
        return None
    finally:
        link.close()
