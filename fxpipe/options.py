"""Options as values: a class of options is the one place that defines an option, for Python and the command line.

    @dataclass(frozen=True)
    class CompileOptions:
        workers: int = option(2, "-n", "--workers", minimum=1, help="Number of stages.")
        pad_to: int | None = option(None, minimum=1, help="Make lengths multiples of this.")  # --pad-to

`cli/command.py` gives a command the flags of such fields. Imports no torch, so that `--help` is instant.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import numbers
import os
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from fxpipe.errors import FxpipeError, near

Options = TypeVar("Options")
_FLAG, _INNER = "flag", "inner"
_SAME: Any = object()
_UNFIT: Any = object()
_WORDS = {bool: "True or False", str: "a text", type(None): "None", abc.Callable: "a function"} | {
    abc.Mapping: "a dictionary"
}


@dataclass(frozen=True)
class Flag:
    """How an option is given on the command line, and what records it.

    Attributes:
        names: `-n`, `--workers`; by default made from the field's name, as `--pad-to`.
        help: its text in `--help`.
        default: its value if not given. True or False make a switch, a tuple an option to repeat; `--help` shows any
            other but None.
        kind: reads one value: int, float, str, or a function that raises FxpipeError. By default the type of the
            default or the minimum, if they are numbers.
        minimum, above: a number's least value, or a bound that it must exceed.
        below: a bound that it must not reach.
        maximum: a whole number's greatest value.
        choices: the allowed values.
        path: a file, a folder, or any path.
        metavar: the name of the value in `--help`.
        flag_value: the value if the flag is given without one; None requires a value.
        kept: whether the numbers of a run depend on it: checkpoints save it, and a resumed run takes it over.
        shown: whether `run.json` has it, and everything that shows or compares runs.
    """

    names: tuple[str, ...]
    help: str
    default: Any = None
    kind: Callable[[Any], Any] = str
    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    path: Literal["file", "folder", "any"] | None = None
    metavar: str | None = None
    flag_value: str | None = None
    kept: bool = False
    shown: bool = False


def option(default: Any, *names: str, help: str, on_command_line: Any = _SAME, **more: Any) -> Any:
    """A dataclass field that is also an option of the command line.

    Args:
        default: the field's.
        names: the flags, if they differ from the field's name.
        on_command_line: the default there, if it differs.
        more: the other attributes of `Flag`.
    """
    shown = default if on_command_line is _SAME else on_command_line
    number = next((n for n in (shown, more.get("minimum")) if isinstance(n, (int, float))), None)
    kind = more.pop("kind", str if number is None else type(number))
    return dataclasses.field(default=default, metadata={_FLAG: Flag(names, help, shown, kind, **more)})


def optional(options: type[Any], name: str) -> Any:
    """A field with the flag and the bounds of an option of another class, and no default."""
    flag = next(field for field in dataclasses.fields(options) if field.name == name).metadata[_FLAG]
    return dataclasses.field(default=None, metadata={_FLAG: dataclasses.replace(flag, default=None)})


def inner(default: Any = dataclasses.MISSING) -> Any:
    """A field that fxpipe itself sets: no keyword of a public function."""
    return dataclasses.field(default=default, metadata={_INNER: True})


def flags(options: type[Any]) -> dict[str, Flag]:
    """The flags of a class of options, by field; fields that were not made by `option` have none."""
    fields = [field for field in dataclasses.fields(options) if _FLAG in field.metadata]
    return {field.name: _named(field.metadata[_FLAG], field.name) for field in fields}


def absolute_paths(options: Any) -> None:
    """Make the paths among the options absolute, in place: user code may change the working directory later."""
    for name, flag in flags(type(options)).items():
        value = getattr(options, name)
        if flag.path is not None and value not in (None, flag.flag_value):
            object.__setattr__(options, name, str(Path(value).absolute()))


def check(options: Any) -> None:
    """Refuse values that the types, bounds and choices of their options do not allow; called by `__post_init__`.

    In place, the others become what is declared: numbers of numpy, paths, lists, and texts as on the command line.

    Raises:
        FxpipeError: names all of them, and what they may be; or as an option's `kind`.
    """
    wrong, of_class = [], cast(Any, type(options))
    for name, (kind, flag) in _declared(of_class).items():
        value = getattr(options, name)
        if (taken := _parsed(value, kind, flag)) is _UNFIT:
            close = near(value, flag.choices) if isinstance(value, str) else ""
            wrong.append(f"{name}={value!r:.60} is not {_wanted(kind, flag)}{close}")
        object.__setattr__(options, name, taken)
    if wrong:
        raise FxpipeError("; ".join(wrong), hint="give other values, or leave these options out")


def taken(name: str, value: Any, kind: Any) -> Any:
    """The value of a single option, as `check` has it.

    Raises:
        FxpipeError: it is not of this kind.
    """
    if (result := _taken(value, kind, Flag((), ""))) is _UNFIT:
        raise FxpipeError(f"{name}={value!r:.60} is not {_wanted(kind, Flag((), ''))}", hint="give another value")
    return result


def unfit(options: type[Any], values: Mapping[str, Any]) -> str | None:
    """The first of these values that its option does not allow, as a clause; None if all are allowed.

    Args:
        values: by field; fields that were not made by `option` are left out.
    """
    declared = _declared(cast(Any, options))
    wrong = (n for n in flags(options) if n in values and _taken(values[n], *declared[n]) is _UNFIT)
    return next((f"{name} is {values[name]!r:.40}" for name in wrong), None)


@functools.cache
def _declared(options: type[Any]) -> dict[str, tuple[Any, Flag]]:
    kinds, named = get_type_hints(options), flags(options)
    return {f.name: (kinds[f.name], named.get(f.name, Flag((), ""))) for f in dataclasses.fields(options)}


def _parsed(value: Any, kind: Any, flag: Flag) -> Any:
    """The value as `_taken` has it, after the option's own reader of texts."""
    if flag.kind in (int, float, str, bool):
        return _taken(value, kind, flag)
    if isinstance(flag.default, tuple):
        result = _taken(value, kind, flag)
        return result if result is _UNFIT else tuple(map(flag.kind, result))
    if isinstance(value, str):
        return _taken(flag.kind(value), kind, flag)
    result = _taken(value, kind, flag)
    return flag.kind(result) if {int, float} & set(get_args(kind)) and isinstance(result, (int, float)) else result


