"""Slots, credentials and certificates that change while a gateway runs: no restart, no error, nothing lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import trustme
from botocore.exceptions import ClientError
from cryptography import x509

from tests.support.blocks import MIB
from tests.support.changing_slots import BUCKET, Admin, an_origin, client_of, config_of, laid_over, refused
from tests.support.gateway_process import GatewayProcess, to_toml
from tests.support.strict_origin import SECRET_ACCESS_KEY
from tests.support.waiting import eventually


@pytest.mark.slow
def test_a_slot_is_set_changed_and_removed(tmp_path: Path) -> None:
    """In all workers, when the answer comes; it is there after a restart; the connections of clients stay."""
    with an_origin() as origin, GatewayProcess(config_of(origin), directory=tmp_path / "cache") as gateway:
        admin, clients = Admin(gateway), [client_of(gateway.s3_url) for _ in range(8)]
        before = [one["process_id"] for one in admin.gateway["processes"]]
        answer = admin.put("frozen", {"prefix": f"s3://{BUCKET}/frozen/", "mode": "read-only"})
        assert (answer.status_code, answer.json()) == (200, {"name": "frozen", "in_force": True})
        for client in clients:
            assert refused(client.put_object, Bucket=BUCKET, Key="frozen/a", Body=b"x") == "AccessDenied"
            client.put_object(Bucket=BUCKET, Key="a", Body=b"x")
        assert admin.put("frozen", {"prefix": f"s3://{BUCKET}/frozen/", "mode": "read-write"}).status_code == 200
        for client in clients:
            client.put_object(Bucket=BUCKET, Key="frozen/a", Body=b"x")
        assert admin.put("frozen", {"prefix": f"s3://{BUCKET}/frozen/", "mode": "read-only"}).status_code == 200
        assert [one["process_id"] for one in admin.gateway["processes"]] == before
        gateway.terminate()
        gateway.start()
        client, admin = client_of(gateway.s3_url), Admin(gateway)
        assert refused(client.put_object, Bucket=BUCKET, Key="frozen/a", Body=b"x") == "AccessDenied"
        assert admin.delete("frozen").status_code == 200
        client.put_object(Bucket=BUCKET, Key="frozen/a", Body=b"y")
        assert admin.delete("frozen").status_code == 409
        assert "frozen" not in admin.slots()


REFUSED: list[tuple[Any, str]] = [
    ({"prefix": "s3://train/a/", "capacity": "1TiB"}, "capacity"),
    ({"prefix": "s3://train/a/", "colour": "red"}, "colour"),
    ({"prefix": "train/a/"}, "prefix"),
    ({"prefix": "s3://train/of-the-file/"}, "another slot has this prefix"),
    ({"prefix": "s3://train/a/", "write": "back", "mode": "read-only"}, "write"),
    ({"mode": "read-only"}, "prefix"),
    ({"prefix": "s3://train/a/", "max_cached_object_size": 1e300}, "max_cached_object_size = 1e+300: a size, such as"),
    ({"prefix": "s3://train/a/", "max_cached_object_size": "99999PiB"}, "at most 1024PiB"),
    ([], "JSON object"),
]


@pytest.mark.slow
def test_who_asks_while_it_starts_is_heard(tmp_path: Path) -> None:
    """SIGHUP as soon as the command runs: it ends nothing, and the file is read anew when the gateway has started."""
    with an_origin() as origin, ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        gateway = GatewayProcess(config_of(origin), directory=tmp_path / "cache", is_prepared=False)
        started = threads.submit(stack.enter_context, gateway)
        while not (held := _waits_for_sighup(gateway)) and not started.done():
            time.sleep(0.001)
        if held:
            os.kill(gateway.pid, signal.SIGHUP)
        started.result()
        assert held, "SIGHUP was never held back while code was loaded"
        admin = Admin(gateway)
        eventually(lambda: admin.gateway["generation"] == 1, "nobody has heard of it")


def _waits_for_sighup(gateway: GatewayProcess) -> bool:
    with suppress(AssertionError, OSError):
        status = Path(f"/proc/{gateway.pid}/status").read_text(encoding="ascii")
        blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1], 16)
        return bool(blocked & 1 << signal.SIGHUP - 1)
    return False


@pytest.mark.slow
def test_who_asks_while_the_process_behind_the_admin_port_starts_again_is_heard(tmp_path: Path) -> None:
    """The port answers before all is there: the question waits as long, and so do later ones no longer."""
    with an_origin() as origin, GatewayProcess(config_of(origin), directory=tmp_path / "cache") as gateway:
        admin = Admin(gateway)
        [process_id] = [one["process_id"] for one in admin.gateway["processes"] if one["name"] == "background"]
        os.kill(process_id, signal.SIGKILL)
        for weight in (1, 2):
            slot = {"prefix": f"s3://{BUCKET}/a/", "weight": weight}
            eventually(lambda slot=slot: _is_put(admin, slot), "the slot is never set")  # type: ignore[misc]
        assert all(one["ready"] for one in admin.gateway["processes"])


def _is_put(admin: Admin, slot: dict[str, Any]) -> bool:
    with suppress(httpx.TransportError):  # the connection was that of the killed process
        answer = admin.put("a", slot)
        assert answer.status_code in (200, 202), answer.text
        return True
    return False


@pytest.mark.slow
def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    """With the key and what is allowed; all is as it was."""
    config = {"slots": [{"name": "of-the-file", "prefix": f"s3://{BUCKET}/of-the-file/"}]}
    with an_origin() as origin, GatewayProcess(config_of(origin, **config), directory=tmp_path / "cache") as gateway:
        admin = Admin(gateway)
        for slot, says in REFUSED:
            answer = admin.put("a", slot)
            assert answer.status_code in (400, 409)
            assert says in answer.json()["error"]
        assert admin.put("of-the-file", {"prefix": f"s3://{BUCKET}/b/"}).status_code == 409
        assert admin.delete("of-the-file").status_code == 409
        assert admin.gateway["generation"] == 0
        assert not (tmp_path / "cache" / "slots.json").exists()


@pytest.mark.slow
def test_the_file_is_read_anew(tmp_path: Path) -> None:
    """By SIGHUP: slots and credentials. One that cannot be used, or needs a restart, changes nothing, and is told."""
    other = {"access_key_id": "other", "secret_access_key": "other-secret-01", "allow": ["s3://"]}
    mine = {"access_key_id": "mine", "secret_access_key": "my-secret-0123", "allow": ["s3://"]}
    config = {"credentials": [mine]}
    with an_origin() as origin, GatewayProcess(config_of(origin, **config), directory=tmp_path / "cache") as gateway:
        admin, clients = Admin(gateway), [client_of(gateway.s3_url, ("mine", "my-secret-0123")) for _ in range(6)]
        clients[0].put_object(Bucket=BUCKET, Key="a", Body=b"x")
        newcomer = client_of(gateway.s3_url, ("other", "other-secret-01"))
        assert refused(newcomer.list_objects_v2, Bucket=BUCKET) == "InvalidAccessKeyId"
        admin.reload({"credentials": [mine, other]}, gateway)
        newcomer.list_objects_v2(Bucket=BUCKET)
        for client in clients:  # what is asked again and again is answered by rights of now
            for _ in range(4):
                assert client.get_object(Bucket=BUCKET, Key="a")["Body"].read() == b"x"
        admin.reload({"credentials": [{**mine, "allow": ["s3://train/b/"]}, other]}, gateway)
        for client in clients:
            assert refused(client.get_object, Bucket=BUCKET, Key="a") == "AccessDenied"
        admin.reload({"credentials": [other]}, gateway)
        for client in clients:
            assert refused(client.get_object, Bucket=BUCKET, Key="a") == "InvalidAccessKeyId"
        admin.reload({"cache": {"block_size": "128KiB"}}, gateway)
        assert "cache.block_size" in admin.gateway["settings_problem"]
        admin.reload({"cache": {"block_size": "64KiB", "colour": "red"}}, gateway)
        assert "colour" in admin.gateway["settings_problem"]
        text = gateway.config_file.read_text()
        gateway.config_file.write_text(text.replace('colour = "red"', ""))
        assert admin.put("a", {"prefix": f"s3://{BUCKET}/a/"}).status_code == 200
        assert admin.gateway["settings_problem"] is None, "what is in force is the file as it was mended"
        newcomer.list_objects_v2(Bucket=BUCKET)


@pytest.mark.slow
def test_a_reload_says_what_was_taken_and_what_needs_a_restart(tmp_path: Path) -> None:
    """`forebay reload` does what SIGHUP does, waits for all processes, and names keys; refused, nothing has changed."""
    token = "0123456789abcdef"
    with an_origin() as origin, GatewayProcess(config_of(origin), directory=tmp_path / "cache") as gateway:
        text, admin = gateway.config_file.read_text(), Admin(gateway)

        def reload(
            *options: str, environment: Mapping[str, str] = MappingProxyType({}), **config: Any
        ) -> tuple[int, str, str]:
            gateway.config_file.write_text(to_toml(laid_over(text, config)))
            done = gateway.command("reload", *options, **environment)
            return done.returncode, done.stdout, done.stderr

        config = "--config", str(gateway.config_file)
        assert reload(*config) == (0, "nothing differs; certificates and keys were read again\n", "")
        slots = [{"name": "a", "prefix": f"s3://{BUCKET}/a/", "mode": "read-only"}]
        cache = {"capacity": "48MiB"}
        assert reload(*config, slots=slots, cache=cache) == (0, "changed: cache.capacity, slots 'a'\n", "")
        client = client_of(gateway.s3_url)
        assert refused(client.put_object, Bucket=BUCKET, Key="a/1", Body=b"x") == "AccessDenied"
        code, told, problem = reload(*config, cache=cache, server={"workers": 3})
        assert (code, told) == (1, "")
        assert "take a new start of the gateway: server.workers; without these it could take slots 'a'" in problem
        assert "a" in admin.slots()
        assert "server.workers" in admin.gateway["settings_problem"]
        code, told, problem = reload(*config, cache={**cache, "colour": "red"})
        assert (code, told) == (1, "")
        assert "colour" in problem
        other = tmp_path / "other.toml"
        other.write_text("")
        code, told, problem = reload("--config", str(other), "--json", cache=cache, admin={"token": token})
        assert (code, json.loads(told)["changed"]) == (0, ["admin.token", "slots 'a'"])
        assert problem == f"forebay: the gateway has read {gateway.config_file}, with which it was started\n"
        assert reload(cache=cache)[0] == 1, "whoever has no token"
        assert reload(cache=cache, environment={"FOREBAY_ADMIN__TOKEN": token})[1] == "changed: admin.token\n"
        assert admin.gateway["settings_problem"] is None


@pytest.mark.slow
def test_where_file_and_admin_port_disagree_the_file_wins(tmp_path: Path) -> None:
    """Loudly; and what was set over the port is in force again when the file says nothing of it any more."""
    with an_origin() as origin, GatewayProcess(config_of(origin), directory=tmp_path / "cache") as gateway:
        admin = Admin(gateway)
        assert admin.put("a", {"prefix": f"s3://{BUCKET}/a/", "weight": 7}).status_code == 200
        admin.reload({"slots": [{"name": "a", "prefix": f"s3://{BUCKET}/a/", "weight": 3}]}, gateway)
        assert admin.slots()["a"]["weight"] == 3
        assert "the configuration has the slot 'a'" in gateway.log
        admin.reload({"slots": []}, gateway)
        assert admin.slots()["a"]["weight"] == 7


@pytest.mark.slow
def test_the_first_slot_that_writes_back(tmp_path: Path) -> None:
    """Comes while the gateway runs; it cannot go while the origin lacks what was acknowledged in it."""
    with an_origin() as origin, GatewayProcess(config_of(origin), directory=tmp_path / "cache") as gateway:
        admin, clients = Admin(gateway), [client_of(gateway.s3_url) for _ in range(6)]
        slot = {"prefix": f"s3://{BUCKET}/ckpt/", "write": "back", "buffer": "16MiB"}
        clients[0].put_object(Bucket=BUCKET, Key="ckpt/before", Body=b"before")
        assert admin.put("ckpt", slot).status_code == 200
        eventually(lambda: admin.get("/api/v1/writeback").get("slots") is not None, "the buffer is not open")
        for number, client in enumerate(clients):  # each worker has seen that the bucket is there
            client.put_object(Bucket=BUCKET, Key=f"ckpt/first/{number}", Body=b"first")
        origin.is_out_of_reach = True
        for number, client in enumerate(clients):
            client.put_object(Bucket=BUCKET, Key=f"ckpt/{number}", Body=b"%d" % number)
        answer = admin.delete("ckpt")
        assert answer.status_code == 409
        assert "forebay flush" in answer.json()["error"]
        for number, client in enumerate(reversed(clients)):
            assert client.get_object(Bucket=BUCKET, Key=f"ckpt/{number}")["Body"].read() == b"%d" % number
        assert admin.put("ckpt", {**slot, "buffer": "8MiB"}).status_code == 200
        origin.is_out_of_reach = False
        eventually(lambda: admin.delete("ckpt").status_code == 200, "what is flushed may go")
        direct = client_of(origin.endpoint_url)
        for number in range(len(clients)):
            assert direct.get_object(Bucket=BUCKET, Key=f"ckpt/{number}")["Body"].read() == b"%d" % number
        clients[1].put_object(Bucket=BUCKET, Key="ckpt/after", Body=b"after")
        assert direct.get_object(Bucket=BUCKET, Key="ckpt/after")["Body"].read() == b"after"


@pytest.mark.slow
def test_blocks_go_with_their_keys(tmp_path: Path) -> None:
    """What is cached is on the account of the slot that its key belongs to now; a slot that shrinks evicts down."""
    with an_origin() as origin, GatewayProcess(config_of(origin), directory=tmp_path / "cache") as gateway:
        admin, client = Admin(gateway), client_of(gateway.s3_url)
        direct = client_of(origin.endpoint_url)
        for number in range(40):
            direct.put_object(Bucket=BUCKET, Key=f"data/{number}", Body=os.urandom(200_000))
            client.get_object(Bucket=BUCKET, Key=f"data/{number}")["Body"].read()

        def used() -> dict[str, int]:
            return {name: one["capacity"]["used_bytes"] for name, one in admin.slots().items()}

        eventually(lambda: used()["default"] >= 8_000_000, "nothing is cached")
        whole = used()["default"]
        assert admin.put("data", {"prefix": f"s3://{BUCKET}/data/"}).status_code == 200
        eventually(lambda: (used()["data"], used()["default"]) == (whole, 0), "the blocks are on the old account")
        limited = {"prefix": f"s3://{BUCKET}/data/", "capacity_limit": "2MiB"}
        assert admin.put("data", limited).status_code == 200
        eventually(lambda: 0 < used()["data"] <= 2 * 2**20, "it has not evicted down")
        left = used()["data"]
        assert admin.delete("data").status_code == 200
        eventually(lambda: used() == {"default": left}, "the blocks have not gone to the slot around")


@pytest.mark.slow
def test_the_cache_becomes_smaller_and_larger(tmp_path: Path) -> None:
    """`cache.capacity` is in force in all processes at once: what is beyond it is evicted, what fits is kept. Clients
    keep their connections and every byte; one that slots' guarantees do not fit in is refused."""
    guaranteed = {"name": "kept", "prefix": f"s3://{BUCKET}/kept/", "capacity": "8MiB"}
    config = {"cache": {"capacity": "32MiB"}, "slots": [guaranteed]}
    with an_origin() as origin, GatewayProcess(config_of(origin, **config), directory=tmp_path / "cache") as gateway:
        admin, clients = Admin(gateway), [client_of(gateway.s3_url) for _ in range(8)]
        direct, contents = client_of(origin.endpoint_url), [os.urandom(MIB) for _ in range(60)]
        for number, content in enumerate(contents):
            direct.put_object(Bucket=BUCKET, Key=f"{'kept' if number < 6 else 'data'}/{number}", Body=content)
        before = [one["process_id"] for one in admin.gateway["processes"]]

        def read(numbers: range) -> set[str]:
            """By both workers. What the answers say of the cache."""
            labels = set()
            for number in numbers:
                key = f"{'kept' if number < 6 else 'data'}/{number}"
                answer = clients[number % len(clients)].get_object(Bucket=BUCKET, Key=key)
                assert answer["Body"].read() == contents[number], key
                labels.add(answer["ResponseMetadata"]["HTTPHeaders"]["x-forebay-cache"].partition(";")[0])
            return labels

        def used() -> tuple[int, int]:
            """What slot and cache hold."""
            held = {name: one["capacity"]["used_bytes"] for name, one in admin.slots().items()}
            return held["kept"], sum(held.values())

        def capacities() -> set[str]:
            text = httpx.get(f"{gateway.admin_url}/metrics", timeout=60).text
            return set(re.findall(r"^forebay_cache_capacity_bytes(?:{.*})? (\S+)$", text, re.MULTILINE))

        read(range(60))
        eventually(lambda: used()[1] > 24 * MIB, "nothing is cached")
        admin.reload({"cache": {"capacity": "12MiB"}}, gateway)
        eventually(lambda: used()[1] <= 12 * MIB, "it has not evicted down")
        assert used()[0] >= 6 * MIB, "what was guaranteed has gone"
        assert admin.get("/api/v1/status")["cache"]["capacity_bytes"] == 12 * MIB
        eventually(lambda: {float(one) for one in capacities()} == {12 * MIB}, "the metrics say another capacity")
        read(range(60))
        eventually(lambda: used()[1] <= 12 * MIB, "a worker keeps to the capacity of before")
        admin.reload({"cache": {"capacity": "4MiB"}}, gateway)
        assert "slots[].capacity" in admin.gateway["settings_problem"]
        admin.reload({"cache": {"capacity": "96MiB"}}, gateway)
        read(range(60))
        eventually(lambda: read(range(60)) == {"hit"}, "a worker keeps to the capacity of before")
        assert [one["process_id"] for one in admin.gateway["processes"]] == before
        assert used()[1] > 60 * MIB


