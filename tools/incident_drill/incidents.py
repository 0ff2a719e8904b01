"""The incidents: how each is brought about, what leads to its cause, and how it ends."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from botocore.credentials import Credentials

from gateway.s3.requests import Operation
from tests.support.disks import fill_up
from tests.support.memory_origin.faults import Answer, on
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY
from tools.incident_drill.observing import ALERTS, CLIENT, COMMAND, DOCTOR, LOG, METRICS, OVERVIEW, READY, STATUS
from tools.incident_drill.scene import BUCKET, SHARDS, Missed, Scene, Stage

_DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
DISK_BYTES = 64 * 2**20
_GROWS_AFTER_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Clue:
    """A sentence that leads to the cause: where it stands, what it says, and what a reader knows by it."""

    where: str
    says: str
    tells: str


@dataclass(frozen=True, slots=True)
class Incident:
    """`happens` is told to the reader of the transcript; `advice` names the page with what to do."""

    name: str
    title: str
    happens: str
    advice: str
    play: Callable[[Scene], None]
    clues: tuple[Clue, ...]
    stage: Callable[[Path], Stage] = field(default=lambda _: Stage())
    needs_mount: bool = False


# --- the origin


def _origin_down(scene: Scene) -> None:
    scene.begin()
    with scene.origin.refused():
        scene.did("The bucket's port is closed")
        _use(scene)
        scene.until_alert("ForebayOriginUnreachable")
        scene.look()
    scene.end("The bucket answers again")


def _origin_silent(scene: Scene) -> None:
    scene.begin()
    with scene.origin_silent():
        scene.did("The bucket takes connections and answers nothing")
        _use(scene)
        scene.until_alert("ForebayOriginUnreachable")
        scene.look()
    scene.end("The bucket answers again")


def _use(scene: Scene) -> None:
    """What a job does all the time: reads what is cached, reads what is not, saves."""
    scene.read("data/shard-00")
    scene.read("data/shard-01")
    scene.save("checkpoints/step-1")


# --- keys


def _key_refused(scene: Scene) -> None:
    scene.begin()
    good = scene.origin.credentials.pop(ACCESS_KEY_ID)
    scene.did("The gateway's key is revoked: the bucket says InvalidAccessKeyId")
    _use(scene)
    scene.until_alert("ForebayKeyRefused")
    scene.look()
    for code, status in (("SignatureDoesNotMatch", 403), ("ExpiredToken", 400)):
        scene.origin.credentials[ACCESS_KEY_ID] = good
        fault = scene.origin.model.inject(lambda _: True, Answer(status, code), times=None)
        scene.did(f"The bucket says {code}")
        scene.until(f"{code} is told", lambda code=code: code in str(scene.ready()["origin_problem"]))  # type: ignore[misc]
        scene.read("data/shard-02")
        scene.look(with_doctor=False, without=(READY, OVERVIEW, METRICS))
        fault.times = 0
    del scene.origin.credentials[ACCESS_KEY_ID]
    scene.origin.credentials["AKIANEWKEY"] = Credentials("AKIANEWKEY", "new/secret")
    text = scene.gateway.config_file.read_text(encoding="utf-8")
    text = text.replace(ACCESS_KEY_ID, "AKIANEWKEY").replace(SECRET_ACCESS_KEY, "new/secret")
    scene.gateway.config_file.write_text(text, encoding="utf-8")
    scene.gateway.signal(signal.SIGHUP)
    scene.end("A new key stands in the configuration, and the supervisor got SIGHUP")
    scene.until("writes are absorbed again", lambda: scene.is_absorbed("checkpoints/step-1"))
    denied = scene.origin.model.inject(on(Operation.PUT_OBJECT), Answer(403, "AccessDenied", body=_DENIED), times=None)
    scene.did("The new key may read, and not write: PutObject is answered 403 AccessDenied")
    scene.save("checkpoints/step-2")
    scene.until("a flush has failed", lambda: scene.failing() > 0)
    scene.until_alert("ForebayFlushFailing")
    scene.look()
    scene.run("writeback", "list", "s3://", "--problems")
    scene.write_test("checkpoints/")
    denied.times = 0
    scene.end("The bucket's policy lets the key write")


def _wrong_clock(scene: Scene) -> None:
    scene.begin()
    scene.origin_clock.ahead_seconds = 1200.0
    scene.did("This machine's clock is 20 minutes behind the bucket's, which refuses what is signed by it")
    _use(scene)
    scene.until_alert("ForebayWrongClock")
    scene.look()
    skewed = Answer(403, "RequestTimeTooSkewed")
    faults = [scene.origin.model.inject(on(Operation.PUT_OBJECT), skewed, times=None)]
    scene.did(
        "The bucket refuses also what is signed by the time that its answers tell: one of its servers has another"
    )
    scene.save("checkpoints/step-2")
    scene.until("a flush has failed", lambda: scene.failing() > 0)
    scene.until_alert("ForebayFlushFailing")
    faults.append(scene.origin.model.inject(lambda _: True, skewed, times=None))
    scene.read("data/shard-00")
    scene.read("data/shard-02")
    scene.until("the refusal is told", lambda: skewed.code in str(scene.ready()["origin_problem"]))
    scene.look()
    scene.run("writeback", "list", "s3://", "--problems")
    for fault in faults:
        fault.times = 0
    scene.origin_clock.ahead_seconds = 0.0
    scene.end("The clock is set right")


def _expiring_stage(directory: Path) -> Stage:
    """A key pair that a program lends for seconds, as SSO and roles do for hours."""
    lent, config = directory / "lent.json", directory / "aws-config"
    until = datetime.now(UTC) + timedelta(seconds=300)
    document = {
        "Version": 1,
        "AccessKeyId": ACCESS_KEY_ID,
        "SecretAccessKey": SECRET_ACCESS_KEY,
        "Expiration": until.isoformat(timespec="seconds"),
    }
    lent.write_text(json.dumps(document), encoding="utf-8")
    config.write_text(f"[default]\ncredential_process = /bin/cat {lent}\n", encoding="utf-8")
    no_key = {"access_key_id": None, "secret_access_key": None}
    return Stage(origin=no_key, environment={"AWS_CONFIG_FILE": str(config)})


def _credentials_expired(scene: Scene) -> None:
    scene.use_environment({"AWS_CONFIG_FILE": str(scene.directory / "aws-config")})
    scene.begin()
    lent = scene.directory / "lent.json"
    hidden = lent.with_suffix(".hidden")
    lent.rename(hidden)
    scene.did("The program that lends key pairs gives none any more, and the last one is over")
    _use(scene)
    scene.until_alert("ForebayOriginUnreachable", "ForebayNoCredentials")
    scene.look()
    hidden.rename(lent)
    scene.end("The program lends key pairs again")


# --- this node


def _full_stage(directory: Path) -> Stage:
    return Stage(workers=1, cache={"capacity": "32MiB"})


def _disk_full(scene: Scene) -> None:
    scene.begin(with_doctor=True)
    shards = itertools.cycle(range(1, SHARDS))
    with runaway_file(scene.directory):
        scene.did("Somebody else's file takes all the room on the disk of the cache, and whatever becomes free")
        scene.until("the disk is full", lambda: "not-kept" in scene.read(f"data/shard-{next(shards):02}"))
        scene.until("a write is not absorbed", lambda: "not absorbed: disk" in scene.save("checkpoints/step-1"))
        scene.until_alert("ForebayDiskFull")
        scene.look()
    scene.did("The file is removed")
    scene.until("the disk is well", lambda: scene.ready()["cache_disk"] == "well")
    scene.until("writes are absorbed", lambda: scene.is_absorbed("checkpoints/step-2"))
    scene.end("The gateway has found the room by itself")


def _worker_killed(scene: Scene) -> None:
    scene.begin()
    scene.did("The kernel's memory killer takes a worker (SIGKILL)")
    scene.save("checkpoints/step-1")
    killed = scene.gateway.kill_worker(0)
    scene.read("data/shard-00")
    scene.save("checkpoints/step-2")
    killed = scene.gateway.wait_for_worker(0, other_than=killed)
    scene.look()
    scene.did("It takes the worker again and again")
    for _ in range(2):
        killed = scene.gateway.kill_worker(0)
        killed = scene.gateway.wait_for_worker(0, other_than=killed)
    scene.until_alert("ForebayProcessRestarted")
    scene.look(with_doctor=False, without=(OVERVIEW,))
    scene.save("checkpoints/step-3")
    scene.end("Nothing kills it any more")


def _worker_hung(scene: Scene) -> None:
    scene.begin()
    scene.save("checkpoints/step-1")
    worker = scene.gateway.worker_pids()[0]
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)
    scene.did("A worker stands still (SIGSTOP)")
    for number in range(1, 5):
        scene.read(f"data/shard-{number:02}")
    scene.save("checkpoints/step-2")
    scene.until("it is said that a worker hangs", lambda: "does not answer" in scene.gateway.log)
    scene.look()
    scene.did("Half a minute later")
    scene.gateway.wait_for_worker(0, other_than=worker)
    scene.look(without=(OVERVIEW,))
    scene.end("Another worker has taken its place")


# --- writes that wait


def _node_drained(scene: Scene) -> None:
    scene.begin()
    with scene.origin.refused():
        scene.did("The bucket is away, checkpoints wait, and the node is to be drained")
        for number in range(1, 4):
            scene.save(f"checkpoints/step-{number}")
        if scene.run("flush", "s3://", "--wait", "--timeout", "3s") != 1:
            raise Missed("forebay flush --wait says that the bucket has everything")
        scene.look(with_doctor=False)
        scene.did("The node stops all the same (SIGTERM)")
        scene.gateway.terminate()
        scene.hear()
        scene.until_alert("ForebayDown")
        scene.look_at_alerts()
        exported = scene.directory / "rescue"
        arguments = ("writeback", "export", str(exported), "--directory", str(scene.gateway.directory))
        if scene.run(*arguments, needs_gateway=False) != 0:
            raise Missed("the export is not complete")
        scene.compare_export(exported)
        scene.did("A gateway starts on the same directory, and the bucket is away still")
        scene.gateway.start()
        scene.watch()
        scene.note_log("the write-back buffer holds")
        scene.look(with_doctor=False, without=(OVERVIEW, METRICS))
    scene.end("The bucket answers again")


def _conflict(scene: Scene) -> None:
    scene.begin()
    keys = ("checkpoints/latest", "checkpoints/notes")
    with scene.origin.refused():
        scene.did("Another writer replaces two objects at the bucket before the flush of ours")
        for key in keys:
            scene.save(key)
            scene.origin.model.put(BUCKET, key, b"by another writer")
    scene.until("the conflicts are found", lambda: scene.conflicts() == len(keys))
    scene.until_alert("ForebayConflict")
    scene.look()
    scene.run("writeback", "list", "s3://", "--problems")
    for key in keys:
        if scene.body_through_gateway(key) != scene.saved_digest(key):
            scene.account.lost.append(f"{key}: the gateway does not serve what it has acknowledged")
        if scene.origin.model.data(BUCKET, key) != b"by another writer":
            scene.account.lost.append(f"{key}: the other writer's version was overwritten without a decision")
    scene.did("A person decides")
    scene.run("writeback", "resolve", f"s3://{BUCKET}/{keys[0]}", "keep-ours")
    scene.run("writeback", "resolve", f"s3://{BUCKET}/{keys[1]}", "keep-theirs", "--yes")
    scene.give_up(keys[1])
    scene.end("The decisions are carried out")
    if scene.origin.model.data(BUCKET, keys[1]) != b"by another writer":
        scene.account.lost.append(f"{keys[1]}: the version that was decided for is gone")


# --- several nodes


def _node_died(scene: Scene) -> None:
    scene.begin()
    (other,) = scene.others
    other.kill()
    scene.did("The other node of the cluster is killed, and does not come back")
    for number in range(1, 6):
        scene.read(f"data/shard-{number:02}")
    scene.save("checkpoints/step-1")
    scene.until("it is known", lambda: scene.members_up() == 1)
    scene.until_alert("ForebayMemberSilent")
    scene.look()
    scene.run("cluster", "status")
    other.start()
    scene.until("it is up again", lambda: scene.members_up() == 2)
    scene.end("It starts again, on its disk")


def _redis_away(scene: Scene) -> None:
    scene.begin()
    scene.redis.stop()
    scene.did("Redis ends")
    scene.until(
        "a write goes through", lambda: "not absorbed: registry" in scene.save("checkpoints/step-1", tell=False)
    )
    _use(scene)
    scene.until_alert("ForebayRegistryNotBelieved")
    scene.look()
    scene.run("cluster", "status")
    scene.redis.start()
    scene.until("it is believed", scene.believes_redis)
    scene.until("writes are absorbed", lambda: scene.is_absorbed("checkpoints/step-2"))
    scene.end("Redis starts again, empty")


# --- disks of their own


@contextmanager
def runaway_file(directory: Path) -> Iterator[None]:
    """Like a log that nobody rotates: it takes all the room there is, and what others free, until it is removed."""
    ended = threading.Event()

    def grow() -> None:
        number = 0
        while not ended.wait(_GROWS_AFTER_SECONDS):
            if shutil.disk_usage(directory).free:
                fill_up(directory, f"runaway.{number}")
                number += 1

    fill_up(directory, "runaway")
    growing = threading.Thread(target=grow, daemon=True)
    growing.start()
    try:
        yield
    finally:
        ended.set()
        growing.join()
        for path in directory.glob("runaway*"):
            path.unlink()


@contextmanager
def small_disk(mount_point: Path) -> Iterator[None]:
    """A file system in memory. Mounting takes root, or a user namespace, in which a user is root of his own mounts."""
    mount_point.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(mount_point)], check=True, capture_output=True
    )
    with ExitStack() as undo:
        undo.callback(subprocess.run, ["umount", "--lazy", str(mount_point)], check=True, capture_output=True)
        yield


INCIDENTS: tuple[Incident, ...] = (
    Incident(
        "origin-down",
        "The origin is down",
        "Nobody listens at the bucket's address.",
        "incidents.md#the-origin-is-down",
        _origin_down,
        (
            Clue(CLIENT, "503 ServiceUnavailable", "the failure is behind the gateway"),
            Clue(ALERTS, "ForebayOriginUnreachable, critical", "who is on call gets the section of the runbook"),
            Clue(STATUS, "nobody listens at http://bucket:9090 (connection refused)", "the cause"),
            Clue(DOCTOR, "nobody listens at http://bucket:9090 (connection refused)", "the cause, and where to look"),
            Clue(READY, "nobody listens at http://bucket:9090 (connection refused)", "the cause"),
            Clue(OVERVIEW, "nobody listens at http://bucket:9090 (connection refused)", "the cause, on the dashboard"),
        ),
    ),
    Incident(
        "origin-silent",
        "The origin is silent",
        "The bucket takes connections, and answers nothing. `origin.first_byte_timeout` is 2 seconds here.",
        "incidents.md#the-origin-is-down",
        _origin_silent,
        (
            Clue(CLIENT, "503 ServiceUnavailable", "the failure is behind the gateway"),
            Clue(ALERTS, "ForebayOriginUnreachable, critical", "who is on call gets the section of the runbook"),
            Clue(STATUS, "does not answer", "the cause"),
            Clue(DOCTOR, "does not answer", "the cause, and where to look"),
            Clue(READY, "does not answer", "the cause"),
        ),
        stage=lambda _: Stage(origin={"first_byte_timeout": "2s"}),
    ),
    Incident(
        "key-refused",
        "The bucket refuses the gateway's key",
        "The key is revoked, then signs wrongly, then has expired; its successor may read, and not write.",
        "runbook.md#forebaykeyrefused",
        _key_refused,
        (
            Clue(CLIENT, "refuses the key of this gateway (InvalidAccessKeyId)", "it is not the job's own key"),
            Clue(ALERTS, "ForebayKeyRefused, critical", "who is on call gets the section of the runbook"),
            Clue(STATUS, "refuses the gateway's own key: InvalidAccessKeyId", "the cause"),
            Clue(STATUS, "refuses the gateway's own key: SignatureDoesNotMatch", "the cause"),
            Clue(STATUS, "refuses the gateway's own key: ExpiredToken", "the cause"),
            Clue(DOCTOR, "check the key, its policy, and origin.region", "what to do"),
            Clue(ALERTS, "ForebayFlushFailing, critical", "writes wait, and which slot's"),
            Clue(STATUS, " failing (", "writes wait, and how to list them"),
            Clue(DOCTOR, "says which right is missing", "what to ask next"),
            Clue(COMMAND, "AccessDenied", "the bucket's own word, by object"),
            Clue(COMMAND, "put: 403 AccessDenied (s3:PutObject)  -> allow it to the key", "the right that is missing"),
        ),
    ),
    Incident(
        "wrong-clock",
        "The clock is wrong",
        "The clocks of this machine and of the bucket differ by 20 minutes; the bucket allows 15.",
        "runbook.md#forebaywrongclock",
        _wrong_clock,
        (
            Clue(ALERTS, "ForebayWrongClock, critical", "who is on call gets the section of the runbook"),
            Clue(LOG, "the origin has another time than this machine", "whose clock it is about"),
            Clue(STATUS, "this machine's clock is 1200 seconds behind", "the cause, and what it means for callers"),
            Clue(DOCTOR, "set this machine's clock: chronyc tracking, timedatectl", "what to do"),
            Clue(READY, "this machine's clock is 1200 seconds behind", "the cause"),
            Clue(OVERVIEW, 'status.origin.state = "wrong clock"', "the cause, on the dashboard"),
            Clue(CLIENT, "The origin has another time than this gateway", "it is not the job's own key or clock"),
            Clue(ALERTS, "ForebayFlushFailing, critical", "writes wait, and which slot's"),
            Clue(STATUS, "refuses what Forebay signs, for its time (RequestTimeTooSkewed)", "the bucket's own word"),
            Clue(COMMAND, "the origin has another time than this machine, and refuses", "why a write waits, by object"),
        ),
    ),
    Incident(
        "disk-full",
        "The disk is full",
        "Somebody else fills the file system of the cache: 64 MiB in memory, mounted by root or in a user namespace.",
        "incidents.md#the-disk-is-full",
        _disk_full,
        (
            Clue(CLIENT, "reason=not-kept", "the cache takes nothing"),
            Clue(CLIENT, "not absorbed: disk", "why a write went to the bucket"),
            Clue(ALERTS, "ForebayDiskFull, warning", "who is on call gets the section of the runbook"),
            Clue(STATUS, "disk: full", "the cause"),
            Clue(DOCTOR, "what is written goes to the bucket  -> make room (df)", "the cause, and what to do"),
            Clue(READY, 'cache_disk = "full"', "the cause"),
        ),
        stage=_full_stage,
        needs_mount=True,
    ),
    Incident(
        "worker-killed",
        "A worker is killed",
        "Something sends SIGKILL to a worker, once and then again and again.",
        "runbook.md#forebayprocessrestarted",
        _worker_killed,
        (
            Clue(LOG, "a process ended unexpectedly", "what happened, to which process"),
            Clue(LOG, "SIGKILL", "by which signal"),
            Clue(STATUS, "SIGKILL, 0:00:", "which process, how, and when, without the log"),
            Clue(DOCTOR, "somebody has killed it; the kernel does where memory is short", "where to look"),
            Clue(ALERTS, "ForebayProcessRestarted, warning", "that it goes on"),
        ),
        stage=lambda _: Stage(workers=2),
    ),
    Incident(
        "worker-hung",
        "A worker hangs",
        "A worker is stopped (SIGSTOP): it lives, and does nothing.",
        "runbook.md#forebayprocessrestarted",
        _worker_hung,
        (
            Clue(LOG, "a process does not answer: it is killed if that lasts", "after five seconds: which process"),
            Clue(STATUS, "worker0 PID hangs", "which process"),
            Clue(DOCTOR, "worker0 (process PID) does not answer", "what happens next, and where to look"),
            Clue(LOG, "a process hangs and is killed", "after half a minute: the end of it"),
            Clue(STATUS, "hung, killed, 0:00:", "which process, how, and when, without the log"),
        ),
        stage=lambda _: Stage(workers=2),
    ),
    Incident(
        "credentials-expired",
        "The credentials have expired",
        "The gateway has its key from a program that lends key pairs, as for SSO or a role. It gives none any more.",
        "runbook.md#forebaynocredentials",
        _credentials_expired,
        (
            Clue(CLIENT, "503 ServiceUnavailable", "the failure is behind the gateway"),
            Clue(ALERTS, "ForebayNoCredentials, critical", "who is on call gets the section of the runbook"),
            Clue(STATUS, "custom-process failed (CredentialRetrievalError)", "the cause: which source of keys fails"),
            Clue(DOCTOR, "custom-process failed (CredentialRetrievalError)", "the cause: which source of keys fails"),
            Clue(READY, "custom-process failed (CredentialRetrievalError)", "the cause: which source of keys fails"),
        ),
        stage=_expiring_stage,
    ),
    Incident(
        "node-drained",
        "A node is drained with unflushed data",
        "The bucket is away while the node stops. What was acknowledged is on this disk alone.",
        "incidents.md#a-node-died-with-unflushed-data",
        _node_drained,
        (
            Clue(COMMAND, "(exit code 1)", "the drain must not go on"),
            Clue(STATUS, "not at the origin yet, checkpoints: 3 objects", "how much waits"),
            Clue(LOG, "STOPPED WITH UNFLUSHED WRITES", "that the disk has what nobody else has, and what to do"),
            Clue(ALERTS, "ForebayDown, critical", "the node is gone"),
            Clue(COMMAND, "3 objects, 878.9 KiB, are in /mnt/rescue", "it can be had without a gateway"),
            Clue(
                LOG,
                "the write-back buffer holds writes that the origin does not have yet",
                "the next gateway knows of it",
            ),
        ),
    ),
    Incident(
        "conflict",
        "A write is in conflict",
        "Somebody replaces an object at the bucket while this node has a newer one to flush.",
        "incidents.md#a-write-is-in-conflict",
        _conflict,
        (
            Clue(ALERTS, "ForebayConflict, warning", "who is on call gets the section of the runbook"),
            Clue(STATUS, "2 conflicts", "the cause, and how to list them"),
            Clue(DOCTOR, "2 conflicts", "the cause, and how to list them"),
            Clue(COMMAND, "others have changed the object at the origin", "which objects, and why"),
        ),
    ),
    Incident(
        "node-died",
        "A node of the cluster dies",
        "Two nodes read from each other, and find each other in Redis. One is killed.",
        "runbook.md#forebaymembersilent",
        _node_died,
        (
            Clue(CLIENT, "GET data/shard-05: 200", "no read fails for it"),
            Clue(ALERTS, "ForebayMemberSilent, warning", "who is on call gets the section of the runbook"),
            Clue(STATUS, "cluster train: 1 of 2 members up", "that a node is missing"),
            Clue(DOCTOR, "gpu-1 (10.0.3.18:9002) does not answer", "which one, and why"),
            Clue(COMMAND, "silent", "which one, and why"),
        ),
        stage=lambda _: Stage(others=1),
    ),
    Incident(
        "redis-away",
        "Redis is away",
        "Two nodes find each other, and each other's writes, in Redis. It ends, and starts again, empty.",
        "runbook.md#forebayregistrynotbelieved",
        _redis_away,
        (
            Clue(CLIENT, "not absorbed: registry", "saves go on, at the bucket's speed"),
            Clue(ALERTS, "ForebayRegistryNotBelieved, warning", "who is on call gets the section of the runbook"),
            Clue(LOG, "Redis is not believed", "the cause"),
            Clue(STATUS, "Redis is not believed: ", "the cause"),
            Clue(DOCTOR, "Redis is not believed: ", "the cause"),
            Clue(COMMAND, ": not believed: ", "the cause, as the node that is asked knows it"),
        ),
        stage=lambda _: Stage(others=1),
    ),
)
