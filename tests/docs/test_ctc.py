"""The function that docs/errors/data-shapes.md gives in place of F.ctc_loss computes what nn.CTCLoss does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

PAGE = (Path(__file__).parents[2] / "docs" / "errors" / "data-shapes.md").read_text(encoding="utf-8")


def hooks() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(def ctc.*?)```", PAGE, re.S)
    found: dict[str, Any] = {"torch": torch, "F": F}
    exec(code, found)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_it_equals_torchs(seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(12, 5, 4, dtype=torch.float64, requires_grad=True)
    scores = logits.log_softmax(2)
    labels = torch.randint(1, 4, (5, 5))
    label_lengths = torch.tensor([1, 5, 3, 4, 2])
    lengths = torch.tensor([12, 12, 8, 11, 3])
    found = hooks()["ctc"](scores, labels, lengths, label_lengths)
    expected = nn.CTCLoss()(scores, labels, lengths, label_lengths)
    torch.testing.assert_close(found, expected)
    (own,), (torchs,) = (torch.autograd.grad(loss, logits, retain_graph=True) for loss in (found, expected))
    torch.testing.assert_close(own, torchs)
