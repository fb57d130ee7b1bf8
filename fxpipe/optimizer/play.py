"""Plays optimizers for a few steps on small copies of parameters: the same weights and gradients every time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import TaskError
from fxpipe.optimizer.hook import make_optimizer, shrunk
from fxpipe.optimizer.known import looks_at_each_alone
from fxpipe.optimizer.state_outside import state_outside
from fxpipe.plan.plan import ParameterSpec
from fxpipe.random_state import drew_without_torch, random_state, seed_generators, seed_torch
from fxpipe.task.hooks import MakeOptimizer, MakeScheduler
from fxpipe.task.one_optimizer import OptimizerRefused
from fxpipe.task.paced_scheduler import paced
from fxpipe.task.parameter_attributes import hang
from fxpipe.task.several_optimizers import name_of
from fxpipe.torch_private import LightDispatchMode, pytree
from fxpipe.tracing.lasting_state import noteworthy
from fxpipe.tracing.model_state import PythonState, Snapshot, put_back

ELEMENTS = 64
"""The most elements of a copy."""

LOUD = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 100.0, 0.01)
"""The sizes of the gradients of the steps: equal for long, for optimizers that adapt rates; then a spike for
clipping."""

QUIET, SPREAD = 1e-4, 1e5
"""For a step before these: how large its gradients are, and the factor on the first worker's. An optimizer that skips a
step with any too large gradient skips it only for this worker; later, the others have moved too far to show it."""


@dataclass(frozen=True)
class Played:
    """What some optimizers did to the copies.

    Attributes:
        kinds: the optimizers' types by name; empty if all chose no parameter.
        weights: before the first step, and after every step.
        options: of each parameter before the first step and after the last: its group's numbers, `lr` first.
        known: all optimizers are known to look at each parameter alone.
        drew_without_torch: a step used the generators of `random` or numpy.
        eps: of the coarsest dtype in a computation, except for counts and rates.
        outside: Python state that they have changed and do not own.
    """

    kinds: tuple[str, ...]
    weights: list[list[Tensor]]
    options: tuple[list[dict[str, float]], list[dict[str, float]]]
    known: bool = True
    drew_without_torch: bool = False
    eps: float = 0.0
    outside: tuple[str, ...] = ()


class Copies:
    """Copies of parameters, and gradients for them, on which optimizers are played.

    Args:
        make, scheduler: the user's; a scheduler that fails is left out.
        attributes: what hangs on the parameters.

    Attributes:
        rows: what is copied; values are not used.
        make, scheduler, attributes: as given.
        gradients: of every parameter, for every step.
        device: where the copies are.
        wide: the copies are in double precision, else in the parameters' own dtypes.
    """

    def __init__(
        self, rows: Sequence[ParameterSpec], device: str, make: MakeOptimizer, scheduler: MakeScheduler | None
    ) -> None:
        self.rows = rows
        self.wide = True
        self.device = device
        self.make = make
        self.scheduler = scheduler
        self._dtypes: list[torch.dtype] = [getattr(torch, row.tensor.dtype) for row in rows]
        self._shapes = [shrunk(row.tensor.shape, ELEMENTS) for row in rows]
        self._generator = torch.Generator().manual_seed(0)
        self._weights = [0.5 * weight for weight in self._random()]
        self.gradients = list(self._noisy())
        self._operators = 0  # of steps with usual gradients

    def unusual(self, factor: float, of: int) -> Sequence[Sequence[Tensor]]:
        """The gradients of three steps; in the second, every other worker's are multiplied by `factor`.

        Args:
            of: 0 for the first, the third and so on, 1 for the others.
        """
        owners = sorted({row.owner for row in self.rows})
        factors = [factor if owners.index(row.owner) % 2 == of else 1.0 for row in self.rows]
        before, these, after = self.gradients[1:4]
        return before, [much * gradient for much, gradient in zip(factors, these, strict=True)], after

    def play(
        self, divided: bool, gradients: Sequence[Sequence[Tensor]] | None = None, processes: bool = False
    ) -> Played:
        """Make one optimizer for all rows, or one for each worker's, and step them. Python state is put back.

        Args:
            divided: each worker has its own.
            gradients: used in place of `self.gradients`, for any number of steps.
            processes: each optimizer has its own globals and the like, as in a separate process.

        Raises:
            Exception: whatever the user's optimizer raises.
            TooLong: with these gradients it calls far more operators than with the usual ones.
        """
        copies = [nn.Parameter(weight) for weight in self._own(self._weights)]
        draws = _EqualDraws(self.device, math.inf if gradients is None else 2 * self._operators)
        parts: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for row, parameter in zip(self.rows, copies, strict=True):
            hang(parameter, row.name, row.attributes)
            parts.setdefault(row.owner if divided else 0, []).append((row.name, parameter))
        optimizers: list[torch.optim.Optimizer] = []
        for owner in sorted(parts):
            seed_generators(0, self.device)
            with draws:
                optimizer = make_optimizer(self.make, parts[owner])
            optimizers += [] if optimizer is None else [optimizer]
        each_alone = all(map(looks_at_each_alone, optimizers))  # a scheduler replaces `step`
        python = state_outside(optimizers, [self.scheduler])
        first = python.snapshot()
        turns = [_Turn(python, first) if processes else nullcontext() for _ in optimizers]
        with python.preserved():
            schedulers = []
            for optimizer, turn in zip(optimizers, turns, strict=True):
                with turn, draws:
                    schedulers.append(self._scheduled(optimizer))
            before = _options(copies, optimizers)
            weights, drew = [_values(copies)], False
            for step_gradients in self.gradients if gradients is None else gradients:
                for parameter, gradient in zip(copies, self._own(step_gradients), strict=True):
                    parameter.grad = gradient
                for optimizer, scheduler, turn in zip(optimizers, schedulers, turns, strict=True):
                    with turn, draws:
                        seed_generators(len(weights), self.device)
                        state = random_state()
                        with torch.no_grad():
                            optimizer.step()
                        drew = drew or drew_without_torch(state)
                        with suppress(Exception):  # it may need a run's steps, or a metric
                            scheduler.step()
                weights.append(_values(copies))
            outside = tuple(change.place for change in noteworthy(python.changes(first)))
        kinds = tuple(name_of(optimizer) for optimizer in optimizers)
        options = before, _options(copies, optimizers)
        if gradients is None:
            self._operators = draws.operators
            self._check_zero_grad(copies, optimizers)
        return Played(kinds, weights, options, each_alone, drew, draws.eps, outside)

    def _check_zero_grad(self, copies: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse optimizers that carry gradients over: in a run every step has only its minibatch's."""
        for parameter, gradient in zip(copies, self._own(self.gradients[0]), strict=True):
            parameter.grad = gradient
        for optimizer in optimizers:
            with suppress(Exception):  # a run does not call it
                optimizer.zero_grad()
                held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                if any(bool(gradient.any()) for gradient in held):
                    break
        else:
            return
        raise OptimizerRefused(
            f"{name_of(optimizer)}.zero_grad() keeps gradients for the next step, and a pipeline gives every "
            "step only the gradients of its minibatch",
            hint="keep what is carried over in the optimizer's state, and add it in step()",
        )

    def _scheduled(self, optimizer: torch.optim.Optimizer) -> Any:
        """The scheduler, which steps after every step of the copies, even if it is for epochs; None if there is none.

        Raises:
            OptimizerRefused: no run can step it.
        """
        scheduler = None
        with suppress(Exception):  # it may need a run
            scheduler = None if self.scheduler is None else self.scheduler(optimizer)
        try:
            paced_scheduler = paced(scheduler, optimizer)
        except TaskError as error:
            raise OptimizerRefused(error.what, where=error.where or "lr_scheduler()", hint=error.hint) from error
        return None if paced_scheduler is None else paced_scheduler.scheduler

    def _own(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Copies that an optimizer may write to."""
        dtypes = [value.dtype for value in values] if self.wide else self._dtypes
        return [value.to(self.device, dtype, copy=True) for value, dtype in zip(values, dtypes, strict=True)]

    def _random(self) -> list[Tensor]:
        wide = [torch.complex128 if dtype.is_complex else torch.float64 for dtype in self._dtypes]
        pairs = zip(self._shapes, wide, strict=True)
        return [torch.randn(shape, generator=self._generator, dtype=dtype) for shape, dtype in pairs]

    def _noisy(self) -> Sequence[list[Tensor]]:
        """The gradients of every step: noise around one direction, as if a loss falls.

        Their noise differs between parameters and workers, so that all means and norms differ.
        """
        scales = 10 ** torch.rand(len(self.rows), generator=self._generator, dtype=torch.float64)
        louder = [scale * 8.0 ** (row.owner % 3) for scale, row in zip(scales.tolist(), self.rows, strict=True)]
        ways = [scale * way for scale, way in zip(louder, self._random(), strict=True)]
        first = self.rows[0].owner if self.rows else 0
        quiet = [QUIET * (SPREAD if row.owner == first else 1.0) for row in self.rows]
        gradients = [[scale * way for scale, way in zip(quiet, self._random(), strict=True)]]
        for much in LOUD:
            rows = zip(ways, louder, self._random(), strict=True)
            gradients.append([much * (way + 0.3 * scale * noise) for way, scale, noise in rows])
        return gradients


class _Turn:
    """A context with the Python state of one of several simulated processes."""

    def __init__(self, python: PythonState, state: Snapshot) -> None:
        self._python, self._state = python, state

    def __enter__(self) -> None:
        put_back(self._state)

    def __exit__(self, *error: object) -> None:
        self._state = self._python.snapshot()


class TooLong(BaseException):
    """A loop that seems endless: the optimizer's except clauses do not catch it."""


class _EqualDraws(LightDispatchMode):
    """Every operator that draws random numbers gives the same numbers for the same shape, in any order of calls.

    Args:
        device: draws the numbers, if not the CPU.
        most: operators before `TooLong`.

    Attributes:
        operators: how many were called.
        eps: of the coarsest dtype in a computation, except for counts and rates.
    """

    def __init__(self, device: str, most: float) -> None:
        super().__init__()
        self.operators = 0
        self.eps = 0.0
        self._device = device
        self._most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        if self.operators > self._most:
            raise TooLong
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            seed_torch(0, self._device)
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Generator):
                    value.manual_seed(0)
        result = func(*args, **kwargs)
        for tensor in (result,) if isinstance(result, Tensor) else pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype.is_floating_point and tensor.numel() > 1:
                self.eps = max(self.eps, _eps(tensor.dtype))
        return result


@functools.cache
def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _values(copies: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in copies]


def _options(copies: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, float]]:
    by_parameter: dict[int, dict[str, float]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            numbers = {name: number for name, value in group.items() if (number := _number(value)) is not None}
            numbers = dict(sorted(numbers.items(), key=lambda item: item[0] != "lr"))
            by_parameter.update(dict.fromkeys((id(parameter) for parameter in group["params"]), numbers))
    return [by_parameter.get(id(parameter), {}) for parameter in copies]


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, (int, float)) else None
