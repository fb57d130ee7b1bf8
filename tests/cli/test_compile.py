"""What `fxpipe compile` prints and writes, and what it leaves alone."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import lowered
from commands import QUICK, files, fxpipe, fxpipe_process, unchanged
from model_files import PARAMETERS, write_model
from safetensors.torch import load_file

from fxpipe.cli.model_build import doubts_of
from fxpipe.lowering import compare_with_eager as agreement
from fxpipe.plan.build_folder import read_plan
from fxpipe.plan.cost_records import EngineTime, StageTime, WorkerSummary
from fxpipe.plan.plan import Plan
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.task.model_file import load_task

BUILD = {
    "plan.json",
    "stage_0.py",
    "stage_1.py",
    "weights.safetensors",
    "costs.json",
    "profile.json",
    "nodes.json",
    "program.json",
    "passes.txt",
}
DISTINCT = ("--fp-cut", "blocks.2", "--bp-cut", "blocks.1")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model file, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return write_model(tmp_path)


def test_the_table(model: Path) -> None:
    result = fxpipe("compile", "model.py", *QUICK, *DISTINCT, "--verify", "-v")
    assert result.code == 0
    assert re.search(r"^fold +\d+ → \d+ nodes\nkeep_layouts +\d+ nodes\nunits +\d+ nodes\n", result.err, re.M)
    assert "warning" not in result.err
    lines = [line.strip() for line in result.out.splitlines() if line.strip()]
    assert re.split(r"  +", lines[0])[:3] == ["worker", "forward from", "backward from"]
    first, second = (re.split(r"  +", line) for line in lines[2:4])
    assert first[0] == "0"
    assert first[1].startswith("first (")
    assert second[0] == "1"
    assert re.fullmatch(r"blocks\.2 \(\d+ units\)", second[1])
    assert second[2].startswith("blocks.1 (")
    assert second[-1].endswith("KiB")
    assert lines[4].startswith("async · spectrain+ef · 1 microbatch · ")
    assert lines[5] == "staleness: weights are at most 1 update old, predicted, with error feedback"
    assert lines[6] == "costs: computed, not measured"
    assert re.fullmatch(r"forecast: [0-9.]+ samples/s, bubble [0-9]+ %", lines[7])
    assert lines[8].startswith("against eager PyTorch: loss ")
    assert lines[9] == "wrote build: stage_0.py, stage_1.py, plan.json, weights.safetensors"
    assert set(files(model.parent / "build")) == BUILD


HOOKS = """

def eval_data():
    yield from train_data()[:2]
    yield {"x": torch.randn(3, 6), "y": torch.randint(0, 3, (3,))}


def metrics(model, batch):
    logits = model(batch["x"])
    return {"accuracy": (logits.argmax(1) == batch["y"]).float().mean(), "loss": F.cross_entropy(logits, batch["y"])}