@pytest.mark.slow
def test_a_stopped_process_follows_when_it_goes_on(tmp_path: Path) -> None:
    """The others do at once, and the answer says that not all have."""
    with an_origin() as origin, GatewayProcess(config_of(origin), directory=tmp_path / "cache") as gateway:
        admin = Admin(gateway)
        worker = next(one["process_id"] for one in admin.gateway["processes"] if one["name"] == "worker0")
        os.kill(worker, signal.SIGSTOP)
        try:
            answer = admin.put("a", {"prefix": f"s3://{BUCKET}/a/", "mode": "read-only"})
            assert (answer.status_code, answer.json()["in_force"]) == (202, False)
        finally:
            os.kill(worker, signal.SIGCONT)
        eventually(lambda: all(one["generation"] == 1 for one in admin.gateway["processes"]), "it does not follow")
        for _ in range(8):
            client = client_of(gateway.s3_url)
            assert refused(client.put_object, Bucket=BUCKET, Key="a/a", Body=b"x") == "AccessDenied"


@pytest.mark.slow
def test_a_killed_process_starts_with_the_settings_of_now(tmp_path: Path) -> None:
    """Workers and the background process."""
    with an_origin() as origin, GatewayProcess(config_of(origin), directory=tmp_path / "cache") as gateway:
        admin = Admin(gateway)
        assert admin.put("a", {"prefix": f"s3://{BUCKET}/a/", "mode": "read-only"}).status_code == 200
        for name in ("worker0", "worker1", "background"):
            found = {one["name"]: one for one in admin.gateway["processes"]}
            os.kill(found[name]["process_id"], signal.SIGKILL)

            def is_back(name: str = name) -> bool:
                try:
                    processes = admin.gateway["processes"]
                except httpx.HTTPError:
                    return False
                return any(one["name"] == name and one["ready"] and one["restarts"] for one in processes)

            eventually(is_back, f"{name} is not there again")
        assert all(one["generation"] == 1 for one in admin.gateway["processes"])
        for _ in range(8):
            client = client_of(gateway.s3_url)
            assert refused(client.put_object, Bucket=BUCKET, Key="a/a", Body=b"x") == "AccessDenied"


