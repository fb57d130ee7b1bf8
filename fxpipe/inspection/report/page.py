"""Facts as one HTML page: its style, its script, Plotly's and the facts themselves are inside."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fxpipe.errors import BuildError
from fxpipe.typed_json import dumps

SCRIPTS = (  # in the order in which they stand in the page; one scope
    "dom.js",
    "format.js",
    "figures.js",
    "tables.js",
    "overview.js",
    "map.js",
    "tree.js",
    "edges.js",
    "marks.js",
    "balance.js",
    "timeline.js",
    "memory.js",
    "run.js",
    "schedule.js",
    "workers.js",
    "main.js",
)


def check_plotly() -> None:
    """Refuse, before any work is done, to write a page without the package that draws its charts.

    Raises:
        BuildError: Plotly is not installed.
    """
    if find_spec("plotly") is None:
        raise BuildError("--html needs the package plotly, which is not installed", hint="pip install 'fxpipe[report]'")


def write_report(facts: dict[str, Any], path: Path) -> None:
    """Write the page of `facts`, see `page`, as a whole or not at all: it appears under its name when it is complete.

    Raises:
        BuildError: Plotly is not installed, the target is not a plain file, or the disk refuses; an old page stays.
    """
    check_plotly()
    whole = page(facts)
    target = Path(os.path.realpath(path))  # a link stays, and leads to the new page
    partial = target.with_name(f".fxpipe-report-{secrets.token_hex(6)}")
    try:
        if target.exists() and not target.is_file():
            raise _refused(path, "it is a folder" if target.is_dir() else "it is no plain file")
        try:
            with partial.open("x", encoding="utf-8") as file:
                file.write(whole)
            os.replace(partial, target)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error


def _refused(path: Path, reason: str) -> BuildError:
    return BuildError(f"{path} cannot be written: {reason}", hint="choose another --html")


def page(facts: dict[str, Any]) -> str:
    """One self-contained page that shows `facts`, what `fxpipe inspect --json` prints.

    The facts stand in `<script id="facts">`, and all that the page shows is made from them when it is opened.
    """
    from plotly.offline import get_plotlyjs

    parts = {
        "style": _own("page.css"),
        "facts": embedded(facts),
        "script": "\n".join(_own(name) for name in SCRIPTS),
        "plotly": get_plotlyjs(),
    }
    for name in ("style", "script", "plotly"):
        if "</script" in parts[name].lower() or "<!--" in parts[name]:
            raise AssertionError(f"the page's {name} would end its element")
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], _own("page.html"))


def embedded(facts: dict[str, Any]) -> str:
    r"""The facts as JSON that may stand inside a script element.

    What `--json` prints, with `<` written as `\u003c`: JSON has it in strings only.
    """
    return dumps(facts).replace("<", "\\u003c")


def _own(name: str) -> str:
    return (files("fxpipe.inspection.report") / name).read_text(encoding="utf-8")
