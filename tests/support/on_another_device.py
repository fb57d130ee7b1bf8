"""Trains the small models, cut at random, on the CPU and on a device that is not here; prints what is not the same.

    python on_another_device.py [FAULT]

The JSON object has for each model a list of differences, or the error of the run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pretended_device
import torch
from pipelines import optimizer
from random_cuts import legal_cuts, with_units
from small_models import CASES, Case
from torch import Tensor
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import FxpipeError
from fxpipe.passes.fold import Fold
from fxpipe.task.batch import split

MICROBATCHES = 2
OTHER_KERNELS = {"lstm": 1e-5}
"""Models that the device computes by other kernels, and how far numbers may differ."""


def trained(case: Case, device: str, change: Callable[[Build], Build]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of three steps on a device."""
    with torch.device(device):
        model = case.make()
    batches = pytree.tree_map_only(Tensor, lambda value: value.to(device), case.batches(3))
    program = fxpipe.capture(model, case.loss, split(batches[0], MICROBATCHES)[0])
    options: dict[str, Any] = {"accept_microbatch_loss": True, "cost": "analytic", "split_backward": True}
    cuts = legal_cuts(with_units(program, MICROBATCHES), 3, case.name)
    build = fxpipe.lower(program, workers=3, microbatches=MICROBATCHES, schedule="1f1b", cuts=cuts, **options)
    assert build.plan.device == device
    with change(build).local(optimizer=optimizer) as pipeline:
        losses = [float(pipeline.step(batch)) for batch in batches]
        pipeline.flush()
        return losses, {name: value.cpu() for name, value in pipeline.state_dict().items()}


def differences(case: Case, change: Callable[[Build], Build]) -> list[str]:
    """What the device trains other than the CPU."""
    limit = OTHER_KERNELS.get(case.name, 0.0)
    losses, weights = trained(case, "cpu", lambda build: build)
    found, other = trained(case, pretended_device.NAME, change)
    wrong = (
        [f"losses {found}, not {losses}"] if max(abs(a - b) for a, b in zip(found, losses, strict=True)) > limit else []
    )
    return wrong + [n for n, v in weights.items() if not torch.allclose(v, other[n], rtol=limit, atol=limit)]


def made_on_the_cpu(build: Build) -> Build:
    """What stages make themselves, they make on the CPU."""
    code = {name: text.replace(f'"{pretended_device.NAME}"', '"cpu"') for name, text in build.files.items()}
    assert code != build.files
    return replace(build, files=code)


def leaking_pass() -> None:
    """A pass moves a value to the CPU."""
    fold = Fold.__call__

    def leak(step: Fold, program: Any) -> Any:
        made = fold(step, program)
        nodes = [n for n in made.graph.nodes if n.op == "call_function" and isinstance(n.meta["val"], Tensor)]
        node = next(node for node in nodes if node.meta["val"].dim() > 1)
        user = next(iter(node.users))
        with made.graph.inserting_after(node):
            moved = made.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"device": torch.device("cpu")})
        moved.meta = dict(node.meta)
        user.replace_input_with(node, moved)
        return made

    Fold.__call__ = leak  # type: ignore[method-assign]


def main(fault: str) -> None:
    pretended_device.set_up()
    torch.set_num_threads(1)
    names = {"constant": ["gpt"], "pass": ["function"]}.get(fault, list(CASES))
    change = made_on_the_cpu if fault == "constant" else lambda build: build
    if fault == "pass":
        leaking_pass()
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = differences(CASES[name], change)
        except FxpipeError as error:
            found[name] = [str(error)]
    print(json.dumps(found))


if __name__ == "__main__":
    main("".join(sys.argv[1:]))
