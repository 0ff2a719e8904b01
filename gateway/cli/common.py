"""What several commands share: options, settings, how they end, and the running gateway's admin port."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import orjson
import typer

from gateway.config import Settings
from gateway.config.environment import CONFIG_VARIABLE
from gateway.config.loading import LoadedSettings, load_settings
from gateway.config.problems import SettingsError
from gateway.serve.listeners import url

_ANSWER_TIMEOUT_SECONDS = 10.0
_AGAIN_SECONDS = 0.5
_STREAM_TIMEOUT_SECONDS = 600.0
"""Between pieces, and behind the last of them: a snapshot of many objects is read and synced as a whole."""

ConfigOption = Annotated[
    Path | None, typer.Option("--config", envvar=CONFIG_VARIABLE, help="TOML file with the settings.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AdminUrlOption = Annotated[
    str | None, typer.Option("--admin-url", help="Admin port; otherwise the one that the settings name.")
]


def as_a_client(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without AWS's endpoint variables: in a job's shell they name the gateway, not its origin."""
    return {name: value for name, value in environment.items() if not name.startswith("AWS_ENDPOINT_URL")}


def load(config: Path | None, environment: Mapping[str, str] = os.environ) -> LoadedSettings:
    try:
        return load_settings(config, environment)
    except SettingsError as error:
        report_problems(error, as_json=False)
        raise typer.Exit(1) from None


def report_problems(error: SettingsError, as_json: bool) -> None:
    if as_json:
        problems = [
            {"key": problem.key, "allowed": problem.allowed, "message": str(problem)} for problem in error.problems
        ]
        print_json({"ok": False, "problems": problems})
        return
    for problem in error.problems:
        typer.echo(f"forebay: {problem}", err=True)


def fail(message: str) -> NoReturn:
    typer.echo(f"forebay: {message}", err=True)
    raise typer.Exit(1)


def print_json(document: Any) -> None:
    sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")


def printable(text: str) -> str:
    """As one line on a terminal: keys may hold what it would obey."""
    return "".join(one if one.isprintable() else f"\\u{ord(one):04x}" for one in text)


class AdminPort:
    """The admin port of a running gateway."""

    def __init__(self, base_url: str, token: str | None) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

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
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                return self._answer(method, path, **options)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                if time.monotonic() >= deadline or not _passes(error):
                    self._fail(error)
            time.sleep(_AGAIN_SECONDS)

    def _answer(
        self, method: str, path: str, *, timeout: float = _ANSWER_TIMEOUT_SECONDS, **options: Any
    ) -> dict[str, Any]:
        headers = self._headers | options.pop("headers", {})
        with httpx.Client(timeout=timeout, trust_env=False) as client:
            answer = client.request(method, self.base_url + path, headers=headers, **options)
            answer.raise_for_status()
            document: dict[str, Any] = answer.json()
        return document

    def _fail(self, error: Exception) -> NoReturn:
        if isinstance(error, httpx.HTTPStatusError):
            fail(f"{self.base_url} answered {error.response.status_code}: {_reason(error.response)}")
        if isinstance(error, httpx.RemoteProtocolError):
            fail(f"the answer of {self.base_url} broke off: {error}")
        fail(f"no gateway answers at {self.base_url}: {error}")


def admin_port(admin_url: str | None, config: Path | None) -> AdminPort:
    """The admin port that the options, or else the settings, name."""
    if admin_url and config is None:  # settings that cannot be loaded here do not matter then
        return AdminPort(admin_url, os.environ.get("FOREBAY_ADMIN__TOKEN"))
    settings = load(config, as_a_client(os.environ)).settings
    return AdminPort(admin_url or _admin_url(settings), _token(settings))


def _passes(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 503
    return isinstance(error, httpx.TransportError)


def _reason(response: httpx.Response) -> str:
    try:
        return printable(str(response.json()["error"]))
    except (ValueError, KeyError, TypeError):
        return printable(response.text.strip()[:200])


def _admin_url(settings: Settings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.admin.host, settings.admin.host)
    return url("http", host, settings.admin.port)


def _token(settings: Settings) -> str | None:
    return settings.admin.token.get_secret_value() if settings.admin.token else None
