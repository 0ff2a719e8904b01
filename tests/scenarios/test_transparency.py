"""Whatever an origin answers directly, it answers through Forebay: the table in `transparency/`, on two origins."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from tests.scenarios.transparency import keys, listing, reading
from tests.scenarios.transparency.comparing import differences
from tests.scenarios.transparency.comparison import Comparison
from tests.scenarios.transparency.sides import VIRTUAL_DOMAIN, running_pair
from tests.scenarios.transparency.steps import Case, delete, get, head, pattern, put
from tests.scenarios.transparency.table import TABLE

_QUICK_EACH = 2
_SLOW_OF = {"strict": 1, "moto": int(os.environ.get("FOREBAY_TRANSPARENCY_MOTO_OF", "4"))}
"""Every so manieth case is quick with the strict origin, or slow: the table is about the gateway, moto is a second
opinion and costs most. The campaign has the whole of it."""


def _runs() -> Iterator[Any]:
    for kind in ("strict", "moto"):
        for number, case in enumerate(TABLE):
            if case.only in (None, kind):
                is_quick = kind == "strict" and number % _QUICK_EACH == 0
                if case.only or number % _SLOW_OF[kind] == 0:
                    yield pytest.param(kind, case, id=f"{kind}-{case.name}", marks=() if is_quick else pytest.mark.slow)


VIRTUAL_HOSTED = [*keys.cases(), *list(reading.cases())[::4], *list(listing.cases())[::4]]

Comparisons = Callable[[str], Comparison]


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comparisons]:
    """The comparison with an origin of a kind, set up when it is first asked for."""
    with ExitStack() as stack:

        @cache
        def comparison_with(kind: str) -> Comparison:
            return Comparison(stack.enter_context(running_pair(kind, tmp_path_factory.mktemp(kind))))

        yield comparison_with


@pytest.mark.parametrize(("kind", "case"), list(_runs()))
def test_the_gateway_answers_as_its_origin(comparisons: Comparisons, kind: str, case: Case) -> None:
    """Clause 7: status, error code, body and headers are the origin's, from blocks as well as past them."""
    found = comparisons(kind).differences_of(case)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("case", VIRTUAL_HOSTED, ids=lambda case: case.name)
def test_the_style_of_the_address_changes_nothing(comparisons: Comparisons, case: Case) -> None:
    """Buckets in the Host header are the buckets of the path, odd keys and all."""
    found = comparisons("strict").differences_of(case, domain=VIRTUAL_DOMAIN)
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_the_table_has_seen_hits_and_misses(comparisons: Comparisons) -> None:
    """Warm answers came from blocks: otherwise the table would only have compared the origin with itself."""
    comparison = comparisons("strict")
    for case in list(reading.cases())[:60]:
        comparison.differences_of(case)
    assert comparison.outcomes["cold", "miss"] >= 40
    assert comparison.outcomes["warm", "hit"] >= 40


def test_pipelined_requests_are_answered_in_order(comparisons: Comparisons) -> None:
    """Requests that come before their turn wait for it, errors and bodies among them included (RFC 9112, 9.3.2)."""
    pair = comparisons("strict").pair
    pair.fresh_bucket((put("/{bucket}/k", b"0123456789"),))
    steps = [
        get("/{bucket}/k"),
        head("/{bucket}/absent"),
        put("/{bucket}/new", b"a body", payload="signed-chunks"),
        get("/{bucket}/absent"),
        get("/{bucket}/new"),
        head("/{bucket}/k", "range: bytes=2-3"),
        delete("/{bucket}/k"),
        get("/{bucket}/k"),
    ]
    through = pair.through
    through.connection.send(b"".join(through.wire_bytes(step) for step in steps))
    answers = [through.connection.answer(step.method) for step in steps]
    for step, answer in zip(steps, answers, strict=True):
        assert not list(differences(step.method, pair.direct.ask(step.plain()), answer, pair.names()))


@pytest.mark.parametrize("size_bytes", [1, 3000, 2_000_000])
def test_who_waits_for_100_continue_gets_it(comparisons: Comparisons, size_bytes: int) -> None:
    """The head goes first, the body after the gateway's 100; then everything is as without."""
    pair, body = comparisons("strict").pair, pattern(size_bytes)
    pair.fresh_bucket()
    through = pair.through
    request = through.wire_bytes(put("/{bucket}/k", body, "expect: 100-continue"))
    end = len(request) - size_bytes
    through.connection.send(request[:end])
    interim = through.connection.interim()
    through.connection.send(request[end:])
    assert (interim, through.connection.answer("PUT").status) == (100, 200)
    assert through.ask(get("/{bucket}/k")).body == body


@pytest.mark.slow
def test_who_waits_for_100_continue_is_refused_at_once(comparisons: Comparisons) -> None:
    """No 100 for a request that fails by its head: the client keeps its body, and can go on."""
    pair = comparisons("strict").pair
    pair.fresh_bucket()
    through = pair.through
    for line in ("content-md5: garbage", "x-amz-sdk-checksum-algorithm: CRC7"):
        request = through.wire_bytes(put("/{bucket}/k", b"body", line, "expect: 100-continue"))
        through.connection.send(request[: -len(b"body")])
        answer = through.connection.answer("PUT")
        assert (answer.status, answer.interim) == (400, ())
        assert through.ask(get("/{bucket}/k")).status == 404
