"""How much of two cores a two-worker pipeline turns into training. See README.md beside this file.

Each round runs, one after the other: the pipeline (`async`, the default policy, two processes of one thread); and the
single thread: the same emitted functions with the optimizer step, forward and backward of both stages in turn, in one
process of one thread, with nothing communicated and nothing predicted. Efficiency is the pipeline's samples/s over
twice the single thread's; the median over the rounds is what counts. Then what microbatches cost, by the size of the
batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from microbatches import ROUNDS, WORKERS, costs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from commands import minibatch_seconds, run_fxpipe

HERE = Path(__file__).resolve().parent
GOAL = 0.93
BATCHES = (4, 8, 16, 32)


def compile_build(folder: Path) -> float:
    """Seconds of `fxpipe compile`, the interpreter's start included."""
    start = time.perf_counter()
    run_fxpipe("compile", HERE / "model.py", "-n", 2, "-o", folder, folder=folder.parent)
    return time.perf_counter() - start


def pipeline(folder: Path, steps: int) -> dict[str, Any]:
    """A run's summary; samples/s without the first steps, in which the pipeline fills and memory is first touched."""
    out = folder.parent / "out"
    options = ("--steps", steps, "--out", out, "--json")
    summary: dict[str, Any] = json.loads(run_fxpipe("run", folder, *options, folder=folder.parent))
    summary["rate"] = batch_size() / minibatch_seconds(out)
    return summary


def batch_size() -> int:
    sys.path.insert(0, str(HERE))
    import model

    return model.BATCH


