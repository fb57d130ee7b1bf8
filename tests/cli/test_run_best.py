"""What follows from evaluations: the best weights, an early end, rates that fall where a metric stands still."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import QUICK, fxpipe
from model_files import write_model
from safetensors.torch import load_file

HOOKS = """

def train_data():
    torch.manual_seed(7)
    return [{"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))} for _ in range(40)]


def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.2, momentum=0.9)


def eval_data():
    torch.manual_seed(8)
    return [{"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))} for _ in range(3)]


def metrics(model, batch):
    right = (model(batch["x"]).argmax(-1) == batch["y"]).float().mean()
    return {"loss": loss(model, batch), "accuracy": right, "wrong": 1 - right, "nothing": right * float("nan")}
"""
PLATEAU = """

def lr_scheduler(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0), "loss"
"""


def built(folder: Path, hooks: str = "", workers: int = 2, more: Sequence[object] = ()) -> Path:
    model = write_model(folder)
    model.write_text(model.read_text() + HOOKS + hooks)
    result = fxpipe("compile", model, "-n", workers, "-o", folder / "build", *QUICK, *more)
    assert result.code == 0, result.err
    return folder / "build"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("best"))


@pytest.fixture(scope="module")
def plateau(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("plateau"), PLATEAU, workers=3)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path, *names: str) -> list[bytes]:
    return [(out / name).read_bytes() for name in (names or ("best.safetensors", "model.safetensors"))]


def best_of(rows: list[dict[str, Any]], metric: str, greater: bool) -> tuple[int, float]:
    """The first of the best."""
    sign = -1 if greater else 1
    row = min(rows, key=lambda row: sign * row["metrics"][metric])
    return row["step"], row["metrics"][metric]


@pytest.mark.parametrize(
    ("asked", "greater"), [("loss", False), ("accuracy", True), ("-wrong", False), ("+loss", True)]
)
def test_the_best_weights_are_those_of_a_run_that_ends_there(
    build: Path, tmp_path: Path, asked: str, greater: bool
) -> None:
    run = ("run", build, "--local")
    out = tmp_path / "out"
    result = fxpipe(*run, "--eval-every", 4, "--save-best", asked, "--out", out, "--json")
    assert result.code == 0, result.err
    metric = asked.lstrip("+-")
    step, value = best_of(result.json["evaluations"], metric, greater)
    assert result.json["best"] == {"metric": metric, "step": step, "value": value, "kept": True}
    assert result.json["stopped"] is None
    assert [row["step"] for row in lines(out) if row.get("best")][-1] == step
    assert f"best {metric} ({'greater' if greater else 'smaller'} is better)" in result.err
    assert fxpipe(*run, "--steps", step, "--out", tmp_path / "short").code == 0
    assert weights(out, "best.safetensors") == weights(tmp_path / "short", "model.safetensors")


def test_the_last_evaluation_counts_and_nothing_finite_is_no_best(build: Path, tmp_path: Path) -> None:
    run = ("run", build, "--local", "--steps", 6, "--eval-every", 10)
    found = fxpipe(*run, "--save-best", "loss", "--out", tmp_path / "out", "--json").json
    assert found["best"]["step"] == 6
    best, model = (load_file(tmp_path / "out" / name) for name in ("best.safetensors", "model.safetensors"))
    assert all(best[name].equal(model[name]) for name in model)
    found = fxpipe(*run, "--save-best", "nothing", "--out", tmp_path / "out", "--json").json
    assert found["best"] is None
    assert not (tmp_path / "out" / "best.safetensors").exists()  # that of the run before is gone, as its weights are


@pytest.mark.slow
@pytest.mark.multiproc
def test_processes_stop_together_where_one_process_does(build: Path, tmp_path: Path) -> None:
    run = ("run", build, "--schedule", "async", "--eval-every", 4, "--save-best", "loss", "--patience", 2)
    found = [
        fxpipe(*run, *how, "--out", tmp_path / name, "--json").json
        for name, how in (("local", ("--local",)), ("many", ()))
    ]
    assert found[0]["stopped"] == found[1]["stopped"] == "patience"
    assert found[0]["steps"] == found[1]["steps"] < 40
    assert found[0]["evaluations"] == found[1]["evaluations"]
    assert found[0]["best"] == found[1]["best"]
    assert found[0]["losses"] == found[1]["losses"]
    assert weights(tmp_path / "local") == weights(tmp_path / "many")


def test_patience_ends_a_run(build: Path, tmp_path: Path) -> None:
    run = ("run", build, "--local", "--eval-every", 4, "--save-best", "loss", "--patience", 2)
    result = fxpipe(*run, "--out", tmp_path / "out", "--json")
    found = result.json
    assert found["stopped"] == "patience"
    *due, _ = found["evaluations"]  # the last one, after the end, may be the best
    ended = min(due, key=lambda evaluation: evaluation["metrics"]["loss"])["step"] + 8
    assert ended < found["steps"] <= ended + 12
    assert found["evaluations"][-1]["step"] == found["steps"] == len(found["losses"])
    assert f"loss has not improved in 2 evaluations: the run ends after step {found['steps']}" in result.err
    assert [row["step"] for row in lines(tmp_path / "out") if "loss" in row] == list(range(1, found["steps"] + 1))


CROSSED = ("--fp-cut", "blocks.2", "--bp-cut", "blocks.0", "--microbatches", 2)


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build whose worker 0 reads weights of worker 1."""
    return built(tmp_path_factory.mktemp("crossed"), more=CROSSED)


def ends_where_it_is_decided(build: Path, tmp_path: Path, *how: object) -> None:
    """The evaluation that decides ends it, with the bits of a run with so many steps; and again where it goes on."""
    run = ("run", build, *how, "--ema", 0.9, "--checkpoint-every", 4, "--keep", 100)
    asked = ("--eval-every", 4, "--save-best", "loss", "--patience", 2)
    made = fxpipe(*run, *asked, "--out", tmp_path / "out", "--json")
    assert made.code == 0, made.err
    found = made.json
    assert (found["stopped"], found["steps"]) == ("patience", found["best"]["step"] + 8)
    assert found["steps"] == len(found["losses"]) < 40
    evaluated = [row["step"] for row in found["evaluations"]]
    assert evaluated == list(range(4, found["steps"] + 1, 4))
    assert [row["step"] for row in lines(tmp_path / "out") if "eval" in row] == evaluated
    short = fxpipe(*run, "--eval-every", 4, "--steps", found["steps"], "--out", tmp_path / "short", "--json").json
    assert found["losses"] == short["losses"]
    assert found["evaluations"] == short["evaluations"]
    both = ("model.safetensors", "ema.safetensors")
    assert weights(tmp_path / "out", *both) == weights(tmp_path / "short", *both)
    for step in (found["steps"] - 4, found["steps"]):
        saved = tmp_path / "out" / "checkpoints" / f"step-{step}"
        more = fxpipe(*run, *asked, "--resume", saved, "--out", tmp_path / f"more-{step}", "--json").json
        assert (more["stopped"], more["steps"]) == ("patience", found["steps"])
        assert weights(tmp_path / f"more-{step}", *both) == weights(tmp_path / "out", *both)


def test_with_a_flush_patience_ends_a_run_at_the_evaluation(build: Path, tmp_path: Path) -> None:
    ends_where_it_is_decided(build, tmp_path, "--local", "--schedule", "1f1b")


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_so_do_processes(crossed: Path, tmp_path: Path, schedule: str) -> None:
    ends_where_it_is_decided(crossed, tmp_path, "--schedule", schedule)
    ends_where_it_is_decided(crossed, tmp_path / "local", "--schedule", schedule, "--local")


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [("--schedule", "zb-h1"), ("--dp", 2, "--microbatches", 1), ("--schedule", "interleaved", "--virtual", 2)]
)
def test_so_do_other_rows(tmp_path: Path, how: tuple[object, ...]) -> None:
    build = built(tmp_path, more=("--schedule", "1f1b", "--microbatches", 2, *how))
    ends_where_it_is_decided(build, tmp_path, "--local")


@pytest.mark.parametrize("delta", [0.0, 0.2])
def test_patience_may_have_another_metric_and_a_least_improvement(build: Path, tmp_path: Path, delta: float) -> None:
    run = ("run", build, "--local", "--eval-every", 2, "--patience", 2, "--patience-metric", "accuracy")
    whole = fxpipe("run", build, "--local", "--eval-every", 2, "--out", tmp_path / "whole", "--json").json
    best, since = -1.0, 0
    for row in whole["evaluations"]:
        better = row["metrics"]["accuracy"] - delta > best
        best, since = (row["metrics"]["accuracy"], 0) if better else (best, since + 1)
        if since == 2:
            break
    made = fxpipe(*run, "--min-delta", delta, "--save-best", "loss", "--out", tmp_path / "out", "--json")
    assert f"accuracy has not improved in 2 evaluations: the run ends after step {made.json['steps']}" in made.err
    assert row["step"] < made.json["steps"] <= row["step"] + 12
    assert made.json["best"]["metric"] == "loss"


@pytest.mark.parametrize("cut", [10, 30])
def test_a_resumed_run_remembers(build: Path, tmp_path: Path, cut: int) -> None:
    """It stops where the whole one does, with the same best weights; also after the end of its patience."""
    run = ("run", build, "--local", "--eval-every", 4, "--save-best", "loss")
    whole = fxpipe(*run, "--patience", 3, "--out", tmp_path / "whole", "--json").json
    assert whole["stopped"] == "patience"
    part = (*run, "--checkpoint-every", 2, "--keep", 100, "--out", tmp_path / "part")
    assert fxpipe(*part, "--steps", min(cut, whole["steps"])).code == 0
    more = fxpipe(*part, "--patience", 3, "--resume", "--json")
    assert more.code == 0, more.err
    assert more.json["steps"] == whole["steps"]
    assert more.json["best"] == whole["best"] or cut % 4  # the end of the part was evaluated, too
    assert weights(tmp_path / "part", "model.safetensors") == weights(tmp_path / "whole", "model.safetensors")
    if more.json["best"] == whole["best"]:
        assert weights(tmp_path / "part", "best.safetensors") == weights(tmp_path / "whole", "best.safetensors")


def test_going_on_with_another_goal_keeps_the_best_from_there(build: Path, tmp_path: Path) -> None:
    """The log knows the values of the steps before, and the folder has other weights, or none."""
    run = ("run", build, "--local", "--eval-every", 4)
    fxpipe(*run, "--steps", 8, "--checkpoint-every", "4", "--save-best", "loss", "--out", tmp_path / "out", "--json")
    more = fxpipe(*run, "--steps", 16, "--resume", "--save-best", "-accuracy", "--out", tmp_path / "out", "--json")
    assert "lacks the weights of step" in more.err
    assert more.json["best"]["step"] > 8
    assert more.json["best"]["kept"]
    note = json.loads((tmp_path / "out" / "best.json").read_text())
    assert (note["metric"], note["greater"], note["step"]) == ("accuracy", False, more.json["best"]["step"])


def test_the_file_ahead_of_the_log_is_not_the_best(build: Path, tmp_path: Path) -> None:
    """It was killed after it had written weights that the checkpoint does not know of."""
    run = ("run", build, "--local", "--eval-every", 4, "--save-best", "loss", "--out", tmp_path / "out", "--json")
    first = fxpipe(*run, "--steps", 8, "--checkpoint-every", "4").json
    note = json.loads((tmp_path / "out" / "best.json").read_text())
    assert note["step"] == first["best"]["step"]
    (tmp_path / "out" / "best.json").write_text(json.dumps({**note, "step": 12}))
    more = fxpipe(*run, "--steps", 16, "--resume")
    assert f"lacks the weights of step {note['step']}" in more.err
    assert more.json["best"]["step"] > 8


def test_going_on_elsewhere_takes_the_best_weights_along(build: Path, tmp_path: Path) -> None:
    run = ("run", build, "--local", "--eval-every", 4, "--save-best", "loss")
    part = fxpipe(*run, "--steps", 12, "--checkpoint-every", 12, "--out", tmp_path / "part", "--json").json
    resume = ("--resume", tmp_path / "part" / "checkpoints" / "step-12")
    more = fxpipe(*run, "--steps", 12, *resume, "--out", tmp_path / "more", "--json").json
    assert more["best"] == part["best"]
    assert weights(tmp_path / "part", "best.safetensors") == weights(tmp_path / "more", "best.safetensors")


def rates(out: Path) -> list[float]:
    return [row["lr"] for row in lines(out) if "lr" in row]


def test_a_plateau_follows_the_metric(plateau: Path, tmp_path: Path) -> None:
    """As in a loop: the rate of a step is what all evaluations before it have made of it."""
    import torch

    out = tmp_path / "out"
    result = fxpipe("run", plateau, "--local", "--eval-every", 4, "--out", out)
    assert result.code == 0, result.err
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    expected = []
    held = {row["step"]: row["eval"]["loss"] for row in lines(out) if "eval" in row}
    for step in range(1, 41):
        expected.append(optimizer.param_groups[0]["lr"])
        if step in held:
            scheduler.step(held[step])
    assert rates(out) == expected


def test_mistakes_are_said_before_training(build: Path, plateau: Path, tmp_path: Path) -> None:
    def error(folder: Path, *arguments: object) -> str:
        result = fxpipe("run", folder, "--out", tmp_path / "out", *arguments)
        assert result.code != 0
        assert not (tmp_path / "out" / "metrics.jsonl").exists()
        return " ".join(result.err.split())

    assert "--save-best needs --eval-every" in error(build, "--save-best", "loss")
    assert "--patience needs a metric" in error(build, "--eval-every", 4, "--patience", 2)
    assert "--patience needs --eval-every" in error(build, "--patience", 2, "--patience-metric", "loss")
    assert "--min-delta needs --patience" in error(build, "--eval-every", 4, "--min-delta", 0.1)
    assert "--patience-metric needs --patience" in error(build, "--eval-every", 4, "--patience-metric", "loss")
    said = error(build, "--eval-every", 4, "--save-best", "acuracy")
    assert "gives no 'acuracy', did you mean 'accuracy'?" in said
    assert "evaluates only at the end" in error(plateau, "--local")
    wrong = built(tmp_path, PLATEAU.replace('"loss"', '"lss"'))
    assert "lr_scheduler() needs the metric 'lss', which " in error(wrong, "--local", "--eval-every", 4)
    bare = write_model(tmp_path)
    bare.write_text(bare.read_text() + HOOKS + PLATEAU.replace(', "loss"', ""))
    assert 'return (scheduler, "loss")' in fxpipe("compile", bare, "-n", 2, "-o", tmp_path / "bare", *QUICK).err


def test_a_scheduler_without_a_state_does_not_begin_anew(tmp_path: Path) -> None:
    """It waits for evaluations, which are over: its steps cannot be repeated."""
    build = built(
        tmp_path,
        """

class Silent(torch.optim.lr_scheduler.ReduceLROnPlateau):
    def state_dict(self):
        raise NotImplementedError


def lr_scheduler(optimizer):
    return Silent(optimizer, factor=0.5, patience=0), "loss"
""",
    )
    run = ("run", build, "--local", "--eval-every", 2, "--checkpoint-every", "4", "--out", tmp_path / "out")
    assert fxpipe(*run, "--steps", 4).code == 0
    more = fxpipe(*run, "--steps", 8, "--resume")
    assert more.code == 1
    assert "the checkpoint has no state of Silent, which waits for the metric 'loss'" in more.err


def test_a_run_that_goes_on_without_a_goal_says_what_stays(build: Path, tmp_path: Path) -> None:
    run = ("run", build, "--local", "--eval-every", 4, "--out", tmp_path / "out")
    first = fxpipe(*run, "--steps", 8, "--checkpoint-every", "4", "--save-best", "loss")
    assert "stays as it is" not in first.err
    kept = weights(tmp_path / "out", "best.safetensors")
    more = fxpipe(*run, "--steps", 16, "--resume")
    assert "best.safetensors stays as it is" in more.err
    assert weights(tmp_path / "out", "best.safetensors") == kept
