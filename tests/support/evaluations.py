"""Evaluations of a build, run worker after worker in this process, and in eager PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.builds.build import Build
from fxpipe.lowering.evaluation import Metrics


class Wires:
    """The `comm` of all workers together: what one sends, another one takes away."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def send(self, name: str, value: Tensor) -> None:
        assert name not in self.values
        self.values[name] = value

    def recv(self, name: str) -> Tensor:
        return self.values.pop(name)


def in_pipeline(build: Build, model: nn.Module, batch: Any, shape: int = 0) -> dict[str, float]:
    """The metrics of a batch on the model's present state; on the build's own constants."""
    spec = build.plan.evaluations[shape]
    now = {name: t for name, t in build.tensors.items() if name not in model.state_dict()}
    now |= dict(model.named_parameters()) | dict(model.named_buffers())
    leaves = dict(zip((leaf.name for leaf in spec.batch), pytree.tree_leaves(batch), strict=True))
    wires, found = Wires(), dict(spec.constants)
    for worker, stage in enumerate(spec.stages):
        assert worker == 0 or not stage.forward.batch
        namespace: dict[str, Any] = {}
        exec(compile(build.files[stage.file], stage.file, "exec"), namespace)
        weights = tuple(now[name] for name in stage.forward.weights)
        buffers = tuple(now[name] for name in stage.forward.buffers)
        with torch.no_grad():
            values = namespace["evaluate"](weights, buffers, tuple(leaves[n] for n in stage.forward.batch), wires)
        found |= {name: float(v) for name, v in zip(stage.forward.metrics, values, strict=False)}
    assert not wires.values, "sent and never received"
    return {name: found[name] for name in spec.metrics}


def in_eager(model: nn.Module, metrics: Metrics, batch: Any) -> dict[str, float]:
    """The metrics of a batch, of the model in eval mode; which is then in train mode."""
    model.eval()
    with torch.no_grad():
        found = {name: float(v) for name, v in metrics(model, batch).items()}
    model.train()
    return found


def move_on(model: nn.Module) -> None:
    """Give the model another state, as training would."""
    with torch.no_grad():
        for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
            if tensor.is_floating_point():
                tensor.mul_(1 + 0.1 * torch.rand_like(tensor))
