"""Uploads parts over plain connections, as fast as they are taken."""

from __future__ import annotations

import http.client
import threading
import time

from loadtests.harness.comparison import Contender


def upload_seconds(to: Contender, *, connections: int, parts: int, part: bytes) -> float:
    """How long it takes to have `parts` of them accepted over each connection; RuntimeError when one is not."""
    failures: list[str] = []

    def upload(number: int) -> None:
        connection = http.client.HTTPConnection(*to.address)
        headers = {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
        for index in range(parts):
            connection.request("PUT", f"/bucket/key-{number}-{index}", part, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                failures.append(f"{to.name} answered {answer.status}")
                return
            answer.read()
        connection.close()

    threads = [threading.Thread(target=upload, args=(number,)) for number in range(connections)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError(failures[0])
    return time.perf_counter() - started
