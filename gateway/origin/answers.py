"""What an origin's refusal tells: its S3 error code, the region it wants, the time it has."""

from __future__ import annotations

import re

from gateway.origin.response import HttpResponse

_PEEK_BYTES = 16 * 1024
_ELEMENT = {name: re.compile(rf"<{name}>\s*+([^<]{{1,200}}?)\s*+</{name}>") for name in ("Code", "Region")}
_REGION = re.compile(r"[a-z0-9-]{1,64}")


async def error_document(response: HttpResponse) -> str:
    """The beginning of an error answer's body; the answer can still be read in full."""
    return (await response.peek(_PEEK_BYTES)).decode("utf-8", "replace")


def error_code(document: str) -> str | None:
    """The S3 error code (S3 API, "Error responses"); None when there is none, as in the answer to a HEAD."""
    found = _ELEMENT["Code"].search(document)
    return found.group(1) if found else None


def wanted_region(document: str, response: HttpResponse) -> str | None:
    """The region that the origin expects in the signature: in the document, or in a header where there is no body."""
    found = _ELEMENT["Region"].search(document)
    region = found.group(1) if found else response.headers.get("x-amz-bucket-region", "")
    return region if _REGION.fullmatch(region) else None
