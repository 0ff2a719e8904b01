"""Asks `[origin]`, each bucket that differs from it and each slot with its own key one signed question."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from gateway.config.live import LiveSettings
from gateway.config.settings import Signer, signers
from gateway.core.clock import Clock, SystemClock
from gateway.core.errors import CredentialsUnavailable, OriginBodyError, OriginUnreachable
from gateway.origin.client import Origin, OriginRequest, OriginResponse
from gateway.origin.http1_client.client import OriginSilent
from gateway.origin.http1_client.response_stream import ResponseBroken
from gateway.origin.retry import OriginHealth, OriginHealthCell
from gateway.origin.s3 import CLOCK_CODE, refusal_of_own_key
from gateway.origin.signing import origin_name
from gateway.policy.slots import Prefix
from gateway.s3.headers import parse_http_date
from gateway.s3.xml import error_code_of

SECONDS_MAX = 3.0
"""The longest that a question may take."""

REMEMBERED_WELL_SECONDS = 30.0
REMEMBERED_SECONDS = 5.0
REMEMBERED_FAILED_SECONDS = 1.0
"""Applies if all was well, and requests have failed since."""

SKEW_SECONDS_MAX = 60.0
_DOCUMENT_BYTES_MAX = 64 * 1024

_FIGURE = re.compile(r"\d+")

OriginState = Literal["well", "unreachable", "no credentials", "refused", "wrong clock"]


@dataclass(frozen=True, slots=True)
class OriginFinding:
    """`problem` says in words what is wrong, and what to do; None where all is well."""

    state: OriginState
    problem: str | None = None
    is_refused: bool = False
    """The origin refuses whatever the gateway signs."""

    @property
    def is_key_not_renewed(self) -> bool:
        return self.state == "well" and self.problem is not None

    @property
    def reachable(self) -> bool:
        """Return True if an S3 server has answered, even with a refusal. Without a key the gateway has not asked."""
        return self.state not in ("unreachable", "no credentials")


class OriginCheck:
    """Asks the origin which buckets there are or, with a prefix, whether its bucket holds something under it.

    A key that may not know that is known to be good all the same. However many ask, one question runs at a time.
    """

    def __init__(
        self,
        origin: Origin,
        endpoint_url: str,
        clock: Clock | None = None,
        prefix: Prefix | None = None,
        failures: OriginHealthCell | None = None,
        replica: int | None = None,
    ) -> None:
        self._origin = origin
        self._replica = replica
        self._failures = failures
        self._prefix = prefix if prefix is not None and prefix.bucket else None
        self._endpoint_url = endpoint_url
        self._clock = clock or SystemClock()
        self._lock = asyncio.Lock()
        self._known: tuple[float, OriginFinding] | None = None

    async def finding(self) -> OriginFinding:
        """Return the latest finding while it is remembered (`_remembered_seconds`), then a new one."""
        async with self._lock:
            now = self._clock.monotonic()
            if self._known is not None:
                asked, found = self._known
                if now - asked < self._remembered_seconds(asked, found):
                    return found
            self._known = (now, await self._ask())
            return self._known[1]

    def _remembered_seconds(self, asked: float, found: OriginFinding) -> float:
        if found.problem is not None:
            return REMEMBERED_SECONDS
        if self._failures is not None and self._failures.told_at() > asked:
            return REMEMBERED_FAILED_SECONDS
        return REMEMBERED_WELL_SECONDS

    async def _ask(self) -> OriginFinding:
        if self._prefix is None:
            request = OriginRequest("GET", query=[("max-buckets", "1")])
        else:
            query = [("list-type", "2"), ("max-keys", "1"), ("prefix", self._prefix.key_prefix)]
            request = OriginRequest("GET", self._prefix.bucket, query=query, replica=self._replica)
        try:
            async with asyncio.timeout(SECONDS_MAX), await self._origin.send(request) as response:
                return await self._judged(response)
        except TimeoutError:
            return OriginFinding("unreachable", f"{self._endpoint_url} does not answer within {SECONDS_MAX:g} seconds")
        except OriginBodyError as error:
            return OriginFinding("unreachable", f"{self._endpoint_url} breaks its answer off: {error}")
        except CredentialsUnavailable as error:
            return OriginFinding("no credentials", str(error))
        except OriginUnreachable as error:
            return OriginFinding("unreachable", self._reason(error))

    async def _judged(self, response: OriginResponse) -> OriginFinding:
        document = await response.read(_DOCUMENT_BYTES_MAX) if response.status >= 300 else b""
        code = refusal_of_own_key(response.status, document)
        if code == CLOCK_CODE:
            return self._refused_for_its_time(response)
        if code is not None:
            return OriginFinding("refused", f"{self._endpoint_url} refuses the gateway's own key: {code}", True)
        if self._prefix is not None and response.status == 404 and error_code_of(document) == "NoSuchBucket":
            return OriginFinding("refused", f"{self._endpoint_url} has no bucket {self._prefix.bucket!r}")
        if response.status >= 500:
            return OriginFinding("unreachable", f"{self._endpoint_url} answers {response.status}")
        if response.status in (301, 307, 308) and "location" in response.headers:
            place = response.headers["location"]
            return OriginFinding("refused", f"{self._endpoint_url} sends the gateway away, to {place}")
        if b"<Code>" not in document and self._is_no_s3(response):
            if response.status == 400 and b"https" in document.lower():
                return OriginFinding("unreachable", f"{self._endpoint_url} speaks https: origin.endpoint_url says http")
            told = f"{self._endpoint_url} answers {response.status}, and not as S3 does: is this its endpoint?"
            return OriginFinding("unreachable", told)
        return self._judged_by_clock(response)

    def _is_no_s3(self, response: OriginResponse) -> bool:
        """S3 answers with XML, and its refusals with a `Code`; a web server, or a TLS port, answers otherwise."""
        return response.status in (400, 404, 405) or response.headers.get("content-type", "").startswith("text/html")

    def _judged_by_clock(self, response: OriginResponse) -> OriginFinding:
        skew = self._skew(response)
        if skew is None:
            return OriginFinding("well")
        told = f"{skew}: set it right. Callers' signatures and presigned URLs are judged by it"
        return OriginFinding("wrong clock", told)

    def _refused_for_its_time(self, response: OriginResponse) -> OriginFinding:
        skew = self._skew(response)
        refuses = f"{self._endpoint_url} refuses what Forebay signs, for its time ({CLOCK_CODE})"
        if skew is not None:
            told = f"{refuses}: {skew}. Set it right, and look at the origin's servers"
            return OriginFinding("wrong clock", told, True)
        return OriginFinding(
            "wrong clock",
            f"{refuses}, but its answers tell the time of this machine's clock: one of its servers, or a proxy before "
            "it, may have another",
            True,
        )

    def _skew(self, response: OriginResponse) -> str | None:
        """Return by how much the clocks differ, in words; None if by little, or if the origin tells no date."""
        told = parse_http_date(response.headers.get("date", ""))
        skew_seconds = 0.0 if told is None else self._clock.now() - told
        if abs(skew_seconds) <= SKEW_SECONDS_MAX:
            return None
        direction = "ahead of" if skew_seconds > 0 else "behind"
        differ = f"{round(abs(skew_seconds), -1):.0f} seconds {direction}"
        return f"this machine's clock is {differ} that of {self._endpoint_url}"

    def _reason(self, error: OriginUnreachable) -> str:
        behind: BaseException | None = error
        while behind is not None:
            if isinstance(behind, socket.gaierror):
                return f"the host name of {self._endpoint_url} is unknown ({behind.strerror})"
            if isinstance(behind, ssl.SSLCertVerificationError):
                return f"{self._endpoint_url} shows a certificate that is not trusted: {behind.verify_message}"
            if isinstance(behind, ssl.SSLError) and self._endpoint_url.startswith("https:"):
                return f"{self._endpoint_url} does not speak https; does it want http? ({behind.reason})"
            if isinstance(behind, ConnectionRefusedError):
                return f"nobody listens at {self._endpoint_url} (connection refused)"
            if isinstance(behind, ResponseBroken | ConnectionError) and not isinstance(error, OriginSilent):
                other = "http" if self._endpoint_url.startswith("https:") else "https"
                return f"{self._endpoint_url} ends the connection without an answer: does it want {other}? ({error})"
            behind = behind.__cause__ or behind.__context__
        return f"{self._endpoint_url} does not answer: {error}"


def _is_news(before: OriginFinding | None, now: OriginFinding) -> bool:
    """Return whether more than a figure has changed: a clock's figure changes with every look."""
    if before is None or before.problem is None or now.problem is None:
        return before != now
    return before.state != now.state or _FIGURE.sub("", before.problem) != _FIGURE.sub("", now.problem)


