"""Microbatches train as the whole batch does: where a batch is cut, what its loss weighs, what is refused and said."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from pipelines import sgd
from searched import searched
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import BatchError, CaptureError, TaskError
from fxpipe.lowering import compare_with_eager as compare_with_eager_module
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.lowering.separate_batch_norm import SeparateBatchNorm
from fxpipe.stages.loaded import LoadedStage, load_stages

WORKERS = 2
Step = Callable[[nn.Module, Any], Tensor]


class Net(nn.Module):
    """Any number of dimensions before the last."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))


def net(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(dropout)


def padded(seed: int = 1, size: int = 12) -> tuple[Tensor, Tensor]:
    """Sequences of many lengths: the first samples are short."""
    torch.manual_seed(seed)
    lengths = torch.arange(size) % 4
    targets = torch.randint(0, 5, (size, 4))
    targets[torch.arange(4) > lengths.sort().values[:, None]] = -100
    return torch.randn(size, 4, 6), targets


def tokens(model: nn.Module, batch: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), **options)


def compiled(step: Step, batch: Any, microbatches: int = 3, model: nn.Module | None = None, **options: Any) -> Any:
    settings = {"workers": WORKERS, "schedule": "1f1b", "cost": "analytic", "microbatches": microbatches}
    return fxpipe.compile(model or net(), step, batch, **{**settings, **options})


