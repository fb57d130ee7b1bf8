"""Steps that no graph can hold: each is refused with the user's line, the cause, the cure and the page."""

from __future__ import annotations

import contextlib
import copy
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
    if function.__name__ == "<lambda>":  # the lines of what it stands in
        code = function.__code__
        return range(code.co_firstlineno, max(line for *_, line in code.co_lines() if line) + 1)
    source, first = inspect.getsourcelines(function)
    return range(first, first + len(source))


def line_in(where: str | None) -> int:
    """The line of this file that a place begins with."""
    assert where is not None
    file, number, _ = where.split(":", 2)
    assert Path(file).name == Path(__file__).name
    return int(number)


def swallowed(x: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        if x.sum() > 0:
            return -x
    return x


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


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient if gradient.sum() > 0 else -gradient


def drawn_apart(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return x + torch.randn(WIDTH)


TABLE: SimpleQueue[Tensor] = SimpleQueue()


def cached(x: Tensor) -> Tensor:
    table = torch.linspace(0, 1, WIDTH) if TABLE.empty() else TABLE.get()
    TABLE.put(table)
    return x * table


OWN = torch.default_generator


def seeded_generator_elsewhere(x: Tensor) -> Tensor:
    OWN.manual_seed(0)
    return x + torch.randn(WIDTH)


def same_twice(x: Tensor) -> Tensor:
    state = torch.default_generator.get_state()
    x = x + torch.randn(WIDTH)
    torch.default_generator.set_state(state)
    return x - torch.randn(WIDTH)


def packed(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        return x.exp()


def loop(x: Tensor) -> Tensor:
    while x.abs().max() > 1:
        x = x / 2
    return x


def asserted(x: Tensor) -> Tensor:
    assert x.isfinite().all()
    return x


def in_a_hook(x: Tensor) -> Tensor:
    x = x * 1
    x.register_hook(lambda gradient: gradient if gradient.sum() > 0 else -gradient)
    return x


def counted(x: Tensor) -> Tensor:
    for _ in range(x.abs().long().sum()):
        x = x + 1
    return x


NESTED = torch.nested
REFUSED: dict[str, tuple[str, Change]] = {
    "branch": ("data-dependent", lambda x: -x if x.sum() > 0 else x),
    "swallowed": ("data-dependent", swallowed),
    "compared": ("data-dependent", lambda x: x if torch.allclose(x, x.round()) else -x),
    "loop": ("data-dependent", loop),
    "asserted": ("data-dependent", asserted),
    "larger": ("data-dependent", lambda x: x * max(x[0, 0], x[0, 1])),
    "rows": ("data-dependent", lambda x: torch.stack([row if row.sum() > 0 else -row for row in x])),
    "decorated": ("data-dependent", behind_a_decorator),
    "in a hook": ("data-dependent", in_a_hook),
    "item": ("item", lambda x: x * x.mean().item()),
    "number": ("item", lambda x: x * float(x.mean()) + int(x.sum())),
    "listed": ("item", lambda x: x * x[0].tolist()[0]),
    "counted": ("item", counted),
    "rebuilt": ("item", lambda x: x * torch.tensor([x[0, 0], x[0, 1]]).sum()),
    "formatted": ("item", lambda x: x * len(f"{x.mean():.3f}")),
    "masked": ("data-shapes", lambda x: x * x[x > 0].mean()),
    "nonzero": ("data-shapes", lambda x: x + x.nonzero().sum()),
    "unique": ("data-shapes", lambda x: x + torch.unique(x).sum()),
    "repeated": ("data-shapes", lambda x: x.repeat_interleave((x[:, 0] > 0).long() + 1, dim=0)[:6]),
    "round trip": ("numpy", lambda x: x * torch.from_numpy(x.detach().cpu().numpy())),
    "as an array": ("numpy", lambda x: x * torch.as_tensor(np.sin(x.detach()))),
    "condition": ("higher-order", lambda x: torch.cond(x.sum() > 0, torch.tanh, torch.relu, (x,))),
    "flexible": ("higher-order", lambda x: flex_attention(x[None, None], x[None, None], x[None, None])[0, 0]),
    "sparse": ("tensor-kinds", lambda x: x.to_sparse().to_dense()),
    "nested": ("tensor-kinds", lambda x: x + NESTED.nested_tensor([x[0], x[1]]).to_padded_tensor(0.0)[0]),
    "jagged": ("tensor-kinds", lambda x: x + NESTED.as_nested_tensor(list(x[:2]), layout=torch.jagged).values()[0]),
    "seeded": ("randomness", lambda x: torch.manual_seed(0) and x + torch.randn(WIDTH)),
    "drawn apart": ("randomness", drawn_apart),
    "generator": ("randomness", lambda x: x + torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))),
    "by the seed": ("randomness", lambda x: x * (1 + torch.initial_seed() % 2)),
    "seeded generator": ("randomness", lambda x: torch.default_generator.manual_seed(0) and x + torch.randn(WIDTH)),
    "same twice": ("randomness", same_twice),
    "packed": ("backward", packed),
    "elsewhere": ("devices", lambda x: x + torch.ones(WIDTH, device="meta")),
    "memory": ("operators", lambda x: x * len(ctypes.string_at(x.data_ptr(), 4))),
    "cached": ("kept-tensors", cached),
    "copied": ("kept-tensors", lambda x: copy.deepcopy(nn.Parameter(torch.ones(WIDTH)) * x)),
}


@pytest.mark.parametrize(("page", "change"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_a_refusal_names_line_cause_cure_and_page(page: str, change: Change) -> None:
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
        CaptureError, match=r"computes with parameter block\.(weight|bias) again, as reversible"
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

    assert "the traced step fails: a tensor whose value it needs was changed" in refused(overwritten).what
    fxpipe.capture(Net(lambda x: torch.sigmoid(x) + torch.sigmoid(x).exp()), loss, data())


def causal(x: Tensor) -> Tensor:
    """A mask that depends on the batch; of one that is made of numbers, the values are known."""
    return nn.Transformer.generate_square_subsequent_mask(6) + 0 * x.detach().sum()


def test_a_mask_that_torch_looks_at() -> None:
    class Encoder(nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 1)
            self.options = options

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x[None], mask=causal(x), **self.options)[0]

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
            return self.both(x[None], x[None], tgt_mask=causal(x), **self.options)[0]

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
