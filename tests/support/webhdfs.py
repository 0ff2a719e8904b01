"""A small WebHDFS over real HTTP, for tests: a namenode and two datanodes that behave as the REST documents say.

    with WebHdfsCluster() as cluster:
        cluster.put("/data/bucket/key", b"bytes")
        # [origin] endpoint_url = f"webhdfs://{cluster.namenode}/data"

Source: "WebHDFS REST API" of Hadoop 3.4 (GETFILESTATUS, LISTSTATUS_BATCH, OPEN). It was not compared with
Hadoop.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from time import sleep
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

_NUMBERS = count(16386)
_PREFIX = "/webhdfs/v1"


@dataclass
class Node:
    """A file, or a directory where `children` is not None. `modified` in milliseconds."""

    data: bytes = b""
    children: dict[str, Node] | None = None
    modified: int = 1_700_000_000_000
    kind: str = ""
    file_id: int = field(default_factory=lambda: next(_NUMBERS))

    def status(self, name: str) -> dict[str, Any]:
        kind = self.kind or ("FILE" if self.children is None else "DIRECTORY")
        return {
            "accessTime": 0,
            "blockSize": 134217728,
            "childrenNum": len(self.children or ()),
            "fileId": self.file_id,
            "group": "supergroup",
            "length": len(self.data),
            "modificationTime": self.modified,
            "owner": "hdfs",
            "pathSuffix": name,
            "permission": "644",
            "replication": 3,
            "storagePolicy": 0,
            "type": kind,
        }


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader has left."""


class _Refused(Exception):
    def __init__(self, status: int, name: str, message: str) -> None:
        super().__init__(name)
        self.status, self.name, self.message = status, name, message


@dataclass(frozen=True)
class Asked:
    """A request that a node of the cluster got; `who` is `namenode`, `datanode 0`, …"""

    who: str
    operation: str
    path: str
    query: dict[str, str]


