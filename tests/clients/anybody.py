"""Whoever has nothing but a URL."""

from __future__ import annotations

import ssl
import urllib.request
from pathlib import Path


def fetch(url: str, ca_file: Path | None) -> bytes:
    """The body of a GET without any S3 library."""
    context = ssl.create_default_context(cafile=ca_file)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with opener.open(url, timeout=30) as response:
        content: bytes = response.read()
        return content
