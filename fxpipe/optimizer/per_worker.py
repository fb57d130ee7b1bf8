"""Whether each worker may have an optimizer of its own: one over all parameters, and one for each worker, are compared.

Most optimizers look at each parameter alone: then it makes no difference who else is in the list. Others clip by the
norm of all gradients inside step(), adapt one number to all parameters (Prodigy), or make rates from a parameter's
place in the list. Each worker of a pipeline has an optimizer over its own parameters, so these would train otherwise
there, and nobody would notice.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxpipe.errors import FxpipeError, TaskError, first_line
from fxpipe.optimizer.dependence import find_dependence
from fxpipe.optimizer.equal_draws import EqualDraws
from fxpipe.optimizer.play import Copies, Played
from fxpipe.optimizer.small_copies import users
from fxpipe.plan.spec import ParameterSpec, Plan
from fxpipe.random_state import random_state_kept
from fxpipe.task.model_file import MakeOptimizer, MakeScheduler
from fxpipe.task.one_optimizer import OptimizerRefused
from fxpipe.threads import threads

MOST = 400
"""Parameters that are played with, at most."""

SAME = 1e-6
"""The share of its own way by which a weight may differ. Copies are in double precision, where rounding is far less."""

ADAPTED = 1e-3
"""The same for a group's numbers, such as Prodigy's d: far more than rounding."""

COARSE = 0.05
"""The same where the optimizer itself computes in a coarse dtype, as Muon does: never more than this."""

SHARED = (
    "the step() of {kind} draws from one torch.Generator for all workers: a run over processes has one in each, and "
    "draws otherwise than a local run; leave generator= out, or make one in each optimizer"
)
WHERE = "optimizer(), tried on small copies of the parameters"


@dataclass(frozen=True)
class Divergence:
    """Where two ways of playing come apart most.

    Attributes:
        share: how far apart a weight is, relative to how far it has gone.
        parameter: its number.
    """

    share: float
    parameter: int


def check_per_worker(
    plan: Plan, make: MakeOptimizer | None, scheduler: MakeScheduler | None = None, *, accepted: bool = False
) -> str | None:
    """Play the user's optimizer both ways, in milliseconds; the process's random state stays as it is.

    Args:
        plan: says who owns which parameters; their values are not needed. Of very many, some are drawn. Where replicas
            of a worker share its parameters out, each has an optimizer of its own, and counts as a worker here.
        make: None is the default, which looks at each parameter alone.
        scheduler: of its rates; one that cannot be played is left out.
        accepted: the user knows that it makes a difference.

    Returns:
        One sentence for a warning: what could not be found out, or what was accepted.

    Raises:
        OptimizerRefused: no run can use it, or it trains nothing.
        TaskError: it makes a difference, or it fails where it is given one worker's parameters alone.
    """
    trained = [p for p in plan.parameters if p.trained]
    if plan.sharded:
        trained = [_of_replica(plan, p) for p in trained]
    if make is None or not trained:
        return None
    with warnings.catch_warnings(), random_state_kept(), _uncompiled(), threads(1, 1), _counted(plan):
        warnings.simplefilter("ignore")
        rows = _some(trained)
        copies = Copies(rows, plan.device, make, scheduler)
        try:
            together = _all_together(copies)
        except OptimizerRefused:
            raise
        except TaskError as error:
            return f"{' '.join(error.what.split())}; it was not found out whether each worker may have one of its own"
        if not together.kinds and len(rows) == len(trained):
            raise OptimizerRefused(
                "optimizer() chooses none of the model's parameters: nothing would be trained",
                hint="give it some of named_parameters; their names are those of model.named_parameters()",
            )
        if not together.kinds or len({row.owner for row in rows}) < 2:
            return None
        divided = _divided(copies)
        _refuse_lost(copies, together, divided)
        if compare(together, divided).share > SAME:
            found = _second_look(copies, together.kinds[0], accepted)
        else:
            found = _adapting(copies, together, divided, accepted)
        waiting = None if found and accepted else _waiting(copies, together, accepted)
        return "; ".join(filter(None, (found, waiting))) or None


def compare(together: Played, divided: Played) -> Divergence:
    """Where the weights after some step differ most, relative to how far they have gone by then."""
    ones, others = together.weights, divided.weights
    way = torch.zeros(len(ones[0]), dtype=torch.float64)
    rounding = torch.tensor([4 * torch.finfo(weight.dtype).eps for weight in ones[0]]) * _norms(ones[0])
    worst = Divergence(0.0, 0)
    for step in range(1, len(ones)):
        way += _norms(ones[step], ones[step - 1])
        share = (_norms(ones[step], others[step]) - rounding).clamp(min=0) / way.clamp(min=1e-300)
        for i in (~share.isfinite()).nonzero().flatten().tolist():
            equal = ones[step][i].allclose(others[step][i], rtol=SAME, equal_nan=True)
            share[i] = 0.0 if equal else torch.inf
        most = int(share.argmax())
        if share[most] > worst.share:
            worst = Divergence(float(share[most]), most)
    return worst


def _of_replica(plan: Plan, row: ParameterSpec) -> ParameterSpec:
    """A parameter whose owner is the replica that updates it, by its number among those of all workers in order."""
    return replace(row, owner=row.owner * plan.dp + plan.updaters(row.owner).get(row.name, 0))


def _some(trained: list[ParameterSpec]) -> list[ParameterSpec]:
    """All of them, or `MOST` at random: every so many might be the biases alone."""
    if len(trained) <= MOST:
        return trained
    order = torch.randperm(len(trained), generator=torch.Generator().manual_seed(0)).tolist()
    return [trained[i] for i in sorted(order[:MOST])]


def _everything(copies: Copies) -> list[list[int]]:
    return [[*range(len(copies.rows))]]


def _by_worker(copies: Copies) -> list[list[int]]:
    owners = sorted({row.owner for row in copies.rows})
    return [[i for i, row in enumerate(copies.rows) if row.owner == worker] for worker in owners]


def _all_together(copies: Copies) -> Played:
    try:
        with users():
            return copies.play(_everything(copies))
    except OptimizerRefused:
        raise
    except TaskError:
        copies.wide = False  # kernels of the optimizer's own may know the model's dtypes alone
        with users():
            return copies.play(_everything(copies))


def _divided(copies: Copies) -> Played:
    try:
        return copies.play(_by_worker(copies))
    except FxpipeError:
        raise
    except Exception as error:
        raise TaskError(
            "the optimizer takes all parameters together, but fails where each worker has one of its own: "
            f"{type(error).__name__}: {error}",
            where=WHERE,
            hint="optimizer(named_parameters) is called on every worker, with the parameters that it owns",
        ) from error


def _refuse_lost(copies: Copies, together: Played, divided: Played) -> None:
    """What one over all parameters trains, and a worker's own does not: torch takes no empty list.

    A run takes a worker whose optimizer would be over nothing for one that trains nothing.
    """
    pairs = zip(copies.rows, together.options[0], divided.options[0], strict=True)
    lost = [row for row, one, own in pairs if one and not own]
    if lost:
        raise TaskError(
            f"optimizer() trains {lost[0].name} where it is given all parameters, but not where it is given those of "
            f"its worker {lost[0].owner} alone: an optimizer over an empty list raises an error",
            where=WHERE,
            hint="a worker may own parameters of one kind alone: leave out what has none, as in "
            "`[torch.optim.Muon(matrices)] if matrices else []`",
        )


def _second_look(copies: Copies, kind: str, accepted: bool) -> str | None:
    """They differ: is it more than their random numbers, and than rounding in the dtypes that they compute in?"""
    try:
        draws = EqualDraws(copies.device)
        together, divided = copies.play(_everything(copies), draws), copies.play(_by_worker(copies), draws)
    except Exception as error:
        return (
            f"with one {kind} for each worker weights differ from those of one over all parameters, and it was not "
            f"found out why: {type(error).__name__}: {first_line(error)}"
        )
    found = compare(together, divided)
    if found.share <= _rounding(divided):
        return SHARED.format(kind=kind) if divided.share_generator else None
    row = copies.rows[found.parameter]
    steps = len(together.weights) - 1
    much = f"{found.share:.2g} times" if found.share >= 1 else f"{100 * found.share:.2g}% of"
    if found.share > 1e6:
        much = "many times"
    what = (
        f"{kind} trains otherwise with one for each worker, over its own parameters, than with one over all: in "
        f"{steps} steps weights come up to {much} their way apart ({row.name}, of worker {row.owner})"
    )
    clue, cure = _why(together, divided, found.parameter)
    what += clue
    if accepted:
        return f"{what}; this was accepted"
    if divided.drew_without_torch:
        return f"{what}; it draws random numbers from `random` or numpy, and these may be the only reason"
    accept = f"to train so nevertheless, with a {kind} for each worker: compile with --accept-optimizer-per-worker"
    raise TaskError(what, where=WHERE, hint=f"{cure}; {accept}")


def _adapting(copies: Copies, together: Played, divided: Played, accepted: bool) -> str | None:
    """No weight has come apart yet: is there a number that the optimizer makes of all parameters at once?

    At a small rate a few steps of Prodigy show nothing else.
    """
    numbers = zip(copies.rows, together.options[1], divided.options[1], strict=True)
    differing = ((row, found) for row, one, own in numbers if (found := _differing(one, own, ADAPTED)))
    row, found = next(differing, (None, None))
    if row is None or found is None:
        return None
    name, one, own = found
    what = (
        f"{together.kinds[0]} adapts {name} to all parameters at once: after {len(together.weights) - 1} steps it is "
        f"{one:.6g} with one optimizer over all, {own:.6g} with each worker's own ({row.name}, of worker {row.owner})"
    )
    if accepted:
        return f"{what}; this was accepted"
    raise TaskError(
        what,
        where=WHERE,
        hint="take an optimizer that looks at each parameter alone; or, to train so nevertheless, compile with "
        "--accept-optimizer-per-worker",
    )


def _waiting(copies: Copies, together: Played, accepted: bool) -> str | None:
    """Nothing has come apart yet: would it, with other values?"""
    kind = together.kinds[0]
    try:
        found = find_dependence(copies, [bool(options) for options in together.options[0]], _first_differing)
    except Exception as error:
        return (
            f"it was not found out whether {kind} looks at all parameters at once: {type(error).__name__}: "
            f"{first_line(error)}"
        )
    if found is None:
        return None
    verb = "trains" if found.proved else "may train"
    what = f"{kind} {verb} otherwise with one for each worker, over its own parameters, than with one over all: "
    what += found.what
    if not found.proved:
        return what
    if accepted:
        return f"{what}; this was accepted"
    raise TaskError(
        what,
        where=WHERE,
        hint="a worker sees its own parameters alone: what is clipped, skipped or adapted must follow from each alone; "
        "to clip by the norm of all gradients, leave that out of the optimizer and use --clip-norm; "
        f"to train so nevertheless, with a {kind} for each worker: compile with --accept-optimizer-per-worker",
    )


def _first_differing(usual: Played, other: Played) -> int | None:
    """The parameter whose weights, or whose group's numbers, are others."""
    found = compare(usual, other)
    if found.share > max(_rounding(usual), _rounding(other)):
        return found.parameter
    for place, (one, own) in enumerate(zip(usual.options[1], other.options[1], strict=True)):
        if _differing(one, own, ADAPTED):
            return place
    return None


