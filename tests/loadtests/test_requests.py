from __future__ import annotations

import calendar

import pytest

from loadtests.harness import wrk
from loadtests.harness.content import Family
from loadtests.harness.signed_requests import Signer
from loadtests.harness.warm import Workload


def test_the_signature_is_that_of_the_specification() -> None:
    """The first example of "Authenticating Requests: Using the Authorization Header", Amazon S3 API reference."""
    signer = Signer(
        "examplebucket.s3.amazonaws.com", "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    )
    request = signer.get("/test.txt", "0-9", at=calendar.timegm((2013, 5, 24, 0, 0, 0)))
    assert request.startswith(b"GET /test.txt HTTP/1.1\r\nhost: examplebucket.s3.amazonaws.com\r\n")
    assert b"Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41\r\n\r\n" in request


def test_a_workload_asks_for_every_piece_and_never_the_same_twice_in_a_row() -> None:
    """Ranges cover every object; neighbours differ in key or range, date and signature."""
    work = Workload(Family("ranges/", 2, 20), 10, connections=1, requests=8)
    assert work.body_bytes == 10
    assert work.pieces() == [(0, 0, 10), (1, 0, 10), (0, 10, 10), (1, 10, 10)]
    requests = work.signed("127.0.0.1:9000")
    assert len(requests) == 8
    assert len({request.split(b"Signature=")[1] for request in requests}) == 8


def test_small_objects_are_read_whole() -> None:
    """An object no larger than a range is read without one."""
    work = Workload(Family("small/", 3, 10), 10, connections=1, requests=0)
    assert work.pieces() == [(0, 0, None), (1, 0, None), (2, 0, None)]
    assert not any(b"range:" in request for request in work.signed("127.0.0.1:9000"))


def test_what_wrk_saw_is_read_from_its_last_line() -> None:
    """Count, seconds, bytes and percentiles, in seconds."""
    seen = wrk.figures("Running 2s test\nRESULT 100 2000000 1000000 0 150 4200\n", body_bytes=10_000)
    assert seen == wrk.WrkFigures(100, 2.0, 1_000_000, 0.00015, 0.0042)
    assert seen.requests_per_second == 50


@pytest.mark.parametrize(
    "line", ["RESULT 100 2000000 1000000 1 1 1", "RESULT 100 1 999999 0 1 1", "RESULT 0 1 0 0 1 1"]
)
def test_a_run_with_wrong_answers_gives_no_figure(line: str) -> None:
    """One error, one short body or no answer at all, and nothing was measured."""
    with pytest.raises(RuntimeError, match="wrong answers"):
        wrk.figures(line, body_bytes=10_000)


def test_a_run_that_says_nothing_gives_no_figure() -> None:
    """wrk's own words are in the error."""
    with pytest.raises(RuntimeError, match="unable to connect"):
        wrk.figures("unable to connect to 127.0.0.1\n", body_bytes=1)
