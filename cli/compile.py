"""`fxpipe compile`: a model file in, a build directory out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from fxpipe.cli.output import emit_json, note, print_table, size, warn, working

from fxpipe.policy import POLICIES
from fxpipe.schedule import SCHEDULES

if TYPE_CHECKING:
    from fxpipe.agreement import Agreement
    from fxpipe.build import Build

# Of --verify, relative. Under autocast, eager dropout rounds its scale to bf16 and the captured operator does not.
TOLERANCE = {None: 1e-4, "bf16": 1e-1}


@click.command("compile")
@click.argument("model", type=click.Path(dir_okay=False))
@click.option("-n", "--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Number of stages.")
@click.option("-o", "--out", type=click.Path(), default="build", show_default=True, help="The build directory.")
@click.option("--fp-cut", multiple=True, metavar="PATH", help="Cut forward before this module; once for each boundary.")
@click.option("--bp-cut", multiple=True, metavar="PATH", help="Cut backward before this module; default: as forward.")
@click.option(
    "--schedule", type=click.Choice(sorted(SCHEDULES)), default="async", show_default=True, help="Order of the actions."
)
@click.option("--policy", type=click.Choice(sorted(POLICIES)), help="Which weights a pass sees. [default: by schedule]")
@click.option(
    "--microbatches",
    type=click.IntRange(min=1),
    help="Parts of a minibatch. [default: 1 for async, else a divisor of the batch near -n]",
)
@click.option("--autocast", type=click.Choice(["bf16"]), help="Run the step under torch.autocast.")
@click.option(
    "--cost",
    type=click.Choice(["measured", "analytic"]),
    default="measured",
    show_default=True,
    help="Where the times come from that the cuts balance.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where the workers compute. [default: the model's]")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of one worker. [default: cores / workers]")
@click.option("--seed", default=0, show_default=True, help="Seed of the initial weights.")
@click.option("--verify", is_flag=True, help="Compare one step of the emitted stages with eager PyTorch.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compile_command(
    model: str,
    workers: int,
    out: str,
    fp_cut: tuple[str, ...],
    bp_cut: tuple[str, ...],
    schedule: str,
    policy: str | None,
    microbatches: int | None,
    autocast: str | None,
    cost: Any,
    device: str | None,
    threads: int | None,
    seed: int,
    verify: bool,
    as_json: bool,
) -> int:
    """Cut the training step of MODEL into stages and write them as Python.

    Captures forward, loss and backward as one graph, chooses where forward and backward are cut, and writes
    stage_0.py, stage_1.py, … with their sends and receives to the build directory.

    \b
    fxpipe compile examples/gpt.py -n 2 -o build/ --verify
    fxpipe compile examples/gpt.py -n 2 --fp-cut blocks.4 --bp-cut blocks.3 -o build/
    fxpipe compile examples/gpt.py -n 4 --schedule 1f1b --microbatches 8 -o build/
    """
    import torch

    from fxpipe.agreement import compare_with_eager
    from fxpipe.allocator import reuse_freed_memory
    from fxpipe.batch import default_microbatches, to_device
    from fxpipe.folder import check_target
    from fxpipe.lowering import compile
    from fxpipe.runtime.local_run import threads_for
    from fxpipe.task import load_task, source_digests

    check_target(Path(out))
    reuse_freed_memory()
    with working("reading the model"):
        task = load_task(model)
        torch.manual_seed(seed)
        made = task.model()
        example = task.example()
        if device is not None:
            made, example = to_device(device, made, example)
    for warning in task.warnings:
        warn(warning)
    if microbatches is None:
        microbatches = 1 if schedule == "async" else default_microbatches(example, workers)
    with working("compiling"):
        build = compile(
            made,
            task.loss,
            example,
            workers=workers,
            microbatches=microbatches,
            schedule=schedule,
            policy=policy,
            forward_at=fp_cut,
            backward_at=bp_cut,
            autocast=autocast,
            cost=cost,
            threads=threads_for(threads, workers),
            command=_command(model, workers, fp_cut, bp_cut, schedule, microbatches, autocast),
        )
        build = dataclasses.replace(
            build, plan=dataclasses.replace(build.plan, sources=source_digests(Path(model)))
        ).save(out, model_file=model)
    for warning in build.warnings:
        warn(warning)
    agreement = None
    if verify:
        with working("verifying"):
            agreement = compare_with_eager(build, made, task.loss, example, seed=seed)
    limit = TOLERANCE[autocast]
    failed = agreement is not None and not agreement.largest <= limit
    if as_json:
        emit_json(_as_json(build, out, agreement))
    else:
        _print(build, out, agreement)
    if failed:
        note(f"error: the emitted stages differ from eager PyTorch by more than {limit:g}")
    return 1 if failed else 0


def _command(
    model: str,
    workers: int,
    fp_cut: tuple[str, ...],
    bp_cut: tuple[str, ...],
    schedule: str,
    microbatches: int,
    autocast: str | None,
) -> str:
    """The command that makes this build again, without the paths that differ from machine to machine."""
    parts = ["fxpipe compile", Path(model).name, f"-n {workers}"]
    parts += [f"--fp-cut {p}" for p in fp_cut] + [f"--bp-cut {p}" for p in bp_cut]
    parts += [f"--schedule {schedule}", f"--microbatches {microbatches}"]
    parts += [f"--autocast {autocast}"] if autocast else []
    return " ".join(parts)


def _print(build: Build, out: str, agreement: Agreement | None) -> None:
    plan = build.plan
    rows = [
        [
            f"worker {w.rank}",
            f"{w.begins[0]} ({w.forward_units[1] - w.forward_units[0]} units)",
            f"{w.begins[1]} ({w.backward_units[1] - w.backward_units[0]} units)",
            f"{w.forward_ms:.1f} ms",
            f"{w.backward_ms:.1f} ms",
            f"{w.owned} · {size(w.owned_bytes)}",
            f"{w.replicas} · {size(w.replica_bytes)}" if w.replicas else "–",
            size(w.bytes_in),
            size(w.bytes_out),
            size(w.memory_bytes),
        ]
        for w in build.workers
    ]
    headers = ["", "forward from", "backward from", "F", "B", "owns", "replicas", "in", "out", "memory"]
    print_table(headers, rows, left=3)
    step = [w.forward_ms + w.backward_ms for w in build.workers]
    balance = sum(step) / len(step) / max(step) if max(step) else 1.0
    click.echo(
        f"{plan.schedule} · {plan.policy} · {plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''} · "
        f"balance {balance:.2f} · {len(plan.edges)} edges"
    )
    if agreement is not None:
        name, error = agreement.worst_gradient
        click.echo(
            f"against eager PyTorch: loss {agreement.loss:.1e}, largest gradient error {error:.1e} ({name}), "
            f"largest buffer error {max(agreement.buffers.values(), default=0.0):.1e}"
        )
    click.echo(f"wrote {out}: {', '.join(s.file for s in plan.stages)}, plan.json, weights.safetensors")


def _as_json(build: Build, out: str, agreement: Agreement | None) -> dict[str, Any]:
    plan = build.plan
    result: dict[str, Any] = {
        "out": out,
        "schedule": plan.schedule,
        "policy": plan.policy,
        "microbatches": plan.microbatches,
        "forward_cuts": [plan.units[s.forward_units[0]] for s in plan.stages[1:]],
        "backward_cuts": [plan.units[s.backward_units[0]] for s in plan.stages[1:]],
        "workers": [dataclasses.asdict(w) for w in build.workers],
        "warnings": list(build.warnings),
    }
    if agreement is not None:
        result["verify"] = dataclasses.asdict(agreement)
    return result
