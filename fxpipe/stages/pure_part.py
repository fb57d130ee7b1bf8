"""A stage's function as a pure graph: every value that it reads is an input, every result an output.

Receives and sends become inputs and outputs, too, and random numbers become inputs (`fxpipe.stages.random_inputs`). So
any engine can run the graph, and all compute the same. The graph is traced from the stage's file, so an edited stage is
run and exported with its edits.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from fxpipe.codecs import without_codecs
from fxpipe.errors import BackendError
from fxpipe.ir.aten import is_random
from fxpipe.ir.program import ONE_DRAW
from fxpipe.ir.recurrent_layer import is_left
from fxpipe.plan.packing import Layout
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import FUNCTIONS, PHASES, EdgeSpec, Phase, TensorSpec
from fxpipe.stages.loaded import LoadedStage, comment_above, stage_line
from fxpipe.stages.part_call import Handed, PartCall
from fxpipe.stages.random_inputs import PLACE, Draw, blank, hoist_draws
from fxpipe.task.batch import tensor_spec
from fxpipe.torch_private import FakeTensorMode, OpOverload, TorchDispatchMode, pytree, schema_of
from fxpipe.tracing.fake_strides import KernelStrides
from fxpipe.tracing.refusals import DATA_DEPENDENT

InputKind = Literal["weight", "buffer", "batch", "saved", "deferred", "received", "mask"]
OutputKind = Literal["loss", "update", "saved", "deferred", "gradient", "sent"]


@dataclass(frozen=True)
class PartInput:
    """One input of a pure part: its kind, its name (of a parameter, a buffer, an edge, …), and its tensor."""

    kind: InputKind
    name: str
    tensor: TensorSpec


@dataclass(frozen=True)
class PartOutput:
    """One output of a pure part."""

    kind: OutputKind
    name: str
    tensor: TensorSpec


@dataclass(frozen=True)
class HandedOver:
    """A bucket to add up over replicas: the indices of its gradients among the outputs; None without a gradient."""

    bucket: str
    call: Literal["all_reduce", "reduce_scatter"]
    outputs: tuple[int | None, ...]

    def to(self, comm: Any, outputs: Mapping[int, Any]) -> None:
        """Give the gradients, out of all outputs of the part, to `comm`."""
        getattr(comm, self.call)(self.bucket, [None if i is None else outputs[i] for i in self.outputs])


@dataclass(frozen=True)
class PurePart:
    """One function of a stage without side effects.

    Attributes:
        graph: a placeholder for each input, ATen calls, and the tuple of outputs; inputs and outputs in the order of
            the tables. The order of inputs is: weights, buffers, batch or saved or deferred, received, masks. Of
            outputs: in a forward the loss (if any), updates, saved, sent; in a backward gradients or deferred, sent; in
            weight gradients: gradients, sent.
        draws: make the masks, in the order in which the emitted code draws them.
        edges: by name, those with a codec. Packing and unpacking are not in the graph.
        handed: buckets to add up once the outputs are computed, in the order of the code.
    """

    worker: int
    phase: Phase
    graph: fx.GraphModule
    inputs: tuple[PartInput, ...]
    outputs: tuple[PartOutput, ...]
    draws: tuple[Draw, ...]
    device: str
    edges: Mapping[str, EdgeSpec] = field(default_factory=dict)
    handed: tuple[HandedOver, ...] = ()

    @property
    def name(self) -> str:
        """`stage_0.forward`."""
        return f"stage_{self.worker}.{FUNCTIONS[self.phase]}"

    @property
    def left(self) -> set[str]:
        """The outputs that only the kernels of recurrent layers can make and read (`fxpipe.ir.recurrent_layer`)."""
        nodes: Any = self.graph.graph.output_node().args[0]
        return {row.name for node, row in zip(nodes, self.outputs, strict=True) if is_left(node)}

    def dtypes(self) -> set[str]:
        """The dtypes of all values in it: `float32`, …."""
        values = (v for n in self.graph.graph.nodes for v in pytree.tree_leaves(n.meta.get("val")))
        return {str(v.dtype).removeprefix("torch.") for v in values if isinstance(v, Tensor)}

    def examples(self) -> tuple[Tensor, ...]:
        """A fake tensor for every input, with the layout in which it arrives."""
        with FakeTensorMode():
            return tuple(blank(i.tensor, self.device) for i in self.inputs)

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs, computed by torch operator by operator."""
        result: tuple[Tensor, ...] = self.graph(*inputs)
        return result


