"""Captured programs, made once for the whole test run: capture is the slow part."""

from __future__ import annotations

import functools
from typing import Any

from small_models import CASES, Case
from torch import nn

import fxpipe
from fxpipe.ir.program import Program
from fxpipe.task.batch import split


@functools.cache
def captured(name: str, microbatches: int = 1, size: int = 8) -> tuple[Case, nn.Module, Program]:
    """A case, its model as it was captured, and the program of one microbatch."""
    case = CASES[name]
    model = case.make()
    program = fxpipe.capture(model, case.loss, split(case.batches(1, size)[0], microbatches)[0])
    return case, model, program


def passed(program: Program, **options: Any) -> Program:
    """The program after the last pass of a compile with computed costs."""
    seen: list[Program] = []
    fxpipe.lower(program, cost="analytic", observers=[lambda applied: seen.append(applied.program)], **options)
    return seen[-1]


def lowered(name: str, microbatches: int = 1, size: int = 8, **options: Any) -> fxpipe.Build:
    """A build of a case, from its cached program."""
    options.setdefault("cost", "analytic")
    return fxpipe.lower(captured(name, microbatches, size)[2], microbatches=microbatches, **options)


def cuts(case: Case, workers: int, shift: int) -> dict[str, tuple[str, ...]]:
    """Evenly spread cuts; backward's lie `shift` modules later than forward's."""
    last = len(case.paths) - workers
    at = [min(1 + (k * (len(case.paths) - 2)) // workers, last + k) for k in range(1, workers)]
    moved = [min(max(a + shift, 1 + k), last + k + 1) for k, a in enumerate(at)]
    return {"forward_at": tuple(case.paths[a] for a in at), "backward_at": tuple(case.paths[a] for a in moved)}