@pytest.mark.slow
def test_a_damaged_overlay_keeps_the_gateway_from_starting(tmp_path: Path) -> None:
    """It names limits that somebody counts on: who starts is told what to do."""
    with an_origin() as origin, GatewayProcess(config_of(origin), directory=tmp_path / "cache") as gateway:
        assert Admin(gateway).put("a", {"prefix": f"s3://{BUCKET}/a/"}).status_code == 200
        gateway.terminate()
        overlay = tmp_path / "cache" / "slots.json"
        overlay.write_bytes(overlay.read_bytes().replace(b"/a/", b"/b/"))
        with pytest.raises(AssertionError, match="no readiness line"):
            gateway.start()
        assert gateway.wait() == 1
        assert "slots.json" in gateway.log
        overlay.unlink()
        gateway.start()


@pytest.mark.slow
def test_a_certificate_is_renewed(tmp_path: Path) -> None:
    """Connections that begin after SIGHUP get the new one; one that does not fit its key changes nothing."""
    files = {"certificate_file": str(tmp_path / "cert.pem"), "key_file": str(tmp_path / "key.pem")}
    make_certificate(tmp_path, "first")
    with an_origin() as origin, GatewayProcess(config_of(origin, server={"workers": 2, **files})) as gateway:
        admin = Admin(gateway)
        assert {served(gateway.s3_url) for _ in range(6)} == {"first"}
        make_certificate(tmp_path, "second")
        admin.reload({}, gateway)
        assert {served(gateway.s3_url) for _ in range(6)} == {"second"}
        (tmp_path / "key.pem").write_text("nonsense")
        admin.reload({}, gateway)
        assert "certificate_file" in admin.gateway["settings_problem"]
        assert {served(gateway.s3_url) for _ in range(6)} == {"second"}


