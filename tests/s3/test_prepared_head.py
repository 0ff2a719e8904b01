"""Heads that are compared with pieces say what the same heads say that are parsed (`edge/test_mutated_heads.py`:
and nothing that those do not)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.edge.access import Authenticator, Caller, ConfiguredKeyring, Key
from gateway.edge.request_parsing import HeadParser
from gateway.policy.slots import EVERYTHING
from gateway.s3.prepared_head import PreparedHead, prepare
from gateway.s3.requests import S3Request, encode_path, parse_query, parse_request
from gateway.s3.signature_v4 import sign_headers
from tests.support.manual_clock import ManualClock

SECRET, EMPTY = "secret/key", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

NAMES = {
    "host": "Host",
    "x-amz-date": "X-Amz-Date",
    "x-amz-content-sha256": "X-Amz-Content-SHA256",
    "authorization": "Authorization",
    "range": "Range",
    "amz-sdk-invocation-id": "amz-sdk-invocation-id",
    "amz-sdk-request": "amz-sdk-request",
    "user-agent": "User-Agent",
    "x-amz-checksum-mode": "x-amz-checksum-mode",
    "traceparent": "traceparent",
    "x-amzn-trace-id": "X-Amzn-Trace-Id",
}


@dataclass(frozen=True)
class Client:
    """How one client writes its heads. `signs_all`: also the fields that need not be signed."""

    order: tuple[str, ...]
    is_lower: bool = False
    signs_all: bool = False
    secret: str = SECRET
    base_domain: bool = False

    def head(
        self, now: float, key: str = "k", method: str = "GET", query: str = "", more: dict[str, str] | None = None
    ) -> bytes:
        host = "bucket.s3.example:9000" if self.base_domain else "127.0.0.1:9000"
        path = encode_path("bucket", key)
        path = path.removeprefix("/bucket") if self.base_domain else path
        fields = {"host": host, "user-agent": "client/1 (x; y)", **(more or {})}
        signed = fields if self.signs_all else {name: value for name, value in fields.items() if name != "user-agent"}
        added, _ = sign_headers(
            method,
            path,
            parse_query(query.encode()),
            signed,
            payload_hash=EMPTY,
            access_key_id="AK",
            secret=self.secret,
            session_token=None,
            region="us-east-1",
            now=now,
        )
        values = {**fields, **added}
        names = sorted(values, key=lambda name: self.order.index(name) if name in self.order else 99)
        lines = [f"{name if self.is_lower else NAMES.get(name, name)}: {values[name]}\r\n" for name in names]
        target = f"{path}?{query}" if query else path
        return f"{method} {target} HTTP/1.1\r\n{''.join(lines)}\r\n".encode("latin-1")


class Gateway:
    """Both ways of one gateway."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.clock.set_wall(12 * 3600.0)  # its day begins and ends far away
        keyring = ConfiguredKeyring([Key("AK", SECRET, None, EVERYTHING)])
        self.authenticator = Authenticator(keyring, self.clock)
        self.base_domains = ("s3.example",)
        self.head: PreparedHead | None = None

    def whole_way(self, raw: bytes) -> tuple[S3Request, Caller, bool] | None:
        """None: it is refused."""
        try:
            head = HeadParser(max_bytes=64 * 1024, max_headers=100).parse(raw)
            if head.body_length != 0 or head.target.authority is not None:
                return None
            request = parse_request(
                head.method, head.target.raw_path, head.target.raw_query, head.headers, self.base_domains
            )
            return request, self.authenticator.authenticate(request), head.keep_alive
        except S3Error:
            return None

    def learn(self, raw: bytes) -> None:
        found = self.whole_way(raw)
        assert found is not None
        request, caller, _ = found
        assert caller.authorization is not None
        self.head = prepare(raw, request, caller.authorization)
        assert self.head is not None

    def check(self, raw: bytes) -> bool:
        """Both ways say the same, where the short one says anything; whether it does."""
        assert self.head is not None
        values, whole = self.head.match(raw), self.whole_way(raw)
        if values is None or self.authenticator.key_of(self.head, values) is None:
            return False
        assert whole is not None, raw
        request, caller, keep_alive = whole
        assert keep_alive
        assert (values.raw_path, values.raw_query) == (request.raw_path, request.raw_query)
        assert self.head.headers(values) == request.headers
        assert (self.head.request.method, self.head.request.host) == (request.method, request.host)
        assert caller.seed is not None
        assert values.fields[self.head.signature_at].decode() == caller.seed.signature
        return True


ORDERS = st.permutations(list(NAMES)).map(tuple)
CLIENTS = st.builds(Client, order=ORDERS, is_lower=st.booleans(), signs_all=st.booleans(), base_domain=st.booleans())
KEYS = st.text("abé ~+%/?#=&.-_", min_size=1, max_size=20)
RANGES = st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)).map(lambda ends: f"bytes={ends[0]}-{ends[1]}")
QUERIES = st.sampled_from(["", "x-id=GetObject", "partNumber=1&versionId=a%20b", "response-content-type=a%2Fb"])


@given(CLIENTS, st.lists(st.tuples(KEYS, RANGES, QUERIES, st.floats(-800, 800)), min_size=2, max_size=5), st.booleans())
def test_what_is_known_says_the_same(client: Client, asked: list[tuple[str, str, str, float]], has_ids: bool) -> None:
    """For other keys, ranges, queries, ids and times than the head had that went the whole way."""
    gateway = Gateway()
    heads = []
    for number, (key, span, query, later) in enumerate(asked):
        more = {"range": span}
        if has_ids:
            more |= {"amz-sdk-invocation-id": f"id-{number}", "amz-sdk-request": f"attempt={number}; max=3"}
            more |= {"traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01", "x-amzn-trace-id": f"Root={number}"}
        heads.append(client.head(gateway.clock.now() + later, key, query=query, more=more))
    gateway.learn(heads[0])
    assert gateway.check(heads[0])
    known = [gateway.check(head) for head in heads[1:]]
    plain = [not set("#") & set(key) for key, *_ in asked[1:]]
    assert all(was or not could for was, could in zip(known, plain, strict=True))


@pytest.mark.parametrize("change", ["rotated", "revoked"])
def test_a_key_that_is_no_more_opens_nothing(change: str) -> None:
    """The keyring is asked each time."""
    gateway = Gateway()
    client = Client(tuple(NAMES))
    gateway.learn(client.head(gateway.clock.now()))
    keys = [Key("AK", "another", None, EVERYTHING)] if change == "rotated" else []
    gateway.authenticator._keyring = ConfiguredKeyring(keys)
    raw = client.head(gateway.clock.now())
    assert not gateway.check(raw)
    assert gateway.whole_way(raw) is None


def test_a_field_whose_name_ends_elsewhere_is_not_looked_at() -> None:
    """`If-Match:"a", "b": x` has no blank behind its first colon: it would be taken for a field that stays the same."""
    gateway = Gateway()
    raw = Client(tuple(NAMES)).head(gateway.clock.now()).replace(b"User-Agent:", b'If-Match:"a", "b": x\r\nUser-Agent:')
    found = gateway.whole_way(raw)
    assert found is not None
    request, caller, _ = found
    assert request.headers["if-match"] == '"a", "b": x'
    assert prepare(raw, request, caller.authorization) is None
