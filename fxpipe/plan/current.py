"""Whether a compile of the user's current files with these settings would capture the same as the build has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fxpipe.errors import BuildError, TaskError, near
from fxpipe.files import digest
from fxpipe.plan.build_folder import model_path
from fxpipe.plan.plan import Plan
from fxpipe.plan.read_by_capture import read_by_capture
from fxpipe.settings import Value, pairs, read_as


@dataclass(frozen=True)
class Changes:
    """What has changed in the model file and the files that it imports since the compile.

    Attributes:
        read: what concerns the build: `model.py: Net changed`, `data.py is gone`.
        unread: changed files in which nothing that capture read has changed.
        settings: those that the files name now.
    """

    read: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


def changes(plan: Plan, folder: str | Path, given: str | Path | None = None) -> Changes:
    """The changes in the files that a build was compiled from; none for a build of objects."""
    path = model_path(plan, folder, given)
    if path is None:
        return Changes()
    root = path.resolve().parent
    compiled = plan.model_file
    model_name = compiled.name or path.name
    files = {name: path if name == model_name else root / name for name in compiled.sources}
    gone = [f"{name} is gone" for name, file in files.items() if not file.is_file()]
    changed = [name for name, file in files.items() if file.is_file() and digest(file) != compiled.sources[name]]
    if not path.is_file() or not compiled.parts:
        return Changes((*gone, *(f"{name} changed" for name in changed)))
    try:
        reads = read_by_capture(path, (name for name in compiled.sources if name != model_name), called=model_name)
    except (SyntaxError, ValueError, OSError):
        return Changes((*gone, *(f"{name} changed" for name in changed)))
    before, now = compiled.parts, reads.parts
    read = [f"{name} changed" for name in before if name in now and now[name] != before[name]]
    read += [f"{name} is new" for name in now if name not in before]
    read = read or [f"{name} is gone" for name in before if name not in now and name not in compiled.sources]
    unread = [name for name in changed if not any(text.startswith(name) for text in read)]
    return Changes((*gone, *read), tuple(unread), tuple(reads.settings))


def check_current(
    plan: Plan,
    folder: str | Path,
    given: str | Path | None = None,
    settings: Iterable[str] = (),
    arguments: Sequence[str] | None = None,
) -> Changes:
    """Refuse a build if a part of its model file, or of a file that it imports, has changed since capture read it, or
    if settings or arguments of a run would change what capture read.

    Args:
        settings, arguments: of the run; see `RunOptions`.

    Raises:
        BuildError: names everything that changed or is gone, or the setting.
        TaskError: there is no such setting, or its value is not of its type.
    """
    path, compiled = model_path(plan, folder, given), plan.model_file
    edits = changes(plan, folder, given)
    options = "with the options that stage_0.py begins with"
    if path is not None and edits.read:
        raise BuildError(
            f"the build is stale: since it was compiled, {', '.join(edits.read)}",
            where=str(folder),
            hint=f"compile it again: fxpipe compile {path} -o {folder}, {options}"
            if path.is_file()
            else "give the model file with --model PATH, or compile again",
        )
    texts, rows = pairs(settings), {row.name: row for row in compiled.settings}
    if texts:
        check_known(texts, {*rows, *edits.settings})
    for name, text in texts.items():
        row = rows.get(name)
        same = row is None or (row.value is not None and read_as(name, text, row.value) == row.value)
        if row is None or same or not (by := row.captured or compiled.any_setting):
            continue
        raise BuildError(
            f"setting {name!r} was {row.value!r} when {by} was captured, and the build has that value",
            where=str(folder),
            hint=f"compile it again: fxpipe compile {path} --set {name}={text} -o {folder}, {options}",
        )
    by = compiled.any_argument
    if arguments is not None and by and tuple(arguments) != compiled.given_arguments:
        raise BuildError(
            f"the arguments after -- differ from the compile's, and {by}, which was captured, reads them",
            where=str(folder),
            hint=f"compile it again with them, {options}; or read values that a run may change with fxpipe.setting()",
        )
    return edits


def check_known(given: Mapping[str, Value], readable: Iterable[str]) -> None:
    """Refuse a setting that the model file does not read.

    Raises:
        TaskError: names the first, and a similar name.
    """
    names = sorted(readable)
    for name in given:
        if name not in names:
            hint = (
                f"it reads: {', '.join(names)}" if names else "it reads none: call fxpipe.setting(NAME, DEFAULT) there"
            )
            raise TaskError(f"the model file reads no setting {name!r}{near(name, names)}", hint=hint)
