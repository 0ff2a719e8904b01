"""Whatever an origin answers directly, it answers through Forebay: the table in `transparency/`, on two origins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.scenarios.transparency.comparison import Comparison
from tests.scenarios.transparency.sides import running_pair
from tests.scenarios.transparency.steps import Case
from tests.scenarios.transparency.table import TABLE

RUNS = [(kind, case) for kind in ("strict", "moto") for case in TABLE if case.only in (None, kind)]


Comparisons = Callable[[str], Comparison]


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comparisons]:
    """The comparison with an origin of a kind, set up when it is first asked for."""
    with ExitStack() as stack:

        @cache
        def comparison_with(kind: str) -> Comparison:
            return Comparison(stack.enter_context(running_pair(kind, tmp_path_factory.mktemp(kind))))

        yield comparison_with


@pytest.mark.parametrize(("kind", "case"), RUNS, ids=[f"{kind}-{case.name}" for kind, case in RUNS])
def test_the_gateway_answers_as_its_origin(comparisons: Comparisons, kind: str, case: Case) -> None:
    """Clause 7: status, error code, body and headers are the origin's, from blocks as well as past them."""
    found = comparisons(kind).differences_of(case)
    assert not found, "\n".join(found)
