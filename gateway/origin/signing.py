"""Requests to the origin: to which host and path, signed with which key pair, for which region, at which time.

The key pair is fixed by the config, or found by the usual AWS chain, which is aiobotocore's: environment, profile, web
identity, container, instance metadata; pairs that expire are refreshed by it. Or STS lends it (sts.py). Regions of
buckets and the origin's time are learned from what it answers.

`Addressing` says where a request goes, path style or virtual-hosted style, and gives the exact bytes of its target.
Keys reach the wire unchanged except for percent-encoding: `..`, `//` and `%2F` are characters of a key like any other.
Sources: S3 user guide, "Virtual hosting of buckets"; RFC 3986, 2.3.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit
from weakref import WeakKeyDictionary

import structlog

from gateway.core.clock import Clock
from gateway.core.errors import ConfigError, CredentialsUnavailable, OriginUnreachable
from gateway.core.model import immutable
from gateway.origin.client import CredentialSource, KeyPair, OriginRequest, OriginSettings
from gateway.origin.dialects import S3, Dialect, dialect_of
from gateway.origin.request_body import NO_BODY, RequestBody, is_about_checksums
from gateway.s3.requests import encode_key, encode_path, encode_query
from gateway.s3.signature_v4 import AWS4, GOOG4, PathSignatures, sign_headers

Query = Sequence[tuple[str, str | None]]

_DNS_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")


@immutable
class Target:
    """One place on the wire: `host` is the Host header, `path` and `query` are percent-encoded."""

    scheme: str
    host: str
    path: str
    query: str

    @property
    def path_and_query(self) -> str:
        """The request target (RFC 9112, 3.2.1)."""
        return f"{self.path}?{self.query}" if self.query else self.path


DEFAULT_PORTS = {"http": 80, "https": 443}


def default_endpoint(region: str) -> str:
    """AWS's S3 endpoint of a region, from botocore's endpoint data, so that every partition is right."""
    return _default_endpoint(region)


@lru_cache(maxsize=32)
def _default_endpoint(region: str) -> str:
    if region == "us-east-1":
        return "https://s3.us-east-1.amazonaws.com"
    # Only who names a region of AWS and no endpoint needs it.
    from botocore.loaders import create_loader
    from botocore.regions import EndpointResolver

    resolver = EndpointResolver(create_loader().load_data("endpoints"))
    found = resolver.construct_endpoint("s3", region)
    if found is None:
        raise ConfigError("origin.region", region, "not an AWS region; set origin.endpoint_url for other services")
    return f"https://{found['hostname']}"


def origin_name(endpoint_url: str) -> str:
    """Return the host of an endpoint, and its port where that is not the scheme's own: in metrics. Or the directory."""
    if endpoint_url.startswith("file:"):
        return urlsplit(endpoint_url).path
    if endpoint_url.startswith("azure"):
        endpoint_url = endpoint_url.replace("azure+", "", 1).replace("azure:", "https:", 1)
    url = urlsplit(endpoint_url)
    return _host_header(url) if url.scheme in DEFAULT_PORTS else url.netloc.rpartition("@")[2]


def _host_header(url: SplitResult) -> str:
    """Without the scheme's own port, as every client sends it."""
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname or ""
    return host if url.port in (None, DEFAULT_PORTS[url.scheme]) else f"{host}:{url.port}"


class Addressing:
    """Turns (bucket, key, query) into a `Target` on one endpoint."""

    def __init__(self, settings: OriginSettings) -> None:
        endpoint = settings.endpoint_url or default_endpoint(settings.region)
        url = urlsplit(endpoint)
        if url.scheme not in DEFAULT_PORTS or not url.hostname or url.username is not None or url.query:
            raise ConfigError("origin.endpoint_url", endpoint, "http://HOST[:PORT] or https://HOST[:PORT]")
        self.endpoint = endpoint
        self._scheme = url.scheme
        self.host = self._host = _host_header(url)
        self._base_path = url.path.rstrip("/")
        self.dialect = dialect_of(settings.dialect, url.hostname)
        self._style = settings.addressing_style
        if self._style == "auto":
            self._style = self.dialect.auto_addressing

    def target(self, bucket: str | None, key: str | None, query: Query) -> Target:
        """Return where a request for this bucket and key goes. `bucket` None is the service itself (ListBuckets)."""
        encoded_query = encode_query(query) if query else ""
        if bucket is None:
            return Target(self._scheme, self._host, f"{self._base_path}/", encoded_query)
        if self._style == "virtual" and _is_dns_name(bucket):
            path = "/" if key is None else f"/{encode_key(key)}"
            return Target(self._scheme, f"{bucket}.{self._host}", f"{self._base_path}{path}", encoded_query)
        return Target(self._scheme, self._host, f"{self._base_path}{encode_path(bucket, key)}", encoded_query)


