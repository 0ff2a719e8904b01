"""The arrows between the parts of `gateway/` point one way.

edge -> operations -> {metadata, blocks, writeback} -> origin; policy meters; s3/ and the leaves know nobody; the
siblings never import each other; nobody below knows what composes the gateway (app, serve, control, cli).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

LEAVES = {
    "atomic_write",
    "checkpoint_patterns",
    "clock",
    "errors",
    "file_lease",
    "file_lock",
    "heartbeats",
    "immutable",
}
LEAVES |= {"lmdb_commits", "md5_lanes", "model", "pem", "progress_rate", "rate_limited_log", "steps"}
LEAVES |= {"thread_priority", "trace_context"}
SETTINGS = {"config"}
COUNTING = {"metric_kinds", "metric_values", "metrics", "metric_observers", "logs", "log_sink", "audit"}
COUNTING |= {"access_log", "log_file", "metric_reading", "recent_requests", "tracing"}
BASE = LEAVES | COUNTING | {"s3", "cancellation"}

ALLOWED: Mapping[str, set[str]] = {
    **{leaf: set[str]() for leaf in LEAVES},
    "heartbeats": {"atomic_write"},
    "lmdb_commits": {"atomic_write"},
    "model": {"immutable"},
    "cancellation": {"errors"},
    "config": LEAVES,
    **dict.fromkeys(COUNTING, LEAVES | COUNTING),
    "s3": LEAVES,
    "origin": BASE,
    "policy": BASE | {"origin"},
    "metadata": BASE | {"origin", "policy"},
    "blocks": BASE | {"origin", "policy"},
    "writeback": BASE | {"origin", "policy"},
    "operations": BASE | {"origin", "policy", "metadata", "blocks", "writeback"},
    "jobs": BASE | {"origin", "policy", "metadata", "blocks", "writeback"},
    "edge": BASE | {"operations", "policy", "origin"},
    "bandwidth_wiring": BASE | SETTINGS | COUNTING | {"origin", "policy"},
    "origins": BASE | SETTINGS | {"origin", "policy"},
    "write_back_wiring": BASE
    | SETTINGS
    | COUNTING
    | {"operations", "policy", "metadata", "blocks", "writeback", "origin"},
    "app": BASE
    | SETTINGS
    | COUNTING
    | {"edge", "jobs", "operations", "policy", "metadata", "blocks", "writeback", "origin"}
    | {"bandwidth_wiring", "write_back_wiring", "origins"},
    "control": BASE | SETTINGS | COUNTING | {"", "jobs", "policy", "origin"},
    "serve": LEAVES
    | SETTINGS
    | COUNTING
    | {"", "app", "cancellation", "control", "edge", "jobs", "bandwidth_wiring", "policy", "writeback"},
    "demo": LEAVES | {""},
    "cli": LEAVES
    | SETTINGS
    | COUNTING
    | {"", "serve", "control", "demo", "writeback"}
    | {"admin_client", "doctor", "policy"},
    "admin_client": {"errors"},
    "doctor": BASE | SETTINGS | COUNTING | {"", "app", "serve", "control", "origin", "policy", "admin_client"},
    "__main__": {"cli"},
    "": set(),
}
"""Part of `gateway/` -> the parts it may import. `""` is the package itself (its version). Each may import itself."""

SANS_IO = {"asyncio", "socket", "ssl", "threading", "subprocess", "aiohttp", "uvicorn", "starlette"}
"""What `s3/` must not touch: it is pure."""


def part_of(module: str) -> str:
    """`gateway.blocks.cache` -> `blocks`; `gateway` -> nothing."""
    return module.partition(".")[2].partition(".")[0]


def imports_of(source: str, module: str) -> Iterator[str]:
    """Every module that a module imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([node.module] if node.module else [])])
            # `from gateway import metrics` imports a part; `from gateway import __version__` the package.
            yield from (f"{base}.{alias.name}" if base == "gateway" else base for alias in node.names)


def violations(sources: Mapping[str, str]) -> list[str]:
    """Module -> source; every import that runs against the design."""
    found = []
    for module, source in sources.items():
        part = part_of(module)
        for imported in imports_of(source, module):
            if imported.partition(".")[0] != "gateway":
                if part == "s3" and imported.partition(".")[0] in SANS_IO:
                    found.append(f"{module} imports {imported}")
                continue
            target = part_of(imported).replace("__version__", "")
            if part not in ALLOWED or (target != part and target not in ALLOWED[part]):
                found.append(f"{module} imports {imported}")
    return found


def sources() -> dict[str, str]:
    files = sorted((REPOSITORY / "gateway").rglob("*.py"))
    return {
        ".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): file.read_text("utf-8")
        for file in files
    }


def test_no_import_runs_against_the_design() -> None:
    """The arrows of the design hold in every module."""
    assert violations(sources()) == []


def test_every_part_has_its_place_in_the_design() -> None:
    """A new part must say whom it may know."""
    assert {part_of(module) for module in sources()} <= set(ALLOWED)


def test_the_allowed_arrows_have_no_circle() -> None:
    """Except within counting, which is one part in several files."""
    one = dict.fromkeys(COUNTING, "metrics")
    arrows: dict[str, set[str]] = {}
    for part, targets in ALLOWED.items():
        name = one.get(part, part)
        reduced = {one.get(target, target) for target in targets} - {name}
        arrows.setdefault(name, set()).update(reduced)
    while arrows:
        free = {part for part, targets in arrows.items() if not targets & set(arrows)}
        assert free, f"a circle among {sorted(arrows)}"
        arrows = {part: targets for part, targets in arrows.items() if part not in free}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gateway.blocks.cache", "from gateway.metadata.catalog import Catalog"),
        ("gateway.metadata.catalog", "import gateway.blocks.cache"),
        ("gateway.origin.s3", "from gateway.operations.context import Response"),
        ("gateway.s3.xml", "from gateway.origin import client"),
        ("gateway.s3.xml", "import asyncio"),
        ("gateway.model", "from gateway import config"),
        ("gateway.operations.get_object", "def f():\n    from gateway.edge.asgi import S3App"),
        ("gateway.policy.slots", "from ..operations import reply"),
        ("gateway.policy.slots", "from .. import operations"),
        ("gateway.edge.asgi", "from gateway.config import Settings"),
        ("gateway.unheard_of", "from gateway.errors import ForebayError"),
    ],
)
def test_an_arrow_that_runs_backwards_is_found(module: str, source: str) -> None:
    """The check itself works, also on imports within functions and relative ones."""
    assert len(violations({module: source})) == 1


def test_arrows_of_the_design_are_let_through() -> None:
    """Not everything is a violation."""
    assert not violations(
        {
            "gateway.blocks.cache": "from gateway.blocks.layout import X\nfrom gateway.origin.client import Origin",
            "gateway.operations.get_object": "import gateway.blocks.cache\nfrom . import reply",
            "gateway.control.openapi": "from gateway import __version__",
            "gateway.s3.xml": "import re",
        }
    )
