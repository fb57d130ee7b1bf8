"""A build's training step as ONNX models: one for each part of each stage, one for the whole pipeline.

stage_k.py ─pure─→ part ─convert─→ names, metadata, weights ─→ file ─onnxruntime─→ compared with the stage's code
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import onnx
import torch
from torch import Tensor

from fxpipe.build.build import Build
from fxpipe.errors import ExportError, FxpipeError
from fxpipe.export.names import about, describe, first_names, names_of, row_of
from fxpipe.export.pipeline import Converted, Entry, assemble
from fxpipe.export.target import check_export_target, check_opset, check_packages
from fxpipe.files import replacing
from fxpipe.onnx.check import run_file
from fxpipe.onnx.convert import convert
from fxpipe.onnx.model_file import WeightsForm, check_size, named, write
from fxpipe.plan.packing import Layout
from fxpipe.plan.spec import Plan
from fxpipe.stages.compare import NAN, Difference, Expected, compare, rounding_alone, tolerance
from fxpipe.stages.loaded import LoadedStage, load_stage
from fxpipe.stages.microbatch import PartCall, run_exactly, run_part
from fxpipe.stages.pure_part import Input, InputKind, Output, PurePart, trace_stage
from fxpipe.task.batch import Splitter

OPSET = 20
PIPELINE = "pipeline"
SLACK = 3
"""How much more than a rounding error in every weight moves an output may the pipeline be off: each operator rounds."""


@dataclass(frozen=True)
class ExportedFile:
    """One model that was written, and how it compares with the stage's own code.

    Attributes:
        nodes: those of its functions count as well.
        bytes: with the file of weights beside it, if there is one.
        error: the largest relative error of an output in onnxruntime, on the example batch.
        worst: the output that has it.
        seconds: what the export took.
    """

    name: str
    nodes: int
    bytes: int
    error: float
    worst: str
    seconds: float


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
    """Write every part of every stage, and the pipeline, as ONNX models, each run and compared before it counts.

    The stages' files are what is exported: an edit is exported as well.

    Args:
        folder: an earlier export there is replaced; written whole or not at all.
        batch: one minibatch, as `train_data()` gives them; its first microbatch is what the models are run on.
        weights: 'inputs' of the models, as they are arguments of the stages; 'initializers': the build's initial
            weights, in the models; 'external': the same, in a file beside each model.
        opset: the version of ONNX's operators.
        seed: of dropout masks.
        say: is told what is being done.
        warn: is told of edited stages, and of parts that are not written as they compute nothing.

    Raises:
        ExportError: a model that cannot be made, or computes something else; a folder that holds something else.
        BackendError: a stage that is no plain tensor code, by an edit.
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
            "the build has no values of its parameters (--meta)",
            hint="give those of a run: --trained model.safetensors",
        )
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise ExportError("the build is for CUDA, and torch sees no CUDA device to run its stages on")
    if weights == "initializers":
        check_size(PIPELINE, sum(build.tensors[name].nbytes for name in set(first_names(plan).values())), weights)
    leaves = Splitter(plan.batch, plan.batch_spec, plan.microbatches, plan.device)(batch, 0)[0]
    values = dict(zip([leaf.name for leaf in plan.batch], leaves, strict=True))
    cuda = [torch.cuda.current_device()] if plan.device == "cuda" else []
    with (
        _stage_files(build) as source,
        replacing(Path(folder)) as fresh,
        torch.random.fork_rng(cuda),
        torch.no_grad(),
    ):
        job = _Job(plan, build.tensors, values, fresh, weights, opset, seed, say)
        backwards: list[tuple[PurePart, LoadedStage]] = []
        for worker, spec in enumerate(plan.stages):
            say(f"stage_{worker}: tracing")
            stage = load_stage(source / spec.file, spec)
            if stage.edited:
                warn(f"{spec.file} was edited since it was compiled; the edit is what is exported")
            forward, backward = trace_stage(plan, worker, stage)
            job.part(forward, stage)
            backwards.append((backward, stage))
        while backwards:
            job.part(*backwards.pop())
        for name in job.empty:
            warn(f"{name} computes nothing, so there is no file of it")
        job.pipeline()
        if job.shaky:
            warn(
                f"{PIPELINE}.onnx is off by {job.shaky.error:.1e} on this batch, and so are the stages themselves: "
                f"a rounding error in each weight moves {job.shaky.output} as far"
            )
        return sorted(job.files, key=lambda f: (f.name.startswith(PIPELINE), _stage_order(f.name)))


