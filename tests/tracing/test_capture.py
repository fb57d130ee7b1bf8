"""Capture and cuts of steps that once were wrong, refused or left the model broken; each test names what went wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from features import WIDTH, Around, Feature, check, squared
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.errors import CaptureError
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.stages.loaded import load_stages
from fxpipe.stages.part_call import ReadyComm


def batch(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(*(shape or (8, WIDTH))), torch.randn(8, WIDTH)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


class Anneals(nn.Module):
    """A buffer's cheap new value was put on worker 0, away from its readers: no cut before them was possible."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.temperature.clone()
        self.temperature.mul_(0.9)
        return y


class Caches(nn.Module):
    """What the step caches was left in the model as a fake tensor, and broke the second tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.mask: Tensor | None = None
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(WIDTH, WIDTH).tril()
        if "ids" not in self.cache:
            self.cache["ids"] = torch.arange(WIDTH) * 0.1
        self.seen = self.layer(x)
        return self.seen @ self.mask + self.cache["ids"]


class Strided(nn.Module):
    """as_strided counted in the memory of a slice that travels as a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        half = self.a(x)[:, WIDTH // 2 :]
        y = torch.tanh(self.b(torch.tanh(self.b(x))))
        return y + torch.as_strided(half, (len(x), WIDTH // 2), half.stride(), 2).repeat(1, 2)


class Reentrant(nn.Module):
    """The reentrant checkpoint of a value without gradient gives its weights no gradient either."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.trained(checkpoint(self.frozen, x.detach(), use_reentrant=True))


class OneStorage(nn.Module):
    """Parameters that lie side by side in one storage were refused."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2 * WIDTH, WIDTH) * 0.3
        self.a, self.b = nn.Parameter(both[:WIDTH]), nn.Parameter(both[WIDTH:])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.a) @ self.b


class OneName(nn.Module):
    """`a_b.weight` and `a.b.weight` became one argument twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a_b, self.a = nn.Linear(WIDTH, WIDTH), nn.ModuleDict({"b": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        return self.a["b"](torch.tanh(self.a_b(x)))


def compiled() -> nn.Module:
    """What the user has compiled was compiled while it was traced, and failed."""
    return torch.compile(nn.Linear(WIDTH, WIDTH))  # type: ignore[return-value]


MODULES = [Anneals, Caches, Strided, Reentrant, OneStorage, OneName]


@pytest.mark.parametrize("module", [*MODULES, pytest.param(compiled, marks=pytest.mark.slow)], ids=lambda m: m.__name__)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_unusual_modules_train_as_in_eager(module: Callable[[], nn.Module]) -> None:
    check(Feature(module.__name__, module))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = kind(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True, dropout=dropout)
        self.head = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


def test_a_step_knows_that_it_is_captured() -> None:
    """Models leave out checks of values then; with torch 2.11 they did not know."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert torch.compiler.is_compiling()
        return squared(model, batch)

    fxpipe.capture(made(lambda: Around(nn.Tanh())), loss, batch())
    assert not torch.compiler.is_compiling()


class LastStates(nn.Module):
    """With torch 2.11 they had a dimension too many: not with a batch of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden, cell = self.layers(x.unsqueeze(1))[1]
        assert hidden.shape == cell.shape == (2, len(x), WIDTH // 2)
        return torch.cat([hidden[0], cell[1]], 1)


def test_last_states_of_an_lstm() -> None:
    check(Feature("last states", LastStates))


KINDS = [nn.LSTM, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (nn.GRU, nn.RNN))]


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_on_the_data_itself(kind: type[nn.RNNBase]) -> None:
    """An LSTM that reads the batch was traced for inference, without a backward."""
    check(Feature("recurrent", lambda: Recurrent(kind), batch=lambda size: batch(size, 2, WIDTH), alone=True))


def test_recurrent_layers_are_not_laid_out_for_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA that asks for the addresses of parameters, and a trace has none."""
    model = made(lambda: Recurrent(nn.LSTM))

    def lay_out(layer: nn.RNNBase) -> None:
        raise RuntimeError("Cannot access data pointer of Tensor")

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lay_out)
    fxpipe.capture(model, squared, batch(8, 2, WIDTH))
    assert nn.RNNBase.flatten_parameters is lay_out


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_recurrent_layers_is_kept(kind: type[nn.RNNBase]) -> None:
    """It disappeared without a word."""
    model, data = made(lambda: Recurrent(kind, dropout=0.5)), batch(8, 2, WIDTH)
    build = fxpipe.compile(model, squared, data, workers=2, cost="analytic")
    assert compare_with_eager(build, model, squared, data).largest < 1e-5
    assert "dropout" in build.files["stage_0.py"] + build.files["stage_1.py"]


def test_a_loss_may_ask_for_the_gradient_of_its_batch() -> None:
    def penalty(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        x.requires_grad_(True)
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + (gradient.norm(dim=1) - 1).square().mean()

    model = made(lambda: Around(nn.Tanh()))
    build = fxpipe.compile(model, penalty, batch(), workers=2, cost="analytic")
    assert compare_with_eager(build, model, penalty, batch()).largest < 1e-5


def test_a_loss_that_is_a_parameter() -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.ones(()))

    def loss(model: Any, batch: Any) -> Tensor:
        return model.value

    build = fxpipe.compile(Scalar(), loss, batch(), workers=1, cost="analytic")
    assert compare_with_eager(build, Scalar(), loss, batch()).largest == 0


def test_norms_under_autocast_cross_a_cut() -> None:
    """torch's fake tensors say bfloat16 of their statistics, which are float32."""
    model = made(lambda: Around(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH))))
    for forward, backward in (("middle.1", "after.0"), ("after.0", "middle.1")):
        build = fxpipe.compile(
            model, squared, batch(), autocast="bf16", cost="analytic", forward_at=[forward], backward_at=[backward]
        )
        build.local(schedule="gpipe").step(batch())


