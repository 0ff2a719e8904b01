"""Log files of a test, and a clock that it moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson


class Hands:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]
