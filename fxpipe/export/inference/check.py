"""Compares the chain in onnxruntime with the model: on the example, and with other batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fxpipe.errors import ExportError
from fxpipe.export.inference.call import Call, untouched
from fxpipe.export.inference.eval_graph import EvalGraph
from fxpipe.export.inference.stages import InferenceStage
from fxpipe.onnx.check import CheckedSession
from fxpipe.stages.compare import Expected, compare, in_words, tolerance
from fxpipe.tracing.held_tensors import HeldTensors


@dataclass
class _Trial:
    """One batch size: the values at a boundary of the chain, and the model's own outputs."""

    rows: int | None
    values: dict[str, Tensor]
    expected: dict[str, Expected]


def check_chain(
    held: HeldTensors, call: Call, graph: EvalGraph, stages: Sequence[InferenceStage], folder: Path, dynamic: bool
) -> tuple[float, tuple[int, ...]]:
    """The largest relative error of an output, and the batch sizes that were compared."""
    trials = _trials(held, call, graph, stages, dynamic)
    for stage in stages:
        session = CheckedSession(folder / stage.files[0])  # only one is in memory at a time
        for trial in trials:
            try:
                trial.values = session.run(trial.values)
            except ExportError as error:
                raise ExportError(error.what, where=f"batch size {trial.rows}", hint=error.hint) from error
    limit = tolerance([*(p.dtype for p in held.model.parameters()), *(port.dtype for port in stages[-1].outputs)])
    worst = 0.0
    for trial in trials:
        differences = compare(trial.values, trial.expected, nan_equals_nan=True)
        wrong = [d for d in differences if not d.error <= limit]
        if wrong:
            raise ExportError(
                "the outputs of the exported stages differ from the model's own "
                f"(by more than {limit:g}): {in_words(wrong)}",
                where=f"batch size {trial.rows}",
            )
        worst = max([worst, *(d.error for d in differences)])
    return worst, tuple(trial.rows for trial in trials if trial.rows is not None)


def _trials(
    held: HeldTensors, call: Call, graph: EvalGraph, stages: Sequence[InferenceStage], dynamic: bool
) -> list[_Trial]:
    """The example; if the batch size is open, also other sizes, if the model itself takes them."""
    sizes = [call.size]
    if dynamic and call.size is not None:
        sizes += [size for size in (1, call.size + 1) if size != call.size]
    trials = []
    for rows in sizes:
        tensors = call.tensors if rows is None or rows == call.size else call.resized(rows)
        try:
            with untouched(held):  # the inputs are copies: a model may change them, and return its buffers
                outputs = [value.clone() for value in call.make(held.model, [t.clone() for t in tensors])]
        except Exception:
            if rows == call.size:
                raise
            continue
        values = {port.name: tensors[i] for port, i in zip(stages[0].inputs, graph.used, strict=True)}
        rights = zip(stages[-1].outputs, outputs, strict=True)
        trials.append(_Trial(rows, values, {port.name: Expected(v, peers=port.name) for port, v in rights}))
    return trials
