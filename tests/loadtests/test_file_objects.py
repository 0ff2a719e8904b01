"""Files that the load origin serves: for load tests whose clients understand what they read."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from loadtests.harness.content import BUCKET
from loadtests.harness.origin import LoadOrigin


def test_a_file_is_served_under_each_of_its_keys(tmp_path: Path) -> None:
    """Whole and by range, byte for byte."""
    content = bytes(range(256)) * 2000
    (tmp_path / "file").write_bytes(content)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with LoadOrigin([], {"a/1": tmp_path / "file", "b/1": tmp_path / "file"}) as origin:
        with opener.open(f"{origin.url}/{BUCKET}/a/1", timeout=10) as answer:
            assert answer.read() == content
        ranged = urllib.request.Request(f"{origin.url}/{BUCKET}/b/1", headers={"Range": "bytes=300000-300999"})
        with opener.open(ranged, timeout=10) as answer:
            assert answer.read() == content[300_000:301_000]
