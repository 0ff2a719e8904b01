"""The whole table."""

from __future__ import annotations

from collections import Counter

from tests.scenarios.transparency import copying, multipart, reading, writing
from tests.scenarios.transparency.steps import Case

TABLE: tuple[Case, ...] = (*reading.cases(), *writing.cases(), *multipart.cases(), *copying.cases())

_names = Counter(case.name for case in TABLE)
assert max(_names.values()) == 1, f"names that stand twice: {[name for name, times in _names.items() if times > 1]}"
