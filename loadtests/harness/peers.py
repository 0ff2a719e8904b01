"""nginx, Varnish and rclone as caches in front of the load origin, each tuned, one process or core, on 127.0.0.1; and
nginx as a server that uploads go to."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from loadtests.harness import tools
from loadtests.harness.content import BUCKET, Family, LoadObject, load_object
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.saver import Part, Saver, at_once
from loadtests.harness.server_process import ServerProcess
from tests.support.gateway_process import ORIGIN_KEYS


class Nginx(ServerProcess):
    """`proxy_cache` with `slice 8m`; verifies nothing."""

    def __init__(self, origin: LoadOrigin, *, tcp_nopush: bool, **options: Any) -> None:
        self.name = f"nginx slice, tcp_nopush {_on(tcp_nopush)}"
        self._executable = tools.program("nginx")
        super().__init__(**options)
        self._config = self.directory / "nginx.conf"
        self._config.write_text(self._text(origin, _on(tcp_nopush)), encoding="utf-8")

    def _text(self, origin: LoadOrigin, tcp_nopush: str) -> str:
        base = self.directory
        return f"""
daemon off; master_process on; worker_processes 1; pid {base}/nginx.pid; error_log {base}/error.log error; {_user()}
events {{ worker_connections 8192; }}
http {{
  access_log off; sendfile on; tcp_nopush {tcp_nopush}; tcp_nodelay on; keepalive_requests 1000000000;
  open_file_cache max=100000 inactive=1h; open_file_cache_valid 1h;
  proxy_temp_path {base}/proxy; client_body_temp_path {base}/body; fastcgi_temp_path {base}/fastcgi;
  uwsgi_temp_path {base}/uwsgi; scgi_temp_path {base}/scgi;
  proxy_cache_path {base}/cache levels=1:2 keys_zone=load:64m max_size=20g inactive=1d use_temp_path=off;
  upstream origin {{ server 127.0.0.1:{origin.port}; keepalive 64; }}
  server {{
    listen 127.0.0.1:{self.port} backlog=4096;
    location / {{
      slice 8m; proxy_cache load; proxy_cache_key $uri$slice_range; proxy_set_header Range $slice_range;
      proxy_set_header Connection ""; proxy_set_header Authorization ""; proxy_http_version 1.1;
      proxy_cache_valid 200 206 1d; proxy_cache_lock on; proxy_pass http://origin;
    }}
  }}
}}
"""

    def command(self) -> Sequence[str]:
        base = str(self.directory)
        return [self._executable, "-e", f"{base}/error.log", "-p", base, "-c", str(self._config)]


class NginxUploads(ServerProcess):
    """Takes PUTs into files (`dav_methods PUT`), by two workers; verifies and syncs nothing, and sends nothing on."""

    name = "nginx"

    def __init__(self, **options: Any) -> None:
        self._executable = tools.program("nginx")
        super().__init__(**options)
        base = self.directory
        self._config = base / "nginx.conf"
        self._config.write_text(
            f"""
