"""Every emitted stage computes what eager PyTorch computes."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import pytest
import torch
from cached import captured, lowered
from covering import covering
from random_cuts import random_cuts
from small_models import CASES, Case
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import CaptureError, FxpipeError, RunError
from fxpipe.lowering.agreement import Agreement, Step, agreement_of, worst_agreement
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.lowering.eager_step import EagerStep
from fxpipe.stages.compare import relative_error
from fxpipe.task.batch import Batch
from fxpipe.torch_private import TorchDispatchMode


@pytest.mark.parametrize(("name", "workers"), covering(CASES, [2, 3, 4], strength=1))
def test_any_legal_cuts_compute_the_same_bits(name: str, workers: int) -> None:
    """Forward, backward and weight gradients cut apart, parts empty, runs recomputed: as on one worker."""
    microbatches = 1 if workers == 3 else 2
    case, model, _ = captured(name, microbatches)
    where = random_cuts(name, workers, seed=0)
    build = lowered(name, microbatches, workers=workers, schedule="1f1b", cuts=where, split_backward=workers != 2)
    found = with_eager(build, model, case)
    # LSTM's steps are slices: a cut between them sends dense copies, of which products may have other last bits.
    assert found == one_worker(name, microbatches) if name != "lstm" else found.largest < 1e-6


def with_eager(build: Build, model: nn.Module, case: Case) -> Agreement:
    return compare_with_eager(build, model, case.loss, case.batches(1)[0])


@functools.cache
def one_worker(name: str, microbatches: int) -> Agreement:
    case, model, _ = captured(name, microbatches)
    return with_eager(lowered(name, microbatches, workers=1, schedule="1f1b"), model, case)


def test_a_wrong_stage_is_found() -> None:
    case, model, _ = captured("function")
    build = lowered("function")
    broken = re.sub(r"(= \w+) \*", r"\1 +", build.files["stage_0.py"], count=1)
    assert broken != build.files["stage_0.py"]
    build = dataclasses.replace(build, files={**build.files, "stage_0.py": broken})
    assert compare_with_eager(build, model, case.loss, case.batches(1)[0]).largest > 1e-2


def test_a_stage_that_fails_is_not_blamed_on_eager() -> None:
    case, model, _ = captured("function")
    build = lowered("function")
    broken = re.sub(r"(= \w+) \*", r"\1 @", build.files["stage_0.py"], count=1)
    build = dataclasses.replace(build, files={**build.files, "stage_0.py": broken})
    with pytest.raises(RunError, match="eager PyTorch runs this step, but the emitted forward failed on worker 0") as e:
        compare_with_eager(build, model, case.loss, case.batches(1)[0])
    assert " @ " in str(e.value.where)


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, math.inf], [1.0, math.inf], 0.0),
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, 2.0], [1.0, math.inf], math.inf),
        ([1.0, math.inf], [1.0, -math.inf], math.inf),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([1.5, math.nan], [1.0, math.nan], math.inf),
    ],
)
def test_what_is_not_finite_agrees_only_with_itself(found: list[float], expected: list[float], error: float) -> None:
    assert relative_error(torch.tensor(found), torch.tensor(expected)) == error


def step(loss: float, **gradients: torch.Tensor) -> Step:
    return Step(torch.tensor(loss), gradients, {})


@pytest.mark.parametrize("huge", [torch.tensor([math.inf]), torch.full((8,), 6e4, dtype=torch.float16)], ids=str)
def test_a_gradient_that_overflows_hides_no_other(huge: torch.Tensor) -> None:
    """Errors are relative to the largest norm, which was infinite: every other gradient agreed."""
    ones = torch.ones(4) * 1e3
    assert agreement_of(step(1.0, a=huge, b=2 * ones), step(1.0, a=huge, b=ones)).gradients == {"a": 0.0, "b": 1.0}


def test_a_gradient_of_another_shape_is_infinitely_wrong() -> None:
    assert relative_error(torch.ones(1), torch.ones(3)) == math.inf
    assert relative_error(torch.ones(0), torch.ones(3)) == math.inf


def test_what_says_little_is_named() -> None:
    nothing = step(math.nan, a=torch.tensor([math.nan]), b=torch.zeros(2), c=torch.ones(2))
    found = agreement_of(nothing, nothing)
    assert found.largest == 0.0
    assert (found.not_finite, found.zero) == (("the loss", "the gradient of a"), ("b",))
    both = worst_agreement([found, agreement_of(step(0.5, b=torch.ones(2)), step(0.5, b=torch.ones(2)))])
    assert (both.not_finite, both.zero) == (found.not_finite, ())


def test_a_microbatch_that_is_nan_for_eager_alone_makes_no_loss_nan() -> None:
    """All targets of the second microbatch are ignored: eager's mean of none is NaN, that of the whole batch is not."""
    torch.manual_seed(0)
    model, batch = nn.Linear(3, 4), (torch.randn(4, 3), torch.tensor([0, 2, -100, -100]))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    build = fxpipe.compile(model, loss, batch, workers=1, microbatches=2, schedule="1f1b", cost="analytic")
    found = compare_with_eager(build, model, loss, batch)
    assert (found.not_finite, found.loss, set(found.gradients)) == ((), 0.0, {"weight", "bias"})
    assert found.largest < 1e-6


