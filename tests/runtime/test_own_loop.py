"""A user's own loop: the same numbers with all workers in one process and with one in each, whatever is called when."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from counted_notes import COUNTING
from own_loops import halving, in_processes, optimizer, play, random_calls
from small_models import CASES

import fxpipe
from fxpipe.device_copies import ToCpu
from fxpipe.errors import BuildError, CheckpointError, FxpipeError, RunError
from fxpipe.plan.lock import run_lock
from fxpipe.runtime.wires import group

THREE = {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True}
LOOPS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"schedule": "async", "policy": "stash"}, {"clip_norm": 0.5}),
    ({"schedule": "async", "policy": "spectrain+ef", "microbatches": 2}, {}),
    ({"schedule": "async", "policy": "vertical"}, {"ema": 0.9}),
    ({"schedule": "async-late", "policy": "spectrain", "microbatches": 4}, {"clip_norm": 0.5}),
    ({"schedule": "1f1b", "microbatches": 4}, {"clip_norm": 0.5}),
    ({"schedule": "async", "policy": "pipeoptim", "dropout": True, "tied": False}, {}),
    ({"schedule": "1f1b", "microbatches": 4, "weights_codec": "lowrank:2"}, {}),
]


@pytest.fixture
def many() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(2, 4, 6, dtype=torch.float64, generator=generator)) for _ in range(7)]  # type: ignore[misc]


def locally(build: Path, calls: Any, batches: Any, folder: Path, **options: Any) -> Any:
    with fxpipe.load(build).local(optimizer=optimizer, lr_scheduler=halving, **options) as pipeline:
        found = play(pipeline, calls, batches, folder)
        return found, pipeline.state_dict()


@pytest.mark.slow
@pytest.mark.multiproc
def test_processes_train_as_one(toy: Any, many: Any, tmp_path: Path) -> None:
    torch.save(many, tmp_path / "batches.pt")
    loops, expected = [], []
    for number, (built, options) in enumerate(LOOPS):
        build = toy(**{**THREE, **built}).save(tmp_path / f"build_{number}")
        flushes = [("flush",)] if built["schedule"].startswith("async") else []
        calls = random_calls(random.Random(number), 30, flushes=bool(flushes))
        calls += [("save",), ("step",), ("step",), *flushes, ("load",), ("step",), ("step",)]
        loops.append({"build": str(build), "calls": calls, "options": options, "batches": str(tmp_path / "batches.pt")})
        expected.append(locally(build, calls, many, tmp_path / f"local_{number}", **options))
    for (found, weights), (alone, state), loop in zip(in_processes(loops, 3, tmp_path), expected, loops, strict=True):
        assert found == [alone] * 3, loop
        for name, weight in weights.items():
            assert torch.equal(weight, state[name]), (name, loop)
        assert weights.keys() == state.keys()


def test_rates_are_set_from_a_minibatch_on(toy: Any, many: Any, tmp_path: Path) -> None:
    """Under a schedule without a flush, too: those in flight are updated as they were fed."""
    build = toy(**THREE, policy="latest").save(tmp_path / "build")
    plain = fxpipe.load(build).local(optimizer=optimizer)
    rates: list[list[float]] = [[], [], []]
    for executor in plain.executors:
        updater = executor.store.updater
        inner = updater.apply

        def step(minibatch: int, inner: Any = inner, updater: Any = updater, of: Any = rates[executor.worker]) -> None:
            inner(minibatch)
            of.append(updater.lr)

        updater.apply = step  # type: ignore[method-assign]
    for number, batch in enumerate(many):
        if number == 3:
            plain.set_lr(0.02, 0.03)
            assert plain.learning_rates == [0.02, 0.03]
        plain.step(batch)
    plain.flush()
    assert rates == [[0.1] * 3 + [0.02] * 4] * 2 + [[None] * 7], "the last worker trains nothing"
    with pytest.raises(RunError, match="3 learning rates were given, and the optimizer has 2 groups"):
        plain.set_lr(1, 2, 3)
    with pytest.raises(RunError, match="a learning rate of -1 makes no sense"):
        plain.set_lr(-1)


def test_one_loop_at_a_time_saves_into_a_folder(toy: Any, many: Any, tmp_path: Path) -> None:
    build = fxpipe.load(toy(**THREE, policy="latest").save(tmp_path / "build"))
    saving: dict[str, Any] = {"optimizer": optimizer, "out": tmp_path / "out", "checkpoint_every": 2}

    def fails() -> None:
        with build.local(**saving) as pipeline:
            pipeline.run(many[:3])
            with pytest.raises(BuildError, match="is being written by this process, in another call"):
                build.local(**saving)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not run_lock(tmp_path / "out").exists()


def test_a_worker_of_a_run_begins_no_pipeline(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its collective calls would be the run's."""
    build = fxpipe.load(toy(**THREE).save(tmp_path / "build"))
    monkeypatch.setattr(group, "_group", object())
    with pytest.raises(RunError, match="this process is one of a run that has not ended"):
        build.local(optimizer=optimizer)


