"""An answer that may take longer than clients wait without a byte: head and white space first, the outcome when known.

So does S3 with CompleteMultipartUpload (S3 API, "CompleteMultipartUpload"): a 200 whose document may be an `<Error>`,
which SDKs treat as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from gateway.clock import Clock
from gateway.errors import ForebayError, S3Error
from gateway.objects import BodyStream
from gateway.operations.context import Response
from gateway.s3.error_codes import error_document, s3_error
from gateway.s3.xml_writer import PROLOG

QUIET_SECONDS = 10.0

_PROLOG = PROLOG.encode()


async def with_retries(answering: Coroutine[Any, Any, Response], clock: Clock) -> Response:
    """The answer, whose body is an XML document in memory. Who does not want it any more ends what makes it."""
    wait = _Wait(asyncio.create_task(answering), clock)
    try:
        if await wait.is_over():
            return await wait.answering
    except BaseException:
        await wait.aclose()
        raise
    return Response(200, [("content-type", "application/xml")], wait.body(), "forwarded", wait)


class _Wait:
    """For one answer."""

    def __init__(self, answering: asyncio.Task[Response], clock: Clock) -> None:
        self.answering = answering
        self._clock = clock

    async def is_over(self) -> bool:
        """Whether the answer is known, after some time at most."""
        pause = asyncio.ensure_future(self._clock.sleep(QUIET_SECONDS))
        try:
            await asyncio.wait({self.answering, pause}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
        return self.answering.done()

    async def body(self) -> BodyStream:
        yield _PROLOG
        while not await self.is_over():
            yield b" "
        yield (await self._document()).removeprefix(_PROLOG)

    async def aclose(self) -> None:
        self.answering.cancel()
        await asyncio.gather(self.answering, return_exceptions=True)

    async def _document(self) -> bytes:
        try:
            reply = await self.answering
        except ForebayError as error:
            said = error if isinstance(error, S3Error) else s3_error("ServiceUnavailable", str(error))
            return error_document(said, resource="", request_id="", host_id="")
        assert isinstance(reply.body, bytes)  # noqa: S101 - as `with_retries` says
        return reply.body