"""


def test_validation_hooks_are_compiled(model: Path) -> None:
    without = fxpipe("compile", "model.py", *QUICK, *DISTINCT)
    weights = (model.parent / "build" / "weights.safetensors").read_bytes()
    model.write_text(model.read_text() + HOOKS)
    result = fxpipe("compile", "model.py", *QUICK, *DISTINCT)
    assert result.code == 0
    assert "warning" not in result.err
    *said, evaluation, wrote = result.out.rstrip().splitlines()
    assert said == without.out.rstrip().splitlines()[:-1]
    assert evaluation == "evaluation: accuracy, loss in evaluate_0.py, evaluate_1.py, and for one more shape of batches"
    assert wrote.startswith("wrote build: stage_0.py, stage_1.py, ")
    shares = {f"evaluate_{name}.py" for name in ("0", "1", "0_1", "1_1")}
    assert set(files(model.parent / "build")) == BUILD | shares
    assert (model.parent / "build" / "weights.safetensors").read_bytes() == weights
    shown = fxpipe("inspect", "build")
    assert evaluation in " ".join(shown.out.split())
    facts = fxpipe("inspect", "build", "--json").json["build"]["evaluation"]
    assert facts == fxpipe("compile", "model.py", *QUICK, *DISTINCT, "--json").json["evaluation"]
    assert facts["shapes"][1]["batch"] == {"batch['x']": [3, 6], "batch['y']": [3]}
    model.write_text(model.read_text().split("def eval_data")[0])
    assert fxpipe("compile", "model.py", *QUICK, *DISTINCT).code == 0  # over the build with more files
    assert set(files(model.parent / "build")) == BUILD


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (".float().mean(),", ".float().mean().item(),", "return tensors from metrics()"),
        ("(3, 6)", "(3, 6) / None", "eval_data() raised TypeError"),
    ],
)
def test_validation_that_cannot_be_compiled_is_a_warning(model: Path, old: str, new: str, said: str) -> None:
    hooks = HOOKS.replace(old, new)
    assert hooks != HOOKS
    model.write_text(model.read_text() + hooks)
    result = fxpipe("compile", "model.py", *QUICK, *DISTINCT)
    assert result.code == 0
    assert "warning: runs evaluate the final weights only, in one process: " in result.err
    assert said in result.err
    assert "model.py:" in result.err
    assert "evaluation:" not in result.out
    assert set(files(model.parent / "build")) == BUILD
    reason = fxpipe("inspect", "build", "--json").json["build"]["evaluation"]["reason"]
    assert said in reason
    assert "evaluation: of the final weights only" in fxpipe("inspect", "build").out


@pytest.mark.parametrize(("line", "cause"), [("sys.exit(0)", "sys.exit(0)"), ("raise GeneratorExit", "GeneratorExit")])
def test_a_hook_that_would_end_the_command_is_an_error(model: Path, line: str, cause: str) -> None:
    model.write_text(f"{model.read_text()}\n\ndef model():\n    import sys\n\n    {line}\n")
    result = fxpipe("compile", model, "-o", "build", *QUICK)
    assert (result.code, Path("build").exists()) == (1, False)
    assert f"error: fxpipe compile was ended by {cause}\n  at: model.py:" in result.err


def test_a_forecast_that_a_run_here_may_not_keep_is_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    (worker,) = lowered("function", workers=1).workers
    worker = dataclasses.replace(worker, forward=0.010, backward=0.015, weight=0.005)
    fine, slow = StageTime(0.010, 0.021, 0.0), StageTime(0.020, 0.040, 0.0)

    def doubts(times: tuple[StageTime, ...], threads: int, device: str) -> list[str]:
        return list(doubts_of(BuildCosts((worker,) * len(times), times), len(times), threads, device))

    assert doubts((fine, fine), 2, "cpu") == []
    assert ["stage 1 took 2.00 times" in text for text in doubts((fine, slow), 1, "cpu")] == [True]
    assert ["3 workers of 2 threads share 4 cores" in text for text in doubts((fine,) * 3, 2, "cpu")] == [True]
    assert doubts((fine,) * 3, 2, "cuda") == []
    fast = StageTime(0.005, 0.010, 0.0)
    on_engine = BuildCosts((worker,), (fast,), engines=(EngineTime(0, "F", "inductor", chosen=True),))
    assert list(doubts_of(on_engine, 1, 1, "cpu")) == [], "its operators were timed without it"


def test_times_that_contradict_those_of_operators_are_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the compile again that the warning advises would take the operators' times from the file."""
    slow = StageTime(1.0, 1.0, 0.0)
    monkeypatch.setattr("fxpipe.cli.model_build.measure_stages", lambda *given, **more: (slow, slow))
    result = fxpipe("compile", "model.py", "--threads", 1)
    assert "compile again when it is not busy, which times both" in result.err
    assert not Path("build/node_costs.json").exists()


