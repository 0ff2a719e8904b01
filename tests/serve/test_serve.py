"""`forebay serve` as a whole: real processes, real sockets, real signals."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trustme

from gateway.serve.shared_directory import in_memory_directory
from tests.serve.gated_origin import CONTENT, GatedOrigin, gated_origin
from tests.support import strict_origin
from tests.support.cache_directory import begun
from tests.support.gateway_process import ORIGIN_KEYS, GatewayProcess
from tests.support.memory_origin.faults import Hold
from tests.support.strict_origin import StrictOrigin

NOWHERE = {"endpoint_url": "http://127.0.0.1:1"}
"""An origin that is down: nothing listens on port 1."""

PATIENCE_SECONDS = 60.0


def get(url: str, **options: object) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS, **options) as client:  # type: ignore[arg-type]
        return client.get(url)


@pytest.fixture
def origin() -> Iterator[GatedOrigin]:
    with gated_origin() as one:
        yield one


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def reading(gateway: GatewayProcess, origin: GatedOrigin, pool: ThreadPoolExecutor) -> Future[httpx.Response]:
    """A GET that has arrived at the origin, and is answered by half."""
    answer = pool.submit(get, f"{gateway.s3_url}/bucket/key")
    assert origin.halfway.wait(PATIENCE_SECONDS), gateway.log
    return answer


def gated(origin: GatedOrigin, **server: object) -> GatewayProcess:
    return GatewayProcess(
        {"origin": {"endpoint_url": origin.url}, "server": {"allow_unsigned": True, "insecure": True, **server}}
    )


@pytest.mark.slow
def test_it_starts_with_the_origin_down(tmp_path: Path) -> None:
    """Ready without an origin, which readiness reports; reads of it are answered, with 503."""
    with GatewayProcess({"origin": NOWHERE, "server": {"allow_unsigned": True}}) as gateway:
        ready = get(f"{gateway.admin_url}/readyz")
        assert ready.status_code == 200
        assert ready.json()["origin_reachable"] is False
        assert get(f"{gateway.s3_url}/bucket/key").status_code == 503


@pytest.mark.slow
def test_standard_output_has_the_readiness_line_and_nothing_else() -> None:
    """Whoever starts it can rely on the first line, and need not read on."""
    with GatewayProcess({"origin": NOWHERE, "server": {"workers": 2}}) as gateway:
        gateway.signal(signal.SIGTERM)
        assert gateway.rest_of_stdout() == ""
        assert gateway.wait() == 0


@pytest.mark.slow
def test_a_killed_worker_is_replaced_alone() -> None:
    """The other workers live on, the port answers all the while, and the restart is counted."""
    with GatewayProcess({"origin": NOWHERE, "server": {"workers": 2}}) as gateway:
        before = gateway.worker_pids()
        killed = gateway.kill_worker(1)
        for _ in range(20):
            assert get(f"{gateway.s3_url}/bucket/key").status_code == 403
        assert gateway.wait_for_worker(1, other_than=killed) != killed
        assert gateway.worker_pids()[0] == before[0]
        refused = 'forebay_requests_total{cache="none",operation="GetObject",slot="none",status="403"}'
        metrics = metrics_after(gateway, refused, 20)
        assert metrics['forebay_worker_restarts_total{process="worker1"}'] == 1


@pytest.mark.slow
def test_what_a_worker_was_killed_in_the_midst_of_writing_is_asked_about_again() -> None:
    """2.3 The origin carries a PUT out when its worker is gone: no other believes what was learned before that."""
    slot = {"name": "all", "prefix": "s3://bucket/", "consistency": "immutable"}
    with StrictOrigin() as origin:
        origin.model.put("bucket", "key", b"old")
        held, reached = origin.run_inside(asyncio.Event), origin.run_inside(asyncio.Event)
        origin.model.inject(lambda call: call.method == "PUT", Hold(held, reached))
        keys = {"access_key_id": strict_origin.ACCESS_KEY_ID, "secret_access_key": strict_origin.SECRET_ACCESS_KEY}
        config: dict[str, Any] = {
            "origin": {"endpoint_url": origin.endpoint_url} | keys,
            "server": {"workers": 1, "allow_unsigned": True},
            "slots": [slot],
        }
        with GatewayProcess(config) as gateway, ThreadPoolExecutor(1) as pool:
            url = f"{gateway.s3_url}/bucket/key"
            pool.submit(httpx.put, url, content=b"new", timeout=PATIENCE_SECONDS, trust_env=False)
            origin.wait_for(reached)
            assert get(url).content == b"old"
            assert get(url).headers["x-forebay-cache"] == "hit"
            killed = gateway.kill_worker(0)
            # The held request may notice that its connection is gone, and store nothing: it is stored all the same.
            origin.run_inside(lambda: origin.model.put("bucket", "key", b"new"))
            origin.run_inside(held.set)
            gateway.wait_for_worker(0, other_than=killed)
            assert get(url).content == b"new"


@pytest.mark.slow
def test_a_killed_background_process_is_replaced_alone() -> None:
    """The admin port comes back and knows the state of the gateway."""
    with GatewayProcess({"origin": NOWHERE}) as gateway:
        processes = gateway.status()["gateway"]["processes"]
        os.kill(processes[1]["process_id"], signal.SIGKILL)
        again = gateway.wait_for_worker(1, other_than=processes[1]["process_id"])
        after = gateway.status()["gateway"]["processes"]
        assert after[0] == processes[0]
        as_it_was = {"name": "background", "ready": True, "generation": 0, "hangs": False}
        assert after[1].pop("last_end_at") == pytest.approx(time.time(), abs=PATIENCE_SECONDS)
        assert after[1] == {**as_it_was, "process_id": again, "restarts": 1, "last_end": "SIGKILL"}


def test_a_request_in_flight_is_answered_whole_before_the_end(
    origin: GatedOrigin, background: ThreadPoolExecutor
) -> None:
    """SIGTERM cuts nothing within the grace time; the port takes nothing new meanwhile; exit code 0."""
    with gated(origin) as gateway:
        answer = reading(gateway, origin, background)
        gateway.signal(signal.SIGTERM)
        wait_until_refused(gateway.s3_url)
        while get(f"{gateway.admin_url}/readyz").json()["draining"] is not True:
            pass  # another process than the worker hears of it by itself; the test's own time limit is the deadline
        origin.gate.set()
        assert answer.result(PATIENCE_SECONDS).content == CONTENT
        assert gateway.wait() == 0


def test_metrics_tell_where_bytes_came_from(origin: GatedOrigin) -> None:
    """A first read moves bytes from the origin, a second one from this disk."""
    origin.gate.set()
    with gated(origin) as gateway:
        for _ in range(2):
            assert get(f"{gateway.s3_url}/bucket/key").content == CONTENT
        metrics = metrics_after(
            gateway, 'forebay_requests_total{cache="hit",operation="GetObject",slot="default",status="200"}', 1
        )
    assert metrics['forebay_origin_bytes_total{direction="read",purpose="live",slot="default"}'] == len(CONTENT)
    assert metrics['forebay_cache_miss_bytes_total{slot="default"}'] == len(CONTENT)
    assert metrics['forebay_cache_hit_bytes_total{slot="default"}'] == len(CONTENT)
    assert metrics['forebay_requests_total{cache="miss",operation="GetObject",slot="default",status="200"}'] == 1
    assert metrics['forebay_sent_bytes_total{operation="GetObject",slot="default"}'] == 2 * len(CONTENT)
    assert metrics["forebay_cache_capacity_bytes"] == 64 * 2**20


def metrics_after(gateway: GatewayProcess, name: str, value: float) -> dict[str, float]:
    """Everything counted, once `name` is `value`: a request is counted a moment after its last byte is sent.

    The test's own time limit is the deadline.
    """
    while True:
        lines = get(f"{gateway.admin_url}/metrics").text.splitlines()
        found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
        if found.get(name) == value:
            return found


def wait_until_refused(url: str) -> None:
    """Returns once nothing listens any more; the test's own time limit is the deadline. A request would be held up."""
    parts = urlsplit(url)
    while True:
        try:
            socket.create_connection((parts.hostname or "", parts.port or 0)).close()
        except ConnectionResetError:
            continue  # it was closed just then
        except ConnectionRefusedError:
            return


