"""`make compat`: the quick tests of what leans on torch, with every version of torch that fxpipe is tested with.

Each version has a virtual environment in .venv-compat/, which is kept. A version that fails stops none after it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fxpipe.tracing.torch_versions import TESTED

ROOT = Path(__file__).parent.parent
PLACE = ROOT / ".venv-compat"
ENDS = "test_tiny.py law test_microbatch_loss.py features"
ROOMS = "task policy ir tracing optimizer costs passes stages onnx engines runtime export measure lowering"
COMMANDS = "cli/test_doctor.py cli/test_inspect.py"
TESTS = [f"tests/{name}" for name in f"{ENDS} {ROOMS} {COMMANDS}".split()]


class Result(NamedTuple):
    """What pytest counted with one version of torch; `wrong` says what went wrong, if anything did."""

    version: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    wrong: str = ""


def main() -> int:
    """Exit code 0 if every version that was asked for has passed."""
    asked = _arguments()
    results = [run(version, asked.tests, asked.jobs) for version in asked.versions]
    print(f"\n{table(results)}")
    return 1 if any(result.wrong for result in results) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run tests with several versions of torch.")
    parser.add_argument("--versions", nargs="+", default=TESTED, help=f"of torch (default {' '.join(TESTED)})")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes of pytest (default 2)")
    parser.add_argument("tests", nargs="*", default=TESTS, help="files, or folders of them")
    return parser.parse_args()


def run(version: str, tests: Sequence[str], jobs: int) -> Result:
    """Run the quick ones of `tests` with one version of torch."""
    print(f"\ntorch {version}", flush=True)
    python = PLACE / version / "bin" / "python"
    if not install(version, python):
        return Result(version, wrong="not installed: pip says why")
    with tempfile.TemporaryDirectory(prefix="fxpipe_compat_") as folder:
        report = Path(folder) / "report.xml"
        how = f"-m pytest -q -n {jobs} --dist worksteal".split()
        command = [python, *how, "-m", "not slow", f"--junitxml={report}", *tests]
        code = subprocess.run(command, cwd=ROOT).returncode
        return counted(version, code, report)


def install(version: str, python: Path) -> bool:
    """Set an environment up, or bring it up to date with pyproject.toml; false if pip fails."""
    done = python.parent.parent / ".installed"
    needs = ROOT / "pyproject.toml"
    if done.is_file() and done.stat().st_mtime > needs.stat().st_mtime:
        return True
    if not python.is_file():
        venv.create(python.parent.parent, with_pip=True)
    pip = [python, "-m", "pip", "install", "-q", "-e", f"{ROOT}[dev,onnxruntime]", f"torch=={version}"]
    if subprocess.run(pip).returncode != 0:
        return False
    done.touch()
    return True


def counted(version: str, code: int, report: Path) -> Result:
    """What pytest reported, in JUnit's form, before it ended with exit code `code`."""
    if not report.is_file():
        return Result(version, wrong=f"pytest ended with code {code}")
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    tests, failures, errors, skipped = (
        sum(column)
        for column in zip(
            *([int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")] for suite in suites),
            strict=True,
        )
    )
    failed = failures + errors
    wrong = "failed" if failed else f"pytest ended with code {code}" if code else ""
    return Result(version, tests - failed - skipped, failed, skipped, wrong)


def table(results: Sequence[Result]) -> str:
    """A line for each version."""
    lines = [f"{'torch':<10} {'passed':>7} {'failed':>7} {'skipped':>7}"]
    lines += [f"{r.version:<10} {r.passed:>7} {r.failed:>7} {r.skipped:>7}  {r.wrong}".rstrip() for r in results]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
