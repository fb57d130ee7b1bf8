"""What an optimizer is shown of the model: given parameters live, all others without values; and what stays of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon, Optimizer

from fxpipe.errors import TaskError
from fxpipe.task.model_file import Task, load_task
from fxpipe.task.model_view import ModelViews, asks_for_model, of_parameters, without_values
from fxpipe.task.one_optimizer import OptimizerRefused


class Net(nn.Module):
    """Tied weights, a norm, a frozen parameter, and parameters and modules in a list and a dictionary of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.tok.weight
        self.frozen = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0))
        self.first = [self.body.weight, {"norm": self.norm}]
        self.rnn = nn.LSTM(4, 4)
        self.body.weight.scale = 0.5  # type: ignore[assignment]


def given(*names: str) -> list[tuple[str, nn.Parameter]]:
    live = dict(Net().named_parameters())
    return [(name, nn.Parameter(live[name].detach().clone())) for name in names]


def seen(make: Callable[[], nn.Module], named: list[tuple[str, nn.Parameter]]) -> Any:
    """The view itself."""
    kept: list[Any] = []

    def call(view: nn.Module) -> Optimizer:
        kept.append(view)
        return SGD(view.parameters(), lr=0.1)

    ModelViews(make).optimizer(call, named)
    return kept[0]


def test_given_parameters_are_live_and_all_others_have_no_values() -> None:
    named = given("tok.weight", "body.weight", "rnn.weight_hh_l0")
    view, original = seen(Net, named), Net()
    assert type(view) is Net
    assert type(view.norm) is nn.LayerNorm
    live = dict(named)
    assert view.tok.weight is view.head.weight is live["tok.weight"]
    assert view.body.weight is view.first[0] is live["body.weight"]
    assert view.first[1]["norm"] is view.norm
    assert any(weight is live["rnn.weight_hh_l0"] for weight in view.rnn._flat_weights)
    assert [*dict(view.named_parameters())] == [*dict(original.named_parameters())]
    for name, parameter in original.named_parameters():
        shown = view.get_parameter(name)
        assert (shown.shape, shown.dtype, shown.requires_grad) == (
            parameter.shape,
            parameter.dtype,
            parameter.requires_grad,
        )
        assert shown.is_meta == (name not in live)
    assert torch.equal(view.table, original.table)
    assert live["body.weight"].scale == 0.5  # type: ignore[attr-defined]


def test_views_are_apart() -> None:
    views = ModelViews(Net)
    kept = []

    def call(view: nn.Module) -> Optimizer:
        kept.append(view)
        return SGD(view.parameters(), lr=0.1)

    for name in ("body.bias", "norm.bias"):
        views.optimizer(call, given(name))
    assert [[n for n, p in view.named_parameters() if not p.is_meta] for view in kept] == [["body.bias"], ["norm.bias"]]


def test_the_model_that_was_there_keeps_its_values() -> None:
    net = Net()
    before = net.body.weight
    seen(lambda: net, given("body.weight"))
    assert net.body.weight is before is net.first[0]
    assert not before.is_meta
    bare = without_values(net)
    assert all(p.is_meta for p in bare.parameters())
    assert not any(p.is_meta for p in net.parameters())


def test_the_random_state_stays() -> None:
    before = torch.get_rng_state()
    ModelViews(Net).optimizer(lambda view: SGD(view.parameters(), lr=0.1), [])
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_that_needs_values_is_made_with_them() -> None:
    def make() -> nn.Module:
        net = Net()
        net.bound = float(net.body.weight.abs().max())  # type: ignore[assignment]
        return net

    view = seen(make, given("body.bias"))
    assert view.bound > 0
    assert [n for n, p in view.named_parameters() if not p.is_meta] == ["body.bias"]


def groups_of(optimizer: Optimizer, named: list[tuple[str, nn.Parameter]]) -> list[list[str]]:
    names = {id(p): name for name, p in named}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def test_groups_by_name_type_and_dimension() -> None:
    named = given("tok.weight", "norm.weight", "body.weight", "body.bias")
    by_name = ModelViews(Net).optimizer(
        lambda net: AdamW(
            [
                {"params": [p for n, p in net.named_parameters() if "bias" in n], "weight_decay": 0.0},
                {"params": [p for n, p in net.named_parameters() if "bias" not in n]},
            ]
        ),
        named,
    )
    assert groups_of(by_name, named) == [["body.bias"], ["tok.weight", "norm.weight", "body.weight"]]

    def by_type(net: nn.Module) -> Optimizer:
        norms = [p for m in net.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()]
        held = set(norms)
        return AdamW([{"params": norms, "lr": 1.0}, {"params": [p for p in net.parameters() if p not in held]}])

    assert groups_of(ModelViews(Net).optimizer(by_type, named), named) == [
        ["norm.weight"],
        ["tok.weight", "body.weight", "body.bias"],
    ]
    by_dimension = ModelViews(Net).optimizer(
        lambda net: [
            Muon([p for p in net.parameters() if p.dim() == 2]),
            AdamW([p for p in net.parameters() if p.dim() != 2]),
        ],
        named,
    )
    assert groups_of(by_dimension, named) == [["tok.weight", "body.weight"], ["norm.weight", "body.bias"]]


