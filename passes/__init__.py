"""The passes, and the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fxpipe.costs.measured import MeasuredCosts
from fxpipe.ir.transform import Pass
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.device import CPU, Device
from fxpipe.planner.setting import Setting


@dataclass(frozen=True)
class Options:
    """What a user can choose about a compile; see `fxpipe compile --help`."""

    workers: int = 2
    forward_at: tuple[str, ...] = ()
    backward_at: tuple[str, ...] = ()
    cuts: Cuts | None = None
    mode: str = "auto"
    setting: Setting = field(default_factory=Setting)
    update_seconds_per_byte: float = 0.0
    split_backward: bool = False
    cost: Literal["measured", "analytic"] = "measured"
    device: Device = CPU
    threads: int | None = None
    known: Path | None = None
    keep: Callable[[MeasuredCosts], None] | None = None
    command: str = "fxpipe.compile(...)"


def evaluation_passes(workers: int, owners: Mapping[str, int], shape: int, command: str) -> list[Pass]:
    """Captured evaluation in, the files of its workers out.

    Args:
        owners: the worker that holds a parameter or an updated buffer, by its first name.
        shape: the number of its batches' shape.
    """
    from fxpipe.passes.codegen import Codegen
    from fxpipe.passes.comm import Comm
    from fxpipe.passes.cost import Cost
    from fxpipe.passes.fold import Fold
    from fxpipe.passes.merge_equal import MergeEqual
    from fxpipe.passes.order_evaluation import OrderEvaluation
    from fxpipe.passes.place_evaluation import PlaceEvaluation
    from fxpipe.passes.rematerialize import Rematerialize
    from fxpipe.passes.split import Split
    from fxpipe.passes.units import Units

    return [
        Fold(),
        MergeEqual(),  # metrics often call the model several times on the same batch
        OrderEvaluation(owners),  # before units: these number what cuts can part, in order
        Units(),
        Cost("analytic"),  # bytes; nothing is chosen by its times
        PlaceEvaluation(workers, owners),  # where the weights are
        Rematerialize(),  # masks and positions are made where they are read
        Comm(prefix=f"evaluate.{shape}:"),  # edges of their own, next to those of training
        Split(),
        Codegen(command, f"evaluate_{{worker}}_{shape}.py" if shape else "evaluate_{worker}.py"),
    ]


def default_passes(options: Options) -> list[Pass]:
    """Captured program in, stage files out."""
    from fxpipe.passes.codegen import Codegen
    from fxpipe.passes.comm import Comm
    from fxpipe.passes.cost import Cost
    from fxpipe.passes.cut import Cut
    from fxpipe.passes.fold import Fold
    from fxpipe.passes.rematerialize import Rematerialize
    from fxpipe.passes.split import Split
    from fxpipe.passes.split_backward import SplitBackward
    from fxpipe.passes.units import Units

    return [
        Fold(),  # first: fewer nodes for all that follows, and no forward views of weights in backward
        *([SplitBackward()] if options.split_backward else []),  # before units: these tell W from B
        Units(),  # after fold: what it dropped must not count as something a cut can separate
        Cost(  # measures the graph as the workers will run it
            options.cost, threads=options.threads, device=options.device, known=options.known, keep=options.keep
        ),
        Cut(  # every node gets its worker
            options.workers,
            options.forward_at,
            options.backward_at,
            options.cuts,
            options.mode,
            options.setting,
            options.update_seconds_per_byte,
        ),
        Rematerialize(),  # before comm: what is computed again is not sent
        Comm(),  # after it no value crosses workers but through Send and Recv
        Split(),  # a graph for each phase of each worker
        Codegen(options.command),  # last: the product
    ]
