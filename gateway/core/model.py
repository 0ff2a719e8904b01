"""The nouns that every layer shares: which object, which version of it, which bytes, where they lie."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def immutable(described: type[T]) -> type[T]:
    """Make a dataclass with slots that the type checker holds to be frozen, and that is not at run time.

    `dataclass(frozen=True)` sets each field past its own guard: 6,600 instructions for one of four fields, instead of
    1,500.
    """
    return dataclass(slots=True, unsafe_hash=True)(described)


LOCAL_EXPIRY_SECONDS = 7 * 86_400.0
"""Seconds for which acknowledged objects that are never flushed are kept, unless their slot says otherwise."""

MARKERS = (
    ".metadata",
    ".metadata.tmp",  # PyTorch renames it: a remaining one is copied here, and waits for other nodes' files here
    "*.index.json",
    "latest*",
    "_SUCCESS",
    "checkpoint",
    "manifest*",
    "*.manifest",
    "*manifest.json",
    "index.json",
    "_metadata",
    "_common_metadata",
    "dataset_info.json",
    "state.json",
    "zarr.json",
    ".zmetadata",
    "_delta_log/*",
    ".hoodie/*",
    ".hoodie/timeline/*",
    "metadata/*.metadata.json",
    "metadata/*.metadata.json.gz",
    "version-hint.text",
    "snapshot/snapshot-*",
    "snapshot/LATEST",
    "refs/*/ref.json",
)
"""The names by which PyTorch DCP, safetensors, DeepSpeed, Megatron, Spark, TensorFlow, Streaming, LitData, Parquet,
Hugging Face datasets, Zarr and table formats tell readers that other objects are complete."""


MissReason: TypeAlias = Literal["first-read", "evicted", "changed", "not-kept", "expired"]
"""Reason why requested bytes were not all cached, as far as this node remembers:

    first-read   none of it was cached before
    evicted      it was cached, and made room for something else, or was found damaged
    changed      the cached object is of another version
    not-kept     it is not kept: by its slot, or for lack of room or of a disk
    expired      the cached object is older than its slot allows
"""


class ObjectKey(NamedTuple):
    """An object's name. `key` is the decoded S3 key; it is opaque and never becomes a path."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


class Claim(NamedTuple):
    """A key that a write is about to make pending. `token` names the write: its row in the journal has the same.

    The claim is over with its write, or with the one that replaces that.
    """

    key: ObjectKey
    token: str


class PendingClaim(NamedTuple):
    """The claim of a write that is pending on this node.

    `order`: the write's place among those of all nodes, no lower than the number of its claim; 0: it is not known.
    """

    key: ObjectKey
    token: str
    order: int

    @property
    def claim(self) -> Claim:
        return Claim(self.key, self.token)


CLAIMS_MAX: Final = 64
"""The registry keeps so many claims of one key, the last ones. One that goes is over, unless so many later writes have
claimed the key while that one's commit was under way."""


@immutable
class Known:
    """The registry's knowledge of a key.

    `store`: the other node's store that has it pending; None: no other has. `claim` is the sequence number of that
    claim, `stamp` that of the key's last change through any node; 0: none. Numbers of two runs of Redis differ. `stamp`
    None: nobody can say when the key was changed.
    """

    store: str | None = None
    claim: int = 0
    stamp: int | None = 0
    order: int = 0
    """The sequence number of this node's last claim. In a later run, no number is lower than one of a write that is
    still pending."""


@dataclass(frozen=True, slots=True)
class Homes:
    """The home of each bucket: its own endpoint URL, else that of the origin, `main`.

    At another home a bucket's name stands for another bucket: knowledge of the one does not apply to the other.
    """

    main: str
    by_bucket: Mapping[str, str] = field(default_factory=dict)

    def of(self, bucket: str) -> str:
        """Return the endpoint URL of a bucket's home."""
        return self.by_bucket.get(bucket, self.main)

    def are_one(self, bucket: str, other: str) -> bool:
        return self.of(bucket) == self.of(other)

    def to_text(self) -> str:
        """Return the main home, then a line `bucket endpoint` for each bucket that has another."""
        return "\n".join([self.main, *(f"{bucket} {home}" for bucket, home in sorted(self.by_bucket.items()))])

    @classmethod
    def from_text(cls, text: str) -> Homes:
        """Return the homes that `to_text` wrote."""
        main, *lines = text.split("\n")
        pairs = (line.partition(" ") for line in lines)
        return cls(main, {bucket: home for bucket, _, home in pairs})


