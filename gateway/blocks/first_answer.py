"""An answer of the origin that came before the object's version was known: it says which one, and brings its bytes."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.blocks.first_looks import FirstLook
from gateway.objects import ByteRange
from gateway.origin.client import OriginResponse


@dataclass(slots=True)
class FirstAnswer:
    """A good answer to a GET without `If-Match`; `range` are the bytes of the object that its body holds.

    Whoever has it made closes it in the end; a fill takes the response before that, if it needs it.
    """

    look: FirstLook
    response: OriginResponse
    range: ByteRange
    _taken: bool = False

    def take(self, wanted: ByteRange) -> OriginResponse | None:
        """The response, once, if its body begins with the bytes wanted and holds all of them; the taker closes it."""
        if self._taken or self.range.first != wanted.first or self.range.stop < wanted.stop:
            return None
        self._taken = True
        return self.response

    def whole(self, wanted: ByteRange) -> memoryview | None:
        """The bytes wanted, if the body begins with them and all of it is here; to be asked for once, before `take`."""
        if self._taken or self.range.first != wanted.first or self.range.stop < wanted.stop:
            return None
        body = self.response.whole()
        if body is None or len(body) != self.range.length:
            return None
        self._taken = True  # a body that is here whole leaves nothing to be closed
        return body[: wanted.length]

    async def aclose(self) -> None:
        """Give the connection back, unless the response was taken. Idempotent."""
        if not self._taken:
            self._taken = True
            await self.response.aclose()
