"""Whoever copies a fragment of configuration or a command out of the documentation gets one that works."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import trustme
import typer.main
from cryptography import x509

from gateway import cli
from gateway.config.defaults import DiskUsage
from gateway.config.loading import load_settings
from tests.support.certificates import tls_files
from tools.demo_picture import FIGURES, PICTURE, README, picture, with_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _fragments() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for number, fragment in enumerate(re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL), 1):
            yield f"{page.name}-{number}", fragment


FRAGMENTS = dict(_fragments())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the files that the examples name: a secret, a certificate with its key, an authority."""
    directory = tmp_path_factory.mktemp("examples")
    (directory / "secret").write_text("YS1zZWNyZXQtb2YtYS1jYWxsZXI=", encoding="utf-8")
    (directory / "secret-of-cluster").write_text("a-secret-of-a-cluster, which is long", encoding="utf-8")
    authority = trustme.CA()
    tls_files(authority.issue_cert("localhost"), directory)
    authority.cert_pem.write_to_path(directory / "ca.pem")
    return directory


@pytest.mark.parametrize("name", FRAGMENTS)
def test_a_fragment_of_configuration_loads(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, or below a cache that outlives the job, on a disk that is large enough."""
    monkeypatch.setattr("gateway.config.slot_checks.disk_usage", lambda _: DiskUsage(2**50, 0, 2**50))
    fragment = FRAGMENTS[name]
    if not re.search(r"^(\[cache\]|cache = )", fragment, re.MULTILINE):
        fragment = '[cache]\ndirectory = "/mnt/nvme/forebay"\npersistent = true\n' + fragment
    for pattern, path in (
        (r'directory = "[^"]*"', directory / "cache"),
        (r'(?:secret_access_key|web_identity_token)_file = "[^"]*"', directory / "secret"),
        (r'\bsecret_file = "[^"]*"', directory / "secret-of-cluster"),
        (r'\bredis_password_file = "[^"]*"', directory / "secret-of-cluster"),
        (r'certificate_file = "[^"]*"', directory / "certificate.pem"),
        (r'\bkey_file = "[^"]*"', directory / "key.pem"),
        (r'ca_bundle = "[^"]*"', directory / "ca.pem"),
    ):
        fragment = re.sub(pattern, partial(_with_path, path), fragment)
    nas = directory / "nas"
    nas.mkdir(exist_ok=True)
    fragment = fragment.replace("file:///mnt/nas", f"file://{nas}")
    (directory / "forebay.toml").write_text(fragment, encoding="utf-8")
    load_settings(directory / "forebay.toml", {})


def _with_path(path: Path, match: re.Match[str]) -> str:
    return f'{match[0].partition(" =")[0]} = "{path}"'


def test_the_fragments_are_found() -> None:
    """README's own among them."""
    assert "README.md-1" in FRAGMENTS
    assert len(FRAGMENTS) >= 10


_BEFORE = r"[A-Z_]+=\S+ |sudo |srun |exec |docker exec (?:-\S+ )*\S+ |docker compose .* exec \S+ |kubectl .* -- "
"""What may stand before a command on its line."""


def _commands() -> Iterator[tuple[str, str]]:
    """Page and command line: in blocks, and between backticks where nothing is left out."""
    for page in [*PAGES, ROOT / "examples/README.md"]:
        text = page.read_text(encoding="utf-8")
        in_blocks = re.findall(rf"^(?: {{4,}}|\$ )?(?:{_BEFORE})*(forebay [a-z-].*)$", text, re.MULTILINE)
        inline = [one for one in re.findall(r"`(forebay [a-z-][^`]*)`", text) if not re.search(r"[\[|…]", one)]
        if page.name == "on-disk-format.md":
            inline = []  # files begin with such words there
        yield from ((page.name, line) for line in [*in_blocks, *inline])


def test_a_command_in_the_documentation_is_one() -> None:
    """Each command, option and choice is there. What a text leaves to the reader may be missing."""
    lines = list(_commands())
    assert len(lines) > 80
    refused = [f"{page}: {line}: {reason}" for page, line in lines if (reason := _refusal(line))]
    assert refused == []


def test_commands_behind_others_are_found() -> None:
    """With variables before them, or in a container: these are copied, too."""
    lines = set(_commands())
    assert ("installation.md", "forebay status") in lines
    assert any(page == "README.md" and line.startswith("forebay serve") for page, line in _commands())
    assert re.fullmatch(f"(?:{_BEFORE})*(forebay .*)", "kubectl -n forebay exec ds/forebay -- forebay status")


def test_what_shell_snippets_run_exists() -> None:
    """Scripts, modules of Python and files of deploy/ that a page names in a block are in the repository."""
    named = {
        (page.name, path)
        for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md"]
        for block in re.findall(r"^```(?:console|sh|bash)?\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
        for path in re.findall(r"(?<![\w/.-])((?:deploy|examples|tools|configs)/[\w./-]*\w)", block)
    }
    named |= {
        (page.name, f"{module.replace('.', '/')}")
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for module in re.findall(
            r"python3? -m ((?:tools|tests|loadtests|gateway)[\w.]*)", page.read_text(encoding="utf-8")
        )
    }
    assert len(named) > 8
    missing = {
        (page, path) for page, path in named if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()
    }
    assert missing == set()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_certificate_for_a_test_is_that_of_a_server(tmp_path: Path) -> None:
    """Clients in Rust refuse an authority as a server, which openssl makes of what says nothing."""
    text = (ROOT / "docs/tls.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^    (openssl req -x509 (?:.*\\\n)*.*)$", text, re.MULTILINE)
    subprocess.run(["sh", "-ec", command], cwd=tmp_path, check=True, capture_output=True)
    certificate = x509.load_pem_x509_certificate((tmp_path / "tls.crt").read_bytes())
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.value.ca, constraints.critical) == (False, True)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]


@cache
def _forebay() -> Any:
    """Of click, or of the copy that newer versions of typer carry."""
    return typer.main.get_command(cli.app)


def _refusal(line: str) -> str:
    words = shlex.split(line.partition(" #")[0].partition(" > ")[0].rstrip().removesuffix(" &"))[1:]
    command = _forebay()
    if words and words[0] in ("--install-completion", "--show-completion"):  # they would act at once
        return "" if words[0] in (one.opts[0] for one in command.params) else f"no option {words[0]}"
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    try:
        with command.make_context("forebay", words):
            return ""
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & {"MissingParameter", "Exit"}:
            return ""
        if "UsageError" in kinds:
            return str(error)
        raise


def test_readme_shows_what_the_demo_measured() -> None:
    """Table and picture are those of the run that is kept: `python -m tools.demo_picture` after another one."""
    report = json.loads(FIGURES.read_text(encoding="utf-8"))
    text = README.read_text(encoding="utf-8")
    assert "<!-- generated: demo -->" in text
    assert with_table(text, report) == text
    assert PICTURE.read_text(encoding="utf-8") == picture(report)
