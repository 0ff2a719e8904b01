"""Key pairs that STS lends for a role, and AWS sessions whose questions never come back to this gateway.

On a node where AWS_ENDPOINT_URL sends clients to the gateway, the gateway itself has that variable, too. It says where
S3 is; botocore takes it for every service.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from aiobotocore.config import AioConfig
from aiobotocore.credentials import (
    AioAssumeRoleCredentialFetcher,
    AioAssumeRoleWithWebIdentityCredentialFetcher,
    AioCredentials,
)
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore.configprovider import ConfigChainFactory
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.utils import FileWebIdentityTokenLoader

from gateway.core.cancellation import turn
from gateway.core.clock import Clock
from gateway.core.errors import CredentialsUnavailable
from gateway.origin.client import KeyPair, OriginCredentials
from gateway.s3.headers import parse_http_date
from gateway.telemetry.logs import RateLimitedLog

ANSWER_BYTES_MAX = 256 * 1024
"""Limit of an answer of STS or SSO: theirs have a few KiB."""

STS_SECONDS_MAX = 10.0
"""Seconds for one question to STS, from its connection on."""

LENT_SECONDS = 3600.0
"""Seconds for which STS lends a key pair by default."""

_ASKED_AGAIN_SHARE = (0.6, 0.8)
"""Share of a pair's lifetime after which the next one is requested; processes differ by chance."""

_FAILED_AGAIN_SECONDS = (1.0, 15.0)
"""After a failure, and after many: how long until STS is asked again, at most; at least half of that."""

_PAUSE_SECONDS_MIN = 1.0
"""Seconds between two questions, even if a pair ends soon: some STS give the same one until it ends."""

_REFUSED_AGAIN_SECONDS = 15.0
"""Seconds between questions to STS after a home refuses the pair."""

_log = RateLimitedLog(structlog.get_logger("forebay.origin"))


class AnswerTooLong(HTTPClientError):  # type: ignore[misc]
    """No answer of STS or SSO is."""

    fmt = "the answer is longer than {limit_bytes} bytes"


class _Bounded(AIOHTTPSession):  # type: ignore[misc]
    """aiobotocore's, of answers of ANSWER_BYTES_MAX: else they are read into memory as long as they come."""

    async def send(self, request: Any) -> Any:
        request.stream_output = True  # it would be read whole in there
        response = await super().send(request)
        body = bytearray()
        try:
            while piece := await response.raw.content.read(ANSWER_BYTES_MAX):
                body += piece
                if len(body) > ANSWER_BYTES_MAX:
                    response.raw.close()
                    raise AnswerTooLong(limit_bytes=ANSWER_BYTES_MAX)
        except aiohttp.ClientError as error:
            raise HTTPClientError(error=type(error).__name__) from None
        response._content = bytes(body)
        return response