daemon off; master_process on; worker_processes 2; pid {base}/nginx.pid; error_log {base}/error.log error; {_user()}
events {{ worker_connections 8192; }}
http {{
  access_log off; tcp_nodelay on; keepalive_requests 1000000000;
  proxy_temp_path {base}/proxy; client_body_temp_path {base}/body; fastcgi_temp_path {base}/fastcgi;
  uwsgi_temp_path {base}/uwsgi; scgi_temp_path {base}/scgi;
  server {{
    listen 127.0.0.1:{self.port} backlog=4096;
    location / {{ root {base}/files; dav_methods PUT; create_full_put_path on; client_max_body_size 0; }}
  }}
}}
""",
            encoding="utf-8",
        )

    def command(self) -> Sequence[str]:
        base = str(self.directory)
        return [self._executable, "-e", f"{base}/error.log", "-p", base, "-c", str(self._config)]

    def forget(self) -> None:
        """Remove what it has taken."""
        shutil.rmtree(self.directory / "files", ignore_errors=True)


class Varnish(ServerProcess):
    """Objects in memory (malloc); verifies nothing."""

    name = "varnish (malloc)"

    def __init__(self, origin: LoadOrigin, *, memory: str = "6G", **options: Any) -> None:
        self._executable = tools.program("varnishd")
        self._memory = memory
        super().__init__(**options)
        self._vcl = self.directory / "load.vcl"
        self._vcl.write_text(
            f'vcl 4.1;\nbackend origin {{ .host = "127.0.0.1"; .port = "{origin.port}"; }}\n'
            "sub vcl_recv { unset req.http.Authorization; return (hash); }\n"
            "sub vcl_backend_response { set beresp.ttl = 1d; set beresp.uncacheable = false; return (deliver); }\n",
            encoding="utf-8",
        )

    def command(self) -> Sequence[str]:
        command = [self._executable, "-F", "-j", "none", "-a", f"127.0.0.1:{self.port}", "-f", str(self._vcl)]
        return [*command, "-n", str(self.directory / "varnish"), "-s", f"malloc,{self._memory}", "-p", "thread_pools=1"]


class Rclone(ServerProcess):
    """`rclone serve s3` with a full VFS cache; verifies SigV4 as it comes in the Authorization header.

    With `takes_writes` it keeps what is written (in `--vfs-cache-mode writes`) for `write_back` before it uploads that.
    """

    name = "rclone serve s3"

    def __init__(
        self, origin: ServerProcess, *, takes_writes: bool = False, write_back: str = "1h", **options: Any
    ) -> None:
        self._executable = tools.program("rclone")
        self._origin_url = origin.url
        self._mode = ("--vfs-cache-mode", "writes", "--vfs-write-back", write_back) if takes_writes else _READING
        super().__init__(**options)

    def command(self) -> Sequence[str]:
        return [
            *(self._executable, "serve", "s3", "origin:", "--addr", f"127.0.0.1:{self.port}"),
            *("--auth-key", ",".join(ORIGIN_KEYS), "--no-modtime", "--use-server-modtime"),
            *("--cache-dir", str(self.directory / "cache"), "--vfs-fast-fingerprint", *self._mode),
            *("--dir-cache-time", "24h", "--vfs-cache-max-age", "24h", "--buffer-size", "0", "--log-level", "ERROR"),
        ]

    def environment(self) -> Mapping[str, str]:
        prefix = "RCLONE_CONFIG_ORIGIN"
        remote = {"TYPE": "s3", "PROVIDER": "Other", "ENDPOINT": self._origin_url, "FORCE_PATH_STYLE": "true"}
        keys = {"ACCESS_KEY_ID": ORIGIN_KEYS[0], "SECRET_ACCESS_KEY": ORIGIN_KEYS[1], "LIST_VERSION": "2"}
        return {f"{prefix}_{name}": value for name, value in (remote | keys).items()} | {"RCLONE_CONFIG": "/dev/null"}


class JuiceFS(ServerProcess):
    """JuiceFS's S3 gateway: metadata in SQLite, objects in its own format at the origin, a cache of blocks on the disk.

    It reads only what was written through it: `take` writes objects. It verifies SigV4. With `writes_back` (its
    `--writeback`) it answers when blocks of 4 MiB lie on its disk, unsynced, and uploads them behind that.
    """

    name = "juicefs gateway"

    def __init__(self, origin: ServerProcess, *, writes_back: bool = False, **options: Any) -> None:
        self._executable = tools.program("juicefs")
        self._origin_url = origin.url
        self._writes_back = ("--writeback",) if writes_back else ()
        super().__init__(**options)
        self._metadata = f"sqlite3://{self.directory}/metadata.db"

    def prepare(self) -> None:
        """Format the volume `load`; the gateway shows it as a bucket of that name.

        It is made on the disk, where JuiceFS finds what it tries a store with; the gateway is told of the origin.
        """
        of = ["--storage", "file", "--bucket", f"{self.directory}/unused/", "--trash-days", "0"]
        command = [self._executable, "format", *of, self._metadata, BUCKET]
        made = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | self.environment())
        if made.returncode:
            raise RuntimeError(f"{self.name}: {made.stderr[-2000:]}")

    def command(self) -> Sequence[str]:
        return [
            *(self._executable, "gateway", self._metadata, f"127.0.0.1:{self.port}", "--no-banner", *self._writes_back),
            *("--storage", "s3", "--bucket", f"{self._origin_url}/{BUCKET}", "--backup-meta", "0"),
            *("--cache-dir", str(self.directory / "cache"), "--cache-size", "20G", "--free-space-ratio", "0.01"),
            *("--buffer-size", "1024", "--max-readahead", "256"),
            *("--attr-cache", "1h", "--entry-cache", "1h", "--dir-entry-cache", "1h", "--open-cache", "1h"),
            *("--metrics", "127.0.0.1:0", "--no-usage-report", "--log", str(self.directory / "gateway.log")),
        ]

    def environment(self) -> dict[str, str]:
        user, password = ORIGIN_KEYS
        callers = {"MINIO_ROOT_USER": user, "MINIO_ROOT_PASSWORD": password}
        return callers | {"ACCESS_KEY": user, "SECRET_KEY": password, "HOME": str(self.directory)}

    def take(self, objects: Family) -> None:
        """Write the objects through it, eight at a time."""
        paths = objects.paths()

        def write(first: int) -> None:
            saver = Saver(self.address, Part.of(b""))
            for path in paths[first::_WRITERS]:
                of = load_object(path, objects.size_bytes)
                pieces = (of.piece(at, min(_PIECE_BYTES, of.size_bytes - at)) for at in _steps(of))
                saver.put(path.removeprefix(f"/{BUCKET}/"), b"".join(pieces))
            saver.close()

        at_once([partial(write, first) for first in range(_WRITERS)])

    def forget(self) -> None:
        """Kill it, clear its cache, and start it again: everything is cold."""
        self.kill_and_restart(partial(shutil.rmtree, self.directory / "cache"))


@contextmanager
def juicefs_if_installed(origin: LoadOrigin) -> Iterator[tuple[JuiceFS | None, list[str]]]:
    """Start JuiceFS; where it is not installed, yield None and the note that says how to install it."""
    with ExitStack() as stack:
        try:
            started = JuiceFS(origin)
        except tools.Missing as error:
            yield None, [str(error)]
        else:
            yield stack.enter_context(started), []


def _steps(of: LoadObject) -> range:
    return range(0, of.size_bytes, _PIECE_BYTES)


_WRITERS = 8
_PIECE_BYTES = 4 * 1024**2
_READING = ("--read-only", "--vfs-cache-mode", "full")


def _on(value: bool) -> str:
    return "on" if value else "off"


def _user() -> str:
    """nginx gives up root's rights unless told otherwise, and the cache directory is root's own."""
    return "user root;" if os.geteuid() == 0 else ""
