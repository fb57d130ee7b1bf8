"""The smallest program that has two workers."""

from __future__ import annotations

import torch
from torch import nn

import fxpipe
from fxpipe.ir.program import Program


def two_layers() -> Program:
    """A step of two layers with a tanh between them, captured: the smallest that has two workers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
    return fxpipe.capture(model, lambda m, x: m(x).sum(), torch.ones(3, 2))
