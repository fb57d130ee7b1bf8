"""The costs of an optimizer per byte of parameters, measured on a sample: its state, its step, its predictions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fxpipe.costs.allocations import TrackedAllocations, tensors_in
from fxpipe.costs.timer import Clock, Rounds, clock_of, quartile, seconds_of
from fxpipe.errors import PolicyError, TaskError
from fxpipe.optimizer.hook import hold_still, make_optimizer, shrunk, uncompiled, users
from fxpipe.plan.cost_records import OptimizerCosts, PolicyTimes, StepMemory
from fxpipe.policy.optimizers.predict import Predictor
from fxpipe.policy.optimizers.rules import LAST_UPDATE, rule_of
from fxpipe.policy.optimizers.update_repair import UpdateRepair, has_momentum
from fxpipe.policy.repair import REPAIRS
from fxpipe.task.hooks import MakeOptimizer
from fxpipe.task.one_optimizer import OptimizerRefused

Named = Sequence[tuple[str, Tensor]]

STATE_SAMPLE = 4 << 20
"""The most bytes of parameters on which the size of the state is measured."""

TIME_SAMPLE = 16 << 20
"""The most bytes of parameters on which a step is timed: with gradients and state, more than caches hold."""

ROUNDS = Rounds(budget=0.25, least=5, most=100)
POLICY_ROUNDS = Rounds(budget=0.1, least=5, most=100, warm=1)


def optimizer_costs(named: Named, optimizer: MakeOptimizer, *, timed: bool, bandwidth: float) -> OptimizerCosts:
    """The optimizer's costs for these parameters; assumed if it fails, since it may still work in a run.

    Args:
        named: the trained parameters.
        timed: measure a step, and what policies add to it, with torch's current threads; else compute both: a step
            reads weight, gradient and state, and writes weight and state.
        bandwidth: bytes a second of the device's memory; also used if the optimizer cannot be tried.

    Raises:
        OptimizerRefused: no run can use it.
    """
    state, momentum, step = 1.0, False, StepMemory()
    try:
        state, momentum, step = _state(named, optimizer)
        if timed:
            seconds, policy = _timed(named, optimizer)
            return OptimizerCosts(state, seconds, momentum, policy, step)
    except OptimizerRefused:
        raise
    except TaskError as error:
        message = " ".join(error.what.split())
        doubt = f"{message}; {state:.3g} bytes of state for each byte of weights and a computed update are assumed"
        return replace(_computed(state, momentum, bandwidth), step=step, doubt=doubt)
    return replace(_computed(state, momentum, bandwidth), step=step)


def _computed(state: float, momentum: bool, bandwidth: float) -> OptimizerCosts:
    """The costs that follow from the bytes that are read and written.

    A prediction reads weight and state and writes the result. To remember an update, the weight is copied and
    subtracted from the new one; a prediction adds that. Repairs know how much they read and write.
    """
    repairs = tuple((repair.name, repair.passes / bandwidth) for repair in REPAIRS.values() if momentum)
    policy = PolicyTimes((2.0 + state) / bandwidth, 10.0 / bandwidth, repairs)
    return OptimizerCosts(state, (3.0 + 2.0 * state) / bandwidth, momentum, policy)


def _state(parameters: Named, hook: MakeOptimizer) -> tuple[float, bool, StepMemory]:
    """The bytes of state per byte of parameters, whether every group has momentum, and the memory of a step.

    Every parameter takes part, made smaller if necessary, so that one without state, or of another group, counts as it
    does in the model.
    """
    total = sum(t.nbytes for _, t in parameters)
    if not total:
        return 0.0, False, StepMemory()
    sample = _sample(parameters, [t.numel() * min(1.0, STATE_SAMPLE / total) for _, t in parameters])
    optimizer = _stepped(sample, hook)
    if optimizer is None:
        return 0.0, False, StepMemory()
    state = 0.0
    for (_, whole), (_, small) in zip(parameters, sample, strict=True):
        for tensor in tensors_in(optimizer.state.get(small, {})):
            state += tensor.nbytes * (whole.numel() / small.numel() if tensor.dim() and small.numel() else 1.0)
    step = replace(
        _step_memory(optimizer, [p for _, p in sample]),
        keeps_update=any(rule_of(optimizer, group) is LAST_UPDATE for group in optimizer.param_groups),
    )
    return state / total, all(map(has_momentum, optimizer.param_groups)), step


def _step_memory(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> StepMemory:
    """The memory of a step, from two steps: with all parameters, and with only the largest."""
    largest = max(parameters, key=lambda parameter: parameter.nbytes)
    total = sum(parameter.nbytes for parameter in parameters)
    held = []
    try:
        with users(), uncompiled(), TrackedAllocations() as memory:
            for gone in ([], [p for p in parameters if p is not largest]):
                for parameter in gone:
                    parameter.grad = None
                optimizer.step()  # the first sees existing memory
                before = memory.live
                memory.restart()
                optimizer.step()
                held.append(memory.peak - before)
    except Exception:  # code that may work in a run but cannot be traced, such as a compiled step
        return StepMemory()
    of_all = (held[0] - held[1]) / (total - largest.nbytes) if total > largest.nbytes else 0.0
    of_all = max(0.0, of_all)
    return StepMemory(max(0.0, held[1] / max(largest.nbytes, 1) - of_all), of_all)


def _timed(parameters: Named, hook: MakeOptimizer) -> tuple[float, PolicyTimes]:
    """The seconds per byte of parameters of a step and of the policies' work, with torch's current threads.

    Timed on up to 16 MB of tensors like the model's own: every n-th of them, with large ones made smaller.
    """
    if not sum(t.nbytes for _, t in parameters):
        return 0.0, PolicyTimes()
    numels = [min(t.numel(), TIME_SAMPLE // 4 // t.element_size()) for _, t in parameters]
    bytes_wanted = sum(n * t.element_size() for n, (_, t) in zip(numels, parameters, strict=True))
    every = max(1, -(-bytes_wanted // TIME_SAMPLE))
    sample = _sample(parameters[::every], numels[::every])
    optimizer = _stepped(sample, hook)
    if optimizer is None:
        return 0.0, PolicyTimes()
    clock = clock_of(sample[0][1].device.type)
    with users():
        taken = [seconds_of(optimizer.step, clock) for _ in ROUNDS.run()]
    size = sum(p.nbytes for _, p in sample)
    return quartile(taken) / size, _policy_times(optimizer, [p for _, p in sample], clock)


def _policy_times(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], clock: Clock) -> PolicyTimes:
    """The seconds per byte of these parameters; 0 for work that is impossible with this optimizer: a run refuses it."""
    size, every = sum(p.nbytes for p in parameters), range(len(parameters))

    def seconds(work: Callable[[], None]) -> float:
        try:
            with users():
                rounds = [(measured, seconds_of(work, clock)) for measured in POLICY_ROUNDS.run()]
                return quartile([taken for measured, taken in rounds if measured]) / size
        except TaskError:
            return 0.0

    def predict(predictor: Predictor) -> None:
        predictor.before_step()
        predictor.after_step()
        predictor.give_back(predictor.predict(1), every)

    def repair(work: UpdateRepair) -> None:
        work.before_step()
        work.after_step()

    predictors = (Predictor(optimizer, parameters, weight_form=weight_form) for weight_form in (False, True))
    prediction, repetition = (seconds(functools.partial(predict, predictor)) for predictor in predictors)
    repairs = {}
    for entry in REPAIRS.values():
        with contextlib.suppress(PolicyError):  # no run has it with this optimizer
            work = entry.kind(optimizer, dict.fromkeys(parameters, 1))
            repairs[entry.name] = seconds(functools.partial(repair, work))
    return PolicyTimes(prediction, repetition, tuple(repairs.items()))


def _sample(parameters: Named, numels: Iterable[float]) -> list[tuple[str, nn.Parameter]]:
    """Parameters under the same names, with at most the given numbers of elements (at least one), and gradients."""
    sample = []
    for (name, tensor), numel in zip(parameters, numels, strict=True):
        place = "cpu" if tensor.is_meta else tensor.device
        parameter = nn.Parameter(torch.zeros(shrunk(tensor.shape, numel), dtype=tensor.dtype, device=place))
        parameter.grad = torch.full_like(parameter, 1e-3)
        sample.append((name, parameter))
    return sample


def _stepped(sample: list[tuple[str, nn.Parameter]], hook: MakeOptimizer) -> torch.optim.Optimizer | None:
    with users():
        optimizer = make_optimizer(hook, sample)
        if optimizer is not None:
            hold_still(optimizer)
            for _ in range(2):  # the first makes the state
                optimizer.step()
    return optimizer
