"""The program: one torch.fx graph that holds forward, loss and backward, with its tables.

Placeholders are parameters, buffers (constants of the model among them) and the batch's tensors; the single output is a
flat tuple of the loss, the buffers' new values, the parameters' gradients and the step's metrics, or
of an evaluation's metrics. Every other node is an ATen call. A program runs at every level (`run`), so a pass can be
tested by what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx

from fxpipe.ir.stage import Stage
from fxpipe.plan.spec import BucketSpec, EdgeSpec, LeafSpec, Phase
from fxpipe.plan.user_files import WatchedSpec
from fxpipe.planner.cuts import Cuts
from fxpipe.schedule.base import FLOAT16
from fxpipe.torch_private import append_copy

INFO = "fxpipe"  # the key of a node's record in node.meta
CORRECTS = "corrects"  # the key in node.meta of a call that a pass put after its first input: no cut separates them
ONE_DRAW = "one draw"  # the key in node.meta of a call that draws the same numbers in all microbatches
AGAIN = "again"  # the key in node.meta of a copy that `rematerialize` made: the name of the node that it copies


class Level(IntEnum):
    """The properties of a program, checked by `verify` (`fxpipe/ir/law.py`). A pass takes one level and gives one."""

    CAPTURED = 1
    FOLDED = 2
    NUMBERED = 3
    COSTED = 4
    PLACED = 5
    WIRED = 6
    SPLIT = 7
    EMITTED = 8


@dataclass(slots=True)
class NodeInfo:
    """The one typed record of a node.

    Attributes:
        phase: F or B; W for what makes only weight gradients, if these are separate (`fxpipe/passes/defer.py`).
        module: path of the module it belongs to ('' for the loss function and other code outside modules).
        source: the user's line, `file.py:12`, or None.
        text: that line's text.
        region: number of the activation-checkpoint region it is in, or None.
        marks: how many of the step's own marks for cuts come before it (`pipe_split`).
        unit: number of its unit; a backward node has its forward node's.
        bytes: size of its value(s).
        seconds: its cost.
        worker: where it runs.
        weight: whether it is a backward node that makes only weight gradients (W), which has its own cuts.
    """

    phase: Phase
    module: str = ""
    source: str | None = None
    text: str = ""
    region: int | None = None
    unit: int = -1
    bytes: int | None = None
    seconds: float | None = None
    worker: int | None = None
    weight: bool = False
    marks: int = 0

    def copy(self, **changes: Any) -> NodeInfo:
        """A separate record with some other values; `copy.copy` takes ten times as long."""
        record = NodeInfo(
            self.phase, self.module, self.source, self.text, self.region, self.unit, self.bytes, self.seconds,
            self.worker, self.weight, self.marks,
        )  # fmt: skip
        for name, changed in changes.items():
            setattr(record, name, changed)
        return record


@dataclass(frozen=True)
class Again:
    """What a worker's backward computes again from its own forward to save memory.

    Attributes:
        values: the names of the forward's nodes.
        seconds: the time of that, for each microbatch.
        bytes: how much less the forward saves for each microbatch.
    """

    values: tuple[str, ...] = ()
    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class Parameter:
    """A parameter, with all names of a tied one; `node` is its placeholder's name, `saved` its names in state dicts.

    `packed` is the form of which it is a part, '' if it is a plain tensor of the user's.
    """

    node: str
    names: tuple[str, ...]
    trained: bool
    saved: tuple[str, ...] = ()
    packed: str = ""


@dataclass(frozen=True)
class Buffer:
    """A buffer under its names, or a `constant` that capture found; `saved` are its names in state dicts."""

    node: str
    names: tuple[str, ...]
    saved: tuple[str, ...] = ()
    constant: bool = False


@dataclass(frozen=True)
class BatchInput:
    """A leaf of the batch; `node` is None for a plain constant, `where` the user's line that reads one."""

    node: str | None
    leaf: LeafSpec
    where: str | None = None


