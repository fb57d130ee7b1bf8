"""A command: options in groups and from classes of options; `--help` shows those needed first, `--help-all` all."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fxpipe.cli.output import echo
from fxpipe.options import Flag, flags

Function = Callable[..., Any]
"""What becomes a command."""

_GROUPS = "option_groups"
_EXAMPLES = 2
"""How many of its examples `--help` shows."""


def group(title: str, *options: Callable[..., Any], first: str = "", also: str = "") -> Callable[..., Any]:
    """Give a command some options, as a group of its help.

        @click.command("run", cls=Command)
        @group("Output", option_fields(RunOptions, "out", "trace"), click.option("--json", is_flag=True), first="out")

    `first` names the options that `--help` shows, with spaces between; `also` those whose flags it only names.
    """

    def none() -> None: ...

    for give in reversed(options):
        give(none)
    click_options = [one for one in click.command()(none).params if isinstance(one, click.Option)]
    shown, named = ([one for one in click_options if one.name in names.split()] for names in (first, also))

    def give_group(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, _GROUPS, ((title, click_options, shown, named), *getattr(function, _GROUPS, ())))
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

    def __init__(self, **keywords: Any) -> None:
        groups = getattr(keywords["callback"], _GROUPS, ())
        keywords["params"] = [*keywords["params"], *(one for _, some, *_ in groups for one in some)]
        super().__init__(**{**keywords, "help": inspect.cleandoc(keywords["help"] or "")})
        options = [one for one in self.params if isinstance(one, click.Option)]
        self.groups: dict[str, list[click.Option]] = {title: some for title, some, *_ in groups} or {"Options": options}
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


def _show_all(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
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


TYPED = "fxpipe.typed"
"""Key of the meta of the command's context: the model file's own command line."""


class WithArguments(Command):
    """A command that gets what comes after `--` as `arguments`, which is None where there is no `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take them from the end of the command line."""
        at = args.index("--") if "--" in args else None
        ctx.meta[TYPED] = args[:at]
        try:
            remaining = super().parse_args(ctx, args[:at])
        except click.NoSuchOption as error:
            what = f"No such option {error.option_name!r}; arguments of the model file come after --"
            raise click.NoSuchOption(error.option_name, what, error.possibilities, error.ctx) from error
        ctx.params["arguments"] = None if at is None else tuple(args[at + 1 :])
        return remaining

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """As `fxpipe run [OPTIONS] BUILD [-- ARGUMENTS]`."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS]"]


def option_fields(options: type[Any], *names: str, **texts: str) -> Callable[[Function], Function]:
    """Give a command the flags of some fields; it gets their values as keywords, by the fields' names.

        @option_fields(CompileOptions, "workers", threads="Of a model: CPU threads of one worker.")
        def command(**asked: Any) -> int:
            options = CompileOptions(**asked)

    The fields were made by `fxpipe.options.option`; each of `texts` gets another help text than its own.
    """
    texts_by_name = {**dict.fromkeys(names), **texts}

    def give(command: Function) -> Function:
        for name, text in reversed(texts_by_name.items()):
            command = _click_option(name, flags(options)[name], text)(command)
        return command

    return give


def _click_option(name: str, flag: Flag, text: str | None) -> Callable[[Function], Function]:
    without_value: dict[str, Any] = {} if flag.flag_value is None else {"flag_value": flag.flag_value}
    switch, repeated = isinstance(flag.default, bool), isinstance(flag.default, tuple)
    return click.option(
        *flag.names,
        name,
        type=None if switch else click_type(flag),
        is_flag=switch,
        multiple=repeated,
        default=None if repeated else flag.default,
        show_default=not (switch or repeated or flag.default is None),
        metavar=flag.metavar,
        **without_value,
        help=text or flag.help,
    )


def click_type(flag: Flag) -> Any:
    """The click type that reads the flag's value."""
    if flag.choices:
        return click.Choice(flag.choices)
    if flag.path is not None:
        return AbsolutePath(dir_okay=flag.path != "file", file_okay=flag.path != "folder")
    if flag.kind is int and flag.minimum is not None:
        return click.IntRange(min=int(flag.minimum), max=flag.maximum)
    if flag.kind is float:
        least = flag.minimum if flag.above is None else flag.above
        return _Number(least, flag.below, min_open=flag.above is not None, max_open=flag.below is not None)
    return flag.kind


class AbsolutePath(click.Path):
    """A path, made absolute: user code may change the working directory later."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = str(super().convert(value, param, ctx))
        word = isinstance(param, click.Option) and path == param.flag_value  # in place of a path
        return path if word else str(Path(path).absolute())


class _Number(click.FloatRange):
    """FloatRange lets nan through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail("nan is not a number", param, ctx)
        return number
