"""The laws: what a case trains is what its references train.

- With a flush: eager PyTorch on the whole batch, to rounding.
- Without one: the papers' rules by hand (`papers`), for the chain of layers whose weights and updates they know.
- Stopped and resumed, and a worker in each process: the bits of the run in one piece, in one process.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import eager
import papers
from case import STEPS, Case
from product import DECAY, Outcome, compiled, places, run_here, run_in_processes, run_own, runs_of
from task import EPOCH, FACTOR, GENTLE, LAYERS, Task, cycled, falling

RELATIVE = {"float64": 1e-9, "float32": 2e-4, "bf16": 2e-2, "bfloat16": 3e-2, "fp16": 2e-3}
RELATIVE |= {"params": 2e-2, "params16": RELATIVE["bfloat16"]}
"""The greatest relative difference from a reference. With bfloat16 parameters each of the 7 updates rounds each weight
by up to 2^-9, in both trainings: 2.7e-2."""
LOSSES = 2e-6
"""Losses are written in float32."""

PINNED = ("same", "later", "earlier")


def references(case: Case) -> list[str]:
    """By what a case can be judged."""
    found = []
    own_state = case.model == "lstm" and case.replicas != "one"  # each replica goes on from its own
    known_draws = not Task(case).draws or case.cuts in PINNED or case.workers == 1  # each worker has its own seeds
    chosen = case.codec.startswith("outer=")  # by magnitude: greater differences than float64's choose other values
    codec = case.precision == "float64" if chosen else case.codec in ("none", "bf16", "int8")
    known = known_draws and not own_state and codec
    if case.flushes and known:
        found.append("eager")
    if not case.flushes and _by_hand(case):
        found.append("papers")
    if case.stop or case.processes or case.own:
        found.append("bits")
    return found


def _by_hand(case: Case) -> bool:
    """Whether `papers` knows all that the case asks for."""
    same_weights = case.policy in (
        "stash",
        "vertical",
        "2bw",
        "2bw+predict",
        "pipeoptim+keep",
        "xgrad",
    )  # in F and in B
    return (
        case.model == "chain"
        and case.cuts in (("same",) if "+ef" in case.policy else PINNED)
        and case.replicas in ("one", "two", "shard")  # they share the samples of each microbatch
        and case.codec == "none"
        and case.precision == "float64"
        and not case.clip
        and (case.recompute == "none" or same_weights)  # B computes again with its own weights
        and case.policy != "default"
        and not (case.fades and case.state != "data")
        and case.shapes in ("one", "last")
    )


def faults(case: Case, folder: Path, planted: str = "") -> list[str]:
    """In words, where a case is not what its references are; empty if the law holds.

    Args:
        planted: a fault of `nccl`, which a process of the run has.

    Raises:
        FxpipeError: the case is refused.
    """
    kinds = references(case)
    assert kinds, f"nothing judges {case}"
    compiled(case, folder)
    whole = run_here(runs_of(replace(case, stop=0), folder)[0])
    found = []
    if "bits" in kinds:
        runs = [replace(options, out=f"{options.out}-again") for options in runs_of(case, folder)]
        if case.stop:
            runs[1] = replace(runs[1], resume=str(runs[1].resume).replace("/stopped/", "/stopped-again/"))
        if case.own:
            again = run_own(runs, case.total if case.processes else 0, folder, case.processes, planted)
        elif case.processes:
            again = run_in_processes(runs, case.total, folder, case.processes, planted)
        else:
            again = [run_here(options) for options in runs][-1]
        found += [f"bits: {text}" for text in again.same_bits(whole)]
    if "eager" in kinds:
        found += [f"eager: {text}" for text in _differences(case, whole, eager.trained(case))]
    if "papers" in kinds:
        found += [f"papers: {text}" for text in _differences(case, whole, _papers(replace(case, device="cpu")))]
    return found


def _differences(case: Case, found: Outcome, expected: Outcome) -> list[str]:
    lossy = case.codec != "none" and not case.codec.startswith("outer=")
    limit = 0.1 if lossy else max(RELATIVE[case.precision], LOSSES * Task(case).weighed)  # weights are float32
    limit = 0.0 if _to_the_bit(case) else limit
    wrong = []
    for step, (mine, its) in enumerate(zip(found.losses, expected.losses, strict=True), 1):
        if not math.isclose(mine, its, rel_tol=max(limit, LOSSES)):
            wrong.append(f"loss of step {step}: {mine}, not {its}")
    if case.precision == "float64" and not lossy and case.replicas not in ("outer", "delayed"):
        pairs = zip(found.metrics, expected.metrics, strict=True)
        wrong += [f"metrics of training: {mine}, not {its}" for mine, its in pairs if mine != its]
    shared = case.replicas not in ("one", "outer", "delayed")
    own_statistics = case.model == "conv" and shared  # each replica's batch norms see its own samples
    for name, value in () if own_statistics else expected.evaluation.items():
        if not math.isclose(found.evaluation[name], value, rel_tol=max(limit, LOSSES)):
            wrong.append(f"metric {name}: {found.evaluation[name]}, not {value}")
    for mine, its in () if lossy else ((found.weights, expected.weights), (found.averages, expected.averages)):
        for name, value in its.items():
            if not value.is_floating_point() or (own_statistics and "running_" in name):
                continue
            off = (mine[name].double() - value.double()).norm() / max(float(value.double().norm()), 1e-3)
            if not off <= limit:
                wrong.append(f"{name}: off by {float(off):.1e}")
    return wrong


def _to_the_bit(case: Case) -> bool:
    """Whether weights are those of eager PyTorch to the last bit: it rounds, adds up and steps in the same order."""
    alike = case.model not in ("function", "texts") and case.batches == "tensors"  # eager rounds other losses
    simple = case.policy != "xgrad" and case.replicas == "one" and case.codec == "none" and not Task(case).draws
    return case.mixed and alike and simple


def _papers(case: Case) -> Outcome:
    task = Task(case)
    model = task.model()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    late = int(case.schedule == "async-late")
    policy = papers.Policy(case.policy, case.workers, case.microbatches, late)
    forward, backward = ([bisect.bisect_right(at, place) for place in range(LAYERS)] for at in places(case))
    layers = []
    for place in range(LAYERS):
        delay = papers.missed(case.schedule, backward[place], case.workers, case.microbatches) + late
        first = papers.Layer(state[f"layers.{place}.0.weight"], state[f"layers.{place}.0.bias"])
        rules = tuple(_rule(case, kind) for kind in ("weight", "bias"))
        feedback = delay if "+ef" in case.policy else 0
        layers.append(papers.Trained([first], [rules], feedback, "+brake" in case.policy))  # type: ignore[list-item]
    factors = []
    for _ in range(STEPS) if case.fades else ():
        task.fade()
        factors.append(float(task.strength))
    batches = cycled(task.train_data(), STEPS)
    losses = papers.train(policy, layers, forward, backward, batches, case.schedule, factors)
    for place, layer in enumerate(layers):
        state[f"layers.{place}.0.weight"], state[f"layers.{place}.0.bias"] = layer.history[-1]
    model.load_state_dict(state)
    averages = {}
    for place, layer in enumerate(layers) if case.average else ():
        for part in ("weight", "bias"):
            mean = getattr(layer.history[1], part)
            for version in layer.history[2:]:
                mean = DECAY * mean + (1 - DECAY) * getattr(version, part)
            averages[f"layers.{place}.0.{part}"] = mean
    evaluated = {} if case.evaluation == "none" else eager.evaluated(case, model, task)
    return Outcome(losses, state, averages, [], evaluated)


def _rule(case: Case, part: str) -> papers.Rule:
    def rate(first: float) -> papers.Rate:
        first *= GENTLE if case.attributes and part == "bias" else 1
        if case.rate == "falling":
            return lambda update: first * falling(update)
        first *= FACTOR if case.rate == "set" else 1
        return (lambda update: first * 0.5 ** (update // EPOCH)) if case.rate == "epoch" else (lambda update: first)

    made: dict[str, Any] = {
        "momentum": lambda: papers.Momentum(rate(0.05), weight_decay=1e-3),
        "nesterov": lambda: papers.Momentum(rate(0.05), nesterov=True),
        "sgd": lambda: papers.Plain(rate(0.1), 0.1),
        "adamw": lambda: papers.AdamW(rate(0.02), 0.2, (0.8, 0.9)),
        "own": lambda: papers.Softsign(rate(0.01)),
        "two": lambda: papers.Momentum(rate(0.05)) if part == "weight" else papers.AdamW(rate(0.01), 0.01),
    }
    rule: papers.Rule = made[case.optimizer]()
    return rule