@pytest.mark.slow
def test_what_is_in_flight_after_the_grace_time_is_cut(origin: GatedOrigin, background: ThreadPoolExecutor) -> None:
    """The end comes, whatever the origin does."""
    with gated(origin, shutdown_grace="0s") as gateway:
        answer = reading(gateway, origin, background)
        assert gateway.terminate() == 0
        with pytest.raises(httpx.TransportError):
            answer.result(PATIENCE_SECONDS)


def test_a_signal_that_is_told_twice_is_one(origin: GatedOrigin, background: ThreadPoolExecutor) -> None:
    """`timeout` signals the process and its group, a wrapper hands on what the terminal has sent to all."""
    with gated(origin, shutdown_grace="1h") as gateway:
        answer = reading(gateway, origin, background)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            gateway.signal(number)
        wait_until_refused(gateway.s3_url)
        origin.gate.set()
        assert answer.result(PATIENCE_SECONDS).content == CONTENT
        assert gateway.wait(PATIENCE_SECONDS) == 0


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(origin: GatedOrigin, background: ThreadPoolExecutor) -> None:
    """For who cannot wait: exit code 1, no process left."""
    with gated(origin, shutdown_grace="1h") as gateway:
        answer = reading(gateway, origin, background)
        gateway.signal(signal.SIGINT)
        wait_until_refused(gateway.s3_url)
        time.sleep(1.1)  # until then it would be the first one told again
        gateway.signal(signal.SIGINT)
        assert gateway.wait(PATIENCE_SECONDS) == 1
        with pytest.raises(httpx.TransportError):
            answer.result(PATIENCE_SECONDS)