def eager(step: Step, batches: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of ordinary training on whole batches."""
    model, losses = net(), []
    optimizer = sgd(list(model.named_parameters()))
    for batch in batches:
        optimizer.zero_grad()
        loss = step(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, dict(model.state_dict())


STEPS: dict[str, Step] = {
    "padded": tokens,
    "summed": lambda m, b: tokens(m, b, reduction="sum") / 40,
    "masked": lambda m, b: (m(b[0]).square().mean(-1) * (b[1] >= 0)).sum() / (b[1] >= 0).sum(),
}


def centred_policy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The first loss of a policy is 0 but for rounding: all ratios are 1, and advantages of a group add up to 0."""
    scores, rewards = model(batch[0])[:, 0].log_softmax(-1)[:, 0], batch[0][:, 0, 0].view(-1, 3)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    return -((scores - scores.detach()).exp() * advantages).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_whose_terms_cancel_is_compared_as_far_as_it_is_rounded(dtype: torch.dtype) -> None:
    x, targets = padded()
    batch, model = (x.to(dtype), targets), net().to(dtype)
    build = compiled(centred_policy, batch, 2, model=model)
    assert abs(float(centred_policy(model, batch).detach())) < 1e-7
    assert not build.warnings
    off = 1e-5 if dtype == torch.float32 else 1e-12
    assert compare_with_eager(build, model, centred_policy, batch).largest < 1e-4
    assert compare_with_eager(build, model, lambda m, b: centred_policy(m, b) + off, batch).largest > 1e-4


def test_verify_is_with_the_whole_batch() -> None:
    """With dropout as well: it drops nothing in both."""
    model = net(0.5)
    build = compiled(tokens, padded(), model=model)
    assert [leaf.name for leaf in build.plan.step.made] == ["total.0"]
    assert compare_with_eager(build, model, tokens, padded()).largest < 1e-5
    assert compare_with_eager(build, model, lambda m, b: 1.01 * tokens(m, b), padded()).largest > 1e-3


def test_the_totals_are_a_file_of_the_build() -> None:
    build = compiled(tokens, padded())
    assert build.plan.step.totals is not None
    assert "def evaluate(weights, buffers, batch, comm):" in build.files["totals.py"]
    assert any(line.startswith("totals: fold") for line in build.passes)
    assert "totals.py" not in compiled(tokens, padded(), microbatches=1).files


def by_largest(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A mean whose divisor no rule knows."""
    kept = (batch[1] >= 0).float()
    return (model(batch[0]).square().mean(-1) * kept).sum() / kept.flatten().norm(p=1)


def test_a_hook_weighs_microbatches() -> None:
    weigh = lambda batch: (batch[1] >= 0).sum()  # noqa: E731
    with pytest.raises(BatchError, match=r"norm .* goes over the samples"):
        compiled(by_largest, padded())
    batches = [padded(seed) for seed in range(5)]
    losses, weights = eager(by_largest, batches)
    build = compiled(by_largest, batches[0], loss_weight=weigh)
    assert compare_with_eager(build, net(), by_largest, batches[0], loss_weight=weigh).largest < 1e-5
    pipeline = build.local(optimizer=sgd, loss_weight=weigh)
    assert pipeline.run(batches) == pytest.approx(losses, rel=1e-5)
    for key, value in pipeline.state_dict().items():
        torch.testing.assert_close(value, weights[key], rtol=1e-4, atol=1e-6)
    with pytest.raises(TaskError, match=r"compiled with loss_weight\(batch\), and this hook is missing"):
        build.local(optimizer=sgd)


@pytest.mark.parametrize(
    ("weigh", "message"),
    [
        (lambda batch: -1.0, "gave -1, -1, -1 in step 1"),
        (lambda batch: float("nan"), "gave nan, nan, nan in step 1"),
        (lambda batch: 0, "gave 0, 0, 0 in step 1"),
        (lambda batch: batch["x"], "raised TypeError"),
    ],
)
def test_what_is_no_weight(weigh: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        compiled(tokens, padded(), loss_weight=weigh)


def test_a_wrong_weight_is_found() -> None:
    with pytest.raises(BatchError, match="weighted by loss_weight"):
        compiled(by_largest, padded(), loss_weight=lambda batch: 1)


def test_a_weight_is_not_used_where_the_loss_is_derived() -> None:
    """It may be there for evaluation alone; a first batch whose microbatches count alike would not tell."""
    even, uneven = (torch.randn(12, 4, 6), torch.ones(12, 4).long()), padded()
    build = compiled(tokens, even, loss_weight=lambda batch: batch[1][0].float().square().sum())
    assert not build.plan.loss.weighted
    assert not build.warnings
    losses, _ = eager(tokens, [even, uneven])
    assert build.local(optimizer=sgd).run([even, uneven]) == pytest.approx(losses, rel=1e-5)


def test_a_weight_that_no_microbatch_has_tried_is_told() -> None:
    weigh = lambda batch: (batch[1] >= 0).sum()  # noqa: E731
    even = (torch.randn(6, 4, 6), torch.ones(6, 4).long())
    warned = compiled(by_largest, even, loss_weight=weigh).warnings
    assert "loss_weight(batch) was not tried on microbatches of different weights" in "".join(warned)
    assert not compiled(by_largest, padded(), loss_weight=weigh).warnings


def contrastive(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    views = model(batch[0]).mean(1)
    return F.cross_entropy(views @ views.t(), torch.arange(len(views)))


def test_a_loss_over_pairs_is_refused_or_accepted() -> None:
    with pytest.raises(BatchError) as caught:
        compiled(contrastive, padded())
    with torch.no_grad():
        whole = float(contrastive(net(), padded()))
        parts = [float(contrastive(net(), part)) for part in zip(*(t.chunk(3) for t in padded()), strict=True)]
    said = re.match(r"the loss of the whole batch is (\S+), of its 3 microbatches (\S+); mm ", str(caught.value))
    assert said
    assert [float(said[1]), float(said[2])] == pytest.approx([whole, sum(parts) / 3], rel=1e-4)
    for cure in ("--microbatches 1", "loss_weight(batch)", "microbatch_dims", "--accept-microbatch-loss"):
        assert cure in str(caught.value.hint)
    build = compiled(contrastive, padded(), accept_microbatch_loss=True)
    assert "multiplies samples with other samples" in build.plan.step.differs_from_whole
    assert compare_with_eager(build, net(), contrastive, padded()).largest < 1e-5


def test_the_root_of_a_mean_is_refused_with_its_cause_and_cure() -> None:
    with pytest.raises(
        BatchError, match=r"sqrt \(.*\) is not linear, and is applied to a mean over the batch"
    ) as caught:
        compiled(lambda m, b: F.mse_loss(m(b[0]), b[0][..., :5]).sqrt(), padded())
    assert str(caught.value.hint).startswith("use --microbatches 1. ")


class Experts(nn.Module):
    """Tokens, sorted by the expert that a router chooses of them, and put back; and what balances the experts."""

    def __init__(self, balance: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 6, 6))
        self.balance = balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        odds = self.router(tokens).softmax(-1)
        weights, chosen = odds.topk(2)
        order = chosen.flatten().argsort(stable=True)
        rows = order // 2
        made = torch.bmm(tokens[rows, None], self.experts[chosen.flatten()[order]])[:, 0]
        made = made * weights.flatten()[order, None]
        mixed = torch.zeros_like(tokens).index_add(0, rows, made)
        used = F.one_hot(chosen, 4).float().sum(1)
        shape = (*x.shape[:-1], 4)
        return mixed.view(x.shape), self.balance(used.view(shape), odds.view(shape))


def mixture(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, balance = model(batch[0])
    return F.cross_entropy(x.flatten(0, 1), batch[1].flatten()) + 0.01 * balance


def routed(balance: Callable[[Tensor, Tensor], Tensor]) -> Any:
    torch.manual_seed(0)
    batch = torch.randn(12, 4, 6), torch.randint(0, 6, (12, 4))
    return compiled(mixture, batch, model=Experts(balance), workers=1)


BALANCES = {
    "mul": lambda used, odds: 4 * (used.mean((0, 1)) * odds.mean((0, 1))).sum(),
    "var": lambda used, odds: odds.sum((0, 1)).var() / odds.sum((0, 1)).mean().square(),
}


@pytest.mark.parametrize("operator", BALANCES)
def test_a_router_is_refused_by_the_line_of_its_balance(operator: str) -> None:
    """The sort was named, which moves tokens: what they become does not depend on others."""
    with pytest.raises(BatchError) as caught:
        routed(BALANCES[operator])
    line = BALANCES[operator].__code__.co_firstlineno
    assert re.search(rf"; {operator} \(.*test_minibatch_loss.py:{line}\) .* over the batch$", caught.value.what)
    assert "a router's balance" in str(caught.value.hint)


def test_a_router_whose_balance_is_of_each_sample_trains() -> None:
    build = routed(lambda used, odds: 4 * (used.mean(1) * odds.mean(1)).sum(-1).mean())
    assert "not proved for others: sort" in "".join(build.warnings)


def test_a_sort_that_puts_samples_together_is_named() -> None:
    with pytest.raises(BatchError, match=r"; sort \(.*test_minibatch_loss.py:.*\) works along the batch\n"):
        compiled(lambda m, b: F.mse_loss(m(b[0]).mean(-1).sort(0).values, b[0][..., 0]), padded())


def test_what_is_equal_once_is_not_proved() -> None:
    """The labels of the first batch make all microbatches alike; nothing says so of the next."""
    step = lambda m, b: (m(b[0]).mean(-1) * (b[1] > 0)).sum() / (b[1] > 0).flatten().float().norm(p=1)  # noqa: E731
    build = compiled(step, (torch.randn(6, 4, 6), torch.ones(6, 4)))
    assert "not proved for others: " in "".join(build.warnings)


class Normed(Net):
    """A batch norm over all samples and positions of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)))