@pytest.mark.parametrize("number", range(0, len(LOOPS), 2))
def test_saved_and_loaded(toy: Any, many: Any, tmp_path: Path, number: int) -> None:
    built, options = LOOPS[number]
    build = toy(**{**THREE, **built}).save(tmp_path / "build")
    with fxpipe.load(build).local(optimizer=optimizer, lr_scheduler=halving, **options) as whole:
        whole.run(many[:4])
        whole.set_lr(0.07)
        whole.save(tmp_path / "saved")
        whole.step(many[4])
        whole.save(tmp_path / "saved")  # in place of the first
        expected = whole.run(many[5:])
        state = whole.state_dict()
    fresh = fxpipe.load(build).local(optimizer=optimizer, lr_scheduler=halving, **options)
    fresh.run(many)
    fresh.load(tmp_path / "saved")
    assert fresh.fed == 5
    assert fresh.run(many[5:]) == expected
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in state.items())
    resumed = fxpipe.load(build).local(optimizer=optimizer, lr_scheduler=halving, resume=tmp_path / "saved", **options)
    assert resumed.run(many[5:]) == expected
    with pytest.raises(CheckpointError, match="has weights, but no training state"):
        fresh.load(build / "weights.safetensors")


@pytest.mark.parametrize("place", ["notes.txt", "work", "saved"])
def test_a_checkpoint_deletes_nothing_of_the_users(toy: Any, tmp_path: Path, place: str) -> None:
    """Also an earlier checkpoint with a file of the user's in it."""
    pipeline = fxpipe.load(toy(**THREE).save(tmp_path / "build")).local(optimizer=optimizer)
    pipeline.save(tmp_path / "saved")
    note = tmp_path / place if place == "notes.txt" else tmp_path / place / "notes.txt"
    note.parent.mkdir(exist_ok=True)
    note.write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt, which a checkpoint would delete"):
        pipeline.save(tmp_path / place)
    assert note.read_text() == "mine"


def test_what_is_no_batches_is_not_run(toy: Any, tmp_path: Path) -> None:
    pipeline = fxpipe.load(toy(**THREE).save(tmp_path / "build")).local(optimizer=optimizer)
    with pytest.raises(RunError, match=r"run\(\) trains on batches: 'int' object is not iterable"):
        pipeline.run(5)  # type: ignore[arg-type]


def test_what_is_in_flight_is_not_loaded_over(toy: Any, many: Any, tmp_path: Path) -> None:
    fresh = fxpipe.load(toy(**THREE).save(tmp_path / "build")).local(optimizer=optimizer)
    fresh.save(tmp_path / "saved")
    fresh.step(many[0])
    with pytest.raises(RunError, match=r"load\(\) was called while minibatches are in flight"):
        fresh.load(tmp_path / "saved")


def test_a_plateau_in_the_loop(evaluated: Path, tmp_path: Path) -> None:
    """The rate falls where an evaluation says so, from the next update on, though one saves and loads between."""

    def plateau(made: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            made, "min", 0.5, 0, threshold=100, threshold_mode="abs"
        ), "loss"

    batches, held_out = torch.load(evaluated / "data.pt")
    one, other = (fxpipe.load(evaluated / "build").local(optimizer=optimizer, lr_scheduler=plateau) for _ in range(2))
    for _ in range(3):
        one.run(batches)
        one.evaluate(held_out)
        one.evaluate(held_out)  # of the same weights: no other step
    one.save(tmp_path / "saved")
    assert one.learning_rates == [0.05, 0.05], "the second evaluation was no better, the third is yet to count"
    other.load(tmp_path / "saved")
    assert one.run(batches) == other.run(batches)
    assert one.learning_rates == other.learning_rates == [0.025, 0.025]
    wrong = fxpipe.load(evaluated / "build").local(lr_scheduler=lambda made: (plateau(made)[0], "lss"))
    wrong.run(batches)
    with pytest.raises(FxpipeError, match="waits for the unknown metric 'lss'"):
        wrong.evaluate(held_out)


def test_an_error_in_the_loop_leaves_what_is_in_flight(toy: Any, many: Any, tmp_path: Path) -> None:
    build = toy(**THREE).save(tmp_path / "build")
    pipeline = fxpipe.load(build).local(optimizer=optimizer)

    def loop() -> None:
        with pipeline:
            pipeline.step(many[0])
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        loop()
    assert pipeline.executors[0].store.version < pipeline.fed


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = CASES["gpt"]
    batches = case.batches(4)
    evaluation = (lambda model, batch: {"loss": case.loss(model, batch)}, batches[:2])
    folder = tmp_path_factory.mktemp("build")
    torch.save((batches, batches[:2]), folder / "data.pt")

    fxpipe.compile(case.make(), case.loss, batches[0], cost="analytic", evaluation=evaluation).save(folder / "build")
    return folder


