"""The options that files give where the command line has none: a settings file, another build, a model file.

An earlier file takes precedence: see `take`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from fxpipe.cli.command import Command
from fxpipe.cli.output import note
from fxpipe.errors import FxpipeError, TaskError, near
from fxpipe.lowering.options import AUTO, CompileOptions, not_synchronous
from fxpipe.options import flags
from fxpipe.schedule import SCHEDULES, OneFOneB, kind_of
from fxpipe.task.model_options import ModelOptions

if TYPE_CHECKING:
    from fxpipe.task.model_file import Task

TAKEN = "fxpipe.taken"
"""Key of the meta of a command's context: by option, the value that a file gave, and the file's name."""

_EXCLUSIVE = (("steps", "epochs"), ("dp", "replicas"), ("cuts", "forward_at"), ("cuts", "backward_at"))
"""If one option of a pair is given, a later file does not give the other."""


@dataclass(frozen=True)
class Written:
    """What a file gives for an option: the option's flag, what is written there, and the value for the command."""

    flag: str
    text: Any
    value: Any


def options_of(command: str, *classes: type[Any]) -> dict[str, click.Option]:
    """The options of a command that are fields of these classes; all options if no class is named."""
    fxpipe = click.get_current_context().find_root().command
    assert isinstance(fxpipe, click.Group)
    click_command = fxpipe.commands[command]
    assert isinstance(click_command, Command)
    options = {str(option.name): option for group in click_command.groups.values() for option in group}
    names = {name for kind in classes for name in flags(kind)} or options
    return {name: option for name, option in options.items() if name in names and name != "settings"}


def read_options(
    where: str, texts: Mapping[str, Any], by_name: Mapping[str, click.Option], file: str
) -> dict[str, Written]:
    """The options of a file, by the names that they have in a command; `by_name` are those that it may give."""
    options = {}
    for name, text in texts.items():
        if name not in by_name:
            what = f"{where} has {name!r}, which is not an option{near(name, list(by_name))}"
            raise TaskError(what, where=file, hint=f"one of {', '.join(by_name)}")
        option = by_name[name]
        if text is None:
            continue
        try:
            options[str(option.name)] = Written(option.opts[-1], text, _read(option, text))
        except (FxpipeError, click.UsageError) as error:
            what = error.what if isinstance(error, FxpipeError) else error.message
            raise TaskError(f"{where} has {name}={text!r}: {what}", where=file) from error
    return options


def is_given(name: str) -> bool:
    """Whether the command line, or a file, has given an option of the command that runs."""
    return click.get_current_context().get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def take(options: Mapping[str, Written], file: str, left: Collection[str] = ()) -> dict[str, Written]:
    """Options of a file that nothing has given before, but for those `left`; from now on, they are given."""
    context = click.get_current_context()
    before = {name for name in {*context.params, *options} if is_given(name)}
    left = {*left, *before, *(b for pair in _EXCLUSIVE for a, b in (pair, pair[::-1]) if a in before)}
    taken = {name: one for name, one in options.items() if name not in left}
    for name, one in taken.items():
        context.params[name] = one.value
        context.set_parameter_source(name, ParameterSource.DEFAULT_MAP)
        context.meta.setdefault(TAKEN, {})[name] = one.text, Path(file).name
    return taken


def values(taken: Mapping[str, Written]) -> dict[str, Any]:
    """For the command."""
    return {name: one.value for name, one in taken.items()}


def say_given(file: str, taken: Mapping[str, Written], whom: str = "") -> None:
    """Print what a file gives, in the form of a command line; once in a run of several processes."""
    words = [whom] if whom else []
    for one in taken.values():
        for value in one.text if isinstance(one.text, (tuple, list)) else (one.text,) if one.text is not False else ():
            text = shlex.quote(str(value))
            words.append(one.flag if value is True else f"{one.flag}{'=' if text[0] == '-' else ' '}{text}")
    if len(words) > bool(whom) and os.environ.get("RANK", "0") == "0":
        note(f"{file} gives {' '.join(words)}")


def decide_schedule(options: dict[str, Any], compare: bool = False) -> bool:
    """Decide what the options --schedule and --synchronous mean together; returns whether schedules are compared.

    The option `schedule` becomes 'auto' where only `synchronous` was asked, and '1f1b' where workers have different
    numbers of replicas and none was asked.
    """
    schedule = options["schedule"]
    named = schedule != AUTO and is_given("schedule")
    if named and compare:
        raise click.UsageError(f"--compare compares all schedules: leave --schedule {schedule} out")
    if named and options["synchronous"] and schedule in SCHEDULES and not kind_of(schedule).synchronous:
        raise not_synchronous(schedule)
    if not named and schedule != AUTO and options.get("replicas"):
        options["schedule"] = OneFOneB.name  # of those for different numbers of replicas, the one for any cuts
    elif not named and (compare or options["synchronous"]):
        options["schedule"] = AUTO
    return bool(options["schedule"] == AUTO)


def compile_options_of(task: Task, left: Collection[str] = ()) -> dict[str, Any]:
    """The options that a model file gives to its compile or plan; prints them. Something else decides those `left`."""
    options, file = options_of("compile", CompileOptions, ModelOptions), str(task.file)
    taken = take(read_options("compile_options", task.compile_options, options, file), file, left)
    say_given(file, taken)
    return values(taken)


def is_number(option: click.Option) -> bool:
    """Whether values of the option are numbers, not texts to be parsed."""
    return isinstance(option.type, (click.types.IntParamType, click.types.FloatParamType))


def _read(option: click.Option, text: Any) -> Any:
    """A value, read from the text that a command line would have."""
    if option.multiple:
        if not isinstance(text, (list, tuple)):
            raise click.UsageError("this is no list")
        return tuple(_read_one(option, one) for one in text)
    return _read_one(option, text)


def _read_one(option: click.Option, text: Any) -> Any:
    kinds: tuple[type[Any], ...] = (str, int, float)
    kind = "text"
    if option.is_flag:
        kinds, kind = (bool,), "true or false"
    elif is_number(option):
        kinds, kind = (int, float), "a number"
    if not isinstance(text, kinds) or (isinstance(text, bool) and not option.is_flag):
        raise click.UsageError(f"this is not {kind}")
    return option.type.convert(str(text), None, None)
