"""A build on disk: how its directory is written, and whether it can be trusted when read back. Needs no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

import fxpipe
from fxpipe.errors import BuildError
from fxpipe.files import check_creatable, digest
from fxpipe.plan.consistency import check
from fxpipe.plan.plan import FORMAT, Plan
from fxpipe.plan.signed import read_signed
from fxpipe.typed_json import convert, explained

PLAN, WEIGHTS, COSTS, ENGINES = "plan.json", "weights.safetensors", "costs.json", "engines"
PROFILE, NODES, PROGRAM, PASSES = "profile.json", "nodes.json", "program.json", "passes.txt"
_OWN = re.compile(
    r"(plan|costs|node_costs|profile|nodes|program)\.json|weights\.safetensors|stage_\d+(_\d+)?\.py|evaluate_\d+(_\d+)?\.py|"
    r"totals(_\d+)?\.py|passes\.txt|engines|__pycache__"
)


def read_plan(folder: str | Path) -> Plan:
    """The plan of a build directory; no other file of it is read.

    Raises:
        BuildError: the folder is not a build, or it was changed, or is of another version.
    """
    folder = Path(folder)
    if not folder.exists():
        raise BuildError(f"{folder} does not exist", hint=f"make the build: fxpipe compile MODEL -o {folder}")
    if not (folder / PLAN).is_file():
        advice = f"make the build: fxpipe compile {folder} -o build/"
        hint = advice if folder.suffix == ".py" else "give the folder that `fxpipe compile` wrote, its -o"
        raise BuildError(f"{folder} is not an fxpipe build: it has no {PLAN}", hint=hint)
    where, again = str(folder / PLAN), _again(folder)
    with explained(where, error=BuildError, hint=again):
        finite = False  # the user's constants may be anything
        body = read_signed(
            folder / PLAN, "the build", (FORMAT,), error=BuildError, hint=again, other=again, finite=finite
        )
        plan = convert(body, Plan)
        check(plan)
    _check_inside(folder, plan)
    return plan


def _check_inside(folder: Path, plan: Plan) -> None:
    """Refuse files of a build that are links to files elsewhere: a run must read only what is in the folder."""
    inside = folder.resolve()
    names = [path.name for path in folder.iterdir() if _OWN.fullmatch(path.name)]
    for name in sorted({*names, plan.weights.file, *(code.file for code in plan.code)}):
        target = (folder / name).resolve()
        if target != inside / name:
            raise BuildError(
                f"{name} leads out of the build, to {target}",
                where=str(folder / name),
                hint="put the file itself there, if you trust it, or compile the model again",
            )


def _again(folder: Path) -> str:
    return f"compile the model again: fxpipe compile MODEL -o {folder}"


def load_plan(folder: str | Path) -> Plan:
    """The plan of a build directory, after checking that all files are there and that the weights have not changed.

    Raises:
        BuildError: a file is missing or was changed (stages may be), or the build is of another version.
    """
    folder = Path(folder)
    plan = read_plan(folder)
    again = _again(folder)
    if plan.fxpipe != fxpipe.__version__:
        raise BuildError(
            f"the build was made by fxpipe {plan.fxpipe}, this is {fxpipe.__version__}", where=str(folder), hint=again
        )
    missing = [f for f in (*(s.file for s in plan.code), plan.weights.file) if not (folder / f).is_file()]
    if missing:
        raise BuildError(f"the build is incomplete: {', '.join(missing)} missing", where=str(folder), hint=again)
    if digest(folder / plan.weights.file) != plan.weights.digest:
        raise BuildError(f"{plan.weights.file} was changed after it was written", where=str(folder), hint=again)
    return plan


def model_path(plan: Plan, folder: str | Path, given: str | Path | None = None) -> Path | None:
    """The user's file: the given one, else the one that the plan names; None for a build made from objects."""
    if given is not None:
        return Path(given)
    path = plan.model_file.path
    return None if path is None else Path(os.path.normpath(Path(folder) / path))


def check_target(folder: Path) -> None:
    """Refuse, before any work is done, a folder that a build could not be written to.

    Raises:
        BuildError: it holds something that is not a build, or a build and other files, or cannot be created.
    """
    if folder.exists() and not (folder / PLAN).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise BuildError(f"{folder} exists and is not an fxpipe build", hint="choose another -o, or remove it")
    if folder.is_dir():
        foreign = sorted(entry.name for entry in folder.iterdir() if not _OWN.fullmatch(entry.name))
        if foreign:
            raise BuildError(
                f"{folder} is a build, but it holds {', '.join(foreign[:5])} as well, which a new build would delete",
                hint="move that out of the build, or choose another -o",
            )
    check_creatable(folder.resolve().parent, folder, "-o")


def check_output(folder: str | Path | None) -> None:
    """Refuse, before any work is done, an output folder that a run could not write to.

    Raises:
        BuildError: it cannot be created or written.
    """
    if folder is not None:
        check_creatable(Path(folder).resolve(), Path(folder), "--out")
