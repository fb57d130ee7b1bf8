"""Batches: any pytree of tensors and plain constants, described once and checked for every later minibatch."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxpipe.errors import BatchError, listed
from fxpipe.plan.spec import LeafSpec, TensorSpec
from fxpipe.task.containers import flatten
from fxpipe.torch_private import is_traceable_wrapper_subclass, pytree, register_namedtuple

CONSTANTS = (bool, int, float, str, type(None))
LARGEST_CONSTANT = 4096
"""Elements of a tensor of the batch that is a constant of the capture: the plan holds its values."""


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Shape, stride and dtype of a tensor, real or fake."""
    return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."))


def unusual(tensor: torch.Tensor) -> str | None:
    """What kind of tensor it is, if it is more than a dense block of values."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return "a sparse tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__} (it wraps other tensors)"
    return None


def constant_of(value: Any) -> Any:
    """A constant of a batch in plain Python; a tensor's dtype and values."""
    if not isinstance(value, torch.Tensor):
        return value
    return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.detach().tolist()}


def said(constant: Any) -> str:
    """A constant of a batch, as messages show it."""
    return repr(constant["values"] if isinstance(constant, dict) else constant)


def describe(batch: Any, constants: Iterable[str] = ()) -> tuple[list[LeafSpec], list[Any], pytree.TreeSpec]:
    """The leaves of a batch (named by their place in it, cut along dimension 0), their values, and the pytree's shape.

    Args:
        constants: tensors that are constants of the capture, by their names or keys.

    Raises:
        BatchError: it has no tensor, or a leaf is neither a dense tensor nor a plain constant (all are listed), or a
            constant is large.
    """
    spec = flatten(batch)[1]
    paths, _ = pytree.tree_flatten_with_path(batch)
    leaves, values, wrong = [], [], []
    for path, value in paths:
        name = "batch" + pytree.keystr(path)
        if isinstance(value, torch.Tensor):
            if kind := unusual(value):
                raise BatchError(
                    f"{name} is {kind}, which no stage can take",
                    hint="pad nested tensors and make sparse ones dense, in train_data()",
                    page="tensor-kinds",
                )
            dim = 0 if value.dim() else None
            if is_named(name, constants):
                _check_constant(name, value)
                leaves.append(LeafSpec(name, None, constant_of(value), dim))
            else:
                leaves.append(LeafSpec(name, tensor_spec(value), dim=dim))
        elif isinstance(value, CONSTANTS):
            leaves.append(LeafSpec(name, None, value))
        else:
            wrong.append(f"{name} is a {type(value).__module__}.{type(value).__qualname__}")
        values.append(value)
    if wrong:
        raise BatchError(
            "a batch is a pytree of tensors and plain constants, but " + "; ".join(wrong),
            hint="convert numpy arrays with torch.from_numpy, other containers to dict, list or tuple",
        )
    if not any(leaf.tensor for leaf in leaves):
        raise BatchError("the batch holds no tensor", hint="train_data() yields batches: tuples or dicts of tensors")
    return leaves, values, spec


def is_named(name: str, known: Iterable[str]) -> bool:
    """Whether a leaf is named, by itself (`batch['grid']`) or by its key (`grid`)."""
    return any(name == one or name.endswith((f"[{one!r}]", f".{one}")) for one in known)


def check_constants(leaves: Sequence[LeafSpec], constants: Iterable[str]) -> None:
    """Refuse names of constants that no leaf has.

    Raises:
        BatchError: says which, and what leaves there are.
    """
    unknown = [known for known in constants if not any(is_named(leaf.name, [known]) for leaf in leaves)]
    if unknown:
        raise BatchError(
            f"constant_batch names {', '.join(unknown)}, which the batch does not have",
            hint=f"its leaves are {', '.join(leaf.name for leaf in leaves)}",
        )


def _check_constant(name: str, value: torch.Tensor) -> None:
    if value.is_meta or value.requires_grad or value.numel() > LARGEST_CONSTANT:
        kind = "has no values" if value.is_meta else "requires a gradient" if value.requires_grad else "is large"
        raise BatchError(
            f"constant_batch names {name}, which {kind}: {str(value.dtype).removeprefix('torch.')}{list(value.shape)}",
            hint=f"a constant of the capture is a tensor of up to {LARGEST_CONSTANT} numbers that all batches share, "
            "such as the sizes of images",
        )