class OriginChecks:
    """Checks `[origin]`, and each bucket and slot that differs from it in the current settings.

    `not_renewed` says why credentials of this name, which may still be good, are not renewed. On `board` all processes
    report failed requests. `on_change` gets each first finding about an origin, by its name in words, and each change.
    """

    def __init__(
        self,
        origin: Origin,
        live: LiveSettings,
        not_renewed: Callable[[str], str | None] = lambda _: None,
        clock: Clock | None = None,
        board: OriginHealth | None = None,
        on_change: Callable[[str, OriginFinding], None] = lambda _, __: None,
    ) -> None:
        self._board = board or OriginHealth()
        self._on_change = on_change
        self._told: dict[str, OriginFinding] = {}
        self._origin = origin
        self._not_renewed = not_renewed
        self._live = live
        self._clock = clock
        self._main = self._new(live.now.origin.endpoint_url, None)
        self._others: dict[Signer, OriginCheck] = {}

    async def findings(self) -> tuple[OriginFinding, list[tuple[Signer, OriginFinding]]]:
        wanted = list(signers(self._live.now))
        self._others = {
            one: self._others.get(one) or self._new(one.endpoint_url, Prefix.parse(one.prefix), one.replica)
            for one in wanted
        }
        main, *others = await asyncio.gather(self._main.finding(), *(self._others[one].finding() for one in wanted))
        judged = [(one, self._judged(one, found)) for one, found in zip(wanted, others, strict=True)]
        self._tell({"the origin": main, **{one.place: found for one, found in judged}})
        return main, judged

    def _tell(self, findings: dict[str, OriginFinding]) -> None:
        before, self._told = self._told, findings
        for where, found in findings.items():
            if _is_news(before.get(where), found):
                self._on_change(where, found)

    def _judged(self, one: Signer, found: OriginFinding) -> OriginFinding:
        problem = self._not_renewed(one.name) if one.name is not None else None
        if found.problem is not None or problem is None:
            return found
        return replace(found, problem=f"the key pair is good still, and is not renewed: {problem}")

    async def finding(self) -> OriginFinding:
        """All of them in one: the state of the first with a problem, and every problem."""
        main, others = await self.findings()
        told = [main]
        for one, found in others:
            told.append(replace(found, problem=f"{one.place}: {found.problem}") if found.problem else found)
        problems = list(dict.fromkeys(found.problem for found in told if found.problem is not None))
        if not problems:
            return main
        worst = next((one for one in told if not one.reachable), next(one for one in told if one.problem))
        return OriginFinding(worst.state, "; ".join(problems))

    def _new(self, endpoint_url: str, prefix: Prefix | None, replica: int | None = None) -> OriginCheck:
        failures = self._board.failures(origin_name(endpoint_url))
        return OriginCheck(self._origin, endpoint_url, self._clock, prefix, failures, replica)
