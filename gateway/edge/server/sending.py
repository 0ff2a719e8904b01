"""Sending past the transport: straight to the socket, waiting where it takes no more."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod

from gateway.errors import ClientDisconnected


class Sender(ABC):
    """Sends something to a connected, non-blocking socket whose own queue, the transport's, is empty.

    The socket stays the caller's. `sent_bytes` tells how far it has got with the body. A sender that `needs_bytes`
    cannot go on before `fetch` has got them.
    """

    def __init__(self, socket_descriptor: int) -> None:
        self._socket = socket_descriptor
        self._finished: asyncio.Future[None] | None = None
        self._is_abandoned = False
        self.sent_bytes = 0
        self.needs_bytes = False

    @abstractmethod
    def push(self) -> bool:
        """One step, as much as the kernel takes now; true when all is done. Raises as `send` does."""

    async def fetch(self) -> None:
        """Get the bytes that `push` lacks. Raises what kept them away."""
        raise NotImplementedError

    async def send(self) -> None:
        """Return when all is done; ClientDisconnected when the peer is gone."""
        while not self.push():
            if self.needs_bytes:
                await self.fetch()
                self.needs_bytes = False
            elif await self._push_when_writable():
                return
            if self._is_abandoned:
                raise gone()

    async def _push_when_writable(self) -> bool:
        """Push until all is done, or bytes are needed; whether all is done."""
        loop = asyncio.get_running_loop()
        # The loop lets nobody else wait on a transport's descriptor: a second one for the same socket may.
        watched = os.dup(self._socket)
        self._finished = loop.create_future()
        loop.add_writer(watched, self._on_writable)
        try:
            await self._finished
        finally:
            loop.remove_writer(watched)
            os.close(watched)
        return not self.needs_bytes

    def abandon(self) -> None:
        """The connection is lost: the sender stops before the descriptor's number means another socket."""
        self._is_abandoned = True
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(gone())

    def _on_writable(self) -> None:
        if self._finished is None or self._finished.done():
            return
        try:
            if self.push() or self.needs_bytes:
                self._finished.set_result(None)
        except Exception as error:  # noqa: BLE001 - it is raised in the task that waits in `send`
            self._finished.set_exception(error)


def gone() -> ClientDisconnected:
    return ClientDisconnected("the client left while its answer was sent")
