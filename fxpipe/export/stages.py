"""A build's training step as ONNX models: one for each part of each stage, one for the whole pipeline.

stage_k.py ─pure─→ part ─convert─→ names, metadata, weights ─→ file ─onnxruntime─→ compared with the stage's code
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import onnx
import onnx.inliner
import torch
from torch import Tensor

import fxpipe
from fxpipe.backend.compare import NAN, Difference, Expected, tolerance
from fxpipe.backend.pure import Input, InputKind, Output, PurePart, trace_stage
from fxpipe.batch import Splitter
from fxpipe.build import Build
from fxpipe.errors import ExportError, FxpipeError
from fxpipe.export.check import check_file
from fxpipe.export.convert import convert
from fxpipe.export.pipeline import PREFIXES, Converted, Entry, assemble, first_names
from fxpipe.export.target import check_export_target, check_opset, check_packages
from fxpipe.folder import replacing
from fxpipe.plan import Plan
from fxpipe.planner.quantity import size
from fxpipe.runtime.layout import Layout
from fxpipe.runtime.loaded_stage import LoadedStage, load_stage

WeightsForm = Literal["inputs", "initializers", "external"]
OPSET = 20
LIMIT = 2**31 - 1
"""Bytes of the largest protocol buffer."""

PIPELINE = "pipeline"
_ALIGNMENT = 4096  # of a tensor in a file beside the model, so that it can be mapped
NAMES = (
    "weights, buffers, batch, saved values and edges have the names they have in the build; gradients are grad:NAME, "
    "new values of buffers new:NAME; where a name is taken already, the value's kind stands before it: saved:NAME"
)


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
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise ExportError("the build is for CUDA, and torch sees no CUDA device to run its stages on")
    if weights == "initializers":
        _check_size(PIPELINE, sum(build.tensors[name].nbytes for name in set(first_names(plan).values())), weights)
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


# ---- names and metadata ----


def names_of(part: PurePart) -> tuple[list[str], list[str]]:
    """Names for a part's inputs and outputs; see `NAMES`."""
    taken: set[str] = set()

    def free(kind: str, name: str) -> str:
        name = PREFIXES.get(kind, "") + name
        while name in taken:
            name = f"{kind}:{name}"
        taken.add(name)
        return name

    inputs = [free(row.kind, row.name) for row in part.inputs]
    # What is sent keeps its name, so that the other worker's model calls it the same.
    order = sorted(range(len(part.outputs)), key=lambda i: part.outputs[i].kind != "sent")
    outputs = {i: free(part.outputs[i].kind, part.outputs[i].name) for i in order}
    return inputs, [outputs[i] for i in range(len(part.outputs))]


def _row(plan: Plan, value: str, row_of: Input | Output) -> dict[str, Any]:
    """What the metadata says of an input or output."""
    kind, name = row_of.kind, row_of.name
    row: dict[str, Any] = {"value": value, "kind": kind, "name": name}
    if kind in ("sent", "received"):
        edge = next(e for e in plan.edges if e.name == name)
        row |= {"edge": edge.kind, **({"to": edge.dst} if kind == "sent" else {"from": edge.src})}
    if kind in ("weight", "gradient"):
        parameter = next(p for p in plan.parameters if name in p.names)
        row |= {"owner": parameter.owner, "trained": parameter.trained}
        if len(parameter.names) > 1:
            row["names"] = list(parameter.names)
    return row


def _in_words(row: Mapping[str, Any], worker: int | None) -> str:
    """The same for a reader of the graph."""
    kind = row["kind"]
    if kind == "received":
        return f"{row['edge']} received from worker {row['from']}"
    if kind == "sent":
        return f"{row['edge']} sent to worker {row['to']}"
    if kind == "weight":
        return "weight" if worker in (None, row["owner"]) else f"replica of a weight of worker {row['owner']}"
    known = {
        "buffer": "buffer",
        "batch": "leaf of the batch",
        "saved": "saved by forward for backward",
        "mask": "random numbers, drawn outside",
        "loss": "loss",
        "update": "new value of a buffer",
        "gradient": f"gradient of {row['name']}",
    }
    return known[kind]


