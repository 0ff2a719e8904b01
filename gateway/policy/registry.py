"""The interface by which requests learn of other nodes' writes.

A registry finds: it says which node has a write of a key pending, and when a key was changed last. It keeps nothing
that the nodes' journals and the bucket do not have, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from gateway.core.model import Claim, Known, ObjectKey
from gateway.origin.client import OriginRequest, OriginResponse
from gateway.policy.slots import Slot

BOUND_SECONDS_MAX: Final = 600.0
"""The longest time for which a slot that asks the registry believes what it remembers."""

MEMBERS_TOLD_MAX: Final = 4096

SEQUENCE_BITS: Final = 40
"""A stamp or claim is the run's 24 bits, and then so many of the sequence, which also numbers claims' `order`."""

KEYS_MAX: Final = 1000
"""The most keys of one question."""

WHOLE_BUCKET: Final = ""
"""In the place of a key: all keys of the bucket."""


class KnownKeys(NamedTuple):
    """Some keys of a bucket, in order, with what is known. The next ones begin at `end`; None: there are no more.

    `has_changes`: all that has changed is among them; else nothing that is remembered counts.
    """

    rows: Sequence[tuple[bytes, Known]]
    end: bytes | None = None
    has_changes: bool = True


class Registry(Protocol):
    """It knows all nodes' writes. All methods but `asks`, `can_claim` and `release` raise RegistryAway.

    A write that goes through stamps its keys when it begins and when it ends. What a node's buffer takes is claimed
    before its journal has it, so that every node finds it there.
    """

    def asks(self, slot: Slot) -> bool:
        """Return whether requests in a slot look here first: other nodes may write there."""

    async def look(self, keys: Sequence[ObjectKey]) -> Sequence[Known]: ...

    async def rows(self, bucket: str, start: bytes, stop: bytes) -> KnownKeys:
        """Return the first known keys in [start, stop)."""

    async def holders(self, bucket: str, start: bytes, stop: bytes) -> Sequence[str]:
        """Return the other stores that have something pending in [start, stop)."""

    async def begin(self, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        """Stamp keys that are about to be written past the buffer."""

    async def end(self, keys: Sequence[ObjectKey]) -> None:
        """Stamp keys again, when the write is over or in doubt."""

    @property
    def can_claim(self) -> bool:
        """Return whether `claim` works now: else writes go through."""

    async def claim(self, claim: Claim) -> Known:
        """Claim a key for this node's buffer, before its journal has the write; not if another node has it pending."""

    async def confirm(self, claim: Claim, known: Known, claimed_at: float) -> bool:
        """Claim again if the registry may have lost the claim, and return whether. Call it between commit and answer.

        `known` is what `claim` returned, `claimed_at` the monotonic time before that.
        """

    async def release(self, claim: Claim) -> None:
        """Take back a claim whose write is not acknowledged."""


class StoreEntry(BaseModel):
    """A pending write as LIST shows it; `template` are the parts of an `EntryTemplate`. A deletion has neither."""

    model_config = ConfigDict(frozen=True)

    is_deleted: bool = False
    modified: str = ""
    etag: str = ""
    size_bytes: int = 0
    template: tuple[str, str | None, str] = ("", None, "")


class StoreUpload(BaseModel):
    """An open upload as ListMultipartUploads shows it. `rest` is XML."""

    model_config = ConfigDict(frozen=True)

    key: str
    upload_id: str
    initiated: float
    rest: str


class StoreQuestion(BaseModel):
    """A question to another node about what its buffer has pending; `forget` and `hurry` ask it to do something.

    `entries`: what of these keys is pending there?
    `names`: which are the first KEYS_MAX keys from the first of these two places (bytes, as Latin-1) to the second?
    `uploads`: which uploads are open under a prefix, from a key on (the two keys)?
    `at-origin`: by which ids has the origin uploads of these keys that belong to that node's writes?
    `earlier`: which writes under a prefix does a marker of this order wait for (KEYS_MAX names at most)?
    `behind`: which of the keys behind the first, a marker of this order, have writes that wait for it?
    `left`: for which of these checkpoints does the bucket lack something that was acknowledged there?
    `forget`: the keys have changed. `hurry`: flush them before others.

    These are answered by a `document` in JSON:

    `flush`: send what lies under a prefix (a URL) before others; with `through`: what is left of that?
    `checkpoints`: what is known of checkpoints under a prefix (a URL), behind a token?
    `reads`: how far were files of these checkpoints read?
    """

    model_config = ConfigDict(frozen=True)

    verb: Literal[
        "entries",
        "names",
        "uploads",
        "at-origin",
        "earlier",
        "behind",
        "left",
        "flush",
        "checkpoints",
        "reads",
        "forget",
        "hurry",
    ]
    members: str = ""
    """Digest of the members that the asker knows."""
    bucket: Annotated[str, Field(max_length=255)]
    keys: Annotated[tuple[str, ...], Field(max_length=KEYS_MAX)]
    order: int = 0
    through: int | None = None
    is_name: bool = False


class StoreAnswer(BaseModel):
    """`entries` are in the order of the keys; None: nothing is pending. `store` is the buffer that answers."""

    model_config = ConfigDict(frozen=True)

    store: str = ""

    entries: tuple[StoreEntry | None, ...] = ()
    names: tuple[str, ...] = ()
    members: Annotated[tuple[str, ...], Field(max_length=MEMBERS_TOLD_MAX)] = ()
    """Addresses of all members, if the asker knows others."""
    uploads: tuple[StoreUpload, ...] = ()
    end: str | None = None
    """The first key whose uploads are not told; None: all are."""
    document: str = ""


class Stores(Protocol):
    """The other nodes' buffers, by the names that the registry and upload ids have of them.

    Each method raises RegistryAway if the node does not answer as one that has that buffer.
    """

    def is_known(self, store: str) -> bool: ...

    def name_of(self, store: str) -> str:
        """Return the name of the node that has a buffer, for people."""

    async def send(self, store: str, request: OriginRequest) -> OriginResponse | None:
        """Return the answer to a client's request, to be closed; None: what it asks for is not pending there."""

    async def tell(self, store: str, question: StoreQuestion) -> StoreAnswer: ...

    def members(self) -> tuple[str, Sequence[str]]:
        """Return a digest of the members that this node knows, and their addresses."""

    async def forget(self, bucket: str, keys: Sequence[str]) -> None:
        """Make the other nodes forget keys. A node that does not answer keeps to its bounds."""

    async def uploads(self, bucket: str, prefix: str, start: str) -> tuple[Sequence[StoreUpload], str | None]:
        """Return the uploads that are open in all of them under a prefix, from a key on and before another."""

    async def at_origin(self, bucket: str, keys: Sequence[str]) -> frozenset[str]:
        """Return the ids by which the origin has uploads of these keys that belong to writes of other nodes."""
