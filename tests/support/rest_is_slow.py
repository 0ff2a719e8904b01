"""Of a test's parameters a few are tried quickly, and all of them with the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def rest_is_slow(values: Iterable[T], *quick: T) -> list[Any]:
    """Parameters, each but the quick ones marked as slow; AssertionError for a quick one that is none of them."""
    listed = list(values)
    assert all(one in listed for one in quick)
    return [one if one in quick else pytest.param(one, marks=pytest.mark.slow) for one in listed]
