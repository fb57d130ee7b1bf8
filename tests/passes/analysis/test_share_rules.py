"""The tables of rules name operators: a misspelt name would be an unknown operator, without a word."""

from __future__ import annotations

import torch

from fxpipe.passes.analysis.share_rules import _RULES, sameness, whole_batch


def test_every_name_is_an_operator() -> None:
    names = {*_RULES, *sameness._FILLED, *sameness._KEEPS_UNIFORM, *sameness._DIMS}
    names |= whole_batch._SIZED | whole_batch._PICKS | whole_batch._ALIKE
    own = {"recurrent_layer"}
    assert sorted(name for name in names - own if not hasattr(torch.ops.aten, name)) == []
