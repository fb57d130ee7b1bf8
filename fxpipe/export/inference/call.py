"""The one call of the model in the loss, recorded so that it can be repeated with other tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, arange, nn

from fxpipe import user_lines
from fxpipe.errors import ExportError, first_line
from fxpipe.task.hooks import Loss, loss_and_metrics
from fxpipe.torch_private import pytree
from fxpipe.tracing.held_tensors import HeldTensors


@dataclass(frozen=True)
class Call:
    """The one call that the loss makes, and how to repeat it with other tensors."""

    names: tuple[str, ...]  # names, tensors: its tensors, in order
    tensors: tuple[Tensor, ...]
    leaves: tuple[Any, ...]  # leaves, spec: all its arguments, as a pytree
    spec: pytree.TreeSpec
    size: int | None  # of the batch; None if no input of the model has it as dimension 0
    batched: tuple[bool, ...]  # for each tensor, whether its dimension 0 is the batch
    outputs: tuple[str, ...]  # names of the tensors that the model returns, in order
    loss: str | None  # the output that is also what the loss function returned; it is not exported
    notes: tuple[str, ...]  # what the user must know

    @property
    def kept(self) -> list[str]:
        """Names of the outputs that are exported."""
        return [name for name in self.outputs if name != self.loss]

    def make(self, model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that are exported, for other tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(v, Tensor) else v for v in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        outputs, _ = _outputs(model(*args, **kwargs))
        if tuple(outputs) != self.outputs:
            raise ExportError(
                f"the model returns {', '.join(outputs) or 'no tensor'}, "
                f"but {', '.join(self.outputs) or 'none'} where the loss calls it"
            )
        return [value for name, value in outputs.items() if name != self.loss]

    def resized(self, rows: int) -> tuple[Tensor, ...]:
        """The tensors with another batch size: the example's rows, repeated from the first."""
        return tuple(
            t[arange(rows) % t.shape[0]] if batched else t
            for t, batched in zip(self.tensors, self.batched, strict=True)
        )


@contextlib.contextmanager
def untouched(held: HeldTensors) -> Iterator[None]:
    """Inside, the model may change its buffers and attributes; afterwards it is restored."""
    with held.replaced([v if i < held.parameters else v.clone() for i, v in enumerate(held.values)]):
        yield


def record(held: HeldTensors, loss: Loss, batch: Any) -> Call:
    """The model's call in `loss(model, batch)`."""
    model = held.model
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    results: list[Any] = []
    parts: list[str] = []
    depth = 0

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal depth
            if depth == 0 and path:
                parts.append(path)
            elif depth == 0:
                calls.append((args, kwargs))
            depth += 1

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0 and not path:
                results.append(output)

        return hook

    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(path), with_kwargs=True, prepend=True))
        hooks.append(module.register_forward_hook(leave(path), always_call=True))
    try:
        with untouched(held):
            value, _ = loss_and_metrics(loss(model, batch))
            seen = list(calls), list(results), list(parts)  # what a step writes into lists is undone afterwards
    except Exception as error:
        raise ExportError(
            f"loss(model, batch) raised {type(error).__name__}: {first_line(error)}, with the model in eval mode",
            where=user_lines.user_traceback(error),
            hint="the loss is called once to find out how it calls the model",
        ) from error
    finally:
        for handle in hooks:
            handle.remove()
    calls, results, parts = seen
    if parts or len(calls) != 1:
        often = {0: "does not call the model", 1: "calls the model once"}
        reasons = [often.get(len(calls), f"calls the model {len(calls)} times")]
        reasons += [f"calls {', '.join(map(repr, dict.fromkeys(parts)))} on its own"] if parts else []
        raise ExportError(
            f"the loss {', and '.join(reasons)}: the export needs exactly one call of the model, model(…)",
            where=user_lines.definition(loss),
            hint="move everything that makes the prediction into the model's forward, and call that once in the loss",
        )
    return _described(model, *calls[0], results[0], value, batch)


def _described(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, loss: Any, batch: Any
) -> Call:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    paths = [path for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
    # Copies: an input that occurs twice is two inputs, and no input shares another's memory.
    tensors = {p: v.detach().clone() for p, v in zip(paths, leaves, strict=True) if isinstance(v, Tensor)}
    if not tensors:
        raise ExportError("the loss calls the model without any tensor", hint="there is nothing that could be an input")
    sizes = Counter(v.shape[0] for v in pytree.tree_leaves(batch) if isinstance(v, Tensor) and v.dim())
    size = sizes.most_common(1)[0][0] if sizes else None
    batched = tuple(v.dim() > 0 and v.shape[0] == size for v in tensors.values())
    outputs, notes = _outputs(result)
    if not any(batched):
        size = None
        notes = ["no input of the model has the batch as its first dimension: all sizes are fixed", *notes]
    call = Call(
        names=distinct([_named(model, path) for path in tensors]),
        tensors=tuple(tensors.values()),
        leaves=tuple(leaves),
        spec=spec,
        size=size,
        batched=batched,
        outputs=tuple(outputs),
        loss=next((name for name, value in outputs.items() if value is loss), None),
        notes=tuple(notes),
    )
    if not call.kept:
        raise ExportError("the model returns no tensor but the loss", hint="return the prediction as well")
    if size == 1:  # torch.export treats a size of 1 as a constant
        call = dataclasses.replace(call, tensors=call.resized(2), size=2)
    return call


def _named(model: nn.Module, path: Sequence[Any]) -> str:
    """`input_ids`, `mask[0]`, `extra.bias`: a leaf of the arguments under its name in the model's forward."""
    kind, which, *keys = path
    name = str(getattr(which, "key", ""))
    if kind.idx == 0:
        parameters = list(inspect.signature(model.forward).parameters.values())
        plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        several = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "input")
        name = plain[which.idx].name if which.idx < len(plain) else f"{several}[{which.idx - len(plain)}]"
    return name + "".join(_step(key) for key in keys)


def _step(key: Any) -> str:
    if isinstance(key, pytree.SequenceKey):
        return f"[{key.idx}]"
    return f".{key.key if isinstance(key, pytree.MappingKey) else getattr(key, 'name', key)}"


def distinct(names: Sequence[str], taken: Sequence[str] = ()) -> tuple[str, ...]:
    """The names; a repeated one gets a number."""
    unique: dict[str, None] = dict.fromkeys(taken)
    for name in names:
        chosen, number = name, 1
        while chosen in unique:
            chosen, number = f"{name}_{number}", number + 1
        unique[chosen] = None
    return tuple(unique)[len(dict.fromkeys(taken)) :]


def _outputs(result: Any) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors that the model returns, by name; and what else it returns, in words."""
    tensors: list[tuple[str, Tensor]] = []
    others: list[str] = []

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            tensors.append((name or "output", value))
        elif isinstance(value, Mapping):
            for key, v in value.items():
                walk(v, f"{name}.{key}" if name else str(key))
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            walk(dict(zip(value._fields, value, strict=True)), name)
        elif isinstance(value, (tuple, list)):
            for i, v in enumerate(value):
                walk(v, f"{name or 'output'}[{i}]")
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            walk({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, name)
        elif value is not None:
            others.append(f"output {name or 'of the model'} is a {type(value).__name__}, not a tensor: left out")

    walk(result, "")
    names = distinct([name for name, _ in tensors])
    return dict(zip(names, [value for _, value in tensors], strict=True)), others
