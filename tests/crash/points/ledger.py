"""What S3 clients may expect to find, by what they were answered: one state of a key, or several while nobody knows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from gateway.s3.headers import multipart_etag


@dataclass(frozen=True, slots=True)
class Value:
    """An object, or a part."""

    content: bytes = field(repr=False)
    etag: str
    """Quoted."""

    @classmethod
    def of(cls, content: bytes) -> Value:
        """Put in one piece."""
        return cls(content, f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"')

    @classmethod
    def of_parts(cls, parts: list[Value]) -> Value:
        etag = multipart_etag([part.etag for part in parts])
        assert etag is not None
        return cls(b"".join(part.content for part in parts), etag)

    def __str__(self) -> str:
        return f"{len(self.content)} bytes {self.etag}"


State = Value | None
"""Of a key or a part: None is none."""


class Difference(AssertionError):
    """What was found is not what may be there."""


class Ledger:
    """Of keys and uploads."""

    def __init__(self) -> None:
        self.keys: dict[str, list[State]] = {}
        self.uploads: dict[str, Upload] = {}

    def may_be(self, key: str) -> list[State]:
        return self.keys.setdefault(key, [None])

    def trying(self, key: str, value: State) -> None:
        """A request that may make it so is under way."""
        if value not in self.may_be(key):
            self.keys[key] = [*self.may_be(key), value]

    def is_now(self, key: str, value: State) -> None:
        """It was acknowledged, or somebody has seen it."""
        self.keys[key] = [value]

    def saw(self, key: str, found: State) -> None:
        """It was read: from now on it is that. Difference when it may not be."""
        if found not in self.may_be(key):
            allowed = " or ".join(map(str, self.may_be(key)))
            raise Difference(f"{key} is {found}, and may be {allowed}")
        self.is_now(key, found)

    def forget(self) -> None:
        """What is to come is about other keys."""
        self.keys.clear()
        self.uploads.clear()


@dataclass(slots=True)
class Upload:
    """A multipart upload. `parts`: what each number may be; `completing`: what a Complete under way makes of it.

    `may_end_later`: the origin was asked to complete it, and it may be found out at any time that it has.
    """

    key: str
    parts: dict[int, list[State]] = field(default_factory=dict)
    may_be_over: bool = False
    may_be_open: bool = True
    may_end_later: bool = False
    completing: Value | None = None

    def trying(self, number: int, part: Value) -> None:
        self.parts[number] = [*self.parts.get(number, [None]), part]

    def is_now(self, number: int, part: Value) -> None:
        self.parts[number] = [part]

    def saw(self, listed: dict[int, tuple[str, int]] | None) -> None:
        """ListParts, by number ETag and size; None: NoSuchUpload. Difference when it may not be."""
        if listed is None:
            if not self.may_be_over:
                raise Difference(f"an upload of {self.key} is gone")
            self.may_be_open = False
            return
        if not self.may_be_open:
            raise Difference(f"an upload of {self.key} that is over is listed")
        self.may_be_over = self.may_end_later
        for number in self.parts.keys() | listed.keys():
            fits = [one for one in self.parts.get(number, [None]) if _entry(one) == listed.get(number)]
            if not fits:
                raise Difference(f"part {number} of {self.key} is {listed.get(number)}: {self.parts.get(number)}")
            self.parts[number] = fits

    def fits(self, state: State) -> None:
        """Both were looked at: a Complete has made the object and ended the upload, or neither."""
        if self.completing is not None and (state == self.completing) == self.may_be_open:
            raise Difference(f"{self.key} is {state}, and its upload is {'open' if self.may_be_open else 'over'}")

    def value(self) -> Value:
        """Of all its parts."""
        chosen = [self.parts[number][-1] for number in sorted(self.parts)]
        return Value.of_parts([part for part in chosen if part is not None])


def _entry(part: State) -> tuple[str, int] | None:
    return None if part is None else (part.etag, len(part.content))