def served(url: str) -> str:
    """The name in the certificate that a new connection gets."""
    host, port = url.removeprefix("https://").split(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, int(port))) as raw, context.wrap_socket(raw) as secure:
        der = secure.getpeercert(binary_form=True)
    assert der is not None
    [name] = x509.load_der_x509_certificate(der).subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(name.value)


@pytest.mark.slow
def test_a_ceiling_is_changed_while_bytes_pass(tmp_path: Path) -> None:
    """What is under way keeps to the new one at its next piece: it is held back from then on, and let go again."""
    content = os.urandom(24 * 2**20)
    with an_origin() as origin, GatewayProcess(config_of(origin), directory=tmp_path / "cache") as gateway:
        admin, client = Admin(gateway), client_of(gateway.s3_url)
        client_of(origin.endpoint_url).put_object(Bucket=BUCKET, Key="a/large", Body=content)
        slot = {"prefix": f"s3://{BUCKET}/a/", "max_cached_object_size": "1MiB"}
        assert admin.put("a", {**slot, "read_bandwidth": "1MiB/s"}).status_code == 200
        body = client.get_object(Bucket=BUCKET, Key="a/large")["Body"]
        began = time.monotonic()
        read = body.read(2 * 2**20)
        assert time.monotonic() - began > 0.8
        assert admin.put("a", slot).status_code == 200
        freed = time.monotonic()
        read += body.read()
        assert read == content
        assert time.monotonic() - freed < 15  # 22 at the old ceiling