def normed() -> Normed:
    torch.manual_seed(0)
    return Normed()


@pytest.mark.parametrize("name", STEPS)
def test_batch_norm_sees_microbatches_and_the_loss_the_whole_batch(name: str) -> None:
    step, batches = STEPS[name], [padded(seed) for seed in range(4)]
    build = compiled(step, batches[0], model=normed())
    assert (build.plan.loss.batch_norm, build.plan.step.differs_from_whole) == ("norm", "")
    agreement = compare_with_eager(build, normed(), step, batches[0])
    assert agreement.largest < 1e-5
    assert set(agreement.buffers) >= {"norm.running_mean", "norm.num_batches_tracked"}
    assert compare_with_eager(build, normed(), lambda m, b: 1.01 * step(m, b), batches[0]).loss > 1e-3
    model, losses = normed(), []
    optimizer = sgd(model.named_parameters())
    for batch in batches:
        with SeparateBatchNorm(3):
            loss = step(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    pipeline = build.local(optimizer=sgd)
    assert pipeline.run(batches) == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(pipeline.state_dict()["norm.running_var"], model.norm.running_var)


def test_with_batch_norm_a_hook_weighs_microbatches_and_a_number_is_what_it_is() -> None:
    weigh = lambda batch: (batch[1] >= 0).sum()  # noqa: E731
    build = compiled(by_largest, padded(), model=normed(), loss_weight=weigh)
    agreement = compare_with_eager(build, normed(), by_largest, padded(), loss_weight=weigh)
    assert (agreement.largest < 1e-5, agreement.not_compared) == (True, "")
    with pytest.raises(BatchError, match="weighted by loss_weight"):
        compiled(by_largest, padded(), model=normed(), loss_weight=lambda batch: 1)
    by_four = lambda m, b: m(b[0]).square().mean(-1).sum() / 4  # noqa: E731
    assert compiled(by_four, padded(), model=normed()).plan.loss.of_microbatches == "sum"
    by_samples = lambda m, b: m(b[0]).square().mean(-1).sum() / len(b[0])  # noqa: E731
    assert compiled(by_samples, padded(), model=normed()).plan.loss.of_microbatches == "mean"


def test_what_no_operator_draws_alike_is_not_compared() -> None:
    noisy = lambda m, b: tokens(m, (F.rrelu(b[0], training=True), b[1]))  # noqa: E731
    build = compiled(noisy, padded())
    assert not build.warnings
    agreement = compare_with_eager(build, net(), noisy, padded())
    unknown = "rrelu_with_noise, rrelu_with_noise_functional"
    assert agreement.not_compared == f"{unknown} cannot draw alike for a batch and its microbatches"
    plain = lambda m, b: m(F.rrelu(b[0], training=True)).square().mean()  # noqa: E731
    agreement = compare_with_eager(compiled(plain, padded()), net(), plain, padded())
    assert not agreement.not_compared
    assert set(agreement.gradients) == {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert agreement.largest < 1e-5
    placed = lambda x: torch.zeros_like(x).index_add(1, torch.arange(x.shape[1]), F.rrelu(x, training=True))  # noqa: E731
    drawn = lambda m, b: tokens(m, (placed(b[0]), b[1]))  # noqa: E731
    assert "neither proved nor checked: index_add" in "".join(compiled(drawn, padded()).warnings)


def nothing_at_first(seed: int, size: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(size, 4, 6), torch.rand(size, 4) * (seed > 0)


def some(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Divides by 4, which is as many samples as a microbatch has."""
    return (model(batch[0]).square().mean(-1) * batch[1]).sum() / 4


@pytest.mark.parametrize("seed", [0, 1])
def test_a_number_that_counts_no_samples(seed: int) -> None:
    """Of the first batch of seed 0 the sum is 0, whatever it is divided by: the step on the whole batch tells."""
    build = compiled(some, nothing_at_first(seed), 3)
    assert not build.warnings
    assert build.plan.loss.of_microbatches == "sum"


class Keeps(Net):
    """Changes two buffers that nothing reads."""

    def __init__(self, change: Callable[[Keeps, Tensor], None]) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        with torch.no_grad():
            self.change(self, found)
        return found


def test_a_tensor_as_large_as_the_whole_batch() -> None:
    """A microbatch does not fit it."""
    state = torch.randn(6, 1, 5)
    with pytest.raises(
        CaptureError, match="can be captured on the whole batch, but not on one of its microbatches"
    ) as e:
        compiled(lambda m, x: (m(x) * state).mean(), torch.randn(6, 4, 6))
    assert "--microbatches 1" in str(e.value)
    assert "test_minibatch_loss.py" in str(e.value)


def test_a_leaf_of_indices_into_the_batch() -> None:
    batch = torch.randn(6, 4, 6), torch.arange(5, -1, -1)
    with pytest.raises(BatchError, match=r"but not on its 3 microbatches: .*IndexError"):
        compiled(lambda m, b: m(b[0])[b[1]].square().mean(), batch, microbatch_dims=(0, 0))


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_program_that_fails_where_eager_does_not(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Expected X.is_contiguous()")

    def loaded(*args: Any) -> list[LoadedStage]:
        return [replace(stage, functions=dict.fromkeys(stage.functions, fails)) for stage in load_stages(*args)]

    monkeypatch.setattr(compare_with_eager_module, "load_stages", loaded)
    with pytest.raises(CaptureError, match="the program that was traced from it fails: RuntimeError: Expected X"):
        compiled(lambda m, x: m(x).square().mean(), torch.randn(6, 4, 6), microbatches=microbatches)


def test_a_step_that_eager_computes_otherwise(tmp_path: Path) -> None:
    """Counts where capture does not look; with one microbatch, too, its step is compared with eager PyTorch's."""
    calls = tmp_path / "calls"
    calls.write_text("0")
    ends = 1000

    def unseen(model: nn.Module, x: Tensor) -> Tensor:
        calls.write_text(str(count := int(calls.read_text()) + 1))
        return model(x).square().mean() * (1 if count <= ends else 2)

    batch = torch.randn(6, 4, 6)
    fxpipe.capture(net(), unseen, batch)
    ends = int(calls.read_text())
    calls.write_text("0")
    with pytest.raises(
        CaptureError, match="computes something different from eager PyTorch on the same batch: its loss is"
    ):
        compiled(unseen, batch, 1)


KEPT: dict[str, tuple[str, Callable[[Any, Tensor], Any]]] = {
    "a counter": ("steps", lambda m, y: m.steps.add_(1)),
    "an average": ("mean", lambda m, y: m.mean.lerp_(y.mean((0, 1)), 0.1)),
    "an average, again": ("mean", lambda m, y: m.mean.copy_(0.9 * m.mean + 0.1 * y.mean((0, 1)))),
    "the last mean": ("mean", lambda m, y: m.mean.copy_(y.mean((0, 1)))),
    "both": ("steps, mean", lambda m, y: (m.steps.add_(1), m.mean.copy_(y.mean((0, 1))))),
    "samples": ("", lambda m, y: m.steps.add_(len(y))),
    "a sum": ("", lambda m, y: m.mean.add_(y.sum((0, 1)))),
    "a constant": ("", lambda m, y: m.steps.fill_(3)),
    "weights": ("", lambda m, y: m.mean.copy_(m.last.bias * 2)),
}


@pytest.mark.parametrize("name", KEPT)
def test_buffers_that_every_microbatch_changes(name: str) -> None:
    names, change = KEPT[name]
    torch.manual_seed(0)
    made, batch = Keeps(change), (torch.randn(6, 4, 6), torch.zeros(6, 4))
    step = lambda m, b: m(b[0]).square().mean()  # noqa: E731
    warnings = compiled(step, batch, model=made).warnings
    if names:
        assert warnings == (
            f"every microbatch changes {names}, 3 times in a step: eager PyTorch changes "
            f"{'them' if ',' in names else 'it'} once, with the whole batch",
        )
        return
    assert not warnings
    build = compiled(step, batch, model=made)
    pipeline = build.local(optimizer=sgd)
    pipeline.step(batch)
    made(batch[0])
    for buffer, value in made.named_buffers():
        torch.testing.assert_close(pipeline.state_dict()[buffer], value)


def test_a_number_that_counts_is_told_by_the_loss() -> None:
    step = lambda m, b: (m(b[0]).square().mean(-1) * b[1]).sum() / len(b[1]) + m(b[0]).mean()  # noqa: E731
    assert not compiled(step, nothing_at_first(1), 3).warnings


def classes_of_batch(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=batch[2])


def along_time(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return ((model(batch[0]).cumsum(0) / 4).mean((0, 2)) - batch[1]).square().mean()


def time_and_samples(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The same size in both dimensions: only what the step does tells them apart."""
    return (model(batch[0]).cumsum(0) * batch[1].unsqueeze(-1)).square().mean()


CUT: dict[str, tuple[Step, Any, list[int | None]]] = {
    "weights of classes, as many as samples": (
        classes_of_batch,
        (torch.randn(5, 6), torch.randint(0, 5, (5,)), torch.rand(5)),
        [0, 0, None],
    ),
    "time first": (along_time, (torch.randn(4, 9, 6), torch.randn(9)), [1, 0]),
    "time first, as many steps as samples": (time_and_samples, (torch.randn(6, 6, 6), torch.randn(6, 6)), [1, 1]),
    "a scalar": (lambda m, b: m(b[0]).square().mean() * b[1], (torch.randn(6, 6), torch.tensor(2.0)), [0, None]),
    "a table": (lambda m, b: m(b[0] + b[1]).square().mean(), (torch.randn(9, 6), torch.randn(6)), [0, None]),
}


@pytest.mark.parametrize("name", CUT)
def test_where_the_batch_is_cut(name: str) -> None:
    step, batch, dims = CUT[name]
    count = 5 if len(batch) == 3 else 3
    build = compiled(step, batch, count)
    assert [leaf.dim for leaf in build.plan.step.batch if leaf.name.startswith("batch")] == dims
    assert compare_with_eager(build, net(), step, batch).largest < 1e-5
    losses, _ = eager(step, [batch, batch])
    assert build.local(optimizer=sgd).run([batch, batch]) == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("dims", [(1, 0), {"batch[0]": 1}])
def test_where_it_is_cut_can_be_said(dims: Any) -> None:
    step, batch, _ = CUT["time first"]
    build = compiled(step, batch, 3, microbatch_dims=dims)
    assert [leaf.dim for leaf in build.plan.step.batch] == [1, 0]


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((1,), "built differently from the batch"),
        ((3, 0), r"gives batch\[0\] dimension 3, but it has 3"),
        ({"batch[2]": 0}, r"names batch\[2\], which the batch does not have"),
        ((0, 0), r"its size differs: batch\[0\] has 4, batch\[1\] has 9"),
    ],
)
def test_what_does_not_fit_the_batch(dims: Any, message: str) -> None:
    step, batch, _ = CUT["time first"]
    with pytest.raises(BatchError, match=message):
        compiled(step, batch, 3, microbatch_dims=dims)


VALUES: dict[str, Step] = {
    "mean": lambda m, b: m(b[0]).square().mean(-1),
    "likelihood": lambda m, b: F.cross_entropy(m(b[0]).transpose(1, 2), b[1], reduction="none"),
    "distance": lambda m, b: F.smooth_l1_loss(m(b[0]), b[0][..., :5], reduction="none").sum(-1),
    "softmax": lambda m, b: m(b[0]).softmax(-1)[..., 0],
    "across samples": lambda m, b: m(b[0])[..., 0].softmax(0),
}
MASKS: dict[str, Callable[[Any], Tensor]] = {
    "all": lambda b: torch.ones(b[1].shape),
    "kept": lambda b: (b[1] >= 0).float(),
    "by class": lambda b: b[1].clamp(min=0).float(),
    "centred": lambda b: b[1].clamp(min=0).float() - b[1].clamp(min=0).float().mean(),
}
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda v, w: (v * w).mean(),
    "sum": lambda v, w: (v * w).sum(),
    "by weight": lambda v, w: (v * w).sum() / w.sum(),
    "by weight, at least": lambda v, w: (v * w).sum() / w.sum().clamp(min=1),
    "of samples": lambda v, w: ((v * w).sum(1) / (w.sum(1) + 1)).mean(),
    "of sums": lambda v, w: (v * w).sum(1).mean(),
    "by size": lambda v, w: (v * w).sum() / v.shape[0],
    "by square": lambda v, w: (v * w).sum() / w.square().sum().sqrt(),
    "root": lambda v, w: (v * w).square().mean().sqrt(),
    "largest": lambda v, w: (v * w).max(),
}
COUNTS = st.sampled_from([2, 3, 6, 12])
TERM = st.tuples(*(st.sampled_from(sorted(part)) for part in (VALUES, MASKS, REDUCTIONS)))
# Weights around their mean add up to 0: divided by their sum, eager's own loss is infinite, or nothing but rounding.
TERMS = st.lists(TERM.filter(lambda term: term[1:] != ("centred", "by weight")), min_size=1, max_size=3)


def check_random(terms: list[tuple[str, str, str]], microbatches: int, seed: int) -> None:
    """Equal to eager on batches that compile has not seen, or refused, or said not to be proved."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        made = [REDUCTIONS[r](VALUES[v](model, batch), MASKS[m](batch)) for v, m, r in terms]
        return torch.stack([0.5**i * value for i, value in enumerate(made)]).sum()

    try:
        build = compiled(step, padded(seed), microbatches)
    except BatchError:
        return
    if any("not proved" in warning for warning in build.warnings):
        return
    for later in range(2):
        found = compare_with_eager(build, net(), step, padded(seed + 1 + later))
        assert found.largest < 1e-3  # a gradient that is 0 is rounding alone


@searched(6)
@given(terms=TERMS, microbatches=COUNTS, seed=st.integers(0, 99))
def test_random_losses(terms: list[tuple[str, str, str]], microbatches: int, seed: int) -> None:
    check_random(terms, microbatches, seed)


@pytest.mark.slow
@searched(30)
@given(terms=TERMS, microbatches=COUNTS, seed=st.integers(0, 99))
def test_many_random_losses(terms: list[tuple[str, str, str]], microbatches: int, seed: int) -> None:
    check_random(terms, microbatches, seed)


def test_every_batch_norm_of_microbatches_is_warned_of() -> None:
    def two() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def squared(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    build = fxpipe.compile(two(), squared, torch.randn(8, 6), workers=2, schedule="1f1b", cost="analytic")
    (warning,) = [w for w in build.warnings if "batch norm" in w]
    assert warning.startswith("batch norm normalises each microbatch by itself (1, 3): this trains differently from")
    assert "--microbatches 1, without replicas, trains like that loop" in warning
    whole = fxpipe.compile(
        two(), squared, torch.randn(8, 6), workers=2, schedule="1f1b", microbatches=1, cost="analytic"
    )
    assert not [w for w in whole.warnings if "batch norm" in w]
