"""`python -m gateway` in a process that has loaded all of it, for `PreparedProcess`.

Its fork server has, too: it is made before the supervisor begins, and waits until that one wants it. One that replaces
it is started as ever.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import gateway.app.node
import gateway.serve.background
import gateway.serve.reloading
import gateway.serve.worker  # noqa: F401 - all that its processes load
from gateway.cli import put_in_order
from gateway.cli.commands import main as forebay
from gateway.serve import fork_server
from tests.support import network_namespace
from tests.support.names import NAMES_VARIABLE, look_up_in_file
from tests.support.processes import MARK_DESCRIPTOR, MARK_VARIABLE


def main() -> None:
    if namespace := os.environ.get(network_namespace.VARIABLE):
        network_namespace.enter(namespace)
    put_in_order()
    mark = os.open(os.environ[MARK_VARIABLE], os.O_RDONLY)
    os.dup2(mark, MARK_DESCRIPTOR)
    os.close(mark)
    if NAMES_VARIABLE in os.environ:
        look_up_in_file()
    if has_fork_server():
        forebay()


def has_fork_server() -> bool:
    """Make the one that the next supervisor in this process asks for; False in each process that it has made, when that
    has ended."""
    line, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = os.fork()
    if not made:
        line.close()
        _become_fork_server(end)
        return False
    end.close()
    begin, waiting = fork_server._begin, [made]

    def begin_prepared(module: str, descriptor: int, further: Sequence[str]) -> int:
        if not waiting:
            return begin(module, descriptor, further)
        socket.send_fds(line, ["\0".join((module, *further)).encode()], [descriptor])
        line.close()
        return waiting.pop()

    fork_server._begin = begin_prepared
    return True


def _become_fork_server(line: socket.socket) -> None:
    """As the other one does; returns in each new process of the gateway, when that has ended."""
    request, descriptors, _, _ = socket.recv_fds(line, 4096, 1)
    line.close()
    if not request:
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    module, *further = request.decode().split("\0")
    fork_server.main([module, str(descriptors[0]), *further])
