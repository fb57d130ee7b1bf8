"""`fxpipe explain`: the pages on errors, in a terminal."""

from __future__ import annotations

import click
from fxpipe.cli.output import echo


@click.command("explain")
@click.argument("page", required=False)
def explain_command(page: str | None) -> int:
    """Show the page on an error: what causes it, and code that works. Without PAGE, list the pages.

    \b
    fxpipe explain
    fxpipe explain data-dependent
    """
    from fxpipe.cli import explanations

    if page is not None:
        echo(explanations.page(page).rstrip())
        return 0
    titles = explanations.titles()
    width = max(map(len, titles))
    for name, title in titles.items():
        echo(f"{name:<{width}}  {title}")
    return 0
