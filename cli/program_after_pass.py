"""`fxpipe compile --after PASS`: the program as it is after any pass, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpipe.cli.cost_options import CostOptions
from fxpipe.cli.model_build import build_model
from fxpipe.cli.output import echo, emit_json

from fxpipe.lowering.options import CompileOptions
from fxpipe.task.model_options import ModelOptions

if TYPE_CHECKING:
    from fxpipe.task.model_file import Task

IS_FOR = {
    "whole_loss": ": it is for several microbatches",
    "join_metrics": ": it is for a loss that comes with metrics",
    "scale_loss": ": it is for float16",
    "split_backward": ": it is for weight gradients with cuts, or actions, of their own",
    "defer": ": it is for schedules that have weight gradients apart",
    "recompute": ": it is for workers whose memory is short",
    "encode": ": it is for edges that have codecs",
    "reduce": ": it is for workers that have replicas",
    **dict.fromkeys(("merge_equal", "order_evaluation", "place_evaluation"), ": it is for evaluations in the pipeline"),
}
"""What the passes that do not always run are for."""


def print_after(
    name: str, task: Task, made: ModelOptions, options: CompileOptions, costs: CostOptions, as_json: bool
) -> None:
    """Print the program after a pass, with which the compile ends.

    Raises:
        FxpipeError: no pass has that name, or it does not run with these options.
    """
    from fxpipe.passes import pass_names

    from fxpipe.errors import FxpipeError, near
    from fxpipe.ir.printer import print_program
    from fxpipe.ir.transform import CAPTURE, PassReached, StopAfter

    known, stop = (CAPTURE, *pass_names()), StopAfter(name)
    if name not in known:
        raise FxpipeError(
            f"no pass is called {name!r}{near(name, known)}",
            where="--after",
            hint=f"the passes, in their order: {', '.join(known)}",
        )
    try:
        build_model(task, made, options, costs, [stop])
    except PassReached as reached:
        text = print_program(reached.program)
    else:
        raise FxpipeError(
            f"the pass {name} does not run here{IS_FOR.get(name, '')}",
            where="--after",
            hint=f"the passes that run, in their order: {', '.join(dict.fromkeys(stop.seen))}",
        )
    if as_json:
        emit_json({"after": name, "program": text})
    else:
        echo(text, nl=not text.endswith("\n"))
