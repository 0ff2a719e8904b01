"""The clauses of reads hold over both ways: HTTP, and the local socket (docs/semantics.md, clause 15)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import asgi
from tests.support.both_reads import read_beside


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test over both ways if it asks a gateway of its own process, which has the local socket beside."""
    ways: list[object] = ["http"]
    if "call" in vars(metafunc.module):
        ways.append(pytest.param("local", marks=pytest.mark.slow))
    metafunc.parametrize("way", ways, indirect=True)


@pytest.fixture(autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """With `local`, each plain GET is also made through the local socket, just before: both must give the same."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "local":
            patch.setattr(asgi, "READ_LOCALLY", read_beside)
        yield request.param
