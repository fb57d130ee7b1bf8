"""The options of a run: plain data that every layer passes on whole, also to worker processes.

A field made by `option` is also a flag of `fxpipe run`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from fxpipe.checkpoint.interval import Interval
from fxpipe.engines import BACKENDS
from fxpipe.errors import FxpipeError
from fxpipe.options import absolute_paths, check, flags, inner, option
from fxpipe.plan.limits import MOST_THREADS
from fxpipe.planner.quantity import rate
from fxpipe.policy import policy_option
from fxpipe.policy.base import Policy
from fxpipe.schedule import schedule_text
from fxpipe.settings import pair
from fxpipe.task.paced_scheduler import EPOCH


def steps_or_epoch(given: int | str) -> int | str:
    """Read a number of steps, or the word `epoch`.

    Raises:
        FxpipeError: it is neither.
    """
    text = str(given)
    if text == EPOCH:
        return EPOCH
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise FxpipeError(f"{given!r} is not a number of steps", hint="give a number above 0, or epoch")


def interval_or_epoch(given: int | str) -> int | str:
    """Read an interval between checkpoints, or the word `epoch`; errors as `Interval.of`."""
    if given != EPOCH:
        Interval.of(given)
    return given


REPLAN = "replan"
"""A value of `on_loss`."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a build is trained, in one process or in several.

    Attributes:
        schedule: its name, a file in torch's format (`….csv`), or the text of one; None means the build's.
        policy: its name, with options after it (`pipeoptim+keep`), or the policy itself; None means the build's.
        seed: of the data, `random`, numpy and the random numbers in the stages and in optimizers.
        weights: a checkpoint to start from: a safetensors file, or a folder of them as transformers writes it; None
            means the build's values, or model()'s if the build has none.
        clip_norm: scale the gradients of all workers down to this total norm if it is larger; None does not clip.
        loss_scale, loss_scale_interval: for a build with `--autocast fp16`: the first factor of the loss, and after how
            many updates without an overflow it doubles (see `fxpipe.runtime.worker.loss_scaler`).
        ema: keep a moving average of the trained weights; each update keeps this share of it (see
            `fxpipe.runtime.worker.averages`). None keeps no average.
        log_staleness: compare the weights that forwards use with those that their updates change.
        backend: the engine of all stages; None or 'auto' means those of the build.
        steps_per_epoch: how many steps an epoch has, for schedulers and everything else that is done every epoch; None
            takes the number of batches of `train_data()`, if there is that hook.
        checkpoint_every: save the whole run every N steps (`500`), every so often (`10min`), every `epoch`, or only
            when `asked` by a callback or a signal; None never.
        keep: how many checkpoints to keep.
        resume: the checkpoint to continue from: its folder, or `newest` for the newest whole one in the output folder.
            Options that change the numbers, and are not given, are those of the checkpoint.
        offload: for a CUDA build: keep saved values in the CPU's memory until their backward.
        throttle: slow messages between processes down to these links (`100Mbit,20ms`; see `fxpipe.planner.device`);
            None does not.
        trace: the file for every worker's spans, in Chrome's trace format; None writes none.
        new_shapes: during the run, worker 0 makes stages for at most this many new shapes of batches, with the model
            and the loss of the model file; 0 refuses new shapes. None means 8, or 0 if `fxpipe run` or `Build.join`
            runs a build of one shape, since no batch is read ahead there.
        accept_optimizer_per_worker: as for a compile, if the optimizer is given to `Build.local` or `Build.join`, or
            has changed since the model file was compiled.
    """

    schedule: str | None = option(
        None,
        kept=True,
        metavar="NAME|FILE.csv",
        kind=schedule_text,
        help="Order of forwards and backwards: gpipe, 1f1b, async, … [default: the build's]",
    )
    policy: str | Policy | None = policy_option("the build's", kept=True)  # noqa: RUF009 (it is a field)
    seed: int = option(
        0,
        kept=True,
        shown=True,
        above=-(2**63) - 1,
        maximum=2**64 - 1,
        metavar="N",
        help="Seed for the data's order and for dropout.",
    )
    weights: str | None = option(
        None,
        path="any",
        shown=True,
        metavar="CHECKPOINT",
        help="Start from these weights: a safetensors file, or a folder of them. [default: the build's, or model()'s]",
    )
    clip_norm: float | None = option(
        None,
        kept=True,
        shown=True,
        kind=float,
        above=0,
        metavar="NORM",
        help="Clip gradients to this total norm (as torch's clip_grad_norm_ does).",
    )
    loss_scale: float = option(
        65536.0,
        kept=True,
        above=0,
        maximum=2**127,
        metavar="SCALE",
        help="With --autocast fp16: first factor of the loss; halved whenever gradients overflow.",
    )
    loss_scale_interval: int = option(
        2000,
        kept=True,
        minimum=1,
        metavar="N",
        help="With --autocast fp16: double the loss scale after N steps without an overflow.",
    )
    ema: float | None = option(
        None,
        kept=True,
        shown=True,
        kind=float,
        above=0,
        below=1,
        metavar="DECAY",
        help="Keep a moving average of the weights, with this decay, as OUT/ema.safetensors.",
    )
    log_staleness: bool = option(
        False, help="Measure how far the weights that forwards use are from those that their updates change."
    )
    steps_per_epoch: int | None = option(
        None,
        kept=True,
        minimum=1,
        metavar="N",
        help="Number of steps in an epoch. [default: the batches of train_data()]",
    )
    checkpoint_every: int | str | None = option(
        None,
        kind=interval_or_epoch,
        metavar="STEPS|TIME",
        help="Save a checkpoint every N steps (500) or minutes (10min), every epoch, or when asked by a callback or a "
        "signal.",
    )
    keep: int = option(3, minimum=1, metavar="N", help="Keep the newest N checkpoints.")
    resume: str | None = option(
        None,
        path="any",
        flag_value="newest",
        metavar="CHECKPOINT",
        help="Continue from CHECKPOINT or the newest in OUT (without a value).",
    )
    backend: str | None = option(
        None, choices=BACKENDS, help="What executes the stages; auto is the build's. [default: auto]"
    )
    offload: bool = option(
        False, help="Keep saved values in the CPU's memory, not the GPU's, until their backward (CUDA builds)."
    )
    throttle: str | None = option(
        None,
        metavar="RATE[,TIME]|FILE",
        help="Slow messages down to links such as 100Mbit,20ms, or those in a file of `fxpipe doctor --links`.",
    )
    trace: str | None = option(
        None,
        "--trace",
        path="file",
        metavar="FILE",
        help="Write a timeline of all workers (for ui.perfetto.dev and `fxpipe inspect`).",
    )
    new_shapes: int | None = option(
        None,
        kept=True,
        minimum=0,
        metavar="N",
        help="Make stages for at most N new shapes of batches during the run; 0 refuses them. [default: 8 for a build "
        "of several shapes, else 0]",
    )
    accept_optimizer_per_worker: bool = option(
        False, help="Allow an optimizer that looks at all parameters at once, if it is new since the compile."
    )

    def __post_init__(self) -> None:
        check(self)
        absolute_paths(self)


@dataclass(frozen=True)
class RunOptions(PipelineOptions):
    """A training run of a build: how it trains (`PipelineOptions`), for how long, and what it writes.

    Attributes:
        build: the build directory.
        model_file: the user's file; None means the one the plan names.
        steps, epochs: how long to train; one epoch if neither is given.
        eval_every: evaluate every N steps or every `epoch`, and at the end; None evaluates only at the end.
        save_best: a metric: keep the weights of the best evaluation so far as `best.safetensors` (see `Goal`).
        patience: end the run when a metric has not improved in this many evaluations.
        patience_metric: the metric that `patience` watches, written as in `save_best`; None means that of `save_best`.
        min_delta: the metric has improved if it is better by more than this.
        log: also log the run's numbers to `tensorboard`, `wandb`, `mlflow` or a logger that the model file registers
            (`fxpipe.observe.logger`), each optionally with `=` and a folder, project or experiment.
        profile: each process profiles its operators in this many steps (see `fxpipe.runtime.process.timelines`); None
            in none.
        nvtx: show the spans of workers as NVTX ranges, for Nsight Systems.
        peak: peak FLOP/s of the device of one process, for `mfu`; None takes it from the table of devices
            (`fxpipe.planner.device`), if the device is there.
        out: the folder for `metrics.jsonl`, `model.safetensors` and `run.json`; None writes none of them.
        keep_going: continue when a loss is not finite; otherwise the run ends there, with an error.
        threads: CPU threads of a worker; None shares the cores among the local workers.
        stall_timeout: seconds without progress after which a run of several processes says which worker waits for
            which; after 10 times as many (30 times before training begins) the run ends. 0 does neither.
        max_restarts: how many times `launch` restarts all workers after one was lost (see `WorkerLost`).
        rebalance: when workers or links have become slower, move units to others during the run (see
            `fxpipe.runtime.process.moves`); without `checkpoint_every`, a checkpoint is made for each move.
        on_loss: when a worker was lost and `max_restarts` are used up: `end` the run, or `replan` it for one fewer.
        settings: values of `fxpipe.setting` in the model file, each as `name=value`, instead of those of the compile.
        arguments: the model file's own command line; None means that of the compile.
        progress: show progress on stderr.
        board: set by `launch`: the folder of the board on which workers write their errors and the summary.
        plan_digest: set by the process that checked the build: the digest of its plan, so that workers accept no other;
            None accepts any plan.
    """

    build: str = inner()
    model_file: str | None = option(
        None, "--model", path="file", help="The model file, if it has moved since the compile."
    )
    steps: int | None = option(
        None, minimum=1, metavar="N", help="Number of minibatches to train on. [default: one epoch]"
    )
    epochs: int | None = option(None, minimum=1, metavar="N", help="Number of passes over train_data().")
    eval_every: int | str | None = option(
        None,
        kind=steps_or_epoch,
        metavar="N|epoch",
        help="Evaluate every N steps or every epoch; else only at the end.",
    )
    save_best: str | None = option(
        None,
        metavar="METRIC",
        help="Keep the weights with the best METRIC (as OUT/best.safetensors): the greatest of +METRIC, the least of "
        "-METRIC.",
    )
    patience: int | None = option(
        None,
        minimum=1,
        metavar="N",
        help="End the run when the metric has not improved in N evaluations.",
    )
    patience_metric: str | None = option(
        None,
        metavar="METRIC",
        help="Metric that --patience watches. [default: the one of --save-best]",
    )
    min_delta: float = option(
        0.0,
        minimum=0,
        metavar="DELTA",
        help="With --patience: by how much a metric must be better to count as improved.",
    )
    log: tuple[str, ...] = option(
        (),
        metavar="NAME[=WHERE]",
        help="Log to tensorboard[=DIR], wandb[=PROJECT], mlflow[=EXPERIMENT], or a logger of the model file; can be "
        "repeated.",
    )
    profile: int | None = option(
        None,
        minimum=1,
        metavar="N",
        help="Profile the operators of N steps with torch.profiler, a file for each process: OUT/profile_0.json, …",
    )
    nvtx: bool = option(False, help="Name the actions of workers in Nsight Systems (CUDA builds).")
    peak: float | None = option(
        None,
        kind=rate,
        shown=True,
        metavar="FLOPS",
        help="Peak FLOP/s of one device, such as 312T, to compute the model FLOPs utilisation (MFU). [default: by "
        "the GPU's name]",
    )
    out: str | None = option(None, on_command_line="out", path="any", help="Folder for metrics and weights.")
    keep_going: bool = option(False, help="Continue when a loss is infinite or NaN, instead of ending with an error.")
    threads: int | None = option(
        None,
        minimum=1,
        maximum=MOST_THREADS,
        metavar="N",
        help="CPU threads of each worker. [default: cores / processes]",
    )
    stall_timeout: float = option(
        60.0,
        minimum=0,
        maximum=10**8,
        metavar="SECONDS",
        help="Name waiting workers after this long without progress, and end after 10 times as long; 0 does neither.",
    )
    max_restarts: int = option(
        0,
        minimum=0,
        metavar="N",
        help="Restart all workers, at most N times, when one dies without an error that explains it.",
    )
    rebalance: bool = option(False, help="Move units to other workers when workers or links have become slower.")
    on_loss: str = option(
        "end",
        choices=("end", REPLAN),
        help="When a worker dies and no restart is left: end the run, or replan it for one worker fewer.",
    )
    settings: tuple[str, ...] = option(
        (),
        "--set",
        kind=pair,
        metavar="NAME=VALUE",
        help="Value of fxpipe.setting(NAME, …) in the model file; capture must not have read it; can be repeated.",
    )
    arguments: tuple[str, ...] | None = None
    progress: bool = False
    board: str | None = inner(None)
    plan_digest: str | None = inner(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "build", str(Path(self.build).absolute()))

    def to_json(self) -> str:
        """One line of JSON; `from_json` is its inverse."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> RunOptions:
        """Read `to_json`'s text."""
        fields = json.loads(text)
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return RunOptions(**fields | lists)


KEPT = tuple(name for name, flag in flags(PipelineOptions).items() if flag.kept)
SHOWN = tuple(name for name, flag in flags(RunOptions).items() if flag.shown)
"""The options in a checkpoint, and those in `run.json`, in their order there."""