def test_a_group_without_own_parameters_stays() -> None:
    named = given("body.bias")
    made = ModelViews(Net).optimizer(
        lambda net: AdamW([{"params": [(n, p)], "eps": 0.1 * i} for i, (n, p) in enumerate(net.named_parameters())]),
        named,
    )
    names = [name for name, _ in Net().named_parameters()]
    assert [group["eps"] for group in made.param_groups] == [0.1 * i for i in range(len(names))]
    own = [group["param_names"] for group in made.param_groups]
    assert own == [[name] if name == "body.bias" else [] for name in names]


KINDS = [SGD, AdamW, Adagrad, Adafactor, torch.optim.Adam, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Rprop]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_own_parameters_step_as_alone_beside_an_empty_group(kind: Any, options: dict[str, Any]) -> None:
    """Whatever the optimizer makes of the others when it is made: Adagrad makes their state."""
    has = inspect.signature(kind).parameters
    kind = functools.partial(kind, **{name: value for name, value in options.items() if name in has})
    named, alone = given("body.bias", "tok.weight"), given("body.bias", "tok.weight")
    for (_, one), (_, other) in zip(named, alone, strict=True):
        other.data.copy_(one)
        one.grad = torch.full_like(one, 0.1)
        other.grad = torch.full_like(other, 0.1)
    made = ModelViews(Net).optimizer(
        lambda net: kind([{"params": [net.frozen]}, {"params": [p for p in net.parameters() if p is not net.frozen]}]),
        named,
    )
    expected = kind([p for _, p in reversed(alone)])
    assert all(key is named[0][1] or key is named[1][1] for key in made.state)
    for _ in range(2):
        made.step()
        expected.step()
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(named, alone, strict=True))
    assert made.state_dict()["state"].keys() <= {0, 1}


def test_who_asks_for_the_model() -> None:
    def second(named: Any, net: Any) -> Any: ...
    def by_name(named: Any, model: Any = None) -> Any: ...
    def option(named: Any, lr: float = 0.1) -> Any: ...
    def keyword(named: Any, *, model: Any = None) -> Any: ...
    def one(named: Any) -> Any: ...

    class Own(SGD):
        def __init__(self, params: Any, lr: float) -> None: ...

    assert [asks_for_model(hook) for hook in (second, by_name)] == [True, True]
    assert not any(asks_for_model(hook) for hook in (option, keyword, one, Own, SGD, functools.partial(second, net=1)))


def test_without_a_model_it_is_refused() -> None:
    with pytest.raises(TaskError, match="asks for the model") as caught:
        of_parameters(lambda named, model: SGD(named, lr=0.1), None)
    assert "model=" in str(caught.value.hint)
    assert of_parameters(None, None) is None


def test_another_model_is_refused() -> None:
    with pytest.raises(OptimizerRefused, match=r"extra\.weight differs"):
        ModelViews(Net).optimizer(
            lambda net: SGD(net.parameters(), lr=0.1), [("extra.weight", nn.Parameter(torch.ones(1)))]
        )


MODEL = """
import torch
from torch import nn
def model(): return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
def loss(model, batch): return model(batch).sum()
def train_data(): return [torch.ones(1, 2)]
"""


def task_with(tmp_path: Path, text: str) -> Task:
    (tmp_path / "model.py").write_text(MODEL + text)
    return load_task(tmp_path / "model.py")


@pytest.mark.parametrize(
    "text",
    [
        "def optimizer(named, model): return torch.optim.SGD(model[1].parameters(), lr=len(named))",
        "def configure_optimizers(model): return torch.optim.SGD(model[1].parameters(), lr=1)",
    ],
)
def test_a_model_files_hook_sees_the_model(tmp_path: Path, text: str) -> None:
    task = task_with(tmp_path, text)
    assert task.warnings == ()
    named = [("1.bias", nn.Parameter(torch.ones(2)))]
    made = task.optimizer(named)
    assert [group["params"] for group in made.param_groups] == [[named[0][1]]]
    assert made.param_groups[0]["lr"] == 1


def test_helpers_are_no_misspelt_hooks(tmp_path: Path) -> None:
    hook = "def optimizer(named): return configure_optimizer(named)\ndef configure_optimizer(named): ..."
    assert task_with(tmp_path, hook).warnings == ()
    unused = "def configure_optimizer(named): ..."
    assert "do you mean configure_optimizers()?" in task_with(tmp_path, unused).warnings[0]


def test_what_reads_values_is_told_that_there_are_none(tmp_path: Path) -> None:
    text = "def optimizer(named, model): return torch.optim.SGD(model.parameters(), lr=model[0].bias.norm().item())"
    with pytest.raises(TaskError, match="meta tensors") as caught:
        task_with(tmp_path, text).optimizer([("1.bias", nn.Parameter(torch.ones(2)))])
    assert "no values here" in str(caught.value.hint)


def test_an_error_in_it_says_where(tmp_path: Path) -> None:
    task = task_with(tmp_path, "def optimizer(named, model): return torch.optim.SGD(model[2].parameters())")
    with pytest.raises(TaskError, match="optimizer\\(\\) raised IndexError") as caught:
        task.optimizer([("1.bias", nn.Parameter(torch.ones(2)))])
    assert str(caught.value.where).startswith("model.py:7")
