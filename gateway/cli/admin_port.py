"""The admin port of a running gateway, as commands ask it.

A room of its own, entered by the commands that ask: `serve` needs no HTTP client.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import httpx

from gateway.cli.common import fail, printable

_ANSWER_TIMEOUT_SECONDS = 10.0
_AGAIN_SECONDS = 0.5

_STRANGE_SECONDS = 10.0
"""So long a port at which nobody has ever answered is tried again, however much patience there is."""

_STREAM_TIMEOUT_SECONDS = 600.0
"""Between pieces, and behind the last of them: a snapshot of many objects is read and synced as a whole."""


class AdminPort:
    """The admin port of a running gateway."""

    def __init__(self, base_url: str, token: str | None) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._has_answered = False

    def get(self, path: str, *, patience_seconds: float = 0.0) -> dict[str, Any]:
        """A document; ends the command when there is none.

        With patience, a gateway that does not answer now, or says that it cannot (503), is asked again so long.
        """
        return self._ask("GET", path, patience_seconds=patience_seconds)

    def lines(self, path: str, query: Mapping[str, str]) -> Iterator[bytes]:
        """A long answer, line by line; ends the command when it is refused or breaks off."""
        try:
            with (
                httpx.Client(timeout=_STREAM_TIMEOUT_SECONDS, trust_env=False) as client,
                client.stream("GET", self.base_url + path, params=query, headers=self._headers) as answer,
            ):
                if answer.is_error:
                    answer.read()
                answer.raise_for_status()
                rest = b""
                for piece in answer.iter_bytes():
                    *lines, rest = (rest + piece).split(b"\n")
                    yield from lines
                if rest:
                    yield rest
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._fail(error)

    def put(self, path: str, content: Iterator[bytes], content_type: str) -> dict[str, Any]:
        """Give something to be kept, of any length; ends the command when it is refused."""
        headers = {"content-type": content_type}
        return self._ask("PUT", path, timeout=_STREAM_TIMEOUT_SECONDS, content=content, headers=headers)

    def post(
        self, path: str, content: bytes | Iterator[bytes], content_type: str, *, patience_seconds: float = 0.0
    ) -> dict[str, Any]:
        """Ask for something to be done; ends the command when it is refused. Patience as in `get`: what is asked for
        may be done twice then."""
        headers = {"content-type": content_type}
        return self._ask("POST", path, patience_seconds=patience_seconds, content=content, headers=headers)

    def delete(self, path: str) -> dict[str, Any]:
        """Have something end; ends the command when it is refused."""
        return self._ask("DELETE", path)

    def _ask(self, method: str, path: str, *, patience_seconds: float = 0.0, **options: Any) -> dict[str, Any]:
        begun = time.monotonic()
        while True:
            try:
                return self._answer(method, path, **options)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                is_strange = isinstance(error, httpx.ConnectError) and not self._has_answered
                bound_seconds = min(patience_seconds, _STRANGE_SECONDS) if is_strange else patience_seconds
                if time.monotonic() >= begun + bound_seconds or not _passes(error):
                    self._fail(error)
            time.sleep(_AGAIN_SECONDS)

    def _answer(
        self, method: str, path: str, *, timeout: float = _ANSWER_TIMEOUT_SECONDS, **options: Any
    ) -> dict[str, Any]:
        headers = self._headers | options.pop("headers", {})
        with httpx.Client(timeout=timeout, trust_env=False) as client:
            answer = client.request(method, self.base_url + path, headers=headers, **options)
            self._has_answered = True
            answer.raise_for_status()
            document: dict[str, Any] = answer.json()
        return document

    def _fail(self, error: Exception) -> NoReturn:
        if isinstance(error, httpx.HTTPStatusError):
            fail(f"{self.base_url} answered {error.response.status_code}: {_reason(error.response)}")
        if isinstance(error, httpx.RemoteProtocolError):
            fail(f"the answer of {self.base_url} broke off: {error}")
        fail(f"no gateway answers at {self.base_url}: {error}")


def _passes(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 503
    return isinstance(error, httpx.TransportError)


def _reason(response: httpx.Response) -> str:
    try:
        return printable(str(response.json()["error"]))
    except (ValueError, KeyError, TypeError):
        return printable(response.text.strip()[:200])