class WebHdfsCluster:
    """Attributes may be changed while it runs. `on_asked` sees each request first: it may wait, or change files."""

    def __init__(self, *, page: int = 1000, domain: str = "127.0.0.1") -> None:
        self.root = Node(children={})
        self.page = page
        self.domain = domain
        self.is_http_fs = False
        """Whether it answers OPEN itself, and tells no file ids."""
        self.on_asked: Callable[[Asked], None] = lambda _: None
        self.cut_after: dict[str, int] = {}
        """By datanode: after so many bytes of a body its connection is reset."""
        self.refused: dict[str, tuple[int, str]] = {}
        """By node: the status and the exception that it answers with."""
        self.asked: list[Asked] = []
        self._servers: list[ThreadingHTTPServer] = []
        self._names = ["namenode", "datanode 0", "datanode 1"]

    @property
    def namenode(self) -> str:
        return f"127.0.0.1:{self._servers[0].server_address[1]}"

    def datanode(self, number: int) -> str:
        return f"{self.domain}:{self._servers[1 + number].server_address[1]}"

    def __enter__(self) -> Self:
        for name in self._names:
            server = _Server(("127.0.0.1", 0), self._handler(name))
            server.daemon_threads = True
            self._servers.append(server)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True, name=f"webhdfs {name}").start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def put(self, path: str, data: bytes, **fields: Any) -> Node:
        """A new file, with an id of its own, in place of what is there; directories as needed."""
        *names, last = path.strip("/").split("/")
        here = self.root
        for name in names:
            assert here.children is not None
            here = here.children.setdefault(name, Node(children={}))
        assert here.children is not None
        here.children[last] = Node(data, **fields)
        return here.children[last]

    def remove(self, path: str) -> None:
        *names, last = path.strip("/").split("/")
        parent = self._find("/".join(names))
        assert parent is not None
        assert parent.children is not None
        del parent.children[last]

    def operations(self, who: str = "namenode") -> list[str]:
        return [one.operation for one in self.asked if one.who == who]

    def _find(self, path: str) -> Node | None:
        here: Node | None = self.root
        for name in filter(None, path.split("/")):
            if name in (".", "..") or ":" in name:
                raise _Refused(400, "InvalidPathException", f"Invalid path name {path}")
            here = (here.children or {}).get(name) if here is not None else None
        return here

    def _of_namenode(self, asked: Asked) -> dict[str, Any] | str:
        found = self._find(asked.path)
        if found is None:
            raise _Refused(404, "FileNotFoundException", f"File does not exist: {asked.path}")
        if asked.operation == "GETFILESTATUS":
            return {"FileStatus": self._told(found, "")}
        if asked.operation == "LISTSTATUS_BATCH":
            after = asked.query.get("startAfter", "").encode()
            children = found.children if found.children is not None else {"": found}
            names = sorted((name for name in children if name.encode() > after or not name), key=str.encode)
            listed = [self._told(children[name], name) for name in names[: self.page]]
            partial = {"FileStatuses": {"FileStatus": listed}}
            remaining = max(0, len(names) - self.page)
            return {"DirectoryListing": {"partialListing": partial, "remainingEntries": remaining}}
        if asked.operation == "OPEN":
            if found.children is not None:
                raise _Refused(404, "FileNotFoundException", f"Path is not a file: {asked.path}")
            excluded = asked.query.get("excludedatanodes", "").split(",")
            left = [number for number in (0, 1) if self.datanode(number) not in excluded]
            if not left:
                raise _Refused(403, "IOException", "Failed to find datanode, suggest to check cluster health.")
            return self.datanode(left[0])
        raise _Refused(400, "IllegalArgumentException", f'Invalid value for webhdfs parameter "op": {asked.operation}')

    def _told(self, node: Node, name: str) -> dict[str, Any]:
        status = node.status(name)
        if self.is_http_fs:
            del status["fileId"]
        return status

    def _handler(self, who: str) -> type[BaseHTTPRequestHandler]:
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None:
                """Nothing: tests look at `asked`."""

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                asked = Asked(who, query.pop("op", ""), unquote(url.path.removeprefix(_PREFIX)), query)
                cluster.asked.append(asked)
                try:
                    cluster.on_asked(asked)
                    if who in cluster.refused:
                        raise _Refused(*cluster.refused[who], "as the test says")
                    if who == "namenode" and not (cluster.is_http_fs and asked.operation == "OPEN"):
                        self._of_namenode(asked, url.query)
                    else:
                        self._bytes(asked)
                except _Refused as error:
                    fields = {"exception": error.name, "javaClassName": error.name, "message": error.message}
                    self._json(error.status, {"RemoteException": fields})

            def _of_namenode(self, asked: Asked, query: str) -> None:
                answer = cluster._of_namenode(asked)
                if isinstance(answer, dict):
                    self._json(200, answer)
                    return
                self.send_response(307)
                self.send_header(
                    "Location", f"http://{answer}{urlsplit(self.path).path}?{query}&namenoderpcaddress=nn:8020"
                )
                self.send_header("Content-Length", "0")
                self.end_headers()

            def _bytes(self, asked: Asked) -> None:
                found = cluster._find(asked.path)
                if found is None:
                    raise _Refused(404, "FileNotFoundException", f"File does not exist: {asked.path}")
                first = int(asked.query["offset"])
                data = found.data[first : first + int(asked.query["length"])]
                self.send_response(200)
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                cut = cluster.cut_after.get(who)
                self.wfile.write(data[:cut])
                if cut is not None and cut < len(data):
                    self.wfile.flush()
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.close_connection = True
                    self.connection.close()

            def _json(self, status: int, document: dict[str, Any]) -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler


def silent(seconds: float, who: str) -> Callable[[Asked], None]:
    """For `on_asked`: this node does not answer for so long."""
    return lambda asked: sleep(seconds) if asked.who == who else None
