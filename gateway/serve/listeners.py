"""Listening sockets, opened once by the supervisor and inherited by the processes that serve them."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from gateway.core.errors import StartupError

BACKLOG = 4096
_PORT_ATTEMPTS = 5

_Address = tuple[socket.AddressFamily, str]


_ADVICE = {
    errno.EADDRINUSE: "; another process has it: stop that, or set another {key}.{port}",
    errno.EACCES: "; ports below 1024 are root's: set {key}.{port} to another",
    errno.EADDRNOTAVAIL: "; {key}.{host} must be an address of this machine",
}
_SETTINGS = {"cluster": ("listen", "listen")}
"""Names of a table's settings for host and port, where they are not these words."""


def open_listeners(key: str, host: str, port: int) -> list[socket.socket]:
    """One socket per address of `host`, all on the same port; port 0 picks a free one.

    `key` is the table of the configuration (`server`) that a StartupError names.
    """
    addresses = _resolve(key, host)
    for attempt in range(_PORT_ATTEMPTS):
        try:
            return _open_all(addresses, port)
        except OSError as error:
            last_try = port or attempt == _PORT_ATTEMPTS - 1
            if last_try or error.errno != errno.EADDRINUSE:
                advice = _ADVICE.get(error.errno or 0, "").format(key=key, host=_names(key)[0], port=_names(key)[1])
                raise StartupError(f"{key}: cannot listen on {host}:{port}: {error.strerror}{advice}") from error
    raise AssertionError("unreachable")


def _names(key: str) -> tuple[str, str]:
    return _SETTINGS.get(key, ("host", "port"))


def _resolve(key: str, host: str) -> list[_Address]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StartupError(f"{key}.{_names(key)[0]} = {host!r}: {error.strerror or error}") from error
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _open_all(addresses: list[_Address], port: int) -> list[socket.socket]:
    opened: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, address in addresses:
            try:
                opened.append(_open(family, address, port))
                port = opened[0].getsockname()[1]
            except OSError as error:
                # `localhost` names ::1 on machines that have no IPv6.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
    except OSError:
        close_all(opened)
        raise
    if not opened and missing is not None:
        raise missing
    return opened


def _open(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address != "::")
        listener.bind((address, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def open_local(path: Path) -> socket.socket:
    """Return a listener for local reads, for owner and group alone. A socket that a killed gateway left makes room."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    before = os.umask(0o117)
    try:
        if path.is_socket() and not _is_listened_to(path):
            path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        advice = _ADVICE_FOR_PATHS.get(error.errno or 0, "")
        raise StartupError(f"server.local_socket: cannot listen on {path}: {error.strerror}{advice}") from error
    finally:
        os.umask(before)
    return listener


_ADVICE_FOR_PATHS = {
    errno.EADDRINUSE: "; another gateway listens there, or it is no socket: stop that, or name another path",
    errno.ENOENT: "; make its directory first",
    errno.EACCES: "; the gateway's user must be able to write to its directory",
}


def _is_listened_to(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def close_all(listeners: list[socket.socket]) -> None:
    """Close this process's copies."""
    for listener in listeners:
        listener.close()


def port_of(listeners: list[socket.socket]) -> int:
    return int(listeners[0].getsockname()[1])


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of `host:port` or `[host]:port`."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def url(scheme: str, host: str, port: int) -> str:
    """`http://127.0.0.1:9000`, `http://[::1]:9000`."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
