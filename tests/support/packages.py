"""Skips tests whose packages are missing, without importing those that are there: one alone takes seconds."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """A mark for tests that need these packages."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)}: not installed; `make venv` installs what tests need"
    )