class AwsSession(AioSession):  # type: ignore[misc]
    """A session like botocore's whose answers are bounded.

    AWS_ENDPOINT_URL is not asked where STS or SSO are, AWS_ENDPOINT_URL_STS and its like are. STS is that of the
    region, unless the environment or the profile say otherwise: botocore before 1.40 would ask the one in us-east-1.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        regional = ConfigChainFactory(self).create_config_chain(
            instance_name="sts_regional_endpoints",
            env_var_names="AWS_STS_REGIONAL_ENDPOINTS",
            config_property_names="sts_regional_endpoints",
            default="regional",
        )
        self.get_component("config_store").set_config_provider("sts_regional_endpoints", regional)

    def create_client(self, service_name: str, *arguments: Any, **options: Any) -> Any:
        given = options.get("config")
        config = AioConfig() if given is None else AioConfig().merge(given)
        if os.environ.get("AWS_ENDPOINT_URL") and options.get("endpoint_url") is None:
            own = os.environ.get(f"AWS_ENDPOINT_URL_{service_name.upper().replace('-', '_')}")
            options["endpoint_url"] = own or None
            config = config.merge(AioConfig(ignore_configured_endpoint_urls=True))
        config.http_session_cls = _Bounded  # last: before aiobotocore 3.10 no merge keeps it
        return super().create_client(service_name, *arguments, **{**options, "config": config})


@lru_cache(maxsize=1)
def _warm_session() -> AwsSession:
    """One for all roles: what botocore knows of STS takes a tenth of a second to read. Blocks."""
    session = AwsSession()
    loader = session.get_component("data_loader")
    for data in ("_retry", "endpoints", "partitions", "sdk-default-configuration"):
        loader.load_data(data)
    loader.load_service_model("sts", type_name="service-2")
    loader.load_service_model("sts", type_name="endpoint-rule-set-1")
    return session


@dataclass(frozen=True, slots=True)
class Role:
    """A request to STS. With `token_file` it is AssumeRoleWithWebIdentity, else AssumeRole.

    `endpoint_url` None is AWS's own STS of the region. `duration_seconds` None leaves it to STS.
    """

    name: str
    arn: str
    region: str
    session_name: str = "forebay"
    external_id: str | None = field(default=None, repr=False)
    duration_seconds: float | None = None
    token_file: Path | None = None
    endpoint_url: str | None = None


class _Timed:
    """A fetcher that notes what STS says of the time: its `Date`, in seconds; None: nothing."""

    told_at: float | None = None

    async def _get_credentials(self) -> Any:
        response = await super()._get_credentials()  # type: ignore[misc]
        date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        self.told_at = parse_http_date(date) if date else None
        return response


class _AssumedRole(_Timed, AioAssumeRoleCredentialFetcher):  # type: ignore[misc]
    """Assumes a role by another key pair."""


class _AssumedRoleWithWebIdentity(_Timed, AioAssumeRoleWithWebIdentityCredentialFetcher):  # type: ignore[misc]
    """By a token."""


@dataclass(frozen=True, slots=True)
class _Lent:
    """A pair, and until when it is good, by the monotonic clock."""

    pair: KeyPair
    until: float


class RoleCredentials:
    """`OriginCredentials` of a role. One task asks STS, and again long before the pair expires.

    No request waits for STS while the previous pair is valid. `source` has the key that assumes the role; None with a
    web identity, which needs none.
    """

    def __init__(
        self, role: Role, source: OriginCredentials | None, clock: Clock, rng: random.Random | None = None
    ) -> None:
        self._role = role
        self._source = source
        self._clock = clock
        self._rng = rng or random.Random()
        self._session: AwsSession | None = None
        self._lent: _Lent | None = None
        self._known: tuple[KeyPair, ...] = ()
        self._problem: str | None = None
        self._asked = asyncio.Event()
        """Set when the question that is under way is answered, or has failed; cleared when the next one begins."""
        self._keeping: asyncio.Task[None] | None = None
        self._asked_at = 0.0
        self._is_renewed = asyncio.Event()

    async def start(self) -> None:
        self._keeping = asyncio.create_task(self._keep(), name=f"key pair of a role: {self._role.name}")

    def inherit(self, before: RoleCredentials) -> None:
        """Go on with what was lent for the same role, under other settings, until STS lends the next."""
        self._lent, self._known = before._lent, before._known

    async def current(self) -> KeyPair:
        """Return as `CredentialSource.current`. Without a good pair, wait for STS, unless the last question failed."""
        if self._keeping is None:
            await self.start()
        lent = self._good()
        if lent is None and self._problem is None:
            with turn():
                await self._asked.wait()
            lent = self._good()
        if lent is None:
            raise CredentialsUnavailable(f"{self._words}: {self._problem or 'the key pair that STS lent has expired'}")
        return lent.pair

    def known(self) -> tuple[KeyPair, ...]:
        return self._known

    def renew(self) -> None:
        """Ask STS at once, unless it was just now. The pair stays: one home may refuse what another takes."""
        if self._clock.monotonic() - self._asked_at >= _REFUSED_AGAIN_SECONDS:
            self._is_renewed.set()

    async def aclose(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        self._asked.set()

    @property
    def problem(self) -> str | None:
        """Why STS did not lend the next pair when last asked. The previous one may still be valid."""
        return self._problem

    @property
    def is_closed(self) -> bool:
        return self._keeping is not None and self._keeping.done()

    @property
    def _words(self) -> str:
        return f"no key pair for the role {self._role.arn} (origin_credentials {self._role.name!r})"

    def _good(self) -> _Lent | None:
        return self._lent if self._lent is not None and self._clock.monotonic() < self._lent.until else None

    async def _keep(self) -> None:
        failures = 0
        while True:
            self._asked.clear()
            self._asked_at = self._clock.monotonic()
            self._is_renewed.clear()
            try:
                lent_seconds = await self._ask_once()
            except _Failed as error:
                failures += 1
                self._problem = str(error)
                pause_seconds = min(_FAILED_AGAIN_SECONDS[1], _FAILED_AGAIN_SECONDS[0] * 2.0 ** min(failures - 1, 10))
                pause_seconds *= self._rng.uniform(0.5, 1.0)
                is_good = self._good() is not None
                _log.warning(
                    "STS lends no key pair" + ("; the last one is still good" if is_good else ""),
                    f"{self._role.name} {is_good}",
                    origin_credentials=self._role.name,
                    role=self._role.arn,
                    problem=self._problem,
                )
            else:
                failures, self._problem = 0, None
                pause_seconds = max(_PAUSE_SECONDS_MIN, lent_seconds * self._rng.uniform(*_ASKED_AGAIN_SHARE))
            self._asked.set()
            await self._pause(pause_seconds)

    async def _pause(self, seconds: float) -> None:
        """Until these have passed, or a home refuses the pair."""
        ends = [asyncio.ensure_future(self._clock.sleep(seconds)), asyncio.ensure_future(self._is_renewed.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in ends:
                one.cancel()

    async def _ask_once(self) -> float:
        """For how many seconds a pair was lent. _Failed."""
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(STS_SECONDS_MAX):
                self._session = self._session or await asyncio.to_thread(_warm_session)
                fetcher = await self._fetcher()
                found = await fetcher.fetch_credentials()
            pair = KeyPair(found["access_key"], found["secret_key"], found["token"])
            seconds = self._seconds_of(found, fetcher.told_at)
        except _Failed:
            raise
        except TimeoutError:
            raise _Failed(f"STS does not answer within {STS_SECONDS_MAX:g} seconds") from None
        except ClientError as error:
            if self._source is not None:
                self._source.renew()  # it may be its key that is refused
            raise _Failed(_refusal(error)) from None
        except CredentialsUnavailable as error:
            raise _Failed(f"the key that assumes the role is missing: {error}") from None
        except BotoCoreError as error:
            raise _Failed(f"STS cannot be asked ({type(error).__name__})") from None
        except OSError as error:
            raise _Failed(f"the token cannot be read, or STS cannot be reached: {error.strerror}") from None
        except Exception as error:  # noqa: BLE001 - code of many providers; its text may hold anything
            raise _Failed(f"STS has lent no key pair ({type(error).__name__})") from None
        self._lent = _Lent(pair, began + seconds)
        self._known = (pair, *self._known[:1])
        return seconds

    def _seconds_of(self, found: Mapping[str, Any], told_at: float | None) -> float:
        """For how long a pair is good that was lent when STS said that it was `told_at`; _Failed where it is over.

        STS goes by its own clock, so a wall clock that is wrong here makes no good pair bad, and no bad one good. Where
        STS does not say, ours is all there is.
        """
        now = self._clock.now() if told_at is None else told_at
        left_seconds = datetime.fromisoformat(found["expiry_time"]).timestamp() - now
        if left_seconds <= 0:
            raise _Failed("the key pair that STS lent has expired already")
        return min(left_seconds, self._role.duration_seconds or LENT_SECONDS)

    async def _fetcher(self) -> Any:
        role = self._role
        asked: dict[str, Any] = {"RoleSessionName": role.session_name}
        if role.duration_seconds is not None:
            asked["DurationSeconds"] = int(role.duration_seconds)
        if role.token_file is not None:
            loader = FileWebIdentityTokenLoader(str(role.token_file))
            return _AssumedRoleWithWebIdentity(self._client, loader, role.arn, extra_args=asked)
        if self._source is None:
            raise ValueError("somebody's key has to assume the role")
        if role.external_id is not None:
            asked["ExternalId"] = role.external_id
        pair = await self._source.current()
        own = AioCredentials(pair.access_key_id, pair.secret_access_key, pair.session_token)
        return _AssumedRole(self._client, own, role.arn, extra_args=asked)

    def _client(self, service_name: str, config: AioConfig | None = None, **options: Any) -> Any:
        if self._session is None:
            raise ValueError("nothing has begun yet")
        bounded = AioConfig(
            connect_timeout=STS_SECONDS_MAX / 2,
            read_timeout=STS_SECONDS_MAX / 2,
            retries={"total_max_attempts": 2, "mode": "standard"},
        )
        return self._session.create_client(
            service_name,
            region_name=self._role.region,
            endpoint_url=self._role.endpoint_url,
            config=bounded if config is None else bounded.merge(config),
            **options,
        )


class _Failed(Exception):
    """Why STS has lent nothing, in words that hold no secret."""


def _refusal(error: ClientError) -> str:
    """Return the code alone: messages of STS may quote what they were sent."""
    code = error.response.get("Error", {}).get("Code", "")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
    return f"STS refuses: {code[:64] if code.isalnum() else 'for no reason that it names'} (HTTP {status})"
