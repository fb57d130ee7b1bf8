"""Callbacks of runs: what they are called with, what they decide, the same over processes and after `--resume`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import QUICK, fxpipe
from counted_notes import COUNTING
from model_files import write_model

HOOKS = """
import json
import os


def train_data():
    torch.manual_seed(7)
    return [{"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))} for _ in range(10)]


def loss(model, batch):
    found = F.cross_entropy(model(batch["x"]), batch["y"])
    return found, {"half": found / 2}


def eval_data():
    torch.manual_seed(8)
    return [{"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))} for _ in range(3)]


def metrics(model, batch):
    return {"held": loss(model, batch)[0]}


def note(run, *what):
    with open(f"{os.environ['CALLED']}.{run.rank}", "a") as file:
        file.write(json.dumps(what) + "\\n")
"""
CALLBACKS = """

def on_step(step, loss, run):
    note(run, "step", step, loss, run.metrics, torch.rand(()).item())
    if step == 7:
        run.set_lr(0.02)
    if step == 8:
        note(run, "saves", run.save())
    return step == 26


def on_eval(step, metrics, run):
    note(run, "eval", step, metrics)
    if step == 12:
        run.set_lr(0.1)


def on_epoch(epoch, run):
    note(run, "epoch", epoch)
    if epoch == 2:
        run.set_lr(0.03)
"""
PLAIN = (("dropout(torch.tanh(block(x)), 0.1, self.training)", "tanh(block(x))"), ("self.norm(x)", "x"))


def built(folder: Path, more: str = CALLBACKS, workers: int = 3, *options: object) -> Path:
    model = write_model(folder, *PLAIN)
    model.write_text(model.read_text() + HOOKS + more)
    result = fxpipe("compile", model, "-n", workers, "-o", folder / "build", *QUICK, *options)
    assert result.code == 0, result.err
    return folder / "build"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("callbacks"))


@pytest.fixture(autouse=True)
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CALLED", str(tmp_path / "called"))
    return tmp_path / "called"


def calls(called: Path, rank: int = 0) -> list[list[Any]]:
    """Those of one process, which are then forgotten."""
    path = called.with_name(f"{called.name}.{rank}")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    return found


def rates(out: Path) -> dict[int, float]:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["lr"] for row in rows if "lr" in row}


@pytest.mark.parametrize("schedule", ["async", "1f1b"])
def test_what_they_are_called_with_and_what_they_decide(
    build: Path, tmp_path: Path, called: Path, schedule: str
) -> None:
    run = ("run", build, "--local", "--schedule", schedule, "--steps", 50, "--eval-every", 6)
    result = fxpipe(*run, "--checkpoint-every", "asked", "--out", tmp_path / "out", "--json")
    seen = calls(called)
    end = result.json["steps"]
    assert 26 < end < 40
    assert f"on_step() asked for it after step 26: the run ends after step {end}" in result.err
    assert result.json["stopped"] == "on_step"
    steps = [row for row in seen if row[0] == "step"]
    assert [row[1] for row in steps] == list(range(1, end + 1))
    assert [row[2] for row in steps] == result.json["losses"]
    assert all(row[3] == {"half": pytest.approx(row[2] / 2)} for row in steps)
    evaluations = [row for row in seen if row[0] == "eval"]
    assert [{"step": step, "metrics": found} for _, step, found in evaluations] == result.json["evaluations"]
    assert [row[1] for row in evaluations] == [*range(6, end, 6), end]
    assert [row[1] for row in seen if row[0] == "epoch"] == [1, 2, 3][: end // 10]
    order = [row[:2] for row in seen if row[0] != "saves"]
    at = order.index(["step", 30])
    assert order[at : at + 3] == [["step", 30], *([["eval", 30]] if end >= 30 else []), ["epoch", 3]]
    (saved,) = [row[1] for row in seen if row[0] == "saves"]
    assert 8 < saved == 8 + end - 26
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == [f"step-{saved}"]
    by_step = {
        step: 0.05 if step <= 7 else 0.02 if step <= 12 else 0.1 if step <= 20 else 0.03 for step in range(1, 51)
    }
    assert rates(tmp_path / "out") == {step: by_step[step] for step in range(1, end + 1)}


def test_a_resumed_run_decides_and_does_the_same(build: Path, tmp_path: Path, called: Path) -> None:
    """Also where a decision was made before the checkpoint, and is done after it; or an evaluation follows it."""
    run = ("run", build, "--local", "--steps", 50, "--eval-every", 4, "--policy", "pipeoptim", "--checkpoint-every", 1)
    whole = fxpipe(*run, "--keep", 100, "--out", tmp_path / "whole", "--json").json
    before = calls(called)
    for cut in (7, 12, 26):
        checkpoint, out = tmp_path / "whole" / "checkpoints" / f"step-{cut}", tmp_path / str(cut)
        part = ("--checkpoint-every", "asked", "--resume", checkpoint, "--out", out, "--json")
        more = fxpipe(*run, *part).json
        after = calls(called)
        for name in ("steps", "losses", "evaluations"):
            assert more[name] == whole[name]
        first = before.index(next(row for row in before if row[:2] == ["step", cut])) + 1
        assert after == [row for row in before[first:] if row[0] != "saves" or cut < 8]
        ends = [folder / "model.safetensors" for folder in (tmp_path / "whole", out)]
        assert ends[0].read_bytes() == ends[1].read_bytes()
        saved = 8 + whole["steps"] - 26
        made = [path.name for path in out.glob("checkpoints/step-*")]
        assert made == [f"step-{saved}"] * (cut < saved)


@pytest.mark.parametrize(("hook", "calls_it"), [("eval", 12), pytest.param("epoch", 2, marks=pytest.mark.slow)])
def test_with_a_flush_an_evaluation_or_its_epoch_ends_a_run_at_once(
    tmp_path: Path, called: Path, hook: str, calls_it: int
) -> None:
    """Also where it goes on from a checkpoint of that step, which is cut before."""
    callback = f"def on_{hook}(number, *more):\n    note(more[-1], '{hook}', number)\n    return number == {calls_it}\n"
    run = ("run", built(tmp_path, COUNTING + callback, 2), "--local", "--schedule", "1f1b", "--steps", 50, "--json")
    run, end = (*run, "--eval-every", 4, "--checkpoint-every", 4), 12 if hook == "eval" else 20
    found = fxpipe(*run, "--out", tmp_path / "out").json
    assert (found["stopped"], found["steps"], len(found["losses"])) == (f"on_{hook}", end, end)
    expected = [[hook, number] for number in (range(4, end + 1, 4) if hook == "eval" else (1, 2))]
    assert calls(called) == expected
    short = fxpipe(*run, "--steps", end, "--out", tmp_path / "short").json
    called.with_name("called.0").unlink()
    assert (short["losses"], short["evaluations"]) == (found["losses"], found["evaluations"])
    saved = tmp_path / "out" / "checkpoints" / f"step-{end}"
    more = fxpipe(*run, "--out", tmp_path / "more", "--resume", saved).json
    assert (more["stopped"], more["steps"]) == (f"on_{hook}", end)
    files = [tmp_path / name / "model.safetensors" for name in ("out", "short", "more")]
    assert len({file.read_bytes() for file in files}) == 1


def test_what_saves_and_ends_a_run_has_it_saved_at_its_end(tmp_path: Path) -> None:
    callback = "def on_eval(step, metrics, run):\n    if step == 8:\n        run.save()\n    return step == 8\n"
    run = ("run", built(tmp_path, COUNTING + callback, 2), "--local", "--schedule", "1f1b", "--steps", 50, "--json")
    found = fxpipe(*run, "--eval-every", 4, "--checkpoint-every", "asked", "--out", tmp_path / "out").json
    assert found["stopped"] == "on_eval"
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == [f"step-{found['steps']}"]


@pytest.mark.parametrize("schedule", ["async", pytest.param("zb-v", marks=pytest.mark.slow)])
def test_in_one_process_they_wait_for_the_loss_over_all_replicas(tmp_path: Path, called: Path, schedule: str) -> None:
    callback = "def on_step(step, loss, run):\n    note(run, loss)\n"
    build = built(tmp_path, COUNTING + callback, 2, "--dp", 2, "--schedule", schedule)
    found = fxpipe("run", build, "--local", "--steps", 6, "--out", tmp_path / "out", "--json").json
    assert calls(called) == [[loss] for loss in found["losses"]]


def test_a_longer_run_is_the_whole_one(build: Path, tmp_path: Path, called: Path) -> None:
    """What is decided after the last step of a run counts where a longer one goes on."""
    run = ("run", build, "--local", "--json", "--checkpoint-every")
    whole = fxpipe(*run, "asked", "--steps", 50, "--out", tmp_path / "whole").json
    for cut in (7, 26):
        out = ("--out", tmp_path / str(cut))
        assert fxpipe(*run, cut, "--steps", cut, *out).code == 0
        assert fxpipe(*run, "asked", "--steps", 50, "--resume", *out).json["losses"] == whole["losses"]


@pytest.mark.slow
@pytest.mark.multiproc
def test_processes_are_called_alike(build: Path, tmp_path: Path, called: Path) -> None:
    run = ("run", build, "--schedule", "async", "--steps", 50, "--eval-every", 6, "--checkpoint-every", "asked")
    one = fxpipe(*run, "--local", "--out", tmp_path / "one", "--json").json
    seen = calls(called)
    many = fxpipe(*run, "--out", tmp_path / "many", "--json").json
    assert [calls(called, rank) == seen for rank in range(3)] == [True] * 3
    assert many["losses"] == one["losses"]
    assert many["stopped"] == "on_step"
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*-of-*"))
    assert files
    for file in [Path("model.safetensors"), *files]:
        assert (tmp_path / "many" / file).read_bytes() == (tmp_path / "one" / file).read_bytes(), file
    more = fxpipe(*run, "--resume", "--out", tmp_path / "many", "--json").json
    assert more["losses"] == one["losses"]


TELLING = (
    COUNTING
    + """

def on_step(step, loss, run):
    if step == 10:
        note(run, told)
"""
)


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_decision_is_one_note_a_step_to_the_process_before(tmp_path: Path, called: Path) -> None:
    run = ("run", built(tmp_path, TELLING), "--schedule", "1f1b", "--steps", 12, "--clip-norm", 1)
    assert fxpipe(*run, "--out", tmp_path / "out").code == 0
    told = [calls(called, rank) for rank in range(3)]
    last = {"up": 10, "loss": 20, "on_step": 9}  # that of this step is told when it is over
    assert told == [[[{"down": 10}]], [[{"up": 10, "down": 10, "on_step": 9}]], [[last]]]


@pytest.mark.slow
@pytest.mark.multiproc
def test_processes_that_decide_otherwise_end(tmp_path: Path) -> None:
    build = built(tmp_path, "\n\ndef on_step(step, loss, run):\n    return step == 3 and run.rank == 1\n")
    result = fxpipe("run", build, "--steps", 20, "--out", tmp_path / "out")
    assert result.code == 1
    assert "on_step() on worker" in result.err
    assert "ends the run after step 3" in result.err or "it ends the run" in result.err
    assert "decide by these only" in result.err


def said(folder: Path, hooks: str, *more: object) -> str:
    result = fxpipe("run", built(folder, hooks, 2), "--local", "--out", folder / "out", *more)
    return f"{result.code} {result.err}"


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    found = said(tmp_path / "save", "\n\ndef on_step(step, loss, run):\n    run.save()\n")
    assert "1 " in found
    assert "the run makes no checkpoints" in found
    assert "--checkpoint-every asked" in found
    found = said(tmp_path / "raises", "\n\ndef on_step(step, loss, run):\n    return 1 / (step - 2)\n")
    assert "on_step() raised ZeroDivisionError" in found
    assert "return 1 / (step - 2)" in found
    found = said(tmp_path / "rates", "\n\ndef on_epoch(epoch, run):\n    run.set_lr(1.0, 2.0)\n", "--epochs", 2)
    assert "2 learning rates were given, and the optimizer has 1 groups" in found
    for hook in ("def on_step(step, loss):\n    pass\n", "on_eval = 3\n"):  # said at compile
        model = write_model(tmp_path / "form")
        model.write_text(f"{model.read_text()}\n\n{hook}")
        result = fxpipe("compile", model, "-n", 2, "-o", tmp_path / "form" / "build", *QUICK)
        assert result.code == 1
        assert "hint: def on_" in result.err


def test_what_has_no_effect_is_said(tmp_path: Path) -> None:
    late = "\n\ndef on_step(step, loss, run):\n    return step == 9 and run.save() < 0\n"
    found = said(tmp_path / "late", late, "--checkpoint-every", "asked")
    assert "run.save() after step 9 is too late for a checkpoint: the run ends after step 10" in found
    never = "\n\ndef on_eval(step, metrics, run):\n    pass\n\n\ndel metrics\n"
    assert "on_eval() will not be called" in said(tmp_path / "never", never)


def test_a_misspelt_callback_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    model.write_text(model.read_text() + "\n\ndef on_epochs(epoch, run):\n    pass\n")
    assert "do you mean on_epoch()?" in fxpipe("compile", model, "-o", tmp_path / "build", *QUICK).err