def _taken(value: Any, kind: Any, flag: Flag) -> Any:
    """The value as one of this kind; `_UNFIT` if it is none."""
    inner, plain = get_args(kind), value.tolist() if hasattr(value, "tolist") else value  # of numpy
    match get_origin(kind) or kind:
        case typing.Union | types.UnionType:
            attempts = (_taken(value, one, flag) for one in inner)
            return next((one for one in attempts if one is not _UNFIT), _UNFIT)
        case typing.Literal:
            return value if isinstance(value, str) and value in inner else _UNFIT
        case builtins.tuple | abc.Sequence:
            if isinstance(plain, (str, bytes, abc.Mapping)) or not isinstance(plain, abc.Collection):
                return _UNFIT
            members = tuple(_taken(one, inner[0], Flag((), "")) for one in plain)
            return _UNFIT if any(one is _UNFIT for one in members) else members
        case abc.Callable:
            return value if callable(value) else _UNFIT
        case builtins.bool:
            return plain if isinstance(plain, bool) else _UNFIT
        case builtins.int | builtins.float as number:
            fits = isinstance(plain, numbers.Integral if number is int else numbers.Real)
            fits = fits and not isinstance(plain, bool) and plain == plain  # not NaN
            return (plain if type(plain) is int else number(plain)) if fits and _within(plain, flag) else _UNFIT
        case builtins.str:
            text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
            return text if isinstance(text, str) and (not flag.choices or text in flag.choices) else _UNFIT
        case typing.Any:
            return value
        case one:
            return value if isinstance(value, one) else _UNFIT


def _within(value: Any, flag: Flag) -> bool:
    least, most = flag.minimum, flag.maximum
    fits = (least is None or value >= least) and (most is None or value <= most)
    return bool(fits and (flag.above is None or value > flag.above) and (flag.below is None or value < flag.below))


def _wanted(kind: Any, flag: Flag) -> str:
    """What a value may be, in words."""
    if choices := flag.choices or (get_args(kind) if get_origin(kind) is Literal else ()):
        return f"one of {', '.join(choices)}"
    if get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_wanted(one, flag) for one in get_args(kind))
    if get_origin(kind) in (tuple, abc.Sequence):
        return f"a list of {_wanted(get_args(kind)[0], Flag((), '')).removeprefix('a ')}s"
    if kind not in (int, float):
        name = getattr(kind, "__name__", str(kind))
        return _WORDS.get(get_origin(kind) or kind, f"a {name}")
    bounds = {"of at least": flag.minimum, "above": flag.above, "below": flag.below, "of at most": flag.maximum}
    limits = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
    return f"a {'whole ' if kind is int else ''}number {limits}".rstrip()


def _named(flag: Flag, field: str) -> Flag:
    return flag if flag.names else dataclasses.replace(flag, names=(f"--{field.replace('_', '-')}",))


def names(options: Any) -> list[str]:
    """The options that a user may give, of a class of options or of an instance."""
    return [field.name for field in dataclasses.fields(options) if _INNER not in field.metadata]


def changed(options: Options, changes: dict[str, Any]) -> Options:
    """The options with some replaced: for the keywords of a public function.

    Raises:
        FxpipeError: an unknown name; suggests similar ones. Or as `check`.
    """
    fields = names(options)
    for name in changes:
        if name not in fields:
            raise FxpipeError(f"there is no option {name!r}{near(name, fields)}", hint=f"one of {', '.join(fields)}")
    return dataclasses.replace(options, **changes)  # type: ignore[type-var]
