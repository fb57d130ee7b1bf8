"""State in buffers: evaluation carries it from batch to batch, on its own, as eager PyTorch would."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import stateful_model
import torch
from safetensors.torch import load_file
from several_runs import one_after_the_other
from stateful_model import BATCH, batches, loss, measured, metrics, model, optimizer

import fxpipe
from fxpipe.build.build import Build
from fxpipe.errors import RunError
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.local_run import run_local

STEPS, EPOCHS, EVERY = 4, 3, 3
FILE = f"""import sys
sys.path.insert(0, {str(Path(stateful_model.__file__).parent)!r})
from stateful_model import batches, loss, metrics, model, optimizer, reset

def train_data():
    return batches({STEPS}, 2)

def eval_data():
    return batches(4, 1)
"""


def compiled(evaluated: Any, **options: Any) -> Build:
    chosen = {"workers": 2, "cost": "analytic", "schedule": "1f1b", "microbatches": 1, **options}
    evaluation = (metrics, evaluated)
    return fxpipe.compile(model(), loss, batches(1, 0)[0], forward_at=["second"], evaluation=evaluation, **chosen)


def test_an_evaluation_carries_state_as_eager_does() -> None:
    """Batches of two shapes, between steps of training, which goes on with its own state."""
    held_out, steps = batches(5, 1, sizes=(BATCH, BATCH, 2)), batches(6, 2)
    build = compiled(held_out)
    assert not [w for w in build.warnings if "evaluation" in w]
    updates = [[stage.part.updates for stage in spec.stages] for spec in build.plan.evaluations]
    assert updates == [[("first.hidden", "first.cell"), ("second.hidden", "second.cell")]] * 2
    pipeline, net = build.local(optimizer=optimizer), model()
    trained, order_matters = optimizer(net.named_parameters()), False
    for batch in steps:
        trained.zero_grad()
        expected = loss(net, batch)
        expected.backward()
        trained.step()
        assert float(pipeline.step(batch)) == pytest.approx(expected.item(), rel=1e-6)
        pipeline.flush()
        mean = measured(net, held_out)
        assert pipeline.evaluate(held_out)["loss"] == pytest.approx(mean, rel=1e-6)
        order_matters |= mean != pytest.approx(measured(net, held_out[::-1]), rel=3e-5)
    assert order_matters


def run_of(folder: Path, name: str, **options: Any) -> RunOptions:
    file = folder / "model.py"
    if not file.exists():
        file.write_text(FILE)
        compiled(batches(4, 1)).save(folder / "build", model_file=file)
    return RunOptions(
        str(folder / "build"), out=str(folder / name), epochs=EPOCHS, eval_every=EVERY, threads=1, **options
    )


def followed(options: RunOptions) -> tuple[list[float], dict[int, float], dict[str, torch.Tensor]]:
    """The losses, the metrics by step, and the final weights."""
    assert options.out is not None
    rows = [json.loads(line) for line in (Path(options.out) / "metrics.jsonl").read_text().splitlines()]
    evaluated = {row["step"]: row["eval"]["loss"] for row in rows if "eval" in row}
    return [row["loss"] for row in rows if "loss" in row], evaluated, load_file(Path(options.out) / "model.safetensors")


def test_a_run_resets_state_as_an_eager_loop_does(tmp_path: Path) -> None:
    options = run_of(tmp_path, "run")
    summary = run_local(options)
    losses, evaluated, _ = followed(options)
    expected, measures = stateful_model.in_eager(batches(STEPS, 2), EPOCHS, batches(4, 1), EVERY)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert {**evaluated, STEPS * EPOCHS: summary["evaluation"]["loss"]} == pytest.approx(measures, rel=1e-6)
    forgetful = run_of(tmp_path, "forgetful", steps_per_epoch=1)
    run_local(dataclasses.replace(forgetful, epochs=None, steps=STEPS * EPOCHS))
    assert followed(forgetful)[0] != pytest.approx(expected, rel=1e-6), "the hook makes no difference"


def test_a_loop_of_ones_own_resets_state(tmp_path: Path) -> None:
    steps, held_out = batches(STEPS, 2), batches(4, 1)
    pipeline = compiled(held_out).local(optimizer=optimizer, reset=stateful_model.reset)
    measures: dict[int, float] = {}
    losses: list[float] = []
    for _ in range(EPOCHS):
        pipeline.reset()
        for batch in steps:
            losses.append(pipeline.step(batch))
            if pipeline.fed % EVERY == 0 or pipeline.fed == STEPS * EPOCHS:
                pipeline.flush()
                measures[pipeline.fed] = pipeline.evaluate(held_out)["loss"]
        pipeline.flush()
    expected = stateful_model.in_eager(steps, EPOCHS, held_out, EVERY)
    assert [float(loss) for loss in losses] == pytest.approx(expected[0], rel=1e-6)
    assert measures == pytest.approx(expected[1], rel=1e-6)
    pipeline.reset()
    assert all(not b.any() for e in pipeline.executors for n, b in e.buffers.items() if n.endswith(("hidden", "cell")))
    with pytest.raises(RunError, match="needs the hook"):
        compiled(held_out).local(optimizer=optimizer).reset()


@pytest.mark.slow
@pytest.mark.multiproc
def test_processes_reset_state_as_one(tmp_path: Path) -> None:
    """Synchronous and not, and going on from a checkpoint inside an epoch and at its start."""
    kinds: list[dict[str, Any]] = [
        {},
        {"schedule": "async", "policy": "spectrain"},
        {"schedule": "async", "policy": "stash"},
    ]
    kinds = [{**kind, "checkpoint_every": "1", "keep": 20} for kind in kinds]
    alone = [run_of(tmp_path, f"alone_{i}", **kind) for i, kind in enumerate(kinds)]
    apart = [run_of(tmp_path, f"apart_{i}", **kind) for i, kind in enumerate(kinds)]
    for options in alone:
        run_local(options)
    one_after_the_other(apart, 2, tmp_path)
    for number, (one, other) in enumerate(zip(alone, apart, strict=True)):
        losses, evaluated, weights = followed(one)
        losses_apart, evaluated_apart, weights_apart = followed(other)
        assert (losses_apart, evaluated_apart) == (losses, evaluated)
        assert all(torch.equal(weights_apart[name], value) for name, value in weights.items())
        for step in (STEPS, STEPS + 2):
            (found,) = (Path(str(one.out)) / "checkpoints").glob(f"*{step}")
            resumed = run_of(tmp_path, f"resumed_{number}_{step}", **kinds[number], resume=str(found))
            run_local(resumed)
            again = followed(resumed)
            assert again[0][-2:] == losses[-2:]
            assert all(torch.equal(again[2][name], value) for name, value in weights.items())
