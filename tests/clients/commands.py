"""Running a client's own command as a user would, in an environment with nothing but the endpoint and the keys."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY

_BIN = Path(sys.executable).parent
_LIMIT_SECONDS = 90


@dataclass(frozen=True, slots=True)
class Command:
    """A client installed beside this Python. A client that is missing fails every test that needs it."""

    program: str
    environment: Mapping[str, str]

    def __call__(
        self, *arguments: str | Path, check: bool = True, stdin: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        """Run to the end; with `check`, a failure shows what the client said."""
        path = _BIN / self.program
        assert path.exists(), f"{path} is missing: install the extra `clients`"
        result = subprocess.run(
            [str(path), *map(str, arguments)],
            env=dict(self.environment),
            input=stdin,
            capture_output=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
        if check:
            assert result.returncode == 0, f"{arguments}: {result.stderr.decode()}\n{result.stdout.decode()}"
        return result


def client_environment(url: str, ca_file: Path | None, home: Path) -> dict[str, str]:
    """What a job's shell has after it was pointed at the endpoint, and nothing of the machine's own settings."""
    environment = {
        "PATH": f"{_BIN}{os.pathsep}/usr/bin{os.pathsep}/bin",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    if ca_file is not None:
        environment["AWS_CA_BUNDLE"] = str(ca_file)
    return environment