def make_certificate(directory: Path, name: str) -> None:
    """A pair of files that fit each other, the certificate with that common name."""
    made = trustme.CA().issue_cert("127.0.0.1", common_name=name)
    made.private_key_pem.write_to_path(directory / "key.pem")
    (directory / "cert.pem").write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))


@pytest.mark.slow
def test_limits_of_callers_change(tmp_path: Path) -> None:
    """With the credentials: who is limited is held back in each worker at once, and let go again."""
    one = {"access_key_id": "one", "secret_access_key": "one-secret-0123", "allow": ["s3://"]}
    limited = {**one, "requests_per_second": 5}
    with an_origin() as origin:
        config = config_of(origin, credentials=[one])
        config["server"]["caller_wait_max"] = "100ms"
        with GatewayProcess(config, directory=tmp_path / "cache") as gateway:
            admin, clients = Admin(gateway), [client_of(gateway.s3_url, ("one", "one-secret-0123")) for _ in range(4)]
            clients[0].put_object(Bucket=BUCKET, Key="a", Body=b"x")

            def slowed() -> int:
                count = 0
                for number in range(60):
                    try:
                        clients[number % 4].get_object(Bucket=BUCKET, Key="a")["Body"].read()
                    except ClientError as error:
                        count += error.response["Error"]["Code"] == "SlowDown"
                return count

            assert slowed() == 0
            admin.reload({"credentials": [limited]}, gateway)
            assert slowed() > 10
            admin.reload({"credentials": [one]}, gateway)
            assert slowed() == 0


