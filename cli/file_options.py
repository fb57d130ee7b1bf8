"""The options that a model file gives, `compile_options` and `run_options`, where the command line has none."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from fxpipe.cli.option_fields import click_type
from fxpipe.cli.output import note

from fxpipe.errors import FxpipeError, TaskError, near
from fxpipe.lowering.options import CompileOptions
from fxpipe.options import Flag, flags
from fxpipe.task.model_options import ModelOptions

if TYPE_CHECKING:
    from fxpipe.task.model_file import Task


def file_options(
    hook: str, given: Mapping[str, Any], *classes: type[Any], file: str, left: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Those of the file's options that the command line does not give, read as it would read them.

    Args:
        hook: what the file calls them.
        classes: whose fields they are.
        left: fields that something else decides here.

    Raises:
        TaskError: one is no option, or has a value that it cannot have.
    """
    known = {name: flag for kind in classes for name, flag in flags(kind).items()}
    known.pop("settings", None)  # the file has read them by now
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise TaskError(
                f"{hook} has {name!r}, which is no option{near(name, list(known))}",
                where=file,
                hint=f"one of {', '.join(known)}",
            )
        if value is None:
            continue
        try:
            found[name] = _read(known[name], value)
        except (FxpipeError, click.UsageError) as error:
            what = error.what if isinstance(error, FxpipeError) else error.message
            raise TaskError(f"{hook} has {name}={value!r}: {what}", where=file) from error
    source = click.get_current_context().get_parameter_source
    return {
        name: value
        for name, value in found.items()
        if name not in left and source(name) in (None, ParameterSource.DEFAULT)
    }


def compile_options_of(task: Task, left: tuple[str, ...] = (), runs: str = "") -> dict[str, Any]:
    """The options that a model file gives to what compiles or plans it, as `file_options`; says them.

    Args:
        left: fields that something else decides here.
        runs: what it gives runs, as a command line has it, to be said, too.
    """
    kinds, file = (CompileOptions, ModelOptions), str(task.file)
    found = file_options("compile_options", task.compile_options, *kinds, file=file, left=left)
    if said := [text for text in (as_flags(found, *kinds), runs) if text]:
        note(f"{file} gives {'; runs get '.join(said) if found else f'runs {said[0]}'}")
    return found


def as_flags(options: Mapping[str, Any], *classes: type[Any]) -> str:
    """The options as a command line has them."""
    known = {name: flag for kind in classes for name, flag in flags(kind).items()}
    said = []
    for name, value in options.items():
        flag = known[name].names[-1]
        for one in value if isinstance(value, (tuple, list)) else (value,):
            text = shlex.quote(str(one))
            said += [flag] if one is True else [] if one is False else [f"{flag}{'=' if text[0] == '-' else ' '}{text}"]
    return " ".join(said)


def _read(flag: Flag, value: Any) -> Any:
    """A value as the flag's own text gives it.

    Raises:
        FxpipeError, click.UsageError: the option cannot have it.
    """
    if isinstance(flag.default, bool):
        return click.BOOL.convert(str(value), None, None)
    kind = click.types.convert_type(click_type(flag))
    if isinstance(flag.default, tuple):
        return tuple(kind.convert(str(one), None, None) for one in value)
    return kind.convert(str(value), None, None)
