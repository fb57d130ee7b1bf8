"""Puts a model into eval mode for a while, then restores it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import CaptureError
from fxpipe.torch_private import LightDispatchMode, memory_of, pytree, schema_of


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model is in eval mode inside; afterwards every submodule is in its former mode.

    Raises:
        CaptureError: eval() changes weights, as in modules that merge other weights into theirs: what is evaluated
            would not be what is trained. All values are restored.
    """
    modes, before = {module: module.training for module in model.modules()}, model.training
    changed: list[str] = []
    tensors = _tensors(model)
    memories = {name: tensor.detach() for name, tensor in tensors.items()}
    writes = _Writes([*tensors.values()])
    try:
        with writes:
            model.eval()
        now = _tensors(model)
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
        self._watched: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            self._watched.setdefault(memory_of(tensor), []).append(tensor.detach())
        self.values: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def undo(self) -> None:
        """Restore the former values of all of them."""
        for pairs in self.values.values():
            for tensor, value in pairs:
                tensor.copy_(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for argument, value in zip(schema_of(func).arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in pytree.tree_leaves(value):
                    memory = memory_of(tensor) if isinstance(tensor, Tensor) else None
                    if memory in self._watched and memory not in self.values:
                        self.values[memory] = [(watched, watched.clone()) for watched in self._watched[memory]]
        return func(*args, **(kwargs or {}))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
