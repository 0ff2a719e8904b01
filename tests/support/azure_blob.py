"""A strict Azure Blob over real HTTP, for tests: it verifies each signature, and does what the REST documents say.

Written from learn.microsoft.com/rest/api/storageservices (the pages of the operations), and shares nothing with the
gateway. What the documents leave open is as unkind as they allow: markers can be read by nobody, blocks of an upload go
when the blob is written, an answer has no MD5 that was not asked for.

    with AzureBlob() as azure:
        azure.containers["bucket"] = Container()
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree.ElementTree import fromstring
from xml.sax.saxutils import escape

ACCOUNT = "strictaccount"
KEY = base64.b64encode(b"a key of the strict account, which is long enough").decode()

_STANDARD = "Content-Encoding Content-Language Content-Length Content-MD5 Content-Type Date If-Modified-Since If-Match"
_SIGNED = [*_STANDARD.split(), "If-None-Match", "If-Unmodified-Since", "Range"]
_PROPERTIES = ("content-type", "cache-control", "content-disposition", "content-encoding", "content-language")
_SKEW_MAX_SECONDS = 900
_STARTING_VERSION = "2026-02-06"


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


@dataclass
class Blob:
    data: bytes
    properties: dict[str, str]
    metadata: dict[str, str]
    md5: bytes | None
    etag: str
    kind: str = "BlockBlob"
    blocks: dict[str, bytes] = field(default_factory=dict)
    modified: float = field(default_factory=time.time)


@dataclass
class Container:
    blobs: dict[str, Blob] = field(default_factory=dict)
    uncommitted: dict[str, dict[str, bytes]] = field(default_factory=dict)


Fault = Callable[[str, str, Mapping[str, str]], str | None]
"""Gets method, path and parameters; tells what to do with the request: `503` is answered so, and nothing done;
`lost` does it, and closes the connection in place of an answer; `cut` sends half of the answer's body."""


