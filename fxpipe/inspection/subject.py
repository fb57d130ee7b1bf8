"""The build that is inspected, read from its folder or from memory, without its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fxpipe.builds.build import Build, optional_files
from fxpipe.costs.node_costs_file import NODE_COSTS
from fxpipe.errors import BuildError
from fxpipe.ir.program_table import ProgramTable
from fxpipe.plan.build_folder import COSTS, NODES, PROFILE, model_path, read_plan
from fxpipe.plan.current import changes
from fxpipe.plan.plan import Plan
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.planner.profile import Profile
from fxpipe.stages.loaded import is_edited


@dataclass(frozen=True)
class Subject:
    """A build without its tensors."""

    plan: Plan = field(repr=False)
    files: Mapping[str, str] = field(repr=False)  # the current source of each stage, by file name
    costs: BuildCosts = field(repr=False)
    nodes: ProgramTable = field(repr=False)
    profile: Profile = field(repr=False)
    passes: tuple[str, ...] = field(default=(), repr=False)  # what each pass did, one line each
    folder: Path | None = None  # where it is; None for one in memory
    model: Path | None = None  # the path of the user's file; None for a build made from objects
    edited: tuple[str, ...] = ()  # the stages that were changed after they were emitted
    stale: tuple[str, ...] = ()  # what has changed since in the model file and the files that it imports
    measured: bool = False  # whether its times were measured


def subject_of(build: Build) -> Subject:
    """The subject of a build in memory."""
    assert build.nodes is not None
    assert build.profile is not None
    return Subject(
        plan=build.plan,
        files=build.files,
        costs=build.costs,
        nodes=build.nodes,
        profile=build.profile,
        passes=build.passes,
        measured=bool(build.costs.times or build.node_costs),
    )


def read_subject(folder: str | Path) -> Subject:
    """Read a build's folder, but neither weights nor the model; no stage is imported."""
    folder = Path(folder)
    if not folder.exists():
        raise BuildError(f"there is no {folder}", hint="give a build folder, or a model file that ends in .py")
    plan = read_plan(folder)
    files, edited = {}, []
    for stage in plan.code:
        try:
            source = (folder / stage.file).read_bytes()
        except OSError as error:
            raise BuildError(
                f"{stage.file} cannot be read: {error.strerror}",
                where=str(folder),
                hint=f"compile the model again: fxpipe compile MODEL -o {folder}",
            ) from error
        files[stage.file] = source.decode("utf-8", errors="replace")
        if is_edited(source, stage):
            edited.append(stage.file)
    optional = optional_files(folder, plan)
    costs = optional.get("costs", BuildCosts())
    needed = {COSTS: costs.workers, NODES: optional.get("nodes"), PROFILE: optional.get("profile")}
    if missing := [name for name, read in needed.items() if not read]:
        raise BuildError(
            f"the build lacks {' and '.join(missing)}, which inspecting it needs",
            where=str(folder),
            hint=f"compile the model again: fxpipe compile MODEL -o {folder}",
        )
    return Subject(
        plan=plan,
        files=files,
        **optional,
        folder=folder,
        model=model_path(plan, folder),
        edited=tuple(edited),
        stale=changes(plan, folder).read,
        measured=bool(costs.times) or (folder / NODE_COSTS).is_file(),
    )