def trace_stage(plan: Plan, worker: int, stage: LoadedStage, phases: Sequence[Phase] = PHASES) -> tuple[PurePart, ...]:
    """The functions of a stage as pure parts, in the order of phases; a build need not have all phases.

    Args:
        phases: from the first on: a backward depends on what its forward saves, and weight gradients on what it defers.

    Raises:
        BackendError: the code cannot be traced (an edit made it depend on values), changes a tensor in place, or draws
            random numbers that depend on computed values.
    """
    parts: list[PurePart] = []
    left: list[TensorSpec] = []
    for phase in phases:
        if phase in stage.functions:
            parts.append(_trace_part(plan, worker, phase, stage, left))
            left = [o.tensor for o in parts[-1].outputs if o.kind in ("saved", "deferred")]
    return tuple(parts)


def _trace_part(plan: Plan, worker: int, phase: Phase, stage: LoadedStage, left: Sequence[TensorSpec]) -> PurePart:
    """One pure part of a stage; `left` are the values from the part before it."""
    inputs = tuple(_inputs(plan, worker, phase, left))
    spec = plan.stages[worker].part(phase)
    outputs: list[PartOutput] = []
    handed: list[HandedOver] = []

    def step(*flat: Tensor) -> list[Tensor]:
        """The outputs of the stage's function; records what they are."""
        by_kind: dict[str, list[Tensor]] = {kind: [] for kind in get_args(InputKind)}
        for entry, value in zip(inputs, flat, strict=True):
            by_kind[entry.kind].append(value)
        received = dict(zip(spec.receives, by_kind["received"], strict=True))
        third = (*by_kind["batch"], *by_kind["saved"], *by_kind["deferred"])
        call = PartCall(worker, phase, spec, tuple(by_kind["weight"]), tuple(by_kind["buffer"]), third, received)
        with _Places(stage.path) as places:
            result = call.run(stage.functions[phase], one_draw=places.one_draw)
        named: list[tuple[OutputKind, str, Tensor]] = []
        if result.loss is not None:
            named.append(("loss", "loss", result.loss))
        named += [("update", n, v) for n, v in zip(spec.updates, result.updates, strict=True)]
        named += [("saved", n, v) for n, v in zip(spec.saved if phase == "F" else (), result.saved, strict=True)]
        named += [
            ("deferred", n, v) for n, v in zip(spec.deferred if phase == "B" else (), result.deferred, strict=True)
        ]
        named += [("gradient", n, v) for n, v in zip(spec.gradients, result.gradients, strict=True)]
        named += [("sent", n, v) for n, v in result.sent.items()]
        outputs[:] = [PartOutput(kind, name, tensor_spec(v)) for kind, name, v in named]
        handed[:] = _handed_over(result.handed, [v if kind == "gradient" else None for kind, _, v in named])
        return [v for _, _, v in named]

    mode = KernelStrides(allow_non_fake_inputs=True)  # what was captured with them relies on them
    with mode:
        examples = [blank(i.tensor, plan.device) for i in inputs]
    try:
        with torch.no_grad(), without_codecs(), mode:
            module = make_fx(step)(*examples)
    except BackendError as error:
        error.where = str(stage.path)
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if re.search(DATA_DEPENDENT, text):
            text = "it depends on the values of a tensor"
        raise BackendError(
            f"the {FUNCTIONS[phase]} of stage {worker} cannot be traced: {text}",
            where=stage_line(error, stage.path) or str(stage.path),
            hint="use `run --backend eager`, or undo the edit: engines and ONNX need plain operators",
        ) from error
    module.graph.eliminate_dead_code(lambda node: node.op != "call_function" or is_random(node))
    _check(module.graph)
    draws = hoist_draws(module.graph)
    module.recompile()
    masks = tuple(PartInput("mask", f"mask_{i}", draw.tensor) for i, draw in enumerate(draws))
    packed = {e.name: e for e in plan.edges if e.codec and e.name in (*spec.receives, *spec.sends)}
    return PurePart(worker, phase, module, (*inputs, *masks), tuple(outputs), draws, plan.device, packed, tuple(handed))


