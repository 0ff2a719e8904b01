"""One incident's stage: a bucket, a gateway before it, a job that reads and saves, and everything that was said."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from gateway.demo.ports import free_port
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.faults import Hold
from tests.support.nodes import SECRET
from tests.support.redis_server import RedisServer
from tests.support.set_clock import SetClock
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tools.incident_drill.alerting import Alert, Alerting
from tools.incident_drill.observing import (
    ALERTS,
    CHANNELS,
    CLIENT,
    COMMAND,
    LOG,
    METRICS,
    OVERVIEW,
    Looks,
    Moment,
    Texts,
    admin,
    command,
    findings,
)

BUCKET = "train"
SHARDS = 12
SHARD_BYTES = 2_000_000
CHECKPOINT_BYTES = 300_000

_JOB = {"access_key_id": "job-17", "secret_access_key": "secret-of-job-17-0123456789", "allow": [f"s3://{BUCKET}/"]}
_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 90.0
_T = TypeVar("_T")


class Missed(Exception):
    """Something that the drill waits for has not come."""


@dataclass
class Account:
    """What happened in one incident, and what was said: enough for the transcript and for tests."""

    name: str
    moments: list[Moment] = field(default_factory=list)
    acknowledged_objects: int = 0
    acknowledged_bytes: int = 0
    lost: list[str] = field(default_factory=list)
    failed: str | None = None
    seconds: float = 0.0

    def said(self, channel: str) -> str:
        """Everything that this channel said, at all moments."""
        return "\n".join(line for moment in self.moments for line in moment.texts.get(channel, []))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Stage:
    """How an incident wants its gateway."""

    workers: int = 1
    origin: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    others: int = 0
    """So many more nodes, of one cluster with the gateway, which find each other in Redis."""


class Scene:
    """Runs one incident. `did` begins a moment; what is said from then on belongs to it.

    `others` and `redis` are the gateway's cluster.
    """

    def __init__(
        self,
        account: Account,
        directory: Path,
        origin: StrictOrigin,
        origin_clock: SetClock,
        gateway: GatewayProcess,
        alerting: Alerting | None,
        others: Sequence[GatewayProcess] = (),
        redis: RedisServer | None = None,
        shown: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`shown`: as what addresses of this machine are shown."""
        self.account = account
        self.directory = directory
        self.origin = origin
        self.origin_clock = origin_clock
        self.gateway = gateway
        self.others = others
        self._redis = redis
        self._shown = shown
        self._alerting = alerting
        self._environment = _environment()
        self._looks = Looks(self._environment, gateway.config_file)
        self._saved: dict[str, str] = {}
        self._fired: dict[Alert, float] = {}
        self._began = time.monotonic()

    # --- what the job does

    def read(self, key: str) -> str:
        """What the job is told; of a whole body, that it is the right one."""
        expected = self.origin.model.data(BUCKET, key)
        return self._tell(f"GET {key}", lambda client: self._read(client, key, expected))

    def _read(self, client: Any, key: str, expected: bytes) -> str:
        answer = client.get_object(Bucket=BUCKET, Key=key)
        body = answer["Body"].read()
        label = answer["ResponseMetadata"]["HTTPHeaders"]["x-forebay-cache"]
        if body != expected:
            self.account.lost.append(f"{key}: other bytes than the bucket's")
        return f"200, {label}"

    def save(self, key: str, *, tell: bool = True) -> str:
        """What the job is told. An acknowledged body must be found at the bucket in the end."""
        body = hashlib.sha256(f"{key} {len(self._saved)}".encode()).digest() * (CHECKPOINT_BYTES // 32)

        def put(client: Any) -> str:
            answer = client.put_object(Bucket=BUCKET, Key=key, Body=body)
            self._saved[key] = hashlib.sha256(body).hexdigest()
            headers = answer["ResponseMetadata"]["HTTPHeaders"]
            why = headers.get("x-forebay-not-absorbed")
            return f"200, {headers['x-forebay-cache']}" + (f"; not absorbed: {why}" if why else "")

        return self._tell(f"PUT {key}", put, tell=tell)

    def is_absorbed(self, key: str) -> bool:
        """Whether a write is acknowledged from this node's disk; what the job is told meanwhile is not shown."""
        return self.save(key, tell=False) == "200, absorbed"

    def body_through_gateway(self, key: str) -> str:
        """The digest of what readers of this gateway get."""
        answer = self._client().get_object(Bucket=BUCKET, Key=key)
        return hashlib.sha256(answer["Body"].read()).hexdigest()

    def saved_digest(self, key: str) -> str:
        return self._saved[key]

    def give_up(self, key: str) -> None:
        """The operator has decided for another version than the one that was saved here."""
        del self._saved[key]

    def _tell(self, words: str, ask: Callable[[Any], str], *, tell: bool = True) -> str:
        began = time.monotonic()
        try:
            outcome = ask(self._client())
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            outcome = f"{status} {error.response['Error']['Code']}: {error.response['Error']['Message']}"
        except BotoCoreError as error:
            outcome = f"no answer: {type(error).__name__}"
        seconds = time.monotonic() - began
        after = f" (after {seconds:.0f} s)" if seconds >= 1.0 else ""
        if tell:
            self._note(CLIENT, f"{words}: {outcome}{after}")
        return outcome

    def _client(self) -> Any:
        """A new connection, so that any worker may get it; no second try."""
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.gateway.s3_url,
            region_name="us-east-1",
            aws_access_key_id=_JOB["access_key_id"],
            aws_secret_access_key=_JOB["secret_access_key"],
            config=Config(retries={"total_max_attempts": 1}, read_timeout=90),
        )

    def conflicts(self) -> int:
        return self._pending("conflicts")

    def failing(self) -> int:
        """Objects that the bucket refuses."""
        return self._pending("failing")

    def _pending(self, figure: str) -> int:
        document = self.gateway.status()["writeback"]
        return 0 if document is None else int(document[figure])

    def compare_export(self, directory: Path) -> None:
        """Whether `forebay writeback export` has copied what waits, byte for byte."""
        lines = (directory / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
        found = {one["key"]: one["file"] for one in map(json.loads, lines) if one["type"] == "object"}
        at_bucket = self.origin.model.buckets[BUCKET].objects
        for key, digest in self._saved.items():
            if key in found:
                if hashlib.sha256((directory / found[key]).read_bytes()).hexdigest() != digest:
                    self.account.lost.append(f"{key}: exported with other bytes")
            elif key not in at_bucket:
                self.account.lost.append(f"{key}: neither exported nor at the bucket")

    def use_environment(self, environment: Mapping[str, str]) -> None:
        """Commands are run where the gateway's own key is found, too."""
        self._environment.update(environment)

    @contextmanager
    def origin_silent(self) -> Iterator[None]:
        """While this lasts the bucket takes connections and answers nothing; what was asked is answered at its end."""
        over = self.origin.run_inside(asyncio.Event)
        silence = self.origin.model.inject(lambda _: True, Hold(over), times=None)
        try:
            yield
        finally:
            silence.times = 0
            self.origin.run_inside(over.set)

    # --- what happens, and what is said

    @property
    def redis(self) -> RedisServer:
        assert self._redis is not None, "the stage has no others"
        return self._redis

    def members_up(self) -> int:
        """How many nodes answer the gateway, itself included."""
        members = admin(self.gateway.admin_url, "/api/v1/cluster").json()["members"]
        return sum(one["state"] == "up" for one in members)

    def believes_redis(self) -> bool:
        return bool(admin(self.gateway.admin_url, "/api/v1/cluster").json()["redis"]["believed"])

    def begin(self, *, with_doctor: bool = False) -> None:
        """All is well: something is cached, the bucket is known, a first checkpoint is there. `with_doctor`: what it
        says of this machine even so is not to be taken for the incident's."""
        self.watch()
        if self.others:
            self.until("the nodes know each other", lambda: self.members_up() == 1 + len(self.others))
            self.until("Redis is believed", self.believes_redis)
        self.read("data/shard-00")
        self.until("the first checkpoint is absorbed", lambda: self.is_absorbed("checkpoints/step-0"))
        self.until("it is known what the bucket honours", self._is_bucket_known)
        self.until("the metrics are scraped", self._is_scraped)
        self._looks.first(self.gateway.admin_url, self.gateway.log, with_doctor=with_doctor)
        self.account.moments.clear()

    def _is_bucket_known(self) -> bool:
        """It is tried out at a flush."""
        self.save("checkpoints/step-0")
        self.flush()
        return all(set(one["conditions"].values()) == {"yes"} for one in self.gateway.status()["writeback"]["buckets"])

    def watch(self) -> None:
        """Have Prometheus look at the gateway where it is now."""
        if self._alerting is not None:
            self._alerting.watch(self.account.name, self.gateway.admin_url)

    def _is_scraped(self) -> bool:
        return self._alerting is None or self._alerting.is_scraped(self.account.name)

    def did(self, title: str) -> None:
        """Something happens: a moment begins."""
        self.account.moments.append(Moment(title))
        self._began = time.monotonic()
        self._fired.clear()

    def look(self, *, with_doctor: bool = True, without: Sequence[str] = ()) -> None:
        """Ask everybody."""
        found = self._looks.new(self.gateway.admin_url, self.gateway.log, with_doctor=with_doctor)
        for channel, lines in found.items():
            for line in lines if channel not in without else ():
                self._note(channel, line)
        self.look_at_alerts()

    def hear(self) -> None:
        """The log alone."""
        for line in self._looks.log(self.gateway.log):
            self._note(LOG, line)

    def note_log(self, pattern: str) -> None:
        """Lines of the log that are neither warnings nor errors, and tell all the same."""
        for line in self.gateway.log.splitlines():
            if re.search(pattern, line):
                self._note(LOG, " ".join(re.sub(r"^\S+Z? +", "", line).split()))

    def until_alert(self, *names: str) -> None:
        """Until one of these fires; at once where no Prometheus is."""
        if self._alerting is not None:
            self.until(
                f"{' or '.join(names)} fires", lambda: {*names} & {one.name for one in self._note_fired()} != set()
            )

    def look_at_alerts(self) -> None:
        """Those that have fired since the moment began, where the gateway itself answers nothing."""
        for one, seconds in self._note_fired().items():
            self._note(ALERTS, f"{one.name}, {one.severity} (after {seconds:.0f} s): {one.summary} -> {one.runbook}")

    def _note_fired(self) -> dict[Alert, float]:
        """With the seconds from the beginning of the moment."""
        for one in self._firing():
            self._fired.setdefault(one, time.monotonic() - self._began)
        return self._fired

    def _firing(self) -> Sequence[Alert]:
        alerts = self._alerting.alerts(self.account.name) if self._alerting is not None else ()
        return [one for one in alerts if one.state == "firing"]

    def run(self, *arguments: str, needs_gateway: bool = True) -> int:
        """A command of the operator's, with what it prints; its exit code."""
        where = ("--config", str(self.gateway.config_file), "--admin-url", self.gateway.admin_url)
        done = command(self._environment, *arguments, *(where if needs_gateway else ()))
        self._note(COMMAND, f"$ forebay {' '.join(arguments)}")
        for line in (done.stdout + done.stderr).splitlines():
            if line.strip():
                self._note(COMMAND, line.rstrip())
        self._note(COMMAND, f"(exit code {done.returncode})")
        return done.returncode

    def write_test(self, prefix: str) -> None:
        """`forebay doctor --write-test`, and what of it is wrong."""
        tested = ("doctor", "--write-test", f"s3://{BUCKET}/{prefix}")
        self._note(COMMAND, f"$ forebay {' '.join(tested)}")
        done = command(self._environment, *tested, "--json", *self._where())
        for line in findings(done):
            self._note(COMMAND, line)
        self._note(COMMAND, f"(exit code {done.returncode})")

    def until(self, what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not is_so():
            if time.monotonic() > deadline:
                raise Missed(f"not within {_PATIENCE_SECONDS:.0f} seconds: {what}")
            time.sleep(_POLL_SECONDS)

    def ready(self) -> dict[str, Any]:
        document: dict[str, Any] = admin(self.gateway.admin_url, "/readyz").json()
        return document

    def waiting(self) -> int:
        """Objects that the bucket does not have, as the gateway counts them."""
        return self._pending("objects")

    def flush(self) -> None:
        """Everything that waits gets to the bucket; Missed where it does not."""
        done = command(self._environment, "flush", "s3://", "--wait", "--timeout", "100s", *self._where())
        if done.returncode != 0:
            raise Missed(f"forebay flush --wait:\n{done.stdout}{done.stderr}")

    def _where(self) -> tuple[str, ...]:
        return "--config", str(self.gateway.config_file), "--admin-url", self.gateway.admin_url

    def end(self, title: str) -> None:
        """The incident is over: what still differs from the beginning, and whether each acknowledged byte is there."""
        self.did(title)
        self.until("the origin is well", lambda: self.ready()["origin_problem"] is None)
        self.run("flush", "s3://", "--wait")
        self.until("no alert fires", lambda: not self._firing())
        self._fired.clear()
        self.look(with_doctor=False, without=(METRICS, OVERVIEW))
        self.read("data/shard-00")
        self.verify()

    def verify(self) -> None:
        """What was acknowledged last of each key lies at the bucket, but for what an operator has given up."""
        self.account.acknowledged_objects = len(self._saved)
        self.account.acknowledged_bytes = len(self._saved) * CHECKPOINT_BYTES
        for key, digest in self._saved.items():
            if hashlib.sha256(self.origin.model.data(BUCKET, key)).hexdigest() != digest:
                self.account.lost.append(f"{key}: the bucket has something else than what was acknowledged")

    def _note(self, channel: str, line: str) -> None:
        if self.account.moments:
            self.account.moments[-1].texts.setdefault(channel, []).append(self._plain(line))

    def _plain(self, line: str) -> str:
        """Without what differs from run to run, or is this machine's."""
        line = line.replace(self.origin.endpoint_url, "http://bucket:9090")
        line = line.replace(self.gateway.s3_url, "http://127.0.0.1:9000")
        line = line.replace(self.gateway.admin_url, "http://127.0.0.1:9001")
        line = line.replace(str(self.gateway.directory), "/mnt/nvme/forebay")
        line = line.replace(str(self.gateway.config_file), "forebay.toml")
        line = line.replace(str(self.directory), "/mnt")
        line = re.sub(r"(process_id=|\(process )\d+", r"\1PID", line)
        line = re.sub(r" request_id=\w+", "", line)
        for address, other in self._shown.items():
            for form in ("{}:{}", "'{}', {}"):
                line = line.replace(form.format(*address.split(":")), form.format(*other.split(":")))
        line = line.replace(self.origin.endpoint_url.removeprefix("http://"), "bucket:9090")
        return line.replace(f"'127.0.0.1', {self.origin.endpoint_url.rpartition(':')[2]}", "'bucket', 9090")


def _environment() -> dict[str, str]:
    """For commands: this one's, without what would lead them elsewhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FOREBAY_"))}
    return kept | {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull}


def _clusters(directory: Path, redis: RedisServer, count: int) -> list[dict[str, Any]]:
    """The settings by which so many nodes are one cluster."""
    secret_file = directory / "secret"
    secret_file.write_text(SECRET)
    secret_file.chmod(0o600)
    of_all = {"name": "train", "secret_file": str(secret_file), "redis": redis.url}
    own = [{"node": f"gpu-{number}", "listen": f"127.0.0.1:{free_port()}"} for number in range(count)]
    return [{"cluster": {**of_all, **one, "advertise": one["listen"]}} for one in own]


@contextmanager
def staged(account: Account, directory: Path, stage: Stage, alerting: Alerting | None) -> Iterator[Scene]:
    """The bucket, the gateway and the job, gone when this ends."""
    origin_clock = SetClock()
    with StrictOrigin(clock=origin_clock) as origin:
        origin.model.create_bucket(BUCKET)
        for number in range(SHARDS):
            origin.model.put_generated(BUCKET, f"data/shard-{number:02}", SHARD_BYTES, number)
        keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
        config: dict[str, Any] = {
            "server": {"workers": stage.workers},
            "logging": {"format": "console"},
            "origin": {"endpoint_url": origin.endpoint_url, **keys, **stage.origin},
            "cache": {"capacity": "32MiB", "persistent": True, **stage.cache},
            "credentials": [_JOB],
            "slots": [
                {"name": "data", "prefix": f"s3://{BUCKET}/data/", "mode": "read-only", "consistency": "immutable"},
                {
                    "name": "checkpoints",
                    "prefix": f"s3://{BUCKET}/checkpoints/",
                    "write": "back",
                    "consistency": "ttl",
                    "buffer": "16MiB",
                },
            ],
        }
        with ExitStack() as undo:
            redis, others, shown = None, list[GatewayProcess](), dict[str, str]()
            clusters: list[dict[str, Any]] = [{}]
            if stage.others:
                (directory / "redis").mkdir()
                redis = undo.enter_context(RedisServer(directory / "redis"))
                clusters = _clusters(directory, redis, 1 + stage.others)
                shown[redis.url.removeprefix("redis://")] = "10.0.3.9:6379"
                for number, one in enumerate(clusters):
                    shown[one["cluster"]["listen"]] = f"10.0.3.{17 + number}:9002"
            for number, cluster in enumerate(clusters[1:], 1):
                other = GatewayProcess(config | cluster, directory=directory / f"cache-{number}")
                others.append(undo.enter_context(other))
            own = GatewayProcess(config | clusters[0], directory=directory / "cache", environment=stage.environment)
            gateway = undo.enter_context(own)
            scene = Scene(account, directory, origin, origin_clock, gateway, alerting, others, redis, shown)
            try:
                yield scene
            finally:
                if alerting is not None:
                    alerting.forget(account.name)


def texts_of(moments: Sequence[Moment]) -> Iterator[tuple[str, Texts]]:
    """In the order of CHANNELS, without those that said nothing."""
    for moment in moments:
        yield moment.title, {channel: moment.texts[channel] for channel in CHANNELS if moment.texts.get(channel)}
