"""What is not legal, and words of the error that names the option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from case import APART, SEVERAL, Case

APART_TRAINED = ("outer", "delayed")
WITH_MOMENTUM = ("momentum", "nesterov", "adamw", "two")


@dataclass(frozen=True)
class Rule:
    """What is refused.

    Attributes:
        says: is in the error or its hint.
    """

    name: str
    says: str
    forbids: Callable[[Case], bool]


def _follows_the_optimizer(case: Case) -> bool:
    """Whether the policy predicts weights or repairs steps."""
    if case.policy == "default":
        return not case.flushes and (case.workers > 1 or case.schedule == "async-late")
    return case.policy.startswith(("spectrain", "pipeoptim", "x", "lwp", "2bw+predict")) or "+ef" in case.policy


def _copies_without_a_flush(case: Case) -> bool:
    return case.schedule == "async" and (
        case.cuts in ("later", "earlier") or case.model.startswith("gpt") or case.policy == "vertical"
    )


def _of_first(case: Case) -> int:
    """Microbatches of a minibatch that one replica of the first worker has."""
    return case.microbatches // 2 if case.unequal else case.microbatches


def _ahead(case: Case) -> int:
    """How many forwards of later microbatches the first worker does before the first backward."""
    if case.schedule == "wpipe":
        return 0
    return (case.workers - 1) * (min(2, case.microbatches) if case.schedule == "nf1b" else 1)


RULES = [
    Rule(
        "a policy where nothing is stale",
        "makes no sense with schedule",
        lambda case: case.flushes and case.policy not in ("default", "latest", "xgrad"),
    ),
    Rule(
        "two buffers and too few microbatches",
        "2bw",
        lambda case: case.policy.startswith("2bw") and _of_first(case) < _ahead(case),
    ),
    Rule(
        "a repair without momentum",
        "momentum",
        lambda case: case.policy.endswith(("+ef", "+brake")) and case.optimizer not in WITH_MOMENTUM,
    ),
    Rule(
        "shares of the optimizer's state, and a policy that follows the optimizer",
        "--shard",
        lambda case: case.replicas == "shard" and _follows_the_optimizer(case),
    ),
    Rule(
        "shares of the optimizer's state, and a loss scale",
        "--shard",
        lambda case: case.replicas == "shard" and case.precision == "fp16",
    ),
    Rule(
        "outer steps and late updates",
        "--outer",
        lambda case: case.replicas in APART_TRAINED and case.schedule == "async-late",
    ),
    Rule(
        "a codec of outer steps, and no outer steps",
        "--outer",
        lambda case: case.codec.startswith("outer=") and case.replicas not in APART_TRAINED,
    ),
    Rule(
        "a loss scale without a flush",
        "fp16",
        lambda case: case.precision == "fp16" and not case.flushes,
    ),
    Rule(
        "a rest of gradients that is carried over, and a loss scale",
        "fp16",
        lambda case: case.precision == "fp16" and case.codec.startswith("gradient="),
    ),
    Rule(
        "more replicas of one worker with a schedule that cannot have them, or with a single microbatch",
        "replicas",
        lambda case: (
            case.unequal and (case.schedule in (*APART, *SEVERAL, "async-late", "nf1b") or case.microbatches == 1)
        ),
    ),
    Rule(
        "a number that a hook changes",
        "register_buffer",
        lambda case: case.fades and case.state == "fixed",
    ),
    Rule(
        "a tensor that a callback changes, without a flush and in one process, or while batches are read ahead",
        "flush",
        lambda case: case.fades and case.state == "callback" and (not case.flushes or case.shapes != "one"),
    ),
    Rule(
        "a callback, and replicas that train separately",
        "--outer",
        lambda case: case.fades and case.state != "data" and case.replicas in APART_TRAINED,
    ),
    Rule(
        "more replicas of one worker, and copies of weights without a flush",
        "replicas",
        lambda case: case.unequal and _copies_without_a_flush(case),
    ),
]


def refusals(case: Case) -> list[Rule]:
    """The rules that forbid a case."""
    return [rule for rule in RULES if rule.forbids(case)]