def _handed_over(handed: Mapping[str, Handed], gradients: Sequence[Tensor | None]) -> Iterator[HandedOver]:
    """The buckets to add up, by the indices of their gradients among the outputs; None for what is not a gradient."""
    places = {id(value): i for i, value in enumerate(gradients) if value is not None}
    for bucket, handover in handed.items():
        if any(value is not None and id(value) not in places for value in handover.gradients):
            raise BackendError(
                f"the stage adds up gradients in {bucket} that it does not return",
                hint="use `run --backend eager`, return these gradients, or undo the edit",
            )
        indices = (None if value is None else places[id(value)] for value in handover.gradients)
        yield HandedOver(bucket, handover.call, tuple(indices))


def _inputs(plan: Plan, worker: int, phase: Phase, left: Sequence[TensorSpec]) -> Iterator[PartInput]:
    spec = plan.stages[worker].part(phase)
    parameters = {name: p.read for p in plan.parameters for name in p.names}
    buffers = {name: b.tensor for b in plan.buffers for name in b.names}
    batch = {leaf.name: leaf.tensor for leaf in plan.step.batch}
    edges = {e.name: e.tensor for e in plan.edges}
    yield from (PartInput("weight", name, parameters[name]) for name in spec.weights)
    yield from (PartInput("buffer", name, buffers[name]) for name in spec.buffers)
    for name in spec.batch:
        tensor = batch[name]
        assert tensor is not None  # constants of the batch are written into the code
        yield PartInput("batch", name, tensor)
    if phase != "F":
        kind: InputKind = "saved" if phase == "B" else "deferred"
        yield from (PartInput(kind, name, tensor) for name, tensor in zip(spec.third(phase), left, strict=True))
    for name in spec.receives:
        layout = Layout(edges[name], name)  # the layout of received values
        yield PartInput("received", name, TensorSpec(tuple(layout.shape), tuple(layout.stride), edges[name].dtype))


class _Places(TorchDispatchMode):
    """Gives every traced call its place: the line of the stage's file, and the comment above that line."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._name = str(path)
        linecache.checkcache(self._name)
        self._last: fx.Node | None = None
        self._draw = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        frames = list(self._frames())
        mode = get_proxy_mode()
        if frames and mode is not None:
            line, *callers = (comment_above(self.path, frame.f_lineno) for frame in frames)
            comment = ", for ".join(filter(None, (line, *(caller.partition(" · ")[0] for caller in callers))))
            place = f"{self.path.name}:{frames[0].f_lineno}" + (f": {comment}" if comment else "")
            newest = None
            for node in reversed(mode.tracer.graph.nodes):
                newest = newest or node
                if node is self._last or node.op == "placeholder":
                    break
                node.meta[PLACE] = place
                if self._draw:
                    node.meta[ONE_DRAW] = self._draw
            self._last = newest
        return result

    def _frames(self) -> Iterator[FrameType]:
        """The stage's own frames that run, the deepest first."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == self._name:
                yield frame
            frame = frame.f_back

    @contextmanager
    def one_draw(self, name: str) -> Iterator[None]:
        """Inside, calls get the name under which all microbatches draw the same numbers."""
        self._draw = name
        yield
        self._draw = ""


def _check(graph: fx.Graph) -> None:
    for node in graph.nodes:
        target = node.target
        if isinstance(target, OpOverload) and schema_of(target).is_mutable:
            raise BackendError(
                f"{target} changes a tensor in place",
                where=node.meta.get(PLACE),
                hint="use `run --backend eager`, or undo the edit: engines and ONNX need pure operators",
            )
