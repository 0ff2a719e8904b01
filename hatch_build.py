"""Builds the library of `gateway/md5_lanes/`, where there is a C compiler, and puts the documentation into the wheel.

Without a compiler the wheel is pure.
An editable installation gets it into the source tree, where nothing else is written.
"""

from __future__ import annotations

import runpy
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PARTS = Path("gateway", "md5_lanes")


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """What `[tool.hatch.build.targets.wheel.hooks.custom]` asks for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Hatchling's name for: before the wheel is put together."""
        made = runpy.run_path(str(Path(self.root) / _PARTS / "build.py"))
        library: Path = made["LIBRARY"]
        self._built = tempfile.TemporaryDirectory()
        target = library if version == "editable" else Path(self._built.name) / library.name
        why_not = made["build"](target)
        if why_not is not None:
            self.app.display_info(f"MD5s are computed one at a time: {why_not}")
        elif version != "editable":
            build_data["force_include"][str(target)] = str(_PARTS / library.name)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        if version != "editable":  # the admin port shows them
            for page in Path(self.root, "docs").glob("*.md"):
                build_data["force_include"][str(page)] = f"gateway/docs/{page.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Hatchling's name for: behind it."""
        self._built.cleanup()
