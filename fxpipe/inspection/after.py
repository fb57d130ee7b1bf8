"""The program after any pass, as text: what `fxpipe inspect --after PASS` prints.

Of a build, it is the program that the build was made from: the model file is captured again, and the passes run with
the build's own cuts.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpipe.errors import BuildError, FxpipeError, near
from fxpipe.plan.build_folder import check_current, model_path, read_plan
from fxpipe.plan.spec import Plan

if TYPE_CHECKING:
    from fxpipe.build.build import Build
    from fxpipe.ir.program import Program
    from fxpipe.ir.transform import Applied
    from fxpipe.task.model_file import Task

CAPTURE = "capture"
"""The program before the first pass, by this name."""

_MADE_BY = ", made by: "


def pass_names() -> tuple[str, ...]:
    """`capture`, then every pass in the order in which they run."""
    from fxpipe.passes import default_passes
    from fxpipe.planner.cuts import Cuts

    return (CAPTURE, *(p.name for p in default_passes(Cuts((0, 1), (0, 1)), split_backward=True)))


def check_pass(name: str) -> None:
    """Refuse a name that no pass has.

    Raises:
        FxpipeError: names all passes in their order, and the near ones.
    """
    known = pass_names()
    if name not in known:
        raise FxpipeError(
            f"no pass is called {name!r}{near(name, known)}",
            where="--after",
            hint=f"the passes, in their order: {', '.join(known)}",
        )


def after(
    target: Path,
    pass_name: str,
    *,
    workers: int = 2,
    microbatches: int | None = None,
    schedule: str = "async",
    autocast: str | None = None,
    seed: int = 0,
    meta: bool = False,
    say: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] | None = None,
    **options: Any,
) -> str:
    """The program as it is after a pass, one line a node; `capture` is the program before the first.

    Args:
        target: a build directory, or a model file. Of a build, workers, microbatches, schedule, policy, autocast,
            device and cuts are its own: all that follows is for a model file.
        workers, microbatches, schedule, autocast, seed, meta: as for `fxpipe compile`.
        say: is told what is being done.
        warn: is told what makes the text doubtful; on stderr by default.
        options: more of `fxpipe.lowering.options.CompileOptions`: policy, forward_at, backward_at, cuts, cost, …

    Raises:
        FxpipeError: no pass has that name, or it does not run with these options; the model cannot be captured or cut.
        BuildError: the model file is not the one that the build was made from, or the build has none.
    """
    check_pass(pass_name)
    warn = warn or _on_stderr
    if target.suffix == ".py":
        given = (workers, microbatches, schedule, autocast, seed, meta)
        return _of_model(target, pass_name, *given, say, warn, dict(options))
    return _of_build(target, pass_name, say, warn)


def _of_build(folder: Path, pass_name: str, say: Callable[[str], None], warn: Callable[[str], None]) -> str:
    from fxpipe.ir.printer import print_program
    from fxpipe.planner.cuts import Cuts
    from fxpipe.task.model_file import load_task

    plan = read_plan(folder)
    model = model_path(plan, folder)
    if model is None:
        raise BuildError(
            f"the build was made from objects, so there is no model file to capture again for --after {pass_name}",
            where=str(folder),
            hint="FXPIPE_DUMP=FOLDER makes the program that calls fxpipe.compile write it after every pass",
        )
    check_current(plan, folder)
    mode, recompute = _chosen(folder)
    forward, backward, weights = (
        (*(bounds[0] for bounds in kind), kind[-1][1])
        for kind in zip(*((s.forward_units, s.backward_units, s.weight_units) for s in plan.stages), strict=True)
    )
    say("capturing")
    program = _captured(load_task(model), plan.microbatches, plan.autocast, plan.device, seed=0, meta=plan.meta)
    if pass_name == CAPTURE:
        return print_program(program)
    say("running the passes")
    watched = _Watched(pass_name, to_the_end=True)
    build = watched.lower(
        program,
        workers=plan.workers,
        microbatches=plan.microbatches,
        schedule=plan.schedule,
        policy=plan.policy,
        cuts=Cuts(forward, backward, weights, recompute),
        split_backward=mode == "three-way" or (mode is None and weights != backward),
        cost="analytic",  # what nodes take decides nothing where the cuts are given, and the text does not say it
        command=_command(folder, plan),
    )
    assert build is not None
    changed = [s.file for s in plan.stages if hashlib.sha256(build.files[s.file].encode()).hexdigest() != s.digest]
    if changed:
        warn(
            f"the passes now make {', '.join(changed)} otherwise than they did for {folder}: another torch, or a model "
            "that is not the same every time; what follows is what they make now"
        )
    return watched.text


def _of_model(
    model: Path,
    pass_name: str,
    workers: int,
    microbatches: int | None,
    schedule: str,
    autocast: str | None,
    seed: int,
    meta: bool,
    say: Callable[[str], None],
    warn: Callable[[str], None],
    options: dict[str, Any],
) -> str:
    from fxpipe.ir.printer import print_program
    from fxpipe.task.batch import default_microbatches
    from fxpipe.task.model_file import load_task
    from fxpipe.threads import threads_for

    task = load_task(model)
    for warning in task.warnings:
        warn(warning)
    if microbatches is None:
        microbatches = 1 if schedule == "async" else default_microbatches(task.example(), workers)
    say("capturing")
    program = _captured(task, microbatches, autocast, None, seed, meta)
    if pass_name == CAPTURE:
        return print_program(program)
    names = pass_names()
    if names.index(pass_name) < names.index("cut"):
        options["cost"] = "analytic"  # nothing is chosen yet
    options.setdefault("optimizer", task.optimizer)
    options["threads"] = threads_for(options.get("threads"), workers)
    say("running the passes")
    watched = _Watched(pass_name)
    watched.lower(program, workers=workers, microbatches=microbatches, schedule=schedule, **options)
    return watched.text


def _captured(
    task: Task, microbatches: int, autocast: str | None, device: str | None, seed: int, meta: bool
) -> Program:
    """The program of one microbatch."""
    import torch

    from fxpipe.task.batch import split
    from fxpipe.task.meta import on_meta, to_device
    from fxpipe.tracing.capture import capture

    torch.manual_seed(seed)
    made = on_meta(task.model).model if meta else task.model()
    example = task.example()
    if device is not None:
        made, example = to_device(device, made, example)
    return capture(made, task.loss, split(example, microbatches)[0], autocast=autocast)


class _Reached(Exception):
    """Ends a lowering once the program is there that is wanted."""


class _Watched:
    """A lowering that is watched for the program after one pass."""

    def __init__(self, pass_name: str, to_the_end: bool = False) -> None:
        self.pass_name = pass_name
        self.to_the_end = to_the_end
        self.text = ""
        self.seen: list[str] = [CAPTURE]

    def lower(self, program: Program, **options: Any) -> Build | None:
        """Lower the program; `text` then is what it was after the pass.

        Returns:
            The build; None where the lowering ended at the pass.

        Raises:
            FxpipeError: as `lower`; or the pass did not run.
        """
        from fxpipe.lowering.lower import lower

        try:
            build = lower(program, observers=(self._observe,), **options)
        except _Reached:
            return None
        if not self.text:
            raise FxpipeError(
                f"the pass {self.pass_name} does not run here: it is for three-way cuts",
                where="--after",
                hint=f"the passes that run, in their order: {', '.join(self.seen)}",
            )
        return build

    def _observe(self, applied: Applied) -> None:
        from fxpipe.ir.printer import print_program

        self.seen.append(applied.step.name)
        if applied.step.name == self.pass_name:
            self.text = print_program(applied.program)
            if not self.to_the_end:
                raise _Reached


def _chosen(folder: Path) -> tuple[str | None, tuple[tuple[int, int, int], ...]]:
    """The kind of the cuts that the planner chose, and what they compute again; (None, ()) for pinned ones."""
    from fxpipe.planner.build_costs import read_costs

    costs = read_costs(folder)
    if costs is None or not costs.partitions:
        return None, ()
    return costs.partitions[-1].mode, costs.partitions[-1].recompute


def _command(folder: Path, plan: Plan) -> str:
    """The command that the stages' headers name: what is made again differs in nothing, then."""
    for stage in plan.stages:
        try:
            with open(folder / stage.file, encoding="utf-8", errors="replace") as file:
                first = file.readline().rstrip("\n")
        except OSError:
            continue
        if _MADE_BY in first:
            return first.split(_MADE_BY, 1)[1]
    return "fxpipe.compile(...)"


def _on_stderr(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
