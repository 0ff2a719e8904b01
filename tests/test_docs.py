"""The documentation says what the code does: settings, metrics, commands, paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from gateway import cli
from gateway.admin.app import describe
from gateway.config import Settings
from gateway.config.defaults import DiskUsage
from gateway.config.entries import BucketSettings, ReplicaSettings
from gateway.config.loading import load_settings, read_document
from gateway.config.problems import table_of, toml_names
from gateway.telemetry.metrics import DECLARED
from tools.reference import metrics_reference, settings_reference, with_references

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
CONFIGS = REPOSITORY / "configs"


@pytest.mark.parametrize("name", ["configuration.md", "metrics.md"])
def test_generated_parts_are_up_to_date(name: str) -> None:
    """Run `python -m tools.reference docs/configuration.md docs/metrics.md` after a change."""
    text = (DOCS / name).read_text(encoding="utf-8")
    assert "<!-- generated: " in text
    assert with_references(text) == text


def test_every_setting_is_in_the_reference() -> None:
    """Under its table, by its TOML name."""
    sections = settings_reference().split("### ")[1:]
    tables = [table for field in Settings.model_fields.values() if (table := table_of(field.annotation))]
    tables.insert(tables.index(BucketSettings) + 1, ReplicaSettings)
    for section, table in zip(sections, tables, strict=True):
        assert re.findall(r"^\| `(\w+)`", section, re.MULTILINE) == toml_names(table)


def test_every_metric_is_in_the_reference() -> None:
    """With its labels."""
    rows = [row for row in metrics_reference().splitlines() if row.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [one.name for one in DECLARED]
    for row, one in zip(rows, DECLARED, strict=True):
        assert all(f"`{label}`" in row for label in one.labels)


def test_every_command_and_option_is_documented() -> None:
    """docs/command-line.md has a row for each command, those within groups too, that names its options."""
    text = (DOCS / "command-line.md").read_text(encoding="utf-8")
    commands = dict(_commands(typer.main.get_command(cli.app)))
    assert set(commands) >= {"serve", "check-config", "status", "demo", "writeback list", "snapshot create"}
    for name, command in commands.items():
        row = next((line for line in text.splitlines() if re.match(rf"\| `forebay {name}[ `]", line)), "")
        for parameter in command.params:
            named = parameter.metavar or (parameter.name or "").upper()
            spelling = next((option for option in parameter.opts if option.startswith("--")), named)
            assert spelling in row.replace("\\|", "|"), f"{name} {spelling}"


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def test_every_path_of_the_admin_port_is_documented() -> None:
    """In docs/command-line.md."""
    text = (DOCS / "command-line.md").read_text(encoding="utf-8")
    for path in describe()["paths"]:
        assert f"| `{path}` |" in text


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_example_configurations_load_without_a_warning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They can be used as they are, on a disk that is large enough."""
    monkeypatch.setattr("gateway.config.slot_checks.disk_usage", lambda _: DiskUsage(2**50, 0, 2**50))
    assert load_settings(path, {}).warnings == ()


def test_the_full_example_shows_every_key() -> None:
    """Set, or commented out where a value cannot be given for everybody."""
    text = (CONFIGS / "full.toml").read_text(encoding="utf-8")
    tables = {name: table_of(field.annotation) for name, field in Settings.model_fields.items()}
    assert None not in tables.values()
    while tables:
        table, model = tables.popitem()
        assert model is not None
        inner = {name: found for name, field in model.model_fields.items() if (found := table_of(field.annotation))}
        tables |= {f"{table}.{name}": found for name, found in inner.items()}
        sections = re.findall(rf"^(?:# )?\[+{table}\]+.*?(?=^(?:# )?\[|\Z)", text, re.MULTILINE | re.DOTALL)
        shown = set(re.findall(r"^(?:# )?(\w+) = ", "\n".join(sections), re.MULTILINE))
        assert set(toml_names(model)) - inner.keys() <= shown, table


def test_what_the_full_example_has_commented_out_is_valid_too(tmp_path: Path) -> None:
    """Uncommenting a key gives a key that exists, with a value of the right form."""
    text = (CONFIGS / "full.toml").read_text(encoding="utf-8")
    uncommented = re.sub(r"^# (\[\w+\]|\w+ = )", r"\1", text, flags=re.MULTILINE)
    (tmp_path / "all.toml").write_text(uncommented, encoding="utf-8")
    document = read_document(tmp_path / "all.toml")
    settings = Settings.model_validate(document, by_alias=True, by_name=False)
    assert settings.slots[0].consistency == "immutable"


@pytest.mark.slow
def test_the_tests_that_security_names_exist() -> None:
    """A class of faults without a test is one that comes back."""
    text = (DOCS / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 20
    for file, test in named:
        tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
        assert not test or test in {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }, f"{file}::{test}"
    for section in text.split("\n## ")[1:]:
        assert "`tests/" in section, section.partition("\n")[0]


def test_what_names_a_module_names_one_that_is_there() -> None:
    """In docstrings, comments and decisions: a reader goes where they point."""
    modules = {
        path.name
        for folder in ("examples", "gateway", "tests", "loadtests", "tools")
        for path in (REPOSITORY / folder).rglob("*.py")
    } | {"hatch_build.py"}
    readers = [*DOCS.rglob("*.md"), *(REPOSITORY / "gateway").rglob("*.py")]
    named = {
        (path.relative_to(REPOSITORY), name)
        for path in readers
        for name in re.findall(r"\b([a-z][a-z_0-9]*\.py)\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 100
    assert sorted((str(path), name) for path, name in named if name not in modules) == []


def test_every_clause_has_a_test() -> None:
    """By its number, in a test's docstring or name."""
    clauses = set(re.findall(r"^(\d+\.\d+) ", (DOCS / "semantics.md").read_text(encoding="utf-8"), re.MULTILINE))
    told = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("test_*.py")]
    numbered = {
        number.replace("_", ".")
        for text in told
        for said in re.findall(r"def test_(\d+_\d+)_|\"\"\"((?:\d+\.\d+[ ,:to]+)+)", text)
        for number in re.findall(r"\d+[._]\d+", " ".join(said))
    }
    assert sorted(clauses - numbered) == []
