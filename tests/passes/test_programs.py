"""Each pass as text: `programs/NAME.txt` has a program and what each pass makes of it, and they compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from program_text import placed, text
from torch import Tensor, nn
from two_layers import two_layers

import fxpipe
from fxpipe.codecs.encoding import Encoding
from fxpipe.ir.printer import argument_text, call_text
from fxpipe.ir.program import Program
from fxpipe.ir.transform import Pass, run_passes
from fxpipe.passes.comm import Comm
from fxpipe.passes.cost import Cost
from fxpipe.passes.cut import Cut
from fxpipe.passes.encode import Encode
from fxpipe.passes.fold import Fold
from fxpipe.passes.merge_equal import MergeEqual
from fxpipe.passes.order_evaluation import OrderEvaluation
from fxpipe.passes.place_evaluation import PlaceEvaluation
from fxpipe.passes.recompute import LEAST, Recompute
from fxpipe.passes.reduce import Reduce
from fxpipe.passes.rematerialize import Rematerialize
from fxpipe.passes.split import Split
from fxpipe.passes.split_backward import SplitBackward
from fxpipe.passes.units import Units
from fxpipe.passes.whole_loss import WholeLoss
from fxpipe.planner.cuts import Cuts
from fxpipe.tracing.evaluation import capture_evaluation

PROGRAMS = Path(__file__).parent / "programs"
ROUND = ("encode", "whole_loss", "split")
"""Passes that change numbers, or what a run must be given."""


class Step(nn.Module):
    """A step that is one function of its only weight and the batch."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.eye(2)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight).sum()


def itself(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def summed(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum()


def layers(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)))


def step(function: Callable[[Tensor, Tensor], Tensor]) -> Program:
    return fxpipe.capture(Step(function), itself, torch.ones(3, 2))


def evaluation(model: nn.Module, metrics: Any, batch: Any) -> Program:
    return run_passes(capture_evaluation(model, metrics, batch).program, [Fold()])


class ReadByAll(nn.Module):
    """What the first layer makes is read by all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return ((h.sin() + h).square() + h).sum()


class Tied(nn.Module):
    """The embedding is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(2, 4), nn.Linear(4, 4, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.hidden(self.embed(ids)) @ self.embed.weight.t()


def positions(x: Tensor, weight: Tensor) -> Tensor:
    """Backward reads `exp(weight)`, and both workers `arange`."""
    position = torch.arange(2.0)
    return (x + position) @ weight.exp() + position


def called_thrice() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    metrics = lambda m, x: {"a": m(x).mean(), "b": m(x).square().mean(), "c": m(-x).mean()}  # noqa: E731
    return evaluation(model, metrics, torch.randn(5, 4))


def tied() -> Program:
    """Worker 0 owns the embedding: to send it to worker 1 costs least."""
    torch.manual_seed(0)
    program = evaluation(Tied(), lambda m, ids: {"y": m(ids).amax()}, torch.tensor([1, 0]))
    return run_passes(program, [Units(), Cost()])


def convolved() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.Conv2d(1, 1, 1, bias=False))
    return run_passes(fxpipe.capture(model, summed, torch.ones(1, 1, 2, 2)), [Fold()])


def weighed() -> Program:
    loss = lambda m, b: (m(b[0]).sum(1) * b[1]).sum() / b[1].sum()  # noqa: E731
    return run_passes(fxpipe.capture(layers(2, 2)[0], loss, (torch.ones(3, 2), torch.ones(3))), [Fold()])


def wired(program: Program, *forward: int) -> Program:
    return run_passes(placed(program, *forward), [Rematerialize(), Comm()])


CASES: dict[str, tuple[Callable[[], Program], list[Pass]]] = {
    "cut": (two_layers, [Fold(), Units(), Cost(), Cut(Cuts((0, 2, 4), (0, 3, 4)))]),
    "comm": (lambda: placed(two_layers(), 2), [Comm(), Split()]),
    "encode": (lambda: wired(two_layers(), 2), [Encode({"_1_tanh": "bf16", "d__2_mm_1": "int8"})]),
    "relay": (lambda: run_passes(placed(fxpipe.capture(ReadByAll(), itself, torch.ones(3, 2)), 1, 2, 4),
                                 [Rematerialize()]), [Comm()]),
    "reduce": (lambda: wired(two_layers()), [Reduce((3,), bucket_bytes=16)]),
    "recompute": (lambda: placed(step(lambda x, weight: (x @ weight).sigmoid().sigmoid())),
                  [Recompute((LEAST,)), Rematerialize()]),
    "rematerialize": (lambda: placed(step(positions), 1), [Rematerialize()]),
    "merge_equal": (called_thrice, [MergeEqual()]),
    "order_evaluation": (lambda: evaluation(layers(2, 2, 2), lambda m, x: {"d": (m(x) - m(-x)).mean()},
                                            torch.ones(3, 2)), [OrderEvaluation({"0.weight": 0, "1.weight": 1})]),
    "place_evaluation": (tied, [PlaceEvaluation(2, {"embed.weight": 0, "hidden.weight": 1})]),
    "split_backward": (convolved, [SplitBackward()]),
    "whole_loss": (weighed, [WholeLoss(2)]),
}  # fmt: skip


def parts(program: Program) -> Iterator[str]:
    """Each phase of each worker: a graph that has no other inputs than its interface says."""
    for stage in program.stages:
        for part in stage.parts.values():
            taken = [node.name for node in part.graph.nodes if node.op == "placeholder"]
            yield f"stage {stage.worker} {part.function}({', '.join(taken)}):"
            for node in part.graph.nodes:
                if node.op == "call_function":
                    yield f"    {node.name} = {call_text(node, str)}"
            yield f"    return {argument_text(part.graph.output_node().args[0], str)}"


def shown(program: Program) -> str:
    if program.stages:
        return "\n".join(parts(program))
    totals = [] if program.totals is None else ["=== totals", text(program.totals)]
    return "\n".join([text(program), *totals])


@pytest.mark.parametrize("name", CASES)
def test_passes_make_what_the_file_says(
    name: str, golden: Callable[[Path, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Encoding, "LEAST_BYTES", 1)
    make, passes = CASES[name]
    program = make()
    texts = [shown(program)]
    for each in passes:
        before = shown(program)
        made = run_passes(program, [each])
        assert shown(program) == before, "the program that was given is as it was"
        if each.name not in ROUND:
            assert all(torch.equal(a, b) for a, b in zip(program.run(), made.run(), strict=True))
        program = made
        texts.append(f"=== {each.name}\n{shown(program)}")
    golden(PROGRAMS / f"{name}.txt", "\n".join(texts) + "\n")


def test_every_file_is_read() -> None:
    assert sorted(path.stem for path in PROGRAMS.iterdir()) == sorted(CASES)
