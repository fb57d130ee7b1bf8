"""Parameters: frozen, unused, used many times and in many stages, tied under any names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from features import WIDTH, Feature, check, squared
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

import fxpipe


class Frozen(nn.Module):
    """A frozen layer passes gradients on; a frozen parameter scales; one is frozen but tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.unused_frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.frozen(torch.tanh(self.trained(x)))) * self.scale


class Unused(nn.Module):
    """Parameters that nothing reads, that only a shape reads, and that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.ones(3))
        self.shape = nn.Parameter(torch.ones(WIDTH, 2))
        self.detached = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.shape.shape[1] + self.detached.detach()


class ManyTimes(nn.Module):
    """One parameter read by every layer, as itself, transposed, sliced, expanded and reshaped."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.shared)
        x = torch.tanh(x @ self.shared.t())
        x = torch.tanh(x + self.shared[1])
        x = torch.tanh(x * self.shared[:, 2].expand(x.shape[0], WIDTH))
        return torch.tanh(F.linear(x, self.shared.reshape(WIDTH, WIDTH))) + self.shared.diagonal()


class ThreeNames(nn.Module):
    """Tied under three names that say nothing of it, in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.elsewhere = nn.ParameterDict({"third name": self.first.weight})
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.between[0](x))
        x = torch.tanh(x @ self.elsewhere["third name"])
        x = torch.tanh(self.between[1](x))
        return self.last(x)


class TiedForwardOnly(nn.Module):
    """Tied in three places; one of them lies in no_grad, another only in a detached branch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.same = self.table

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(x @ self.table)
        x = torch.tanh(self.layers[0](x)) * gate
        x = torch.tanh(self.layers[1](x @ self.same))
        return x + (x.detach() @ self.table.detach()).tanh()


class TiedModule(nn.Module):
    """A whole module under three names, and a transposed tie of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.two = self.one
        self.listed = nn.ModuleList([nn.Linear(WIDTH, WIDTH), self.one])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.two(torch.tanh(self.one(x))))
        x = torch.tanh(self.listed[0](x))
        return F.linear(torch.tanh(self.listed[1](x)), self.one[0].weight.t())


class FirstAndLoss(nn.Module):
    """A parameter that the first layer and the loss read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def with_penalty(model: Any, batch: Any) -> Tensor:
    """Also weight decay over all parameters by hand, as many losses have it."""
    return squared(model, batch) + model.scale.square().mean() + 1e-3 * sum(p.norm() for p in model.parameters())


class Collections(nn.Module):
    """ParameterList, ParameterDict, and modules in a plain list that another attribute registers."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.randn(WIDTH) for _ in range(3)])
        self.shifts = nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(WIDTH)})
        self.registered = nn.Linear(WIDTH, WIDTH)
        # The second is not part of the model: a constant.
        self.plain = [self.registered, nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = torch.tanh(x * scale)
        for layer in self.plain:
            x = torch.tanh(layer(x))
        return x + self.shifts["a"] - self.shifts["b"]


class ScalarAndEmpty(nn.Module):
    """A parameter of no dimension, and one of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x * self.temperature.exp(), self.nothing])


class PartOfAParameter(nn.Module):
    """Only some rows of a parameter get a gradient; its halves are read in different places."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * 0.4)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b, _ = self.rows.split(WIDTH)
        return torch.tanh(self.layer(torch.tanh(x @ a))) @ b


class SetToNone(nn.Linear):
    """A layer whose bias is registered as None, and whose weight was frozen and thawed again."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.register_parameter("nothing", None)
        self.register_buffer("no_buffer", None)
        self.weight.requires_grad_(False).requires_grad_(True)


class Expanded(nn.Module):
    """A parameter whose own memory is transposed, and one that is a column of other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.column = nn.Parameter(torch.randn(WIDTH, 3)[:, 1])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.transposed) * self.column


class Marked(nn.Linear):
    """What is set on a parameter, or on a buffer, says how it is read."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))
        self.weight.turned = True  # type: ignore[attr-defined]
        self.scale.power = 2  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if getattr(self.weight, "turned", False) else self.weight
        return F.linear(x, weight, self.bias) * self.scale ** getattr(self.scale, "power", 1)


FEATURES = [
    Feature("frozen", Frozen),
    Feature("unused", Unused),
    Feature("many-times", ManyTimes),
    Feature("three-names", ThreeNames),
    Feature("tied-forward-only", TiedForwardOnly),
    Feature("tied-module", TiedModule),
    Feature("first-and-loss", FirstAndLoss, loss=with_penalty, alone=True),
    Feature("collections", Collections),
    Feature("scalar-and-empty", ScalarAndEmpty),
    Feature("part-of-a-parameter", PartOfAParameter),
    Feature("set-to-none", SetToNone),
    Feature("strided-memory", Expanded),
    Feature("marked", Marked),
]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_parameters(feature: Feature) -> None:
    check(feature)


class WithExtraState(nn.Tanh):
    """Some libraries' modules save what is no tensor of theirs."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None:
        pass


def test_names_in_files_are_those_of_the_state_dict() -> None:
    """A wrapper of checkpointing leaves itself out there; a hook may rename a tensor."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(WIDTH, WIDTH)), WithExtraState(), nn.Linear(WIDTH, WIDTH))
    model.append(nn.BatchNorm1d(WIDTH))
    last = model[2]

    def rename(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

    def copy(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
        state.update({name: value.clone() for name, value in state.items() if name.startswith(prefix)})

    last.register_state_dict_post_hook(rename)
    model[3].register_state_dict_post_hook(copy)
    last.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *rest: state.update({f"{prefix}weight": state.pop(f"{prefix}kernel")})
    )
    batch = torch.randn(4, WIDTH)
    build = fxpipe.compile(model, lambda m, x: m(x).square().mean(), batch, workers=2, cost="analytic")
    pipeline = build.local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    pipeline.run([batch, batch])
    state = pipeline.state_dict()
    assert build.warnings == ("files of weights leave out 1._extra_state, which state_dict() makes anew at each call",)
    state["1._extra_state"] = {}
    assert state.keys() == model.state_dict().keys()
    assert "0.weight" in state, "a wrapper of checkpointing leaves itself out"
    assert "2.kernel" in state
    model.load_state_dict(state)
    assert torch.equal(last.weight, state["2.kernel"])


def test_data_parallel_is_what_it_wraps() -> None:
    """It marks its calls for the profiler, which no stage does; its names stay."""
    model = nn.DataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    build = fxpipe.compile(model, lambda m, x: m(x).square().mean(), torch.randn(4, WIDTH), workers=2, cost="analytic")
    assert not any("profiler" in source for source in build.files.values())
    assert build.local().state_dict().keys() == model.state_dict().keys()
