"""`fxpipe explain`: the pages of `docs/errors`, in a terminal; once installed, they are next to this file."""

from __future__ import annotations

from pathlib import Path

import click
from fxpipe.cli.command import Command
from fxpipe.cli.output import echo

from fxpipe.errors import FxpipeError, near

_UP = Path(__file__).parents[1]
FOLDER = _UP / "pages" if (_UP / "pages").is_dir() else _UP / "docs" / "errors"


def titles() -> dict[str, str]:
    """Every page's title, by the page's name."""
    pages = sorted(path for path in FOLDER.glob("*.md") if path.stem != "README")
    return {path.stem: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in pages}


def text_of(name: str) -> str:
    """A page's text.

    Raises:
        FxpipeError: there is no such page.
    """
    known = titles()
    if name not in known:
        raise FxpipeError(f"there is no page {name!r}{near(name, known)}", hint=f"pages: {', '.join(known)}")
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


@click.command("explain", cls=Command)
@click.argument("page", required=False)
def explain_command(page: str | None) -> int:
    """Show the page on an error: what causes it, and code that works. Without PAGE, list the pages.

    \b
    fxpipe explain
    fxpipe explain data-dependent
    """
    if page is not None:
        echo(text_of(page).rstrip())
        return 0
    found = titles()
    width = max(map(len, found))
    for name, title in found.items():
        echo(f"{name:<{width}}  {title}")
    return 0