@immutable
class ObjectVersion:
    """One immutable state of an object: the pair (key, ETag) never changes its bytes.

    `etag` is kept as the origin sent it, quotes included; `size_bytes` is the length of the whole object.
    """

    key: ObjectKey
    etag: str
    size_bytes: int


@immutable
class ByteRange:
    """Bytes `first` to `last`, both included, as in `Content-Range` (RFC 9110, 14.4). Never empty."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise ValueError(f"not a byte range: {self.first}-{self.last}")

    @property
    def length(self) -> int:
        return self.last - self.first + 1

    @property
    def stop(self) -> int:
        """The first byte behind the range."""
        return self.last + 1


class SpanFile(Protocol):
    """The bytes of a file that are sent as they lie in it."""

    def intact(self, offset: int, count: int) -> bool:
        """Return True if bytes of the file are still those that were checked. Never blocks."""

    def stayed(self, offset: int, count: int) -> bool:
        """`intact`, for who has just taken hold of the file's pages and was told before that they are.

        Pages that have been exchanged in between are found, writing into the file is not.
        """

    async def restore(self, offset: int, count: int) -> memoryview | None:
        """Check changed bytes again; return the first of them, in memory, or None: they are intact again.

        BlockDamaged when they are not what was written, StoreUnavailable when they cannot be read.
        """


READ_SIZE_BYTES = 1024**2
"""Bytes of a file that are read into memory at once."""

READS_MAX = 3
"""Each is lost to a file whose bytes leave memory while they are read."""


@dataclass(slots=True)
class FileSpan:
    """`count` bytes at `offset` of an open, immutable file, which need not pass through memory.

    A receiver must send a span before it asks for the next piece: the descriptor belongs to the giver.
    The bytes are intact when it is given. A receiver that has waited since checks `file` again before it sends more:
    bytes that have left memory meanwhile come back unchecked. Without `file` there is no check.
    """

    descriptor: int
    offset: int
    count: int
    file: SpanFile | None = None

    async def read(self) -> AsyncGenerator[bytes | memoryview, None]:
        """Its bytes in memory, in order, as they were checked. OSError when they cannot be read, and as `restore`."""
        offset, stop = self.offset, self.offset + self.count
        while offset < stop:
            data = await self._read_at(offset, min(READ_SIZE_BYTES, stop - offset))
            offset += len(data)
            yield data

    async def _read_at(self, offset: int, count: int) -> bytes | memoryview:
        for _ in range(READS_MAX):
            if self.file is None or self.file.intact(offset, count):
                data = os.pread(self.descriptor, count, offset)
                if len(data) == count and (self.file is None or self.file.intact(offset, count)):
                    return data
            restored = await self.file.restore(offset, count) if self.file is not None else None
            if restored is not None:
                return restored
        raise OSError(f"{count} bytes at {offset} of a block file cannot be read")


class PinnedFileSpan:
    """A whole response body as it lies in one file, which stays open until `close`. No ABC: `isinstance` costs more."""

    __slots__ = ("span",)

    span: FileSpan

    def failed(self, error: Exception) -> None:
        """Note that the span could not be sent to its end, and not because the client left."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the file, sent or not. Idempotent."""
        raise NotImplementedError


@dataclass(slots=True)
class BorrowedBuffer:
    """Bytes in memory that are lent to their sender, until it asks for the next piece.

    A sender that cannot send them all at once sets `taken` to the number sent (all by default), and releases them:
    the rest comes again with the next piece, from its place at that time.
    """

    content: memoryview
    taken: int = field(init=False)

    def __post_init__(self) -> None:
        self.taken = len(self.content)


BodyPiece = bytes | memoryview | FileSpan | BorrowedBuffer
"""A piece of a response body: bytes in memory, or bytes of a file that need not pass through memory."""


def size_of(piece: BodyPiece) -> int:
    """Return the bytes of a piece, or, of a buffer, those that its reader has taken."""
    if isinstance(piece, FileSpan):
        return piece.count
    return piece.taken if isinstance(piece, BorrowedBuffer) else len(piece)


BodyStream = AsyncGenerator[BodyPiece, None]
"""A response body in order. Closing the generator (`aclose`) gives back everything it holds."""
