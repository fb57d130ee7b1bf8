"""Shapes of batches that compile did not see: how many are made during a run, of which model, and what is said."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import BatchError

SIZES = ((8, 6), (8, 3))  # samples, tokens


class Reader(nn.Module):
    """A model with a constant for each length of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = (
            torch.tanh(self.one(self.embed(ids)))
            + torch.tensor([0.1 * i for i in range(ids.shape[1])]).double()[:, None]
        )
        return self.head(torch.tanh(self.two(hidden)))


def loss(model: nn.Module, batch: Any) -> Tensor:
    ids, labels = batch
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def batch_of(samples: int, tokens: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 11, (samples, tokens), generator=generator)
    labels = torch.randint(0, 11, (samples, tokens), generator=generator)
    labels[torch.rand(samples, tokens, generator=generator) < 0.3] = -100
    return ids, labels


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Reader().double()


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], 0.01)


HOOKS: dict[str, Any] = {"model": model_of, "loss": loss}


@pytest.fixture(scope="module")
def one_shape() -> Build:
    options: dict[str, Any] = {"workers": 2, "schedule": "1f1b", "microbatches": 2, "cost": "analytic"}
    return fxpipe.compile(model_of(), loss, batch_of(*SIZES[0]), **options)


def test_generators_and_weights_stay_as_they_are(one_shape: Build) -> None:
    """A shape is made in the middle of a user's own loop."""
    pipeline = one_shape.local(optimizer=adam, **HOOKS)
    pipeline.step(batch_of(*SIZES[0]))
    pipeline.flush()
    torch.manual_seed(5)
    random.seed(5)
    kept, before = torch.get_rng_state(), random.getstate()
    weights = pipeline.state_dict()
    pipeline._minibatches(batch_of(*SIZES[1]), 1)
    assert torch.equal(torch.get_rng_state(), kept)
    assert random.getstate() == before
    torch.testing.assert_close(pipeline.state_dict(), weights, rtol=0, atol=0)


def test_only_so_many_are_made(one_shape: Build, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = one_shape.local(optimizer=adam, new_shapes=1, **HOOKS)
    pipeline.step(batch_of(8, 3))
    said = capsys.readouterr().err
    assert "the batch of step 1 has a new shape (batch[0] int64[8, 3]" in said
    assert "0 more may be made" in said
    with pytest.raises(BatchError, match=r"step 2 has a new shape .*has made stages for 1 new shapes.*--new-shapes"):
        pipeline.step(batch_of(8, 4))
    pipeline.step(batch_of(8, 3))
    pipeline.step(batch_of(8, 6))
    assert capsys.readouterr().err == ""


def test_none_are_made_where_none_may_be(one_shape: Build) -> None:
    with pytest.raises(BatchError, match=r"does not fit the captured program") as refused:
        one_shape.local(optimizer=adam, new_shapes=0, **HOOKS).step(batch_of(8, 3))
    assert "--new-shapes" in str(refused.value.hint)


def test_a_batch_that_cannot_be_captured_is_refused_and_the_next_goes_on(one_shape: Build) -> None:
    pipeline = one_shape.local(optimizer=adam, **HOOKS)
    data = [batch_of(8, 6, seed=i) for i in range(3)]
    losses = [float(pipeline.step(data[0]))]
    for wrong, why in ((batch_of(7, 6), "2 microbatches do not divide a batch of 7"), ((data[1][0],), "values")):
        with pytest.raises(BatchError, match=f"no stages can be made for its shape: .*{why}"):
            pipeline.step(wrong)
    losses += [float(pipeline.step(batch)) for batch in data[1:]]
    again = one_shape.local(optimizer=adam)
    assert losses == [float(again.step(batch)) for batch in data]


def test_the_model_that_was_compiled_serves_while_it_is_there_and_as_it_was() -> None:
    model = model_of()
    options: dict[str, Any] = {"workers": 2, "schedule": "1f1b", "microbatches": 2, "cost": "analytic"}
    build = fxpipe.compile(model, loss, batch_of(8, 6), **options)
    pipeline = build.local(optimizer=adam)
    pipeline.step(batch_of(8, 3))
    model.eval()
    with pytest.raises(BatchError, match="now in another mode"):
        pipeline.step(batch_of(8, 4))
    model.train()
    pipeline.step(batch_of(8, 4))
    del model
    with pytest.raises(BatchError, match="the model that was compiled is gone"):
        pipeline.step(batch_of(8, 5))


def test_without_hooks_it_is_said_what_is_missing(one_shape: Build, tmp_path: Path) -> None:
    pipeline = fxpipe.load(one_shape.save(tmp_path / "build").folder).local(optimizer=adam)
    with pytest.raises(BatchError, match="does not fit the captured program") as refused:
        pipeline.step(batch_of(8, 3))
    assert "model= and loss=" in str(refused.value.hint)


def test_another_model_is_refused(one_shape: Build) -> None:
    def wider() -> nn.Module:
        made = model_of()
        made.one, made.two = nn.Linear(8, 9).double(), nn.Linear(9, 8).double()
        return made

    def other_values() -> nn.Module:
        torch.manual_seed(1)
        return Reader().double()

    for model, why in ((wider, "does not give the model that was compiled"), (other_values, "other values than")):
        with pytest.raises(BatchError, match=why):
            one_shape.local(optimizer=adam, model=model, loss=loss).step(batch_of(8, 3))
