"""A command whose options are in groups: `--help` shows what a first user needs, `--help-all` everything."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import click
from fxpipe.cli.output import echo

_GROUPS = "option_groups"
_EXAMPLES = 2
"""How many of its examples `--help` shows."""


def group(title: str, *options: Callable[..., Any], first: str = "", also: str = "") -> Callable[..., Any]:
    """Give a command some options, as a group of its help.

        @click.command("run", cls=Command)
        @group("Output", option_fields(RunOptions, "out", "trace"), click.option("--json", is_flag=True), first="out")

    Args:
        options: `click.option(…)`, `option_fields(…)`.
        first: the names of the options that `--help` shows, separated by spaces.
        also: those whose flags it names, before it says how to see all.
    """

    def none() -> None: ...

    for give in reversed(options):
        give(none)
    made = [one for one in click.command()(none).params if isinstance(one, click.Option)]
    shown, named = ([one for one in made if one.name in names.split()] for names in (first, also))

    def give_group(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, _GROUPS, ((title, made, shown, named), *getattr(function, _GROUPS, ())))
        return function

    return give_group


class Command(click.Command):
    """A command with a short and a full help; only one of them if no group says what comes first.

    Its docstring begins with a paragraph for `--help`. A paragraph of examples begins with `\\b`; `--help` shows
    the first two of them.

    Attributes:
        groups: its options, by the title of their group, in order.
        first, also: the options that `--help` shows, and those whose flags it names.
    """

    def __init__(self, **given: Any) -> None:
        groups = getattr(given["callback"], _GROUPS, ())
        given["params"] = [*given["params"], *(one for _, made, *_ in groups for one in made)]
        super().__init__(**{**given, "help": inspect.cleandoc(given["help"] or "")})
        options = [one for one in self.params if isinstance(one, click.Option)]
        self.groups: dict[str, list[click.Option]] = {title: made for title, made, *_ in groups} or {"Options": options}
        self.first: list[click.Option] = [one for *_, shown, _ in groups for one in shown] or options
        self.also: list[click.Option] = [one for *_, named in groups for one in named]
        self._all = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            hidden=True,  # the last line of `--help` names it
            callback=_show_all,
            help="Show all options, in groups.",
        )

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own parameters, `--help` and `--help-all`."""
        return [*super().get_params(ctx), self._all]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the short or the full help."""
        count = sum(map(len, self.groups.values()))
        if len(self.first) == count:
            return super().format_help(ctx, formatter)
        self.format_usage(ctx, formatter)
        whole = ctx.meta.get(_GROUPS, False)
        paragraphs = re.split(r"\n\s*\n", self.help or "")
        if not whole:
            examples = next(one for one in paragraphs if one.startswith("\b")).splitlines()[: _EXAMPLES + 1]
            paragraphs = [paragraphs[0], "\n".join(examples)]
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text("\n\n".join(paragraphs))
        for title, options in self.groups.items():
            if whole:
                with formatter.section(title):
                    for option in options:
                        _write_whole(option, ctx, formatter)
            elif rows := [_line(option, ctx) for option in options if option in self.first]:
                with formatter.section(title):
                    formatter.write_dl(rows)
        if not whole:
            formatter.write_paragraph()
            if self.also:
                formatter.write_text(f"Also {', '.join(option.opts[-1] for option in self.also)}, …")
            formatter.write_text(f"{ctx.command_path} --help-all: all {count} options, explained, and more examples.")
        return None


def _show_all(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        context.meta[_GROUPS] = True
        echo(context.get_help())
        context.exit()


def _line(option: click.Option, context: click.Context) -> tuple[str, str]:
    """The flags, the first clause of their help, and the default."""
    flags, _ = option.get_help_record(context) or ("", "")
    text = re.split(r"[.;:](?: |$)| \(| \[default", option.help or "")[0]
    return flags, f"{text} [default: {option.default}]" if option.show_default else text


def _write_whole(option: click.Option, context: click.Context, formatter: click.HelpFormatter) -> None:
    """The flags, and below them their whole help."""
    flags, text = option.get_help_record(context) or ("", "")
    formatter.write_text(flags)
    with formatter.indentation(), formatter.indentation():
        formatter.write_text(text)
