"""Figures as people read them."""

from __future__ import annotations

import pytest

from gateway.admin.formatting import are, counted, size_text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5000, "4.9 KiB"),
        (60 * 2**20, "60.0 MiB"),
        (2**30, "1.0 GiB"),
        (3.5 * 2**40, "3.5 TiB"),
        (2**51, "2,048.0 TiB"),
    ],
)
def test_sizes_are_in_units_that_fit(size_bytes: float, text: str) -> None:
    """Nothing that is there is shown as 0.0 of something."""
    assert size_text(size_bytes) == text


def test_one_is_no_plural() -> None:
    """And long numbers can be read."""
    assert [f"{counted(n, 'object')} {are(n)}" for n in (0, 1, 1234)] == [
        "0 objects are",
        "1 object is",
        "1,234 objects are",
    ]
