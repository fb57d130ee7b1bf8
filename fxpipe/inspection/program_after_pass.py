"""The program after any pass, as text: what `fxpipe inspect --after PASS` prints.

For a build, it is the program that the build was made from: the model file is captured again, and the passes run with
the build's own cuts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpipe import messages
from fxpipe.errors import BuildError, FxpipeError, near
from fxpipe.lowering.options import CompileOptions, outer_options
from fxpipe.options import changed
from fxpipe.plan.build_folder import check_current, model_path, read_plan
from fxpipe.plan.spec import Plan
from fxpipe.planner.cuts import Cuts
from fxpipe.task.model_options import ModelOptions

if TYPE_CHECKING:
    from fxpipe.build.build import Build
    from fxpipe.ir.program import Program
    from fxpipe.ir.transform import Applied

CAPTURE = "capture"
"""The name for the program before the first pass."""

_MADE_BY = ", made by: "
_FOR = {
    "split_backward": ": it is for weight gradients with cuts, or actions, of their own",
    "defer": ": it is for schedules that have weight gradients apart",
    "recompute": ": it is for workers whose memory is short",
    "whole_loss": ": it is for several microbatches",
    "encode": ": it is for edges that have codecs",
    "reduce": ": it is for workers that have replicas",
}
"""What the passes that do not always run are for."""
AS_MADE = ModelOptions()
ASKED = CompileOptions()


def pass_names() -> tuple[str, ...]:
    """`capture`, then every pass in the order in which they run."""
    from fxpipe.passes import default_passes
    from fxpipe.passes.encode import Encode
    from fxpipe.passes.recompute import Recompute
    from fxpipe.passes.reduce import Reduce

    cuts = Cuts((0, 1), (0, 1))
    passes = default_passes(
        cuts,
        split_backward=True,
        microbatches=2,
        encode=Encode(),
        weights_apart=True,
        recompute=Recompute(),
        reduce=Reduce(),
    )
    return (CAPTURE, *(p.name for p in passes))


def check_pass(name: str) -> None:
    """Refuse a name that no pass has.

    Raises:
        FxpipeError: names all passes in their order, and similar ones.
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
    made: ModelOptions = AS_MADE,
    options: CompileOptions = ASKED,
    *,
    say: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] | None = None,
    **changes: Any,
) -> str:
    """The program as it is after a pass, one line a node; `capture` is the program before the first.

    Args:
        target: a build directory, or a model file.
        made, options, changes: for a model file, how its model is made and compiled; a build has its own.
        say: is called with what is being done.
        warn: is called with what makes the text doubtful; writes to stderr by default.

    Raises:
        FxpipeError: no pass has that name, or it does not run with these options; the model cannot be captured or cut.
        BuildError: the model file is not the one that the build was made from, or the build has none.
    """
    from fxpipe.ir.printer import print_program
    from fxpipe.lowering.captured_step import captured_step
    from fxpipe.lowering.minibatch_loss import capture_microbatch
    from fxpipe.task.model_file import load_task
    from fxpipe.task.padding import padded

    check_pass(pass_name)
    warn = warn or messages.warn
    options = changed(options, changes)
    plan = None
    if target.suffix == ".py":
        task = load_task(target)
        for warning in task.warnings:
            warn(warning)
    else:
        plan = read_plan(target)
        task = load_task(_model_of(plan, target, pass_name))
        made, options = ModelOptions(plan.device, meta=plan.meta), _options_of(plan, target)
    say("capturing")
    model, example = made.make(task)
    options = options.for_task(task)
    example = padded(example, options.padding([example]) if plan is None else plan.padding)
    if options.microbatches is None:
        step = captured_step(model, task.loss, example, options)
        program, options = step.program, step.options
    else:
        program = capture_microbatch(model, task.loss, example, options)
    if pass_name == CAPTURE:
        return print_program(program)
    names = pass_names()
    if names.index(pass_name) < names.index("cut"):
        options = dataclasses.replace(options, cost="analytic")  # nothing is chosen yet
    say("running the passes")
    watched = _Watched(pass_name, to_the_end=plan is not None)
    build = watched.lower(program, options, plan)
    if plan is not None and build is not None and (others := _changed(plan, build)):
        warn(
            f"the passes now write {', '.join(others)} differently than for {target}: torch is another version, or "
            "the model is not the same every time; this is the program that they make now"
        )
    return watched.text


