"""An optimizer that looks at the model trains, in a pipeline, as plain PyTorch does with the same hook."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import GPT
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fxpipe
from fxpipe.errors import TaskError
from fxpipe.task.hooks import Hooks

STEPS = 5
Hook = Callable[..., Any]


def model() -> GPT:
    """In double precision: the keys' biases have no gradient, of whose rounding AdamW would make steps."""
    torch.manual_seed(0)
    return GPT(depth=3).double()


def loss(net: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 23, (4, 9), generator=generator) for _ in range(STEPS)]


def by_name(named: Any, model: nn.Module) -> Optimizer:
    """Three groups; the second has nothing on the workers in the middle."""
    groups: dict[str, list[Tensor]] = {"bias": [], "tok": [], "": []}
    for name, parameter in model.named_parameters():
        groups[next(part for part in groups if part in name)].append(parameter)
    options = ({"weight_decay": 0.0}, {"lr": 0.02}, {"weight_decay": 0.1})
    return AdamW([{"params": p, **o} for p, o in zip(groups.values(), options, strict=True)], lr=0.01)


def by_type(named: Any, model: nn.Module) -> Optimizer:
    """As minGPT does it; tied weights come once."""
    decayed: dict[Tensor, None] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            decayed[module.weight] = None
    rest = [p for p in model.parameters() if p not in decayed]
    return AdamW([{"params": rest, "weight_decay": 0.0}, {"params": list(decayed), "weight_decay": 0.5}], lr=0.01)


def by_dimension(named: Any, model: nn.Module) -> list[Optimizer]:
    flat = [p for p in model.parameters() if p.dim() < 2]
    return [AdamW(flat, lr=0.01), Adagrad([p for p in model.parameters() if p.dim() >= 2], lr=0.01)]


def by_depth(named: Any, model: Any) -> Optimizer:
    """Rates that fall from the last block to the first: how many there are, a worker's own parameters do not say."""
    depth = len(model.blocks)
    groups = [{"params": [p], "lr": 0.01} for n, p in model.named_parameters() if not n.startswith("blocks")]
    for i, block in enumerate(model.blocks):
        groups.append({"params": list(block.parameters()), "lr": 0.01 * 0.5 ** (depth - i)})
    return torch.optim.SGD(groups, momentum=0.9)


def of_the_guide() -> Hook:
    guide = (Path(__file__).parents[1] / "docs" / "how-to" / "optimizers.md").read_text(encoding="utf-8")
    hooks: dict[str, Any] = {}
    exec(guide.split("## An optimizer that looks at the model")[1].split("```python\n")[1].split("```")[0], hooks)
    found: Hook = hooks["optimizer"]
    return found


def warm(optimizer: Optimizer) -> LambdaLR:
    """A function for each group: as many as one process has."""

    def factor(step: int, group: int) -> float:
        return (1 + step) / (2 + group)

    return LambdaLR(optimizer, [functools.partial(factor, group=i) for i in range(len(optimizer.param_groups))])


HOOKS: dict[str, Hook] = {"by_dimension": by_dimension, "by_depth": by_depth, "guide": of_the_guide()}


@functools.cache
def built(hook: Hook | None, **options: Any) -> fxpipe.Build:
    asked: dict[str, Any] = {"workers": 3, "microbatches": 2, "schedule": "1f1b", "cost": "analytic"}
    at = "blocks.1", "blocks.2"
    asked |= {"optimizer": hook, "forward_at": at, "backward_at": at}
    return fxpipe.compile(model(), loss, batches()[0], **asked | options)


@pytest.mark.parametrize("name", HOOKS)
def test_1f1b_is_eager(name: str) -> None:
    hook = HOOKS[name]
    pipeline = built(None).local(optimizer=hook, lr_scheduler=warm)
    losses = [float(x) for x in pipeline.run(batches())]
    net, expected = model(), []
    made = hook(list(net.named_parameters()), net)
    optimizers = made if isinstance(made, list) else [made]
    groups = [group for each in optimizers for group in each.param_groups]
    rates = [float(group["lr"]) for group in groups]
    for step, batch in enumerate(batches()):
        for i, (group, rate) in enumerate(zip(groups, rates, strict=True)):
            group["lr"] = rate * (1 + step) / (2 + i)
        net.zero_grad()
        value = sum(loss(net, part) for part in batch.chunk(2)) / 2
        value.backward()  # type: ignore[attr-defined]
        for each in optimizers:
            each.step()
        expected.append(float(value.detach()))  # type: ignore[attr-defined]
    assert expected[-1] < expected[0]
    torch.testing.assert_close(torch.tensor(losses).double(), torch.tensor(expected).double(), rtol=1e-6, atol=0)
    found = pipeline.state_dict()
    for key, tensor in net.state_dict().items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-8)