@pytest.mark.parametrize("name", ["steps", "eval_every", "save_best"])
def test_what_is_the_loops_own(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"{name} is no option of fxpipe.join"):
        fxpipe.join(tmp_path, **{name: 1})


def test_joining_takes_torchrun(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    build = toy(**THREE).save(tmp_path / "build")
    with pytest.raises(FxpipeError, match="was not started by torchrun"):
        fxpipe.join(build)


SCRIPT = """
import os, sys, time, torch, fxpipe
from fxpipe.errors import FxpipeError

def say(text):  # a line in one write: the workers share one pipe
    os.write(1, f"{{text}}\\n".encode())

rank = int(os.environ["RANK"])
generator = torch.Generator().manual_seed(3)
batches = [tuple(torch.randn(2, 4, 6, dtype=torch.float64, generator=generator)) for _ in range(4)]
try:
    with fxpipe.join({build!r}, threads=1) as pipeline:
        {body}
except FxpipeError as error:
    say(f"worker {{rank}}: {{type(error).__name__}}: {{error.what}}")
say(f"worker {{rank}} is over")
time.sleep(2)  # the others find it alive
os._exit(0)
"""
BODIES = {
    "another call": (
        "pipeline.step(batches[0]); pipeline.flush() if rank == 1 else pipeline.step(batches[1])",
        "worker 1: RunError: worker 1 calls flush(), but worker 0 calls step()",
    ),
    "another rate": (
        "pipeline.set_lr(0.1 * (1 + rank))",
        "worker 1: RunError: the workers set different learning rates: [[0.1], [0.2], [0.30000000000000004]]",
    ),
    "no flush": (
        "pipeline.step(batches[0]); pipeline.load('nowhere')",
        "worker 2: RunError: load() was called while minibatches are in flight",
    ),
    "fewer steps": (
        "[pipeline.step(batch) for batch in batches[: 4 - (rank == 1)]]",
        "worker 1: RunError: worker 1 calls close(), but worker 0 calls step()",
    ),
}
REFUSING = """
        losses = []
        for batch in [batches[0], (batches[0][0][:3], batches[0][1][:3]), batches[1]]:
            try:
                losses.append(pipeline.step(batch))
            except FxpipeError as error:
                say(f"worker {rank}: {type(error).__name__}")
        say(f"worker {rank}: {[float(loss) for loss in losses]}")
"""

TELLING = indent(COUNTING + 'pipeline.run(batches)\nsay(f"worker {rank}: {dict(told)}")\n', " " * 8)


def torchrun(folder: Path, workers: int, code: str) -> tuple[int, str]:
    script = folder / "train.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*command, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("name", BODIES)
def test_calls_that_differ_are_told(toy: Any, tmp_path: Path, name: str) -> None:
    body, expected = BODIES[name]
    build = toy(**THREE).save(tmp_path / "build")
    _, written = torchrun(tmp_path, 3, SCRIPT.format(build=str(build), body=body))
    assert expected in written
    assert all(f"worker {rank} is over" in written for rank in range(3)), written


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_batch_that_is_refused_is_refused_by_all(toy: Any, many: Any, tmp_path: Path) -> None:
    build = toy(**THREE).save(tmp_path / "build")
    code, written = torchrun(tmp_path, 3, SCRIPT.format(build=str(build), body=REFUSING.strip()))
    losses = fxpipe.load(build).local().run(many[:2])
    assert code == 0, written
    for rank in range(3):
        assert f"worker {rank}: BatchError\n" in written
        assert f"worker {rank}: {losses}\n" in written


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_call_is_one_note_to_the_next_and_a_loss_one_to_each(toy: Any, tmp_path: Path) -> None:
    build = toy(**THREE).save(tmp_path / "build")
    code, written = torchrun(tmp_path, 3, SCRIPT.format(build=str(build), body=TELLING.strip()))
    assert code == 0, written
    for rank, told in enumerate([{"call": 5}, {"call": 5}, {"loss": 8}]):  # four steps and a flush
        assert f"worker {rank}: {told}\n" in written


def test_a_step_waits_for_no_loss_that_is_not_read(
    toy: Any, many: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA to read one is to wait for the device; the scalar that a step returns stays there."""
    reads: list[torch.Tensor] = []
    monkeypatch.setattr(ToCpu, "read", lambda self: reads.append(self._value) or self._value)
    with fxpipe.load(toy().save(tmp_path / "build")).local(optimizer=optimizer, lr_scheduler=halving) as pipeline:
        losses = [pipeline.step(batch) for batch in many[:3]]
        assert not reads
        assert pipeline.metrics == {}
        assert [float(found) for found in reads] == [float(losses[-1])]
