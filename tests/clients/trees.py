"""Folders of files, compared with what is in a bucket."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.clients.boto import read
from tests.clients.content import MIB, random_bytes

FILES = {
    "empty": 0,
    "one byte": 1,
    "images/0001+a.jpg": 114_660,
    "images/ünï.jpg": 114_660,
    "shards/train-00000.tar": 9 * MIB + 5,
    "nested/deeper/and deeper/x=1&y=2.bin": 4096,
}


_LONG_AGO = 1_700_000_000  # older than any upload: a file of this second looks newer than its object to `aws s3 sync`


def make_tree(directory: Path) -> dict[str, bytes]:
    """Write FILES below `directory`; what is where."""
    content = {name: random_bytes(size, seed=index) for index, (name, size) in enumerate(FILES.items())}
    for name, data in content.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (_LONG_AGO, _LONG_AGO))
    return content


def read_tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def read_bucket(client: Any, bucket: str, prefix: str = "") -> dict[str, bytes]:
    """Every object under `prefix`, named without it."""
    listed = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {one["Key"].removeprefix(prefix): read(client, bucket, one["Key"]) for one in listed}
