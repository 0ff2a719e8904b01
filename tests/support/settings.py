"""What the tests of the configuration share."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.loading import LoadedSettings, load_settings
from gateway.config.problems import SettingsError

SECRET = "s3cr3t-never-to-be-seen"


def load(tmp_path: Path, text: str, **environment: str) -> LoadedSettings:
    file = tmp_path / "forebay.toml"
    file.write_text(text, encoding="utf-8")
    return load_settings(file, environment)


def problems(tmp_path: Path, text: str, **environment: str) -> dict[str, str]:
    """Key -> message of everything that is refused, without the name of the file that it came from."""
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, text, **environment)
    of_file = f" (from {tmp_path / 'forebay.toml'})"
    return {problem.key: str(problem).replace(of_file, "") for problem in refused.value.problems}
