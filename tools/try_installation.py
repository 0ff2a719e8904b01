"""`python -m tools.try_installation`: builds source distribution and wheel, installs the wheel elsewhere, and uses it.

What must hold: both have everything that they need, the wheel is built from the source distribution, and a gateway that
runs from it serves a bucket, its status page and its metrics. `--wheel FILE` tries one that is there already.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

REPOSITORY = Path(__file__).resolve().parents[1]
BODY = bytes(range(256)) * 4096
ETAG = '"0123456789abcdef0123456789abcdef"'
START_SECONDS = 60

JOB = """
import botocore.session, sys
s3 = botocore.session.get_session().create_client("s3", endpoint_url=sys.argv[1], region_name="us-east-1")
answers = [s3.get_object(Bucket="train", Key="shard") for _ in range(2)]
assert all(len(answer["Body"].read()) == int(sys.argv[2]) for answer in answers)
print(answers[-1]["ResponseMetadata"]["HTTPHeaders"]["x-forebay-cache"])
"""


class Incomplete(Exception):
    """What was built lacks something, or does not do what it should."""


class Bucket(BaseHTTPRequestHandler):
    """As much of S3 as a gateway needs that serves one object; it believes every signature."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        if not self.path.startswith("/train/shard"):
            body = b'<?xml version="1.0"?><ListAllMyBucketsResult><Buckets/></ListAllMyBucketsResult>'
            self._send(200, body, with_body=with_body)
            return
        span = self.headers.get("range", "").removeprefix("bytes=")
        first, _, last = span.partition("-")
        start, end = (int(first), min(int(last or len(BODY)), len(BODY) - 1)) if first else (0, len(BODY) - 1)
        self._send(206 if first else 200, BODY[start : end + 1], (start, end) if first else None, with_body=with_body)

    def _send(self, status: int, body: bytes, span: tuple[int, int] | None = None, *, with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", ETAG)
        self.send_header("Last-Modified", formatdate(0, usegmt=True))
        if span is not None:
            self.send_header("Content-Range", f"bytes {span[0]}-{span[1]}/{len(BODY)}")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: what is asked is not what is tried."""


def main() -> None:
    """Ends with a line of what was tried; Incomplete, or CalledProcessError with the output of what failed."""
    parser = argparse.ArgumentParser(description="Build, install away from the clone, and use what was built.")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="do not build, take this one")
    given: Path | None = parser.parse_args().wheel
    with tempfile.TemporaryDirectory(prefix="forebay-installation-") as name:
        folder = Path(name)
        wheel = given.resolve() if given is not None else build(folder / "dist")
        check_wheel(wheel)
        command = install(wheel, folder / "venv")
        version = run(command, "--version", folder=folder)
        label = use(command, folder)
    sys.stdout.write(f"{wheel.name}: {version.strip()}, installed and used; the second read was a {label}\n")


def build(dist: Path) -> Path:
    """The wheel, built from the source distribution, which is checked."""
    run(Path(sys.executable), "-m", "build", "--outdir", str(dist), str(REPOSITORY), folder=REPOSITORY)
    [source], [wheel] = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tarfile.open(source) as archive:
        names = {member.partition("/")[2] for member in archive.getnames()}
    _require(
        names,
        {
            "LICENSE",
            "README.md",
            "pyproject.toml",
            "hatch_build.py",
            "PKG-INFO",
            *tracked("gateway"),
            *tracked("forebay"),
        },
    )
    return wheel


def check_wheel(wheel: Path) -> None:
    """It has all of `gateway/`, the licence and the entry point, and nothing of the tests."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    [metadata] = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    _require(
        names,
        {f"{metadata}/licenses/LICENSE", f"{metadata}/entry_points.txt", *tracked("gateway"), *tracked("forebay")},
    )
    strange = {name for name in names if name.partition("/")[0] not in ("gateway", "forebay", metadata, "forebay.libs")}
    if strange:
        raise Incomplete(f"the wheel has what it should not have: {sorted(strange)[:5]}")


def tracked(folder: str) -> set[str]:
    """What git has below a folder of the repository."""
    return set(run(Path("git"), "ls-files", folder, folder=REPOSITORY).splitlines())


def _require(names: set[str], wanted: set[str]) -> None:
    if not wanted <= names:
        raise Incomplete(f"this is missing: {sorted(wanted - names)[:5]}")


def install(wheel: Path, venv: Path) -> Path:
    """The command `forebay` of a new virtual environment that has the wheel and what it depends on."""
    run(Path(sys.executable), "-m", "venv", str(venv), folder=venv.parent)
    quiet = ("install", "-qq", "--disable-pip-version-check")
    run(venv / "bin" / "python", "-m", "pip", *quiet, str(wheel), folder=venv.parent)
    return venv / "bin" / "forebay"


def use(forebay: Path, folder: Path) -> str:
    """Serve a bucket, read from it twice, look at status page and metrics, stop. What the second read was."""
    origin = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    threading.Thread(target=origin.serve_forever, daemon=True).start()
    settings = {
        "PATH": f"{forebay.parent}:/usr/bin:/bin",
        "HOME": str(folder),
        "AWS_ACCESS_KEY_ID": "tried",
        "AWS_SECRET_ACCESS_KEY": "tried-secret-0123456789",
        "FOREBAY_ORIGIN__ENDPOINT_URL": f"http://127.0.0.1:{origin.server_port}",
        "FOREBAY_ORIGIN__REGION": "us-east-1",
        "FOREBAY_CACHE__DIRECTORY": str(folder / "cache"),
        "FOREBAY_CACHE__CAPACITY": "256MiB",
        "FOREBAY_SERVER__PORT": "0",
        "FOREBAY_ADMIN__PORT": "0",
    }
    with (folder / "log").open("wb") as log:
        gateway = subprocess.Popen(  # noqa: S603 - what was just installed
            [forebay, "serve"], stdout=subprocess.PIPE, stderr=log, env=settings, cwd=folder, text=True
        )
    timer = threading.Timer(START_SECONDS, gateway.kill)
    timer.start()
    try:
        if gateway.stdout is None:
            raise Incomplete("no output")
        ready = gateway.stdout.readline()
        timer.cancel()
        if not ready.startswith("forebay: S3 on "):
            raise Incomplete(f"it does not start:\n{(folder / 'log').read_text(errors='replace')}")
        s3_url, admin_url = ready.removeprefix("forebay: S3 on ").strip().split(", admin on ")
        python = forebay.with_name("python")
        label = run(python, "-c", JOB, s3_url, str(len(BODY)), folder=folder, environment=settings).strip()
        run(forebay, "status", "--admin-url", admin_url, folder=folder, environment=settings)
        for path in ("/", "/metrics", "/readyz", "/api/openapi.json"):
            build_opener(ProxyHandler({})).open(admin_url + path, timeout=10).close()  # HTTPError where it is refused
        gateway.terminate()
        if gateway.wait(START_SECONDS) != 0 or label != "hit":
            raise Incomplete(f"exit code {gateway.returncode}, the second read was a {label}")
        return label
    finally:
        timer.cancel()
        gateway.kill()
        gateway.wait()
        origin.shutdown()
        origin.server_close()


def run(program: Path, *arguments: str, folder: Path, environment: dict[str, str] | None = None) -> str:
    """Standard output; what went to standard error is shown where it fails."""
    done = subprocess.run(  # noqa: S603 - programs that this module names
        [program, *arguments], capture_output=True, text=True, cwd=folder, env=environment, check=False
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    main()