def _rounding(played: Played) -> float:
    """How far weights may come apart by rounding in the dtypes that were computed in."""
    return min(max(100 * played.eps, SAME), COARSE)


def _differing(one: dict[str, float], own: dict[str, float], limit: float) -> tuple[str, float, float] | None:
    """The first of a group's numbers that differs by more than a share of itself, and both."""
    for name in one:
        if name in own and abs(one[name] - own[name]) > limit * max(abs(one[name]), abs(own[name])):
            return name, one[name], own[name]
    return None


def _why(together: Played, divided: Played, parameter: int) -> tuple[str, str]:
    """What more can be said of a difference, and how to make it go."""
    for first, options in zip((True, False), zip(together.options, divided.options, strict=True), strict=True):
        found = _differing(options[0][parameter], options[1][parameter], SAME)
        if found is None:
            continue
        name, one, own = found
        clue = f"; its {name} is {one:.6g} with one, {own:.6g} with its worker's own"
        if first:
            return clue, (
                f"make {name} from the parameter's name and from constants, not from its place in the list or from how "
                "many there are: a worker is given only its own"
            )
        return clue, f"it adapts {name} to all parameters at once: take an optimizer that looks at each alone"
    return "", (
        "its step() computes something of all parameters at once, such as a norm: to clip by the norm of all "
        "gradients, leave that out of the optimizer and use --clip-norm"
    )


def _norms(ones: list[Tensor], others: list[Tensor] | None = None) -> Tensor:
    """Of each tensor, or of how far each is from another."""
    tensors = ones if others is None else torch._foreach_sub(ones, others)
    return torch.stack([norm.double() for norm in torch._foreach_norm(tensors)]).cpu()


@contextmanager
def _counted(plan: Plan) -> Iterator[None]:
    """Errors say what they call a worker, where it is a replica."""
    try:
        yield
    except TaskError as error:
        if plan.sharded:
            error.what += (
                f"; with --shard optimizer each replica has an optimizer of its own, and is counted as a worker here: "
                f"replica r of worker w is {plan.dp} w + r"
            )
        raise


@contextmanager
def _uncompiled() -> Iterator[None]:
    """What the optimizer compiles with torch.compile is not compiled for the copies: it would take long."""
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        yield