OutputKind = Literal["loss", "buffer", "gradient", "metric"]


@dataclass(frozen=True)
class Output:
    """What one element of the output tuple is: the loss, a buffer's new value, a parameter's gradient or a metric.

    `target` is the placeholder's name of that buffer or parameter, or the metric's name ('' for the loss).
    """

    kind: OutputKind
    target: str = ""


@dataclass(frozen=True)
class Program:
    """A graph and its tables. Passes return a new program and never change the one they are given.

    Attributes:
        outputs: what each element of the output tuple is.
        values: the model's own tensors by placeholder name: parameters, buffers, constants.
        example: the example batch's tensors by placeholder name.
        batch_spec: the serialised pytree of a batch.
        params: 'bf16' if the step computes with bfloat16 casts of the parameters that it trains.
        units: NUMBERED: the module path each unit starts in.
        cuts: PLACED: the units that each worker computes.
        again: PLACED: what each worker's backward computes again; empty if nothing.
        wires: WIRED: the edge that each Send and Recv is an end of, by node name.
        replicas: WIRED: how many each worker has; empty if each has one.
        buckets: WIRED, with replicas: by worker, the buckets in which its gradients are added up.
        stages: SPLIT: what each worker executes; EMITTED: with its file.
        own_backward: which of the user's code makes gradients without a formula of autograd: hooks, and functions with
            a backward; '' if none does.
        loss_of_microbatches: whether a minibatch's loss is the mean of its microbatches' losses, or their sum.
        differs_from_whole: why that differs from the whole batch's loss by design; '' if it does not.
        whole_numbers: whether microbatches take numbers of the whole batch, such as how many samples it has.
        batch_norm: where the batch norms are that normalise each microbatch by itself; '' if there are none.
        summed_metrics: the step's metrics that are sums over the microbatches of a minibatch; the others are means.
        loss_metrics: the metrics after the loss in the loss output, when `passes/join_metrics.py` has put them there:
            it is one tensor then.
        totals: computes from a microbatch what is added up over the minibatch, for leaves of the batch that the user's
            batches do not have (`fxpipe/passes/whole_loss.py`).
        whole: CAPTURED, of a microbatch's step: the same step, captured on the whole batch, or why it cannot be.
        watched: what it has read of state that hooks of a run reach.
        weights_apart: whether what makes only weight gradients has its own phase, W.
        attributes: what hangs on trained parameters (`fxpipe.task.parameter_attributes`).
    """

    graph: fx.Graph
    level: Level
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    batch: tuple[BatchInput, ...]
    outputs: tuple[Output, ...]
    values: Mapping[str, torch.Tensor]
    example: Mapping[str, torch.Tensor]
    batch_spec: str
    device: str
    autocast: str | None = None
    params: str | None = None
    units: tuple[str, ...] = ()
    cuts: Cuts | None = None
    again: tuple[Again, ...] = ()
    wires: Mapping[str, EdgeSpec] = field(default_factory=dict)
    replicas: tuple[int, ...] = ()
    buckets: tuple[tuple[BucketSpec, ...], ...] = ()
    stages: tuple[Stage, ...] = ()
    warnings: tuple[str, ...] = ()
    own_backward: str = ""
    loss_of_microbatches: Literal["mean", "sum"] = "mean"
    differs_from_whole: str = ""
    whole_numbers: bool = False
    batch_norm: str = ""
    summed_metrics: tuple[str, ...] = ()
    loss_metrics: tuple[str, ...] = ()
    totals: Program | None = None
    whole: Program | str | None = None
    weights_apart: bool = False
    attributes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    watched: tuple[WatchedSpec, ...] = ()

    def copy(self, **changes: Any) -> Program:
        """A program with its own graph (same node names, own records), other fields replaced by `changes`."""
        return replace(self, graph=copy_graph(self.graph), **changes)

    def __iter__(self) -> Iterator[fx.Node]:
        """The calls, in order: every node but placeholders and the output."""
        return (n for n in self.graph.nodes if n.op == "call_function")

    @property
    def placeholders(self) -> dict[str, fx.Node]:
        return {n.name: n for n in self.graph.nodes if n.op == "placeholder"}

    @property
    def output_nodes(self) -> tuple[fx.Node, ...]:
        """The nodes of the output tuple, in the order of `outputs`."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def loss_node(self) -> fx.Node | None:
        """The loss; None for an evaluation."""
        losses = (n for n, o in zip(self.output_nodes, self.outputs, strict=True) if o.kind == "loss")
        return next(losses, None)

    @property
    def scales_loss(self) -> bool:
        """Whether its backward begins with a loss scale: float16 gradients hardly reach below 1e-7."""
        return self.autocast == FLOAT16

    @property
    def edges(self) -> tuple[EdgeSpec, ...]:
        """Every edge once, in the order in which they are sent."""
        return tuple(dict.fromkeys(self.wires[n.name] for n in self if n.name in self.wires))

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """F, B and perhaps W for a training step; only F for an evaluation, whose outputs are metrics and buffers."""
        kinds = {output.kind for output in self.outputs}
        if "metric" in kinds and kinds <= {"metric", "buffer"}:
            return ("F",)
        return ("F", "B", "W") if self.weights_apart else ("F", "B")

    @property
    def files(self) -> dict[str, str]:
        """The emitted source by file name."""
        return {stage.file: stage.source for stage in self.stages}

    def metrics(self) -> dict[str, fx.Node]:
        """Node by metric; a training step's metrics are outputs until they are joined to the loss."""
        return {o.target: n for n, o in zip(self.output_nodes, self.outputs, strict=True) if o.kind == "metric"}

    def gradients(self) -> dict[str, fx.Node]:
        """Gradient node by its parameter's placeholder name."""
        return {o.target: n for n, o in zip(self.output_nodes, self.outputs, strict=True) if o.kind == "gradient"}

    def updates(self) -> dict[str, fx.Node]:
        """New-value node by its buffer's placeholder name."""
        return {o.target: n for n, o in zip(self.output_nodes, self.outputs, strict=True) if o.kind == "buffer"}

    def run(
        self, values: Mapping[str, torch.Tensor] | None = None, batch: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Compute the outputs, on the model's own values and the example batch unless others are given."""
        feed = {**self.values, **self.example, **(values or {}), **(batch or {})}
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        with torch.no_grad():
            return tuple(module(*(feed[name] for name in self.placeholders)))


def info(node: fx.Node) -> NodeInfo:
    """The node's record; only calls have one."""
    return node.meta[INFO]


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """What a node reads, in the order of its arguments, some perhaps twice."""
    read: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), read.append)
    return read


def is_call_of(node: fx.Node, phase: Phase) -> bool:
    """Whether a node is a call of a phase."""
    return node.op == "call_function" and info(node).phase == phase


def home_of(node: fx.Node) -> int:
    """The worker where an output is made."""
    return (info(node).worker or 0) if node.op == "call_function" else 0


def unit_name(path: str) -> str:
    """A unit's module path; code outside modules, such as the loss function's, has none."""
    return path or "(no module)"


def value(node: fx.Node) -> Any:
    """The node's fake value: a tensor, or a tuple of them."""
    return node.meta["val"]


def size_of(example: Any) -> int:
    """Bytes of a (fake) tensor, or of a tuple of them."""
    if isinstance(example, torch.Tensor):
        return example.numel() * example.element_size()
    if isinstance(example, (tuple, list)):
        return sum(size_of(e) for e in example)
    return 0


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A graph with the same nodes under the same names and their own records."""
    new = fx.Graph()
    mapped: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copy = mapped[node] = append_copy(new, node, mapped.__getitem__)
        if INFO in copy.meta:
            copy.meta[INFO] = copy.meta[INFO].copy()
    return new
