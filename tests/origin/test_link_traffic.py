"""Which answers tell of the link, and what several connections have moved together."""

from __future__ import annotations

import pytest

from gateway.origin.client import OriginRequest
from gateway.origin.traffic_meter import LARGE_BYTES, AnswerKind, Traffic, answer_kind, in_all


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (OriginRequest("GET", "b", "k"), AnswerKind.GET),
        (OriginRequest("GET", "b", "k", [("versionId", "1")]), AnswerKind.GET),
        (OriginRequest("GET", "b", "k", [("uploadId", "1")]), None),
        (OriginRequest("GET", "b"), None),
        (OriginRequest("HEAD", "b", "k"), AnswerKind.HEAD),
        (OriginRequest("PUT", "b", "k", body=b"x"), AnswerKind.WRITE),
        (OriginRequest("PUT", "b", "k", body=bytes(LARGE_BYTES)), AnswerKind.LARGE_WRITE),
        (OriginRequest("PUT", "b", "k"), None),
        (OriginRequest("POST", "b", "k", [("uploadId", "1")], body=b"x"), None),
        (OriginRequest("DELETE", "b", "k"), None),
    ],
)
def test_only_answers_that_take_as_long_as_others_of_their_kind_are_compared(
    request_: OriginRequest, kind: AnswerKind | None
) -> None:
    """LIST, copies and completions take as long as they like; what waits for bytes of a direction tells of that one."""
    assert answer_kind(request_) is kind


def test_several_origins_are_one_link() -> None:
    """What each of them has moved is added up."""
    one = Traffic(1, 2, [(AnswerKind.GET, 0.1)], 3, 4)
    found = in_all([{"read": one, "write": Traffic(10)}, {"read": one, "write": Traffic(5)}])
    assert found == {"read": Traffic(2, 4, ((AnswerKind.GET, 0.1),) * 2, 6, 8), "write": Traffic(15)}
    assert in_all([]) == {"read": Traffic(0), "write": Traffic(0)}