def test_what_is_computed_again_is_said(model: Path) -> None:
    asked = ("compile", "model.py", *QUICK, "--schedule", "1f1b", "--microbatches", "2")
    result = fxpipe(*asked, "--recompute", "full", "--verify")
    assert result.code == 0
    assert re.search(r"^computed again, a microbatch: worker 0 \d+\.\d\d ms, which saves .+", result.out, re.M)
    assert "--recompute full" in Path("build/stage_0.py").read_text().splitlines()[0]
    assert "# again, to save memory: " in Path("build/stage_0.py").read_text()
    plain = fxpipe(*asked, "--memory", "1GiB", "-o", "plain")
    assert plain.code == 0
    assert "computed again" not in plain.out


def test_json(model: Path) -> None:
    arguments = ("--schedule", "1f1b", "--microbatches", 2, "-o", "here", *QUICK, *DISTINCT)
    result = fxpipe("compile", "model.py", *arguments, "--verify", "--json")
    assert result.err.count("warning: ") == 1, "of batch norm"  # on a slow machine, stderr says how far it is
    said = result.json
    assert list(said) == [
        "out",
        "schedule",
        "policy",
        "microbatches",
        "dp",
        "outer",
        "outer_step",
        "microbatch_loss",
        "shapes",
        "padding",
        "forward_cuts",
        "backward_cuts",
        "weight_cuts",
        "partitions",
        "moved_bytes",
        "cuts",
        "cuts_refused",
        "forecast",
        "staleness",
        "evaluation",
        "workers",
        "times",
        "engines",
        "codecs",
        "warnings",
        "schedules",
        "verify",
    ]
    assert Path(said["out"]) == Path.cwd() / "here"
    assert (said["schedule"], said["policy"], said["microbatches"]) == ("1f1b", "latest", 2)
    assert (said["microbatch_loss"]["differs"], said["microbatch_loss"]["batch_norm"]) == ("", "norm")
    assert (said["forward_cuts"], said["backward_cuts"]) == (["blocks.2"], ["blocks.1"])
    assert [w.partition(":")[0] for w in said["warnings"]] == ["batch norm normalises each microbatch by itself (norm)"]
    times = {"forward", "backward", "weight", "update", "again"}
    names = [f"{f.name}_ms" if f.name in times else f.name for f in dataclasses.fields(WorkerSummary)]
    assert [list(w) for w in said["workers"]] == [names] * 2
    assert [w["begins"] for w in said["workers"]] == [["first", "first"], ["blocks.2", "blocks.1"]]
    assert [w["owned"] for w in said["workers"]] == [4, 10]
    assert [w["copies"] for w in said["workers"]] == [2, 0], "blocks.1 runs forward away from its owner"
    assert set(said["verify"]["gradients"]) == PARAMETERS
    assert max(said["verify"]["gradients"].values()) < 1e-5
    assert said["verify"]["loss"] < 1e-6
    assert "norm.running_mean" in said["verify"]["buffers"]
    assert "verify" not in fxpipe("compile", "model.py", *arguments, "--json").json


def test_verify_in_bf16(model: Path) -> None:
    write_model(model.parent, ("self.norm(x)", "x"))  # four samples' norm magnifies bf16's rounding
    result = fxpipe("compile", "model.py", *QUICK, *DISTINCT, "--autocast", "bf16", "--verify")
    assert result.code == 0, result.err
    assert "torch.bfloat16" in (model.parent / "build" / "stage_0.py").read_text()


IN_ONE_PROCESS = """

def eval_data():
    torch.manual_seed(1)
    return train_data()[:1]


def metrics(model, batch):
    return {"loss": loss(model, batch).item()}
"""


def test_bf16_parameters(model: Path) -> None:
    """Named by inspect, taken over by --like, kept in float32, and evaluated in bfloat16."""
    write_model(model.parent, ("self.first(x)", "self.first(x.to(self.first.weight.dtype))"))
    model.write_text(model.read_text() + IN_ONE_PROCESS)
    result = fxpipe("compile", "model.py", *QUICK, *DISTINCT, "--params", "bf16", "--schedule", "1f1b", "--verify")
    assert result.code == 0, result.err
    assert fxpipe("inspect", "build", "--json").json["build"]["params"] == "bf16"
    assert "bf16 parameters" in fxpipe("inspect", "build").out
    again = fxpipe("compile", "model.py", *QUICK, *DISTINCT, "--like", "build", "-o", "again")
    assert again.code == 0, again.err
    assert read_plan(model.parent / "again").precision.params == "bf16"
    found = fxpipe("run", "build", "--local", "--steps", "3", "--json").json["evaluation"]["loss"]
    task = load_task(model)
    trained = task.model()
    weights = load_file("out/model.safetensors")
    assert {weights[name].dtype for name in PARAMETERS} == {torch.float32}
    trained.load_state_dict(weights)
    trained.to(torch.bfloat16).norm.float()
    (batch,) = task.eval_data()
    with torch.no_grad():
        assert found == float(task.loss(trained.eval(), batch))


