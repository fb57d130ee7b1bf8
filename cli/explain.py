"""`fxpipe explain`: the pages of `docs/errors`, in a terminal."""

from __future__ import annotations

from pathlib import Path

import click

import fxpipe
from fxpipe.cli.command import Command
from fxpipe.cli.output import echo
from fxpipe.errors import FxpipeError, near

FOLDER = Path(fxpipe.__file__).parent / "pages"


def titles() -> dict[str, str]:
    """Every page's title, by the page's name."""
    pages = sorted(path for path in FOLDER.glob("*.md") if path.stem != "README")
    return {path.stem: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in pages}


def text_of(name: str) -> str:
    """A page's text."""
    pages = titles()
    if name not in pages:
        raise FxpipeError(f"there is no page {name!r}{near(name, pages)}", hint=f"pages: {', '.join(pages)}")
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
    pages = titles()
    width = max(map(len, pages))
    for name, title in pages.items():
        echo(f"{name:<{width}}  {title}")
    return 0
