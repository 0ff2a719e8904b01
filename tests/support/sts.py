"""STS for tests: one that does as it is told, and moto's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from urllib.parse import parse_qs

from botocore.credentials import Credentials

from tests.support.connections import answering

_ANSWER = (
    "<{action}Response xmlns='https://sts.amazonaws.com/doc/2011-06-15/'><{action}Result><Credentials>"
    "<AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey><SessionToken>{token}</SessionToken>"
    "<Expiration>{until}</Expiration></Credentials><AssumedRoleUser><AssumedRoleId>AROA:x</AssumedRoleId>"
    "<Arn>arn:aws:sts::123456789012:assumed-role/x/x</Arn></AssumedRoleUser></{action}Result></{action}Response>"
)
_ERROR = "<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>{told}</Message></Error></ErrorResponse>"


@dataclass
class ToldSts:
    """Answers each question with a new pair, `ASIA1`, `ASIA2`, …; refuses with `refusal` while there is one; says
    nothing while `speaks` is not set. Its answers have a `Date`, by `now`, while `tells_time`. `asked` are the forms
    that came, `authorizations` the headers that signed them.
    """

    now: Callable[[], float] = time.time
    lent_seconds: float = 3600.0
    refusal: str | None = None
    tells_time: bool = True
    told: str = "no"
    asked: list[dict[str, str]] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    speaks: asyncio.Event = field(default_factory=asyncio.Event)
    endpoint_url: str = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r")[0])
        form = {name: values[0] for name, values in parse_qs((await reader.readexactly(length)).decode()).items()}
        self.asked.append(form)
        self.authorizations.append(head.partition("\r\nauthorization: ")[2].partition("\r")[0])
        await self.speaks.wait()
        number = len(self.asked)
        if self.refusal is not None:
            status, body = "403 Forbidden", _ERROR.format(code=self.refusal, told=self.told)
        else:
            until = datetime.fromtimestamp(self.now() + self.lent_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            key, secret, token = f"ASIA{number}", f"secret{number}", f"token{number}"
            status = "200 OK"
            body = _ANSWER.format(action=form["Action"], key=key, secret=secret, token=token, until=until)
        date = f"\r\nDate: {formatdate(self.now(), usegmt=True)}" if self.tells_time else ""
        told = f"HTTP/1.1 {status}{date}\r\nContent-Type: text/xml\r\nContent-Length: {len(body)}\r\nConnection: close"
        writer.write(f"{told}\r\n\r\n{body}".encode())
        await writer.drain()


@asynccontextmanager
async def told_sts(now: Callable[[], float] = time.time) -> AsyncIterator[ToldSts]:
    """One that speaks, on a port of its own."""
    sts = ToldSts(now)
    sts.speaks.set()
    async with answering(sts.answer) as port:
        sts.endpoint_url = f"http://127.0.0.1:{port}"
        yield sts


class LentByMoto(dict[str, Credentials]):
    """The credentials that moto's STS has lent, as they are when they are asked for, besides others. Those of `role`
    only, where it is given."""

    role: str | None = None

    def get(self, key: str, default: Credentials | None = None) -> Credentials | None:
        from moto.sts.models import sts_backends

        for account in list(sts_backends.values()):
            for backend in list(account.values()):
                found = backend.get_assumed_role_from_access_key(key)
                if found is not None and self.role in (None, found.role_arn):
                    return Credentials(key, found.secret_access_key, found.session_token)
        return super().get(key, default)


@contextmanager
def moto_sts() -> Iterator[str]:
    """moto's server; its endpoint URL."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()