def single_thread(folder: Path, steps: int) -> float:
    """Samples/s of the emitted functions on one thread, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--single", str(folder), "--steps", str(steps)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder.parent,
    )
    return float(done.stdout)


def run_single(folder: Path, steps: int) -> float:
    """The functions of all stages and the optimizer step, in turn, in this process."""
    import torch

    import fxpipe
    from fxpipe.runtime.process.device import reuse_freed_memory
    from fxpipe.task.model_file import load_task
    from fxpipe.task.splitter import Splitter

    reuse_freed_memory()  # as the workers do
    torch.set_num_threads(1)
    build = fxpipe.load(folder)
    functions = []
    for stage in build.plan.stages:
        scope: dict[str, Any] = {}
        exec(compile(build.files[stage.file], stage.file, "exec"), scope)
        functions.append((stage, scope["forward"], scope["backward"]))
    names = [leaf.name for leaf in build.plan.step.batch]
    split = Splitter(build.plan.step.batch, build.plan.step.batch_spec, 1)
    parameters = {p.name: torch.nn.Parameter(build.tensors[p.name]) for p in build.plan.parameters}
    task = load_task(HERE / "model.py")
    optimizer, data = task.optimizer(list(parameters.items())), task.train_data()

    class Mail(dict[str, torch.Tensor]):
        send = dict.__setitem__
        recv = dict.pop

    def step(batch: Any) -> None:
        leaves = dict(zip(names, split(batch, 0)[0], strict=True))
        mail, kept = Mail(), []
        for stage, forward, _ in functions:
            weights = [parameters[n] for n in stage.forward.weights]
            buffers = [build.tensors[n] for n in stage.forward.buffers]
            kept.append(forward(weights, buffers, [leaves[n] for n in stage.forward.batch], mail)[2])
        for (stage, _, backward), saved in reversed(list(zip(functions, kept, strict=True))):
            weights = [parameters[n] for n in stage.backward.weights]
            buffers = [build.tensors[n] for n in stage.backward.buffers]
            for name, gradient in zip(stage.backward.gradients, backward(weights, buffers, saved, mail), strict=True):
                parameters[name].grad = gradient
        optimizer.step()

    with torch.no_grad():
        for i in range(max(2, steps // 5)):
            step(data[i % len(data)])
        start = time.perf_counter()
        for i in range(steps):
            step(data[i % len(data)])
        return steps * batch_size() / (time.perf_counter() - start)


def executor_overhead(steps: int) -> float:
    """Microseconds that the executor itself spends on an action: the stage's functions and the update do nothing."""
    import torch

    import fxpipe
    from fxpipe.task.model_file import load_task

    task = load_task(HERE / "model.py")
    data = task.train_data()
    build = fxpipe.compile(task.model(), task.loss, data[0], workers=1, cost="analytic")
    pipeline = build.local(policy="latest")
    pipeline.step(data[0])
    executor = pipeline.executors[0]
    spec = build.plan.stages[0]
    loss = torch.zeros(())
    gradients = [torch.zeros_like(executor.store.parameters[name]) for name in spec.backward.gradients]
    saved = [None] * len(spec.forward.saved)
    nothing = {"F": lambda *_: (loss, (), saved), "B": lambda *_: gradients}
    object.__setattr__(executor.stages[0], "functions", nothing)
    executor.store.updater.apply = lambda minibatch: None  # type: ignore[method-assign]
    assert float(pipeline.step(data[0])) == 0.0, "the stage's own functions still run"
    for i in range(steps // 4):
        pipeline.step(data[i % len(data)])
    before = executor.watch.busy
    for i in range(steps):
        pipeline.step(data[i % len(data)])
    return (executor.watch.busy - before) / (2 * steps) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument(
        "--quick", action="store_true", help="1 round of 10 steps, kept nowhere: only to see that it runs"
    )
    parser.add_argument("--single", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.single:
        print(run_single(options.single, options.steps))
        return
    rounds, steps, actions = (1, 10, 40) if options.quick else (options.rounds, options.steps, 400)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "build"
        seconds = compile_build(folder)
        print(f"compile  {seconds:.1f} s (with the start of Python and torch)")
        rows = []
        for i in range(rounds):
            alone = single_thread(folder, steps // 2)
            summary = pipeline(folder, steps)
            rows.append({"single": alone, "pipeline": summary["rate"], "workers": summary["workers"]})
            ratio = summary["rate"] / (2 * alone)
            print(
                f"round {i + 1}  single {alone:.2f}  pipeline {summary['rate']:.2f} samples/s  efficiency {ratio:.3f}"
            )
    result = report(rows, seconds, executor_overhead(actions))
    result["microbatches"] = []
    print(f"\nmicrobatches, {WORKERS} workers: time of a minibatch against that of one microbatch")
    for row in costs(HERE / "model.py", (4,) if options.quick else BATCHES, 1 if options.quick else ROUNDS):
        result["microbatches"].append(row)
        ratios = ", ".join(
            f"{count}: {100 * (ratio - 1):+.1f} %" for count, ratio in row["ratios"].items() if count > 1
        )
        print(f"batch {row['batch']:2} × 128  {row['milliseconds']:.0f} ms  {ratios}")
    if not options.quick:
        (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")


def report(rows: list[dict[str, Any]], seconds: float, overhead: float) -> dict[str, Any]:
    """Print what was found; the result to keep."""
    efficiency = statistics.median(r["pipeline"] / (2 * r["single"]) for r in rows)
    print(f"\nefficiency {efficiency:.3f} (median of {len(rows)} rounds; goal {GOAL})")
    for rank in range(2):
        parts = {
            key: statistics.median(r["workers"][rank][key] for r in rows)
            for key in ("busy", "forward_ms", "backward_ms", "wait_ms")
        }
        text = ", ".join(f"{k.removesuffix('_ms')} {v:.2f}" + (" ms" if "_ms" in k else "") for k, v in parts.items())
        print(f"worker {rank}  {text}")
    action = statistics.median((w["forward_ms"] + w["backward_ms"]) / 2 for r in rows for w in r["workers"])
    print(f"executor  {overhead:.0f} µs of its own an action, {overhead / action / 10:.2f}% of it (goal: under 1%)")
    return {"efficiency": efficiency, "compile_seconds": seconds, "executor_us": overhead, "rounds": rows}


if __name__ == "__main__":
    main()
