"""What capture read from a model file, as the plan keeps it; and whether a run's model file has the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from fxpipe.errors import BuildError
from fxpipe.files import digest
from fxpipe.plan.current import check_known
from fxpipe.plan.read_by_capture import ReadByCapture, read_by_capture
from fxpipe.plan.user_files import ModelFileSpec, SettingSpec
from fxpipe.settings import read


def read_of(path: Path) -> ReadByCapture | None:
    """What capture can have read from an imported model file; None if its text does not show it."""
    model_name = str(path.resolve().name)
    try:
        return read_by_capture(path, (name for name in source_digests(path) if name != model_name))
    except (SyntaxError, ValueError, OSError, RecursionError):
        return None


def captured_of(path: Path, given: Mapping[str, str], arguments: Sequence[str], lines: Iterable[str]) -> ModelFileSpec:
    """What capture read from a model file with these settings and arguments, once everything has run that a compile
    runs. `Build.save` adds the path.

    `lines` are those of the user's files in the program, as `model.py:12`. If one would not count, the text does not
    show everything, so everything counts.
    """
    reads, values = read_of(path), read()
    if reads is None or not all(map(reads.has, lines)):
        reads = ReadByCapture({}, (), reads.settings if reads else {}, path.name, (), path.name)
    check_known(given, {*reads.settings, *values})
    rows = [
        SettingSpec(name, values.get(name), given.get(name), reads.settings.get(name, "") or reads.any_setting)
        for name in sorted({*reads.settings, *values})
    ]
    parsed = {label: _text(path, label) for label in reads.arguments}
    read_arguments = tuple(arguments), parsed, reads.any_argument
    return ModelFileSpec(None, source_digests(path), reads.parts, tuple(rows), reads.any_setting, *read_arguments)


def check_arguments(compiled: ModelFileSpec, path: Path) -> None:
    """Refuse a loaded model file whose parsed arguments differ from those that capture read at the compile."""
    for label, before in compiled.arguments.items():
        file, _, name = label.partition(": ")
        now = _text(path, label if file != compiled.name else f"{path.name}: {name}")
        if now != before:
            raise BuildError(
                f"{name} was {before} when the model was captured, but is {now} now",
                where=file,
                hint="compile it again with these arguments after --",
            )


def _text(path: Path, label: str) -> str:
    """The value of a name, or of its attribute, in an imported file: `model.py: args.width`."""
    file, _, name = label.partition(": ")
    source = (path.resolve().parent / file).resolve()
    modules: list[Any] = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
    module = next(m for m in modules if Path(m.__file__).resolve() == source)
    try:
        return repr(attrgetter(name)(module))
    except AttributeError:
        return "missing"


def source_digests(path: Path) -> dict[str, str]:
    """Digests of the user's file and of every imported file below its folder, by relative path.

    Call it after the model has been made and captured, so that lazy imports have happened.
    """
    root = path.resolve().parent
    files = {path.resolve()}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        # Modules that torch makes up have a bare name here, "_ops.py", which must not be looked up in the working
        # directory.
        if isinstance(file, str) and file.endswith(".py") and os.path.isabs(file) and "site-packages" not in file:
            resolved = Path(file).resolve()
            if resolved.is_relative_to(root) and resolved.is_file() and not _is_environment(resolved, root):
                files.add(resolved)
    return {str(f.relative_to(root)): digest(f) for f in sorted(files)}


def _is_environment(file: Path, root: Path) -> bool:
    """Whether `file` belongs to fxpipe or the interpreter, which may be below the user's folder."""
    installed = Path(__file__).resolve().parents[2]
    prefixes = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()} - {root}
    inside_prefix = any(file.is_relative_to(p) and p.is_relative_to(root) for p in prefixes)
    inside_fxpipe = any(file.is_relative_to(installed / part) for part in ("fxpipe", "passes", "cli"))
    return inside_prefix or inside_fxpipe
