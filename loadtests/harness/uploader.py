"""Uploads parts over plain connections, as fast as they are taken."""

from __future__ import annotations

import http.client
from functools import partial

from loadtests.harness.comparison import Contender
from loadtests.harness.saver import at_once


def upload_seconds(to: Contender, *, connections: int, parts: int, part: bytes) -> float:
    """How long it takes to have `parts` of them accepted over each connection; RuntimeError when one is not."""

    def upload(number: int) -> None:
        connection = http.client.HTTPConnection(*to.address)
        headers = {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
        for index in range(parts):
            connection.request("PUT", f"/bucket/key-{number}-{index}", part, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"{to.name} answered {answer.status}")
            answer.read()
        connection.close()

    return at_once([partial(upload, number) for number in range(connections)])
