"""Captures metrics of an evaluation: in eval mode, as a forward, with the buffers on which later metrics depend."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe import user_lines
from fxpipe.errors import CaptureError
from fxpipe.ir.program import Program, value
from fxpipe.ir.transform import rarely_collected
from fxpipe.plan.spec import TensorSpec
from fxpipe.task.batch import Batch, tensor_spec
from fxpipe.task.hooks import Metrics
from fxpipe.task.wrapped_tensors import plain_tensors
from fxpipe.torch_private import LightDispatchMode, memory_of, pytree, schema_of
from fxpipe.tracing import origin
from fxpipe.tracing.batch_reads import of_what_is_read
from fxpipe.tracing.capture import Example, by_type, exported, one_at_a_time, one_device, watched
from fxpipe.tracing.held_tensors import HeldTensors
from fxpipe.tracing.hook_state import NO_HOOKS, Hooks
from fxpipe.tracing.joint import Reader, Traced
from fxpipe.tracing.lasting_state import noteworthy
from fxpipe.tracing.step_metrics import check_metric
from fxpipe.tracing.tensor_rows import NO_TENSORS


@dataclass(frozen=True)
class CapturedEvaluation:
    """`metrics(model, batch)` as a program whose outputs are the computed metrics, and new values of buffers.

    Attributes:
        metrics: all their names, in the order of the user's dictionary.
        constants: those that are plain numbers.
        gathered: those that have dimensions, if they are gathered.
    """

    program: Program
    metrics: tuple[str, ...]
    constants: dict[str, float]
    gathered: dict[str, TensorSpec]


@one_at_a_time()
@rarely_collected()
def capture_evaluation(
    model: nn.Module,
    metrics: Metrics,
    batch: Any,
    *,
    gathers: bool = False,
    params: str | None = None,
    hooks: Hooks = NO_HOOKS,
) -> CapturedEvaluation:
    """The graph of `metrics(model, batch)` in eval mode, without gradients, at level CAPTURED.

    Args:
        model: any module; it is put in eval mode, and afterwards every submodule back into its own mode.
        metrics: returns a dictionary of numbers and tensors of one element.
        gathers: it may return tensors with dimensions, too, which runs gather.
        params, hooks: as in `capture`.
        batch: a pytree of tensors and plain constants, or a `Batch`, which also says which are constants.

    Raises:
        CaptureError: with the user's line, when it cannot be one graph; or eval mode changes the weights.
        BatchError: the batch is not a pytree of tensors.
    """
    return of_what_is_read(
        Batch.of(batch), lambda b, reads: _evaluation(model, metrics, Example.of(b, reads), gathers, params, hooks)
    )[0]


def _evaluation(
    model: nn.Module,
    metrics: Metrics,
    example: Example,
    gathers: bool,
    params: str | None,
    hooks: Hooks,
    outside: Mapping[str, Tensor] = NO_TENSORS,
) -> CapturedEvaluation:
    tensors = HeldTensors(model, functions=(metrics,), params=params, hooks=hooks, outside=outside)
    device = one_device([*tensors.values[: tensors.registered], *example.inputs])
    count = len(tensors.values)
    place = user_lines.definition(metrics)
    results: dict[str, Any] = {}
    replaced, lost = list[int](), list[int]()
    watch = tensors.traced_step()

    def evaluate(*args: Tensor) -> list[Tensor]:
        held, (user_batch, known_values) = args[:count], example.with_tensors(args[count:])
        with tensors.replaced(held), torch.no_grad():
            with origin.recording(model, watch, args, tensors.stand_ins, known_values, example.reads):
                values = _checked(metrics(model, user_batch), place, gathers)
            new = tensors.rebound()
        replaced[:], lost[:] = by_type(new, tensors.inputs)
        results.clear()
        results.update(values)
        # Copies: a metric may be a parameter, or have two names.
        computed_values = [v for v in values.values() if isinstance(v, Tensor)]
        return [v.detach().clone() for v in (*(new[row] for row in replaced), *computed_values)]

    with eval_mode(model), tensors.python.preserved(), tensors.shared.reading():
        graph_module, notes = exported(evaluate, [*(v.detach() for v in tensors.inputs), *example.inputs], watch)
    if more := tensors.outside(watch.met):
        with suppress(CaptureError):  # it reads their values: a run can only look if they change
            return _evaluation(model, metrics, example, gathers, params, hooks, more)
    computed = tuple(name for name, v in results.items() if isinstance(v, Tensor))
    notes += [f"it changes {change}: the change is not kept" for change in noteworthy(tensors.changes)]
    traced = Traced(graph_module, tuple(replaced), tuple(lost), tuple(notes), computed, evaluates=True, met=watch.met)
    tree = pytree.treespec_dumps(example.batch.tree)
    program = Reader(traced, tensors, example.leaves, example.inputs).program(tree, device, None)
    program = replace(program, watched=watched(program, tensors, traced))
    constants = {name: float(v) for name, v in results.items() if name not in computed}
    tensors_of_all = {name: tensor_spec(results[name]) for name in computed if gathers and results[name].dim()}
    return CapturedEvaluation(program, tuple(results), constants, tensors_of_all)


def _checked(metrics: Any, where: str | None, gathers: bool) -> dict[str, Any]:
    """What an evaluation returns, checked: a dictionary with a tensor, of tensors of one element and numbers by name.

    Where it `gathers`, tensors may have dimensions.
    """
    if not isinstance(metrics, Mapping):
        kind = "a tensor" if isinstance(metrics, Tensor) else f"a {type(metrics).__name__}"
        raise CaptureError(f"metrics(model, batch) returned {kind}, not a dictionary of scalars", where=where)
    for name, metric in metrics.items():
        check_metric("metrics(model, batch)", name, metric, where, gathers)
    if not any(isinstance(value, Tensor) for value in metrics.values()):
        raise CaptureError(
            "metrics(model, batch) returned no tensor", where=where, hint="return what is computed as tensors"
        )
    return dict(metrics)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model is in eval mode inside; afterwards every submodule is in its former mode.

    Raises:
        CaptureError: eval() changes weights, as in modules that merge other weights into theirs: what is evaluated
            would not be what is trained. All values are restored.
    """
    modes, before = {module: module.training for module in model.modules()}, model.training
    changed: list[str] = []
    tensors = _parameters_and_buffers(model)
    memories = {name: tensor.detach() for name, tensor in tensors.items()}
    writes = _Writes([*tensors.values()])
    try:
        with writes:
            model.eval()
        now = _parameters_and_buffers(model)
        changed = [
            name
            for name, old in memories.items()
            if memory_of(old) in writes.values
            or now.get(name) is not tensors[name]
            or memory_of(now[name]) != memory_of(old)
        ]
        if changed:
            raise CaptureError(
                f"the model's eval() changes {', '.join(changed[:5])}{' and more' if changed[5:] else ''}",
                hint="let forward() do, depending on self.training, what train() and eval() do to the weights",
            )
        yield
    finally:
        if changed:
            model.train(before)  # undoes what eval() did to attributes, too; then the exact values come back
        for module, mode in modes.items():
            module.training = mode
        for name, old in memories.items():
            if memory_of(tensors[name]) != memory_of(old):
                tensors[name].data = old
        writes.undo()


