"""What every operation is given: the request, who sent it, and the parts of the gateway it may combine."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.blocks.closed import Blocks
from gateway.clock import Clock
from gateway.metadata.bucket_metadata import BucketMetadataCache
from gateway.metadata.catalog import Catalog
from gateway.metadata.snapshots.registry import SnapshotRegistry
from gateway.objects import ObjectKey
from gateway.operations.buffers import Buffers
from gateway.operations.request_body import RequestBody
from gateway.origin.client import Origin
from gateway.policy.access import Grant
from gateway.policy.slots import Slot, Slots
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import S3Request
from gateway.s3.signature_v4 import SeedSignature
from gateway.writeback.buffer import WritebackBuffer


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one S3 worker, built once by the composition root."""

    origin: Origin
    catalog: Catalog
    answers: BucketMetadataCache
    blocks: Blocks
    slots: Slots
    clock: Clock
    buffers: Buffers = field(default_factory=Buffers)
    snapshots: SnapshotRegistry = field(default_factory=SnapshotRegistry.switched_off)
    writeback: WritebackBuffer | None = None
    buffer_closed: bool = False
    """There may be acknowledged writes on this node's disk, and it cannot be used."""


@dataclass(slots=True)
class Exchange:
    """One authenticated request on its way to an answer.

    `seed` is the signature that signed chunks of the body build on; None for unsigned and SigV2 requests. `anonymous`
    requests carried no signature at all (and were let in by configuration). `slot` is the one that the request's key
    belongs to, or its bucket where it names no key, or the prefix that it lists. `credential` is the access key id, by
    which what is scarce is shared out.
    """

    services: Services
    request: S3Request
    body: RequestBody
    grant: Grant
    seed: SeedSignature | None
    slot: Slot
    anonymous: bool = False
    credential: str = "anonymous"

    @property
    def object_key(self) -> ObjectKey:
        """The object that the request is about."""
        if self.request.bucket is None or self.request.key is None:
            raise s3_error("InvalidRequest", "This operation needs a bucket and a key.")
        return ObjectKey(self.request.bucket, self.request.key)