def test_every_worker_has_all_groups_and_the_whole_model_in_view() -> None:
    views = []

    def hook(named: Any, model: nn.Module) -> Optimizer:
        views.append(model)
        return by_name(named, model)

    pipeline = built(None).local(optimizer=hook)
    views = views[-3:]
    optimizers = [executor.store.updater.optimizer for executor in pipeline.executors]
    assert [len(optimizer.param_groups) for optimizer in optimizers if optimizer] == [3, 3, 3]
    live = [{n for n, p in view.named_parameters(remove_duplicate=False) if not p.is_meta} for view in views]
    assert {n for n, _ in model().named_parameters(remove_duplicate=False)} == set().union(*live)
    assert sum(map(len, live)) == len(set().union(*live))
    assert {"tok.weight", "head.weight"} in [names & {"tok.weight", "head.weight"} for names in live]
    assert views[0].head.weight is views[0].tok.weight


def test_a_loaded_build_needs_the_model(tmp_path: Path) -> None:
    saved = built(None).save(tmp_path / "build")
    loaded = fxpipe.load(tmp_path / "build")
    with pytest.raises(TaskError, match="asks for the model") as caught:
        loaded.local(optimizer=by_type)
    assert "model=" in str(caught.value.hint)
    with pytest.raises(TaskError, match="asks for the model"):
        loaded.join(batches, optimizer=by_type)
    one, other = loaded.local(Hooks(optimizer=by_type), model=model), saved.local(optimizer=by_type)
    assert [float(x) for x in one.run(batches())] == [float(x) for x in other.run(batches())]
    with pytest.raises(TaskError, match="differs"):
        loaded.local(optimizer=by_type, model=lambda: nn.Linear(2, 2))


def test_compile_tries_and_costs_it_as_a_run_has_it() -> None:
    found = built(by_dimension)
    assert found.warnings == built(None).warnings
    sizes = [(p.tensor.bytes, len(p.tensor.shape) >= 2) for p in found.plan.parameters]
    flat, deep = (sum(size for size, matrix in sizes if matrix == kind) for kind in (False, True))
    assert found.costs.optimizer_bytes == pytest.approx((2 * flat + deep) / (flat + deep), rel=0.05)


def test_lower_has_no_model() -> None:
    program = fxpipe.capture(model(), loss, batches()[0])
    with pytest.raises(TaskError, match="asks for the model"):
        fxpipe.lower(program, workers=2, optimizer=by_type)


def test_a_run_goes_on_with_other_cuts_and_other_empty_groups(tmp_path: Path) -> None:
    def falling(optimizer: Optimizer) -> Any:
        """Its next rate follows from the last one, of each group."""
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)

    def pipeline(build: fxpipe.Build, **options: Any) -> Any:
        return build.local(optimizer=by_name, lr_scheduler=falling, **options)

    build, whole = built(None), pipeline(built(None))
    expected = [float(x) for x in whole.run(batches())]
    before = pipeline(build, checkpoint_every="2", out=tmp_path)
    assert [float(x) for x in before.run(batches()[:2])] == expected[:2]
    at = "blocks.0", "norm"
    after = pipeline(built(None, forward_at=at, backward_at=at), resume="newest", out=tmp_path)
    found = [float(x) for x in after.run(batches()[2:])]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected[2:]), rtol=1e-6, atol=0)
    optimizers = [executor.store.updater.optimizer for executor in (*whole.executors, *after.executors)]
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    assert all(each == pytest.approx(rates[0]) for each in rates)
    assert any(not group["params"] for optimizer in optimizers[3:] for group in optimizer.param_groups)