class AzureBlob:
    """The server, on threads of its own. Attributes may be changed while it runs."""

    def __init__(self) -> None:
        self.containers: dict[str, Container] = {}
        self.is_hierarchical = False
        self.newest_version = "2026-06-06"
        self.skew_seconds = 0.0
        self.fault: Fault = lambda *_: None
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        """Each request that was signed well: method, path below the account, parameters."""

        self.lock = threading.Lock()
        self._etags = itertools.count(0x8DC0000000000)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler, bind_and_activate=True)
        self._server.daemon_threads = True
        self._server.azure = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def settings(self) -> dict[str, Any]:
        """Of a gateway's [origin]."""
        url = f"azure+http://{self.address}/{ACCOUNT}"
        return {"endpoint_url": url, "access_key_id": ACCOUNT, "secret_access_key": KEY}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def new_etag(self) -> str:
        return f'"0x{next(self._etags):X}"'

    def write(self, container: str, name: str, data: bytes, **metadata: str) -> Blob:
        """A blob that somebody else has written, by Put Blob."""
        made = Blob(data, {}, metadata, hashlib.md5(data).digest(), self.new_etag())
        self.containers.setdefault(container, Container()).blobs[name] = made
        return made


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: Any

    def log_message(self, *_: object) -> None:
        return

    def _handle(self) -> None:
        azure: AzureBlob = self.server.azure
        self.told: dict[str, str] = {}
        url = urlsplit(self.path)
        self.query = {name.lower(): value for name, value in parse_qsl(url.query, keep_blank_values=True)}
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length)) if length else b""
        if length and len(body) < int(length):
            self.close_connection = True  # it broke off: nothing is done
            return
        fault = None
        try:
            self._check(azure, url.path, url.query, length)
            _, _, below = url.path.lstrip("/").partition("/")
            azure.asked.append((self.command, unquote(below), self.query))
            fault = azure.fault(self.command, unquote(below), self.query)
            if fault is not None and fault.isdecimal():
                raise _Refused(int(fault), "ServerBusy" if fault == "503" else "InternalError")
            with azure.lock:
                status, document = self._answer(azure, unquote(below), body)
        except _Refused as refused:
            status = refused.status
            self.told = {"x-ms-error-code": refused.code, "Content-Type": "application/xml"}
            text = f'\ufeff<?xml version="1.0" encoding="utf-8"?><Error><Code>{refused.code}</Code></Error>'
            document = text.encode()
        if fault == "lost":
            self.close_connection = True
            return
        self.send_response_only(status)
        size = self.told.pop("size", str(len(document)))
        for name, value in {
            "Date": formatdate(time.time() + azure.skew_seconds, usegmt=True),
            "x-ms-request-id": "of-strict",
            **self.told,
        }.items():
            self.send_header(name, value)
        self.send_header("Content-Length", size)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(document[: len(document) // 2] if fault == "cut" else document)
            self.close_connection = self.close_connection or fault == "cut"
        self.wfile.flush()

    do_GET = do_HEAD = do_PUT = do_DELETE = _handle

    def _check(self, azure: AzureBlob, path: str, query: str, length: str | None) -> None:
        headers = self.headers
        if self.command == "PUT" and length is None:
            raise _Refused(411, "MissingContentLengthHeader")
        version = headers.get("x-ms-version", "")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", version) or version > azure.newest_version:
            raise _Refused(400, "InvalidHeaderValue")
        moment = parsedate_to_datetime(headers.get("x-ms-date", formatdate(0, usegmt=True))).timestamp()
        if abs(time.time() + azure.skew_seconds - moment) > _SKEW_MAX_SECONDS:
            raise _Refused(403, "AuthenticationFailed")
        standard = [headers.get(name, "") for name in _SIGNED]
        standard[2] = "" if standard[2] == "0" else standard[2]
        own = sorted((name.lower(), value.strip()) for name, value in headers.items() if name[:5].lower() == "x-ms-")
        resource = [f"/{ACCOUNT}{path}"]
        parameters: dict[str, list[str]] = {}
        for name, value in parse_qsl(query, keep_blank_values=True):
            parameters.setdefault(name.lower(), []).append(value)
        resource += [f"{name}:{','.join(sorted(parameters[name]))}" for name in sorted(parameters)]
        text = "\n".join([self.command, *standard, *(f"{name}:{value}" for name, value in own), *resource])
        digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
        if headers.get("Authorization") != f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}":
            raise _Refused(403, "AuthenticationFailed")

    def _answer(self, azure: AzureBlob, below: str, body: bytes) -> tuple[int, bytes]:
        query, method = self.query, self.command
        container_name, _, name = below.partition("/")
        if query.get("restype") == "account":
            self.told = {"x-ms-is-hns-enabled": str(azure.is_hierarchical).lower()}
            return 200, b""
        if not container_name and query.get("comp") == "list":
            names = "".join(
                f"<Container><Name>{one}</Name><Properties><Last-Modified>{formatdate(0, usegmt=True)}</Last-Modified>"
                "</Properties></Container>"
                for one in sorted(azure.containers)
            )
            return 200, _document(f"<Containers>{names}</Containers><NextMarker/>")
        if query.get("restype") == "container" and method == "PUT":
            if container_name in azure.containers:
                raise _Refused(409, "ContainerAlreadyExists")
            azure.containers[container_name] = Container()
            return 201, b""
        if container_name not in azure.containers:
            raise _Refused(404, "ContainerNotFound")
        container = azure.containers[container_name]
        if query.get("restype") == "container":
            return (200, self._list(azure, container)) if query.get("comp") == "list" else (200, b"")
        if method == "PUT":
            return 201, self._put(azure, container, name, body)
        if query.get("comp") == "blocklist":
            if name not in container.uncommitted and name not in container.blobs:
                raise _Refused(404, "BlobNotFound")
            blocks = container.uncommitted.get(name, {})
            listed = "".join(
                f"<Block><Name>{escape(one)}</Name><Size>{len(data)}</Size></Block>" for one, data in blocks.items()
            )
            return 200, _document(f"<UncommittedBlocks>{listed}</UncommittedBlocks>", "BlockList")
        blob = container.blobs.get(name)
        if blob is None:
            raise _Refused(404, "BlobNotFound")
        self._check_conditions(blob)
        if method == "DELETE":
            del container.blobs[name]
            container.uncommitted.pop(name, None)
            return 202, b""
        return self._get(blob)

    def _check_conditions(self, blob: Blob | None) -> None:
        if_match, if_none_match = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if if_match is not None and (blob is None or if_match not in ("*", blob.etag)):
            raise _Refused(412, "ConditionNotMet")
        if if_none_match is not None and blob is not None and if_none_match in ("*", blob.etag):
            raise _Refused(409 if self.command == "PUT" else 304, "BlobAlreadyExists")

    def _get(self, blob: Blob) -> tuple[int, bytes]:
        md5 = base64.b64encode(blob.md5).decode() if blob.md5 is not None else None
        self._tell(blob)
        self.told |= {name.title(): value for name, value in blob.properties.items()}
        self.told |= {f"x-ms-meta-{name}": value for name, value in blob.metadata.items()}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            if md5 is not None:
                self.told["Content-MD5"] = md5
            self.told["size"] = str(len(blob.data))
            return 200, blob.data
        first, last = int(wanted[1]), min(int(wanted[2] or len(blob.data)), len(blob.data) - 1)
        if first >= len(blob.data):
            raise _Refused(416, "InvalidRange")
        if md5 is not None:
            self.told["x-ms-blob-content-md5"] = md5
        self.told["Content-Range"] = f"bytes {first}-{last}/{len(blob.data)}"
        return 206, blob.data[first : last + 1]

    def _tell(self, blob: Blob) -> None:
        self.told["ETag"] = blob.etag
        self.told["Last-Modified"] = formatdate(blob.modified, usegmt=True)

    def _put(self, azure: AzureBlob, container: Container, name: str, body: bytes) -> bytes:
        headers, comp = self.headers, self.query.get("comp")
        md5 = hashlib.md5(body).digest()
        if "Content-MD5" in headers and base64.b64decode(headers["Content-MD5"]) != md5:
            raise _Refused(400, "Md5Mismatch")
        blob = container.blobs.get(name)
        if comp == "block":
            self._put_block(container, name, body)
            return b""
        self._check_conditions(blob)
        if comp == "appendblock":
            if blob is None:
                raise _Refused(404, "BlobNotFound")
            if blob.kind != "AppendBlob" or not body:
                raise _Refused(409 if body else 400, "InvalidBlobType" if body else "InvalidHeaderValue")
            blob.data, blob.etag, blob.modified = blob.data + body, azure.new_etag(), time.time()
            return b""
        kind = headers.get("x-ms-blob-type", "") if comp is None else "BlockBlob"
        if kind not in ("BlockBlob", "AppendBlob") or (kind == "AppendBlob" and body):
            raise _Refused(400, "InvalidHeaderValue")
        properties = {one: headers[f"x-ms-blob-{one}"] for one in _PROPERTIES if f"x-ms-blob-{one}" in headers}
        metadata = {one[10:].lower(): value for one, value in headers.items() if one[:10].lower() == "x-ms-meta-"}
        if not all(re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", one) and value for one, value in metadata.items()):
            raise _Refused(400, "InvalidMetadata")
        if sum(len(one) + len(value) for one, value in metadata.items()) > 8192:
            raise _Refused(400, "MetadataTooLarge")
        made = Blob(body, properties, metadata, md5 if kind == "BlockBlob" else None, azure.new_etag(), kind)
        if comp == "blocklist":
            made.blocks = self._listed(container, name, blob, body)
            made.data = b"".join(made.blocks.values())
            given = headers.get("x-ms-blob-content-md5")
            made.md5 = base64.b64decode(given) if given is not None else None
        container.blobs[name] = made
        container.uncommitted.pop(name, None)
        self._tell(made)
        return b""

    def _put_block(self, container: Container, name: str, body: bytes) -> None:
        block = self.query.get("blockid", "")
        blocks = container.uncommitted.setdefault(name, {})
        if not body or not block or len(base64.b64decode(block, validate=True)) > 64:
            raise _Refused(400, "InvalidQueryParameterValue")
        if any(len(other) != len(block) for other in blocks):
            raise _Refused(400, "InvalidBlobOrBlock")
        blocks[block] = body

    def _listed(self, container: Container, name: str, blob: Blob | None, body: bytes) -> dict[str, bytes]:
        uncommitted, committed = container.uncommitted.get(name, {}), blob.blocks if blob is not None else {}
        found = {}
        for node in fromstring(body):
            places = {"Latest": {**committed, **uncommitted}, "Uncommitted": uncommitted, "Committed": committed}
            tag, block = node.tag.rpartition("}")[2], node.text or ""
            if block not in places[tag]:
                raise _Refused(400, "InvalidBlockList")
            found[block] = places[tag][block]
        return found

    def _list(self, azure: AzureBlob, container: Container) -> bytes:
        query = self.query
        start = query.get("startfrom", "")
        if start and self.headers["x-ms-version"] < _STARTING_VERSION:
            raise _Refused(400, "UnsupportedQueryParameter")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        limit = int(query.get("maxresults", "5000"))
        if not 1 <= limit <= 5000:
            raise _Refused(400, "OutOfRangeQueryParameterValue")
        marker = base64.b64decode(query["marker"].removeprefix("2!")).decode()[::-1] if query.get("marker") else ""
        rows: dict[str, Blob | None] = {}
        for name in sorted(container.blobs, key=_units):
            end = name.find(delimiter, len(prefix)) if delimiter else -1
            row = name if end < 0 else name[: end + len(delimiter)]
            if name.startswith(prefix) and _units(row) >= _units(start) and _units(row) > _units(marker):
                rows.setdefault(row, container.blobs[name] if end < 0 else None)
        page = list(rows.items())[:limit]
        following = base64.b64encode(page[-1][0][::-1].encode()).decode() if len(rows) > len(page) else ""
        with_metadata = "metadata" in query.get("include", "")
        listed = "".join(_entry(name, blob, with_metadata=with_metadata) for name, blob in page)
        return _document(f"<Blobs>{listed}</Blobs><NextMarker>{f'2!{following}' if following else ''}</NextMarker>")


def _units(name: str) -> bytes:
    """The order of UTF-16."""
    return name.encode("utf-16-be")


def _entry(name: str, blob: Blob | None, *, with_metadata: bool) -> str:
    is_odd = any(one in "\ufffe\uffff" or (ord(one) < 32 and one not in "\t\n") for one in name)
    text = f'<Name Encoded="true">{quote(name)}</Name>' if is_odd else f"<Name>{escape(name)}</Name>"
    if blob is None:
        return f"<BlobPrefix>{text}</BlobPrefix>"
    told = {
        "Last-Modified": formatdate(blob.modified, usegmt=True),
        "Etag": blob.etag.strip('"'),
        "Content-Length": str(len(blob.data)),
        **{one.title(): value for one, value in blob.properties.items()},
        "Content-MD5": base64.b64encode(blob.md5).decode() if blob.md5 is not None else "",
        "BlobType": blob.kind,
    }
    properties = "".join(f"<{one}>{escape(value)}</{one}>" for one, value in told.items())
    metadata = "".join(f"<{one}>{escape(value)}</{one}>" for one, value in blob.metadata.items())
    more = f"<Metadata>{metadata}</Metadata>" if with_metadata else ""
    return f"<Blob>{text}<Properties>{properties}</Properties>{more}</Blob>"


def _document(children: str, root: str = "EnumerationResults") -> bytes:
    return f'\ufeff<?xml version="1.0" encoding="utf-8"?><{root}>{children}</{root}>'.encode()