@pytest.mark.slow
@pytest.mark.parametrize("limits", [[30, 20], [21, 22, 23, 24, 25, 26, 20]])
def test_limits_hold_over_a_worker_that_has_not_seen_all_changes(tmp_path: Path, limits: list[int]) -> None:
    """They change and come back while it is stopped: it counts with the other worker again when it goes on."""
    config = {"server": {"workers": 2, "caller_wait_max": "0s"}, "credentials": [_limited(20)]}
    with an_origin() as origin, GatewayProcess(config_of(origin, **config), directory=tmp_path / "cache") as gateway:
        admin = Admin(gateway)
        clients = [client_of(gateway.s3_url, ("one", "one-secret-0123")) for _ in range(12)]
        eventually(lambda: _answers(clients[0]), "nothing passes")
        stopped = next(one["process_id"] for one in admin.gateway["processes"] if one["name"] == "worker0")
        os.kill(stopped, signal.SIGSTOP)
        try:
            for number, limit in enumerate(limits, 1):
                text = gateway.config_file.read_text()
                gateway.config_file.write_text(to_toml(laid_over(text, {"credentials": [_limited(limit)]})))
                os.kill(gateway.pid, signal.SIGHUP)
                eventually(partial(lambda number: admin.gateway["generation"] == number, number), "it is not read anew")
        finally:
            os.kill(stopped, signal.SIGCONT)

        def all_follow() -> bool:
            return all(one["generation"] == len(limits) for one in admin.gateway["processes"])

        eventually(all_follow, "it does not follow")
        seconds, passed = 3.0, [0] * len(clients)
        end = time.monotonic() + seconds

        def ask(number: int) -> None:
            while time.monotonic() < end:
                passed[number] += _answers(clients[number])

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(clients))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 10 <= sum(passed) <= 20 * (seconds + 0.5) + 2


