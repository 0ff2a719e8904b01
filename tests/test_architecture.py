"""The arrows between the parts of `gateway/` point one way.

edge -> operations -> {metadata, blocks, writeback} -> origin; policy meters; s3/ and the leaves know nobody; the
siblings never import each other; nobody below knows what composes the gateway (app, serve, control, cli).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

LEAVES = {"core", "disk", "md5_lanes", "shared"}
BASE = LEAVES | {"s3", "telemetry"}
STORES = {"metadata", "blocks", "writeback"}

ALLOWED: Mapping[str, set[str]] = {
    "core": set(),
    "api": set(),
    "md5_lanes": set(),
    "disk": {"core"},
    "shared": {"core", "disk"},
    "telemetry": LEAVES | {"s3"},
    "config": LEAVES,
    "s3": LEAVES,
    "origin": BASE,
    "policy": BASE | {"config", "origin"},
    **dict.fromkeys(STORES, BASE | {"origin", "policy"}),
    "writeback": BASE | {"api", "origin", "policy"},
    "operations": BASE | STORES | {"origin", "policy"},
    "jobs": BASE | STORES | {"api", "origin", "policy"},
    "edge": BASE | {"operations", "policy", "origin"},
    "cluster": BASE | {"origin", "policy"},
    "app": BASE | STORES | {"", "cluster", "config", "edge", "jobs", "operations", "policy", "origin"},
    "admin": BASE | {"", "api", "cluster", "config", "jobs", "policy", "origin", "writeback"},
    "serve": BASE | {"", "api", "cluster", "config", "app", "admin", "edge", "jobs", "policy", "writeback"},
    "demo": LEAVES | {""},
    "cli": BASE | {"", "api", "config", "serve", "admin", "demo", "doctor", "policy", "writeback"},
    "doctor": BASE | {"", "api", "config", "app", "serve", "admin", "origin", "policy"},
    "__main__": {"cli"},
    "": set(),
}
"""Part of `gateway/` -> the parts it may import. `""` is the package itself (its version). Each may import itself."""

SANS_IO = {"asyncio", "socket", "ssl", "threading", "subprocess", "aiohttp", "uvicorn", "starlette"}
"""What `s3/` must not touch: it is pure."""


def part_of(module: str) -> str:
    """`gateway.blocks.cache` -> `blocks`; `gateway` -> nothing."""
    return module.partition(".")[2].partition(".")[0]


@cache
def imports_of(source: str, module: str) -> Sequence[str]:
    """Every module that a module imports, wherever in it the import stands."""
    return list(_imports_of(source, module))


def _imports_of(source: str, module: str) -> Iterator[str]:
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


def test_no_files_import_each_other_in_a_circle() -> None:
    """Each can be read after those that it imports, also those that it imports late, or for its types alone."""
    known = sources()
    left = {
        module: {
            other for other in imports_of(source, module) if other in known and not f"{module}.".startswith(f"{other}.")
        }
        for module, source in known.items()
    }
    while left:
        free = {module for module, imported in left.items() if not imported & left.keys()}
        assert free, f"a circle among {sorted(left)}"
        left = {module: imported for module, imported in left.items() if module not in free}


def test_every_part_has_its_place_in_the_design() -> None:
    """A new part must say whom it may know."""
    assert {part_of(module) for module in sources()} <= set(ALLOWED)


def test_the_allowed_arrows_have_no_circle() -> None:
    arrows = dict(ALLOWED)
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
        ("gateway.core.model", "from gateway import config"),
        ("gateway.operations.read_object.get_object", "def f():\n    from gateway.edge.asgi import S3App"),
        ("gateway.policy.slots", "from ..operations import reply"),
        ("gateway.policy.slots", "from .. import operations"),
        ("gateway.edge.asgi", "from gateway.config import Settings"),
        ("gateway.unheard_of", "from gateway.core.errors import ForebayError"),
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
            "gateway.operations.read_object.get_object": "import gateway.blocks.cache\nfrom . import reply",
            "gateway.admin.operations": "from gateway import __version__",
            "gateway.s3.xml": "import re",
        }
    )
