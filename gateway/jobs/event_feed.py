"""Events of the origin from an SQS queue, and a canary that measures whether they come.

    receive, up to 20 s → forget what they name → delete

S3 gives no bound for its events. So the feed writes an object of its own in every window, and waits for its event: if
that does not come back within the window, the feed counts as dead until one does. Nothing else depends on it: the ages
that slots allow hold with and without a feed.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
import structlog

from gateway.api import documents as to
from gateway.core.clock import Clock
from gateway.core.errors import ForebayError
from gateway.core.model import ObjectKey
from gateway.origin.client import CredentialSource, Origin, OriginRequest, OriginSettings, Purpose, error_of
from gateway.origin.http1_client.client import Claim, Http1Client
from gateway.origin.http1_client.connection import Supervision
from gateway.origin.http1_client.response_stream import HttpResponse
from gateway.origin.signing import Target
from gateway.policy.slots import Prefix
from gateway.s3.events import Event, MalformedEvents, ObjectEvent, OtherEvent, parse_events
from gateway.s3.headers import plain_etag
from gateway.s3.signature_v4 import Family, sign_headers
from gateway.telemetry import metrics

POLL_SECONDS: Final = 20
"""Seconds for which the queue is asked to wait for a message."""

MESSAGES_MAX: Final = 10
ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
"""Ten messages of SQS have a MiB together; as JSON in JSON they may be several."""

LOOK_SECONDS: Final = 1.0
_SQS = Family("AWS4", "sqs", "x-amz-")

_PAUSE_SECONDS_MAX = 60.0
_HEAD_SECONDS = POLL_SECONDS + 10.0
_BODY_SECONDS = 10.0
_REGION = re.compile(r"(?:^|\.)sqs\.([a-z0-9-]+)\.")

Apply = Callable[[Sequence[ObjectEvent]], Awaitable[Sequence[str | None]]]
"""Forgets what events name; returns for each why it was ignored, or None."""

_log = structlog.get_logger("forebay.events")


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """`canary` is where the canary is written, under the name of this `node`; None: nothing is measured."""

    queue_url: str
    region: str
    canary: Prefix | None
    window_seconds: float
    node: str

    @property
    def queue(self) -> str:
        return self.queue_url.rpartition("/")[2]

    @property
    def canary_key(self) -> ObjectKey | None:
        if self.canary is None:
            return None
        return ObjectKey(self.canary.bucket, f"{self.canary.key_prefix}.forebay/feed-{self.node}")


def region_of_queue(queue_url: str) -> str | None:
    """Return the region that an address of AWS names."""
    found = _REGION.search(urlsplit(queue_url).hostname or "")
    return found[1] if found is not None else None


class FeedFailed(ForebayError):
    """The queue, or the bucket of the canary, has not done what it was asked for."""


class EventFeed:
    """One queue. `run` never ends; what fails is tried again."""

    def __init__(
        self,
        plan: FeedPlan,
        apply: Apply,
        origin: Origin,
        credentials: Callable[[], CredentialSource],
        clock: Clock,
        settings: OriginSettings,
    ) -> None:
        """`credentials` returns whose key signs for the queue now; `settings` are those of any origin."""
        self._plan = plan
        self._apply = apply
        self._origin = origin
        self._credentials = credentials
        self._clock = clock
        parts = urlsplit(plan.queue_url)
        self._target = Target(parts.scheme, parts.netloc, "/", "")
        endpoint_url = f"{parts.scheme}://{parts.netloc}"
        self._client = Http1Client(replace(settings, endpoint_url=endpoint_url, ca_bundle=None))
        self._queue_problem: str | None = None
        self._canary_problem: str | None = None
        self._sent: tuple[float, str] | None = None
        """When the canary was sent whose event has not come, and its ETag."""
        self._heard_at = clock.monotonic()
        self._lag_seconds: float | None = None

    @property
    def problem(self) -> str | None:
        """Why no events come, in words; None: they do, as far as is known."""
        return self._queue_problem or self._canary_problem

    def document(self) -> to.EventSource:
        return to.EventSource(
            queue_url=self._plan.queue_url,
            canary=str(self._plan.canary) if self._plan.canary is not None else None,
            problem=self.problem,
            lag_seconds=self._lag_seconds,
            silent_seconds=self._clock.monotonic() - self._heard_at,
        )

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pull(), name="events")
            tasks.create_task(self._watch(), name="event canary")

    async def aclose(self) -> None:
        await self._client.aclose()

    # The queue

    async def _pull(self) -> None:
        failures = 0
        while True:
            started, count = self._clock.monotonic(), 0
            try:
                count = await self._take(await self._received(0 if failures else POLL_SECONDS))
                failures = 0
                self._queue_problem = None
            except (ForebayError, TimeoutError, ValueError) as error:
                failures += 1
                if self._queue_problem is None:
                    _log.warning("a queue of events cannot be read", queue=self._plan.queue_url, error=str(error))
                self._queue_problem = f"{self._plan.queue_url}: {error or 'no answer'}"
                await self._clock.sleep(min(2.0**failures, _PAUSE_SECONDS_MAX))
            if not failures and not count and self._clock.monotonic() - started < LOOK_SECONDS:
                await self._clock.sleep(LOOK_SECONDS)  # a queue that does not wait for messages

    async def _received(self, wait_seconds: int) -> list[dict[str, Any]]:
        asked = {"MaxNumberOfMessages": MESSAGES_MAX, "WaitTimeSeconds": wait_seconds}
        messages = (await self._ask("ReceiveMessage", asked)).get("Messages") or []
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
            raise FeedFailed("the answer is not that of SQS")
        return messages

    async def _take(self, messages: Sequence[dict[str, Any]]) -> int:
        """Apply messages, then delete them, those too that hold no event; return how many there were."""
        if not messages:
            return 0
        found = [event for one in messages for event in _events_of(one)]
        events = [one for one in found if isinstance(one, ObjectEvent)]
        reasons = await self._apply(events)
        malformed = [one for one in found if isinstance(one, OtherEvent) and one.malformed]
        ignored = len(found) - len(events) - len(malformed) + sum(reason is not None for reason in reasons)
        for outcome, count in (
            ("malformed", len(malformed)),
            ("ignored", ignored),
            ("applied", len(found) - len(malformed) - ignored),
        ):
            metrics.ORIGIN_EVENTS.add(count, outcome)
        if malformed:
            _log.warning("a message of a queue holds no event", queue=self._plan.queue_url, why=malformed[0].why)
        for event in events:
            self._heard(event)
        entries = [{"Id": str(i), "ReceiptHandle": one.get("ReceiptHandle")} for i, one in enumerate(messages)]
        await self._ask("DeleteMessageBatch", {"Entries": entries})
        return len(messages)

    async def _ask(self, action: str, fields: dict[str, Any]) -> dict[str, Any]:
        body = orjson.dumps({"QueueUrl": self._plan.queue_url, **fields})
        pair = await self._credentials().current()
        headers = {
            "host": self._target.host,
            "content-type": "application/x-amz-json-1.0",
            "x-amz-target": f"AmazonSQS.{action}",
        }
        added, _ = sign_headers(
            "POST",
            "/",
            (),
            headers,
            payload_hash=hashlib.sha256(body).hexdigest(),
            access_key_id=pair.access_key_id,
            secret=pair.secret_access_key,
            session_token=pair.session_token,
            region=self._plan.region,
            now=self._clock.now(),
            family=_SQS,
        )
        headers |= {**added, "content-length": str(len(body))}
        limits = Supervision(_HEAD_SECONDS, _BODY_SECONDS)
        stream = await self._client.exchange("POST", self._target, headers, body, limits, Claim(""))
        async with HttpResponse(stream) as response:
            told = await response.read(ANSWER_BYTES_MAX)
        if response.status != 200:
            raise FeedFailed(f"{response.status} {told[:300].decode(errors='replace')}")
        document = orjson.loads(told or b"{}")
        if not isinstance(document, dict):
            raise FeedFailed("the answer is not that of SQS")
        return document

    # The canary

    def _heard(self, event: ObjectEvent) -> None:
        now = self._clock.monotonic()
        if event.at is not None:
            self._lag(max(0.0, self._clock.now() - event.at))
        if self._plan.canary is None:
            self._heard_at = now
        elif (event.bucket, event.key) == self._plan.canary_key and self._sent is not None:
            sent_at, etag = self._sent
            if event.etag in (None, etag):
                self._sent, self._heard_at = None, now
                self._lag(now - sent_at)
                if self._canary_problem is not None:
                    _log.info("events come again", queue=self._plan.queue_url)
                self._canary_problem = None

    def _lag(self, seconds: float) -> None:
        self._lag_seconds = seconds
        metrics.EVENT_LAG_SECONDS.set(seconds, self._plan.queue)

    async def _watch(self) -> None:
        """Write the canary in every window, and tell each second for how long nothing was heard."""
        key, next_at = self._plan.canary_key, self._clock.monotonic()
        while True:
            now = self._clock.monotonic()
            if key is not None and now >= next_at:
                next_at = now + self._plan.window_seconds
                if self._sent is not None:
                    told = f"the event of {key}, written {now - self._sent[0]:.0f} s ago, has not come"
                    self._canary_failed(f"{told}: does the bucket send its events to {self._plan.queue_url}?")
                try:
                    await self._send(key)
                except (ForebayError, TimeoutError) as error:
                    self._canary_failed(f"{key} cannot be written, so nobody knows whether events come: {error}")
            queue = self._plan.queue
            metrics.EVENT_SOURCE_SILENT_SECONDS.set(self._clock.monotonic() - self._heard_at, queue)
            metrics.EVENT_SOURCE_UP.set(float(self.problem is None), queue)
            await self._clock.sleep(min(LOOK_SECONDS, self._plan.window_seconds / 4))

    def _canary_failed(self, problem: str) -> None:
        if self._canary_problem is None:
            _log.warning("a feed of events counts as dead: slots go by their ages alone", problem=problem)
        self._canary_problem = problem

    async def _send(self, key: ObjectKey) -> None:
        sent_at = self._clock.monotonic()
        body = f"{self._clock.now()}\n".encode()
        md5 = hashlib.md5(body, usedforsecurity=False).hexdigest()
        self._sent = sent_at, md5  # its event may come before the answer
        async with asyncio.timeout(self._plan.window_seconds):
            request = OriginRequest("PUT", *key, body=body, purpose=Purpose.REFRESH)
            async with await self._origin.send(request) as response:
                if response.status != 200:
                    self._sent = None
                    raise await error_of(response)
                etag = plain_etag(response.headers.get("etag", ""))
                if self._sent is not None and etag:
                    self._sent = sent_at, etag


def _events_of(message: dict[str, Any]) -> list[Event]:
    body = message.get("Body")
    try:
        return parse_events(body.encode() if isinstance(body, str) else b"")
    except MalformedEvents as error:
        return [OtherEvent("the message", str(error), malformed=True)]
