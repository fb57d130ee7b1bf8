"""What a run checks before it begins: in the launcher, and again in every worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fxpipe.checkpoint.shelf import Shelf
from fxpipe.errors import BuildError, RunError, listed
from fxpipe.files import Snapshot, remove_abandoned
from fxpipe.messages import say, warn
from fxpipe.plan.build_folder import COSTS, check_output, load_plan, model_path
from fxpipe.plan.current import changes, check_current
from fxpipe.plan.lock import locked, run_lock
from fxpipe.plan.plan import Plan
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.planner.device import read_throttle
from fxpipe.runtime.options import REPLAN, RunOptions
from fxpipe.runtime.process.new_build import remove_unfinished
from fxpipe.task.callbacks import ON_EVAL, ON_STEP
from fxpipe.task.paced_scheduler import EPOCH

if TYPE_CHECKING:
    from fxpipe.checkpoint.starting_weights import Checkpoint
    from fxpipe.task.model_file import Task

START_AGAIN = "start the run again, and compile into another folder while runs begin"


def check_run(options: RunOptions, *, from_file: bool = True, writes: bool = True) -> tuple[Plan, Checkpoint | None]:
    """Check that the build is whole, current, and the one that the options mean; return what a run begins with.

    Hooks that come `from_file` must be those that were compiled; `writes` says whether this process writes the run's
    files. Returns the build's plan, and the checkpoint to start from, if any.

    Raises:
        FxpipeError: in the build, the model file or the checkpoint to start from; or a folder cannot be written.
    """
    from fxpipe.observe.logger import check_loggers
    from fxpipe.observe.trace.writer import check_trace

    plan = load_plan(options.build)
    if options.plan_digest not in (None, plan.digest):
        raise BuildError("the build was replaced after the run had checked it", where=options.build, hint=START_AGAIN)
    if from_file:
        check_current(plan, options.build, options.model_file, options.settings, options.arguments)
    if read_throttle(options.throttle, plan.processes) is not None and plan.mesh.replicated:
        raise RunError("--throttle slows messages down, but not the sums over replicas", hint="leave out --throttle")
    check_profiler(options, plan)
    checkpoint = None
    if options.weights is not None:
        from fxpipe.checkpoint.starting_weights import Checkpoint

        checkpoint = Checkpoint.open(options.weights, plan)
    if writes:
        check_output(options.out)
        if options.trace is not None:
            check_trace(options.trace)
        check_loggers(options.log, options.out)
    return plan, checkpoint


def check_profiler(options: RunOptions, plan: Plan) -> None:
    """Refuse what cannot be profiled, or where nothing could be written."""
    if options.profile is not None and options.out is None:
        raise RunError("profile writes into the folder of the run, and this one has none", hint="give out")
    if options.nvtx and plan.device != "cuda":
        raise RunError(
            f"--nvtx names what runs on a GPU, and the build is for {plan.device}",
            hint="--profile N also profiles a CPU; or compile with --device cuda",
        )
    if options.nvtx and options.profile is not None:
        raise RunError(
            "--profile and --nvtx are for two profilers, of which a GPU serves one at a time",
            hint="--profile N for torch's, --nvtx for Nsight Systems",
        )


def task_of_run(plan: Plan, options: RunOptions, says: bool = True) -> Task:
    """The model file of a run, loaded with its settings; its optimizer is tried again if it may have changed. If
    it `says` so, this process prints what has changed since the compile.

    Raises:
        TaskError: it cannot be loaded, or its optimizer cannot be used, or not as one for each worker.
        BuildError: it gives another value than the one that the build was compiled with.
    """
    from fxpipe.optimizer.per_worker import check_per_worker
    from fxpipe.precision import precision_flags, precision_text
    from fxpipe.task.model_file import task_of_build

    task = task_of_build(plan, options.build, options.model_file, options.settings, options.arguments)
    before = plan.precision.flags
    if says and (now := precision_flags(plan.device)) != before:
        warn(
            f"the build was compiled with {precision_text(before)}, and this run has {precision_text(now)}: "
            "its numbers may differ. Set flags of torch in the model file, and variables in both environments"
        )
    changed = changes(plan, options.build, options.model_file).unread
    if changed and says:
        say(f"{listed(changed)} changed since the compile, but nothing that capture read: the build stays as it is")
    if changed or options.settings or options.arguments is not None:
        accepted = options.accept_optimizer_per_worker
        text = check_per_worker(plan, task.optimizer, task.lr_scheduler, accepted=accepted)
        if text and says:
            warn(text)
    return task


@contextmanager
def writing(out: str | None, *, again: bool = False) -> Iterator[None]:
    """Inside, only this call and its workers write into a run's output folder, if there is one.

    What a killed run has left half-written there is removed.

    Raises:
        BuildError: another run writes there, or the folder cannot be written.
    """
    if out is None:
        yield
        return
    check_output(out)
    with locked(run_lock(out), out, "--out", again=again):
        remove_abandoned(Path(out))
        Shelf.of(out).clear()
        remove_unfinished(out)
        yield


def files_read(options: RunOptions) -> Snapshot:
    """The files that a worker reads, in their state before it reads the first of them."""
    files = [path for path in Path(options.build).glob("*") if not path.is_dir()]
    if options.weights is not None:
        weights = Path(options.weights)
        files += weights.glob("*.safetensors*") if weights.is_dir() else [weights]
    return Snapshot.of(files)


def check_unchanged(files: Snapshot) -> None:
    """Refuse files that were replaced while they were read: a worker would mix old and new."""
    if changed := files.changed():
        names = listed([path.name for path in changed], 5)
        where = str(changed[0].parent)
        raise BuildError(f"{names} changed while the run read the build", where=where, hint=START_AGAIN)


def evaluates(plan: Plan, task: Task, eval_every: int | str | None) -> bool:
    """Whether a run evaluates in its pipeline; refuse `eval_every` where the build or the task has no evaluation."""
    if eval_every is not None:
        what = "evaluation every epoch" if eval_every == EPOCH else f"evaluation every {eval_every} steps"
        check_evaluation(plan, what)
        if not task.validates:
            raise RunError(f"{what} needs eval_data", hint="give both, or neither")
    return bool(plan.evaluations) and task.validates


def check_evaluation(plan: Plan, what: str) -> None:
    """Refuse `what` for a build without evaluation."""
    if plan.evaluations:
        return
    reason = f": {plan.not_evaluated}" if plan.not_evaluated else ""
    hint = "define eval_data() and metrics(model, batch) in the model file, and compile it again"
    if reason:
        hint = "fix that and compile again; or leave it out: `fxpipe run` evaluates the trained weights in one process"
    raise RunError(f"{what} needs a build with evaluation, and this one has none{reason}", hint=hint)


def decides_alike(plan: Plan, options: RunOptions) -> bool:
    """Whether all replicas evaluate the same weights.

    Replicas that train separately do so right after outer steps without a delay.
    """
    outer, every = plan.outer, options.eval_every
    if outer is None or every is None:  # at the end, all have the same weights
        return True
    return isinstance(every, int) and every % outer.every == 0 and not outer.delay


def unlike(what: str, plan: Plan) -> RunError:
    """The error that says why something cannot follow evaluations."""
    assert plan.outer is not None
    return RunError(
        f"{what} follows evaluations, at which replicas that train separately have different weights",
        hint="compile with --outer-delay 0: after its outer steps all have the same weights"
        if plan.outer.delay
        else f"--eval-every {plan.outer.every}, or a multiple of it: then all have the same weights",
    )


def check_separate_replicas(plan: Plan, options: RunOptions, task: Task) -> None:
    """Refuse what replicas that train separately would decide differently. Epochs are counted in steps."""
    callbacks = task.callbacks
    if plan.outer is None:
        return
    if decide := [name for name in (ON_STEP, ON_EVAL) if name in callbacks.names]:
        raise RunError(
            f"replicas that train separately would call {decide[0]}() with different numbers and decide differently",
            where=None if callbacks.path is None else callbacks.path.name,
            hint="take it out, and read metrics.jsonl; or compile without --outer",
        )
    for name, given in (("--save-best", options.save_best), ("--patience", options.patience)):
        if given is not None and not decides_alike(plan, options):
            raise unlike(name, plan)


def refuse_moves(options: RunOptions, why: str, hint: str) -> None:
    """Refuse to move units where no launcher of fxpipe can start workers again."""
    for asked, flag in ((options.rebalance, "--rebalance"), (options.on_loss == REPLAN, "--on-loss replan")):
        if asked:
            raise RunError(f"{flag} starts workers again, with other units: {why}", hint=f"{hint}; or leave it out")


def check_moves(options: RunOptions) -> None:
    """Refuse options that ask for moves and exclude them."""
    if options.out is None and (options.rebalance or options.on_loss == REPLAN):
        what = f"{_moving(options)} writes builds and checkpoints, and the run has no output folder"
        raise RunError(what, hint="give out")
    if options.on_loss == REPLAN and options.checkpoint_every is None:
        raise RunError(
            "--on-loss replan goes on from a checkpoint, and the run saves none", hint="--checkpoint-every N, or a time"
        )


def check_movable(options: RunOptions, plan: Plan, costs: BuildCosts) -> None:
    """The same, and refuse builds whose units cannot be moved."""
    check_moves(options)
    flag = _moving(options)
    if model_path(plan, options.build, options.model_file) is None:
        raise RunError(
            f"{flag} compiles again, and the build was made from Python objects",
            where=options.build,
            hint="compile a model file: fxpipe compile MODEL",
        )
    if plan.mesh.replicated:
        raise RunError(f"{flag} does not move units of workers with replicas", hint=f"leave out {flag}")
    if plan.ranks == 1:
        raise RunError(f"{flag} needs other workers, and the build has one", hint=f"leave out {flag}")
    if options.rebalance and not costs.workers:
        raise RunError(
            f"--rebalance compares times with the build's costs, and it has no {COSTS}",
            where=options.build,
            hint="compile again",
        )


def _moving(options: RunOptions) -> str:
    """The flag that asks for moves."""
    return "--rebalance" if options.rebalance else "--on-loss replan"


NOT_OWN = {
    "steps": "the loop is yours: end it after as many steps as you want",
    "epochs": "the loop is yours: go through the data as often as you want",
    "eval_every": "call pipeline.evaluate(batches)",
    "save_best": "call pipeline.save(folder) after the best evaluation",
    **dict.fromkeys(
        ("patience", "patience_metric", "min_delta"), "end the loop when evaluations have stopped improving"
    ),
    "profile": "call torch.profiler",
    "nvtx": "call torch.cuda.nvtx",
    "log": "write what step() and evaluate() return",
    "progress": "print what step() returns",
    "keep_going": "the loop is yours: look at the losses",
    "settings": "the values are your script's",
    "arguments": "parse sys.argv yourself",
    "rebalance": "`fxpipe run BUILD --rebalance`, with the model file's hooks",
    "on_loss": "`fxpipe run BUILD --on-loss replan`, with the model file's hooks",
    "max_restarts": "torchrun --max-restarts N, and pipeline.load(folder) at the start",
}
"""The options of a run that a user's own loop replaces, and what to do instead."""


def check_own_loop(options: Iterable[str]) -> None:
    """Refuse options of a run that mean nothing in a user's own loop."""
    for name in options:
        if name in NOT_OWN:
            raise RunError(f"{name} is no option of fxpipe.join", hint=NOT_OWN[name])
