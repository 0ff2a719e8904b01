"""An answer of the origin that came before the object's version was known: it says which one, and brings its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.blocks.filling.first_looks import FirstLook
from gateway.objects import ByteRange
from gateway.origin.client import OriginResponse


@dataclass(slots=True)
class FirstAnswer:
    """A good answer to a GET without `If-Match`; `range` are the bytes of the object that its body holds.

    Whoever has it made closes it in the end; a fill takes the response before that, if it needs it. A reader may have
    it for long after: it holds the response, with what has come of its body, no longer than it is of use.
    """

    look: FirstLook
    range: ByteRange
    _response: OriginResponse | None

    @property
    def headers(self) -> Mapping[str, str]:
        """Those of the response; none once it was taken."""
        return self._response.headers if self._response is not None else {}

    def take(self, wanted: ByteRange) -> OriginResponse | None:
        """The response, once, if its body begins with the bytes wanted and holds all of them; the taker closes it."""
        if self.range.first != wanted.first or self.range.stop < wanted.stop:
            return None
        response, self._response = self._response, None
        return response

    def whole(self, wanted: ByteRange) -> memoryview | None:
        """The bytes wanted, if the body begins with them and all of it is here; to be asked for once, before `take`."""
        if self._response is None or self.range.first != wanted.first or self.range.stop < wanted.stop:
            return None
        body = self._response.whole()
        if body is None or len(body) != self.range.length:
            return None
        self._response = None  # a body that is here whole leaves nothing to be closed
        return body[: wanted.length]

    async def aclose(self) -> None:
        """Give the connection back, unless the response was taken. Idempotent."""
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()