@lru_cache(maxsize=1024)
def _is_dns_name(bucket: str) -> bool:
    """Keep a name with dots in the path: it does not match the endpoint's wildcard certificate."""
    return _DNS_BUCKET.fullmatch(bucket) is not None


_LOOKUP_TIMEOUT_SECONDS = 10.0
_LOOKUP_AGAIN_SECONDS = 15.0


class StaticCredentials:
    problem: str | None = None

    def __init__(self, pair: KeyPair) -> None:
        self._known: tuple[KeyPair, ...] = (pair,)

    def apply_settings(self, pair: KeyPair) -> None:
        """Note that the pair was changed; the one before is still known."""
        if pair != self._known[0]:
            self._known = (pair, self._known[0])

    async def start(self) -> None:
        return

    async def current(self) -> KeyPair:
        return self._known[0]

    def known(self) -> tuple[KeyPair, ...]:
        return self._known

    def renew(self) -> None:
        """There is no other."""

    async def aclose(self) -> None:
        return


class ChainCredentials:
    """A pair from the AWS chain. One look-up at a time; after a failure the next one waits a while.

    `AWS_EC2_METADATA_DISABLED` is respected by the chain itself.
    """

    problem: str | None = None
    """A pair is renewed on request: the caller gets the error."""

    def __init__(self, clock: Clock, *, profile: str | None = None) -> None:
        # Only who has no pair of its own needs it: 0.2 s of CPU and 20 MB in every process. Not first in the look-up,
        # which runs on the event loop.
        from botocore.exceptions import BotoCoreError

        from gateway.origin.sts import AwsSession

        self._new_session = AwsSession
        self._errors: tuple[type[Exception], ...] = (BotoCoreError, OSError, TimeoutError)
        self._clock = clock
        self._profile = profile
        self._known: tuple[KeyPair, ...] = ()
        self._found: Any = None
        self._failure: str | None = None
        """Error of the last look-up, if one of the chain's providers failed."""

        self._look_again_at = 0.0
        self._lookup: asyncio.Task[None] | None = None
        self._first: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._first = asyncio.create_task(self._warm())

    async def current(self) -> KeyPair:
        if self._found is None:
            await self._find()
        try:
            frozen = await self._found.get_frozen_credentials()
        except Exception as error:  # noqa: BLE001 - code of many providers; however it failed, no pair came out
            raise CredentialsUnavailable(
                f"the origin's credentials could not be refreshed: {_described(error)}"
            ) from None
        return self._remember(KeyPair(frozen.access_key, frozen.secret_key, frozen.token))

    def known(self) -> tuple[KeyPair, ...]:
        return self._known

    def renew(self) -> None:
        """Files are read again: what does not expire is read once."""
        now = self._clock.monotonic()
        if self._found is not None and self._lookup is None and now >= self._look_again_at:
            self._look_again_at = now + _LOOKUP_AGAIN_SECONDS
            self._lookup = asyncio.create_task(self._look_up())
            self._lookup.add_done_callback(_failure_is_logged)

    async def aclose(self) -> None:
        for task in (self._first, self._lookup):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])

    async def _warm(self) -> None:
        with contextlib.suppress(OriginUnreachable):
            await self.current()

    async def _find(self) -> None:
        if self._lookup is None:
            if self._clock.monotonic() < self._look_again_at:
                raise self._none_found()
            self._lookup = asyncio.create_task(self._look_up())
        lookup = self._lookup
        await asyncio.wait((lookup,))  # its end, by `aclose` for instance, must not cancel this caller
        if not lookup.cancelled():
            lookup.result()
        if self._found is None:
            raise self._none_found()

    async def _look_up(self) -> None:
        try:
            async with asyncio.timeout(_LOOKUP_TIMEOUT_SECONDS):
                # A session remembers the files that it has read; a new one sees what has changed since.
                self._found = await self._session().get_credentials() or self._found
            self._failure = None
        except self._errors as error:
            self._failure = _described(error)
            log.warning("origin_credentials_lookup_failed", error=self._failure)
        finally:
            self._lookup = None
            if self._found is None:
                self._look_again_at = self._clock.monotonic() + _LOOKUP_AGAIN_SECONDS
                log.warning("origin_credentials_not_found")

    def _session(self) -> Any:
        """Return a session; with a profile, of that alone: behind it the chain goes on to the node's own key.

        A profile that means the node's says so itself (`credential_source`), and is not looked up by these.
        """
        session = self._new_session(profile=self._profile)
        if self._profile is not None:
            resolver = session.get_component("credential_provider")
            for of_node in ("container-role", "iam-role"):
                resolver.remove(of_node)
        return session

    def _none_found(self) -> CredentialsUnavailable:
        if self._failure is not None:
            return CredentialsUnavailable(f"no credentials for the origin: {self._failure}")
        if self._profile is not None:
            return CredentialsUnavailable(f"no credentials for the origin: the profile {self._profile!r} has no key")
        return CredentialsUnavailable(
            "no credentials for the origin: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role"
        )

    def _remember(self, pair: KeyPair) -> KeyPair:
        if not self._known or self._known[0] != pair:
            self._known = (pair, *self._known[:1])
        return self._known[0]


