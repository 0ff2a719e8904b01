"""The HTTP server of the S3 port: bytes of a socket in, ASGI events out, files sent without a copy."""

from gateway.edge.server.limits import ServerLimits
from gateway.edge.server.s3_server import S3Server, TlsFiles

__all__ = ["S3Server", "ServerLimits", "TlsFiles"]
