"""`fxpipe compile --after PASS`: the program as it is after any pass, as text."""

from __future__ import annotations

from fxpipe.cli.cost_options import CostOptions
from fxpipe.cli.model_build import build_model
from fxpipe.cli.output import echo, emit_json
from fxpipe.passes import pass_names

from fxpipe.errors import FxpipeError, near
from fxpipe.ir.printer import print_program
from fxpipe.ir.transform import CAPTURE, PassReached, StopAfter
from fxpipe.lowering.options import CompileOptions
from fxpipe.task.model_file import Task
from fxpipe.task.model_options import ModelOptions

IS_FOR = {
    "whole_loss": ": it needs several microbatches",
    "join_metrics": ": it needs a loss that returns metrics",
    "scale_loss": ": it is for float16",
    "split_backward": ": it needs weight gradients with separate cuts or actions",
    "defer": ": it needs a schedule with separate weight gradients",
    "recompute": ": it needs workers with too little memory",
    "encode": ": it needs edges with codecs",
    "reduce": ": it needs workers with replicas",
    **dict.fromkeys(("merge_equal", "order_evaluation", "place_evaluation"), ": it needs evaluations in the pipeline"),
}
"""What passes need that do not always run."""


def print_after(
    name: str, task: Task, made: ModelOptions, options: CompileOptions, costs: CostOptions, as_json: bool
) -> None:
    """Print the program after a pass, and end the compile there.

    Raises:
        FxpipeError: no pass has that name, or it does not run with these options.
    """
    known, stop = (CAPTURE, *pass_names()), StopAfter(name)
    if name not in known:
        raise FxpipeError(
            f"there is no pass {name!r}{near(name, known)}",
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
