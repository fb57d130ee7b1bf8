"""Stages with functions for what repeats make the same calls as without them, and hold as much memory at each."""

from __future__ import annotations

import ast
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from cached import cuts, lowered
from small_models import CASES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import RunError, VerifyError
from fxpipe.ir.law import verify
from fxpipe.ir.program import Program
from fxpipe.stages.loaded import LoadedStage, explained, load_stages
from fxpipe.stages.microbatch import run_microbatch
from fxpipe.stages.minibatch import Minibatches

WIDTH = 6


class Stack(nn.Module):
    """Blocks of ten calls or so, made by `block(i)`."""

    def __init__(self, block: Callable[[int], nn.Module], depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(block, range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """Two layers with an activation. `change` is how one block of a stack can differ from the others."""

    def __init__(self, change: Callable[[Block, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.scale, self.change = 1.0, change

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.norm(x)).sigmoid())
        return x + self.down(self.change(self, y) if self.change else y * 2.0).tanh().mul(self.scale)


def scaled(i: int) -> Block:
    block = Block()
    block.scale = 1.0 + 0.1 * i
    return block


def counted(block: Block, y: Tensor) -> Tensor:
    block.seen += y.detach().mean()
    return y * 2.0


def third(change: Callable[[Block, Tensor], Tensor]) -> Callable[[int], nn.Module]:
    """Blocks of which the third differs."""
    return lambda i: Block(change if i == 2 else None)


STACKS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "equal": (lambda i: Block(), 4),
    "a number": (scaled, 4),
    "another operator": (third(lambda b, y: y / 2.0), 3),
    "a stride": (third(lambda b, y: y.t().contiguous().t() * 2.0), 3),
    "a dtype": (third(lambda b, y: (y.double() * 2.0).float()), 3),
    "an alias": (third(lambda b, y: y * y), 3),
    "a random call": (third(lambda b, y: F.dropout(y, 0.5) * 2.0), 3),
    "a buffer written": (third(counted), 3),
}
"""Stacks in which something is otherwise in one block, or in all; and how many of four blocks are equal."""


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


class _Watched(TorchDispatchMode):
    """What is called, with the bytes that live after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self._live = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor) and (key := value.untyped_storage()._cdata) not in self._seen:
                self._seen.add(key)
                self._live += value.untyped_storage().nbytes()
                weakref.finalize(value.untyped_storage(), self._freed, key, value.untyped_storage().nbytes())
        self.calls.append((str(func), self._live))
        return result

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._live -= size


def run(build: Build, batch: Any, stages: Sequence[LoadedStage] = ()) -> tuple[list[Tensor], list[tuple[str, int]]]:
    """All that the parts return, and their calls with the bytes that live after each."""
    stages = stages or load_stages(build.plan, build.files)
    (values, *_) = Minibatches(build.plan, build.files, build.tensors, None)(batch, 0)
    leaves = dict(zip((leaf.name for leaf in build.plan.step.batch), values, strict=True))
    state = {name: tensor.clone() for name, tensor in build.tensors.items()}
    results = []
    with torch.no_grad(), _Watched() as watched:
        for call, result in run_microbatch(
            build.plan, lambda worker, phase: stages[worker].functions[phase], state, leaves, seed=3, packed=False
        ):
            results += [value.clone() for value in result.flat() if call.phase != "F"]
            del call, result
    return results, watched.calls


@pytest.mark.parametrize("stack", STACKS)
def test_the_same_calls_bits_and_memory(stack: str) -> None:
    block, equal = STACKS[stack]
    torch.manual_seed(0)
    batch = torch.randn(5, WIDTH)
    program = fxpipe.capture(Stack(block), loss, batch)
    outlined, plain = (fxpipe.lower(program, cost="analytic", workers=1, outline=outline) for outline in (True, False))
    calls = functions_of(outlined)
    assert max(calls["forward"].values()) == equal
    assert max(calls["backward"].values()) >= equal - 1  # the backward of the first block has no gradient of its input
    assert not any(functions_of(plain).values())
    (results, watched), (expected, as_before) = run(outlined, batch), run(plain, batch)
    assert all(map(torch.equal, results, expected))
    assert watched == as_before


QUICK = (("gpt", "full"), ("conv", "none"), ("lstm", "none"))
SLOW = [pytest.param(*pair, marks=pytest.mark.slow) for pair in product(CASES, ("none", "full")) if pair not in QUICK]


@pytest.mark.parametrize(("name", "recompute"), [*QUICK, *SLOW])
def test_small_models_on_three_workers(name: str, recompute: str) -> None:
    """With skips, ties, values that cross workers inside blocks, and forwards that backward repeats."""
    case = CASES[name]
    batch = case.batches(1, 8)[0]
    outlined, plain = (
        lowered(name, workers=3, recompute=recompute, outline=o, **cuts(case, 3, 1)) for o in (True, False)
    )
    (results, watched), (expected, as_before) = run(outlined, batch), run(plain, batch)
    assert all(map(torch.equal, results, expected))
    assert watched == as_before


class Unrolled(nn.Module):
    """One cell, step after step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.cell = steps, nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(self.steps):
            state = self.cell(x, state)
        return state


def test_a_function_is_one_step_however_many_there_are() -> None:
    """A function of several steps would take fewer lines, and each of its lines would be there several times."""
    lines = set()
    for steps in (10, 40):
        program = fxpipe.capture(Unrolled(steps), loss, torch.randn(5, WIDTH))
        build = fxpipe.lower(program, cost="analytic", workers=1)
        assert functions_of(build)["forward"]["cell_forward"] >= steps - 1
        functions = [node for node in ast.parse(build.files["stage_0.py"]).body if isinstance(node, ast.FunctionDef)]
        lines.add(len(functions[0].body))
    assert len(lines) == 1


class Scaled(nn.Module):
    """A stack after parameters with names that stages use; the gradients of each read the others."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(lambda i: Block())
        for name in ("saved", "values", "weights", "comm", "torch", "deferred"):
            self.register_parameter(name, nn.Parameter(torch.randn(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.parameters(recurse=False)
        for parameter in others:
            first = first * parameter
        return self.stack(x * first)


def test_parameters_with_names_of_arguments() -> None:
    torch.manual_seed(0)
    batch = torch.randn(5, WIDTH)
    program = fxpipe.capture(Scaled(), loss, batch)
    options = {
        "cost": "analytic",
        "workers": 2,
        "schedule": "zb-h1",
        "microbatches": 1,
        "forward_at": ("stack.blocks.3",),
    }
    outlined, plain = (fxpipe.lower(program, outline=outline, **options) for outline in (True, False))
    (results, watched), (expected, as_before) = run(outlined, batch), run(plain, batch)
    assert all(map(torch.equal, results, expected))
    assert watched == as_before


def functions_of(build: Build) -> dict[str, dict[str, int]]:
    """By part of stage 0, how often it calls each function of the stage."""
    module = ast.parse(build.files["stage_0.py"])
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    parts = {name: functions.pop(name) for name in ("forward", "backward")}
    return {
        part: {name: sum(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node)) for name in functions}
        for part, node in parts.items()
    }


def test_an_error_in_a_function_names_the_block() -> None:
    torch.manual_seed(0)
    batch = torch.randn(5, WIDTH)
    build = fxpipe.lower(fxpipe.capture(Stack(lambda i: Block()), loss, batch), cost="analytic", workers=1)
    build.tensors["blocks.2.down.bias"] = torch.zeros(WIDTH + 1)
    stages = load_stages(build.plan, build.files)
    with pytest.raises(RunError) as caught, explained(stages[0].path, 0, lambda: "forward", ""):
        run(build, batch, stages)
    assert re.search(r"stage_0\.py:\d+: down_addmm = torch\.addmm\(.*, for blocks\.2$", str(caught.value.where))


def test_a_function_that_computes_something_else_is_refused() -> None:
    seen: list[Program] = []
    program = fxpipe.capture(Stack(lambda i: Block()), loss, torch.randn(5, WIDTH))
    fxpipe.lower(program, cost="analytic", workers=1, observers=[lambda applied: seen.append(applied.program)])
    outlined = next(p for p in seen if p.stages and p.stages[0].functions)
    (stage,) = outlined.stages
    forward = stage.parts["F"]
    one, other, *rest = forward.outlined
    exchanged = replace(one, arguments=other.arguments), replace(other, arguments=one.arguments), *rest
    parts = {**stage.parts, "F": replace(forward, outlined=exchanged)}
    verify(outlined)
    with pytest.raises(VerifyError, match=r"blocks_forward for .* in forward of stage 0 has"):
        verify(replace(outlined, stages=(replace(stage, parts=parts),)))
