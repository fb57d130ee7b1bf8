"""Writes models as files: each is run in onnxruntime, and refused if it differs from the stage's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx
from torch import Tensor

from fxpipe.errors import ExportError
from fxpipe.onnx.check import run_file
from fxpipe.onnx.model_file import WeightsForm, write
from fxpipe.stages.compare import NAN, Difference, Expected, compare, in_words

Verdict = Literal["rounding", "unstable", "wrong"]
"""Why an output is off: only rounding; rounding to which the stage's own code is as sensitive; or a defect."""


@dataclass(frozen=True)
class ExportedFile:
    """One model that was written, and how it compares with the stage's own code."""

    name: str
    nodes: int  # their number, including those of its functions
    bytes: int  # its size, including the file of weights next to it, if there is one
    error: float  # the largest relative error of an output in onnxruntime, on the example batch
    worst: str  # the output with that error
    seconds: float  # how long the export took


@dataclass(frozen=True)
class CheckedModel:
    """A model, and what it should compute."""

    name: str
    model: onnx.ModelProto
    weights: Mapping[str, Tensor]  # values of inputs that the model may hold itself
    # inputs, expected: by name, the values to run it on, and the values that it should compute
    inputs: Mapping[str, Tensor]
    expected: Mapping[str, Expected]
    limit: float  # the largest relative error that is accepted without a verdict
    source: str  # the code that it was made from, for errors
    # judges an output that is off by more than the limit, given all outputs that were found
    verdict: Callable[[Difference, Mapping[str, Tensor]], Verdict]

    def write(self, folder: Path, form: WeightsForm) -> tuple[ExportedFile, Difference | None]:
        """Write the model's file and run it; return the file, and the worst output if it is unstable.

        The caller fills in `seconds`.
        """
        path = folder / f"{self.name}.onnx"
        weights_file = write(path, self.model, self.weights, form)
        values = run_file(path, self.inputs)
        differences = compare(values, self.expected)
        verdicts = {d.output: self.verdict(d, values) for d in differences if not d.error <= self.limit}
        wrong = [d for d in differences if verdicts.get(d.output) == "wrong"]
        if wrong or len(self.model.graph.output) != len(self.expected):
            raise ExportError(
                f"{path.name} does not compute what the stage's own code computes: {in_words(wrong)}",
                where=self.source,
                hint="nothing was written; check the batch and the initial weights"
                if any(d.reason == NAN for d in wrong)
                else "nothing was written; this is a defect of the export: please report it with the model",
            )
        counted = [d for d in differences if verdicts.get(d.output) != "rounding"]
        worst = max(counted, key=lambda d: d.error, default=Difference("", 0.0))
        taken = path.stat().st_size + (weights_file.stat().st_size if weights_file else 0)
        nodes = len(self.model.graph.node) + sum(len(f.node) for f in self.model.functions)
        file = ExportedFile(path.name, nodes, taken, worst.error, worst.output, seconds=0.0)
        return file, worst if verdicts.get(worst.output) == "unstable" else None
