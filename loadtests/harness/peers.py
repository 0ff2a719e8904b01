"""nginx, Varnish and rclone as caches in front of the load origin, each tuned, one process or core, on 127.0.0.1; and
nginx as a server that uploads go to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from loadtests.harness import tools
from loadtests.harness.origin import LoadOrigin
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


_READING = ("--read-only", "--vfs-cache-mode", "full")


def _on(value: bool) -> str:
    return "on" if value else "off"


def _user() -> str:
    """nginx gives up root's rights unless told otherwise, and the cache directory is root's own."""
    return "user root;" if os.geteuid() == 0 else ""