def _described(error: Exception) -> str:
    """Return which provider of the chain failed, and the error's type: its message may hold a secret."""
    told = getattr(error, "kwargs", None)
    provider = told.get("provider") if isinstance(told, dict) else None
    return f"{provider} failed ({type(error).__name__})" if provider else type(error).__name__


def _failure_is_logged(lookup: asyncio.Task[None]) -> None:
    if not lookup.cancelled() and lookup.exception() is not None:
        log.warning("origin_credentials_lookup_failed", error=type(lookup.exception()).__name__)


HOP_HEADER = "x-forebay-hop"
"""Resolver every gateway that a request came through, so that a gateway recognises one of its own."""

_LEARNED_REGIONS_MAX = 10_000
_CLOCK_TOLERANCE_SECONDS = 240.0
_SENT_BY_US = frozenset(
    {
        "host",
        "authorization",
        "x-amz-date",
        "x-amz-content-sha256",
        "x-amz-security-token",
        "content-length",
        "transfer-encoding",
        "connection",
        "expect",
    }
)

log = structlog.get_logger(__name__)


CredentialsOf = Callable[[OriginRequest], CredentialSource]
EncodeHead = Callable[[str, Target, Mapping[str, str]], bytes]

_HEADS_MAX = 256
_BELIEVED_SECONDS = 1.0


class SignedHead(NamedTuple):
    """The head of a request of one second, around its path and its signature."""

    before_path: bytes
    between: bytes
    behind_signature: bytes
    signatures: PathSignatures

    @classmethod
    def cut(cls, head: bytes, path: str, signatures: PathSignatures) -> SignedHead:
        encoded = path.encode()
        line, version, fields = head.partition(b" HTTP/1.1\r\n")
        between, _, end = fields.partition(signatures.of(encoded).encode())
        return cls(line.removesuffix(encoded), version + between, end, signatures)

    def of(self, path: str) -> bytes:
        encoded = path.encode()
        signature = self.signatures.of(encoded).encode()
        return b"".join((self.before_path, encoded, self.between, signature, self.behind_signature))


