"""What can be made to go wrong at `MemoryOrigin`, and the record of what it was asked.

A `Fault` is a condition and an effect: `Fault(on(Operation.GET_OBJECT, key="a"), Answer(503, "SlowDown"), times=2)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.origin.client import Purpose
from gateway.s3.requests import Operation


@dataclass(slots=True)
class Call:
    """One request that arrived. `number` counts from 1; `status` is None while there is no answer.

    `signed_by` is the access key id of a caller in whose own name it came; None: in the gateway's.
    """

    number: int
    operation: Operation
    method: str
    bucket: str | None
    key: str | None
    query: Sequence[tuple[str, str | None]]
    headers: Mapping[str, str]
    purpose: Purpose
    status: int | None = None
    signed_by: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An error answer. `late`: only after the operation was carried out. `body` None is the code's error document."""

    status: int
    code: str = "InternalError"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    late: bool = False


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No answer: the connection breaks. `late`: only after the operation was carried out."""

    late: bool = False


@dataclass(frozen=True, slots=True)
class Delay:
    """The answer comes `seconds` of the clock later."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hold:
    """The request waits until the event is set, before anything is done. `reached` is set when it waits."""

    until: asyncio.Event
    reached: asyncio.Event | None = None


@dataclass(frozen=True, slots=True)
class CutBody:
    """The answer's body ends after `after_bytes`; over HTTP by an orderly close, or by a reset."""

    after_bytes: int
    reset: bool = False


@dataclass(frozen=True, slots=True)
class AlterHeaders:
    """The answer's headers are replaced; None removes one: wrong ETag, wrong Content-Range, and so on."""

    headers: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class AlterBody:
    """The answer's body is changed, its length adjusted: wrong bytes, a 200 with `<Error>`, an empty ETag."""

    change: Callable[[bytes], bytes]


Effect = Answer | Unreachable | Delay | Hold | CutBody | AlterHeaders | AlterBody


@dataclass(slots=True)
class Fault:
    """`effect` for the first `times` calls that fit `when`; None: for all of them."""

    when: Callable[[Call], bool]
    effect: Effect
    times: int | None = 1

    def takes(self, call: Call) -> bool:
        """Whether this call is hit; counts it if so."""
        if self.times == 0 or not self.when(call):
            return False
        if self.times is not None:
            self.times -= 1
        return True


def on(
    operation: Operation | None = None, *, bucket: str | None = None, key: str | None = None
) -> Callable[[Call], bool]:
    """A condition: all of what is given fits."""

    def fits(call: Call) -> bool:
        return (
            (operation is None or call.operation is operation)
            and (bucket is None or call.bucket == bucket)
            and (key is None or call.key == key)
        )

    return fits