def _limited(requests_per_second: int) -> dict[str, Any]:
    key = {"access_key_id": "one", "secret_access_key": "one-secret-0123", "allow": ["s3://"]}
    return {**key, "requests_per_second": requests_per_second}


def _answers(client: Any) -> bool:
    try:
        client.head_bucket(Bucket=BUCKET)
    except ClientError:
        return False
    return True


@pytest.mark.slow
def test_what_files_held_is_in_force_whatever_becomes_of_them(tmp_path: Path) -> None:
    """Processes that are killed come back with the certificate of before, when the files that the settings name are
    nonsense, or gone."""
    names = ("cert.pem", "key.pem", "trusted.pem", "secret", "token")
    make_certificate(tmp_path, "a")
    trustme.CA().cert_pem.write_to_path(tmp_path / "trusted.pem")
    (tmp_path / "secret").write_text(SECRET_ACCESS_KEY)
    (tmp_path / "token").write_text("a-token-for-tests-only")
    files = [tmp_path / name for name in names]
    with an_origin() as origin:
        config = config_of(origin)
        config["server"] |= {"certificate_file": str(files[0]), "key_file": str(files[1])}
        config["origin"] |= {"secret_access_key": None, "secret_access_key_file": str(files[3])}
        config["origin"] |= {"ca_bundle": str(files[2])}
        config["admin"] = {"token_file": str(files[4])}
        with GatewayProcess(config, directory=tmp_path / "cache") as gateway:
            before = served(gateway.s3_url)
            for spoil in (lambda file: file.write_text("nonsense"), Path.unlink):
                for file in files:
                    spoil(file)
                os.kill(gateway.pid, signal.SIGHUP)
                eventually(lambda: "changed settings are refused" in gateway.log, "it was not looked at")
                known = _processes(gateway)
                for process_id in known:
                    os.kill(process_id, signal.SIGKILL)

                def are_others(known: list[int] = known) -> bool:
                    try:
                        found = _processes(gateway)
                    except (httpx.HTTPError, TypeError):
                        return False
                    return len(found) == 3 and not set(found) & set(known)

                eventually(are_others, "they do not come back")
                assert {served(gateway.s3_url) for _ in range(6)} == {before}


def _processes(gateway: GatewayProcess) -> list[int]:
    headers = {"Authorization": "Bearer a-token-for-tests-only"}
    status = httpx.get(f"{gateway.admin_url}/api/v1/status", headers=headers, timeout=60).json()
    return [int(one["process_id"]) for one in status["gateway"]["processes"] if one["ready"]]


@pytest.mark.slow
def test_a_stopped_supervisor_stops_no_other_process(tmp_path: Path) -> None:
    """Whatever is asked for meanwhile: health and status are answered, and changes when it goes on, or with a 503."""
    with an_origin() as origin, GatewayProcess(config_of(origin), directory=tmp_path / "cache") as gateway:
        admin, answers = Admin(gateway), list[int]()
        slot = {"prefix": f"s3://{BUCKET}/a/", "write": "back", "markers": ["m" * 1000] * 25}
        os.kill(gateway.pid, signal.SIGSTOP)
        try:
            threads = [
                threading.Thread(target=lambda: answers.append(admin.put("a", slot).status_code)) for _ in range(12)
            ]
            for thread in threads:
                thread.start()
            for _ in range(10):
                began = time.monotonic()
                assert admin.gateway["generation"] == 0
                assert time.monotonic() - began < 5
                time.sleep(0.1)
        finally:
            os.kill(gateway.pid, signal.SIGCONT)
        for thread in threads:
            thread.join()
        assert len(answers) == 12
        assert set(answers) <= {200, 202, 503}
        assert admin.put("a", {"prefix": f"s3://{BUCKET}/a/", "write": "through"}).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("after", [None, "100MiB/s"])