@pytest.mark.slow
def test_children_end_with_a_killed_supervisor_and_the_next_one_starts(tmp_path: Path) -> None:
    """`kill -9` leaves no worker behind that would serve from a directory which another gateway now uses."""
    with GatewayProcess({"origin": NOWHERE, "server": {"workers": 2}}, directory=tmp_path / "cache") as gateway:
        gateway.kill()
        gateway.start()
        assert get(f"{gateway.admin_url}/readyz").status_code == 200


@pytest.mark.slow
def test_a_second_gateway_on_one_directory_refuses(tmp_path: Path) -> None:
    """It says who is there; the first one is not disturbed."""
    with GatewayProcess({"origin": NOWHERE}, directory=tmp_path / "cache") as first:
        second = serve(first.config_file)
        assert second.returncode == 1
        assert f"another forebay serve (process {first.pid}) uses cache.directory" in second.stderr
        assert get(f"{first.admin_url}/readyz").status_code == 200


def serve(
    config_file: Path, directory: Path | None = None, executable: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """A serve that is expected to fail."""
    return subprocess.run(
        [*(executable or (sys.executable, "-m", "gateway")), "serve", "--config", str(config_file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        cwd=directory or Path(__file__).resolve().parents[2],
        env={name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FOREBAY_"))}
        | {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"},
        check=False,
    )


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    """One line, exit code 1, nothing started."""
    with GatewayProcess({"origin": NOWHERE}) as first:
        port = httpx.URL(first.s3_url).port
        file = tmp_path / "second.toml"
        file.write_text(f'[server]\nport = {port}\n[admin]\nport = 0\n[cache]\ndirectory = "{tmp_path}/cache"\n')
        second = serve(file)
    assert second.returncode == 1
    assert second.stderr.strip().splitlines()[-1] == (
        f"forebay: server: cannot listen on 127.0.0.1:{port}: Address already in use; another process has it: stop "
        "that, or set another server.port"
    )


@pytest.mark.slow
def test_a_child_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The supervisor passes its reason on, ends the other children, and exits with code 1."""
    blocks = begun(tmp_path / "cache") / "blocks"
    blocks.mkdir()
    (blocks / "thesis.pdf").write_text("somebody's only copy")
    file = tmp_path / "forebay.toml"
    file.write_text(f'[server]\nport = 0\n[admin]\nport = 0\n[cache]\ndirectory = "{tmp_path}/cache"\n')
    failed = serve(file)
    assert failed.returncode == 1
    last_line = failed.stderr.strip().splitlines()[-1]
    assert last_line.startswith("forebay: worker0: ")
    assert "thesis.pdf" in last_line
    assert (blocks / "thesis.pdf").exists()


@pytest.mark.slow
def test_wrong_settings_end_the_start_with_all_of_them_named(tmp_path: Path) -> None:
    """Exit code 1, one line each, no traceback."""
    file = tmp_path / "forebay.toml"
    file.write_text("[server]\nport = 70000\nworkers = 0\n")
    failed = serve(file)
    assert failed.returncode == 1
    assert [line.split(" = ")[0] for line in failed.stderr.splitlines()] == [
        "forebay: server.port",
        "forebay: server.workers",
    ]


@pytest.mark.slow
def test_children_import_what_their_supervisor_imported(tmp_path: Path) -> None:
    """A package named `gateway` in the user's own directory is not taken for ours."""
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "__init__.py").write_text("raise SystemExit('the wrong gateway')")
    file = tmp_path / "forebay.toml"
    blocker = begun(tmp_path / "cache") / "blocks"
    blocker.mkdir()
    (blocker / "foreign").write_text("x")
    file.write_text(f'[server]\nport = 0\n[admin]\nport = 0\n[cache]\ndirectory = "{tmp_path}/cache"\n')
    command = str(Path(sys.executable).with_name("forebay"))
    # It is made to fail as late as a child can fail: having imported everything.
    failed = serve(file, directory=tmp_path, executable=(command,))
    assert "the wrong gateway" not in failed.stderr
    assert "foreign" in failed.stderr


def test_secrets_are_in_no_argument_variable_or_log() -> None:
    """Every user of the machine can read arguments; children get their settings through a pipe."""
    with GatewayProcess({"origin": NOWHERE, "logging": {"level": "debug"}}) as gateway:
        get(f"{gateway.s3_url}/bucket/key?X-Amz-Signature={ORIGIN_KEYS[1]}")
        pids = [gateway.pid, *(one["process_id"] for one in gateway.status()["gateway"]["processes"])]
        seen = b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for pid in pids for name in ("cmdline", "environ"))
        assert b"forebay: worker 0\0" in seen
        assert ORIGIN_KEYS[1].encode() not in seen
        assert gateway.terminate() == 0
        assert ORIGIN_KEYS[1] not in gateway.log


@pytest.mark.slow
def test_it_speaks_https_with_a_certificate(tmp_path: Path) -> None:
    """The readiness line says so, and a client that trusts the authority gets answers."""
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    pair.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    pair.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    server = {"certificate_file": str(tmp_path / "cert.pem"), "key_file": str(tmp_path / "key.pem")}
    with GatewayProcess({"origin": NOWHERE, "server": server}) as gateway:
        assert gateway.s3_url.startswith("https://127.0.0.1:")
        assert get(f"{gateway.s3_url}/bucket/key", verify=context).status_code == 403


@pytest.mark.slow
def test_the_directory_and_what_is_in_it_are_the_owners_alone(tmp_path: Path) -> None:
    """Cached data may be anybody's secret."""
    with GatewayProcess({"origin": NOWHERE}, directory=tmp_path / "cache") as gateway:
        assert gateway.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_directory_of_others_stays_as_it_was(tmp_path: Path) -> None:
    """A memory disk of mode 1777 that jobs share: the gateway works in a directory of its own below, at each start."""
    given = tmp_path / "scratch"
    given.mkdir()
    (given / "lock").write_text("4711\n")
    (given / "data").mkdir()
    given.chmod(0o1777)
    with GatewayProcess({"origin": NOWHERE}, directory=given) as gateway:
        assert gateway.directory == given / "forebay"
        for _ in range(2):
            assert gateway.status()["cache"]["directory"] == str(gateway.directory)
            assert gateway.directory.stat().st_mode & 0o777 == 0o700
            assert given.stat().st_mode & 0o7777 == 0o1777
            assert sorted(os.listdir(given)) == ["data", "forebay", "lock"]
            assert (given / "lock").read_text() == "4711\n"
            assert os.listdir(given / "data") == []
            gateway.terminate()
            gateway.start()


@pytest.mark.slow
def test_nothing_is_left_in_shared_memory(tmp_path: Path) -> None:
    """The metrics of a run end with it."""
    shared = in_memory_directory(begun(tmp_path / "cache"))
    with GatewayProcess({"origin": NOWHERE}, directory=tmp_path / "cache") as gateway:
        assert shared.exists() or (gateway.directory / "run" / "metrics").exists()
        gateway.terminate()
        assert not shared.exists()
        assert not (gateway.directory / "run" / "metrics").exists()


@pytest.mark.slow
def test_a_stopped_worker_does_not_outlive_its_supervisor() -> None:
    """It cannot notice that it is alone: the kernel ends it, so that the next gateway finds the directory free."""
    with GatewayProcess({"origin": NOWHERE}) as gateway:
        [pid, *_] = [pid for pid in gateway.worker_pids() if pid is not None]
        os.kill(pid, signal.SIGSTOP)
        gateway.kill()
        gateway.start()
        assert gateway.status()["gateway"]["ready"]


@pytest.mark.slow
def test_a_gateway_outlives_the_removal_of_its_files_in_shared_memory(tmp_path: Path) -> None:
    """Whoever removes them, and whichever process dies then: it comes back, and whoever asks is answered meanwhile."""
    with GatewayProcess({"origin": NOWHERE, "server": {"workers": 2}}, directory=tmp_path / "cache") as gateway:
        shared = in_memory_directory(gateway.directory)
        if not shared.exists():
            pytest.skip("there is no room in shared memory")
        before = [pid for pid in gateway.worker_pids() if pid is not None]
        shutil.rmtree(shared)
        os.kill(before[0], signal.SIGKILL)
        for path in ("/metrics", "/api/v1/status", "/readyz", "/"):
            with suppress(httpx.TransportError):  # the process that answers is started again, too
                assert get(f"{gateway.admin_url}{path}").status_code in (200, 503), path
        for number, pid in enumerate(before):
            gateway.wait_for_worker(number, other_than=pid)
        assert shared.exists()
        assert gateway.log.count("Forebay makes them anew") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "closed", "unread"])
def test_a_log_that_nobody_takes_ends_and_hangs_nothing(kind: str) -> None:
    """Standard error is a file on a full disk, or a pipe whose reader has gone or does not read: a worker that is
    killed comes back, requests are answered, and the end is in good order."""
    reading, writing = os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    if kind == "closed":
        os.close(reading)
    os.set_blocking(writing, False)
    with suppress(BlockingIOError, BrokenPipeError):
        while True:
            os.write(writing, bytes(65536))
    os.set_blocking(writing, True)

    def log_there() -> None:
        os.dup2(full if kind == "full" else writing, 2)

    config: dict[str, Any] = {"origin": NOWHERE, "server": {"workers": 2}, "logging": {"level": "debug"}}
    with GatewayProcess(config, before_exec=log_there) as gateway:
        killed = gateway.kill_worker(0)
        gateway.wait_for_worker(0, other_than=killed)
        for _ in range(50):
            assert get(f"{gateway.s3_url}/bucket/key").status_code == 403
        assert gateway.terminate() == 0
    for one in (full, writing, *([] if kind == "closed" else [reading])):
        os.close(one)
