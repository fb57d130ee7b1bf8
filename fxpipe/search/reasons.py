"""Why a trial loses against the best one, in one clause with its numbers."""

from __future__ import annotations

from fxpipe.planner.quantity import size
from fxpipe.search.simulated_plan import SimulatedPlan

TIE = 0.01
"""If forecasts differ by less, either may be faster."""

_MORE = 1.02
"""Work that grows by less is not named."""


def reason(trial: SimulatedPlan, best: SimulatedPlan) -> str:
    """What costs most: waiting for links, more work, or the rest of the bubble; for a tie, what decided it."""
    lost = trial.pace / best.pace - 1 if best.pace else 0.0
    if lost <= TIE:
        return f"{_faster(lost)}, {_less_simple(trial, best)}"
    parts = {
        "links": _share(trial, trial.waits_for_links) - _share(best, best.waits_for_links),
        "work": _share(trial, trial.busy) - _share(best, best.busy),
    }
    parts["bubble"] = trial.pace - best.pace - sum(parts.values())
    return {"links": _links, "work": _work, "bubble": _bubble}[max(parts, key=lambda name: parts[name])](trial, best)


def _share(trial: SimulatedPlan, seconds: float) -> float:
    return trial.candidate.sized.share(seconds)


def _links(trial: SimulatedPlan, best: SimulatedPlan) -> str:
    return f"waits {_ms(trial.waits_for_links)} a minibatch for links against {_ms(best.waits_for_links)}"


def _bubble(trial: SimulatedPlan, best: SimulatedPlan) -> str:
    one, other = 100 * trial.simulation.bubble, 100 * best.simulation.bubble
    digits = 0 if round(one) != round(other) else 1
    return f"bubble {one:.{digits}f}% against {other:.{digits}f}%"


def _work(trial: SimulatedPlan, best: SimulatedPlan) -> str:
    """The cause of more work: smaller microbatches, forward computed again, or updates and policies."""
    compute, others = _compute(trial), _compute(best)
    samples, count = trial.candidate.sized.samples, trial.candidate.microbatches
    if samples is not None and count != best.candidate.microbatches and compute > _MORE * others:
        each = samples // count
        return f"microbatches of {each} sample{'' if each == 1 else 's'} cost {compute / others:.2f} times per sample"
    again, before = _again(trial), _again(best)
    if again > before:
        return f"computes {_ms(again)} of forward again against {_ms(before)}"
    return f"{_ms(trial.busy)} of work on each worker against {_ms(best.busy)}"


def _compute(trial: SimulatedPlan) -> float:
    """Seconds of F, B and W of a minibatch on all workers."""
    loads = trial.partition.loads
    return trial.candidate.microbatches * sum(load.forward + load.backward + load.weight for load in loads)


def _again(trial: SimulatedPlan) -> float:
    return trial.candidate.microbatches * sum(load.recompute for load in trial.partition.loads)


def _faster(lost: float) -> str:
    if abs(lost) < 5e-4:
        return "as fast"
    return f"{100 * abs(lost):.1f}% {'slower' if lost > 0 else 'faster'}"


def _less_simple(trial: SimulatedPlan, best: SimulatedPlan) -> str:
    """What made the other one win, in the order of `simplicity`."""
    if trial.staleness != best.staleness:
        return f"but forwards miss {trial.staleness} update{'' if trial.staleness == 1 else 's'}"
    if complexity(trial) > complexity(best):
        if not trial.schedule.synchronous:
            return "but without a flush"
        several = trial.schedule.several and not best.schedule.several
        return "but processes run several stages" if several else "but weight gradients are separate"
    held, less = size(trial.memory), size(best.memory)
    return f"but a worker holds {held} against {less}" if held != less else "and no simpler"


def complexity(trial: SimulatedPlan) -> int:
    """How much a schedule needs beyond forward, backward and a flush."""
    schedule = trial.schedule
    return 4 * (not schedule.synchronous) + 2 * schedule.several + schedule.weights_apart


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 1 else 3}f} ms"