def _note(model: onnx.ModelProto, body: Mapping[str, Any], worker: int | None) -> str:
    """Write what the model is into it; gives the text."""
    text = json.dumps(body, ensure_ascii=False)
    model.metadata_props.add(key="fxpipe", value=text)
    model.producer_name, model.producer_version = "fxpipe", fxpipe.__version__
    for infos, rows in ((model.graph.input, body["inputs"]), (model.graph.output, body["outputs"])):
        for info, row in zip(infos, rows, strict=True):
            info.doc_string = _in_words(row, worker)
    return text


def _about(plan: Plan, form: WeightsForm) -> dict[str, Any]:
    return {
        "version": fxpipe.__version__,
        "workers": plan.workers,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "policy": plan.policy,
        "weights": form,
        "naming": NAMES,
    }


# ---- the work ----


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
        for kinds, table, found in (
            (("mask", "buffer"), self.example, zip(part.inputs, inputs, strict=True)),
            (("loss", "gradient", "update"), self.expected, zip(part.outputs, expected, strict=True)),
        ):
            table.update({(part.name, row.name): value for row, value in found if row.kind in kinds})
        self.say(f"{part.name}: converting")
        reads, gives = names_of(part)
        model = self._convert(part, reads, gives)
        worker = part.worker
        metadata = _note(
            model,
            {
                **_about(self.plan, self.form),
                "stage": worker,
                "phase": "forward" if part.phase == "F" else "backward",
                "inputs": [_row(self.plan, v, r) for v, r in zip(reads, part.inputs, strict=True)],
                "outputs": [_row(self.plan, v, r) for v, r in zip(gives, part.outputs, strict=True)],
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
        limit = tolerance(_dtypes(part), self.plan.autocast)
        given = dict(zip(reads, inputs, strict=True))
        self._file(part.name, written, entries, given, rows, limit, stage.path.name, begun)

    def pipeline(self) -> None:
        """Write the model of all parts, run as a whole."""
        begun = time.perf_counter()
        self.say(f"{PIPELINE}: joining the stages")
        made = assemble(self.plan, self.converted)
        body = {
            **_about(self.plan, self.form),
            "inputs": [_row(self.plan, e.name, e.row) | {"part": e.part.name} for e in made.inputs],
            "outputs": [_row(self.plan, e.name, e.row) | {"part": e.part.name} for e in made.outputs],
        }
        _note(made.model, body, None)
        given = {e.name: self._example_of(e) for e in made.inputs}
        rows = {e.name: _expect(e.row, self.expected[e.part.name, e.row.name]) for e in made.outputs}
        limit = tolerance([dtype for c in self.converted for dtype in _dtypes(c.part)], self.plan.autocast)
        self.converted.clear()
        self._file(PIPELINE, made.model, made.inputs, given, rows, limit, "all stages", begun)

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

    def _run(self, part: PurePart, stage: LoadedStage, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The part's outputs as the emitted function computes them; what it sends, saves and updates is kept."""
        kinds: dict[str, list[Tensor]] = {kind: [] for kind in get_args(InputKind)}
        for row, value in zip(part.inputs, inputs, strict=True):
            kinds[row.kind].append(value)
        comm = _Comm(self.messages)
        third = kinds["batch"] if part.phase == "F" else list(kinds["saved"])
        function = stage.forward if part.phase == "F" else stage.backward
        torch.manual_seed(self.seed)  # the same masks
        result = function(tuple(kinds["weight"]), tuple(kinds["buffer"]), third, comm)
        if part.phase == "F":
            loss, updates, saved = result
            made = [*([] if loss is None else [loss]), *updates, *saved]
        else:
            made = list(result)
        made += [comm.sent[row.name] for row in part.outputs if row.kind == "sent"]
        for given, value in zip(part.outputs, made, strict=True):
            if given.kind == "sent":
                self.messages[given.name] = self.edges[given.name](value)  # as it comes off the wire
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
        found = {o.domain: o.version for o in model.opset_import}
        if found.get("") != self.opset:
            raise ExportError(
                f"{part.name} came out in opset {found.get('')}, not {self.opset}", hint="another --opset"
            )
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        model.graph.name = part.name
        return model

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
    ) -> None:
        """Write a model, run what was written, and note it, if it is right."""
        path = self.folder / f"{name}.onnx"
        held = {e.name: self.initial[self.first[e.row.name]] for e in entries if self._is_held(e)}
        beside = write(path, model, held, self.form)
        nodes = len(model.graph.node) + sum(len(f.node) for f in model.functions)
        outputs = len(model.graph.output)
        del model
        self.say(f"{name}: running it in onnxruntime")
        found = check_file(path, given, expected)
        wrong = [d for d in found if not d.error <= limit]
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
        worst = max(found, key=lambda d: d.error, default=Difference("", 0.0))
        taken = path.stat().st_size + (beside.stat().st_size if beside else 0)
        seconds = time.perf_counter() - begun
        self.files.append(ExportedFile(path.name, nodes, taken, worst.error, worst.output, seconds))


class _Comm:
    """The `comm` of stages that run one after the other."""

    def __init__(self, messages: Mapping[str, Tensor]) -> None:
        self.messages = messages
        self.sent: dict[str, Tensor] = {}

    def recv(self, name: str) -> Tensor:
        return self.messages[name]

    def send(self, name: str, value: Tensor) -> None:
        self.sent[name] = value


def _dtypes(part: PurePart) -> list[str]:
    return [*(row.tensor.dtype for row in part.inputs), *(row.tensor.dtype for row in part.outputs)]


def _expect(row: Output, value: Tensor) -> Expected:
    return Expected(value, peers=row.kind, summed=row.kind == "gradient")


# ---- files ----


def write(
    path: Path, model: onnx.ModelProto, weights: Mapping[str, Tensor], form: WeightsForm, limit: int | None = None
) -> Path | None:
    """Write a model, with those of its inputs that `weights` names in the given form.

    Returns:
        The file beside it that holds the weights, if there is one.

    Raises:
        ExportError: it would be larger than a protocol buffer can be.
    """
    limit = LIMIT if limit is None else limit
    beside = None
    if form != "inputs" and weights:
        kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
        kept = [value for value in model.graph.input if value.name not in weights]
        del model.graph.input[:]
        model.graph.input.extend(kept)
        if form == "external":
            beside = path.with_name(path.name + ".data")
            with open(beside, "wb") as file:
                for name, tensor in weights.items():
                    file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
                    offset, count = file.tell(), file.write(_bytes(tensor))
                    made = onnx.TensorProto(name=name, dims=tensor.shape, data_type=kinds[name])
                    made.data_location = onnx.TensorProto.EXTERNAL
                    for key, value in (("location", beside.name), ("offset", offset), ("length", count)):
                        made.external_data.add(key=key, value=str(value))
                    model.graph.initializer.append(made)
        else:
            _check_size(path.stem, model.ByteSize() + sum(t.nbytes for t in weights.values()), form, limit)
            for name, tensor in weights.items():
                made = onnx.TensorProto(name=name, dims=tensor.shape, data_type=kinds[name])
                made.raw_data = bytes(_bytes(tensor))
                model.graph.initializer.append(made)
    _check_size(path.stem, model.ByteSize(), form, limit)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return beside


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's elements in order."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data).cast("B") if flat.numel() else memoryview(b"")


def _check_size(name: str, count: int, form: WeightsForm, limit: int | None = None) -> None:
    limit = LIMIT if limit is None else limit
    if count > limit:
        raise ExportError(
            f"{name}.onnx would be {size(count)}, and an ONNX file holds at most {size(limit)}",
            hint="--weights external puts the weights into a file beside each model"
            if form == "initializers"
            else "more stages make smaller ones: constants in the code take this much",
        )
