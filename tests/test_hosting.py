"""Processes with several workers each: all that belongs to a run, to the bit as with one worker in each process."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from evaluated import build_of, write_evaluated
from several_runs import one_after_the_other

from fxpipe import load
from fxpipe.observe.trace.reader import read_trace
from fxpipe.plan.build_folder import read_plan
from fxpipe.policy.recipe import choose
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import launch
from fxpipe.runtime.process.local_run import run_local

FOLDED, ROUNDS = (0, 1, 1, 0), (0, 1, 0, 1)
STEPS = 8
CALLBACKS = """

def lr_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step // 2))


def on_step(step, loss, run):
    if step == 2:
        run.set_lr(0.5 * (1 + loss - loss))
    if step == 3:
        run.save()


def on_eval(step, metrics, run):
    run.set_lr(1e-2 * metrics["accuracy"] + 1e-3)


def on_epoch(epoch, run):
    print("epoch", epoch, "on rank", run.rank)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds of one model, on four workers: with weight gradients apart, and without."""
    folder = tmp_path_factory.mktemp("hosting")
    path = write_evaluated(folder)
    path.write_text(path.read_text() + CALLBACKS)
    where = {"forward_at": ("blocks.1", "blocks.3", "blocks.5"), "backward_at": ("blocks.1", "blocks.2", "blocks.5")}
    for schedule in ("1f1b", "zb-h1"):
        build_of(path, workers=4, microbatches=4, schedule=schedule, **where)[1].save(
            folder / schedule, model_file=path
        )
    return folder


def placed(home: Path, schedule: str, placement: tuple[int, ...]) -> str:
    """The folder of the same stages on these ranks."""
    plain = schedule in ("1f1b", "gpipe", "interleaved")
    folder = home / f"{schedule}-{''.join(map(str, placement))}"
    if not folder.exists():
        build = load(home / ("1f1b" if plain else "zb-h1"))
        plan = dataclasses.replace(build.plan, schedule=schedule, placement=placement)
        dataclasses.replace(build, plan=plan).save(folder, model_file=home / "evaluated.py")
    return str(folder)


def of_run(out: Path) -> dict[str, bytes]:
    """All that a run writes and that must be the same, by name: weights, and checkpoints with optimizers' states."""
    files = [path for path in out.rglob("*") if path.is_file() and path.suffix in (".safetensors", ".jsonl")]
    return {str(path.relative_to(out)): path.read_bytes() for path in files if path.name != "metrics.jsonl"}


