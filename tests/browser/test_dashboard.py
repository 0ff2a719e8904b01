"""The dashboard in headless Chromium, with a gateway and an origin behind it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

pytestmark = pytest.mark.browser

TOKEN = "a-token-of-sixteen-characters-or-more"
LOAD_SECONDS_MAX = 5.0
"""Alone, it takes under a second; this machine may do much else."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's, which may run as root."""
    api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium")
    assert program is not None, "chromium is not installed"
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as started:
        started.model.put("bucket", "data/one", os.urandom(200_000))
        yield started


def gateway_of(origin: StrictOrigin, **tables: Any) -> GatewayProcess:
    keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    return GatewayProcess({"origin": {"endpoint_url": origin.endpoint_url, **keys}, **tables})


@pytest.fixture(scope="module")
def gateway(origin: StrictOrigin) -> Iterator[GatewayProcess]:
    with gateway_of(origin) as started:
        yield started


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light")])
def test_the_page_fits_and_asks_nobody_else(browser: Any, gateway: GatewayProcess, width: int, scheme: str) -> None:
    """At every width and in both colour schemes: no error, no overflow, no request to elsewhere."""
    page = browser.new_page(viewport={"width": width, "height": 740}, color_scheme=scheme)
    errors: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    begun = time.monotonic()
    page.goto(gateway.admin_url)
    page.wait_for_selector(".tile b")
    assert time.monotonic() - begun < LOAD_SECONDS_MAX
    page.wait_for_selector("#throughput svg")
    assert errors == []
    assert {url for url in asked if not url.startswith(gateway.admin_url)} == set()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(14, 21, 27)" if scheme == "dark" else "rgb(244, 246, 248)")
    page.close()


def test_the_page_follows_requests(browser: Any, gateway: GatewayProcess) -> None:
    """What a client reads is counted a moment later, without loading the page again."""
    page = browser.new_page()
    page.goto(gateway.admin_url)
    page.wait_for_selector(".tile b")
    client = boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
    )
    for _ in range(4):
        client.get_object(Bucket="bucket", Key="data/one")["Body"].read()
    page.wait_for_selector("#misses >> text=first-read", timeout=15_000)
    page.wait_for_selector(".slot >> text=75.0 % from the cache", timeout=15_000)
    page.close()


@pytest.mark.parametrize("width", [1280, 360])
def test_the_page_shows_slow_and_refused_requests(browser: Any, origin: StrictOrigin, width: int) -> None:
    """Whatever keys are called, it fits; a key is text, and no markup."""
    key = "<b>bold</b>/" + "k" * 400
    origin.model.put("bucket", key, b"x")
    with gateway_of(origin, slots=[{"name": "d", "prefix": "s3://bucket/", "mode": "read-only"}]) as gateway:
        client = boto3.client(
            "s3",
            endpoint_url=gateway.s3_url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY_ID,
            aws_secret_access_key=SECRET_ACCESS_KEY,
        )
        client.get_object(Bucket="bucket", Key=key)["Body"].read()
        with pytest.raises(client.exceptions.ClientError):
            client.put_object(Bucket="bucket", Key=key, Body=b"x")
        page = browser.new_page(viewport={"width": width, "height": 740})
        page.goto(gateway.admin_url)
        page.wait_for_selector("#recent >> text=Slowest")
        page.wait_for_selector("#recent >> text=403 AccessDenied")
        assert "s3://bucket/<b>bold</b>/k" in page.inner_text("#recent")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.close()


def test_actions_are_done_by_keyboard_and_tell_what_came_of_them(browser: Any, gateway: GatewayProcess) -> None:
    """The dialog says what will happen, then what did; what the gateway refuses is told in its words."""
    page = browser.new_page()
    page.goto(gateway.admin_url)
    page.wait_for_selector(".tile b")
    reached = []
    for _ in range(3):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent"))
    assert reached == ["Skip to the figures", "Actions…", "Theme: system"]
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    page.fill("input[name=prefix]", "s3://bucket/data/")
    assert "every object under s3://bucket/data/" in page.inner_text("#dialog .what")
    page.keyboard.press("Enter")
    page.wait_for_selector("#dialog .outcome.good")
    assert "Warming has begun" in page.inner_text("#dialog .outcome")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "start"
    page.wait_for_selector("#jobs >> text=warm s3://bucket/data/")
    page.keyboard.press("Enter")
    page.select_option("select[name=action]", "unpin")
    page.fill("input[name=prefix]", "s3://bucket/never/")
    page.keyboard.press("Enter")
    page.wait_for_selector("#dialog .outcome.bad")
    assert "is not pinned" in page.inner_text("#dialog .outcome")
    page.close()


def test_the_page_asks_for_the_token_and_outlives_the_gateway(browser: Any, origin: StrictOrigin) -> None:
    """A wrong token is told, the right one opens; a gateway that is gone is told, and followed when it is back."""
    with gateway_of(origin, admin={"token": TOKEN}) as guarded:
        page = browser.new_page()
        page.goto(guarded.admin_url)
        page.fill("input[name=token]", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=does not take this token")
        page.fill("input[name=token]", TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector(".tile b")
        assert page.evaluate("localStorage.length") == 0
        page.route("**/api/**", lambda route: route.abort())
        page.wait_for_selector("#trouble:not([hidden])")
        assert "does not answer" in page.inner_text("#trouble")
        page.unroute("**/api/**")
        page.wait_for_selector("#trouble", state="hidden", timeout=15_000)
        page.close()
