"""What a pipeline offers to a user's own loop, with all workers in one process or with one in each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch

from fxpipe.errors import RunError
from fxpipe.runtime.worker.executor import Executor

NOT_OWN = {
    "steps": "the loop is yours: leave it when you have had enough",
    "epochs": "the loop is yours: go through the data as often as you want",
    "eval_every": "call pipeline.evaluate(batches)",
    "save_best": "call pipeline.save(folder) after the best evaluation",
    "patience": "leave the loop when evaluations have not improved for so long",
    "checkpoint_every": "call pipeline.save(folder)",
    "keep": "call pipeline.save(folder), and delete what you do not want",
    "trace": "build.join(train_data, trace=...) writes one",
    "tensorboard": "write what step() and evaluate() return",
    "progress": "print what step() returns",
    "keep_going": "the loop is yours: look at the losses",
    "max_restarts": "torchrun --max-restarts N, and pipeline.load(folder) at the start",
}
"""The options of a run that a user's own loop does in its own way, and how."""


def check_own_loop(options: Iterable[str]) -> None:
    """Refuse options of a run that mean nothing where the loop is the user's.

    Raises:
        RunError: names the first, and what to do.
    """
    for name in options:
        if name in NOT_OWN:
            raise RunError(f"{name} is no option of fxpipe.join", hint=NOT_OWN[name])


class OwnLoop(ABC):
    """A pipeline that is trained call by call.

        with fxpipe.join("build/", optimizer=make_optimizer) as pipeline:  # or fxpipe.load("build/").local(...)
            for epoch in range(5):
                for batch in data:
                    loss = pipeline.step(batch)
                pipeline.flush()
                metrics = pipeline.evaluate(held_out)
                if metrics["loss"] > worst:
                    rate = 0.1 * rate
                    pipeline.set_lr(rate)
                pipeline.save("last/")

    Attributes:
        executors: of the workers in this process.
        fed: how many minibatches it has had, with those before the checkpoint that it goes on from.
    """

    executors: list[Executor]
    fed: int
    device: torch.device

    @abstractmethod
    def step(self, batch: Any) -> Any:
        """Feed one minibatch; return its loss, of which `float(loss)` is the number."""

    @abstractmethod
    def flush(self) -> None:
        """Finish the backwards and updates of everything fed; the next step starts with an empty pipeline.

        Replicas that train apart then make an outer step of what they have trained since the last one.
        """

    @abstractmethod
    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """The mean of each of the user's metrics over `batches`, in eval mode, on the weights as they are."""

    @property
    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """What `loss(model, batch)` returned next to the loss of the newest minibatch; empty before the first."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Finish what is in flight, and make a checkpoint: weights, optimizers, schedulers, generators' seeds.

        Its files are those that `fxpipe run --checkpoint-every` writes, and the model's are such as transformers reads.
        A folder that was there before is replaced once the new one is whole.

        Raises:
            BuildError, CheckpointError: the disk does not take it.
        """

    @abstractmethod
    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint: of `save`, or of a run. Schedule, policy and the like stay those of this pipeline.

        Raises:
            RunError: minibatches are in flight.
            BuildError, CheckpointError: it is none, or does not fit the build.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish what is in flight; the pipeline has no use after that. A `with` that ends without an error does it."""

    def run(self, batches: Iterable[Any]) -> list[float]:
        """Run a step for every batch, then a flush; return the losses."""
        losses = [self.step(batch) for batch in batches]
        self.flush()
        return [float(loss) for loss in losses]

    @property
    def learning_rates(self) -> list[float]:
        """Those of an optimizer's next update, by group: of the first worker here that trains something; else empty.

        Over processes, a worker that trains nothing has none: decide by numbers of the script's own.
        """
        return next((rates for e in self.executors if (rates := e.store.updater.rates)), [])

    def set_lr(self, rate: float, *more: float) -> None:
        """Set the learning rates of the minibatches that will be fed from now on: one for all groups, or one for each.

        Updates of those in flight are made with the rates that they were fed under. A scheduler goes on from there, and
        may set others at its next step.

        Raises:
            RunError: there are other groups than rates.
        """
        rates = [rate, *more]
        unfit = (executor.store.updater.unfit(rates) for executor in self._here)
        self._agree_on_rates(rates, next((error for error in unfit if error is not None), None))
        for executor in self._here:
            executor.store.updater.set_rates(self.fed, rates, executor.store.version)

    def reset(self) -> None:
        """Call the hook `reset(model)`: an epoch of your own begins.

        Raises:
            RunError: minibatches are in flight, or there is no such hook.
            TaskError: the hook failed, or may not do what it does.
        """
        self._settled("reset")
        if not self._resets:
            raise RunError(
                "reset() needs the hook reset(model), and there is none",
                hint="define it in the model file; in Python, give reset=",
            )
        self._reset()

    @property
    def _resets(self) -> bool:
        return any(executor.resets is not None for executor in self.executors)

    def _reset(self) -> None:
        for executor in self._here:
            if executor.resets is not None:
                executor.resets(executor.buffers, self.fed)

    @property
    def gradient_norm(self) -> float | None:
        """That of all workers' gradients at the last update of the first worker here; None without `clip_norm`."""
        return self.executors[0].store.updater.norm

    @property
    def loss_scale(self) -> float | None:
        """What the next minibatch's loss is multiplied by; None unless the build was compiled with `--autocast fp16`.

        It is what the first worker here knows: over processes, they all know the same after `flush`.
        """
        scaler = self.executors[0].scaler
        return None if scaler is None else scaler.scale.value

    @property
    def skipped_steps(self) -> int:
        """How many steps made no update because gradients overflowed; 0 where nothing is scaled. See `loss_scale`."""
        scaler = self.executors[0].scaler
        return 0 if scaler is None else scaler.scale.skipped

    def _agree_on_rates(self, rates: list[float], error: RunError | None) -> None:
        """All processes set the same, or raise an error."""
        if error is not None:
            raise error

    @property
    def _in_flight(self) -> bool:
        return any(executor.store.version < self.fed for executor in self._here)

    @property
    def _here(self) -> Sequence[Executor]:
        """The executors of this process, of all replicas."""
        return self.executors

    def _random_apart(self, draws: bool) -> AbstractContextManager[None]:
        """Leave the process's own random state alone, if what runs inside draws from it."""
        devices = [self.device] if self.device.type == "cuda" else []
        return torch.random.fork_rng(devices, enabled=draws)

    def _settled(self, what: str) -> None:
        if self._in_flight:
            raise RunError(f"{what}() was called while minibatches are in flight", hint="call flush() first")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
