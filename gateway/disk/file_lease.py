"""Open files that several users share: each user holds a lease, and the last lease that ends closes the file.

A descriptor is only a number. Once it is closed, the kernel gives the number to the next file that this process opens:
a user that goes on using it reads, sends or closes another user's file. So no code passes numbers around:

- A user takes a lease of its own before anything can end the one that it takes it from. A thread's lease is taken by
  the code that hands the work to the thread, in the same call, never by the work itself when it comes to run.
- A lease that has ended gives no number any more: LeaseEnded, which is a defect of this program. EBADF can then only be
  one, too, and never says anything about a disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Concatenate, Generic, ParamSpec, Self, TypeVar


class LeaseEnded(RuntimeError):
    """A lease was used after its end."""


class SharedFile:
    """An open file and how many leases there are on it. `close_file` runs once, when the last lease has ended."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._leases = 0
        self._lock = threading.Lock()

    def begin_lease(self) -> None:
        with self._lock:
            if self._leases < 0:
                raise LeaseEnded("the file is closed")
            self._leases += 1

    def end_lease(self) -> None:
        with self._lock:
            self._leases -= 1
            last = self._leases == 0
            if last:
                self._leases = -1
        if last:
            self.close_file()

    def close_file(self) -> None:
        os.close(self.descriptor)


F_co = TypeVar("F_co", bound=SharedFile, covariant=True)


class FileLease(Generic[F_co]):
    """One user's right to an open file, from its making to `close`. Thread-safe as a whole, not to be shared itself."""

    __slots__ = ("_file",)

    def __init__(self, file: F_co) -> None:
        self._file: F_co | None = None
        file.begin_lease()
        self._file = file

    @property
    def file(self) -> F_co:
        """The file; LeaseEnded after `close`."""
        file = self._file
        if file is None:
            raise LeaseEnded("a lease on a file was used after its end")
        return file

    @property
    def descriptor(self) -> int:
        """The file's descriptor, for use at once; LeaseEnded after `close`."""
        return self.file.descriptor

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def share(self) -> FileLease[F_co]:
        """One more lease, of its own end; LeaseEnded after `close`."""
        return FileLease(self.file)

    def close(self) -> None:
        """End the lease; may be repeated."""
        file, self._file = self._file, None
        if file is not None:
            file.end_lease()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A response body that is closed before its first piece never runs: this ends what it held.
        self.close()


L = TypeVar("L", bound=FileLease[SharedFile])
P = ParamSpec("P")
R = TypeVar("R")


def close_opened(opening: Future[L] | Future[L | None]) -> None:
    """Close a file that a thread has opened for a caller that has left."""
    if not opening.cancelled() and opening.exception() is None and (opened := opening.result()) is not None:
        opened.close()


def with_lease(lease: L, function: Callable[Concatenate[L, P], R]) -> Callable[P, R]:
    """Return a function for another thread with a lease of its own, which ends when the function does."""

    def run(*arguments: P.args, **keywords: P.kwargs) -> R:
        with lease:
            return function(lease, *arguments, **keywords)

    return run