@contextmanager
def _stage_files(build: Build) -> Iterator[Path]:
    """A folder with the build's stages."""
    if build.folder is not None:
        yield build.folder
        return
    with tempfile.TemporaryDirectory(prefix="fxpipe_build_") as temporary:
        for name, text in build.files.items():
            (Path(temporary) / name).write_text(text)
        yield Path(temporary)


def _stage_order(name: str) -> tuple[int, bool]:
    stage, _, phase = name.removesuffix(".onnx").partition(".")
    return int(stage.rpartition("_")[2]) if stage[-1].isdigit() else 0, phase == "backward"


class _Job:
    """One export: runs the stages one after the other on the example, and makes a file of each part."""

    def __init__(
        self,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        folder: Path,
        form: WeightsForm,
        opset: int,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.form: WeightsForm = form
        self.opset = opset
        self.seed = seed
        self.say = say
        self.first = first_names(plan)
        self.updated = {buffer.name for buffer in plan.buffers if buffer.home is not None}
        self.initial = tensors
        self.state = {name: tensors[name].to(plan.device) for name in set(self.first.values())}
        self.batch = batch
        self.edges = {e.name: Layout(e.tensor, e.name) for e in plan.edges}
        self.messages: dict[str, Tensor] = {}
        self.saved: dict[tuple[int, str], Tensor] = {}
        self.files: list[ExportedFile] = []
        self.empty: list[str] = []
        self.converted: list[Converted] = []
        self.ran: list[tuple[PurePart, LoadedStage]] = []
        self.shaky: Difference | None = None  # the output that is off more than it should be, for no fault of its own
        self.example: dict[tuple[str, str], Tensor] = {}  # (part, row) → what the pipeline is run on
        self.expected: dict[tuple[str, str], Tensor] = {}  # and what it should give

    def part(self, part: PurePart, stage: LoadedStage) -> None:
        """Run a part by its emitted code, and write its file."""
        begun = time.perf_counter()
        if not part.outputs:
            self.empty.append(part.name)
            return
        inputs = self._inputs(part)
        expected = self._run(part, stage, inputs)
        self.ran.append((part, stage))
        for kinds, table, found in (
            (("mask", "buffer"), self.example, zip(part.inputs, inputs, strict=True)),
            (("loss", "gradient", "update"), self.expected, zip(part.outputs, expected, strict=True)),
        ):
            table.update({(part.name, row.name): value for row, value in found if row.kind in kinds})
        self.say(f"{part.name}: converting")
        reads, gives = names_of(part)
        model = self._convert(part, reads, gives)
        worker = part.worker
        metadata = describe(
            model,
            {
                **about(self.plan, self.form),
                "stage": worker,
                "phase": "forward" if part.phase == "F" else "backward",
                "inputs": [row_of(self.plan, v, r) for v, r in zip(reads, part.inputs, strict=True)],
                "outputs": [row_of(self.plan, v, r) for v, r in zip(gives, part.outputs, strict=True)],
            },
            worker,
        )
        self.converted.append(Converted(part, model, metadata))
        written = model
        if self.form != "inputs":
            written = onnx.ModelProto()
            written.CopyFrom(model)  # the pipeline's functions take weights as inputs
        entries = [Entry(v, part, r) for v, r in zip(reads, part.inputs, strict=True)]
        rows = {v: _expect(r, x) for v, r, x in zip(gives, part.outputs, expected, strict=True)}
        limit = tolerance(part.dtypes(), self.plan.autocast)
        given = dict(zip(reads, inputs, strict=True))
        exact = functools.cache(lambda: run_exactly(part, _call(part, inputs), self.seed))

        def excuse(difference: Difference, values: Mapping[str, Tensor]) -> bool:
            return rounding_alone(difference, values, rows, gives, exact)

        self._file(part.name, written, entries, given, rows, limit, stage.path.name, begun, excuse)

    def pipeline(self) -> None:
        """Write the model of all parts, run as a whole."""
        begun = time.perf_counter()
        self.say(f"{PIPELINE}: joining the stages")
        made = assemble(self.plan, self.converted)
        body = {
            **about(self.plan, self.form),
            "inputs": [row_of(self.plan, e.name, e.row) | {"part": e.part.name} for e in made.inputs],
            "outputs": [row_of(self.plan, e.name, e.row) | {"part": e.part.name} for e in made.outputs],
        }
        describe(made.model, body, None)
        given = {e.name: self._example_of(e) for e in made.inputs}
        rows = {e.name: _expect(e.row, self.expected[e.part.name, e.row.name]) for e in made.outputs}
        limit = tolerance([dtype for c in self.converted for dtype in c.part.dtypes()], self.plan.autocast)
        self.converted.clear()
        names = [e.name for e in made.outputs]
        exact = functools.cache(lambda: self._again(made.outputs, exactly=True))
        moved = functools.cache(lambda: self._moved(made.outputs, rows))

        def excuse(difference: Difference, values: Mapping[str, Tensor]) -> bool:
            if rounding_alone(difference, values, rows, names, exact):
                return True
            excused = difference.error <= SLACK * moved().get(difference.output, 0.0)
            if excused and (self.shaky is None or difference.error > self.shaky.error):
                self.shaky = difference
            return excused

        self._file(PIPELINE, made.model, made.inputs, given, rows, limit, "all stages", begun, excuse)

    def _moved(self, outputs: Sequence[Entry[Output]], rows: Mapping[str, Expected]) -> dict[str, float]:
        """How far a rounding error in every weight moves each output of the stages' own code.

        Deep networks with batch norm over few values move by far more than one part adds: each part was right alone.
        """
        found = {e.name: value for e, value in zip(outputs, self._again(outputs, rounded=True), strict=True)}
        return {d.output: d.error for d in compare(found, rows)}

    def _again(self, outputs: Sequence[Entry[Output]], *, rounded: bool = False, exactly: bool = False) -> list[Tensor]:
        """The stages' own outputs once more: from weights that are off by their last digit, or in float64."""
        torch.manual_seed(self.seed)
        weights = {self.first[name] for p in self.plan.parameters for name in p.names}
        self.state = {n: self.initial[n].to(self.plan.device) for n in self.state}
        if rounded:
            self.state |= {n: _rounded(self.state[n]) for n in weights}
        made = {}
        for part, stage in self.ran:
            values = self._run(part, stage, self._inputs(part), exactly)
            made.update({(part.name, row.name): v for row, v in zip(part.outputs, values, strict=True)})
        return [made[e.part.name, e.row.name] for e in outputs]

    def _is_held(self, entry: Entry[Input]) -> bool:
        """Whether its initial value may stand in the model: backward reads the new values of buffers, not these."""
        if entry.row.kind == "buffer":
            return entry.part.phase == "F" or self.first[entry.row.name] not in self.updated
        return entry.row.kind == "weight"

    def _example_of(self, entry: Entry[Input]) -> Tensor:
        if entry.row.kind == "batch":
            return self.batch[entry.row.name]
        if entry.row.kind == "weight":
            return self.state[self.first[entry.row.name]]
        return self.example[entry.part.name, entry.row.name]

    def _inputs(self, part: PurePart) -> list[Tensor]:
        torch.manual_seed(self.seed)
        masks = iter([draw(part.device) for draw in part.draws])

        def value(row: Input) -> Tensor:
            if row.kind in ("weight", "buffer"):
                return self.state[self.first[row.name]]
            if row.kind == "batch":
                return self.batch[row.name]
            if row.kind == "saved":
                return self.saved[part.worker, row.name]
            return next(masks) if row.kind == "mask" else self.messages[row.name]

        return [value(row) for row in part.inputs]

    def _run(self, part: PurePart, stage: LoadedStage, inputs: Sequence[Tensor], exactly: bool = False) -> list[Tensor]:
        """The part's outputs as the emitted function computes them; what it sends, saves and updates is kept."""
        call = _call(part, inputs)  # and the same masks every time
        if exactly:
            made = run_exactly(part, call, self.seed)
        else:
            made = run_part(part, _function(part, stage), call, self.seed)
        for given, value in zip(part.outputs, made, strict=True):
            if given.kind == "sent":
                self.messages[given.name] = value if exactly else self.edges[given.name](value)  # as off the wire
            elif given.kind == "saved":
                self.saved[part.worker, given.name] = value
            elif given.kind == "update":
                self.state[self.first[given.name]] = value
        return made

    def _convert(self, part: PurePart, reads: Sequence[str], gives: Sequence[str]) -> onnx.ModelProto:
        try:
            model = convert(part.graph, part.examples(), reads, gives, opset=self.opset)
        except FxpipeError as error:
            raise ExportError(f"{part.name}: {error.what}", where=error.where, hint=error.hint) from error
        return named(model, part.name, self.opset)

    def _file(
        self,
        name: str,
        model: onnx.ModelProto,
        entries: Sequence[Entry[Input]],
        given: Mapping[str, Tensor],
        expected: Mapping[str, Expected],
        limit: float,
        where: str,
        begun: float,
        excuse: Callable[[Difference, Mapping[str, Tensor]], bool],
    ) -> None:
        """Write a model, run what was written, and note it, if it is right.

        Args:
            excuse: whether an output of those found that is off by more than the limit is so by rounding alone.
        """
        path = self.folder / f"{name}.onnx"
        held = {e.name: self.initial[self.first[e.row.name]] for e in entries if self._is_held(e)}
        beside = write(path, model, held, self.form)
        nodes = len(model.graph.node) + sum(len(f.node) for f in model.functions)
        outputs = len(model.graph.output)
        del model
        self.say(f"{name}: running it in onnxruntime")
        values = run_file(path, given)
        found = compare(values, expected)
        wrong = [d for d in found if not d.error <= limit and not excuse(d, values)]
        if wrong or outputs != len(expected):
            raise ExportError(
                f"{path.name} does not compute what the stage's own code computes: "
                + "; ".join(map(str, wrong[:5]))
                + (f"; and {len(wrong) - 5} more outputs" if len(wrong) > 5 else ""),
                where=where,
                hint="nothing was written; look at the batch and at the initial weights"
                if any(d.reason == NAN for d in wrong)
                else "nothing was written; this is a defect of the export: please report it with the model",
            )
        counted = [d for d in found if d.error <= limit or d is self.shaky]  # the others are eager's rounding
        worst = max(counted, key=lambda d: d.error, default=Difference("", 0.0))
        taken = path.stat().st_size + (beside.stat().st_size if beside else 0)
        seconds = time.perf_counter() - begun
        self.files.append(ExportedFile(path.name, nodes, taken, worst.error, worst.output, seconds))


def _function(part: PurePart, stage: LoadedStage) -> Callable[..., Any]:
    return stage.forward if part.phase == "F" else stage.backward


def _call(part: PurePart, inputs: Sequence[Tensor]) -> PartCall:
    """A part's inputs as its function takes them."""
    kinds: dict[str, list[Tensor]] = {kind: [] for kind in get_args(InputKind)}
    for row, value in zip(part.inputs, inputs, strict=True):
        kinds[row.kind].append(value)
    received = [row.name for row in part.inputs if row.kind == "received"]
    third = kinds["batch"] if part.phase == "F" else kinds["saved"]
    return PartCall(
        tuple(kinds["weight"]),
        tuple(kinds["buffer"]),
        list(third),
        dict(zip(received, kinds["received"], strict=True)),
    )


def _rounded(weight: Tensor) -> Tensor:
    """The weight, each element off by its last digit."""
    if not weight.is_floating_point():
        return weight
    return weight * (1 + torch.finfo(weight.dtype).eps * torch.randn_like(weight).sign())


def _expect(row: Output, value: Tensor) -> Expected:
    return Expected(value, peers=row.kind, summed=row.kind == "gradient")
