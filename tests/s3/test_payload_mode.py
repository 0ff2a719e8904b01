from __future__ import annotations

import pytest

from gateway.core.errors import S3Error
from gateway.s3.signature_v4 import PayloadMode, payload_mode


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        (None, PayloadMode()),
        ("UNSIGNED-PAYLOAD", PayloadMode()),
        ("AB" * 32, PayloadMode(sha256_hex="ab" * 32)),
        ("STREAMING-AWS4-HMAC-SHA256-PAYLOAD", PayloadMode(streaming=True, signed=True)),
        ("STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER", PayloadMode(streaming=True, signed=True, trailer=True)),
        ("STREAMING-UNSIGNED-PAYLOAD-TRAILER", PayloadMode(streaming=True, trailer=True)),
    ],
)
def test_every_mode_is_known(value: str | None, mode: PayloadMode) -> None:
    """The table of the S3 documentation."""
    assert payload_mode(value) == mode


@pytest.mark.parametrize(
    "value", ["", "ab" * 31, "zz" * 32, "unsigned-payload", "STREAMING-UNSIGNED-PAYLOAD", "ab" * 32 + "\n"]
)
def test_anything_else_is_refused(value: str) -> None:
    """A payload that is not what it says must not be taken for unsigned."""
    with pytest.raises(S3Error, match="InvalidArgument"):
        payload_mode(value)


@pytest.mark.parametrize("tail", ["", "-TRAILER"])
def test_sigv4a_streams_are_not_implemented(tail: str) -> None:
    """501, so that clients need not guess."""
    with pytest.raises(S3Error, match="NotImplemented"):
        payload_mode(f"STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD{tail}")
