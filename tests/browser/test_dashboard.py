"""The dashboard in headless Chromium, with a gateway and an origin behind it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import eventually

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
        places = (
            "heads => heads.map(head => [...head.children].map(one => Math.round(one.getBoundingClientRect().left)))"
        )
        slowest, refused = page.eval_on_selector_all("#recent thead tr", places)
        assert slowest == refused
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
    assert page.input_value("select[name=action]") == page.input_value("input[name=prefix]") == ""
    submit = page.locator("#dialog button[type=submit]")
    assert (submit.inner_text(), submit.is_disabled()) == ("Choose first", True)
    page.select_option("select[name=action]", "warm")
    assert submit.is_disabled()
    page.fill("input[name=prefix]", "s3://bucket/data/")
    assert submit.inner_text() == "Warm s3://bucket/data/"
    assert "every object under s3://bucket/data/" in page.inner_text("#dialog .what")
    page.keyboard.press("Enter")
    page.wait_for_selector("#dialog .outcome.good")
    assert "Warming has begun" in page.inner_text("#dialog .outcome")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "start"
    page.wait_for_selector("#jobs >> text=warm s3://bucket/data/", state="attached")
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


@pytest.fixture
def writing_back(tmp_path: Path) -> Iterator[tuple[StrictOrigin, GatewayProcess]]:
    """An origin of its own, which tests stop and make slow, and a gateway that writes back what is under back/."""
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        slots = [
            {"name": "back", "prefix": "s3://bucket/back/", "write": "back", "consistency": "ttl"},
            {"name": "data", "prefix": "s3://bucket/data/", "consistency": "immutable", "read_bandwidth": "64KiB/s"},
        ]
        tables = {"cache": {"directory": str(tmp_path / "cache"), "persistent": True}, "slots": slots}
        with gateway_of(origin, **tables) as gateway:
            client = client_of(gateway)
            client.put_object(Bucket="bucket", Key="back/first", Body=b"tells what the bucket's ETags are")
            yield origin, gateway


def test_a_conflict_is_decided_with_the_page(browser: Any, writing_back: tuple[StrictOrigin, GatewayProcess]) -> None:
    """Others have written the keys before the flush. At the width of a phone, with the keyboard alone, each way."""
    origin, gateway = writing_back
    client = client_of(gateway)
    origin.stop()
    for key in ("back/ours", "back/theirs"):
        client.put_object(Bucket="bucket", Key=key, Body=b"ours")
        origin.model.put("bucket", key, b"theirs")
    origin.start()
    page, errors = opened(browser, gateway, viewport={"width": 360, "height": 740}, color_scheme="dark")
    page.wait_for_selector(".tile.alert >> text=writes that need you", timeout=30_000)
    rows = page.locator("#unflushed tr", has_text="conflict")
    expect_count(rows, 2)
    assert page.evaluate("document.documentElement.scrollWidth") == 360

    rows.filter(has_text="s3://bucket/back/ours").locator("button").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#dialog .versions >> text=6 B")
    versions = page.locator("#dialog .versions tbody tr").all_inner_texts()
    assert [one.split("\t")[1:] for one in versions[::2]] == [["4 B", "6 B"], [etag_of(b"ours"), etag_of(b"theirs")]]
    assert len({*versions[1].split("\t")}) >= 2  # dates
    assert page.locator("#dialog :checked").count() == 0
    submit = page.locator("#dialog button[type=submit]")
    assert (submit.inner_text(), submit.is_disabled()) == ("Choose first", True)
    drawn = page.inner_text("#unflushed")
    eventually(lambda: page.inner_text("#unflushed") != drawn)  # the button is another one now
    page.keyboard.press("Escape")
    page.wait_for_selector("#dialog", state="hidden")
    expect_count(rows, 2)  # a dialog that is left decides nothing
    assert content(origin, "back/ours") == b"theirs"
    page.wait_for_function("document.activeElement.dataset.key")  # the focus is where it was, once the page knows
    page.keyboard.press("Enter")
    page.wait_for_selector("#dialog .versions >> text=6 B")
    page.keyboard.press("Space")
    assert "overwrites what the origin has under s3://bucket/back/ours" in page.inner_text("#dialog .what.danger")
    origin.model.put("bucket", "back/ours", b"theirs, again")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Keep ours: send 4 B"
    page.keyboard.press("Enter")
    page.wait_for_selector("#dialog .outcome.bad >> text=another version by now")
    page.wait_for_selector("#dialog .versions >> text=13 B")
    assert content(origin, "back/ours") == b"theirs, again"  # nobody had seen it
    submit.click()
    page.wait_for_selector("#dialog .outcome.good >> text=keep-ours")
    expect_count(rows, 1)
    page.keyboard.press("Escape")
    focused = "document.activeElement.querySelector('#unflushed') !== null && document.activeElement !== document.body"
    eventually(lambda: bool(page.evaluate(focused)))  # the page itself evaluates no strings: its policy forbids that
    eventually(lambda: content(origin, "back/ours") == b"ours")

    rows.filter(has_text="s3://bucket/back/theirs").locator("button").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    assert "is given up for good" in page.inner_text("#dialog .what.danger")
    assert submit.inner_text() == "Keep theirs: give up 4 B"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#dialog .outcome.good >> text=keep-theirs")
    page.keyboard.press("Escape")
    expect_count(rows, 0)
    page.wait_for_selector(".tile.alert", state="detached")
    assert client.get_object(Bucket="bucket", Key="back/theirs")["Body"].read() == b"theirs"
    assert content(origin, "back/theirs") == b"theirs"
    assert errors == []
    page.close()


def test_an_open_upload_is_aborted_with_the_page(
    browser: Any, writing_back: tuple[StrictOrigin, GatewayProcess]
) -> None:
    """The client that goes on with it is told; the bucket has neither object nor upload."""
    origin, gateway = writing_back
    client = client_of(gateway)
    name = {"Bucket": "bucket", "Key": "back/open"}
    upload = client.create_multipart_upload(**name)["UploadId"]
    part = client.upload_part(**name, UploadId=upload, PartNumber=1, Body=bytes(5 << 20))
    page, errors = opened(browser, gateway)
    row = page.locator("#unflushed tr", has_text="s3://bucket/back/open")
    row.locator("text=1 part, 5.0 MiB").wait_for()
    row.locator("button").click()
    assert "is deleted: 1 part, 5.0 MiB." in page.inner_text("#dialog .what")
    assert page.inner_text("#dialog button.danger") == "Abort the upload: give up 5.0 MiB"
    page.click("#dialog button.danger")
    page.wait_for_selector("#dialog .outcome.good >> text=is aborted")
    page.keyboard.press("Escape")
    row.wait_for(state="detached")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    with pytest.raises(client.exceptions.ClientError, match="NoSuchUpload"):
        client.complete_multipart_upload(**name, UploadId=upload, MultipartUpload=parts)
    assert client_of(gateway).list_multipart_uploads(Bucket="bucket").get("Uploads", []) == []
    eventually(lambda: not origin.model.buckets["bucket"].uploads)
    assert errors == []
    page.close()


def test_a_running_job_is_aborted_and_pins_come_and_go_with_the_page(
    browser: Any, writing_back: tuple[StrictOrigin, GatewayProcess]
) -> None:
    """A warm job that would take minutes ends; a pin that has begun is listed, and taken away with its button."""
    origin, gateway = writing_back
    for i in range(20):
        origin.model.put("bucket", f"data/{i:02}", os.urandom(1 << 20))
    page, errors = opened(browser, gateway)
    act(page, "warm", "s3://bucket/data/", "Warming has begun")
    row = page.locator("#jobs tr", has_text="warm s3://bucket/data/")
    row.locator("text=of 20 objects").wait_for()
    row.locator("button").click()
    assert "What it has done stays done" in page.inner_text("#dialog .what")
    page.click("#dialog button.danger")
    page.wait_for_selector("#dialog .outcome.good >> text=is cancelled")
    page.keyboard.press("Escape")
    page.click("#jobs summary", timeout=ANSWER_SECONDS_MAX * 1000)
    row.locator(".tag.warn >> text=cancelled").wait_for()
    assert row.locator("button").count() == 0

    act(page, "pin", "s3://bucket/back/", "Pinning has begun")
    pin = page.locator("#pins tr", has_text="s3://bucket/back/")
    pin.locator("button").click()
    page.keyboard.press("Enter")
    page.wait_for_selector("#dialog .outcome.good >> text=Unpinned")
    page.keyboard.press("Escape")
    pin.wait_for(state="detached")
    assert errors == []
    page.close()


def test_writes_are_flushed_with_the_button_of_their_slot(
    browser: Any, writing_back: tuple[StrictOrigin, GatewayProcess]
) -> None:
    """What failed while the bucket was away goes at once, and the page says that nothing is left."""
    origin, gateway = writing_back
    origin.stop()
    client_of(gateway).put_object(Bucket="bucket", Key="back/late", Body=b"late")
    page, errors = opened(browser, gateway)
    page.wait_for_selector("#unflushed >> text=1 object (4 B)")
    origin.start()
    page.click("#unflushed button[data-key='flush back']")
    assert page.input_value("#dialog input[name=prefix]") == "s3://bucket/back/"
    page.wait_for_selector("#dialog button[type=submit] >> text=Flush 1 object, 4 B")
    page.keyboard.press("Enter")
    page.wait_for_selector("#dialog .outcome.good")
    page.keyboard.press("Escape")
    page.wait_for_selector("#unflushed >> text=0 objects (0 B)")
    assert content(origin, "back/late") == b"late"
    assert errors == []
    page.close()


@pytest.mark.parametrize("width", [1400, 800, 390])
def test_no_word_is_broken_and_what_is_over_is_folded(
    browser: Any, writing_back: tuple[StrictOrigin, GatewayProcess], width: int
) -> None:
    """Whatever there is to show: jobs that ended, a conflict, checkpoints, slots, callers. Only names of objects break.
    A fold stays open when the page is drawn anew. Checkpoints come right below the first charts."""
    origin, gateway = writing_back
    client = client_of(gateway)
    for step in range(9):
        for rank in range(2):
            client.put_object(Bucket="bucket", Key=f"back/step-{step}/__{rank}_0.distcp", Body=b"x")
        client.put_object(Bucket="bucket", Key=f"back/step-{step}/.metadata", Body=b"x")
    origin.stop()
    client.put_object(Bucket="bucket", Key="back/" + "k" * 300, Body=b"ours")
    origin.model.put("bucket", "back/" + "k" * 300, b"theirs")
    origin.start()
    page, errors = opened(browser, gateway, viewport={"width": width, "height": 740})
    for number in range(25):
        asked = {"prefix": f"s3://bucket/data/{number:02}/"}
        eventually(lambda: page.request.post(f"{gateway.admin_url}/api/v1/evict", data=asked).status == 202)  # noqa: B023
    page.wait_for_selector("#jobs summary >> text=The last 20 jobs that ended", timeout=ANSWER_SECONDS_MAX * 1000)
    conflict = "#banner >> text=slot back: not at the origin: 1 conflict"
    page.wait_for_selector(conflict, timeout=ANSWER_SECONDS_MAX * 1000)
    expect_count(page.locator("#jobs tr >> visible=true"), 0)
    expect_count(page.locator(".checkpoint >> visible=true"), 6)
    for summary in ("#jobs summary", "#checkpoints summary", "#settings > summary"):
        page.click(summary)
    page.wait_for_selector("#settings-shown >> text=admin.port")
    drawn = page.inner_text("#age")
    eventually(lambda: page.inner_text("#age") != drawn)
    expect_count(page.locator("#jobs tbody tr >> visible=true"), 20)
    assert page.evaluate(_BROKEN_WORDS) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    tops = page.eval_on_selector_all("#throughput, #checkpoints, #requests, #slots", _TOPS)
    assert tops == sorted(tops)
    assert re.findall(r"\b0 µs", page.inner_text("main")) == []
    page.click("#start")
    assert page.evaluate(_BROKEN_WORDS) == []
    assert errors == []
    page.close()


_TOPS = "found => found.map(one => one.getBoundingClientRect().top)"
_BROKEN_WORDS = """() => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const broken = [], range = document.createRange();
  while (walk.nextNode()) {
    const node = walk.currentNode;
    if (!node.parentElement.checkVisibility()) continue;
    for (const word of node.data.matchAll(/[\\p{L}\\p{N}.,]{2,20}(?=\\s|$)/gu)) {
      if (word.index && !/\\s/.test(node.data[word.index - 1])) continue;
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((one) => Math.round(one.top))).size > 1) broken.push(word[0]);
    }
  }
  return broken;
}"""
"""Words of letters and digits that stand on two lines."""


def test_a_page_that_is_opened_shows_what_was_before(browser: Any, gateway: GatewayProcess) -> None:
    """The gateway has counted while no page was open; nothing is drawn across a time without counts; the pointer shows
    the values of a time."""
    samples = f"{gateway.admin_url}/api/v1/overview?history=true"
    page = browser.new_page()
    eventually(lambda: len(page.request.get(samples).json()["history"]) >= 2)

    def with_gap(route: Any) -> None:
        document = route.fetch().json()
        [template, *_] = document["history"] or [document["counts"]]
        at = document["counts"]["at"]
        document["history"] = [
            template | {"at": at - age, "requests": 0} for age in (*range(880, 600, -5), *range(300, 0, -5))
        ]
        route.fulfill(json=document)

    page.route("**/api/v1/overview?history=true", with_gap)
    page.goto(gateway.admin_url)
    page.wait_for_selector("#throughput svg")
    path = page.get_attribute("#throughput path.served:not(.area)", "d")
    assert path.count("M") == 2, path
    page.hover("#throughput .plot", position={"x": 30, "y": 30})
    page.wait_for_selector("#throughput .tip >> text=served 0 B/s")
    assert page.locator("line.cursor").count() == 4
    box = page.locator("#throughput .plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)
    page.wait_for_selector("#throughput .tip >> text=/served \N{EN DASH}/")
    page.mouse.move(0, 0)
    page.wait_for_selector(".tip", state="detached")
    page.close()


def test_bars_show_limits_and_nothing_else(browser: Any, origin: StrictOrigin) -> None:
    """Without a ceiling and a known link there is none for bandwidth. The host, callers and their limits are shown."""
    credential = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY, "allow": ["s3://"]}
    slots = [{"name": "free", "prefix": "s3://bucket/free/"}, {"name": "held", "prefix": "s3://bucket/held/"}]
    slots[1] |= {"read_bandwidth": "1MiB/s"}
    with gateway_of(origin, slots=slots, credentials=[credential | {"max_concurrent_requests": 4}]) as gateway:
        page, errors = opened(browser, gateway)
        for name, bars in (("free", 1), ("held", 2)):
            slot = page.locator(".slot", has=page.locator(f"h3 >> text={name}"))
            assert slot.locator(".bar").count() == bars
        assert page.inner_text("#host") == page.request.get(f"{gateway.admin_url}/api/v1/overview").json()["host"] != ""
        page.wait_for_selector("#callers tr >> text=4 at a time")
        for link in page.locator("footer a").all():
            assert page.request.get(f"{gateway.admin_url}/{link.get_attribute('href')}").ok
        assert errors == []
        page.close()


def client_of(gateway: GatewayProcess) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
    )


def opened(browser: Any, gateway: GatewayProcess, **options: Any) -> tuple[Any, list[str]]:
    """A page with the first figures, and what it complains of, which grows."""
    page = browser.new_page(**options)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(gateway.admin_url)
    page.wait_for_selector(".tile b")
    return page, errors


def act(page: Any, action: str, prefix: str, outcome: str) -> None:
    """By "Actions…", as far as the outcome."""
    page.click("#start")
    page.select_option("select[name=action]", action)
    page.fill("input[name=prefix]", prefix)
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#dialog .outcome.good >> text={outcome}")
    page.keyboard.press("Escape")


def etag_of(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


def content(origin: StrictOrigin, key: str) -> bytes:
    """What the bucket has, whoever wrote it."""
    found = origin.model.buckets["bucket"].objects[key].content
    return found.read(0, found.size_bytes)


def expect_count(locator: Any, count: int) -> None:
    """The page has asked again by then."""
    eventually(lambda: locator.count() == count)
