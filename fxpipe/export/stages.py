"""A build's training step as ONNX models: one for each part of each stage, one for the whole pipeline.

stage_k.py ─pure─→ part ─convert─→ names, metadata, weights ─→ file ─onnxruntime─→ compared with the stage's code
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import onnx
import torch
from torch import Tensor, fx

from fxpipe.builds.build import Build
from fxpipe.codecs import without_codecs
from fxpipe.device_copies import is_here
from fxpipe.errors import ExportError, FxpipeError
from fxpipe.export.checked_files import CheckedModel, ExportedFile, Verdict
from fxpipe.export.names import about, describe, names_of, row_of
from fxpipe.export.pipeline import Converted, Entry, assemble
from fxpipe.export.target import check_export_target, check_opset, check_packages
from fxpipe.ir.program import copy_graph
from fxpipe.onnx.convert import convert
from fxpipe.onnx.model_file import WeightsForm, check_size, named
from fxpipe.plan.lock import replacing_alone
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import FUNCTIONS, Phase
from fxpipe.random_state import torch_state_kept
from fxpipe.stages.compare import SLACK, Difference, Expected, compare, rounding_alone, tolerance
from fxpipe.stages.loaded import LoadedStage, load_stages
from fxpipe.stages.microbatch import run_microbatch
from fxpipe.stages.minibatch import Minibatches, evenly
from fxpipe.stages.part_call import Function, PartCall, PartResult
from fxpipe.stages.pure_function import in_float64, in_stable_order
from fxpipe.stages.pure_part import PartInput, PartOutput, PurePart, trace_stage

OPSET = 20
PIPELINE = "pipeline"


def export(
    build: Build,
    folder: str | Path,
    batch: Any,
    *,
    weights: WeightsForm = "inputs",
    opset: int = OPSET,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
) -> list[ExportedFile]:
    """Write every part of every stage, and the pipeline, as ONNX models; each is run and compared first.

    The stages' files are exported, with their edits.

    Args:
        folder: an earlier export there is replaced; written whole or not at all.
        batch: one minibatch, as `train_data()` gives it; the models are run on its first microbatch.
        weights: 'inputs' of the models, like the arguments of the stages; 'initializers': the build's initial
            weights, in the models; 'external': the same, in a file next to each model.
        opset: the version of ONNX's operators.
        seed: of dropout masks.
        say: is called with what is being done.
        warn: is called about edited stages, parts that are not written because they compute nothing, and unstable
            outputs.

    Raises:
        ExportError: a model that cannot be made, or whose outputs differ; a folder with other files.
        BackendError: an edited stage that is no longer plain tensor code.
        BatchError: the batch does not fit the build.
    """
    check_packages()
    check_opset(opset)
    check_export_target(folder)
    plan = build.plan
    if weights not in get_args(WeightsForm):
        raise ExportError(f"weights as {weights!r}", hint=f"choose one of {', '.join(get_args(WeightsForm))}")
    if any(p.name not in build.tensors for p in plan.parameters):
        raise ExportError(
            "the build has no parameter values (--meta)", hint="give trained ones: --trained model.safetensors"
        )
    if not is_here(plan.device):
        kind = plan.device.upper()
        raise ExportError(f"the build is for {kind}, and torch sees no {kind} device to run its stages on")
    if weights == "initializers":
        check_size(PIPELINE, sum(build.tensors[row.name].nbytes for row in plan.tensors), weights)
    leaves = Minibatches(plan, build.files, build.tensors, evenly)(batch, 0)[0]
    values = dict(zip([leaf.name for leaf in plan.step.batch], leaves, strict=True))
    with replacing_alone(Path(folder)) as fresh, torch_state_kept(), torch.no_grad(), without_codecs():
        stages = load_stages(plan, build.folder or build.files)
        job = _Export(plan, build.tensors, stages, values, fresh, weights, opset, seed, say)
        for stage in stages:
            if stage.edited:
                warn(f"{stage.path.name} was edited since it was compiled; the edited version is exported")
        job.parts()
        for name in job.empty:
            warn(f"{name} computes nothing, so there is no file for it")
        unstable = job.pipeline()
        if unstable:
            warn(
                f"{PIPELINE}.onnx is off by {unstable.error:.1e} on this batch, like the stages themselves: "
                f"a rounding error in each weight moves {unstable.output} as much"
            )
        return sorted(job.files, key=lambda f: (f.name.startswith(PIPELINE), _stage_order(f.name)))


def _stage_order(name: str) -> tuple[int, int]:
    stage, _, function = name.removesuffix(".onnx").partition(".")
    order: list[str] = [*FUNCTIONS.values()]
    return (int(stage.rpartition("_")[2]), order.index(function)) if function else (0, 0)


@dataclass
class _Export:
    """One export: runs the parts one after the other on the example, and makes a file of each."""

    plan: Plan
    tensors: Mapping[str, Tensor]
    stages: Sequence[LoadedStage]
    batch: Mapping[str, Tensor]  # its first microbatch, by leaf
    folder: Path  # where the files are written
    form: WeightsForm
    opset: int
    seed: int
    say: Callable[[str], None]
    files: list[ExportedFile] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)  # names of the parts that compute nothing
    ran: dict[tuple[int, Phase], PurePart] = field(default_factory=dict)  # the parts that were run, by worker and phase
    converted: list[Converted] = field(default_factory=list)
    # example, expected: by names of part and row, the values that the pipeline is run on and those that it should
    # compute
    example: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    expected: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def parts(self) -> None:
        """Write the file of every part."""
        for call, result in run_microbatch(self.plan, self._function, self._state(), self.batch, seed=self.seed):
            self._part(self.ran[call.worker, call.phase], call, result)

    def pipeline(self) -> Difference | None:
        """Write and run the model of all parts; return the worst output if the stages' own code is unstable there, too.

        Deep networks with batch norm over few values are unstable: a rounding error in the weights moves their outputs
        far more than one part adds, so each part alone was right.
        """
        begun = time.perf_counter()
        self.say(f"{PIPELINE}: joining the stages")
        pipeline = assemble(self.converted)
        body = {
            **about(self.plan, self.form),
            "inputs": [row_of(self.plan, e.name, e.row) | {"part": e.part.name} for e in pipeline.inputs],
            "outputs": [row_of(self.plan, e.name, e.row) | {"part": e.part.name} for e in pipeline.outputs],
        }
        describe(pipeline.model, body, None)
        self.converted.clear()
        expected = {e.name: _expect(e.row, self.expected[e.part.name, e.row.name]) for e in pipeline.outputs}
        names = [e.name for e in pipeline.outputs]
        exact = functools.cache(lambda: self._again(pipeline.outputs, exactly=True))
        moved = functools.cache(lambda: self._moved(pipeline.outputs, expected))

        def verdict(difference: Difference, values: Mapping[str, Tensor]) -> Verdict:
            if rounding_alone(difference, values, expected, names, exact):
                return "rounding"
            return "unstable" if difference.error <= SLACK * moved().get(difference.output, 0.0) else "wrong"

        return self._write(
            CheckedModel(
                name=PIPELINE,
                model=pipeline.model,
                weights=self._weights(pipeline.inputs),
                inputs={e.name: self._example_of(e) for e in pipeline.inputs},
                expected=expected,
                limit=tolerance([d for part in self.ran.values() for d in part.dtypes()], self.plan.precision.autocast),
                source="all stages",
                verdict=verdict,
            ),
            begun,
        )

    def _function(self, worker: int, phase: Phase) -> Function:
        if phase == "F":
            self.say(f"stage_{worker}: tracing")
            for part in trace_stage(self.plan, worker, self.stages[worker]):
                self.ran[worker, part.phase] = _with_casts(part, self.plan)
        return in_stable_order(self.stages[worker].functions[phase])

    def _state(self) -> dict[str, Tensor]:
        return {row.name: self.tensors[row.name].to(self.plan.device) for row in self.plan.tensors}

    def _part(self, part: PurePart, call: PartCall, result: PartResult) -> None:
        begun = time.perf_counter()
        if not part.outputs:
            self.empty.append(part.name)
            return
        torch.manual_seed(self.seed)  # the one that the emitted code had
        inputs = [*call.inputs(), *(draw(part.device) for draw in part.draws)]
        for i, row in enumerate(part.inputs[: len(call.weights)]):  # a model takes weights as they are
            inputs[i] = self.tensors[row.name].to(inputs[i].device)
        outputs = [
            torch.zeros_like(value) if row.name in part.left else value  # as in ONNX, whose backward does not read it
            for row, value in zip(part.outputs, result.flat(), strict=True)
        ]
        for kinds, table, rows in (
            (("mask", "buffer"), self.example, zip(part.inputs, inputs, strict=True)),
            (("loss", "gradient", "update"), self.expected, zip(part.outputs, outputs, strict=True)),
        ):
            table.update({(part.name, row.name): value for row, value in rows if row.kind in kinds})
        self.say(f"{part.name}: converting")
        reads, gives = names_of(part)
        model = self._convert(part, reads, gives)
        metadata = describe(
            model,
            {
                **about(self.plan, self.form),
                "stage": part.worker,
                "phase": FUNCTIONS[part.phase],
                "inputs": [row_of(self.plan, v, r) for v, r in zip(reads, part.inputs, strict=True)],
                "outputs": [row_of(self.plan, v, r) for v, r in zip(gives, part.outputs, strict=True)],
            },
            part.worker,
        )
        self.converted.append(Converted(part, model, metadata))
        if self.form != "inputs":  # the pipeline's functions take weights as inputs
            written = onnx.ModelProto()
            written.CopyFrom(model)
            model = written
        expected = {v: _expect(r, x) for v, r, x in zip(gives, part.outputs, outputs, strict=True)}
        exact = functools.cache(lambda: call.run(in_stable_order(in_float64(part)), self.seed).flat())

        def verdict(difference: Difference, values: Mapping[str, Tensor]) -> Verdict:
            return "rounding" if rounding_alone(difference, values, expected, gives, exact) else "wrong"

        self._write(
            CheckedModel(
                name=part.name,
                model=model,
                weights=self._weights([Entry(v, part, r) for v, r in zip(reads, part.inputs, strict=True)]),
                inputs=dict(zip(reads, inputs, strict=True)),
                expected=expected,
                limit=tolerance(part.dtypes(), self.plan.precision.autocast),
                source=self.stages[part.worker].path.name,
                verdict=verdict,
            ),
            begun,
        )

    def _write(self, model: CheckedModel, begun: float) -> Difference | None:
        self.say(f"{model.name}: running it in onnxruntime")
        file, unstable = model.write(self.folder, self.form)
        self.files.append(replace(file, seconds=time.perf_counter() - begun))
        return unstable

    def _moved(self, outputs: Sequence[Entry[PartOutput]], expected: Mapping[str, Expected]) -> dict[str, float]:
        """How far a rounding error in every weight moves each output of the stages' own code."""
        values = {e.name: value for e, value in zip(outputs, self._again(outputs, rounded=True), strict=True)}
        return {d.output: d.error for d in compare(values, expected)}

    def _again(
        self, outputs: Sequence[Entry[PartOutput]], *, rounded: bool = False, exactly: bool = False
    ) -> list[Tensor]:
        """The stages' own outputs once more: from weights that are off by their last digit, or in float64."""
        state = self._state()
        if rounded:
            torch.manual_seed(self.seed)
            state |= {p.name: _rounded(state[p.name]) for p in self.plan.parameters}

        def function(worker: int, phase: Phase) -> Function:
            code = in_float64(self.ran[worker, phase]) if exactly else self.stages[worker].functions[phase]
            return in_stable_order(code)

        values = {}
        for call, result in run_microbatch(self.plan, function, state, self.batch, seed=self.seed, packed=not exactly):
            part = self.ran[call.worker, call.phase]
            values.update({(part.name, row.name): v for row, v in zip(part.outputs, result.flat(), strict=True)})
        return [values[e.part.name, e.row.name] for e in outputs]

    def _weights(self, entries: Sequence[Entry[PartInput]]) -> dict[str, Tensor]:
        """The initial values that may be in the model: a backward reads the new values of buffers, not these."""
        updated = {buffer.name for buffer in self.plan.buffers if buffer.home is not None}
        return {
            e.name: self.tensors[e.row.name]
            for e in entries
            if e.row.kind == "weight" or (e.row.kind == "buffer" and (e.part.phase == "F" or e.row.name not in updated))
        }

    def _example_of(self, entry: Entry[PartInput]) -> Tensor:
        if entry.row.kind == "batch":
            return self.batch[entry.row.name]
        if entry.row.kind == "weight":
            return self.tensors[entry.row.name]
        return self.example[entry.part.name, entry.row.name]

    def _convert(self, part: PurePart, reads: Sequence[str], gives: Sequence[str]) -> onnx.ModelProto:
        try:
            model = convert(part.graph, part.examples(), reads, gives, opset=self.opset)
        except FxpipeError as error:
            raise ExportError(f"{part.name}: {error.what}", where=error.where, hint=error.hint) from error
        return named(model, part.name, self.opset)


def _with_casts(part: PurePart, plan: Plan) -> PurePart:
    """The part with weights as the model has them: it casts those that stages take in another type."""
    whole = {p.name: p.tensor for p in plan.parameters if p.cast}
    inputs = tuple(
        replace(row, tensor=whole[row.name]) if row.kind == "weight" and row.name in whole else row
        for row in part.inputs
    )
    graph = copy_graph(part.graph.graph)
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, before, row in zip(holders, part.inputs, inputs, strict=True):
        if row != before:
            taken = node.meta["val"]
            node.meta["val"] = taken.to(getattr(torch, row.tensor.dtype))
            with graph.inserting_after(holders[-1]):
                cast = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": taken.dtype})
            cast.meta["val"] = taken
            node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
    return replace(part, graph=fx.GraphModule(part.graph, graph), inputs=inputs)


def _rounded(weight: Tensor) -> Tensor:
    """The weight, each element off by its last digit."""
    if not weight.is_floating_point():
        return weight
    return weight * (1 + torch.finfo(weight.dtype).eps * torch.randn_like(weight).sign())


def _expect(row: PartOutput, value: Tensor) -> Expected:
    return Expected(value, peers=row.kind, summed=row.kind == "gradient")
