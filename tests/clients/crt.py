"""The CRT's own S3 client (awscrt.s3), which speaks https with the certificates that it is told to trust."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from tests.clients.conftest import Endpoint
from tests.clients.content import MIB
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY

_LIMIT_SECONDS = 60.0


@dataclass(slots=True)
class Answer:
    """What a request ended with: headers with lower-case names, the last status, the body."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    checksum_validated: bool = False


class CrtClient:
    """Requests by method and key on one bucket, as CRT's users make them; an error of the CRT is raised as it is."""

    def __init__(self, endpoint: Endpoint, bucket: str) -> None:
        from awscrt import auth, io, s3

        assert endpoint.ca_file is not None, "the CRT is tested over https"
        self._host, self._bucket = urlsplit(endpoint.url).netloc, bucket
        trust = io.TlsContextOptions()
        trust.override_default_trust_store_from_path(None, str(endpoint.ca_file))
        connection = io.ClientTlsContext(trust).new_connection_options()
        keys = auth.AwsCredentialsProvider.new_static(ACCESS_KEY_ID, SECRET_ACCESS_KEY)
        self._client = s3.S3Client(
            region=REGION,
            tls_mode=s3.S3RequestTlsMode.ENABLED,
            tls_connection_options=connection,
            signing_config=s3.create_default_s3_signing_config(region=REGION, credential_provider=keys),
            part_size=5 * MIB,
            multipart_upload_threshold=8 * MIB,
            retry_config=None,
        )

    def get(self, key: str, **headers: str) -> Answer:
        """GET with the CRT's own ranges side by side, its checksum validation on."""
        from awscrt import s3

        return self._send(s3.S3RequestType.GET_OBJECT, "GET", key, headers, checksum_config=_validating())

    def put(self, key: str, content: bytes, *, algorithm: str = "CRC32") -> Answer:
        """PUT, in parts above the threshold, its checksum in a trailer."""
        from awscrt import s3

        trailer = s3.S3ChecksumConfig(
            algorithm=s3.S3ChecksumAlgorithm[algorithm], location=s3.S3ChecksumLocation.TRAILER
        )
        length = {"content-length": str(len(content))}
        return self._send(s3.S3RequestType.PUT_OBJECT, "PUT", key, length, content, checksum_config=trailer)

    def send(self, operation: str, method: str, key: str = "", query: str = "", **headers: str) -> Answer:
        """Any other operation, sent as it is."""
        from awscrt import s3

        return self._send(s3.S3RequestType.DEFAULT, method, key, headers, query=query, operation_name=operation)

    def _send(
        self,
        kind: Any,
        method: str,
        key: str,
        headers: dict[str, str],
        content: bytes | None = None,
        query: str = "",
        **settings: Any,
    ) -> Answer:
        from awscrt import http

        path = f"/{self._bucket}/{quote(key, safe='/~')}" + (f"?{query}" if query else "")
        named = [("host", self._host), *((name.replace("_", "-"), value) for name, value in headers.items())]
        request = http.HttpRequest(method, path, http.HttpHeaders(named), _stream(content))
        answer, chunks = Answer(), []

        def on_headers(status_code: int, headers: list[tuple[str, str]], **_: Any) -> None:
            answer.status = status_code
            answer.headers.update((name.lower(), value) for name, value in headers)

        def on_body(chunk: bytes, **_: Any) -> None:
            chunks.append(bytes(chunk))

        def on_done(did_validate_checksum: bool, **_: Any) -> None:
            answer.checksum_validated = did_validate_checksum

        sent = self._client.make_request(
            type=kind, request=request, on_headers=on_headers, on_body=on_body, on_done=on_done, **settings
        )
        sent.finished_future.result(_LIMIT_SECONDS)
        answer.body = b"".join(chunks)
        return answer


def _validating() -> Any:
    from awscrt import s3

    return s3.S3ChecksumConfig(validate_response=True)


def _stream(content: bytes | None) -> Any:
    import io

    return None if content is None else io.BytesIO(content)
