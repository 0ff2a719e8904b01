"""The members of the cluster, as this node knows them."""

from __future__ import annotations

from typing import Protocol

from gateway.core.model import ObjectKey, immutable


@immutable
class Member:
    """One node. `name` is its place: whoever has it looks after the same blocks. `address` is its peer port's.

    `caches`: False while its directory is closed; then it looks after nothing.
    """

    name: str
    address: str
    zone: str = ""
    weight: int = 1
    caches: bool = True


class View(Protocol):
    """Who is there now, and who looks after which block."""

    members: tuple[Member, ...]

    me: Member | None
    """This node; None: it is not among the members, and looks after nothing."""

    def owners(self, key: ObjectKey, number: int) -> tuple[Member, ...]:
        """Return the first and the second owner of a block, of those in this node's zone; fewer if there are fewer."""

    def owner_before(self, key: ObjectKey, number: int) -> Member | None:
        """Return who looked after the block before the members last changed, if that was not long ago; not this one."""
