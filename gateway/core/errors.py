"""The exception tree.

ForebayError
├── ConfigError            a setting is wrong: names the key, the value and what is allowed
├── StartupError           the gateway cannot start here: the message says what to do
├── AdminPortError         the admin port of a running gateway does not answer, or refuses: the message says what to do
│   └── NoAdminPort            nothing listens at its address
├── S3Error                the client's answer: code, status, message (built by `s3.error_codes.s3_error`)
├── ClientDisconnected     the client went away
├── RegistryAway           the registry of the cluster cannot be had, or not be believed: the message says why
├── OriginError
│   ├── OriginUnreachable      no connection, no answer in time, or the retry budget is spent
│   │   ├── OriginBusy         no connection to it was free in time
│   │   ├── CredentialsUnavailable  there is no key pair to sign with
│   │   └── OutcomeUnknown     a write that must not be repeated may have been carried out
│   ├── OriginAnswered         the origin's own error answer, to be passed on as it is
│   └── OriginBodyError        the origin's body was short, reset, or of another version or range
├── PinRefused             the pin would overlap another, or exceed the room
├── SnapshotError
│   ├── NoSuchSnapshot         there is none of that name
│   ├── SnapshotConflict       there is one already, or it is in use
│   └── SnapshotUnusable       it is damaged, of another version, or not of the prefix; left as it is
├── WritebackError
│   ├── NothingPending         nothing of that name is pending
│   ├── NotToBeDecided         the pending write is on its way, so that no decision about it is possible
│   ├── InConflict             the pending write is a conflict, which a person must end first
│   ├── BufferUnavailable      the write-back buffer cannot take or give bytes now: nothing was acknowledged
│   │   └── BufferRefused          … nor written down: what lies there for it may go
│   └── BufferDamaged          bytes in the write-back buffer differ from those acknowledged: kept, never sent on
└── BlockError
    ├── BlockDamaged           a block's bytes are not what was written; it is dropped and counts as a miss
    └── StoreUnavailable       the cache directory cannot be used now (ENOSPC, EIO): the origin serves
        └── NotKept                it works, and does not keep the block: no room, too large, enough written today
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias


class ForebayError(Exception):
    """Root of everything that the gateway raises on purpose."""


class ConfigError(ForebayError):
    """A setting cannot be used. `key` is dotted (`cache.block_size`). A `value` of None: the setting is missing.

    `allowed` says what to write instead. `source` names the file, the variable or the option of the command that the
    value came from; None: it was not given. `problem` says what is wrong if the key and its value do not show it.
    """

    def __init__(
        self, key: str, value: object, allowed: str, source: str | None = None, problem: str | None = None
    ) -> None:
        if problem is None:
            problem = f"{key} is missing" if value is None else f"{key} = {value!r}"
        super().__init__(f"{problem}{'' if source is None else f' (from {source})'}: {allowed}")
        self.key = key
        self.value = value
        self.allowed = allowed
        self.source = source
        self.problem = problem


class StartupError(ForebayError):
    """The gateway cannot start; the message names the reason and the way out."""


class AdminPortError(ForebayError):
    """The admin port of a running gateway does not answer, refuses what it was asked for, or cannot be understood."""


class NoAdminPort(AdminPortError):
    """The address of the admin port refuses connections."""


class S3Error(ForebayError):
    """An S3 error answer (S3 API, "Error responses").

    `elements` are the extra XML elements of the code (`Region`, `ArgumentName`, …) in the order given; `headers` go
    along with the answer.
    """

    def __init__(
        self,
        code: str,
        message: str,
        status: int,
        *,
        elements: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status
        self.elements = dict(elements or {})
        self.headers = dict(headers or {})


class ClientDisconnected(ForebayError):
    """The client closed its connection before the exchange was over."""


class RegistryAway(ForebayError):
    """The registry of what the nodes of the cluster have pending cannot be asked now, or not be believed."""


class OriginError(ForebayError):
    """Something between the gateway and the origin went wrong."""


class OriginUnreachable(OriginError):
    """The origin gave no answer: refused, timed out, or the retry budget is spent.

    `may_be_done`: the origin may have got the whole request, and may carry it out.
    """

    def __init__(self, message: str, *, may_be_done: bool = True) -> None:
        super().__init__(message)
        self.may_be_done = may_be_done


class OriginBusy(OriginUnreachable):
    """The origin was not asked: all connections that the caller may have were in use."""

    def __init__(self, message: str) -> None:
        super().__init__(message, may_be_done=False)


class OwnersAway(OriginError):
    """No node that looks after a block can be asked to keep it."""


class CredentialsUnavailable(OriginUnreachable):
    """The origin was not asked: there is no key pair to sign with now."""

    def __init__(self, message: str) -> None:
        super().__init__(message, may_be_done=False)


class OutcomeUnknown(OriginUnreachable):
    """A write may have been carried out, and a repetition of it would then be refused because of that."""


class OriginAnswered(OriginError):
    """The origin refused; its answer reaches the client as it is.

    `headers` are lower-case (name, value) pairs without hop-by-hop headers; `body` is the origin's error document,
    complete, at most a few KiB. `age_seconds`: how long ago another node, which passed the answer on, had asked.
    """

    def __init__(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, age_seconds: float = 0.0) -> None:
        super().__init__(f"the origin answered {status}")
        self.age_seconds = age_seconds
        self.status = status
        self.headers = list(headers)
        self.body = body


class OriginBodyError(OriginError):
    """The origin's body does not match the request: short, reset, another version, another range."""


