"""`forebay writeback export`: out of a cache directory that no gateway uses, and what it says of it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner, Result

from gateway import cli
from gateway.serve.claim import lock_directory
from tests.support.cache_directory import begun
from tests.support.flushing import Buffer
from tests.support.writeback import key


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache directory with two objects in its buffer, one of them damaged."""
    directory = begun(tmp_path / "cache")
    (directory / "writeback").mkdir()

    async def write() -> None:
        buffer = Buffer(directory / "writeback")
        await buffer.put(key("well"), b"well")
        damaged = await buffer.put(key("damaged"), b"damaged")
        (directory / "writeback" / "staged" / damaged.parts[0].file.name).write_bytes(b"DAMAGED")
        await buffer.close()

    asyncio.run(write())
    return directory


def export(target: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["writeback", "export", str(target), *arguments])


def test_what_is_damaged_is_said_and_fails_the_command(cache: Path, tmp_path: Path) -> None:
    """Everything else is exported all the same; with --json the figures are a document."""
    result = export(tmp_path / "out", "--directory", str(cache))
    assert result.exit_code == 1
    assert "s3://bucket/damaged: staged file" in result.stderr
    assert "1 object is damaged and not exported" in result.stderr
    assert "1 object, 4 B, is in" in result.stdout
    again = export(tmp_path / "out", "--directory", str(cache), "--json")
    assert (again.exit_code, orjson.loads(again.stdout)["damaged"]) == (1, 1)


def test_the_configuration_names_the_directory(cache: Path, tmp_path: Path) -> None:
    """As for every other command."""
    config = tmp_path / "forebay.toml"
    config.write_text(f'[cache]\ndirectory = "{cache}"\n[origin]\nendpoint_url = "http://127.0.0.1:1"\n')
    assert "1 object, 4 B, is in" in export(tmp_path / "out", "--config", str(config)).stdout


def test_a_gateway_at_work_is_left_alone(cache: Path, tmp_path: Path) -> None:
    """Unless told otherwise."""
    lock = lock_directory(cache)
    try:
        refused = export(tmp_path / "out", "--directory", str(cache))
        assert (refused.exit_code, "a gateway is at work" in refused.stderr) == (1, True)
        assert not (tmp_path / "out").exists()
        told = export(tmp_path / "out", "--directory", str(cache), "--while-running")
        assert "1 object, 4 B, is in" in told.stdout
    finally:
        os.close(lock)


def test_what_is_no_cache_directory_is_one_line(tmp_path: Path) -> None:
    """No traceback, and nothing is made."""
    result = export(tmp_path / "out", "--directory", str(tmp_path / "none"))
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert "holds no write-back journal" in result.stderr
    assert list(tmp_path.iterdir()) == []
