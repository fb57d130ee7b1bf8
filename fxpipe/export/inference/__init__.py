"""The forward in eval mode, without the loss, as a chain of ONNX files: one for each worker, with an open batch size.

    model, example ─call─→ recorded call ─eval_graph─→ eval graph ─placement─→ a worker for each call of it
                                                                              │
    compared with the model ←─check─ files ←─stages─ what each stage reads, makes and passes on ←─chain─┘

The plan says which worker computes each call: the one whose forward reads the same weights in training. That only
decides where values cross; the chain is correct whenever no call is on an earlier worker than its inputs. The inputs of
a stage are exactly the outputs of the previous stage, in the same order; a value that a
later stage needs is passed on, as `x.1`, `x.2`, by the stages in between.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fxpipe.errors import ExportError, FxpipeError
from fxpipe.export.inference.call import Call, record
from fxpipe.export.inference.chain import Port, check_plan, make_chain, place_calls
from fxpipe.export.inference.check import check_chain
from fxpipe.export.inference.eval_graph import export_graph, in_a_line
from fxpipe.export.inference.stages import InferenceStage, Writer
from fxpipe.plan.plan import Plan
from fxpipe.random_state import torch_state_kept
from fxpipe.task.hooks import Loss
from fxpipe.tracing.held_tensors import HeldTensors

__all__ = ["InferenceExport", "InferenceStage", "Port", "export_inference"]


@dataclass(frozen=True)
class InferenceExport:
    """What was written, and how it was checked."""

    stages: tuple[InferenceStage, ...]
    dynamic: bool  # whether the batch size is open
    error: float  # the largest relative difference from eager PyTorch
    batches: tuple[int, ...]  # the batch sizes that were compared
    # what the user must know: a batch size that had to be fixed, inputs and outputs left out
    warnings: tuple[str, ...] = ()


def export_inference(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    folder: Path,
    *,
    plan: Plan | None = None,
    opset: int = 20,
    weights: Literal["initializers", "external"] = "initializers",
    model_file: str | None = None,
) -> InferenceExport:
    """Write `stage_k.inference.onnx` for every worker, run the chain in onnxruntime and compare it with the model.

    Args:
        model: on the CPU, with the weights to export; its modes, buffers and attributes do not change.
        loss, batch: `loss(model, batch)` shows how the model is called; `batch` is one whole minibatch.
        folder: exists and is empty; if an error is raised, nothing is left in it.
        plan: the plan of a build of this model: each stage computes the calls that use its weights. None gives one
            file.
        opset: the version of ONNX's operators.
        weights: 'external' puts them next to each file, as `stage_k.inference.onnx.data`. So does 'initializers' if a
            file would have more than 2 GB.
        model_file: name of the user's file, for the files' metadata.

    Raises:
        ExportError: the loss does not call the model exactly once; the forward cannot be one graph; ONNX lacks an
            operator; the plan is for another model; or the files' outputs differ from the model's.
        CaptureError: the model holds something that cannot be captured, such as lazy parameters.
    """
    if any(t.device.type != "cpu" for t in (*model.parameters(), *model.buffers())):
        raise ExportError("the model is not on the CPU", hint="export before moving it: model.cpu()")
    modes = {module: module.training for module in model.modules()}
    with torch_state_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own; the user has seen the model's when it was made
        try:
            held = HeldTensors(model)
            if plan is not None:
                check_plan(plan, held)
            model.eval()
            with torch.no_grad():
                call = record(held, loss, batch)
                return _exported(held, call, plan, Writer(folder, opset, weights, model_file))
        except BaseException:
            _clean(folder)
            raise
        finally:
            for module, mode in modes.items():
                module.training = mode


def _exported(held: HeldTensors, call: Call, plan: Plan | None, writer: Writer) -> InferenceExport:
    """With an open batch size if possible, else with the example's."""
    if call.size is None:
        return _attempt(held, call, plan, writer, dynamic=False)
    try:
        return _attempt(held, call, plan, writer, dynamic=True)
    except FxpipeError as error:
        _clean(writer.folder)
        first = in_a_line(error)
    export = _attempt(held, call, plan, writer, dynamic=False)
    note = f"the batch size is fixed at {call.size}: with an open one, {first}"
    return dataclasses.replace(export, warnings=(note, *export.warnings))


def _attempt(held: HeldTensors, call: Call, plan: Plan | None, writer: Writer, dynamic: bool) -> InferenceExport:
    graph = export_graph(held, call, dynamic)
    chain = make_chain(graph, place_calls(graph, plan), plan.workers if plan else 1)
    stages = tuple(writer.stage(graph, stage) for stage in chain)
    error, batches = check_chain(held, call, graph, stages, writer.folder, dynamic)
    return InferenceExport(stages, dynamic, error, batches, (*call.notes, *graph.notes))


def _clean(folder: Path) -> None:
    for path in folder.glob("stage_*.inference.onnx*"):
        path.unlink()
