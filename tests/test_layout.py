"""docs/layout.md names every file and no other, the wheel has every package, and imports point one way."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"fxpipe": "fxpipe", "passes": "fxpipe.passes", "cli": "fxpipe.cli"}  # folder: installed name
DATA = {"fxpipe.pages": "docs/errors"}  # installed name: folder without code
ENTRY = "fxpipe/__main__.py"  # `python -m fxpipe` is the command line: the one file below the arrow that starts it
PATH = re.compile(r"`((?:fxpipe|passes|cli|tests|examples|benchmarks|docs)/[\w./]*)`")


def sources() -> list[str]:
    """Every Python file of the three packages, relative to the repository."""
    return sorted(str(f.relative_to(ROOT)) for folder in PACKAGES for f in (ROOT / folder).rglob("*.py"))


def mentioned() -> set[str]:
    """Every path that layout.md names."""
    return set(PATH.findall((ROOT / "docs" / "layout.md").read_text(encoding="utf-8")))


def test_every_file_is_mentioned() -> None:
    assert sorted(set(sources()) - mentioned()) == []


def test_every_mentioned_path_exists() -> None:
    assert sorted(path for path in mentioned() if not (ROOT / path).exists()) == []


def test_the_wheel_has_every_package() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert configuration["package-dir"] == {name: folder for folder, name in PACKAGES.items()} | DATA
    folders = {Path(source).parent for source in sources()}
    assert [str(f) for f in sorted(folders) if not (ROOT / f / "__init__.py").is_file()] == []
    expected = {".".join((PACKAGES[f.parts[0]], *f.parts[1:])) for f in folders}
    assert sorted(configuration["packages"]) == sorted(expected | set(DATA))


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """Every module that the source imports, and whether only inside a function."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((name.name, inside) for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = "." * child.level + (child.module or "")
                yield from ((f"{base}.{name.name}", inside) for name in child.names)
            else:
                yield from walk(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    yield from walk(ast.parse(source), False)


def offences(path: str, source: str) -> list[str]:
    """Each import of a file that points against the arrow cli → passes → fxpipe."""
    package = path.split("/")[0]
    found = []
    for module, inside in imports(source):
        top = ".".join(module.split(".")[:2])
        wrong = (
            module.startswith(".")
            or top.split(".")[0] in ("passes", "cli")
            or (top == "fxpipe.cli" and package != "cli" and path != ENTRY)
            or (top == "fxpipe.passes" and package == "fxpipe" and not inside)
        )
        if wrong:
            found.append(f"{path} imports {module}")
    return found


@pytest.mark.parametrize("path", sources())
def test_imports_point_one_way(path: str) -> None:
    assert offences(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("fxpipe/a.py", "from fxpipe.passes import default_passes", True),
        ("fxpipe/a.py", "from fxpipe import passes", True),
        ("fxpipe/a.py", "if TYPE_CHECKING:\n    import fxpipe.passes.cut", True),
        ("fxpipe/a.py", "def f():\n    from fxpipe.passes import default_passes", False),
        ("fxpipe/a.py", "def f():\n    import fxpipe.cli.main", True),
        ("fxpipe/a.py", "from fxpipe.passing import nothing", False),
        ("passes/a.py", "def f():\n    from fxpipe.cli.output import size", True),
        ("passes/a.py", "from fxpipe.passes.fold import remove_dead", False),
        ("passes/a.py", "from passes.fold import remove_dead", True),
        ("passes/a.py", "from .fold import remove_dead", True),
        ("cli/a.py", "from fxpipe.passes import Options\nfrom fxpipe.cli.output import size", False),
    ],
)
def test_the_arrow_is_checked(path: str, source: str, wrong: bool) -> None:
    assert bool(offences(path, source)) is wrong
