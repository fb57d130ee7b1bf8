"""Options as values: a class of options is the one place that defines an option, for Python and the command line.

    @dataclass(frozen=True)
    class CompileOptions:
        workers: int = option(2, "-n", "--workers", minimum=1, help="Number of stages.")
        pad_to: int | None = option(None, minimum=1, help="Make lengths multiples of this.")  # --pad-to

`cli/option_fields.py` gives a command the flags of such fields. Imports no torch, so that `--help` is instant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from fxpipe.errors import FxpipeError, near

Options = TypeVar("Options")
_FLAG = "flag"
_SAME: Any = object()


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
    kind: Callable[[str], Any] = str
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


def unfit(options: type[Any], values: Mapping[str, Any]) -> str | None:
    """The first of these values that its option does not allow, as a clause; None if all are allowed.

    Args:
        values: by field; fields that were not made by `option` are left out.
    """
    for name, flag in flags(options).items():
        value: Any = values.get(name)
        if value is None and (flag.default is None or name not in values):
            continue
        kind = bool if isinstance(flag.default, bool) else flag.kind if flag.kind in (int, float) else str
        fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if fits and kind in (int, float):
            least, most = flag.minimum, flag.maximum
            fits = (least is None or value >= least) and (most is None or value <= most)
            fits = fits and (flag.above is None or value > flag.above) and (flag.below is None or value < flag.below)
        if not fits or (flag.choices and value not in flag.choices):
            return f"{name} is {value!r:.40}"
    return None


def _named(flag: Flag, field: str) -> Flag:
    return flag if flag.names else dataclasses.replace(flag, names=(f"--{field.replace('_', '-')}",))


def changed(options: Options, changes: dict[str, Any]) -> Options:
    """The options with some replaced: for the keywords of a public function.

    Raises:
        FxpipeError: an unknown name; suggests similar ones.
    """
    known = [field.name for field in dataclasses.fields(options)]  # type: ignore[arg-type]
    for name in changes:
        if name not in known:
            raise FxpipeError(f"there is no option {name!r}{near(name, known)}", hint=f"one of {', '.join(known)}")
    return dataclasses.replace(options, **changes)  # type: ignore[type-var]
