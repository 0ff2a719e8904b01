"""Traffic over the link to the origin, as a connection's end sees it: policy finds the link's capacity by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from gateway.origin.client import Direction, OriginRequest, StreamedBody

LARGE_BYTES = 2**20


class AnswerKind(IntEnum):
    """Answers whose times can be compared with each other."""

    GET = 0
    HEAD = 1
    WRITE = 2
    LARGE_WRITE = 3

    @property
    def direction(self) -> Direction:
        return "read" if self <= AnswerKind.HEAD else "write"


@dataclass(frozen=True, slots=True)
class Traffic:
    """One process's traffic over the link in one direction.

    `arrived_bytes`: all that came through the link, received by the machine or acknowledged by the origin's.
    `unacknowledged_bytes`: handed over to be sent, and not acknowledged. `waiting`: how long the requests that are
    complete and have no answer have waited, in seconds, each with its kind. `bodies`: how many are under way;
    `starved_bodies`: of them, those whose reader waits for bytes that have not arrived.
    """

    arrived_bytes: int
    unacknowledged_bytes: int = 0
    waiting: Sequence[tuple[AnswerKind, float]] = ()
    bodies: int = 0
    starved_bodies: int = 0


class LinkEnd(Protocol):
    def traffic(self) -> Mapping[Direction, Traffic]:
        """Return the traffic in each direction."""

    def limit_windows(self, size_bytes: int) -> None:
        """Let no more than this be on its way to any connection."""


def in_all(ends: Sequence[Mapping[Direction, Traffic]]) -> dict[Direction, Traffic]:
    return {direction: _sum([end[direction] for end in ends]) for direction in _DIRECTIONS}


_DIRECTIONS: tuple[Direction, ...] = ("read", "write")


def _sum(parts: Sequence[Traffic]) -> Traffic:
    return Traffic(
        sum(one.arrived_bytes for one in parts),
        sum(one.unacknowledged_bytes for one in parts),
        tuple(waiting for one in parts for waiting in one.waiting),
        sum(one.bodies for one in parts),
        sum(one.starved_bodies for one in parts),
    )


@dataclass(slots=True)
class Moved:
    """Bytes that all connections of a process have received, and have handed over to be sent."""

    received_bytes: int = 0
    handed_bytes: int = 0


_NOT_OF_BYTES = frozenset({"uploadId", "attributes", "acl", "tagging", "retention", "legal-hold", "torrent"})


def answer_kind(request: OriginRequest) -> AnswerKind | None:
    """None: how long its answer takes says nothing about the link."""
    if request.key is None:
        return None
    if request.method in ("GET", "HEAD"):
        if request.query and any(name in _NOT_OF_BYTES for name, _ in request.query):
            return None
        return AnswerKind.GET if request.method == "GET" else AnswerKind.HEAD
    if request.method != "PUT" or not request.body:
        return None
    body = request.body
    length_bytes = body.length_bytes if isinstance(body, StreamedBody) else len(body)
    return AnswerKind.LARGE_WRITE if length_bytes is None or length_bytes >= LARGE_BYTES else AnswerKind.WRITE