def _model_of(plan: Plan, folder: Path, pass_name: str) -> Path:
    """The model file of a build; an error if it has changed."""
    model = model_path(plan, folder)
    if model is None:
        raise BuildError(
            f"the build was made from objects, so there is no model file to capture again for --after {pass_name}",
            where=str(folder),
            hint="FXPIPE_DUMP=FOLDER makes the program that calls fxpipe.compile write it after every pass",
        )
    check_current(plan, folder)
    return model


def _options_of(plan: Plan, folder: Path) -> CompileOptions:
    """The options that make the same stages again."""
    mode, recompute = _chosen(folder, plan)
    cuts = dataclasses.replace(Cuts.of(plan), recompute=recompute)
    return CompileOptions(
        workers=plan.ranks,
        virtual=None if plan.rows else plan.workers // plan.ranks,
        dp=plan.dp,
        **outer_options(plan.outer),
        replicas=plan.replicas if plan.crossing else (),
        microbatches=plan.own_microbatches,
        microbatch_dims={leaf.name: leaf.dim for leaf in plan.given},
        constant_batch=[leaf.name for leaf in plan.given if leaf.tensor is None],
        schedule="\n".join(plan.rows) or plan.schedule,
        policy=plan.policy,
        autocast=plan.autocast,
        cuts=cuts,
        split_backward=mode == "three-way" or (mode is None and cuts.weights != cuts.backward),
        cost="analytic",  # times decide nothing if the cuts are given, and the text has none
        command=_command(folder, plan),
    )


def _changed(plan: Plan, build: Build) -> list[str]:
    """The files of stages that are not as the plan says."""
    return [s.file for s in plan.stages if hashlib.sha256(build.files[s.file].encode()).hexdigest() != s.digest]


class _Reached(Exception):
    """Ends a lowering once the wanted program is there."""


class _Watched:
    """A lowering that is watched for the program after one pass."""

    def __init__(self, pass_name: str, to_the_end: bool = False) -> None:
        self.pass_name = pass_name
        self.to_the_end = to_the_end
        self.text = ""
        self.seen: list[str] = [CAPTURE]

    def lower(self, program: Program, options: CompileOptions, plan: Plan | None) -> Build | None:
        """Lower the program; `text` is then the program after the pass.

        Args:
            plan: whose edges' codecs and whose buckets it gets, and whose values are computed again, where it is of a
                build.

        Returns:
            The build; None if the lowering ended at the pass.

        Raises:
            FxpipeError: as `lower`; or the pass did not run.
        """
        from fxpipe.lowering.choose_codecs import as_in
        from fxpipe.lowering.lower import lower
        from fxpipe.passes.reduce import Reduce

        codecs = None if plan is None else as_in(plan)
        again = () if plan is None else tuple(stage.again for stage in plan.stages)
        try:
            reduce = None if plan is None else Reduce.like(plan)
            build = lower(program, options, observers=(self._observe,), codecs=codecs, again=again, reduce=reduce)
        except _Reached:
            return None
        if not self.text:
            raise FxpipeError(
                f"the pass {self.pass_name} does not run here{_FOR.get(self.pass_name, '')}",
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


def _chosen(folder: Path, plan: Plan) -> tuple[str | None, tuple[tuple[int, int, int], ...]]:
    """The kind of the cuts that the planner chose, and what they compute again; (None, ()) for pinned ones."""
    from fxpipe.planner.costs_file import read_costs

    costs = read_costs(folder, plan)
    if costs is None or not costs.partitions:
        return None, ()
    return costs.partitions[-1].mode, costs.partitions[-1].recompute


def _command(folder: Path, plan: Plan) -> str:
    """The command that the stages' headers name, so that the same text is made again."""
    for stage in plan.stages:
        try:
            with open(folder / stage.file, encoding="utf-8", errors="replace") as file:
                first = file.readline().rstrip("\n")
        except OSError:
            continue
        if _MADE_BY in first:
            return first.split(_MADE_BY, 1)[1]
    return "fxpipe.compile(...)"
