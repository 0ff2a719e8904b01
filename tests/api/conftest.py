"""Tests that schemathesis generates when they are collected: `make test-api` installs it."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("schemathesis") else ["test_admin_api.py"]
"""Named alone, as `make test-api` names it, a file that is not collected is a failure."""
