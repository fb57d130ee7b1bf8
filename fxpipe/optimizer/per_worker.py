"""Finds whether each worker may have its own optimizer: compares one over all parameters with one for each worker.

Most optimizers look at each parameter alone: then the other parameters in the list make no difference. Others clip by
the norm of all gradients inside step(), adapt one number to all parameters (Prodigy), or make rates from a parameter's
place in the list. Each worker of a pipeline has an optimizer over its own parameters, so these would silently train
differently. For an unknown optimizer, a trial may find a difference, but cannot prove that there is none.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxpipe.device_copies import widest
from fxpipe.errors import FxpipeError, TaskError, listed
from fxpipe.optimizer.hook import uncompiled, users
from fxpipe.optimizer.play import Copies, Played, TooLong
from fxpipe.plan.plan import ParameterSpec, Plan
from fxpipe.random_state import random_state_kept
from fxpipe.task.hooks import MakeOptimizer, MakeScheduler
from fxpipe.task.model_file import default_optimizer
from fxpipe.task.one_optimizer import OptimizerRefused
from fxpipe.threads import threads
from fxpipe.torch_private import foreach_norm, foreach_sub

MOST = 400
"""The most parameters in the trial."""

SAME = 1e-6
"""The largest difference of a weight, as a share of its own way. Copies are in double precision: rounding is far
less."""

ADAPTED = 1e-3
"""The same for a group's numbers, such as Prodigy's d: far more than rounding."""

COARSE = 0.05
"""The same if the optimizer itself computes in a coarse dtype, as Muon does; never more than this."""

UNUSUAL = {1e9: "far larger", math.nan: "not a number", math.inf: "infinite"}
"""Factors on gradients, and what gradients are then: for optimizers that wait for a large norm, or skip such steps."""

UNKNOWN = (
    "{kind} may train differently with one for each worker than with one over all parameters: a trial on "
    "small copies found no difference, but fxpipe does not know if it looks at each parameter alone; if it does, "
    "say so with --accept-optimizer-per-worker"
)
WHERE = "optimizer(), tried on small copies of the parameters"


@dataclass(frozen=True)
class _Disagreement:
    """The difference between one optimizer over all parameters and one for each worker, and how to remove it."""

    what: str
    cure: str


def check_per_worker(
    plan: Plan, make: MakeOptimizer | None, scheduler: MakeScheduler | None = None, *, accepted: bool = False
) -> str | None:
    """Play the user's optimizer both ways, in milliseconds; the process's random state stays unchanged.

    Args:
        plan: says which worker owns which parameters; their values are not needed. If there are very many, some are
            drawn. If replicas of a worker shard its parameters, each has its own optimizer, and counts as a worker
            here.
        make: None is the default, which looks at each parameter alone.
        scheduler: of its rates; left out if it cannot be played.
        accepted: the user knows that it makes a difference.

    Returns:
        One sentence for a warning: what is unknown, or what was accepted.

    Raises:
        OptimizerRefused: no run can use it, or it trains nothing.
        TaskError: it makes a difference, or it fails with one worker's parameters.
    """
    trained = [p for p in plan.parameters if p.trained]
    if plan.sharded:  # the owner is then the replica that updates it, numbered among all workers' replicas in order
        trained = [replace(p, owner=p.owner * plan.dp + plan.updaters(p.owner).get(p.name, 0)) for p in trained]
    if (make is None and scheduler is None) or not trained:
        return None
    make = make or default_optimizer
    with warnings.catch_warnings(), random_state_kept(), uncompiled(), threads(1, 1), _counted(plan):
        warnings.simplefilter("ignore")
        rows = _some(trained)
        copies = Copies(rows, plan.device, make, scheduler)
        try:
            together = _all_together(copies)
        except OptimizerRefused:
            raise
        except TaskError as error:
            return f"{' '.join(error.what.split())}; whether each worker may have its own is unknown"
        if not together.kinds and len(rows) == len(trained):
            raise OptimizerRefused(
                "optimizer() chooses none of the model's parameters: nothing would be trained",
                hint="give it some of named_parameters; their names are those of model.named_parameters()",
            )
        if not together.kinds or len({row.owner for row in rows}) < 2:
            return None
        divided = _divided(copies)
        _refuse_lost(copies, together, divided)
        disagreement = _difference(copies, together, divided)
        if disagreement is not None and divided.outside:
            disagreement = _shared_state(copies, together, divided) or disagreement
        if disagreement is None and not together.known:
            disagreement = _unusual_difference(copies)
        kind = together.kinds[0]
        if disagreement is None:
            return None if together.known or accepted else UNKNOWN.format(kind=kind)
        if accepted:
            return f"{disagreement.what}; this was accepted"
        if divided.drew_without_torch:
            return f"{disagreement.what}; it draws random numbers from `random` or numpy, which may be the only reason"
        accept = f"to accept this, with a {kind} for each worker: compile with --accept-optimizer-per-worker"
        raise TaskError(disagreement.what, where=WHERE, hint=f"{disagreement.cure}; {accept}")


def largest_difference(together: Played, divided: Played) -> tuple[float, int]:
    """The most by which a weight differs after some step, relative to how far it has moved by then; its number."""
    ones, others = together.weights, divided.weights
    way = torch.zeros(len(ones[0]), dtype=torch.float64)
    rounding = torch.tensor([4 * torch.finfo(weight.dtype).eps for weight in ones[0]]) * _norms(ones[0])
    worst = 0.0, 0
    for step in range(1, len(ones)):
        way += _norms(ones[step], ones[step - 1])
        share = (_norms(ones[step], others[step]) - rounding).clamp(min=0) / way.clamp(min=1e-300)
        for i in (~share.isfinite()).nonzero().flatten().tolist():
            equal = ones[step][i].allclose(others[step][i], rtol=SAME, equal_nan=True)
            share[i] = 0.0 if equal else torch.inf
        most = int(share.argmax())
        if share[most] > worst[0]:
            worst = float(share[most]), most
    return worst


def _some(trained: list[ParameterSpec]) -> list[ParameterSpec]:
    """All of them, or `MOST` at random: every n-th might be only the biases."""
    if len(trained) <= MOST:
        return trained
    order = torch.randperm(len(trained), generator=torch.Generator().manual_seed(0)).tolist()
    return [trained[i] for i in sorted(order[:MOST])]


def _all_together(copies: Copies) -> Played:
    try:
        with users():
            return copies.play(divided=False)
    except OptimizerRefused:
        raise
    except TaskError:
        copies.wide = False  # the optimizer's kernels may support only the model's dtypes
        with users():
            return copies.play(divided=False)


def _divided(copies: Copies) -> Played:
    try:
        return copies.play(divided=True)
    except FxpipeError:
        raise
    except Exception as error:
        raise TaskError(
            "the optimizer works over all parameters, but fails if each worker has its own: "
            f"{type(error).__name__}: {error}",
            where=WHERE,
            hint="optimizer(named_parameters) is called on every worker, with the parameters that it owns",
        ) from error


def _refuse_lost(copies: Copies, together: Played, divided: Played) -> None:
    """Refuse if one over all trains parameters that a worker's own does not: torch refuses an empty list.

    In a run, a worker whose optimizer would be empty trains nothing.
    """
    pairs = zip(copies.rows, together.options[0], divided.options[0], strict=True)
    lost = [row for row, one, alone in pairs if one and not alone]
    if lost:
        raise TaskError(
            f"optimizer() trains {lost[0].name} if it is given all parameters, but not if it is given only those of "
            f"its worker {lost[0].owner}: an optimizer over an empty list raises an error",
            where=WHERE,
            hint="a worker may own parameters of one kind only: leave out empty optimizers, as in "
            "`[torch.optim.Muon(matrices)] if matrices else []`",
        )


def _unusual_difference(copies: Copies) -> _Disagreement | None:
    """The same with gradients of unusual size on some workers."""
    for (factor, called), of in itertools.product(UNUSUAL.items(), (0, 1)):
        gradients = copies.unusual(factor, of)
        try:
            together = copies.play(divided=False, gradients=gradients)
            divided = copies.play(divided=True, gradients=gradients)
        except (Exception, TooLong):
            continue  # it fails with such gradients
        disagreement = _difference(copies, together, divided)
        if disagreement is not None:
            return replace(disagreement, what=f"{disagreement.what}; gradients of other workers are {called} there")
    return None


def _difference(copies: Copies, together: Played, divided: Played) -> _Disagreement | None:
    """A difference of weights, or of numbers that an optimizer adapts: a few steps of Prodigy may show nothing else."""
    kind, steps = together.kinds[0], len(together.weights) - 1
    share, parameter = largest_difference(together, divided)
    if share > min(max(100 * max(together.eps, divided.eps), SAME), COARSE):
        row = copies.rows[parameter]
        much = f"{share:.2g} times" if share >= 1 else f"{100 * share:.2g}% of"
        if share > 1e6:
            much = "many times"
        clue, cure = _why(together, divided, parameter)
        return _Disagreement(
            f"{kind} behaves differently when each worker has its own: after {steps} steps weights differ by up to "
            f"{much} the distance that they moved ({row.name}, of worker {row.owner}){clue}",
            cure,
        )
    for row, one, alone in zip(copies.rows, together.options[1], divided.options[1], strict=True):
        if differing := _differing(one, alone, ADAPTED):
            name, a, b = differing
            return _Disagreement(
                f"{kind} adapts {name} to all parameters at once: after {steps} steps it is {a:.6g} with one optimizer "
                f"over all, {b:.6g} with each worker's own ({row.name}, of worker {row.owner})",
                "use an optimizer that looks at each parameter alone",
            )
    return None


def _shared_state(copies: Copies, together: Played, divided: Played) -> _Disagreement | None:
    """A difference that vanishes if each optimizer has separate globals and the like."""
    if _difference(copies, together, copies.play(divided=True, processes=True)) is not None:
        return None
    names = listed(list(dict.fromkeys(divided.outside)), 4)
    return _Disagreement(
        f"{together.kinds[0]} or its scheduler changes {names} at every step, which it does not own: the workers of "
        "one process share it and change it several times a step, and checkpoints leave it out",
        "keep it in the optimizer: in self.state, in param_groups or in an attribute",
    )


def _differing(one: dict[str, float], other: dict[str, float], limit: float) -> tuple[str, float, float] | None:
    """The first of a group's numbers with a relative difference above `limit`, and both its values."""
    for name in one:
        if name in other and abs(one[name] - other[name]) > limit * max(abs(one[name]), abs(other[name])):
            return name, one[name], other[name]
    return None


