"""Options as values: a class of options is the one place that says what an option is, for Python and the command line.

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
from typing import Any, Literal, TypeVar

from fxpipe.errors import FxpipeError, near

Options = TypeVar("Options")
_FLAG = "flag"
_SAME: Any = object()


@dataclass(frozen=True)
class Flag:
    """How an option is given on the command line, and who else hears of it.

    Attributes:
        names: `-n`, `--workers`; the field's, as `--pad-to`, where none is said.
        help: what `--help` says.
        default: what holds where it is not given. True or False make a switch, a tuple an option to repeat; `--help`
            shows any other but None.
        kind: what reads one value: int, float, str, or a function that raises FxpipeError. That of the default or the
            minimum, if they are numbers and nothing is said.
        minimum, above: a number's least value, or one that it must exceed.
        below: one that it must not reach.
        maximum: its greatest value, of a whole number.
        choices: the values there are.
        path: a file, a folder, or any path.
        metavar: what `--help` calls the value.
        flag_value: the value where the flag is given without one; None wants one.
        kept: the numbers of a run depend on it: its checkpoints have it, and one that goes on takes it over.
        shown: `run.json` has it, and whatever shows or compares runs.
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
    """A dataclass field that is an option of the command line, too.

    Args:
        default: of the field.
        names: the flags, if they are others than the field's name.
        on_command_line: the default there, if it is another.
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


def unfit(options: type[Any], values: Mapping[str, Any]) -> str | None:
    """The first of these values that is no value of such an option, as a clause; None if all are.

    Args:
        values: by field; those of none that `option` made are left out.
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
    """The options, some of them replaced: what a public function does with its keywords.

    Raises:
        FxpipeError: an unknown name; says which ones are near.
    """
    known = [field.name for field in dataclasses.fields(options)]  # type: ignore[arg-type]
    for name in changes:
        if name not in known:
            raise FxpipeError(f"there is no option {name!r}{near(name, known)}", hint=f"one of {', '.join(known)}")
    return dataclasses.replace(options, **changes)  # type: ignore[type-var]
