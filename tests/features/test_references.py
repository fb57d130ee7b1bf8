"""The model's tensors and containers in other hands: objects, closures, hooks, partials, a teacher that follows."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from features import WIDTH, Around, Chain, Feature, check, layers, squared, vectors
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import CaptureError
from fxpipe.lowering.compare_with_eager import compare_with_eager


class Holder:
    """An object that is no module, and holds what it is given."""

    def __init__(self, held: Any) -> None:
        self.held = held


class Objects(Chain):
    """Weights in objects, closures, partial functions, tuples with names, defaultdicts, and the closure of a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(WIDTH, WIDTH))
        weights = [layer.weight for layer in self.layers]
        self.criterion = Holder(self.proxies)
        self.penalty = lambda: sum(weight.square().sum() for weight in weights)
        self.again = functools.partial(F.linear, weight=weights[1])
        self.pair = collections.namedtuple("Pair", "weight bias")(weights[2], self.layers[2].bias)
        self.groups = collections.defaultdict(list, late=[weights[3]])
        self.layers[2].register_forward_hook(lambda module, args, out: F.linear(out, weights[0]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(super().forward(x))
        return F.linear(torch.tanh(x), self.pair.weight, self.pair.bias)


def held_elsewhere(model: Any, batch: Any) -> Tensor:
    x = model(batch[0])
    far = 1 - F.cosine_similarity(x, model.criterion.held[batch[1].argmax(1)])
    return squared(model, batch) + far.mean() + 0.01 * model.penalty() + model.groups["late"][0].abs().mean()


class Anchored(Chain):
    """A weight without its gradient, under a name of its own: it follows the weight, which gets no gradient by it."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = self.layers[0].weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.anchor


class Listened(Chain):
    """Forward hooks put what layers make into a dictionary, of which an object holds a view, and into a queue."""

    def __init__(self) -> None:
        super().__init__()
        made = self.made = {}
        self.last = collections.deque(maxlen=2)
        self.values = Holder(made.values())
        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(functools.partial(self.keep, number))

    def keep(self, number: int, module: nn.Module, args: Any, out: Tensor) -> None:
        self.made[number] = out
        self.last.append(out)


def listened(model: Any, batch: Any) -> Tensor:
    loss = squared(model, batch)
    return loss + 0.1 * sum(v.square().mean() for v in model.values.held) + model.last[0].mean()


class Helped(nn.Module):
    """An object reads the model's buffer, and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.helper = Holder(self.mean)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x)) - self.helper.held
        self.helper.held.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + self.mean


class Followed(nn.Module):
    """A teacher without gradients that follows its student in the step: in place, by .data, by load_state_dict."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.student = nn.Sequential(*layers(3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = self.student(x)
        with torch.no_grad():
            seen = self.teacher(x)
            pairs = list(zip(self.teacher.parameters(), self.student.parameters(), strict=True))
            if self.how == "in place":
                for old, new in pairs:
                    old.mul_(0.9).add_(new, alpha=0.1)
            elif self.how == "data":
                for old, new in pairs:
                    old.data = old.data * 0.9 + new.data * 0.1
            else:
                self.teacher.load_state_dict(self.student.state_dict())
        return y - 0.5 * seen


class Dequantized(Chain):
    """New tensors, made only of tensors that an object holds, are the step's own: it changes them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight.state = Holder((torch.rand(WIDTH, WIDTH), torch.ones(WIDTH)))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        codes, offset = self.layers[0].weight.state.held  # type: ignore[union-attr]
        scale = (codes * 2).view(-1)
        other = scale + 1
        scale[::2] += 1
        scale = scale.view(WIDTH, WIDTH)
        scale -= offset
        first, order = torch.sort(codes[0] + offset)
        first.mul_(2).add_(order)
        return super().forward(x @ scale + other[:WIDTH] * first)


FEATURES = [
    Feature("objects", Objects, held_elsewhere, alone=True),
    Feature("anchor", Anchored, alone=True),
    Feature("listened", Listened, listened, alone=True),
    Feature("helped", Helped),
    Feature("dequantized", Dequantized, alone=True),
    Feature("teacher-in-place", lambda: Followed("in place")),
    Feature("teacher-by-data", lambda: Followed("data")),
    Feature("teacher-by-state-dict", lambda: Followed("state dict")),
]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_references(feature: Feature) -> None:
    check(feature)


class Transposed(nn.Module):
    """A view of a weight that was made with the model, in an attribute or in an object."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        view = self.layer.weight.data.t()
        self.view = view if inside else Holder(view)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ getattr(self.view, "held", self.view)


@pytest.mark.parametrize("inside", [True, False])
def test_an_old_view_of_a_weight_is_refused(inside: bool) -> None:
    """It would not follow the optimizer: right at the first step, wrong from the second on."""
    with pytest.raises(CaptureError, match=r"shares the memory of parameter layer\.weight") as caught:
        fxpipe.capture(Transposed(inside), squared, vectors(4))
    assert "test_references.py" in str(caught.value.where)


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        (lambda p: p.requires_grad_(False), "switches the gradient of a parameter"),
        (lambda p: p.clamp_(max=4), "changes parameter layers.0.weight in place"),
        (lambda p: setattr(p, "data", p.data * 2), "assigns to the .data"),
    ],
)
def test_what_a_step_may_not_do_to_a_weight(switch: Callable[[Tensor], Any], message: str) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        found = squared(model, batch)
        with torch.no_grad():
            switch(model.layers[0].weight)
        return found

    with pytest.raises(CaptureError, match=message) as caught:
        fxpipe.capture(Chain(), loss, vectors(4))
    assert "test_references.py" in str(caught.value.where)
    assert caught.value.hint


def test_the_model_is_as_it_was() -> None:
    """Its containers are the same ones, with the same members, after capture and after a comparison with eager."""
    model, batch = Listened(), vectors(4)
    listened(model, batch).backward()
    made, before, last = model.made, dict(model.made), list(model.last)
    weight = model.layers[0].weight
    value, gradient = weight.detach().clone(), weight.grad
    build = fxpipe.lower(fxpipe.capture(model, listened, batch), workers=2, cost="analytic")
    assert compare_with_eager(build, model, listened, batch).largest < 1e-6
    assert model.made is made
    assert made.keys() == before.keys()
    assert all(made[key] is value for key, value in before.items())
    assert all(a is b for a, b in zip(model.last, last, strict=True))
    assert weight.grad is gradient
    assert torch.equal(weight, value)


def test_a_comparison_with_eager_puts_values_back() -> None:
    model, batch = Around(Followed("in place")), vectors(4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    build = fxpipe.compile(model, squared, batch, workers=2, cost="analytic")
    agreement = compare_with_eager(build, model, squared, batch)
    assert agreement.largest < 1e-6
    assert {name for name in agreement.buffers if name.startswith("middle.teacher")}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("view", [torch.detach, lambda t: t.view(2, 3), lambda t: t.chunk(2)[1]])
def test_a_change_through_a_view_of_an_objects_tensor_is_refused(view: Callable[[Tensor], Tensor]) -> None:
    """The object's tensor is a constant, and would not follow."""
    held = Holder(torch.ones(WIDTH))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        view(held.held).add_(1)
        return (model(batch) * held.held).sum()

    with pytest.raises(CaptureError, match="changes a tensor in place that is not part of the model") as caught:
        fxpipe.capture(nn.Linear(WIDTH, WIDTH), loss, torch.rand(4, WIDTH))
    assert "add_(1)" in str(caught.value.where)
    assert torch.equal(held.held, torch.ones(WIDTH))
