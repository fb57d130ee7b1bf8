"""`--pad-to`: batches of many lengths train as eager PyTorch trains them unpadded, through stages of few shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from padded_texts import PAD, Reader, batch_of, data, loss, metrics, model_of
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import BatchError, TaskError
from fxpipe.lowering.compare_with_eager import compare_with_eager


def built(loss: Any = loss, first: Any = None, model: nn.Module | None = None, **more: Any) -> Build:
    options = {"workers": 2, "schedule": "1f1b", "microbatches": 2, "cost": "analytic", "pad": PAD, "pad_to": 8, **more}
    first, *others = data() if first is None else [first]
    return fxpipe.compile(model or model_of(), loss, first, **{"shapes": others, **options})


@pytest.fixture(scope="module")
def whole() -> Build:
    return built(evaluation=(metrics, data()))


def test_a_padded_batch_is_compared_with_eager_as_it_enters(whole: Build) -> None:
    assert [of_shape.step.given[0].tensor.shape for of_shape in whole.plan.of_shapes] == [(2, 8), (2, 16)]  # type: ignore[union-attr]
    assert not whole.warnings
    for part, batch in zip(whole.of_shapes, (batch_of(5), batch_of(9)), strict=True):
        assert compare_with_eager(part, model_of(), loss, batch).largest < 1e-12


class Unmasked(Reader):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return super().forward(ids, torch.ones_like(mask))


def unmasked() -> nn.Module:
    torch.manual_seed(0)
    return Unmasked().double()


def test_a_model_that_does_not_mask_is_warned_of_with_both_numbers() -> None:
    model, batch = unmasked(), batch_of(5)
    own = loss(model, batch).item()
    after = {name: F.pad(value, (0, 3), value=PAD[name]) for name, value in batch.items()}
    build = built(first=batch, model=model, evaluation=(metrics, [batch]))
    (of_loss,) = [w for w in build.warnings if "padding changes the loss of a batch" in w]
    assert f"{own:.6g} unpadded, {loss(model, after).item():.6g} padded" in of_loss
    assert "batch['ids'] int64[4, 5]" in of_loss
    (of_metric,) = [w for w in build.warnings if "padding changes the evaluation metric 'loss'" in w]
    assert f"{own:.6g} unpadded" in of_metric


def test_a_loss_of_the_mean_over_all_tokens_is_warned_of() -> None:
    def mean(model: nn.Module, batch: Any) -> Any:
        logits = model(batch["ids"], batch["mask"]).flatten(0, 1)
        each = F.cross_entropy(logits, batch["labels"].flatten(), reduction="none")
        return each.mean(), {"largest": each.max(), "smallest": each.min()}

    warnings = built(mean).warnings
    assert sum("padding changes the loss" in w and "(the same for 1 more shapes)" in w for w in warnings) == 1
    assert not any("padding changes the metric 'largest'" in w for w in warnings)


def test_weights_that_count_what_is_appended_are_warned_of() -> None:
    warnings = built(loss_weight=lambda batch: batch["ids"].numel()).warnings
    assert any("padding changes loss_weight(batch)" in w and "20 unpadded, 32 padded" in w for w in warnings)


def test_gradients_that_padding_changes_are_warned_of() -> None:
    def with_nothing(model: nn.Module, batch: Any) -> Tensor:
        hidden = model.get_submodule("embed")(batch["ids"]).sum()
        return loss(model, batch) + hidden - hidden.detach()  # no value, but a gradient for every token

    assert any("padding changes gradients" in w and "embed.weight" in w for w in built(with_nothing).warnings)


def test_batches_that_need_no_padding_compare_nothing_and_say_so() -> None:
    warnings = built(first=batch_of(8)).warnings
    assert [w for w in warnings if "was not compared: no batch that was read needs any" in w]


def test_a_leaf_that_is_as_long_and_not_named_is_named_by_the_error() -> None:
    with pytest.raises(BatchError, match=r"fails on it padded") as error:
        built(pad={"ids": 0, "labels": -100})
    assert error.value.hint == "pad does not name batch['mask'], which has the same length: name it, too"


def test_where_nothing_is_named_the_error_shows_the_leaves() -> None:
    with pytest.raises(BatchError, match=r"pad_to=8 is given without pad") as error:
        built(pad=None)
    assert "batch['ids'] ([4, 3], [4, 4], [4, 5])" in error.value.what
    assert error.value.hint is not None
    assert 'pad = {"input_ids": 0, "attention_mask": 0, "labels": -100}' in error.value.hint


def test_values_without_a_length_and_captured_programs_are_refused() -> None:
    with pytest.raises(TaskError, match="given without pad_to"):
        built(pad_to=None)
    program = fxpipe.capture(model_of(), loss, batch_of(8))
    with pytest.raises(BatchError, match="it cannot be padded"):
        fxpipe.lower(program, workers=2, pad=PAD, pad_to=8)