def lines(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    kept = ("step", "loss", "lr", "grad_norm", "eval")
    return [{name: row[name] for name in kept if name in row} for row in rows]


CASES = [
    ("interleaved", ROUNDS, {"clip_norm": 0.5, "eval_every": 2, "checkpoint_every": "4", "ema": 0.9}),
    ("zb-v", FOLDED, {"clip_norm": 0.5, "eval_every": 2, "checkpoint_every": "4", "save_best": "loss"}),
    ("v-half", FOLDED, {"eval_every": 3, "log_staleness": True}),
    ("dualpipev", FOLDED, {"eval_every": 2}),
    ("1f1b", ROUNDS, {"clip_norm": 0.5, "ema": 0.9}),
    ("gpipe", FOLDED, {"checkpoint_every": "4"}),
]


@pytest.mark.slow
@pytest.mark.multiproc
def test_it_has_the_bits_of_one_worker_in_each_process(home: Path, tmp_path: Path) -> None:
    runs = []
    for number, (schedule, placement, more) in enumerate(CASES):
        given: dict[str, Any] = {"steps": STEPS, "seed": 3, "threads": 1, "checkpoint_every": "asked", **more}
        runs.append(RunOptions(placed(home, schedule, placement), out=str(tmp_path / f"real_{number}"), **given))
    real = one_after_the_other(runs, 2, tmp_path, quiet=False)
    for number, (options, summary) in enumerate(zip(runs, real, strict=True)):
        out = Path(str(options.out))
        assert any(name.startswith("checkpoints/step-4/optimizer-00004") for name in of_run(out)) == (
            options.checkpoint_every == "4"
        )
        for name, build in (("local", options.build), ("one_each", str(home / one_each(options.build)))):
            here = tmp_path / f"{name}_{number}"
            local = run_local(dataclasses.replace(options, build=build, out=str(here)))
            assert local["losses"] == summary["losses"]
            assert len(set(local["losses"])) == STEPS
            assert local["evaluations"] == summary["evaluations"]
            assert of_run(here) == of_run(out), (name, options.build)
            assert lines(here) == lines(out)
            assert local.keys() == summary.keys()
            assert [row.keys() for row in local["workers"]] == [row.keys() for row in summary["workers"]]


def one_each(build: str) -> str:
    return "1f1b" if Path(build).name.split("-0")[0] in ("1f1b", "gpipe", "interleaved") else "zb-h1"


@pytest.mark.slow
@pytest.mark.multiproc
def test_it_goes_on_from_a_checkpoint_there_and_elsewhere(home: Path, tmp_path: Path) -> None:
    """With the same bits on the same ranks, on others, and with one worker in each process; and its trace."""
    trace = tmp_path / "trace.json"
    given: dict[str, Any] = {"steps": STEPS, "seed": 3, "threads": 1, "clip_norm": 0.5, "eval_every": 2}
    whole = RunOptions(
        placed(home, "zb-v", FOLDED), out=str(tmp_path / "whole"), checkpoint_every="3", trace=str(trace), **given
    )
    summary = launch(whole, 2, FOLDED)
    path = str(tmp_path / "whole" / "checkpoints" / "step-3")

    def from_there(build: str, out: str, schedule: str | None = None) -> RunOptions:
        more = {"resume": path, "weights": path, "schedule": schedule}
        return RunOptions(build, out=str(tmp_path / out), **given, **more)

    runs = [
        from_there(placed(home, "zb-v", FOLDED), "real_0"),
        from_there(placed(home, "zb-h1", ROUNDS), "real_1", "zb-h1"),
    ]
    real = one_after_the_other(runs, 2, tmp_path, False)
    alone = run_local(from_there(str(home / "zb-h1"), "alone", "zb-h1"))
    for out, found in (("real_0", real[0]), ("real_1", real[1]), ("alone", alone)):
        assert found["losses"][-5:] == summary["losses"][-5:]
        assert found["evaluations"][-3:] == summary["evaluations"][-3:]
        final = [(tmp_path / each / "model.safetensors").read_bytes() for each in (out, "whole")]
        assert final[0] == final[1]

    rows = summary["workers"]
    assert [(row["worker"], row["rank"]) for row in rows] == [(0, 0), (1, 1), (2, 1), (3, 0)]
    assert all(sum(row["spent"].values()) == pytest.approx(row["seconds"], rel=1e-6) for row in rows)
    assert all(row["spent"]["others"] > 0 for row in rows)
    assert {wait["from"] for row in rows for wait in row["waits"]} <= {0, 1, 2, 3}
    own = {0: (0, 3), 1: (1, 2)}
    for rank, workers in own.items():
        mine = [wait["from"] for row in rows if row["rank"] == rank for wait in row["waits"]]
        assert not set(mine) & set(workers), "what stays in the process is there, or comes never"
    assert 0 < summary["bubble"] < 1
    events = read_trace(trace)
    assert events.workers == 4
    assert events.problems == ()
    for worker in range(4):
        names = [e.name for e in events.events if e.worker == worker and e.kind in ("F", "B", "W")]
        assert sorted(names) == sorted(
            str(action) for action in choose(read_plan(whole.build)).schedule.until(worker, STEPS)
        )
    processes = {(e["pid"], e["tid"]) for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"}
    assert processes == {(0, 0), (0, 3), (1, 1), (1, 2)}


@pytest.mark.multiproc
def test_a_loop_of_ones_own_has_one_worker_in_each_process(home: Path, tmp_path: Path) -> None:
    folder = placed(home, "1f1b", (0, 0, 0, 0))
    script = f"import fxpipe\nfxpipe.join({folder!r})"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    result = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **alone}, capture_output=True, text=True, timeout=120
    )
    assert "the build has 4 workers on 1 rank, and a loop of your own in each process has one worker" in result.stderr
    assert "`fxpipe run` trains it" in result.stderr
