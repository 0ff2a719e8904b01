"""HEADs and GETs over TLS, of a gateway whose authority AWS_CA_BUNDLE names, as for any S3 client."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from forebay.s3_get import Credentials, HttpReads, ReadError
from tests.support.certificates import tls_files
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin


def test_the_authority_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    tls_files(authority.issue_cert("127.0.0.1"), tmp_path)
    monkeypatch.setattr("forebay.s3_get.ATTEMPTS_MAX", 1)
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    with StrictOrigin(certificate_file=certificate, key_file=key) as origin:
        origin.model.create_bucket("train")
        origin.model.put("train", "k", b"content")

        def reads() -> HttpReads:
            return HttpReads(origin.endpoint_url, Credentials(ACCESS_KEY_ID, SECRET_ACCESS_KEY), "us-east-1", "test")

        with pytest.raises(ReadError, match="CERTIFICATE_VERIFY_FAILED"):
            reads().head("train/k")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "authority.pem"))
        trusting = reads()
        assert trusting.head("train/k")["Content-Length"] == "7"
        assert bytes(trusting.get("train/k")) == b"content"
        trusting.close()