def test_an_integer_path_that_later_stages_read_first() -> None:
    """A batch input was sent behind its first reader."""

    class Ids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.position = nn.Embedding(20, WIDTH), nn.Embedding(20, WIDTH)
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

        def forward(self, ids: Tensor) -> Tensor:
            position, segment = (ids != 0).long().cumsum(-1), (ids // 3).clamp(max=5)
            bias = torch.where(ids == 0, -1e9, 0.0)
            x = self.table(ids) + self.position(position)
            for layer in self.layers:
                x = torch.tanh(layer(x)) + self.position(segment)
            return ((x.mean(-1) + bias).softmax(-1)[..., None] * x).sum(1)

    torch.manual_seed(0)
    data = torch.randint(0, 20, (8, 6)), torch.randn(8, WIDTH)
    model = Ids()
    program = fxpipe.capture(model, squared, data)
    for at in range(1, 4):
        build = fxpipe.lower(program, cost="analytic", forward_at=[f"layers.{at}"], backward_at=[f"layers.{4 - at}"])
        assert compare_with_eager(build, model, squared, data).largest < 1e-5


def test_no_stage_sends_the_memory_of_a_weight() -> None:
    """The optimizer writes weights in place: a view of one would change on its way."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.randn(64, WIDTH))
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x)) + self.position[:8]
            return x

    build = fxpipe.compile(Positions(), squared, batch(), cost="analytic", forward_at=["layers.1"])
    spec = build.plan.stages[0].forward
    weights = [build.tensors[name] for name in spec.weights]
    leaves = dict(zip([leaf.name for leaf in build.plan.step.batch], batch(), strict=True))
    comm = ReadyComm({})
    load_stages(build.plan, build.files)[0].functions["F"](weights, [], [leaves[n] for n in spec.batch], comm)
    sent = list(comm.sent.values())
    assert len(sent) >= 2, "the slice of positions goes to worker 1"
    owned = {w.untyped_storage().data_ptr() for w in weights}
    assert not owned & {value.untyped_storage().data_ptr() for value in sent}


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        import random

        random.random()  # drawn, but not used
        return x


def test_what_capture_freezes_is_said() -> None:
    import random

    random.seed(5)
    state = random.getstate()
    program = fxpipe.capture(Around(Draws()), squared, batch())
    assert random.getstate() == state
    assert "draws random numbers from Python" in " ".join(program.warnings)


class CastsToItsOwnDtype(nn.Module):
    """Module.to assigns each parameter to its own .data where nothing changes; Switch Transformers' router does so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.inner = self.inner.to(x.dtype)
        return self.inner(x)


class ChecksValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._check_tensor_all(x.isfinite(), lambda: "not finite")
        return x


class DrawsFromDistribution(nn.Module):
    """A variational bottleneck; torch.distributions check that no parameter is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.inner(x).chunk(2, -1)
        drawn = torch.distributions.Normal(mean, F.softplus(spread) + 0.1)
        return drawn.rsample() * drawn.log_prob(x).exp()


class RecordsItsLayers(nn.Module):
    """Hooks of its own from its first step on, as models of transformers that return hidden states have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "hooked"):
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: self.seen.append(output))
            self.hooked = True
        self.seen.clear()
        for layer in self.layers:
            x = layer(x)
        assert len(self.seen) == 2
        return self.seen[0] + x


class GrowsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach()])
        return x


