"""Sending an immediate response: at once as far as the kernel takes it, the rest in a task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.edge.server.cycle import S3Cycle
from gateway.edge.server.head_parser import RequestHead
from gateway.edge.server.immediate import ImmediateApp, ImmediateResponse
from gateway.edge.server.response_head import ResponseFraming, response_head
from gateway.edge.server.response_writer import ResponseWriter
from gateway.edge.server.sending import Sender
from gateway.errors import ClientDisconnected


def send_now(
    writer: ResponseWriter,
    head: RequestHead,
    response: ImmediateResponse,
    default_lines: bytes,
    *,
    keep_alive: bool,
) -> tuple[ResponseFraming, Sender | None]:
    """Give the kernel what it takes of a response; the sender is what is left. Raises as ResponseWriter does."""
    start, framing = response_head(
        response.status,
        response.headers,
        method=head.method,
        http_version=head.version,
        keep_alive=keep_alive,
        lines=response.lines + default_lines,
        length_bytes=response.length_bytes,
    )
    writer.start(start, framing)
    body = response.body
    if framing.bodiless:
        writer.write_head()
        return framing, None
    if isinstance(body, bytes):
        writer.write_bytes(body, more_body=False)
        return framing, None
    return framing, writer.begin_file(body, more_body=False)


def finishing(
    app: ImmediateApp, begun: object, cycle: S3Cycle, writer: ResponseWriter, rest: Sender
) -> Callable[..., Awaitable[None]]:
    """The application of a task that sends the rest, and tells `app` of the end."""

    async def finish(*_: object) -> None:
        failure: Exception | None = ClientDisconnected("the request was cut off")
        try:
            await cycle.finish_file(rest)
            failure = None
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001 - the application reports it
            failure = error  # and `run_asgi` ends the connection, as the response is not complete
        finally:
            app.end(begun, writer.sent_bytes, failure)

    return finish