class _Writes(LightDispatchMode):
    """Keeps the former values of some tensors that are overwritten, by memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._kept: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            self._kept.setdefault(memory_of(tensor), []).append(tensor.detach())
        self.values: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def undo(self) -> None:
        """Restore the former values of all of them."""
        for pairs in self.values.values():
            for tensor, former in pairs:
                tensor.copy_(former)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for row, argument in zip(schema_of(func).arguments, args, strict=False):
            if row.alias_info is not None and row.alias_info.is_write:
                for tensor in pytree.tree_leaves(argument):
                    memory = memory_of(tensor) if isinstance(tensor, Tensor) else None
                    if memory in self._kept and memory not in self.values:
                        self.values[memory] = [(view, view.clone()) for view in self._kept[memory]]
        return func(*args, **(kwargs or {}))


def _parameters_and_buffers(model: nn.Module) -> dict[str, Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: plain for path, tensor in named for name, plain in plain_tensors(path, tensor)}


def buffers_carried(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Evaluations of one model, each for a shape of batch, without new values of buffers that no metric depends on.

    A metric may depend on what an earlier batch, of any shape, left in a buffer. So a buffer is carried if a metric
    reads it, or if the new value of a carried buffer reads it.
    """
    read: set[str] = set()
    before: set[str] | None = None
    while before != read:
        before = set(read)
        for program in programs:
            names = {b.node: b.names[0] for b in program.buffers}
            new = [n for node, n in program.updates().items() if names[node] in before]
            needed = _needed([*program.metrics().values(), *new])
            read |= {names[node] for node in names if program.placeholders[node] in needed}
    return tuple(_with_buffers(program, read) for program in programs)


def _needed(nodes: Collection[fx.Node]) -> set[fx.Node]:
    needed, waiting = set(nodes), list(nodes)
    while waiting:
        inputs = set(waiting.pop().all_input_nodes) - needed
        needed |= inputs
        waiting += inputs
    return needed


def _with_buffers(program: Program, names: set[str]) -> Program:
    """The program with the new values of only these buffers."""
    first = {b.node: b.names[0] for b in program.buffers}
    dropped = [first[o.target] for o in program.outputs if o.kind == "buffer" and first[o.target] not in names]
    if not dropped:
        return program
    program = program.copy()
    pairs = zip(program.output_nodes, program.outputs, strict=True)
    outputs = [(node, o) for node, o in pairs if o.kind != "buffer" or first[o.target] in names]
    output = program.graph.output_node()
    output.args = (tuple(node for node, _ in outputs),)
    output.meta["val"] = tuple(value(node) for node, _ in outputs)
    notes = [f"it changes buffer {name}: no metric reads it, and the change is not kept" for name in dropped]
    return replace(program, outputs=tuple(o for _, o in outputs), warnings=(*program.warnings, *notes))
