"""`fxpipe export`: the stages of a build as ONNX models, each run in onnxruntime before it is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpipe.cli.command import AbsolutePath, Command, group, option_fields
from fxpipe.cli.output import echo, print_columns, put, warn, working
from fxpipe.errors import ExportError
from fxpipe.inspection.table import COUNT, SIZE, TEXT, Column, Json, Kind, ShownTable, or_dash
from fxpipe.options import option
from fxpipe.plan.build_folder import model_path

if TYPE_CHECKING:
    from fxpipe.builds.build import Build
    from fxpipe.task.model_file import Task


@dataclass(frozen=True)
class ExportOptions:
    """What is exported, and where."""

    out: str = option("onnx", "-o", "--out", path="any", help="Folder for the models.")
    weights: Any = option(
        None,
        choices=("inputs", "initializers", "external"),
        help="Where weights are: inputs of the models, inside them, or in files next to them.",
    )
    opset: int = option(20, help="The ONNX operator set: 18 to 25.")
    inference: bool = option(False, help="Export the forward in eval mode (for any batch size), not the training step.")
    trained: str | None = option(
        None, path="any", metavar="FILE", help="Export these weights: the model.safetensors that a run left."
    )
    untrained: bool = option(False, help="Export the initial weights (with --inference).")
    model: str | None = option(None, path="file", help="The model file, if it has moved since the compile.")

    @property
    def form(self) -> Any:
        """Where weights are."""
        return self.weights or ("initializers" if self.inference else "inputs")

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if self.inference and self.weights == "inputs":
            raise click.UsageError(
                "--weights inputs is for training; an inference model has its weights: use initializers"
            )
        if self.trained is not None and self.form == "inputs":
            raise click.UsageError(
                "--trained needs models that hold weights: add --inference, or --weights initializers"
            )
        if self.trained is not None and self.untrained:
            raise click.UsageError("--trained and --untrained are different weights: give one of them")
        if self.inference and self.trained is None and not self.untrained:
            raise click.UsageError(
                "say which weights to serve: --trained out/model.safetensors, which a run wrote, "
                "or --untrained for the initial weights"
            )


@click.command("export", cls=Command)
@click.argument("build", type=AbsolutePath())
@group(
    "What to export",
    option_fields(ExportOptions, "inference", "trained", "untrained", "model"),
    first="inference trained untrained model",
)
@group(
    "Output",
    option_fields(ExportOptions, "out", "weights", "opset"),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    first="out as_json",
)
def export_command(build: str, as_json: bool, **option_values: Any) -> int:
    """Write the stages of a BUILD directory as ONNX models. Each is run in onnxruntime on the first batch of
    train_data() and compared with the stage's own code; if one of them is wrong, none is written.

    \b
    fxpipe export build/ -o onnx/
    fxpipe export build/ -o serve/ --inference --trained out/model.safetensors
    fxpipe export build/ -o onnx/ --weights external --json

    Writes stage_0.forward.onnx, stage_0.backward.onnx and so on: what each worker computes for one microbatch. Inputs
    and outputs are what it receives, sends and saves, named as in the build. Schedules with separate weight gradients
    (zb-v and others) also have stage_0.weights.onnx. pipeline.onnx is the whole training step, with each part of a
    stage as a function: open it in Netron to see the stages and the edges between them. The property "fxpipe" of each
    model describes every input and output. Dropout masks are inputs. An edited stage is exported with its edits. The
    default of --weights is inputs.

    With --inference: stage_0.inference.onnx and so on, the model file's forward in eval mode, with the build's cuts.
    The first stage takes the model's inputs, each further one the outputs of the stage before it; the last gives the
    model's outputs. Say which weights: --trained FILE, or --untrained. The default of --weights is initializers.
    """
    from fxpipe.export.target import check_export_target, check_opset, check_packages

    options = ExportOptions(**option_values)
    options.check()
    check_packages()
    check_opset(options.opset)
    check_export_target(options.out, inference=options.inference)
    with working("exporting") as say:
        source = _read(build, options, say)
        facts = (_export_inference if options.inference else _export)(*source, options, say)
    named = {"out": options.out, "opset": options.opset, "weights": options.form, "trained": options.trained}
    put({**named, **facts}, as_json, _print)
    return 0


def _export(build: Build, task: Task, batch: Any, options: ExportOptions, say: Callable[[str], None]) -> Json:
    from fxpipe.export.stages import export

    files = export(build, options.out, batch, weights=options.form, opset=options.opset, say=say, warn=warn)
    return {"error": max((f.error for f in files), default=0.0), "files": [dataclasses.asdict(f) for f in files]}


def _export_inference(build: Build, task: Task, batch: Any, options: ExportOptions, say: Callable[[str], None]) -> Json:
    import torch

    from fxpipe.export.inference import export_inference
    from fxpipe.plan.lock import replacing_alone
    from fxpipe.stages.loaded import is_edited
    from fxpipe.task.batch import to_device
    from fxpipe.tracing.held_tensors import HeldTensors

    model, batch = to_device("cpu", task.model(), batch)
    held = HeldTensors(model)
    with torch.no_grad():
        for names, value in zip(held.names, held.values, strict=True):
            value.copy_(build.tensors.get(names[0], value))
    edited = [s.file for s in build.plan.stages if is_edited(build.files[s.file].encode(), s)]
    if edited:
        warn(f"{', '.join(edited)} edited since the compile: the model file's forward is exported, without the edits")
    say("the forward in eval mode, stage by stage")
    with replacing_alone(Path(options.out)) as fresh:
        more: dict[str, Any] = {"plan": build.plan, "opset": options.opset, "weights": options.form}
        done = export_inference(model, task.loss, batch, fresh, **more, model_file=task.file)
        rows = [
            {"name": s.files[0], "nodes": s.nodes, "bytes": sum((fresh / f).stat().st_size for f in s.files)}
            for s in done.stages
        ]
    for warning in done.warnings:
        warn(warning)
    return {"error": done.error, "dynamic": done.dynamic, "batches": list(done.batches), "files": rows}


def _read(folder: str, options: ExportOptions, say: Callable[[str], None]) -> tuple[Build, Task, Any]:
    """The build with the weights to export, its model file and the first batch."""
    import torch

    from fxpipe.builds.build import load
    from fxpipe.export.trained import with_trained
    from fxpipe.plan.current import check_current
    from fxpipe.task.model_file import task_of_build

    build = load(folder)
    path = model_path(build.plan, folder, options.model)
    if path is None:
        raise ExportError(
            "the build was compiled from objects, so there is no file whose train_data() gives a batch to check with",
            where=folder,
            hint="give a file with --model, or use the Python API: fxpipe.export.stages.export(build, OUT, batch)",
        )
    check_current(build.plan, folder, options.model)
    if options.trained is not None:
        build = with_trained(build, options.trained)
    elif build.plan.weights.meta:
        raise ExportError(
            "the build has no values of its parameters (--meta)",
            where=folder,
            hint="export those of a run: --trained model.safetensors, with --inference or --weights initializers",
        )
    say("reading the example batch")
    torch.manual_seed(0)
    task = task_of_build(build.plan, folder, options.model)
    return build, task, task.example()


def _print(facts: Json) -> None:
    files = facts["files"]
    columns = (
        Column("file", "name", TEXT), Column("least exact output", "worst", TEXT), Column("nodes", "nodes", COUNT),
        Column("size", "bytes", SIZE), Column("relative error", "error", Kind(or_dash("{:.1e}".format))),
        Column("took", "seconds", Kind(or_dash("{:.1f} s".format))),
    )  # fmt: skip
    print_columns(ShownTable(columns, files).filled(), whole=True)
    echo()
    if "batches" in facts:
        sizes = ", ".join(map(str, facts["batches"]))
        echo(
            f"chained in onnxruntime: relative error {facts['error']:.1e} against eager PyTorch"
            + (f", with batches of {sizes}" if sizes else "")
        )
    echo(f"wrote {facts['out']}: {', '.join(f['name'] for f in files)}")
    if facts["weights"] != "inputs":
        echo(f"weights  {facts['trained'] or 'the initial ones, untrained'}")