class WritebackError(ForebayError):
    """Something about the write-back buffer went wrong."""


class NothingPending(WritebackError):
    """The key has no pending write, or no longer."""


class NotToBeDecided(WritebackError):
    """The key's pending write is on its way to the origin, or in another state than the decision expects."""


class InConflict(WritebackError):
    """The key's pending write conflicts with another client's: a person must end the conflict first."""


class PartInUse(WritebackError):
    """The origin may just be completing an upload of this part: nothing can take its place before that is over."""


class BufferUnavailable(WritebackError):
    """The buffer's directory or journal cannot take or give bytes now (ENOSPC, EIO): nothing was acknowledged."""


class BufferRefused(BufferUnavailable):
    """It is certain that nothing was written down: what lies there for it may go."""


class BufferDamaged(WritebackError):
    """Bytes in the buffer are not those that were acknowledged: they stay, neither served nor sent to the origin."""


class BlockError(ForebayError):
    """Something about cached blocks went wrong; never a reason to fail a read that the origin can serve."""


class BlockDamaged(BlockError):
    """Bytes on disk are not those that were written."""


class StoreUnavailable(BlockError):
    """The cache directory cannot take or give bytes now."""


NotKeptReason: TypeAlias = Literal["size", "write-budget", "room", "copy"]


class PinRefused(ForebayError):
    """The pin would overlap another, or exceed the room."""


class SnapshotError(ForebayError):
    """Something about a snapshot cannot be done; the message names the snapshot and says why."""


class NoSuchSnapshot(SnapshotError):
    """There is no snapshot of that name."""


class SnapshotConflict(SnapshotError):
    """There is one of that name already, or it is in use."""


class SnapshotUnusable(SnapshotError):
    """The snapshot is not trusted, and left as it is."""


class NotKept(StoreUnavailable):
    """A block that the cache does not keep: its bytes go from the origin to their reader."""

    def __init__(self, reason: NotKeptReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


_MISTAKES = frozenset(
    {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
)
"""Errors that no disk causes by itself: a person has named the wrong place, or set the wrong rights."""


_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""A full disk, or a quota: what lies there can be read all the same."""

_NO_ROOM_OF_SQLITE = frozenset({"SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"})


def is_mistake(error: BaseException) -> bool:
    """Return True if a person must correct the directory's place or rights."""
    return _number_of(error) in _MISTAKES


def is_no_room(error: BaseException) -> bool:
    """Return True if the error, or its cause, says that the disk is full."""
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "sqlite_errorname", None) in _NO_ROOM_OF_SQLITE:
            return True
        cause = cause.__cause__
    return _number_of(error) in _NO_ROOM


def _number_of(error: BaseException) -> int | None:
    """Return the system's number of an error: its own or that of the first of its causes that has one."""
    cause: BaseException | None = error
    while cause is not None:
        number: int | None = cause.errno if isinstance(cause, OSError) else getattr(cause, "code", None)  # lmdb.Error
        if number is not None:
            return number
        cause = cause.__cause__
    return None


def opening_failure(what: str, error: Exception) -> StartupError | StoreUnavailable:
    """For a directory that cannot be opened: StartupError is a mistake; else the disk fails, and the origin serves."""
    kind = StartupError if is_mistake(error) else StoreUnavailable
    return kind(f"{what} cannot be used: {error}")


@contextmanager
def store_errors(what: str, kind: type[Exception] = OSError) -> Iterator[None]:
    """Raise StoreUnavailable in place of an OSError, or of this kind; `what` says in its message what has failed."""
    try:
        yield
    except (OSError, kind) as error:
        raise StoreUnavailable(f"{what}: {error}") from error
