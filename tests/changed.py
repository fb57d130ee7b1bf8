"""Prints the folders of tests whose rooms have changed lately: CI runs their slow tests first.

    python tests/changed.py ['12 hours ago']

A room's tests are in the folder of its name. A test that changed counts as its folder.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def folders(paths: set[str]) -> list[str]:
    """Of the tests of these files, where there is such a folder."""
    found = set()
    for path in map(Path, paths):
        top, *rest = path.parts
        room = top if top in ("passes", "cli") else rest[0] if top in ("fxpipe", "tests") and len(rest) > 1 else None
        if room is not None and (ROOT / "tests" / room).is_dir():
            found.add(f"tests/{room}")
    return sorted(found)


def changed(since: str) -> set[str]:
    """The files that commits since then have changed."""
    git = ["git", "log", f"--since={since}", "--name-only", "--format="]
    return set(subprocess.run(git, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


if __name__ == "__main__":
    print(*folders(changed(*sys.argv[1:] or ["12 hours ago"])))
