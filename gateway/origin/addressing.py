"""Where a request goes: path style or virtual-hosted style, and the exact bytes of the request target.

Keys reach the wire untouched but for percent-encoding: `..`, `//` and `%2F` are characters of a key like any other.
Sources: S3 user guide, "Virtual hosting of buckets"; RFC 3986, 2.3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import SplitResult, urlsplit

from gateway.errors import ConfigError
from gateway.origin.settings import AddressingStyle, OriginSettings
from gateway.s3.requests import encode_key, encode_path, encode_query

Query = Sequence[tuple[str, str | None]]

_DNS_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_AWS_HOST = re.compile(r"(^|\.)amazonaws\.com(\.cn)?$")


@dataclass(frozen=True, slots=True)
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
        raise ConfigError("origin.region", region, "no AWS region; set origin.endpoint_url for other services")
    return f"https://{found['hostname']}"


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
        self._host = _host_header(url)
        self._base_path = url.path.rstrip("/")
        self._style = settings.addressing_style
        self._is_aws = _AWS_HOST.search(url.hostname) is not None

    def target(self, bucket: str | None, key: str | None, query: Query) -> Target:
        """Where the request for this bucket and key goes. `bucket` None is the service itself (ListBuckets)."""
        encoded_query = encode_query(query)
        if bucket is None:
            return Target(self._scheme, self._host, f"{self._base_path}/", encoded_query)
        if _is_virtual(self._style, self._is_aws, bucket):
            path = "/" if key is None else f"/{encode_key(key)}"
            return Target(self._scheme, f"{bucket}.{self._host}", f"{self._base_path}{path}", encoded_query)
        return Target(self._scheme, self._host, f"{self._base_path}{encode_path(bucket, key)}", encoded_query)


@lru_cache(maxsize=1024)
def _is_virtual(style: AddressingStyle, is_aws: bool, bucket: str) -> bool:
    """A name with dots does not match the endpoint's wildcard certificate, so `auto` keeps it in the path."""
    if style == "path" or (style == "auto" and not is_aws):
        return False
    return _DNS_BUCKET.fullmatch(bucket) is not None
