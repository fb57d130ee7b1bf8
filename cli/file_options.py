"""The options that files give where the command line has none: a settings file, another build, a model file.

An earlier file takes precedence: see `take`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from fxpipe.cli.command import TYPED, Command
from fxpipe.cli.output import note
from fxpipe.errors import FxpipeError, TaskError, near
from fxpipe.lowering.option_rules import not_synchronous
from fxpipe.lowering.options import AUTO, CompileOptions
from fxpipe.options import flags
from fxpipe.plan.user_files import ModelFileSpec
from fxpipe.schedule import SCHEDULES, OneFOneB, kind_of
from fxpipe.settings import pairs, texts
from fxpipe.task.model_options import ModelOptions
from fxpipe.typed_json import explained, parse_toml

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


NAME = "fxpipe.toml"
TABLES = ("compile", "run", "set")
_HINT = (
    "it has the tables [compile] and [run], with options as `clip-norm = 1.0`, and [set], with values of settings; "
    "--config none reads no file"
)
_TYPED_ONLY = ("after", "as_json", "config", "print_config", "resume")
"""Options of one call of a command."""
_SETTINGS = "fxpipe.settings"
"""Key of the meta of a command's context: the settings that the file gave."""

config = click.option(
    "--config",
    type=click.Path(dir_okay=False),
    metavar="FILE|none",
    help="Take options from this TOML file; none: from no file. [default: fxpipe.toml next to the model file]",
)
print_config = click.option(
    "--print-config",
    is_flag=True,
    help="Print all options as such a file, with the source of each, and do nothing else.",
)


@dataclass(frozen=True)
class SettingsFile:
    """What the file gives; empty if there is no file."""

    path: Path | None = None
    # the options by table, and by their names in the commands
    tables: Mapping[str, Mapping[str, Written]] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)  # the values of settings, as texts

    @staticmethod
    def of(config: str | None, model: Path | None) -> SettingsFile:
        """The file that --config names; else the one next to the model file, if it is there."""
        path = Path(config) if config is not None else None if model is None else model.parent / NAME
        if config == "none" or path is None or (config is None and not os.path.lexists(path)):
            return SettingsFile()
        with explained(path, error=TaskError, hint=_HINT):
            body = parse_toml(path)
        for name, table in body.items():
            if name not in TABLES or not isinstance(table, dict):
                what = f"{path.name} has {name!r}, which is not a table of options{near(name, TABLES)}"
                raise TaskError(what, where=str(path), hint=_HINT)
        keys_by_table = {table: _keys(options_of(table)) for table in TABLES[:2]}
        tables = {
            table: read_options(f"[{table}]", _dashed(body.get(table, {}), path), keys, str(path))
            for table, keys in keys_by_table.items()
        }
        return SettingsFile(path, tables, {name: _text(name, one, path) for name, one in body.get("set", {}).items()})

    def options(self, table: str, left: Collection[str] = ()) -> dict[str, Any]:
        """The options (and `settings`) that nothing has given before, which are printed, and given from now on."""
        context = click.get_current_context()
        taken = take(self.tables.get(table, {}), str(self.path), left)
        typed = context.params["settings"]
        more = {} if "settings" in left else {k: v for k, v in self.settings.items() if k not in pairs(typed)}
        if more:
            context.params["settings"] = (*texts(more), *typed)
            context.meta[_SETTINGS] = more, self.path
            taken |= {"settings": Written("--set", texts(more), context.params["settings"])}
        if self.path is not None:
            say_given(self.path.name, taken)
        return values(taken)


def config_text(captured: ModelFileSpec | None = None) -> str:
    """All options of the command that runs, as a settings file. Comments are defaults, what a run takes from its build,
    and the arguments after two dashes."""
    context = click.get_current_context()
    command = context.command
    assert isinstance(command, Command)
    name = command.name
    lines = [
        f"# Options of this {name}. Save as {NAME} next to the model file; `fxpipe {name} --help-all` explains each.",
        f"[{name}]",
    ]
    for title, options in command.groups.items():
        rows = [_row(key, option, context) for key, option in _keys({str(one.name): one for one in options}).items()]
        lines += ["", f"# {title}", *rows] if rows else []
    more, path = context.meta.get(_SETTINGS, ({}, None))
    settings = pairs(context.params["settings"])
    written = {name: f"{_key(name)} = {_toml(_number(text))}" for name, text in settings.items()}
    last = [f"{row}  # {path.name if name in more else 'command line'}" for name, row in written.items()]
    last[:0] = ["[set]"] if settings else []
    if captured is not None:
        of_build = {name: text for name, text in captured.given.items() if name not in settings}
        last += [f"# {_key(name)} = {_toml(_number(text))}  # build" for name, text in of_build.items()]
    arguments, whence = context.params["arguments"], "command line"
    if arguments is None and captured is not None:
        arguments, whence = captured.given_arguments, "build"
    last += [f"# arguments after -- = {_toml(shlex.join(arguments))}  # {whence}"] if arguments else []
    lines += ["", *last] if last else []
    return "\n".join(lines) + "\n"


def _row(key: str, option: click.Option, context: click.Context) -> str:
    name = str(option.name)
    text, whence = context.params[name], "default"
    if name in context.meta.get(TAKEN, {}):
        text, whence = context.meta[TAKEN][name]
    elif context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        whence = "command line"
        if not option.is_flag and not is_number(option):
            text = context.command.make_parser(context).parse_args(list(context.meta[TYPED]))[0][name]
    mark = "# " if whence == "default" or text is None else ""
    if text in (None, ()):
        default = re.search(r"\[default: (.*)\]", option.help or "")
        form = (option.get_help_record(context) or ("", ""))[0].partition(" ")[2] or "true"
        return f"# {key} = {form}  # {whence}{f': {default[1]}' if default and whence == 'default' else ''}"
    return f"{mark}{key} = {_toml(text)}  # {whence}"


def _keys(options: Mapping[str, click.Option]) -> dict[str, click.Option]:
    """The options that a file may have, by their keys there."""
    return {
        option.opts[-1].removeprefix("--"): option
        for name, option in options.items()
        if name not in (*_TYPED_ONLY, "settings")
    }


def _dashed(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The table with dashes in its keys; a file may have underscores."""
    dashed: dict[str, Any] = {}
    for name, one in table.items():
        if (key := name.replace("_", "-")) in dashed:
            raise TaskError(f"{path.name} has {key!r} twice, with a dash and with an underscore", where=str(path))
        dashed[key] = one
    return dashed


def _text(name: str, value: Any, path: Path) -> str:
    """The value of a setting as --set gives it."""
    if not isinstance(value, (bool, int, float, str)):
        what = f"[set] has {name}={value!r}, which is not a number, a text, true or false"
        raise TaskError(what, where=str(path), hint='a name with a dot needs quotes: "model.width" = 64')
    return str(value).lower() if isinstance(value, bool) else str(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.A) else _toml(name)


def _number(text: str) -> bool | int | float | str:
    """The value of a setting as a number, true or false, if these are written like this text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with suppress(ValueError):
            if str(kind(text)) == text:
                return kind(text)
    return text


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)
