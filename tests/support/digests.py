"""Digests by name, kept in a file before a change and compared with after it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

Digests = dict[str, str]
"""By what is digested."""

PASSING = ("format", "fxpipe", "torch", "digest", "model_file", "watched")
"""Fields of a plan that name versions, files and lines of files."""


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()[:16]


def of_plan(build: Path) -> str:
    """Of a saved build's plan, but for what changes from version to version, and from one folder to another."""
    plan = json.loads((build / "plan.json").read_text())
    return digest(json.dumps({key: plan[key] for key in plan if key not in PASSING}))


def write_or_compare(names: Iterable[str], digests: Callable[[str], Digests]) -> int:
    """`write FILE` or `compare FILE`, as the command line says; the exit code.

    Args:
        names: of what is written.
        digests: of a name.
    """
    verb, file = sys.argv[1], Path(sys.argv[2])
    if verb == "write":
        file.write_text(json.dumps({name: digests(name) for name in names}, indent=1))
        return 0
    different = 0
    for name, before in json.loads(file.read_text()).items():
        now = digests(name)
        if parts := [part for part in {**before, **now} if before.get(part) != now.get(part)]:
            different += 1
            print(f"{name}: {', '.join(parts)}", flush=True)
    print(f"{different} differ")
    return different > 0