@pytest.mark.parametrize("error", [1e-3, math.inf])
def test_verify_fails_on_a_wrong_stage(model: Path, monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    wrong = agreement.Agreement(0.0, {"head.weight": error}, {}, cause="they differ in float64 as well")
    monkeypatch.setattr(agreement, "compare_with_eager", lambda *_, **__: wrong)
    result = fxpipe("compile", "model.py", *QUICK, "--verify")
    assert result.code == 1
    said = f"error: the gradient of head.weight differs from eager PyTorch: relative error {error:.1e} (limit 0.0001)"
    assert said in result.err
    assert "cause: they differ in float64 as well\nhint: do not train with this build" in result.err
    assert "(head.weight)" in result.out


def test_verify_says_of_what_it_knows_little(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = agreement.Agreement(0.0, {"head.weight": 0.0}, {}, not_finite=("the loss",), zero=("head.weight",))
    monkeypatch.setattr(agreement, "compare_with_eager", lambda *_, **__: little)
    result = fxpipe("compile", "model.py", *QUICK, "--verify")
    assert result.code == 0
    assert "infinite or NaN in eager PyTorch too, so only partly compared: the loss" in result.err
    assert "zero for the example batch in eager PyTorch: the gradients of head.weight" in result.err


@pytest.mark.multiproc
@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "elsewhere" / "two"
    for folder in (one, two):
        write_model(folder)
    cuts = [("--fp-cut", "blocks.1"), ("--fp-cut", "blocks.3"), ("--bp-cut", "blocks.0"), ("--bp-cut", "head")]
    measured = ("--threads", "1", "-n", "3", *(text for cut in cuts for text in cut))
    assert fxpipe("compile", one / "model.py", "-o", one / "build", *measured).code == 0
    other = fxpipe_process("compile", two / "model.py", "-o", two / "build", *measured, PYTHONHASHSEED="7")
    assert other.code == 0, other.err
    made = [files(folder / "build") for folder in (one, two)]
    for found in made:
        for name in ("costs.json", "node_costs.json", "profile.json", "program.json"):
            assert found.pop(name)
    untimed = []
    for found in made:
        table = json.loads(found.pop("nodes.json") or b"")
        for row in table["rows"]:
            row[table["columns"].index("ms")] = None
        untimed.append(table)
    assert untimed[0] == untimed[1]
    assert made[0].keys() == {*BUILD, "stage_2.py"} - {"costs.json", "profile.json", "program.json", "nodes.json"}
    assert made[0] == made[1]


def test_a_seed_is_another_model(model: Path) -> None:
    weights = []
    for seed in (0, 0, 1):
        fxpipe("compile", "model.py", *QUICK, "--seed", seed)
        weights.append((model.parent / "build" / "weights.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_an_earlier_build_is_replaced_whole(model: Path) -> None:
    assert fxpipe("compile", "model.py", "-n", 3, *QUICK).code == 0
    build = model.parent / "build"
    assert (build / "stage_2.py").exists()
    (build / "stage_0.py").write_text("# edited\n")
    assert fxpipe("compile", "model.py", "-n", 2, *QUICK).code == 0
    assert set(files(build)) == BUILD
    assert {p.name for p in model.parent.iterdir()} - {"__pycache__"} == {"model.py", "build"}
    read_plan(build)


def test_a_link_to_a_build_stays_a_link(model: Path) -> None:
    (model.parent / "elsewhere").mkdir()
    link = model.parent / "build"
    link.symlink_to("elsewhere")
    assert fxpipe("compile", "model.py", *QUICK).code == 0
    assert fxpipe("compile", "model.py", *QUICK).code == 0
    assert link.is_symlink()
    assert set(files(model.parent / "elsewhere")) == BUILD
    assert fxpipe("run", "build", "--local", "--steps", 1).code == 0


@pytest.mark.parametrize("kind", ["a folder", "a file"])
def test_what_is_not_a_build_is_left_alone(model: Path, kind: str) -> None:
    out = model.parent / "thesis"
    if kind == "a folder":
        out.mkdir()
        (out / "chapter.txt").write_text("one")
    else:
        out.write_text("one")
    with unchanged(model.parent):
        result = fxpipe("compile", "model.py", "-o", "thesis", *QUICK)
    assert result.code == 1
    assert "thesis exists and is not an fxpipe build" in result.err
    assert "hint: choose another -o" in result.err


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(
    ("place", "error", "code", "message"),
    [
        ((Plan, "to_json"), KeyboardInterrupt(), 130, "interrupted"),
        ((Path, "write_bytes"), OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device"),
        ((Path, "chmod"), PermissionError(errno.EACCES, "Permission denied"), 1, "Permission denied"),
    ],
)
def test_a_compile_that_ends_early_leaves_nothing(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    earlier: bool,
    place: tuple[Any, str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    if earlier:
        fxpipe("compile", "model.py", *QUICK)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patched, unchanged(model.parent):
        patched.setattr(*place, fail)
        result = fxpipe("compile", "model.py", "-n", 3, *QUICK)
    assert result.code == code
    assert message in result.err
    assert result.out == ""


@pytest.mark.parametrize("step", ["exchanged", "moved"])
def test_an_earlier_build_survives_when_the_new_one_cannot_take_its_place(
    model: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Where the system exchanges two folders in one step, and where it cannot."""
    fxpipe("compile", "model.py", *QUICK)
    rename = Path.rename

    def say_no(*_: Any) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    def fail_for_the_new(path: Path, target: Path) -> Path:
        if (path / "stage_2.py").exists():
            say_no()
        return rename(path, target)

    with monkeypatch.context() as patched, unchanged(model.parent):
        patched.setattr("fxpipe.files.exchange", say_no if step == "exchanged" else lambda *_: False)
        patched.setattr(Path, "rename", fail_for_the_new)
        result = fxpipe("compile", "model.py", "-n", 3, *QUICK)
    assert result.code == 1
    assert "build cannot be written: Input/output error" in result.err


def test_the_files_a_build_depends_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own imports; not the modules that torch makes up, whose files are bare names."""
    monkeypatch.syspath_prepend(str(model.parent))
    (model.parent / "width_of_the_net.py").write_text("WIDTH = 8\n")
    (model.parent / "_ops.py").write_text("never imported\n")
    write_model(model.parent, ("import torch\n", "import torch\nfrom width_of_the_net import WIDTH\n"))
    assert fxpipe("compile", "model.py", *QUICK).code == 0
    del sys.modules["width_of_the_net"]
    body = json.loads((model.parent / "build" / "plan.json").read_text())
    assert sorted(body["model_file"]["sources"]) == ["model.py", "width_of_the_net.py"]
    assert body["model_file"]["path"] == "../model.py"


def test_statistics_over_replicas_are_refused(tmp_path: Path) -> None:
    """Not taken for those of each replica; batch norm that is said to be by itself is that of each microbatch."""
    model = write_model(tmp_path, ("nn.BatchNorm1d(8)", "nn.SyncBatchNorm(8)"))
    result = fxpipe("compile", model, "-n", 1, "--dp", 2, "-o", tmp_path / "build", *QUICK)
    assert result.code == 1
    assert "SyncBatchNorm (norm) would not see the samples of other replicas" in result.err
    assert fxpipe("compile", model, "-n", 2, "-o", tmp_path / "build", *QUICK).code == 0
