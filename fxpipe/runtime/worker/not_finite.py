"""The error of a loss that is not finite: it names the gradients that were not finite before.

No worker checks gradients while losses are finite: that would cost a pass over them in every step. When a loss is not
finite, the weights still show the cause. The loss worker stops before its backward, so only gradients of earlier steps
can have made weights not finite, each its own. If gradients are clipped, their norms are known, and show the step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fxpipe.errors import NotFiniteError, listed
from fxpipe.observe.pulse import Pulse
from fxpipe.runtime.wires.board import Board
from fxpipe.runtime.worker.clip import Clip
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.loss_scaler import LossScaler
from fxpipe.runtime.worker.observer import Observer

PATIENCE = 5.0
"""How many seconds the worker that stops waits for the others' answers."""

_QUESTION = "not-finite"
_NAMED = 5
_KEEP_GOING = "--keep-going continues training"


@dataclass(frozen=True)
class NotFinite:
    """What a worker found.

    Attributes:
        weights: names of its trained weights that are not finite.
        gradients: names of those whose gradients were not finite at the first such `step` (from 1), if norms are known.
    """

    worker: int
    weights: list[str]
    gradients: list[str]
    step: int | None

    @staticmethod
    def of(executor: Executor) -> NotFinite:
        """What a worker has now."""
        trained = executor.store.trained
        scaled = executor.store.part(LossScaler) is not None  # such gradients may overflow
        clip = None if scaled else executor.store.part(Clip)
        minibatch, places = (None, []) if clip is None or clip.not_finite is None else clip.not_finite
        names = list(trained)
        weights = [name for name, weight in trained.items() if not is_finite(weight)]
        step = None if minibatch is None else minibatch + 1
        return NotFinite(executor.worker, weights, [names[place] for place in places], step)


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite; whole numbers are."""
    if tensor.dtype.itemsize == 1 and tensor.is_floating_point():
        tensor = tensor.float()  # torch.isfinite takes no 8-bit floats
    return bool(tensor.isfinite().all())


class Inquiry:
    """Lets a worker that stops the run first learn what all workers have that is not finite.

    The others are blocked by receives that will never end, so no message can reach them: each process looks at the
    board after every beat of its pulse.
    """

    def __init__(
        self, board: Board, here: Sequence[int], processes: int, pulse: Pulse, executors: Sequence[Executor]
    ) -> None:
        self._board, self._executors = board, executors
        self._answer = f"{_QUESTION}/{here[0]}"
        self._others = [f"{_QUESTION}/{process}" for process in range(processes) if process not in here]
        self._answered = False
        if self._others:
            pulse.after_beat.append(self._look)

    def ask(self) -> list[NotFinite]:
        """What the workers have, those here first; without those that do not answer in time."""
        self._answered = True
        answers = [self._here()]
        with suppress(RuntimeError, OSError):  # the store ends with the process that holds it
            self._board.set(_QUESTION, "", patient=False)
            with suppress(TimeoutError):
                self._board.wait(self._others, PATIENCE)
            answers += [text for key in self._others if (text := self._board.get(key)) is not None]
        return [NotFinite(**row) for answer in answers for row in json.loads(answer)]

    def _look(self) -> None:
        if not self._answered and self._board.get(_QUESTION) is not None:
            self._answered = True
            with suppress(OSError):
                self._board.set(self._answer, self._here(), patient=False)

    def _here(self) -> str:
        return json.dumps([asdict(NotFinite.of(executor)) for executor in self._executors])


class LossCheck(Observer):
    """Follows a loss worker, and checks its losses before their backward runs.

    On CUDA a check would wait for the device: there only worker 0 checks, when it reads a loss anyway.

    Args:
        worker: the one that computes the losses.
        stop: makes the error of a minibatch, its loss and that worker.
    """

    def __init__(self, worker: int, stop: Callable[[int, float, int], NotFiniteError]) -> None:
        self._worker, self._stop = worker, stop

    def loss(self, minibatch: int, value: Tensor) -> None:
        """Refuse a loss that is not finite."""
        self.look(minibatch, float(value.reshape(-1)[0]))

    def look(self, minibatch: int, loss: float) -> None:
        """The same, for a loss that was read."""
        if not math.isfinite(loss):
            raise self._stop(minibatch, loss, self._worker)


def check_weights(steps: int, found: Sequence[NotFinite]) -> None:
    """Refuse to write weights that the last steps have made infinite or NaN."""
    if any(row.weights for row in found):
        raise NotFiniteError(
            f"after the last step, {steps}, weights are not finite: {_cause(found)}",
            hint="lower the learning rate, clip gradients (--clip-norm), or look at the last batches; " + _KEEP_GOING,
            page="not-finite",
        )


def not_finite(minibatch: int, loss: float, worker: int, found: Sequence[NotFinite], workers: int) -> NotFiniteError:
    """The error of a loss that is not finite."""
    return NotFiniteError(
        f"the loss of step {minibatch + 1} is {loss}, on worker {worker}: {_cause(found)}{_unknown(found, workers)}",
        hint="lower the learning rate, clip gradients (--clip-norm), or look at that batch; " + _KEEP_GOING,
        page="not-finite",
    )


def _cause(found: Sequence[NotFinite]) -> str:
    steps = [row.step for row in found if row.step is not None]
    if steps:
        first = min(steps)
        named = _named({row.worker: row.gradients for row in found if row.step == first})
        return f"at step {first} these gradients were not finite: {named}"
    if any(row.weights for row in found):
        return f"the gradients of these weights were not finite before: {_named({r.worker: r.weights for r in found})}"
    return "all weights and gradients were finite before: the cause is this batch or its forward"


def _unknown(found: Sequence[NotFinite], workers: int) -> str:
    silent = [str(k) for k in sorted(set(range(workers)) - {row.worker for row in found})]
    return f"; as far as is known, without worker {listed(silent)}, which did not answer" if silent else ""


def _named(names: Mapping[int, Sequence[str]]) -> str:
    return "; ".join(f"{listed(mine, _NAMED)} (worker {worker})" for worker, mine in names.items() if mine)
