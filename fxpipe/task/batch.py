"""A batch as one value: any pytree of tensors and plain constants, flattened and described when it enters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fxpipe.device_copies import LACKS_FLOAT64, WITHOUT_FLOAT64, is_here, too_wide, widest
from fxpipe.errors import BatchError, listed
from fxpipe.plan.spec import LeafSpec, PadSpec, TensorSpec
from fxpipe.task.containers import flatten, is_text, qualified
from fxpipe.torch_private import is_traceable_wrapper_subclass, pytree

Dims = Mapping[str, int | None]
CONSTANTS = (bool, int, float, str, type(None))
LARGEST_CONSTANT = 4096
"""The most elements of a tensor that is a constant of the capture: the plan holds its values."""


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Shape, stride and dtype of a tensor, real or fake."""
    return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."))


def unusual(tensor: torch.Tensor) -> str | None:
    """The kind of a tensor, if it is more than a dense block of values."""
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
    """A constant of a batch as JSON; for a tensor its dtype and values."""
    if isinstance(value, (list, tuple)):
        return [constant_of(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.detach().tolist()}


def is_number(value: Any) -> bool:
    """Whether it is a number that a step may compute with, and not a flag."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_scalar(number: int | float, device: str = "cpu") -> torch.Tensor:
    """A number as a tensor without dimensions: float64, float32 where a device has no more, or int64 for an int."""
    return torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else widest(device), device=device)


def said(constant: Any) -> str:
    """A constant of a batch, as messages show it."""
    return repr(constant["values"] if isinstance(constant, dict) else constant)


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch, flattened once; facts about its leaves are computed when first asked for."""

    given: Any  # as it comes from the data, or padded, moved or cut
    values: tuple[Any, ...]  # its leaves, tensors and constants
    tree: pytree.TreeSpec  # how it is built from them
    # the leaves that are constants of the capture, by their names or keys. Other numbers become tensors without
    # dimensions, and other strings are not read
    constants: tuple[str, ...] = ()
    # by leaf name, the dimension along which its tensor is cut into microbatches; None if every microbatch gets it
    # whole. Without it, all are cut along their first dimension
    cut: Dims | None = None

    @staticmethod
    def of(batch: Any, constants: Iterable[str] = ()) -> Batch:
        """The batch, flattened; the same object if it is already a Batch."""
        if isinstance(batch, Batch):
            return batch
        values, tree = flatten(batch)
        return Batch(batch, tuple(values), tree, tuple(constants))

    def of_values(self, values: Iterable[Any]) -> Batch:
        """A batch with the same structure and other leaves."""
        values = tuple(values)
        return replace(self, given=pytree.tree_unflatten(values, self.tree), values=values)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The leaves' names: their places, `batch['x']`."""
        again = pytree.tree_unflatten(self.values, self.tree)  # the user's code may have changed what was given
        rows = pytree.tree_flatten_with_path(again, is_leaf=is_text)[0]
        return tuple("batch" + pytree.keystr(path) for path, _ in rows)

    @cached_property
    def leaves(self) -> tuple[LeafSpec, ...]:
        """What the leaves are, and along which dimension each is cut."""
        leaves, wrong = [], []
        for name, value in zip(self.names, self.values, strict=True):
            if isinstance(value, torch.Tensor):
                if kind := unusual(value):
                    raise BatchError(
                        f"{name} is {kind}, which no stage can take",
                        hint="pad nested tensors and make sparse ones dense, in train_data()",
                        page="tensor-kinds",
                    )
                dim = (0 if value.dim() else None) if self.cut is None else self.cut[name]
                if is_named(name, self.constants):
                    _check_constant(name, value)
                    leaves.append(LeafSpec(name, None, constant_of(value), dim))
                else:
                    leaves.append(LeafSpec(name, tensor_spec(value), dim=dim))
            elif is_number(value) and not is_named(name, self.constants):
                leaves.append(LeafSpec(name, tensor_spec(as_scalar(value))))
            elif isinstance(value, str) or is_text(value):
                read = is_named(name, self.constants)
                leaves.append(LeafSpec(name, None, constant_of(value) if read else None, read=read))
            elif isinstance(value, CONSTANTS):
                leaves.append(LeafSpec(name, None, value))
            else:
                wrong.append(f"{name} is a {qualified(type(value))}")
        if wrong:
            raise BatchError(
                "a batch is a pytree of tensors and plain constants, but " + "; ".join(wrong),
                hint="convert numpy arrays with torch.from_numpy, other containers to dict, list or tuple",
            )
        if not any(isinstance(value, torch.Tensor) for value in self.values):
            hint = "train_data() yields batches: tuples or dicts of tensors"
            raise BatchError("the batch holds no tensor", hint=hint)
        return tuple(leaves)

    def check_constants(self) -> None:
        """Refuse names of constants that no leaf has."""
        unknown = [leaf for leaf in self.constants if not any(is_named(name, [leaf]) for name in self.names)]
        if unknown:
            raise BatchError(
                f"constant_batch names {', '.join(unknown)}, which the batch does not have",
                hint=f"its leaves are {', '.join(self.names)}",
            )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by their names, including constants of the capture."""
        rows = zip(self.leaves, self.values, strict=True)
        return {leaf.name: value for leaf, value in rows if isinstance(value, torch.Tensor)}

    @property
    def dims(self) -> dict[str, int | None]:
        """By leaf name, the dimension along which each is cut."""
        return {leaf.name: leaf.dim for leaf in self.leaves}

    @property
    def plain(self) -> tuple[str, ...]:
        """The names of leaves that are numbers or strings, and not constants of the capture."""
        rows = zip(self.leaves, self.values, strict=True)
        return tuple(
            leaf.name for leaf, v in rows if not isinstance(v, torch.Tensor) and (leaf.tensor or not leaf.read)
        )

    @property
    def shape(self) -> tuple[Any, ...]:
        """Equal for batches that fit the same captured program, if its step reads none of their numbers and strings."""
        rows = ((leaf.tensor.shape, leaf.tensor.dtype) if leaf.tensor else leaf.constant for leaf in self.leaves)
        return pytree.treespec_dumps(self.tree), *map(repr, rows)

    @property
    def plain_values(self) -> str:
        """The values of numbers and strings: equal, in addition to the shape, if batches fit whatever a step reads."""
        return repr([value for value in self.values if not isinstance(value, torch.Tensor)])

    def __str__(self) -> str:
        """What the batch holds, in words: `batch['x'] float32[8, 6], batch['mask'] None`."""
        return listed([f"{name} {_kind(value)}" for name, value in zip(self.names, self.values, strict=True)], 6)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch with its tensors changed."""
        return self.of_values(change(v) if isinstance(v, torch.Tensor) else v for v in self.values)

    def with_floats_of(self, others: Iterable[Batch]) -> Batch:
        """The batch with floats for its ints, where others have floats: 0 before 0.5, 1 after it."""
        alike = [other.values for other in others if other.tree == self.tree]
        rows = zip(self.values, *alike, strict=True)
        whole = (isinstance(number, int) and any(isinstance(other, float) for other in more) for number, *more in rows)
        return self.of_values(float(v) if w and is_number(v) else v for v, w in zip(self.values, whole, strict=True))

    def on(self, device: str) -> Batch:
        """The batch with its tensors on a device."""
        return self.each(lambda tensor: tensor.to(device))

    def padded(self, padding: Sequence[PadSpec]) -> Batch:
        """The padded batch as the stages see it: the same object if there is nothing to append.

        Leaves that it does not have, or that are not tensors with enough dimensions, are left unchanged: the comparison
        with the captured batches reports them.
        """
        if not padding:
            return self
        values = list(self.values)
        for i, name in enumerate(self.names):
            for rule in padding:
                if isinstance(values[i], torch.Tensor) and is_named(name, [rule.leaf]):
                    values[i] = _appended(values[i], rule)
        same = all(value is before for value, before in zip(values, self.values, strict=True))
        return self if same else self.of_values(values)

    def along(self, cut_dims: Any) -> Batch:
        """The batch with dimensions along which its leaves are cut, as the user gives them.

        One number for all tensors; or a number or None in place of every leaf; or a dictionary by leaf name
        (`batch[0]`) for some leaves, while the others are cut along their first dimension.
        """
        tensors = self.tensors
        if isinstance(cut_dims, int):
            cut_dims = dict.fromkeys(tensors, cut_dims)
        by_name = isinstance(cut_dims, dict) and all(isinstance(k, str) and k.startswith("batch") for k in cut_dims)
        if by_name:
            unknown = [name for name in cut_dims if name not in self.names]
            if unknown:
                raise BatchError(
                    f"microbatch_dims names {', '.join(unknown)}, which the batch does not have",
                    hint=f"its leaves are {', '.join(self.names)}",
                )
            dims = {leaf.name: cut_dims.get(leaf.name, leaf.dim) for leaf in self.leaves}
        else:
            flat, tree = flatten(cut_dims)
            if tree != self.tree:
                raise BatchError(
                    f"microbatch_dims is built differently from the batch: {tree} instead of {self.tree}",
                    hint="give a number, or None, in place of every leaf of the batch",
                )
            dims = dict(zip(self.names, flat, strict=True))
        for name, dim in dims.items():
            rank = tensors[name].dim() if name in tensors else 0
            if dim is not None and not (isinstance(dim, int) and 0 <= dim < rank):
                raise BatchError(f"microbatch_dims gives {name} dimension {dim!r}, but it has {rank}")
        return replace(self, cut=dims)

    def cut_as(self, leaves: Iterable[LeafSpec]) -> Batch:
        """The batch, cut where leaves of the same names in a plan or a program are.

        A tensor that the step does not read is cut if it is as long as one that the step reads, and else whole.
        """
        by_name = {leaf.name: leaf for leaf in leaves}
        rows = [(by_name[name], value) for name, value in zip(self.names, self.values, strict=True)]
        sizes = {_size(value, leaf.dim) for leaf, value in rows if leaf.read}
        return replace(self, cut={r.name: r.dim if r.read or _size(v, r.dim) in sizes else None for r, v in rows})

    @property
    def samples(self) -> int:
        """The number of samples along the dimensions that are cut: microbatches must divide it."""
        self.check_sizes()
        return _common(size for _, size in self.sizes.values())

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """By tensor name, except constants, the dimension that is cut, and its size."""
        rows = ((leaf.name, leaf.tensor, leaf.dim) for leaf in self.leaves)
        return {name: (dim, tensor.shape[dim]) for name, tensor, dim in rows if tensor and dim is not None}

    def check_sizes(self) -> None:
        """Refuse tensors of different sizes where samples are. Not with constants, which may
        say how many rows a sample has, such as the patches of an image."""
        sizes = self.sizes
        if not self.constants and len({size for _, size in sizes.values()}) > 1:
            along = {dim for dim, _ in sizes.values()}
            where = f"dimension {along.pop()}" if len(along) == 1 else "the given dimensions"
            raise BatchError(
                f"microbatches are cut along {where}, but its size differs: "
                + ", ".join(f"{name} has {size}" for name, (_, size) in sizes.items()),
                hint="give every tensor of the batch the batch dimension first, say which it is (microbatch_dims in "
                "the model file, --microbatch-dims), or use --microbatches 1",
            )

    def split(self, microbatches: int) -> list[Batch]:
        """The batch cut into equal microbatches: views of the same memory."""
        if microbatches == 1:
            return [self]
        cut = [(value, leaf.dim) for leaf, value in zip(self.leaves, self.values, strict=True)]
        size = _common(value.shape[dim] for value, dim in cut if dim is not None)
        if size % microbatches:
            divisors = [d for d in range(1, size + 1) if size % d == 0]
            raise BatchError(
                f"{microbatches} microbatches do not divide a batch of {size}",
                hint=f"choose --microbatches from {', '.join(map(str, divisors[:12]))}, or change the batch size",
            )
        chunks = [[v] * microbatches if dim is None else torch.chunk(v, microbatches, dim) for v, dim in cut]
        return [self.of_values(values) for values in zip(*chunks, strict=True)]

    def share(self, microbatches: int, replicas: int) -> Batch:
        """The share of the first of several replicas, which take turns, as one batch."""
        if replicas == 1:
            return self
        columns = zip(*(part.values for part in self.split(microbatches)[::replicas]), strict=True)
        return self.of_values(
            column[0] if leaf.dim is None else torch.cat(column, leaf.dim)
            for leaf, column in zip(self.leaves, columns, strict=True)
        )

    def check_divisible(self, microbatches: int, dims: Dims, size: int) -> None:
        """Refuse a batch of another shape that cannot be cut into this number of microbatches, before any is computed.

        The first batch is cut along these dimensions, by leaf name, and has `size` samples.
        """
        places = ((value.shape, dims.get(name)) for name, value in self.tensors.items())
        samples = math.gcd(*(shape[dim] for shape, dim in places if dim is not None and dim < len(shape)))  # 0 if none
        if samples % microbatches == 0:
            return
        both = math.gcd(samples, size)
        more = [str(d) for d in range(2, min(both, 64) + 1) if both % d == 0]
        count = f"--microbatches 1, or {' or '.join(more[:6])}" if more else "--microbatches 1"
        raise BatchError(
            f"{microbatches} microbatches do not divide a batch of {samples}",
            hint=f"compile with {count}: no other number divides {size} and {samples}; or leave out the last, smaller "
            "batch (drop_last=True)",
            page="batch-shapes",
        )


def _size(value: Any, dim: int | None) -> int | None:
    """The size of a leaf along a dimension; None if it has none."""
    found = isinstance(value, torch.Tensor) and dim is not None and dim < value.dim()
    return value.shape[dim] if found else None


def _common(sizes: Iterable[int]) -> int:
    """The size of a batch: the greatest common divisor, if tensors have different sizes."""
    if not (leaf_sizes := list(sizes)):
        raise BatchError("a batch of scalars cannot be split into microbatches", hint="use --microbatches 1")
    return math.gcd(*leaf_sizes)


def is_named(name: str, names: Iterable[str]) -> bool:
    """Whether a leaf is among the names, with its full name (`batch['grid']`) or its key (`grid`)."""
    return any(name == one or name.endswith((f"[{one!r}]", f".{one}")) for one in names)


def _check_constant(name: str, value: torch.Tensor) -> None:
    if value.is_meta or value.requires_grad or value.numel() > LARGEST_CONSTANT:
        kind = "has no values" if value.is_meta else "requires a gradient" if value.requires_grad else "is large"
        raise BatchError(
            f"constant_batch names {name}, which {kind}: {str(value.dtype).removeprefix('torch.')}{list(value.shape)}",
            hint=f"a constant of the capture is a tensor of up to {LARGEST_CONSTANT} numbers that all batches share, "
            "such as the sizes of images",
        )


def to_device(device: str, model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Move the model and a batch's tensors to a device."""
    if not is_here(device):
        what = f"torch sees no {device.upper()} device"
        raise BatchError(what, hint="use --device cpu; `fxpipe doctor` shows the devices")
    if device in WITHOUT_FLOAT64:
        whole = Batch.of(batch)
        tensors = (*model.named_parameters(), *model.named_buffers(), *zip(whole.names, whole.values, strict=True))
        if wide := [name for name, value in tensors if too_wide(value)]:
            what = f"{listed(wide)}: {LACKS_FLOAT64.format(device.upper())}"
            raise BatchError(what, hint="make them float32, or use --device cpu", page="devices")
    return model.to(device), Batch.of(batch).on(device).given


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return said(value) if isinstance(value, CONSTANTS) else f"a {type(value).__name__}"


def _appended(tensor: torch.Tensor, rule: PadSpec) -> torch.Tensor:
    if max(rule.dims) >= tensor.dim():
        return tensor
    sizes = [
        math.ceil(size / rule.multiple) * rule.multiple if dim in rule.dims else size
        for dim, size in enumerate(tensor.shape)
    ]
    if sizes == list(tensor.shape):
        return tensor
    padded = tensor.new_full(sizes, rule.value)
    padded[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded


def split(batch: Any, microbatches: int) -> list[Any]:
    """The microbatches of a batch, cut along the first dimension of each tensor; errors as `Batch.split`."""
    return [part.given for part in Batch.of(batch).split(microbatches)]
