"""The fields of a class of options as options of a click command."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fxpipe.options import Flag, flags

Command = Callable[..., Any]


def option_fields(options: type[Any], *names: str, **texts: str) -> Callable[[Command], Command]:
    """Give a command the flags of some fields; it gets their values as keywords, by the fields' names.

        @option_fields(CompileOptions, "workers", threads="Of a model: CPU threads of one worker.")
        def command(**asked: Any) -> int:
            options = CompileOptions(**asked)

    Args:
        options: a dataclass, whose fields were made by `fxpipe.options.option`.
        names: the fields, in the order of `--help`.
        texts: more fields, each with another help text than its own.
    """
    wanted = {**dict.fromkeys(names), **texts}

    def give(command: Command) -> Command:
        for name, text in reversed(wanted.items()):
            command = _click_option(name, flags(options)[name], text)(command)
        return command

    return give


def _click_option(name: str, flag: Flag, text: str | None) -> Callable[[Command], Command]:
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
        given = str(super().convert(value, param, ctx))
        word = isinstance(param, click.Option) and given == param.flag_value  # in place of a path
        return given if word else str(Path(given).absolute())


class _Number(click.FloatRange):
    """FloatRange lets nan through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail("nan is not a number", param, ctx)
        return number
