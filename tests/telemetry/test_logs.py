"""Logs: structured, and without secrets."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
import structlog
from pydantic import SecretStr

from gateway.telemetry.logs import RateLimitedLog, configure_logs

SECRET = "s3cr3t-never-to-be-seen"


@pytest.fixture
def logged() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Configures JSON logs into memory; gives the events so far."""
    stream = io.StringIO()
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    configure_logs("info", "auto", "worker7", stream)
    yield lambda: [orjson.loads(line) for line in stream.getvalue().splitlines()]
    logging.captureWarnings(False)
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)
    structlog.reset_defaults()


def test_an_event_is_a_json_line_with_its_process(logged: Callable[[], list[dict[str, Any]]]) -> None:
    """Values keep their types."""
    structlog.get_logger().info("hello", size_bytes=5, ok=True)
    (event,) = logged()
    assert event["event"] == "hello"
    assert (event["process"], event["level"], event["size_bytes"], event["ok"]) == ("worker7", "info", 5, True)
    assert event["timestamp"].endswith("Z")


def test_levels_below_the_one_set_are_not_written(logged: Callable[[], list[dict[str, Any]]]) -> None:
    """Neither ours nor those of libraries, which speak from warning up."""
    structlog.get_logger().debug("no")
    logging.getLogger("library").info("no")
    logging.getLogger("library").warning("yes %d", 1)
    assert [(event["event"], event["logger"]) for event in logged()] == [("yes 1", "library")]


@pytest.mark.parametrize(
    "event",
    [
        {"secret_access_key": SECRET},
        {"x": SecretStr(SECRET)},
        {"headers": {"Authorization": f"AWS4-HMAC-SHA256 {SECRET}", "x-amz-security-token": SECRET}},
        {"url": f"http://h/b/k?X-Amz-Signature={SECRET}&x=1"},
        {"url": f"http://h/b/k?AWSAccessKeyId=a&Signature={SECRET}&Expires=1"},
        {"url": f"http://user:{SECRET}@proxy:3128/"},
        {"nested": [{"password": SECRET}]},
        {"error": RuntimeError(f"http://user:{SECRET}@proxy:3128/ does not answer")},
    ],
)
def test_secrets_are_hidden_wherever_they_stand(
    logged: Callable[[], list[dict[str, Any]]], event: dict[str, Any]
) -> None:
    """By the name of the value, by its type, or by what stands in front of it within text."""
    structlog.get_logger().error("request", **event)
    (written,) = logged()
    assert SECRET not in str(written)
    assert "(hidden)" in str(written)


def test_secrets_in_tracebacks_are_hidden(logged: Callable[[], list[dict[str, Any]]]) -> None:
    """A library puts its URL into the message of its exception."""
    try:
        raise RuntimeError(f"http://h/?X-Amz-Signature={SECRET}")
    except RuntimeError:
        structlog.get_logger().exception("failed")
    (written,) = logged()
    assert "RuntimeError" in written["exception"]
    assert SECRET not in written["exception"]


def test_what_is_no_secret_stays(logged: Callable[[], list[dict[str, Any]]]) -> None:
    """Ports and addresses are what one reads logs for."""
    structlog.get_logger().info("ready", s3_url="http://127.0.0.1:9000", key="a:b@c")
    (written,) = logged()
    assert (written["s3_url"], written["key"]) == ("http://127.0.0.1:9000", "a:b@c")


def test_kinds_that_clients_name_are_not_remembered_for_ever(logged: Callable[[], list[dict[str, Any]]]) -> None:
    """An origin that refuses requests in one bucket after the other: as many names are kept as may be, and no more."""
    limited = RateLimitedLog(structlog.get_logger(), lambda: 5.0)
    for number in range(5000):
        for _ in range(2):
            limited.warning("refused", f"bucket-{number}", number=number)
    assert len(limited._told) <= 1024
    assert len(limited._left_out) <= 1024
    assert [event["number"] for event in logged()] == list(range(5000))
