"""Where a request goes."""

from __future__ import annotations

import pytest

from gateway.core.errors import ConfigError
from gateway.origin.client import AddressingStyle, OriginSettings
from gateway.origin.signing import Addressing, default_endpoint


def url(endpoint: str | None, style: AddressingStyle, bucket: str | None, key: str | None = None) -> str:
    settings = OriginSettings(endpoint_url=endpoint, region="eu-west-1", addressing_style=style)
    target = Addressing(settings).target(bucket, key, [])
    return f"{target.scheme}://{target.host}{target.path_and_query}"


@pytest.mark.parametrize(
    ("endpoint", "style", "bucket", "expected"),
    [
        (None, "auto", "data", "https://data.s3.eu-west-1.amazonaws.com/k"),
        (None, "auto", "da.ta", "https://s3.eu-west-1.amazonaws.com/da.ta/k"),
        (None, "path", "data", "https://s3.eu-west-1.amazonaws.com/data/k"),
        ("http://minio:9000", "auto", "data", "http://minio:9000/data/k"),
        ("http://minio:9000", "virtual", "data", "http://data.minio:9000/k"),
        ("http://minio:9000/", "virtual", "Data_1", "http://minio:9000/Data_1/k"),
        ("https://[::1]:9000", "auto", "data", "https://[::1]:9000/data/k"),
        ("https://evilamazonaws.com", "auto", "data", "https://evilamazonaws.com/data/k"),
    ],
)
def test_styles(endpoint: str | None, style: AddressingStyle, bucket: str, expected: str) -> None:
    """Virtual-hosted style only where the endpoint is AWS's or it was asked for, and the name is a DNS label."""
    assert url(endpoint, style, bucket, "k") == expected


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("a/../b", "/b/a/../b"),
        ("//x", "/b///x"),
        ("a+b", "/b/a%2Bb"),
        ("a%2Fb", "/b/a%252Fb"),
        ("é ~", "/b/%C3%A9%20~"),
        (".", "/b/."),
    ],
)
def test_keys_are_encoded_once_and_never_normalised(key: str, path: str) -> None:
    """What a key says is what the request target says, percent-encoded."""
    target = Addressing(OriginSettings(endpoint_url="http://h")).target("b", key, [])
    assert target.path == path


def test_queries_keep_names_without_a_value() -> None:
    """`?uploads` is not `?uploads=`."""
    query = [("uploads", None), ("prefix", "a b&c"), ("delimiter", "")]
    target = Addressing(OriginSettings(endpoint_url="http://h")).target("b", None, query)
    assert target.path_and_query == "/b?uploads&prefix=a%20b%26c&delimiter="


def test_default_ports_are_not_part_of_the_host_header() -> None:
    """The Host header is what every client sends: no :443 with https."""
    target = Addressing(OriginSettings(endpoint_url="https://h:443")).target(None, None, [])
    assert (target.host, target.path) == ("h", "/")


@pytest.mark.parametrize(
    ("region", "endpoint"),
    [
        ("us-east-1", "https://s3.us-east-1.amazonaws.com"),
        ("ap-south-1", "https://s3.ap-south-1.amazonaws.com"),
        ("cn-north-1", "https://s3.cn-north-1.amazonaws.com.cn"),
    ],
)
def test_default_endpoints(region: str, endpoint: str) -> None:
    """Without an endpoint the region's own is used, in every partition."""
    assert default_endpoint(region) == endpoint


@pytest.mark.parametrize("endpoint", ["minio:9000", "ftp://h", "http://user@h", "http://h?x=y"])
def test_unusable_endpoints_are_refused(endpoint: str) -> None:
    """The error names the key and what is allowed."""
    with pytest.raises(ConfigError, match=r"origin\.endpoint_url"):
        Addressing(OriginSettings(endpoint_url=endpoint))
