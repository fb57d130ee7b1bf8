"""The totals of a minibatch, which its loss is divided by, as a file of the build."""

from __future__ import annotations

import dataclasses

from fxpipe.build.build import Build
from fxpipe.ir.program import Program
from fxpipe.ir.transform import PassLines, run_passes
from fxpipe.lowering.evaluation import buffers_read, spec_of
from fxpipe.passes import totals_passes


def with_totals(build: Build, totals: Program, command: str, shape: int = 0) -> Build:
    """The build with the file, and the rows of the plan, that computing totals takes; worker 0 reads their constants.

    Args:
        totals: what `WholeLoss` left of the training program.
        command: what is written into the file's header.
        shape: the number of its batches' shape.
    """
    lines = PassLines()
    program = run_passes(
        totals, totals_passes(command, shape), [lines], dumped_as=f"totals_{shape}_" if shape else "totals_"
    )
    spec = spec_of(program, tuple(program.metrics()), {})
    plan = dataclasses.replace(build.plan, totals=spec, buffers=buffers_read(build.plan, program, spec.stages))
    return dataclasses.replace(
        build,
        plan=plan,
        files={**build.files, **program.files},
        passes=(*build.passes, *(f"totals: {line}" for line in lines.lines)),
    )
