"""DeleteObject of what is pending."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.s3.requests import Operation
from tests.support.memory_origin.faults import Answer, on
from tests.support.write_back_gateway import Client, with_client


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("back/k?versionId=old", {}),
        ("back/k", {"x-amz-expected-bucket-owner": "1234"}),
        ("back/k", {"x-amz-mfa": "serial 123456"}),
    ],
    ids=["version", "owner", "mfa"],
)
def test_a_deletion_that_only_the_origin_can_judge_deletes_nothing_here(
    tmp_path: Path, target: str, headers: dict[str, str]
) -> None:
    """It waits for the flush; what was acknowledged stays when the origin refuses."""

    async def scenario(client: Client) -> None:
        await client.learn()
        await client.ask("PUT", "back/k", b"kept")
        client.origin.inject(on(Operation.DELETE_OBJECT), Answer(403, "AccessDenied"))
        async with client.flushing():
            await client.ask("DELETE", target, headers=headers, status=403)
        assert (await client.ask("GET", "back/k")).body == b"kept"
        assert client.origin.data("bucket", "back/k") == b"kept"

    with_client(tmp_path, scenario)
