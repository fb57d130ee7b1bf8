"""Each level's law, and that it notices when it is broken."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_text import emitted
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.errors import VerifyError
from fxpipe.ir.aten import is_getitem
from fxpipe.ir.law import verify
from fxpipe.ir.program import Level, Output, Program, info
from fxpipe.ir.stage import Part
from fxpipe.ir.wire import is_recv, is_send
from fxpipe.planner.cuts import Cuts
from fxpipe.tracing.evaluation import capture_evaluation

aten = torch.ops.aten
CUTS = Cuts((0, 3, 6), (0, 3, 6))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


@functools.cache
def programs() -> dict[Level, Program]:
    """A step at every level, with two workers."""
    torch.manual_seed(0)
    program = fxpipe.capture(Normed(), lambda m, x: m(x).square().mean(), torch.randn(5, 3))
    found = {program.level: program}
    emitted(program, CUTS, [lambda a: found.update({a.program.level: a.program})])
    return found


def at(level: Level) -> Program:
    return programs()[level].copy()


def call(program: Program, which: Callable[[fx.Node], Any]) -> fx.Node:
    return next(node for node in program if which(node))


def is_weight_gradient(node: fx.Node) -> bool:
    return info(node).weight


def replaced_outputs(program: Program, *outputs: Output) -> Program:
    return dataclasses.replace(program, outputs=outputs)


def no_loss(program: Program) -> Program:
    update = next(o for o in program.outputs if o.kind == "buffer")
    return replaced_outputs(program, *(update if o.kind == "loss" else o for o in program.outputs))


def no_record(program: Program) -> None:
    call(program, lambda n: True).meta.pop("fxpipe")


def forward_after_backward(program: Program) -> None:
    info(list(program)[-1]).phase = "F"


def repeats_its_input(program: Program) -> None:
    node = call(program, lambda n: n.target is aten.tanh.default)
    node.target = aten.detach.default


def dead(program: Program) -> None:
    with program.graph.inserting_after(node := call(program, lambda n: True)):
        made = program.graph.call_function(aten.neg.default, (node,))
    made.meta = {**node.meta}


def no_unit(program: Program) -> None:
    info(call(program, lambda n: True)).unit = -1


def unit_too_early(program: Program) -> None:
    info(call(program, lambda n: n.target is aten.tanh.default)).unit = 0


def forward_weight_gradient(program: Program) -> None:
    info(call(program, lambda n: True)).weight = True


def read_weight_gradient(program: Program) -> None:
    node = call(program, is_weight_gradient)
    info(next(iter(node.users))).weight = False


def no_cost(program: Program) -> None:
    info(call(program, lambda n: True)).seconds = None


def no_worker(program: Program) -> None:
    info(call(program, lambda n: True)).worker = 2


def worker_too_late(program: Program) -> None:
    info(call(program, lambda n: n.target is aten.addmm.default)).worker = 1


def element_elsewhere(program: Program) -> None:
    info(call(program, is_getitem)).worker = 1


def crossing(program: Program) -> None:
    recv = call(program, is_recv)
    recv.replace_all_uses_with(recv.all_input_nodes[0].all_input_nodes[0])


def other_shape(program: Program) -> None:
    call(program, is_send).meta["val"] = torch.empty(9)


def with_part(program: Program, change: Callable[[Part], Part]) -> Program:
    """The program with another first part."""
    first, *rest = program.stages
    parts = {**first.parts, "F": change(first.parts["F"])}
    return dataclasses.replace(program, stages=(dataclasses.replace(first, parts=parts), *rest))


def with_spec(**changes: Any) -> Callable[[Program], Program]:
    return lambda program: with_part(
        program, lambda part: dataclasses.replace(part, spec=dataclasses.replace(part.spec, **changes))
    )


def call_twice(program: Program) -> Program:
    first, second = program.stages
    return dataclasses.replace(program, stages=(first, dataclasses.replace(second, parts=first.parts)))


def with_text(old: str, new: str) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        first, *rest = program.stages
        assert old in first.source
        source = first.source.replace(old, new, 1)
        return dataclasses.replace(program, stages=(dataclasses.replace(first, source=source), *rest))

    return change


BROKEN: list[tuple[Level, Callable[[Program], Program | None], str]] = [
    (Level.CAPTURED, no_record, "has no record"),
    (Level.CAPTURED, forward_after_backward, "is forward, but comes after backward began"),
    (Level.CAPTURED, lambda p: dataclasses.replace(p, batch=()), "placeholders and tables differ"),
    (Level.CAPTURED, lambda p: replaced_outputs(p, *p.outputs[1:]), "the output tuple and its table differ in length"),
    (Level.CAPTURED, no_loss, "exactly one loss"),
    (Level.FOLDED, repeats_its_input, "tanh only repeats"),
    (Level.FOLDED, dead, "nothing reads neg"),
    (Level.NUMBERED, no_unit, "has no unit"),
    (Level.NUMBERED, unit_too_early, "F edge .* runs from unit 1 to 0"),
    (Level.NUMBERED, forward_weight_gradient, "makes weight gradients, but is forward"),
    (Level.NUMBERED, read_weight_gradient, "which makes only weight gradients"),
    (Level.COSTED, no_cost, "has no cost"),
    (Level.PLACED, no_worker, "has no worker"),
    (Level.PLACED, worker_too_late, "F edge .* runs from worker 1 to 0"),
    (Level.PLACED, lambda p: dataclasses.replace(p, cuts=None), "a placed program has cuts"),
    (Level.PLACED, element_elsewhere, "is not on the worker of its tuple"),
    (Level.WIRED, crossing, "crosses workers without a Send/Recv pair"),
    (Level.WIRED, other_shape, "differs from its edge in shape or dtype"),
    (Level.WIRED, lambda p: dataclasses.replace(p, wires={}), "is not an end of any edge"),
    (Level.SPLIT, lambda p: dataclasses.replace(p, stages=p.stages[1:]), "one stage for each worker"),
    (Level.SPLIT, call_twice, "backward of stage 1 is given|forward of stage 1"),
    (Level.SPLIT, with_spec(weights=()), "forward of stage 0 is given .*too many .*'first.weight'"),
    (Level.SPLIT, with_spec(sends=()), "forward of stage 0 has the edges"),
    (Level.SPLIT, with_spec(saved=()), "backward of stage 0 takes other values than its forward leaves"),
    (Level.EMITTED, with_text("def forward(", "def forward(("), "stage_0.py does not parse"),
    (Level.EMITTED, with_text("def forward(", "def forwards("), "missing .'forward'"),
    (Level.EMITTED, with_text("torch.addmm(first_bias", "torch.addmm(bias"), "forward reads bias"),
    (Level.EMITTED, with_text("    first_addmm =", "    del first_bias\n    first_addmm ="), "reads first_bias"),
    (Level.EMITTED, with_text('comm.send("', 'comm.send("other_'), "forward in stage_0.py sends"),
]  # fmt: skip


@pytest.mark.parametrize("level", Level)
def test_the_passes_keep_the_law(level: Level) -> None:
    assert programs()[level].level == level
    verify(at(level))


@pytest.mark.parametrize(("level", "break_it", "message"), BROKEN, ids=lambda v: v if isinstance(v, str) else None)
def test_a_broken_law_is_noticed(level: Level, break_it: Callable[[Program], Program | None], message: str) -> None:
    program = at(level)
    with pytest.raises(VerifyError, match=message):
        verify(break_it(program) or program)


def test_an_evaluation_has_no_backward_and_gives_metrics() -> None:
    program = capture_evaluation(nn.Linear(2, 2), lambda m, x: {"a": m(x).sum(), "b": m(x).amax()}, torch.ones(3, 2))
    assert program.program.phases == ("F",)
    with pytest.raises(VerifyError, match="an evaluation has only metrics and buffers"):
        verify(replaced_outputs(program.program, Output("loss"), Output("metric", "b")))
    broken = program.program.copy()
    info(list(broken)[-1]).phase = "B"
    with pytest.raises(VerifyError, match="is backward, in an evaluation"):
        verify(broken)
