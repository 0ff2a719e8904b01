"""What is said of a bucket while it is changed, over real sockets and several workers."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import httpx
import pytest

from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

CHANGES = 60
READERS = 3


class Story:
    """One thread changes the bucket's tags again and again, others read them; each request may meet any worker."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/bucket?tagging"
        self.acknowledged = 0
        self.reads = 0
        self.hits = 0
        self.wrong: list[str] = []
        self.over = threading.Event()

    def change(self) -> None:
        try:
            for number in range(1, CHANGES + 1):
                tags = b"<Tagging><Number>%d</Number></Tagging>" % number
                assert httpx.put(self.url, content=tags, timeout=ANSWER_SECONDS_MAX).status_code == 200
                self.acknowledged = number
        finally:
            self.over.set()

    def read(self) -> None:
        while not self.over.is_set():
            self.read_once()

    def read_once(self) -> None:
        oldest_allowed = self.acknowledged
        answer = httpx.get(self.url, timeout=ANSWER_SECONDS_MAX)
        found = re.search(r"<Number>(\d+)</Number>", answer.text)
        if not (found and int(found[1]) >= oldest_allowed) and (oldest_allowed or answer.status_code != 404):
            self.wrong.append(f"{oldest_allowed} was acknowledged, then {answer.status_code} {answer.text}")
        self.reads += 1
        self.hits += answer.headers["x-forebay-cache"] == "hit"


@pytest.mark.slow
def test_no_worker_tells_what_was_before_an_own_change(tmp_path: Path) -> None:
    """2.3, 3.10 Whoever asks after a change was acknowledged hears of it; between changes memory answers."""
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        config: dict[str, dict[str, object]] = {
            "server": {"workers": 2, "allow_unsigned": True},
            "origin": {
                "endpoint_url": origin.endpoint_url,
                "region": "us-east-1",
                "access_key_id": ACCESS_KEY_ID,
                "secret_access_key": SECRET_ACCESS_KEY,
            },
        }
        with GatewayProcess(config, directory=tmp_path / "cache") as gateway:
            story = Story(gateway.s3_url)
            threads = [threading.Thread(target=story.read) for _ in range(READERS)]
            threads.append(threading.Thread(target=story.change))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            hits_in_turn = 0
            while hits_in_turn < 10:  # a slow disk is a miss; the test's own time limit is the deadline
                asked, hits = len(origin.model.calls), story.hits
                story.read_once()
                hits_in_turn = hits_in_turn + 1 if story.hits > hits else 0
                assert story.hits == hits or len(origin.model.calls) == asked
    assert story.wrong == []
    assert story.acknowledged == CHANGES
    assert story.hits >= 10
    assert story.reads >= CHANGES
