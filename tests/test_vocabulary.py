"""One word for one thing: what docs/glossary.md defines is used, and what it retires is not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tools.reference import settings_reference

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gateway"
GLOSSARY = ROOT / "docs" / "glossary.md"

_RETIRED = """
absorbing alarms answers arrived arriving asked asking audience ballast barrier base behind bell
bucket_answers buffering choosing claims closed coalescing completing counting decider dice doomed durable
eligible ended exposure fate fills first_look fixed forgetful forms forsaken frozen glance going_on ground
handover holders hurry intent keeper keeping kept_free landmarks learned ledger leftovers lifeline looked_up
marks metering mixing names news objects one_flush orders paced packer packing patches patient patiently place
places plain presence renew returns salvage shelf slot_book startable strangers surroundings survey suspect
telling tidying told_page towards_client towards_origin trust unsettled upkeep wanted wire words yielding
"""

RETIRED_MODULES = frozenset(_RETIRED.split())
"""Names of modules that say nothing to somebody who opens a folder."""


def _table(heading: str) -> list[tuple[str, str]]:
    section = GLOSSARY.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return rows[1:]


def _pages() -> Iterator[Path]:
    """What users read. Decisions tell history, and keep its words."""
    yield ROOT / "README.md"
    yield from (page for page in sorted((ROOT / "docs").glob("*.md")) if page != GLOSSARY)


def test_no_module_is_named_by_a_retired_word() -> None:
    """Neither a file nor a folder."""
    named = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*")
        if "__pycache__" not in path.parts and (path.suffix == ".py" or path.is_dir()) and path.stem in RETIRED_MODULES
    }
    assert named == set()


def test_each_term_is_defined_once_and_in_order() -> None:
    """A reader finds it where the alphabet has it."""
    terms = [term for term, _ in _table("Terms")]
    assert len(terms) > 20
    assert terms == sorted(set(terms))


def test_each_term_is_used() -> None:
    """In what users read, or in the code: a glossary defines no word for its own sake."""
    texts = [page.read_text(encoding="utf-8") for page in _pages()]
    texts += [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    everything = "\n".join(texts).lower()
    unused = [term for term, _ in _table("Terms") if not re.search(rf"\b{term}", everything)]
    assert unused == []


def _messages(path: Path) -> Iterator[str]:
    """What a module may print: its texts of several words; docstrings only of commands, whose help they are."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    is_command = path.parent.name == "cli"
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and not is_command}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if is_text and " " in (text := ast.literal_eval(node)).strip():
            yield text


def test_retired_words_are_not_written_any_more() -> None:
    """Neither in what users read nor in the help of settings, nor in errors and the log."""
    retired = [word for words, _ in _table("Retired words") for word in words.split(", ")]
    assert len(retired) > 10
    texts = {page.name: page.read_text(encoding="utf-8") for page in _pages()}
    texts["help of settings"] = settings_reference()
    texts |= {str(path.relative_to(ROOT)): "\n".join(_messages(path)) for path in PACKAGE.rglob("*.py")}
    anyone = re.compile(rf"(?<![\w/-])(?:{'|'.join(map(re.escape, retired))})(?![\w.])", re.IGNORECASE)
    found = [f"{name}: {word}" for name, text in texts.items() for word in anyone.findall(text)]
    assert found == []
