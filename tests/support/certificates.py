"""Certificates of a test's own authority, as the S3 port takes them."""

from __future__ import annotations

from pathlib import Path

import trustme

from gateway.disk.pem import PemFile
from gateway.edge.s3_server import TlsFiles


def tls_files(certificate: trustme.LeafCert, directory: Path) -> TlsFiles:
    """Written into `directory`, and read."""
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(directory / "certificate.pem", append=True)
    return TlsFiles(PemFile(directory / "certificate.pem").read(), PemFile(directory / "key.pem").read())
