"""What a pipeline offers to a user's own loop, with all workers in one process or with one in each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
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


OVER = object()
"""Given in place of a batch: there are no more."""


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

    def train(
        self,
        train_data: Callable[[], Iterable[Any]],
        epochs: int = 1,
        *,
        eval_data: Callable[[], Iterable[Any]] | None = None,
        eval_every: int | None = None,
        on_step: Callable[[int, Any], object] | None = None,
        on_eval: Callable[[int, dict[str, float]], object] | None = None,
        on_epoch: Callable[[int], object] | None = None,
    ) -> list[float]:
        """Go through the data, with calls to functions that may set rates, save, or end it; return the losses.

            def on_eval(step, measured):
                if measured["accuracy"] > best:
                    pipeline.save("best/")
                return step > 10_000  # something true ends the training

        Over processes, all call them, with the same numbers: decide by these, and all decide alike.

        Args:
            train_data: gives an epoch's batches; called on worker 0 alone, as eval_data is.
            eval_data: gives what is evaluated: at the end of every epoch, or after every `eval_every` steps, and then
                at the end of the training, too.
            on_step: after every step, with how many were made, and the loss; `float(loss)` waits for it (see `step`).
            on_eval: after every evaluation, with how many steps were made, and the metrics.
            on_epoch: after every epoch and its evaluation, with its number, from 1; the pipeline is empty.

        Raises:
            FxpipeError: as `step` and `evaluate`.
        """
        losses: list[Any] = []
        evaluated, ends = -1, False

        def evaluate() -> bool:
            nonlocal evaluated
            if eval_data is None or evaluated == self.fed:
                return False
            self.flush()
            evaluated = self.fed
            measured = self.evaluate(self._batches(eval_data))
            return on_eval is not None and bool(on_eval(self.fed, measured))

        for epoch in range(1, epochs + 1):
            if self._resets:
                self.reset()
            batches = self._batches(train_data)
            while not ends and (loss := self._feed(next(batches, OVER))) is not None:
                losses.append(loss)
                ends = on_step is not None and bool(on_step(self.fed, loss))
                if eval_every is not None and self.fed % eval_every == 0:
                    ends |= evaluate()
            self.flush()
            if eval_every is None or ends or epoch == epochs:
                ends |= evaluate()
            ends |= on_epoch is not None and bool(on_epoch(epoch))
            if ends:
                break
        return [float(loss) for loss in losses]

    def _feed(self, batch: Any) -> Any | None:
        """A step's loss; None if there are no more batches."""
        return None if batch is OVER else self.step(batch)

    def _batches(self, data: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """An epoch's batches, where they are read."""
        return iter(data())

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
        """Call the hook `reset(model)`: an epoch of your own begins. `train` does it at the start of each of its own.

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
