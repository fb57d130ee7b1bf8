"""Planted faults: each is one mistake in one room, and the law must find it.

    python tests/law/faults.py                 plant every fault, say which are found by the quick cases
    python tests/law/faults.py --only clip     those whose names have this in them
    python tests/law/faults.py --all-cases     forget which case found a fault last time

A fault is planted in a copy of the product, never in the tree. `found.json` remembers which case found it, and that
one is tried first: then the proof takes seconds a fault. If that case no longer does, all of them are tried.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOUND = HERE / "found.json"


@dataclass(frozen=True)
class Fault:
    """One text of a file, which must be there once, in place of another."""

    name: str
    file: str
    old: str
    new: str


FAULTS = [Fault(**row) for row in tomllib.loads((HERE / "faults.toml").read_text())["fault"]]


def planted(fault: Fault, tree: Path) -> None:
    """Plant a fault in a copy of the product.

    Raises:
        SystemExit: its text is not there, or more than once: the code has changed, and the list must follow.
    """
    place = _in_tree(fault.file)
    path = tree / place
    text = path.read_text()
    if text.count(fault.old) != 1:
        sys.exit(f"{fault.name}: {fault.file} has this {text.count(fault.old)} times, not once: {fault.old!r}")
    path.write_text(text.replace(fault.old, fault.new))


def _in_tree(file: str) -> str:
    """Where a file of the repository is in an installed fxpipe."""
    return file if file.startswith("fxpipe/") else f"fxpipe/{file}"


def copied(tree: Path) -> None:
    """The product as it is installed, in a folder."""
    shutil.copytree(ROOT / "fxpipe", tree / "fxpipe", ignore=shutil.ignore_patterns("__pycache__"))


def finder(fault: Fault, first: str | None, more: Sequence[str]) -> str | None:
    """The case that finds a fault, None if none does; `first` is tried before all others."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copied(tree)
        planted(fault, tree)
        for only in ([first] if first else []), []:
            selected = [f"{HERE / 'test_law.py'}::test_the_law[{case}]" for case in only] or [str(HERE / "test_law.py")]
            command = [
                sys.executable,
                "-P",
                "-m",
                "pytest",
                "-q",
                "-x",
                "--no-header",
                "-p",
                "no:cacheprovider",
                *selected,
            ]
            command += [] if only else ["-m", "not slow", "-n", "2", *more]
            run = subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": str(tree)},
                capture_output=True,
                text=True,
                cwd=ROOT,
                check=False,
            )
            for line in run.stdout.splitlines():
                if line.startswith(("FAILED ", "ERROR ")) and "::" in line:
                    return line.split("[", 1)[-1].split("]", 1)[0] if "[" in line else line.split("::")[1].split()[0]
            if not only and run.returncode != 0:
                sys.exit(f"{fault.name}: the tests did not run\n{run.stderr[-2000:]}")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this in their names")
    parser.add_argument("--all-cases", action="store_true", help="try all cases of each")
    asked, more = parser.parse_known_args()
    known: dict[str, str] = json.loads(FOUND.read_text()) if FOUND.is_file() else {}
    chosen = [fault for fault in FAULTS if asked.only in fault.name]
    missed = []
    for fault in chosen:
        case = finder(fault, None if asked.all_cases else known.get(fault.name), more)
        print(f"{'found' if case else 'MISSED':6}  {fault.name:60}  {case or ''}", flush=True)
        if case is None:
            missed.append(fault.name)
            known.pop(fault.name, None)
        else:
            known[fault.name] = case
        FOUND.write_text(json.dumps(known, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    print(f"{len(chosen) - len(missed)} of {len(chosen)} planted faults found")
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
