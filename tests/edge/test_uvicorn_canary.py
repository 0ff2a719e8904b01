"""The server builds on parts of uvicorn that are not its public interface: these tests say which, and fail first.

When one fails after an update: read uvicorn's changes of that part, adapt `gateway.edge`, then the test.
"""

from __future__ import annotations

import asyncio
import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import Server, ServerState

from gateway.edge.connection import S3Protocol
from tests.edge.apps import echo, file_app
from tests.support.serving import Wire, listening_socket, request


def parameters(function: object) -> list[str]:
    assert callable(function)
    return list(inspect.signature(function).parameters)


def test_the_version_is_the_one_that_was_read() -> None:
    """pyproject.toml pins it for the same reason."""
    assert version("uvicorn").startswith("0.54.")


def test_the_protocol_is_made_as_we_make_it() -> None:
    """And its methods that we call or replace are there, with these parameters."""
    expected = {
        "__init__": ["self", "config", "server_state", "app_state", "_loop"],
        "connection_made": ["self", "transport"],
        "connection_lost": ["self", "exc"],
        "eof_received": ["self"],
        "data_received": ["self", "data"],
        "on_response_complete": ["self"],
        "shutdown": ["self"],
        "pause_writing": ["self"],
        "resume_writing": ["self"],
    }
    assert {name: parameters(getattr(HttpToolsProtocol, name)) for name in expected} == expected


async def test_the_protocol_has_the_attributes_we_use() -> None:
    """They are set by its constructor."""
    config = Config(echo, ws="none", lifespan="off", interface="asgi3", log_config=None)
    state = ServerState()
    protocol = HttpToolsProtocol(config, state, {"a": 1})
    assert protocol.app is config.loaded_app
    assert protocol.connections is state.connections
    assert protocol.tasks is state.tasks
    assert vars(protocol)["cycle"] is None
    assert protocol.app_state == {"a": 1}
    assert protocol.asgi_version == "3.0"


async def test_flow_control_is_what_we_take_it_for() -> None:
    """`write_paused` follows the transport, `read_paused` our own calls."""
    calls: list[str] = []

    class Transport(asyncio.Transport):
        def pause_reading(self) -> None:
            calls.append("pause")

        def resume_reading(self) -> None:
            calls.append("resume")

    flow = FlowControl(Transport())
    assert (flow.read_paused, flow.write_paused) == (False, False)
    flow.pause_reading()
    flow.pause_reading()
    flow.resume_reading()
    assert calls == ["pause", "resume"]
    flow.pause_writing()
    waiting = asyncio.create_task(flow.drain())
    await asyncio.sleep(0)
    assert not waiting.done()
    flow.resume_writing()
    await waiting


def test_status_lines_are_complete() -> None:
    """Every status has one."""
    assert STATUS_LINE[206] == b"HTTP/1.1 206 Partial Content\r\n"
    assert set(range(100, 600)) <= set(STATUS_LINE)


def test_the_state_of_a_server_is_as_we_extend_it() -> None:
    """Counters and sets that connections share."""
    state = ServerState()
    assert (state.total_requests, state.connections, state.tasks, state.default_headers) == (0, set(), set(), [])


@pytest.mark.parametrize("protocol", ["h11", "httptools", S3Protocol], ids=["h11", "httptools", "ours"])
def test_applications_run_under_uvicorn_itself(protocol: Any, tmp_path: Path) -> None:
    """Without the extension they send bytes; and our protocol works under uvicorn's own server too."""
    path = tmp_path / "content"
    path.write_bytes(b"content")
    bytes_sent, echoed = (_serve_with_uvicorn(app, protocol) for app in (file_app(path), echo))
    assert (bytes_sent, echoed) == (b"content", b"body")


def _serve_with_uvicorn(app: Any, protocol: Any) -> bytes:
    async def scenario() -> bytes:
        listener = listening_socket()
        config = Config(
            app, http=protocol, ws="none", lifespan="off", loop="asyncio", interface="asgi3", log_config=None
        )
        server = Server(config)
        # `serve` would take over the signals of the test run.
        running = asyncio.create_task(server._serve([listener]))
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
        wire = Wire(reader, writer)
        await wire.say(request("PUT", "/b/k", b"body"))
        answer = await wire.answer()
        assert answer.status == 200
        await wire.close()
        server.should_exit = True
        await asyncio.wait_for(running, 20)
        return answer.body

    return asyncio.run(scenario())