def to_device(device: str, model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Move the model and a batch's tensors to a device.

    Raises:
        BatchError: the device does not exist.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise BatchError("torch sees no CUDA device", hint="use --device cpu; `fxpipe doctor` shows the devices")
    return model.to(device), moved(device, batch)


def moved(device: str, batch: Any) -> Any:
    """A batch with its tensors on a device."""
    values, spec = flatten(batch)
    return pytree.tree_unflatten([v.to(device) if isinstance(v, torch.Tensor) else v for v in values], spec)


def dump(spec: pytree.TreeSpec) -> str:
    """The pytree's shape as text, the same in every process; a namedtuple is identified by its class name."""
    stack = [spec]
    while stack:
        part = stack.pop()
        stack += part.children()
        if part.type is not namedtuple:
            continue
        kind: type = part.context
        known = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
        if known is None or known.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
            register_namedtuple(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
    return pytree.treespec_dumps(spec)


def shape_key(tree: str, leaves: Iterable[LeafSpec]) -> tuple[Any, ...]:
    """Equal for batches that fit the same captured program: the pytree, shapes and dtypes of tensors, constants."""
    return tree, *(
        (leaf.tensor.shape, leaf.tensor.dtype) if leaf.tensor else (type(leaf.constant).__name__, repr(leaf.constant))
        for leaf in leaves
    )


def shape_text(batch: Any) -> str:
    """What a batch holds, in words: `batch['x'] float32[8, 6], batch['mask'] None`."""
    flatten(batch)
    paths, _ = pytree.tree_flatten_with_path(batch)
    return listed([f"batch{pytree.keystr(path)} {_kind(value)}" for path, value in paths], 6)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return said(value) if isinstance(value, CONSTANTS) else f"a {type(value).__name__}"


Dims = Mapping[str, int | None]


def split(batch: Any, microbatches: int, dims: Dims | None = None) -> list[Any]:
    """Cut a batch into equal microbatches (views of the same memory).

    Args:
        dims: by name of a leaf, along which dimension its tensor is cut; None for one that every microbatch gets whole.
            Without it, all are cut along their first, of which they must have the same size.

    Raises:
        BatchError: the tensors have different sizes where they are cut, or `microbatches` does not divide them.
    """
    if microbatches == 1:
        return [batch]
    leaves, values, spec = describe(batch)
    cut = {leaf.name: leaf.dim for leaf in leaves} if dims is None else dims
    if dims is None:
        check_sizes(leaves, cut)
    size = _common_size(leaves, cut)
    if size % microbatches:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        raise BatchError(
            f"{microbatches} microbatches do not divide a batch of {size}",
            hint=f"choose --microbatches from {', '.join(map(str, divisors[:12]))}, or change the batch size",
        )
    chunks = [
        [v] * microbatches if (dim := cut[leaf.name]) is None else torch.chunk(v, microbatches, dim)
        for leaf, v in zip(leaves, values, strict=True)
    ]
    return [pytree.tree_unflatten([c[j] for c in chunks], spec) for j in range(microbatches)]


def share_of(batch: Any, microbatches: int, replicas: int, dims: Dims | None = None) -> Any:
    """The first of several replicas' share of a batch: as one batch, of the microbatches that it does.

    Args:
        microbatches: of the whole batch; replicas take them in turn.
        dims: as of `split`.

    Raises:
        BatchError: as `split`.
    """
    if replicas == 1:
        return batch
    leaves, _, spec = describe(batch)
    parts = [describe(part)[1] for part in split(batch, microbatches, dims)[::replicas]]
    cut = {leaf.name: leaf.dim for leaf in leaves} if dims is None else dims
    joined = [
        values[0] if (dim := cut[leaf.name]) is None else torch.cat(values, dim)
        for leaf, values in zip(leaves, map(list, zip(*parts, strict=True)), strict=True)
    ]
    return pytree.tree_unflatten(joined, spec)


def check_divisible(batch: Any, microbatches: int, dims: Dims, size: int) -> None:
    """Refuse a batch of another shape than the first that so many microbatches do not divide, before any is computed.

    Args:
        dims: where the first batch is cut, by the names of leaves.
        size: how many samples the first batch has.

    Raises:
        BatchError: names the numbers of microbatches that divide both.
    """
    sizes = [
        leaf.tensor.shape[dim]
        for leaf in describe(batch)[0]
        if leaf.tensor and (dim := dims.get(leaf.name)) is not None and dim < len(leaf.tensor.shape)
    ]
    found = math.gcd(*sizes)  # 0 of none
    if found % microbatches == 0:
        return
    both = math.gcd(found, size)
    more = [str(d) for d in range(2, min(both, 64) + 1) if both % d == 0]
    count = f"--microbatches 1, or {' or '.join(more[:6])}" if more else "--microbatches 1"
    raise BatchError(
        f"{microbatches} microbatches do not divide a batch of {found}",
        hint=f"compile with {count}: no other number divides {size} and {found}; or leave out the last, smaller batch "
        "(drop_last=True)",
        page="batch-shapes",
    )


def asked_dims(batch: Any, asked: Any) -> dict[str, int | None]:
    """Along which dimension each leaf of a batch is cut, as the user says it.

    Args:
        asked: one number for all tensors; or a number or None in the place of every leaf; or, by the names of leaves
            (`batch[0]`), for some, while the others are cut along their first dimension.

    Raises:
        BatchError: it does not fit the batch.
    """
    leaves, _, spec = describe(batch)
    if isinstance(asked, int):
        asked = {leaf.name: asked for leaf in leaves if leaf.tensor}
    by_name = isinstance(asked, dict) and all(isinstance(k, str) and k.startswith("batch") for k in asked)
    if by_name:
        unknown = [name for name in asked if name not in [leaf.name for leaf in leaves]]
        if unknown:
            raise BatchError(
                f"microbatch_dims names {', '.join(unknown)}, which the batch does not have",
                hint=f"its leaves are {', '.join(leaf.name for leaf in leaves)}",
            )
        dims = {leaf.name: asked.get(leaf.name, leaf.dim) for leaf in leaves}
    else:
        given, asked_spec = flatten(asked)
        if asked_spec != spec:
            raise BatchError(
                f"microbatch_dims is built differently from the batch: {asked_spec} for {spec}",
                hint="give a number, or None, in the place of every leaf of the batch",
            )
        dims = {leaf.name: dim for leaf, dim in zip(leaves, given, strict=True)}
    for leaf in leaves:
        dim, rank = dims[leaf.name], len(leaf.tensor.shape) if leaf.tensor else 0
        if dim is not None and not (isinstance(dim, int) and 0 <= dim < rank):
            raise BatchError(f"microbatch_dims gives {leaf.name} dimension {dim!r}, and it has {rank}")
    return dims


def samples_of(batch: Any, dims: Dims | None = None, constants: Sequence[str] = ()) -> int:
    """How many samples a batch has along the dimensions in which it is cut: what its microbatches must divide.

    Raises:
        BatchError: its tensors differ, or it has none.
    """
    leaves = describe(batch, constants)[0]
    cut = {leaf.name: leaf.dim for leaf in leaves} if dims is None else dims
    if not constants:
        check_sizes(leaves, cut)
    return _common_size(leaves, cut)


def check_sizes(leaves: Sequence[LeafSpec], dims: Dims) -> None:
    """Refuse tensors of which one is longer than another where samples are.

    Raises:
        BatchError: says how long each is.
    """
    sizes = _sizes(leaves, dims)
    if len({size for _, size in sizes.values()}) > 1:
        along = {dim for dim, _ in sizes.values()}
        raise BatchError(
            f"microbatches are cut along {f'dimension {along.pop()}' if len(along) == 1 else 'the given dimensions'}, "
            "but its size differs: " + ", ".join(f"{name} has {n}" for name, (_, n) in sizes.items()),
            hint="give every tensor of the batch the batch dimension first, say which it is (microbatch_dims in the "
            "model file, --microbatch-dims), or use --microbatches 1",
        )


def _sizes(leaves: Sequence[LeafSpec], dims: Dims) -> dict[str, tuple[int, int]]:
    """Where the leaves are cut, and how long they are there."""
    return {
        leaf.name: (dim, leaf.tensor.shape[dim])
        for leaf in leaves
        if leaf.tensor and (dim := dims[leaf.name]) is not None
    }


def _common_size(leaves: Sequence[LeafSpec], dims: Dims) -> int:
    """The size of the batch: the greatest common divisor, where the tensors have more than one."""
    sizes = [size for _, size in _sizes(leaves, dims).values()]
    if not sizes:
        raise BatchError("a batch of scalars cannot be split into microbatches", hint="use --microbatches 1")
    return math.gcd(*sizes)
