"""A prefix that an example mounts through a gateway, and programs that work in it and never wait for ever.

Nothing in this process looks into the mount: a file system that hangs would hold it, and no signal would end that. To
kill the daemon ends what waits in its mount, so that comes first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.processes import MARK_VARIABLE, is_over, kill_if_there, marked
from tests.support.root import require_root_marker
from tests.support.waiting import eventually

_ROOT = Path(__file__).resolve().parents[2]
_BIN = Path(sys.executable).parent
_MOUNT_SECONDS = 60.0
_UNMOUNT_SECONDS = 30.0

KINDS = ("s3fs", "rclone", "juicefs")


class Mount:
    """`examples/mount-KIND.sh`, or `forebay mount`, between entering and leaving.

    `url` is the gateway's, or any S3's; `path` is the bucket and the prefix. JuiceFS keeps its names in SQLite, in a
    directory that leaving removes. Leaving asserts that the daemon ends when it is unmounted.
    """

    def __init__(self, kind: str, url: str, path: str, keys: tuple[str, str], region: str = "us-east-1") -> None:
        self.kind = kind
        self.options: list[str] = []
        """Of `forebay mount`."""

        self.path = path
        self.key_prefix = path.partition("/")[2] + "/"
        self._temporary = tempfile.TemporaryDirectory(prefix="forebay-mount-")
        base = Path(self._temporary.name)
        self.where = base / "mount"
        self.where.mkdir()
        self._base = base
        self._mark = base / "mark"
        self._mark.touch()
        self.environment = {
            "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(base),
            "LANG": "C.UTF-8",
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": keys[0],
            "AWS_SECRET_ACCESS_KEY": keys[1],
            "AWS_REGION": region,
        }

    def __enter__(self) -> Self:
        require_root_marker()
        try:
            self.mount()
        except BaseException:
            self._kill()
            self._temporary.cleanup()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._is_mounted():
                self.unmount()
        finally:
            self._kill()
            assert not self._is_mounted(), f"{self.where} is still mounted"
            self._temporary.cleanup()

    def mount(self) -> None:
        """Mount it; once more after `unmount`, with nothing in the caches of a process."""
        what = [f"s3://{self.path}", str(self.where)]
        command = ["sh", f"examples/mount-{self.kind}.sh", *what]
        if self.kind == "forebay":
            command = ["forebay", "mount", *what, "--read-only", *self.options]
        if self.kind == "juicefs":
            command.append(f"sqlite3://{self._base}/names.db")
        # The daemon inherits the mark, and the streams: a file, as nobody would read a pipe to its end.
        with (self._base / "output").open("a+b") as output:
            environment = self.environment | {MARK_VARIABLE: str(self._mark)}
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            code = subprocess.run(
                command, cwd=_ROOT, env=environment, timeout=_MOUNT_SECONDS, check=False, **streams
            ).returncode
        said = (self._base / "output").read_text(encoding="utf-8", errors="replace")
        assert code == 0, said
        assert self._is_mounted(), said

    def unmount(self) -> None:
        """Unmount it, and wait until its daemon has ended. rclone loses what it has not sent."""
        subprocess.run(["umount", str(self.where)], timeout=_UNMOUNT_SECONDS, check=True)
        eventually(lambda: all(map(is_over, self.daemons())), "the daemon did not end", seconds=_UNMOUNT_SECONDS)

    def forget(self) -> None:
        """Remove the files that it caches on disk, while it is not mounted."""
        shutil.rmtree(self._base / ".cache", ignore_errors=True)

    def daemons(self) -> list[int]:
        """Process ids of the file system's own processes."""
        return marked(self._mark)

    def run(self, *command: str | Path, timeout_seconds: float) -> str:
        """Run a program in the mount and return what it printed. Fail when it fails or takes longer."""
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=_ROOT,
            env=self.environment | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            printed, said = process.communicate(timeout=timeout_seconds)
        except BaseException:
            self._kill()
            process.kill()
            process.communicate()
            raise
        assert process.returncode == 0, f"{command}: {said[-4000:]}\n{printed[-1000:]}"
        return printed

    def _is_mounted(self) -> bool:
        return f" {self.where} " in Path("/proc/self/mounts").read_text(encoding="utf-8")

    def _kill(self) -> None:
        for pid in self.daemons():
            kill_if_there(pid)
        while self._is_mounted():
            subprocess.run(["umount", "--lazy", str(self.where)], timeout=_UNMOUNT_SECONDS, check=True)
