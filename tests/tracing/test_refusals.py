"""Steps that no graph can hold: each is refused with the user's line, the cause, the cure and the page."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from by_path import module_at
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.errors import BatchError, CaptureError

WIDTH = 8
Change = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A change between two layers."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.first, self.change, self.last = nn.Linear(WIDTH, WIDTH), change, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self.first(x)))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, WIDTH), torch.randn(6, WIDTH)


def refused(change: Change) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        fxpipe.capture(Net(change), loss, data())
    return caught.value


def lines_of(function: Callable[..., Any]) -> range:
    source, first = inspect.getsourcelines(function)
    return range(first, first + len(source))


def line_in(where: str | None) -> int:
    """The line of this file that a place begins with."""
    assert where is not None
    file, number, _ = where.split(":", 2)
    assert Path(file).name == Path(__file__).name
    return int(number)


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return -x
    return x


def swallowed(x: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        if x.sum() > 0:
            return -x
    return x


def compared(x: Tensor) -> Tensor:
    return x if torch.allclose(x, x.round()) else -x


def loop(x: Tensor) -> Tensor:
    while x.abs().max() > 1:
        x = x / 2
    return x


def asserted(x: Tensor) -> Tensor:
    assert x.isfinite().all()
    return x


def larger(x: Tensor) -> Tensor:
    return x * max(x[0, 0], x[0, 1])


def comprehension(x: Tensor) -> Tensor:
    return torch.stack([row if row.sum() > 0 else -row for row in x])


def decorated(function: Change) -> Change:
    @functools.wraps(function)
    def inner(x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + 0
        return function(x)

    return inner


@decorated
def behind_a_decorator(x: Tensor) -> Tensor:
    return -x if bool((x > 0).any()) else x


def in_a_hook(x: Tensor) -> Tensor:
    x = x * 1
    x.register_hook(lambda gradient: gradient if gradient.sum() > 0 else -gradient)
    return x


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient if gradient.sum() > 0 else -gradient


def item(x: Tensor) -> Tensor:
    return x * x.mean().item()


def number(x: Tensor) -> Tensor:
    return x * float(x.mean()) + int(x.sum())


def listed(x: Tensor) -> Tensor:
    return x * x[0].tolist()[0]


def counted(x: Tensor) -> Tensor:
    for _ in range(x.abs().long().sum()):
        x = x + 1
    return x


def rebuilt(x: Tensor) -> Tensor:
    return x * torch.tensor([x[0, 0], x[0, 1]]).sum()


def formatted(x: Tensor) -> Tensor:
    print(f"{x.mean():.3f}")
    return x


def masked(x: Tensor) -> Tensor:
    return x * x[x > 0].mean()


def nonzero(x: Tensor) -> Tensor:
    return x + x.nonzero().sum()


def unique(x: Tensor) -> Tensor:
    return x + torch.unique(x).sum()


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave((x[:, 0] > 0).long() + 1, dim=0)[:6]


def round_trip(x: Tensor) -> Tensor:
    return x * torch.from_numpy(x.detach().cpu().numpy())


def as_array(x: Tensor) -> Tensor:
    return x * torch.as_tensor(np.sin(x.detach()))


def condition(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.tanh, torch.relu, (x,))


def flexible(x: Tensor) -> Tensor:
    return flex_attention(x[None, None], x[None, None], x[None, None])[0, 0]


def as_sparse(x: Tensor) -> Tensor:
    return x.to_sparse().to_dense()


def nested(x: Tensor) -> Tensor:
    return x + torch.nested.nested_tensor([x[0], x[1]]).to_padded_tensor(0.0)[0]


def jagged(x: Tensor) -> Tensor:
    return x + torch.nested.as_nested_tensor([x[0], x[1]], layout=torch.jagged).to_padded_tensor(0.0)[0]


def elsewhere(x: Tensor) -> Tensor:
    return x + torch.ones(WIDTH, device="meta")


def memory(x: Tensor) -> Tensor:
    ctypes.string_at(x.data_ptr(), 4)
    return x


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x + torch.randn(WIDTH)


def drawn_apart(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return x + torch.randn(WIDTH)


def generator(x: Tensor) -> Tensor:
    return x + torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))


TABLE: SimpleQueue[Tensor] = SimpleQueue()


def cached(x: Tensor) -> Tensor:
    table = torch.linspace(0, 1, WIDTH) if TABLE.empty() else TABLE.get()
    TABLE.put(table)
    return x * table


OWN = torch.default_generator


def seeded_generator(x: Tensor) -> Tensor:
    torch.default_generator.manual_seed(0)
    return x + torch.randn(WIDTH)


def seeded_generator_elsewhere(x: Tensor) -> Tensor:
    OWN.manual_seed(0)
    return x + torch.randn(WIDTH)


def same_twice(x: Tensor) -> Tensor:
    state = torch.default_generator.get_state()
    x = x + torch.randn(WIDTH)
    torch.default_generator.set_state(state)
    return x - torch.randn(WIDTH)


def by_the_seed(x: Tensor) -> Tensor:
    return x * (1 + torch.initial_seed() % 2)


def packed(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        return x.exp()


@pytest.mark.parametrize(
    ("change", "page"),
    [
        *(
            (c, "data-dependent")
            for c in (branch, swallowed, compared, loop, asserted, larger, comprehension, behind_a_decorator, in_a_hook)
        ),
        *((c, "item") for c in (item, number, listed, counted, rebuilt, formatted)),
        *((c, "data-shapes") for c in (masked, nonzero, unique, repeated)),
        *((c, "numpy") for c in (round_trip, as_array)),
        *((c, "higher-order") for c in (condition, flexible)),
        *((c, "tensor-kinds") for c in (as_sparse, nested, jagged)),
        *((c, "randomness") for c in (seeded, drawn_apart, generator, by_the_seed)),
        *((c, "randomness") for c in (seeded_generator, same_twice)),
        (packed, "backward"),
        (elsewhere, "devices"),
        (memory, "operators"),
        (cached, "kept-tensors"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.filterwarnings("ignore")
def test_a_refusal_names_line_cause_cure_and_page(change: Change, page: str) -> None:
    error = refused(change)
    assert error.page == page, error
    assert line_in(error.where) in lines_of(getattr(change, "__wrapped__", change))
    assert error.hint
    assert str(error).endswith(f"\n  more: fxpipe explain {page}")


def test_a_generator_that_is_held_is_looked_at() -> None:
    before = OWN.get_state()
    error = refused(seeded_generator_elsewhere)
    assert "calls a method of torch.default_generator" in str(error)
    assert error.page == "randomness"
    assert torch.equal(OWN.get_state(), before)
    assert torch.default_generator is torch.random.default_generator is OWN


def test_a_backward_of_ones_own_is_looked_at() -> None:
    error = refused(Clipped.apply)
    assert error.page == "data-dependent"
    assert line_in(error.where) in lines_of(Clipped.backward)


class Reversed(torch.autograd.Function):
    """A reversible block: backward computes it anew, and its gradients go past autograd."""

    @staticmethod
    def forward(context: Any, x: Tensor, block: nn.Module) -> Tensor:
        context.block = block
        with torch.no_grad():
            y = x + block(x)
        context.save_for_backward(y)
        return y

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            y = context.saved_tensors[0].detach().requires_grad_()
            (y + context.block(y)).backward(gradient)
        assert y.grad is not None
        return y.grad, None


class Blocks(nn.Module):
    def __init__(self, reversible: bool) -> None:
        super().__init__()
        self.block, self.last, self.reversible = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), reversible

    def forward(self, x: Tensor) -> Tensor:
        if self.reversible:
            return self.last(Reversed.apply(x * self.last.bias, self.block))
        return self.last(x + checkpoint(self.block, x, use_reentrant=False))


def test_a_reversible_block_is_named_and_its_cure_trains() -> None:
    with pytest.raises(
        CaptureError, match=r"computes with parameter block\.(weight|bias) anew, as reversible"
    ) as caught:
        fxpipe.capture(Blocks(reversible=True), loss, data())
    assert caught.value.page == "backward"
    assert "checkpoint" in str(caught.value.hint)
    program = fxpipe.capture(Blocks(reversible=False), loss, data())
    assert all(parameter.trained for parameter in program.parameters)


def test_a_scaler_is_named_and_without_it_the_step_trains() -> None:
    def scaled(scaler: torch.amp.GradScaler) -> Callable[..., Tensor]:
        return lambda model, batch: scaler.scale(loss(model, batch))

    with pytest.raises(CaptureError, match=r"the step calls GradScaler\.scale") as caught:
        fxpipe.capture(Net(torch.tanh), scaled(torch.amp.GradScaler("cpu")), data())
    assert "--autocast bf16" in str(caught.value.hint)
    assert line_in(caught.value.where) in lines_of(test_a_scaler_is_named_and_without_it_the_step_trains)
    fxpipe.capture(Net(torch.tanh), loss, data(), autocast="bf16")
    fxpipe.capture(Net(torch.tanh), scaled(torch.amp.GradScaler("cpu", enabled=False)), data())


def test_a_backward_that_fails_in_eager_too_says_so() -> None:
    def overwritten(x: Tensor) -> Tensor:
        y = torch.sigmoid(x)
        return y + y.exp_()

    assert "in eager PyTorch as well: a tensor whose value it needs was changed" in refused(overwritten).what
    fxpipe.capture(Net(lambda x: torch.sigmoid(x) + torch.sigmoid(x).exp()), loss, data())


def test_a_mask_that_torch_looks_at() -> None:
    class Encoder(nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 1)
            self.options = options

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x[None], mask=nn.Transformer.generate_square_subsequent_mask(6), **self.options)[0]

    with pytest.raises(CaptureError, match="whether an attention mask is causal") as caught:
        fxpipe.capture(Encoder(), loss, data())
    assert line_in(caught.value.where) in lines_of(Encoder.forward)
    fxpipe.capture(Encoder(is_causal=True), loss, data())


def test_the_masks_of_a_transformer() -> None:
    class Translator(nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.both = nn.Transformer(WIDTH, 2, 1, 1, 16, batch_first=True)
            self.options = options

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(6)
            return self.both(x[None], x[None], tgt_mask=mask, **self.options)[0]

    with pytest.raises(CaptureError, match="whether an attention mask is causal") as caught:
        fxpipe.capture(Translator(), loss, data())
    assert "tgt_is_causal" in caught.value.hint
    fxpipe.capture(Translator(tgt_is_causal=True), loss, data())


def test_a_check_of_variances() -> None:
    error = refused(lambda x: F.gaussian_nll_loss(x, x.detach() + 1, x.exp()))
    assert "whether a variance is negative" in error.what
    assert "write it out" in error.hint

    def written_out(x: Tensor) -> Tensor:
        var = x.exp().clamp(min=1e-6)
        return 0.5 * (var.log() + (x - 1) ** 2 / var)

    fxpipe.capture(Net(written_out), loss, data())


def test_a_library_is_named_beside_the_users_line(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "some_layers.py").write_text("def gate(x):\n    if x.sum() > 0:\n        return x\n    return -x\n")
    sys.path.insert(0, str(folder))
    try:
        layers = module_at(folder / "some_layers.py", "some_layers")
        error = refused(lambda x: layers.gate(x) + 1)
    finally:
        sys.path.remove(str(folder))
    own, inner = (error.where or "").split("\n  in: ")
    assert own.endswith("error = refused(lambda x: layers.gate(x) + 1)")
    assert inner == "some_layers.py:2: if x.sum() > 0:"


def test_optimizers_and_backward_stay_outside() -> None:
    def backward(model: nn.Module, batch: Any) -> Tensor:
        value = loss(model, batch)
        value.backward()
        return value

    def steps(model: nn.Module, batch: Any) -> Tensor:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return loss(model, batch)

    for step in (backward, steps):
        with pytest.raises(CaptureError) as caught:
            fxpipe.capture(Net(torch.tanh), step, data())
        assert caught.value.page == "backward"
        assert line_in(caught.value.where) in lines_of(step)


# Operators that are not torch's own


@torch.library.custom_op("refusals::shapeless", mutates_args=())
def shapeless(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("refusals::gradientless", mutates_args=())
def gradientless(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("refusals::on_cuda", mutates_args=(), device_types="cuda")
def on_cuda(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("refusals::complete", mutates_args=())
def complete(x: Tensor) -> Tensor:
    return x * 2


for operator in (gradientless, on_cuda, complete):
    operator.register_fake(torch.empty_like)
for operator in (on_cuda, complete):
    operator.register_autograd(lambda context, gradient: gradient * 2)

LIBRARY = torch.library.Library("refusals", "FRAGMENT")
LIBRARY.define("old(Tensor x) -> Tensor")
LIBRARY.impl("old", lambda x: x * 2, "CUDA")
LIBRARY.define("silent(Tensor x) -> Tensor")
LIBRARY.impl("silent", lambda x: torch.empty_like(x).copy_(x), "CPU")
torch.library.register_fake("refusals::silent", torch.empty_like, lib=LIBRARY)
LIBRARY.define("doubles(Tensor(a!) x) -> ()")
LIBRARY.impl("doubles", lambda x: None, "CPU")


def in_place(x: Tensor) -> Tensor:
    torch.ops.refusals.doubles(x)
    return x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: shapeless(x), "the operator refusals.shapeless has no shape function"),
        (lambda x: torch.ops.refusals.old(x), "the operator refusals.old has no shape function"),
        (lambda x: x + gradientless(x), "a gradient through the operator refusals.gradientless"),
        (lambda x: x + torch.ops.refusals.silent(x), "a gradient through the operator refusals.silent"),
        (lambda x: on_cuda(x), "the operator refusals.on_cuda has no kernel for the device cpu"),
        (in_place, "the operator refusals.doubles changes its arguments in place"),
    ],
)
def test_what_an_operator_lacks(change: Change, message: str) -> None:
    error = refused(change)
    assert message in error.what
    assert error.page == "operators"
    assert line_in(error.where) in lines_of(change)


def test_operators_that_lack_nothing() -> None:
    for change in (complete, lambda x: x + gradientless(x.detach())):
        fxpipe.capture(Net(change), loss, data())


# Tensors that are more than values


def test_batches_and_buffers_are_dense() -> None:
    x, y = data()
    strange = {
        "sparse": x.to_sparse(),
        "nested": torch.nested.nested_tensor([x[:2], x[2:]]),
        "quantized": torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    }
    for kind, tensor in strange.items():
        with pytest.raises(BatchError, match=rf"batch\[0\] is a {kind} tensor") as caught:
            fxpipe.capture(Net(torch.tanh), loss, (tensor, y))
        assert caught.value.page == "tensor-kinds"
    model = Net(torch.tanh)
    model.register_buffer("graph", torch.eye(WIDTH).to_sparse())
    with pytest.raises(CaptureError, match="graph is a sparse tensor"):
        fxpipe.capture(model, loss, (x, y))