class RequestSigner:
    """Knows the key pairs, the region of each bucket and how far the origin's clock is from ours."""

    def __init__(
        self, credentials_of: CredentialsOf, region: str, clock: Clock, instance_id: str, dialect: Dialect = S3
    ) -> None:
        self._dialect = dialect
        self._credentials_of = credentials_of
        self._region = region
        self._clock = clock
        self._instance_id = instance_id
        self._regions: dict[str, str] = {}
        self._clock_offset = 0.0
        self._second = 0
        self._heads: dict[Hashable, SignedHead] = {}
        """Heads of this second."""

        self._latest: WeakKeyDictionary[CredentialSource, tuple[KeyPair, float]] = WeakKeyDictionary()
        """The pairs that were got last, and until when they are used without asking."""

    def region_of(self, bucket: str | None) -> str:
        return self._regions.get(bucket or "", self._region)

    async def headers(self, request: OriginRequest, target: Target, body: RequestBody) -> dict[str, str]:
        """Every header of one attempt, signature and framing included."""
        pair = request.signed_by or await self._pair(request)
        return self._signed(request, target, body, pair, self._clock.now() + self._clock_offset)[0]

    def head_now(self, request: OriginRequest, target: Target, encode: EncodeHead) -> bytes | None:
        """Return the signed head of a request without query and body; None: the key must be waited for.

        Heads of one second that differ by their paths alone are signed, and made by `encode`, as the first of them.
        """
        pair = self._pair_now(request)
        if pair is None:
            return None
        second = int(self._clock.now() + self._clock_offset)
        if second != self._second or len(self._heads) >= _HEADS_MAX:
            self._heads.clear()
            self._second = second
        like = (
            request.method,
            target.scheme,
            target.host,
            self.region_of(request.bucket),
            pair,
            *request.headers.items(),
        )
        known = self._heads.get(like)
        if known is None:
            headers, signatures = self._signed(request, target, NO_BODY, pair, second)
            known = self._heads[like] = SignedHead.cut(encode(request.method, target, headers), target.path, signatures)
        return known.of(target.path)

    def _pair_now(self, request: OriginRequest) -> KeyPair | None:
        """Return the pair to sign with if that needs no wait: one that does not expire, or was just got."""
        source = self._credentials_of(request)
        if isinstance(source, StaticCredentials):
            return source.known()[0]
        found, until = self._latest.get(source, (None, 0.0))
        return found if until > self._clock.monotonic() else None

    def _signed(
        self, request: OriginRequest, target: Target, body: RequestBody, pair: KeyPair, now: float
    ) -> tuple[dict[str, str], PathSignatures]:
        headers = {"host": target.host}
        headers.update([field for field in request.headers.items() if field[0] not in _SENT_BY_US])
        hops = headers.get(HOP_HEADER)
        headers[HOP_HEADER] = self._instance_id if hops is None else f"{hops}, {self._instance_id}"
        headers.update(body.signed_headers)
        if not self._dialect.has_checksums:
            headers = {name: value for name, value in headers.items() if not is_about_checksums(name)}
        family = AWS4
        if self._dialect.is_google and any(name.startswith(GOOG4.headers) for name in headers):
            family, amz = GOOG4, AWS4.headers  # the store refuses both kinds in one request
            headers = {
                f"{GOOG4.headers}{name.removeprefix(amz)}" if name.startswith(amz) else name: value
                for name, value in headers.items()
            }
        added, signatures = sign_headers(
            request.method,
            target.path,
            request.query,
            headers,
            payload_hash=body.payload_hash,
            access_key_id=pair.access_key_id,
            secret=pair.secret_access_key,
            session_token=pair.session_token,
            region=self.region_of(request.bucket),
            now=now,
            family=family,
        )
        headers.update(added)
        if self._dialect.unsigned and request.key is not None and request.method in ("GET", "HEAD"):
            headers.update(self._dialect.unsigned)
        headers.update(body.framing_headers)
        return headers, signatures

    async def _pair(self, request: OriginRequest) -> KeyPair:
        """Return the pair to sign with now. If settings change during the wait, ask the new source."""
        while True:
            credentials = self._credentials_of(request)
            try:
                pair = await credentials.current()
                self._latest[credentials] = pair, self._clock.monotonic() + _BELIEVED_SECONDS
                return pair
            except CredentialsUnavailable:
                if self._credentials_of(request) is credentials:
                    raise

    def learn_region(self, bucket: str | None, region: str | None) -> bool:
        """Sign for `region` from now on; False when that is what was signed for already."""
        if bucket is None or region is None or region == self.region_of(bucket):
            return False
        if len(self._regions) >= _LEARNED_REGIONS_MAX:
            self._regions.clear()
        self._regions[bucket] = region
        log.info("origin_region_learned", bucket=bucket, region=region)
        return True

    def learn_time(self, origin_now: float | None) -> bool:
        """Take the origin's time for ours; False when it is what we signed with, give or take."""
        if origin_now is None or abs(origin_now - self._clock.now() - self._clock_offset) < _CLOCK_TOLERANCE_SECONDS:
            return False
        self._clock_offset = origin_now - self._clock.now()
        ahead_seconds = round(self._clock_offset, 1)
        if abs(self._clock_offset) < _CLOCK_TOLERANCE_SECONDS:
            log.info("the origin has this machine's time again", ahead_seconds=ahead_seconds)
        else:
            told = "the origin has another time than this machine: requests to it are signed by its time"
            log.warning(told, ahead_seconds=ahead_seconds)
        return True
