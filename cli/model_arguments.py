"""A model file's own command line: what comes after two dashes."""

from __future__ import annotations

import click
from fxpipe.cli.command import Command

TYPED = "fxpipe.typed"
"""Key of the meta of the command's context: the model file's own command line."""


class WithArguments(Command):
    """A command that gets what comes after `--` as `arguments`, which is None where there is no `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take them from the end of the command line."""
        at = args.index("--") if "--" in args else None
        ctx.meta[TYPED] = args[:at]
        try:
            rest = super().parse_args(ctx, args[:at])
        except click.NoSuchOption as error:
            what = f"No such option {error.option_name!r}; arguments of the model file come after --"
            raise click.NoSuchOption(error.option_name, what, error.possibilities, error.ctx) from error
        ctx.params["arguments"] = None if at is None else tuple(args[at + 1 :])
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """As `fxpipe run [OPTIONS] BUILD [-- ARGUMENTS]`."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS]"]