class Cached(nn.Module):
    """Fills a buffer that is not saved when it is called first, and whenever it does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("positions", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.positions.shape[0] != x.shape[0]:
            self.positions = torch.arange(len(x), dtype=x.dtype)
        return x * self.scale + self.positions[:, None]


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(WIDTH + 1, WIDTH)
        self.a, self.b = nn.Parameter(both[:WIDTH]), nn.Parameter(both[1:])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a @ self.b


class ChangesOutside(nn.Module):
    total = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ChangesOutside.total.add_(x.detach().mean(0))
        return x + ChangesOutside.total


def test_hooks_that_a_model_registers_in_its_first_step_are_registered_once() -> None:
    torch.manual_seed(0)
    model = Around(RecordsItsLayers())
    build = fxpipe.compile(model, squared, batch(), cost="analytic", cuts="same")
    assert not any(module._forward_hooks for module in model.modules())
    assert compare_with_eager(build, model, squared, batch()).largest < 1e-6
    assert squared(model, batch()).isfinite()


def test_distributions_are_captured_without_their_checks() -> None:
    torch.manual_seed(0)
    validates = torch.distributions.Distribution._validate_args  # False once torch._dynamo is imported
    model = Around(DrawsFromDistribution())
    build = fxpipe.compile(model, squared, batch(), cost="analytic", cuts="same")
    assert compare_with_eager(build, model, squared, batch()).largest < 1e-6
    assert torch.distributions.Distribution._validate_args is validates


def test_torchs_checks_of_values_are_left_out_with_a_note() -> None:
    program = fxpipe.capture(Around(ChecksValues()), squared, batch())
    (note,) = program.warnings
    assert re.search(r"checks values, .* does not \(.*test_capture.py:\d+: torch._check_tensor_all", note)


def test_casting_a_module_to_the_dtype_it_has_changes_nothing() -> None:
    model = Around(CastsToItsOwnDtype())
    program = fxpipe.capture(model, squared, batch())
    assert {p.names[0] for p in program.parameters if p.trained} == dict(model.named_parameters()).keys()
    assert not program.warnings


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (GrowsBuffer, "replaces middle.seen by something of another shape"),
        (Overlapping, "parameters middle.a and middle.b overlap"),
        (ChangesOutside, "changes a tensor in place that is not part of the model"),
        (lambda: torch.jit.script(nn.Linear(WIDTH, WIDTH)), "middle is a torch.jit.ScriptModule"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_cannot_be_captured_is_explained(module: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        fxpipe.capture(Around(module()), squared, batch())
    assert caught.value.hint


def test_a_cache_of_another_shape_is_filled_in_every_step() -> None:
    model = Around(Cached())
    program = fxpipe.capture(model, squared, batch())
    (warning,) = program.warnings
    assert warning.startswith("the step replaces middle.positions by something of another shape, without reading it")
    assert [b.names for b in program.buffers if not b.constant] == []
    build = fxpipe.lower(program, workers=2)
    assert compare_with_eager(build, model, squared, batch()).largest < 1e-6
    model(batch()[0])
    assert not fxpipe.capture(model, squared, batch()).warnings


class Grows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(WIDTH, WIDTH)
        return self.late(x)


def test_parameters_that_the_step_makes_are_refused() -> None:
    """They were drawn again at every step, and never trained."""
    with pytest.raises(CaptureError, match=r"the step makes parameters: middle\.late\.weight, middle\.late\.bias"):
        fxpipe.capture(Around(Grows()), squared, batch())
    model = Around(Grows())
    model(batch()[0])
    assert len(fxpipe.capture(model, squared, batch()).parameters) == 10


class Scaled(nn.Parameter):
    gain = 3.0

    @property
    def larger(self) -> torch.Tensor:
        return self * self.gain


def test_the_step_sees_the_class_of_a_parameter() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Scaled(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert isinstance(self.weight, Scaled)
            assert not isinstance(x, Scaled)
            return x @ self.weight.larger

    model = Layer()
    build = fxpipe.compile(model, lambda m, batch: m(batch).square().mean(), torch.randn(2, 4), workers=1)
    assert "mul" in build.files["stage_0.py"]
    assert [p.name for p in build.plan.parameters if p.attributes] == ["weight"]
    assert not isinstance(nn.Parameter(torch.zeros(1)), Scaled)


def test_threads_capture_one_after_the_other() -> None:
    """Tracing changes torch for all threads: what one of them put back, the other had changed."""

    def captured(_: int) -> int:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        return len(fxpipe.capture(model, lambda net, x: net(x).mean(), torch.ones(2, 4)).graph.nodes)

    own = torch.default_generator
    with ThreadPoolExecutor(2) as threads:
        assert len(set(threads.map(captured, range(2)))) == 1
    assert torch.default_generator is own
    assert not torch.compiler.is_compiling()
