"""What a run is asked to do, as plain data that travels to worker processes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class RunOptions:
    """A training run of a build.

    Attributes:
        build: the build directory.
        model_file: the user's file; None means the one the plan names.
        steps, epochs: how long; one epoch if neither is given.
        eval_every: evaluate after every so many steps, too; None evaluates the trained weights alone.
        schedule, policy: names; None means the plan's. A policy's options stand behind its name: `pipeoptim+keep`.
        weights: a checkpoint to start from; None means the build's values, or model()'s where it has none.
        backend: the engine of all stages; None or 'auto' means those of the plan.
        clip_norm: the greatest norm of all workers' gradients together that an update uses; None does not clip.
        log_staleness: compare the weights that forwards use with those that their updates meet.
        trace: the file for every worker's spans, in Chrome's trace format; None writes none.
        tensorboard: the folder for TensorBoard's event files; None writes none.
        seed: of the data, `random`, numpy and the random numbers in the stages.
        out: the folder for `metrics.jsonl` and `model.safetensors`; None writes neither.
        threads: CPU threads a worker; None shares the cores among the local workers.
        progress: show progress on stderr.
        exchange: set by `launch`: the folder in which workers leave errors and the summary for it.
    """

    build: str
    model_file: str | None = None
    steps: int | None = None
    epochs: int | None = None
    eval_every: int | None = None
    schedule: str | None = None
    policy: str | None = None
    weights: str | None = None
    backend: str | None = None
    clip_norm: float | None = None
    log_staleness: bool = False
    trace: str | None = None
    tensorboard: str | None = None
    seed: int = 0
    out: str | None = None
    threads: int | None = None
    progress: bool = False
    exchange: str | None = None

    def to_json(self) -> str:
        """One line of JSON; `from_json` is its inverse."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> RunOptions:
        """Read `to_json`'s text."""
        return RunOptions(**json.loads(text))
