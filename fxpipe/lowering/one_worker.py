"""Builds a step for one worker, to be compared before anything is cut: with any other cuts it computes the same."""

from __future__ import annotations

from fxpipe.builds.build import Build
from fxpipe.ir.program import Buffer, Parameter, Program
from fxpipe.lowering.evaluation import with_totals
from fxpipe.lowering.lowering import Lowering
from fxpipe.lowering.make_plan import make_plan
from fxpipe.lowering.options import CompileOptions
from fxpipe.passes.cost import Cost
from fxpipe.passes.whole_loss import WholeLoss
from fxpipe.planner.cuts import Cuts


def for_one_worker(program: Program, microbatches: int, whole_loss: WholeLoss | None) -> Build:
    """The build of a captured step for one worker; its tensors are the program's.

    Args:
        microbatches: how many a minibatch is cut into; the program is captured on one.
    """
    options = CompileOptions(workers=1, schedule="gpipe", microbatches=microbatches)
    step = Lowering(program, options, dumped_as="compared_").front(whole_loss).through([Cost()])
    units = (0, len(step.program.units))
    program = step.wired(Cuts(units, units)).emitted().program
    held: tuple[Parameter | Buffer, ...] = (*program.parameters, *program.buffers)
    build = Build(
        plan=make_plan(program, options.setting(program.device)),
        files=program.files,
        tensors={row.names[0]: program.values[row.node].detach() for row in held},
        warnings=program.warnings,
    )
    return build if program.totals is None else with_totals(build, program.totals, options)