class Again(nn.Module):
    """A batch norm whose region eager computes again in backward, and then updates its statistics again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda h: self.norm(h).tanh(), self.first(x), use_reentrant=self.reentrant)
        return self.last(y)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_batch_norm_in_a_checkpoint_region(microbatches: int, reentrant: bool) -> None:
    torch.manual_seed(0)
    model, batch = Again(reentrant), torch.randn(8, 4)
    options = {"workers": 2, "microbatches": microbatches, "schedule": "1f1b", "cost": "analytic"}

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    build = fxpipe.compile(model, loss, batch, **options)
    assert sum("changes inside a torch.utils.checkpoint region" in warning for warning in build.warnings) == 3
    agreement = compare_with_eager(build, model, loss, batch)
    assert agreement.largest < 1e-5
    assert set(agreement.buffers) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert model.norm.num_batches_tracked == 0, "the model is left as it was"


class Remembers(nn.Module):
    """Its average keeps the graph of the microbatch before, through which eager goes a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.mean = 0.9 * self.mean + y.mean(0)
        return y - self.mean


def test_where_eager_itself_fails_it_is_eager_that_is_named() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    model, batch = Remembers(), torch.randn(4, 4)
    options = {"workers": 1, "microbatches": 2, "schedule": "gpipe", "cost": "analytic"}
    build = fxpipe.compile(model, loss, batch, accept_microbatch_loss=True, **options)
    with pytest.raises(CaptureError, match="eager PyTorch itself fails on this step, in backward") as caught:
        compare_with_eager(build, model, loss, batch)
    assert "Trying to backward through the graph a second time" in caught.value.what
    assert "test_compare_with_eager.py" in str(caught.value.where)

    def outside(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return loss(model, batch[:, :3])

    with pytest.raises(CaptureError, match=r"in loss\(model, batch\): RuntimeError: .*mat1 and mat2") as caught:
        compare_with_eager(build, model, outside, batch)
    assert "y = self.layer(x)" in str(caught.value.where)


def test_eager_is_not_blamed_for_what_only_fails_in_the_modes_of_the_comparison() -> None:
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.addmm.default:
                raise RuntimeError("no mode here")
            return func(*args, **kwargs or {})

    model, batch = nn.Linear(4, 4), torch.randn(4, 4)
    with Refusing(), pytest.raises(FxpipeError, match=r"runs in eager PyTorch, but not where .*: no mode here") as e:
        EagerStep(model, lambda m, b: m(b).mean())([Batch.of(batch)])
    assert not isinstance(e.value, CaptureError)


def test_a_step_on_the_cpu_leaves_cuda_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.random.fork_rng makes a context on each of them, and warns if there are several."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: pytest.fail("this makes a context"))
    case = CASES["function"]
    build = fxpipe.compile(case.make(), case.loss, case.batches(1)[0], workers=2, cost="analytic")
    assert compare_with_eager(build, case.make(), case.loss, case.batches(1)[0]).largest < 1e-5