def test_who_waits_under_what_is_lifted_passes_by_what_is_in_force(tmp_path: Path, after: str | None) -> None:
    """Within seconds: pieces at a ceiling of their slot, and requests at a limit of their caller."""
    config = {"server": {"workers": 2, "caller_wait_max": "60s"}, "credentials": [_limited(1), _unlimited()]}
    with an_origin() as origin, GatewayProcess(config_of(origin, **config), directory=tmp_path / "cache") as gateway:
        admin, slot = Admin(gateway), {"prefix": f"s3://{BUCKET}/a/"}
        direct = client_of(origin.endpoint_url)
        for number in range(16):
            direct.put_object(Bucket=BUCKET, Key=f"a/{number}", Body=bytes(MIB))
        assert admin.put("a", {**slot, "read_bandwidth": "64KiB/s"}).status_code == 200
        done = list[str]()

        def read(number: int) -> None:
            client_of(gateway.s3_url, ("all", "all-secret-0123")).get_object(Bucket=BUCKET, Key=f"a/{number}")[
                "Body"
            ].read()
            done.append("read")

        def head(_: int) -> None:
            client_of(gateway.s3_url, ("one", "one-secret-0123")).head_bucket(Bucket=BUCKET)
            done.append("head")

        threads = [threading.Thread(target=work, args=(number,)) for work in (read, head) for number in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(2)
        assert len(done) < 10
        assert admin.put("a", {**slot, "read_bandwidth": after} if after else slot).status_code == 200
        admin.reload({"credentials": [_limited(1000) if after else _unlimited("one"), _unlimited()]}, gateway)
        for thread in threads:
            thread.join(timeout=8)
        assert sorted(done) == ["head"] * 16 + ["read"] * 16


def _unlimited(name: str = "all") -> dict[str, Any]:
    return {"access_key_id": name, "secret_access_key": f"{name}-secret-0123", "allow": ["s3://"]}


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["immutable", "ttl"])
def test_no_version_comes_back_that_was_seen_to_be_replaced(tmp_path: Path, consistency: str) -> None:
    """While the slot was strict, or gone: in any worker, prepared answers included; nor does what was deleted, nor an
    absence."""
    remembering = {"prefix": f"s3://{BUCKET}/s/", "consistency": consistency, "metadata_ttl": "1h"}
    with an_origin() as origin, GatewayProcess(config_of(origin), directory=tmp_path / "cache") as gateway:
        admin, direct = Admin(gateway), client_of(origin.endpoint_url)

        def state(key: str) -> set[bytes]:
            found = set()
            for _ in range(6):
                client = client_of(gateway.s3_url)
                for _ in range(3):
                    try:
                        found.add(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
                    except ClientError as error:
                        found.add(error.response["Error"]["Code"].encode())
            return found

        ways = (partial(admin.put, "s", {"prefix": f"s3://{BUCKET}/s/"}), partial(admin.delete, "s"))
        for number, strict in enumerate(ways):
            changed, deleted, made = (f"s/{number}/{name}" for name in ("changed", "deleted", "made"))
            for key in (changed, deleted):
                direct.put_object(Bucket=BUCKET, Key=key, Body=b"one")
            assert admin.put("s", {**remembering, "negative_ttl": "1h"}).status_code == 200
            assert [state(key) for key in (changed, deleted, made)] == [{b"one"}, {b"one"}, {b"NoSuchKey"}]
            assert strict().status_code == 200
            direct.put_object(Bucket=BUCKET, Key=changed, Body=b"two")
            direct.put_object(Bucket=BUCKET, Key=made, Body=b"two")
            direct.delete_object(Bucket=BUCKET, Key=deleted)
            now = [{b"two"}, {b"NoSuchKey"}, {b"two"}]
            assert [state(key) for key in (changed, deleted, made)] == now
            assert admin.put("s", {**remembering, "negative_ttl": "1h"}).status_code == 200
            assert [state(key) for key in (changed, deleted, made)] == now
