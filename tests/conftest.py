"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

from gateway.metadata import bucket_metadata
from gateway.metadata.listing import index as listing_index

settings.register_profile("forebay", deadline=None, print_blob=True)
settings.load_profile("forebay")
"""A generated case may take as long as it takes: a machine that stands still for 200 ms is no failure of it. A failure
prints what repeats it."""

structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)
"""The way it comes with draws a traceback with every local variable, which takes 50 ms."""


@pytest.fixture(scope="session", autouse=True)
def patient_with_the_disk() -> Iterator[None]:
    """A question waits for the disk longer than a client should wait: others may be writing to the same one.

    Tests of a disk that is too slow say how slow that is.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_metadata, "RECALL_SECONDS_MAX", 60.0)
        patch.setattr(listing_index, "NOTE_SECONDS_MAX", 60.0)
        yield
