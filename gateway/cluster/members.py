"""The members of the cluster, as this node knows them, and the file by which its processes tell each other."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import orjson
import structlog

from gateway.cluster.placement import Placement
from gateway.core.clock import Clock
from gateway.core.model import ObjectKey, immutable

SETTLED_SECONDS: Final = 600.0
"""Seconds for which a change of the members is recent: an owner that misses asks who owned the block before."""

LOOK_SECONDS: Final = 1.0
"""Seconds between two looks of a process at the view file."""

VIEW: Final = "cluster-view"
"""The name of the view file in the shared directory."""

_log = structlog.get_logger("forebay.cluster")


@immutable
class Member:
    """One node. Blocks are placed by `name`: a node that takes over the name owns the same blocks.

    `address` is its peer port's. `caches`: False while its directory is closed; then it owns nothing. `since`: from
    when on it has been a member without a gap, on this machine's monotonic clock; None until it has told. `answers`:
    False if it has not answered the last hello; it stays a member, and owns what it owned. `prefixes`: where its
    writes must be looked up, and `store` is what it calls its buffer; without Redis both are empty.
    """

    name: str
    address: str
    zone: str = ""
    weight: int = 1
    caches: bool = True
    since: float | None = None
    answers: bool = True
    prefixes: tuple[str, ...] = ()
    store: str = ""


def alike(own: Member, address: str) -> Member:
    """Return a member that has never answered: like this node, so nodes that start at once agree."""
    return replace(own, name=address, address=address, caches=True, since=None)


@immutable
class Gone:
    """A member that has left the list, and when, on the monotonic clock."""

    member: Member
    at: float


class View:
    """The present members, and which of them own a block."""

    def __init__(
        self,
        members: Iterable[Member],
        address: str,
        zone: str,
        clock: Clock,
        *,
        gone: Iterable[Gone] = (),
        is_silent: Callable[[Member], bool] = lambda _member: False,
    ) -> None:
        """`address` and `zone` are this node's. `is_silent`: whether requests to a member have found it silent."""
        self.members = tuple(members)
        self.me: Member | None = next((one for one in self.members if one.address == address), None)
        """This node; None: it is not among the members, and looks after nothing."""

        self._zone = zone
        self._clock = clock
        self._gone = tuple(gone)
        self._is_silent = is_silent
        self._now = Placement(one for one in self.members if self._owns(one))
        changes = [one.since for one in self.members if one.since is not None and self._owns(one)]
        changes += [one.at for one in self._gone if self._owns(one.member)]
        self._settled_at = max(changes, default=-math.inf) + SETTLED_SECONDS
        self._before, self._before_until = Placement[Member](()), -math.inf

    def _owns(self, member: Member) -> bool:
        return member.caches and member.zone == self._zone

    def owners(self, key: ObjectKey, number: int) -> tuple[Member, ...]:
        """Return the first and the second owner of a block, of those in this node's zone; fewer if there are fewer.

        The second comes first while the first is silent.
        """
        owners = self._now.owners(key, number)
        if len(owners) == 2 and not self._answers(owners[0]) and self._answers(owners[1]):
            return owners[::-1]
        return owners

    def owns(self, key: ObjectKey, number: int) -> bool:
        """Return True if this node is the first owner, silent members considered. Any thread."""
        return self._now.owners(key, number)[:1] == (self.me,)

    def owner_before(self, key: ObjectKey, number: int) -> Member | None:
        """Return who looked after the block before the members last changed, if that was not long ago; not this one."""
        now = self._clock.monotonic()
        if now >= self._settled_at:
            return None
        if now >= self._before_until:
            self._before, self._before_until = self._those_before(now)
        owner = next((one for one in self._before.owners(key, number) if self._answers(one)), None)
        return None if owner is self.me else owner

    def _answers(self, member: Member) -> bool:
        return member is self.me or not self._is_silent(member)

    def _those_before(self, now: float) -> tuple[Placement[Member], float]:
        """Return the members that are not new, with those that have just gone, and until when that is so."""
        known = [(one, one.since) for one in self.members if one.since is not None and self._owns(one)]
        gone = [one for one in self._gone if now < one.at + SETTLED_SECONDS and self._owns(one.member)]
        old = [one for one, since in known if since + SETTLED_SECONDS <= now]
        changes = [since + SETTLED_SECONDS for _, since in known] + [one.at + SETTLED_SECONDS for one in gone]
        return Placement([*old, *(one.member for one in gone)]), min(one for one in changes if one > now)


def view_document(members: Sequence[Member], gone: Sequence[Gone]) -> bytes:
    """Return the content of the view file."""
    return orjson.dumps({"members": members, "gone": gone})


def read_view(file: Path) -> tuple[list[Member], list[Gone]]:
    """Return what the view file says. Raise OSError, or ValueError if it is damaged."""
    try:
        document = orjson.loads(file.read_bytes())
        members = [member_from(one) for one in document["members"]]
        return members, [Gone(member_from(one["member"]), one["at"]) for one in document["gone"]]
    except (TypeError, KeyError) as error:
        raise ValueError(f"the view file of another version: {error}") from error


def member_from(fields: Mapping[str, Any]) -> Member:
    """Return the member of a JSON document. TypeError if it is of another version."""
    return Member(**{**fields, "prefixes": tuple(fields.get("prefixes", ()))})


class Members:
    """The view of this process. It follows the view file, which the background process writes. Event loop only."""

    def __init__(
        self,
        file: Path | None,
        first: Iterable[Member],
        address: str,
        zone: str,
        clock: Clock,
        is_silent: Callable[[Member], bool] = lambda _member: False,
    ) -> None:
        """`first` are the members until there is a file; `file` None: for good."""
        self._file = file
        self._own = (address, zone, clock)
        self._is_silent = is_silent
        self._clock = clock
        self._seen = (0, 0)
        self.view = View(first, address, zone, clock, is_silent=is_silent)
        self.look()

    async def follow(self) -> None:
        """Follow the file for ever."""
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Take the view from the file if another one is there."""
        if self._file is None:
            return
        try:
            status = os.stat(self._file)
            if (seen := (status.st_ino, status.st_mtime_ns)) == self._seen:
                return
            members, gone = read_view(self._file)
        except FileNotFoundError:  # the background process has not begun to tell
            return
        except (OSError, ValueError) as error:
            _log.warning(
                "the view of the cluster cannot be read: this process keeps to the one before", error=str(error)
            )
            return
        self._seen = seen
        self.view = View(members, *self._own, gone=gone, is_silent=self._is_silent)
