"""`forebay warm`, `pin` and `snapshot create`: the exit code says whether all was done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway import cli
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import StrictOrigin


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    """With a slot that can have a third of its data set."""
    slot = {"name": "small", "prefix": "s3://bucket/large/", "capacity_limit": "8MiB"}
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        for number in range(6):
            origin.model.put("bucket", f"large/{number}", bytes(4 * 2**20))
        config: dict[str, Any] = {"origin": origin.settings, "slots": [slot]}
        with GatewayProcess(config) as gateway, gateway.explaining():
            yield gateway


def run(gateway: GatewayProcess, *arguments: str) -> Result:
    return CliRunner().invoke(cli.app, [*arguments, "--admin-url", gateway.admin_url], env={"FOREBAY_CONFIG": None})


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_warming_more_than_fits_is_a_failure(gateway: GatewayProcess, more: tuple[str, ...]) -> None:
    """A script would train on a cold cache; the message says how much is there."""
    result = run(gateway, "warm", "s3://bucket/large/", "--wait", *more)
    assert result.exit_code == 1
    assert result.stderr.startswith("forebay: the cache has no room for all of s3://bucket/large/: it has ")


@pytest.mark.slow
def test_a_snapshot_of_no_object_is_a_failure_unless_allowed(gateway: GatewayProcess) -> None:
    """It takes no name either."""
    result = run(gateway, "snapshot", "create", "v1", "s3://bucket/typo/")
    assert result.exit_code == 1
    assert result.stderr.startswith("forebay: the snapshot was not made: s3://bucket/typo/ holds no object: ")
    assert run(gateway, "snapshot", "create", "v1", "s3://bucket/typo/", "--allow-empty").exit_code == 0


@pytest.mark.slow
def test_a_pin_of_no_object_leaves_no_pin(gateway: GatewayProcess) -> None:
    """The right prefix is not refused for it."""
    result = run(gateway, "pin", "s3://bucket/large/typo/", "--wait")
    assert result.exit_code == 1
    assert result.stderr.startswith("forebay: s3://bucket/large/typo/ holds no object: ")
    assert run(gateway, "pin", "s3://bucket/large/0", "--wait").exit_code == 0
    assert run(gateway, "unpin", "s3://bucket/large/0").exit_code == 0
