"""The passes, and the order in which they run. Each is pure: costs and cuts are found between them, in `lower`."""

from __future__ import annotations

from collections.abc import Mapping

from fxpipe.ir.transform import Pass
from fxpipe.passes.cast_weights import CastWeights
from fxpipe.passes.codegen import Codegen
from fxpipe.passes.comm import Comm
from fxpipe.passes.cost import Cost
from fxpipe.passes.cut import Cut
from fxpipe.passes.defer import Defer
from fxpipe.passes.encode import Encode
from fxpipe.passes.fold import Fold
from fxpipe.passes.join_metrics import JoinMetrics
from fxpipe.passes.keep_layouts import KeepLayouts
from fxpipe.passes.merge_equal import MergeEqual
from fxpipe.passes.next_to import NextTo
from fxpipe.passes.order_evaluation import OrderEvaluation
from fxpipe.passes.outline import Outline
from fxpipe.passes.place_evaluation import PlaceEvaluation
from fxpipe.passes.recompute import Recompute
from fxpipe.passes.reduce import Reduce
from fxpipe.passes.rematerialize import Rematerialize
from fxpipe.passes.scale_loss import ScaleLoss
from fxpipe.passes.send_early import SendEarly
from fxpipe.passes.split import Split
from fxpipe.passes.split_backward import SplitBackward
from fxpipe.passes.units import Units
from fxpipe.passes.whole_loss import WholeLoss
from fxpipe.planner.cuts import Cuts
from fxpipe.schedule.graph import Graph

COMMAND = "fxpipe.compile(...)"
"""What the stages' headers name if no command made the build."""


def front_passes(
    split_backward: bool = False, whole_loss: WholeLoss | None = None, metrics: bool = False, scaled: bool = False
) -> list[Pass]:
    """Captured program in, program with units out: its costs can be measured.

    `whole_loss` is for a program that was captured on one of several microbatches, `metrics` for a loss that comes with
    metrics, `scaled` for a step that computes in float16.
    """
    return [
        *([NextTo()] if whole_loss else []),  # before fold: the step on the whole batch is as it was captured
        Fold(),  # early: fewer nodes for all that follows, and no forward views of weights in backward
        *([whole_loss] if whole_loss else []),  # after fold: detached values do not hide their source
        *(
            [JoinMetrics(whole_loss.microbatches if whole_loss else 1)] if metrics else []
        ),  # after whole_loss, which handles only the loss
        *([ScaleLoss()] if scaled else []),  # after whole_loss, which handles the unscaled loss's gradients
        KeepLayouts(),  # before anything is copied or cut: copies get the strides of their originals
        *([SplitBackward()] if split_backward else []),  # before units, which separates W from B
        Units(),  # after fold: a dropped node must not open a unit
    ]


def wiring_passes(
    cuts: Cuts,
    weights_apart: bool = False,
    shape: int = 0,
    recompute: Recompute | None = None,
    along: Graph | None = None,
) -> list[Pass]:
    """Program that `Cost()` has given costs in, program whose edges are known out: codecs can be chosen for them.

    `shape` is the number of its batches' shape, `along` the graph of the workers, as in `Comm`.
    """
    return [
        Cut(cuts),  # every node gets its worker
        *([Defer()] if weights_apart else []),  # before rematerialize and comm, which go by phases
        *([recompute] if recompute else []),  # after defer: what weight gradients read is kept for longer
        Rematerialize(),  # before comm: what is computed again is not sent
        Comm(f"shape.{shape}:" if shape else "", along),  # then values cross workers only through Send and Recv
    ]


def emitting_passes(
    command: str = COMMAND,
    encode: Encode | None = None,
    shape: int = 0,
    reduce: Reduce | None = None,
    outline: bool = True,
    types: dict[str, str] | None = None,
) -> list[Pass]:
    """Wired program in, stage files out; `encode` if an edge has a codec, `reduce` if a worker has replicas.

    `types` are for `CastWeights`.
    """
    return [
        CastWeights(types),  # before send_early, which weighs the memory of values: weights are not counted
        *([encode] if encode else []),  # before split: packing is a call of the sender
        SendEarly(),  # before reduce: it hands over gradients in their new order
        *([reduce] if reduce else []),  # before split: a call of its worker; after encode: the nodes are final
        Split(),  # a graph for each phase of each worker
        *([Outline()] if outline else []),  # between the graphs and their text, which has functions for what repeats
        Codegen(command, f"stage_{{worker}}_{shape}.py" if shape else "stage_{worker}.py"),  # last: the product
    ]


def forward_passes(
    workers: int,
    owners: Mapping[str, int],
    shape: int,
    command: str,
    files: str = "evaluate_{worker}",
    outline: bool = True,
) -> list[Pass]:
    """Program without a backward in, of an evaluation or of a minibatch's totals, the files of its workers out.

    `owners` are the workers that hold parameters and updated buffers, by first name; `files` begins the files' names.
    """
    return [
        Fold(),
        KeepLayouts(),
        MergeEqual(),  # metrics often call the model several times on the same batch
        OrderEvaluation(owners),  # before units, which numbers in this order
        Units(),
        Cost(),  # for the bytes; the times are not used
        PlaceEvaluation(workers, owners),  # where the weights are
        Rematerialize(),  # masks and positions are made where they are read
        Comm(prefix=f"evaluate.{shape}:"),  # separate edges, next to training's
        Split(),
        *([Outline()] if outline else []),
        Codegen(command, f"{files}_{shape}.py" if shape else f"{files}.py"),
    ]


def every_pass() -> dict[str, type[Pass]]:
    """All passes by name in their order: first for training, then only for evaluations."""
    every = [
        *front_passes(True, WholeLoss(2), metrics=True, scaled=True),
        Cost(),
        *wiring_passes(Cuts((0, 1), (0, 1)), weights_apart=True, recompute=Recompute()),
        *emitting_passes(encode=Encode(), reduce=Reduce()),
        *forward_passes(1, {}, 0, COMMAND),
    ]
    return {step.name: type(step) for step in every}
