"""What stands in the place of the catalog's directory where it cannot be opened: nothing is ever remembered.

So every question goes to the origin, in every slot, and own writes have nothing to void. All workers of a gateway must
do without the directory together: one that writes without it could not void what another remembers.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.metadata.store import Fill
from gateway.objects import ObjectKey


class ForgetfulStore:
    """As `CatalogStore`."""

    def lookup(self, key: ObjectKey) -> None:
        return None

    def land(self, fills: Sequence[Fill]) -> None:
        return


class ForgetfulGenerations:
    """As `WriteGenerations`: always the first."""

    def of(self, key: ObjectKey) -> int:
        return 0

    def of_bucket(self, bucket: str) -> int:
        return 0

    def raise_key(self, key: ObjectKey) -> None:
        return

    def raise_bucket(self, bucket: str) -> None:
        return

    def raise_everything(self) -> None:
        return


class NoDirectory:
    """As `OpenCatalog`."""

    boot = 0

    def __init__(self) -> None:
        self.store = ForgetfulStore()
        self.generations = ForgetfulGenerations()

    def close(self) -> None:
        return