def _why(together: Played, divided: Played, parameter: int) -> tuple[str, str]:
    """More about a difference, and how to remove it."""
    for first, options in zip((True, False), zip(together.options, divided.options, strict=True), strict=True):
        difference = _differing(options[0][parameter], options[1][parameter], SAME)
        if difference is None:
            continue
        name, one, other = difference
        clue = f"; its {name} is {one:.6g} with one, {other:.6g} with its worker's own"
        if first:
            return clue, (
                f"make {name} from the parameter's name and from constants, not from its place in the list or from "
                "their number: a worker is given only its own"
            )
        return clue, f"it adapts {name} to all parameters at once: use an optimizer that looks at each alone"
    return "", (
        "its step() computes something over all parameters, such as a norm: to clip by the norm of all "
        "gradients, remove that from the optimizer and use --clip-norm; what else it skips or adapts must follow "
        "from each parameter alone"
    )


def _norms(ones: list[Tensor], others: list[Tensor] | None = None) -> Tensor:
    """The norm of each tensor, or of its difference from another."""
    tensors = ones if others is None else foreach_sub(ones, others)
    return torch.stack([norm.to(widest(norm.device)) for norm in foreach_norm(tensors)]).cpu().double()


@contextmanager
def _counted(plan: Plan) -> Iterator[None]:
    """Errors in here explain what they call a worker, if it is a replica."""
    try:
        yield
    except TaskError as error:
        if plan.sharded:
            error.what += (
                f"; with --shard optimizer each replica has its own optimizer, and counts as a worker here: "
                f"replica r of worker w is {plan.dp} w + r"
            )
        raise
