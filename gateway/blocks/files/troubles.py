"""What is wrong when the disk refuses: told from the error that it gave. Pure."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from enum import StrEnum

import lmdb

from gateway.errors import BlockDamaged, BlockError, StoreUnavailable


class Trouble(StrEnum):
    """What the directory can still be used for, the least harm first."""

    FULL = "full"
    """It gives, and takes nothing more: somebody else has filled the disk, or a quota is used up."""

    READ_ONLY = "read-only"
    """It gives, and takes nothing: its file system went read-only, or writing fails."""

    FAILING = "failing"
    """It neither gives nor takes."""


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_OF_THE_PROCESS = frozenset(
    {errno.EBADF, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.EEXIST}
)
"""These say nothing about the disk. EBADF is a defect of this program: somebody closed a file that was not his."""


def trouble_of(error: BaseException) -> Trouble | None:
    """What an error says about the disk; None where it says nothing: no room in a slot, no descriptors, other bytes."""
    for cause in _causes(error):
        if isinstance(cause, lmdb.Error):
            return _of_index(cause)
        if isinstance(cause, OSError):
            gone = isinstance(cause, FileNotFoundError) and isinstance(error, BlockDamaged)
            return None if gone else _of_number(cause.errno)
    return None


def as_block_error(error: Exception) -> BlockError:
    """What comes out of a disk thread, as the rest of the cache expects it."""
    if isinstance(error, BlockError):
        return error
    failure = StoreUnavailable(f"the cache directory cannot be used: {error}")
    failure.__cause__ = error
    return failure


def _of_index(error: lmdb.Error) -> Trouble | None:
    if isinstance(error, lmdb.MapFullError):
        return Trouble.FULL
    return _of_number(getattr(error, "code", None))


def _of_number(number: int | None) -> Trouble | None:
    if number in _OF_THE_PROCESS:
        return None
    if number in _FULL:
        return Trouble.FULL
    return Trouble.READ_ONLY if number == errno.EROFS else Trouble.FAILING


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
