"""Lowering: a captured program goes through the lists of passes, step by step; its costs and cuts are found between."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.builds.build import Build
from fxpipe.ir.program import Program
from fxpipe.ir.saved_program import SavedProgram, text_of
from fxpipe.ir.transform import Observer, Pass, PassLines, run_passes
from fxpipe.lowering.options import CompileOptions
from fxpipe.passes import emitting_passes, forward_passes, front_passes, wiring_passes
from fxpipe.passes.encode import Encode
from fxpipe.passes.recompute import Recompute
from fxpipe.passes.reduce import Reduce
from fxpipe.passes.whole_loss import WholeLoss
from fxpipe.plan.plan import Plan
from fxpipe.planner.cuts import Cuts
from fxpipe.schedule.graph import Graph
from fxpipe.task.batch import tensor_spec
from fxpipe.tracing.custom_operators import registering


@dataclass(frozen=True)
class Lowering:
    """A program on its way to files, and the passes that it has been through. Each step gives a new one:

        step = Lowering(program, options).front(whole_loss)          its units are numbered
        step = step.through([cost])                                  it has costs: cuts can be chosen
        step = step.wired(cuts)                                      its edges are known: codecs can be chosen
        step = step.emitted(encode)                                  it has files
        Lowering(program, options).forward_emitted(workers, owners)  no backward, of an evaluation or totals: all in one

    Attributes:
        program: as the last pass left it.
        shape: the number of its batches' shape.
        dumped_as: the start of the names of dumped files.
        observers: are called for every pass.
        applied: the passes.
        lines: what each of them did.
        captured: the program before the first one.
    """

    program: Program
    options: CompileOptions
    shape: int = 0
    dumped_as: str = ""
    observers: tuple[Observer, ...] = ()
    applied: tuple[Pass, ...] = ()
    lines: tuple[str, ...] = ()
    captured: Program | None = None

    def through(self, passes: Iterable[Pass]) -> Lowering:
        """After more passes."""
        passes, lines = tuple(passes), PassLines(list(self.lines))
        observers: tuple[Observer, ...] = (*self.observers, lines)
        program = run_passes(self.program, passes, observers, self.dumped_as, first=len(self.applied) + 1)
        applied, captured = (*self.applied, *passes), self.captured or self.program
        return replace(self, program=program, applied=applied, lines=tuple(lines.lines), captured=captured)

    def saved(self, name: str) -> str:
        """The captured program with the passes, as text (`fxpipe/ir/saved_program.py`)."""
        captured = self.captured or self.program
        return text_of(SavedProgram(name, captured, self.applied), registering([captured.graph]))

    def front(self, whole_loss: WholeLoss | None = None, split_backward: bool = False) -> Lowering:
        """Its units are numbered: its costs can be measured.

        Args:
            whole_loss: as `checked_loss` gives it; None for one microbatch.
        """
        metrics, scaled = bool(self.program.metrics()), self.program.scales_loss
        return self.through(front_passes(split_backward, whole_loss, metrics, scaled))

    def wired(self, cuts: Cuts, recompute: Recompute | None = None, along: Graph | None = None) -> Lowering:
        """Of a program with costs: each node has its worker, and each value that crosses its edge."""
        return self.through(wiring_passes(cuts, self.options.kind.weights_apart, self.shape, recompute, along))

    def emitted(
        self, encode: Encode | None = None, reduce: Reduce | None = None, types: dict[str, str] | None = None
    ) -> Lowering:
        """Of a program with edges: it has its files.

        Args:
            encode: gives edges their codecs; does not run if none has one.
            reduce: puts gradients into buckets for the workers' replicas; None where no worker has several.
            types: of the weights that the build's first shape reads cast, by name.
        """
        encode = encode if encode and encode.codecs else None
        passes = emitting_passes(self.options.command, encode, self.shape, reduce, self.options.outline, types)
        return self.through(passes)

    def forward_emitted(self, workers: int, owners: Mapping[str, int], files: str = "evaluate_{worker}") -> Lowering:
        """Of a captured program without a backward: it has its files. The arguments are those of `forward_passes`."""
        return self.through(
            forward_passes(workers, owners, self.shape, self.options.command, files, self.options.outline)
        )

    def added_to(self, build: Build, plan: Plan, called: str) -> Build:
        """The build with that plan, the files, and a line for every pass: `shape 1: fold  812 → 640 nodes`."""
        more: dict[str, Any] = {"files": {**build.files, **self.program.files}}
        more["passes"] = *build.passes, *(f"{called}: {line}" for line in self.lines)
        return replace(build, plan=plan, programs=(*build.programs, self.saved(called)), **more)


def name_constants(program: Program, prefix: str, known: Mapping[str, Tensor]) -> Program:
    """Name the constants that a further capture has met, and those of its totals, next to the build's own tensors: as
    an equal one of these, or with a new name, which begins with `prefix`."""
    constants = {name: t for name, t in known.items() if re.fullmatch(r"((evaluate|shape)\.\d+\.)?constant_\d+", name)}

    def named(part: Program) -> Program:
        rows = []
        for row in part.buffers:
            if row.constant:
                tensor = part.values[row.node]
                spec = tensor_spec(tensor)
                alike = (name for name, t in constants.items() if tensor_spec(t) == spec and torch.equal(t, tensor))
                row = replace(row, names=(next(alike, f"{prefix}.{row.names[0]}"),))
            rows.append(row)
        return replace(part, buffers=tuple(rows), totals=part.totals and named(part.totals))

    return named(program)
