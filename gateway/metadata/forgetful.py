"""What stands in the place of the catalog's directory where it cannot be opened: nothing is ever remembered.

So every question goes to the origin, in every slot, and own writes have nothing to void. All workers of a gateway must
do without the directory together: one that writes without it could not void what another remembers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.metadata.listing.batches import Asked
from gateway.metadata.listing.bounds import Bound
from gateway.metadata.listing.dirty_keys import OwnWrite
from gateway.metadata.listing.index import Truth
from gateway.metadata.listing.pages import Wanted
from gateway.metadata.listing.sharing import SharedQuestions
from gateway.metadata.records import Learned
from gateway.metadata.store import Fill
from gateway.objects import ObjectKey, ObjectVersion
from gateway.s3.list_result import ListedPage


class ForgetfulStore:
    """As `CatalogStore`."""

    def lookup(self, key: ObjectKey) -> None:
        return None

    def lookup_version(self, version: ObjectVersion) -> None:
        return None

    def land(self, fills: Sequence[Fill]) -> None:
        return


class ForgetfulEpochs:
    """As `InvalidationEpochs`: always the first."""

    def of_key(self, place: bytes) -> tuple[int, int]:
        return 0, 0

    def of_bucket(self, bucket: str) -> int:
        return 0

    def change_key(self, key: ObjectKey) -> None:
        return

    def change_bucket(self, bucket: str) -> None:
        return

    def change_everything(self) -> None:
        return


class ForgetfulListing:
    """As `ListingIndex`. No question is shared: nobody knows what was written since it was sent."""

    def __init__(self) -> None:
        self.questions: SharedQuestions[ListedPage] = SharedQuestions()

    def find(
        self,
        bucket: str,
        wanted: Wanted,
        bound: Bound,
        *,
        with_owner: bool,
        stale: bool = False,
        truths: Mapping[bytes, Truth] | None = None,
    ) -> None:
        return None

    def entry(self, bucket: str, key: str, bound: Bound) -> None:
        return None

    def asked(self, bucket: str) -> Asked:
        return Asked(Learned(0, 0.0, 0), -1)

    def learn(self, bucket: str, wanted: Wanted, page: ListedPage, asked: Asked, *, merge_seconds: float) -> None:
        return

    def learn_truth(self, bucket: str, key: bytes, truth: Truth, asked: Asked) -> None:
        return

    async def begin_write(self, bucket: str, keys: Sequence[str]) -> OwnWrite:
        return OwnWrite(bucket, ())

    def void_if_not_noted(self, write: OwnWrite) -> None:
        return

    async def end_write(self, write: OwnWrite) -> None:
        return

    async def settle(self) -> None:
        return

    async def close(self) -> bool:
        await self.questions.close()
        return True


class NoDirectory:
    """As `OpenCatalog`."""

    boot = 0

    def __init__(self) -> None:
        self.store = ForgetfulStore()
        self.epochs = ForgetfulEpochs()

    def close(self) -> None:
        return
