"""Every mistake a user can make: what happened, where, and what to do; exit code 1; nothing left half-written."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from commands import QUICK, Result, fxpipe, unchanged
from model_files import STEPS, line_of, write_model
from safetensors.torch import load_file

from fxpipe.plan.build_folder import read_plan
from fxpipe.plan.plan import FORMAT, Plan

TRAIN_DATA = "for _ in range(5)]"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.py and its build."""
    folder = tmp_path_factory.mktemp("compiled")
    assert fxpipe("compile", write_model(folder), "-o", folder / "build", "--fp-cut", "blocks.2", *QUICK).code == 0
    return folder


@pytest.fixture
def build(compiled: Path, home: Path) -> Path:
    """A copy of a good build beside its model.py, to be spoilt."""
    shutil.copytree(compiled, home, dirs_exist_ok=True)
    return home / "build"


def refused(home: Path, *arguments: object) -> Result:
    """The command ends with exit code 1 and an error with a hint, and leaves every file as it was."""
    with unchanged(home):
        result = fxpipe(*arguments)
    assert result.code == 1
    assert result.out == ""
    explained(result.err)
    return result


def explained(err: str) -> None:
    assert err.count("error: ") == 1, err
    assert err.count("\n  hint: ") == 1, err
    assert "Traceback" not in err


def compile_refused(home: Path, *options: object) -> str:
    return refused(home, "compile", "model.py", "-o", "build", *QUICK, *options).err


def run_refused(home: Path, *options: object) -> str:
    return refused(home, "run", "build", "--local", "--steps", 2, *options).err


# The user's file


@pytest.mark.parametrize("hook", ["model()", "loss(model, batch)", "train_data()"])
def test_a_missing_hook(home: Path, hook: str) -> None:
    name = hook.partition("(")[0]
    write_model(home, (f"def {hook}", f"def _nothing_like_it_{hook[len(name) :]}"))
    err = compile_refused(home)
    assert f"model.py does not define {name}\n  at: model.py\n" in err
    assert f"def {name}(" in err, "the signature, to be pasted"


def test_all_missing_hooks_at_once(home: Path) -> None:
    (home / "model.py").write_text("import torch\n")
    assert "does not define model, loss, train_data" in compile_refused(home)


@pytest.mark.parametrize(("hook", "misspelt"), [("loss", "losss"), ("train_data", "traindata"), ("model", "Model")])
def test_a_misspelt_hook(home: Path, hook: str, misspelt: str) -> None:
    write_model(home, (f"def {hook}(", f"def {misspelt}("))
    err = compile_refused(home)
    assert f"does not define {hook}" in err
    assert f"hint: rename {misspelt!r} to {hook!r}\n" in err


def test_a_function_that_the_file_calls_is_no_misspelt_hook(home: Path) -> None:
    path = write_model(home)
    path.write_text(path.read_text() + "\n\ndef resnet():\n    return 1\n\n\nDEPTH = resnet()\n")
    result = fxpipe("compile", "model.py", *QUICK)
    assert (result.code, result.err) == (0, "")


def test_a_misspelt_optional_hook_is_a_warning(home: Path) -> None:
    write_model(home, ("def optimizer", "def optimiser"))
    result = fxpipe("compile", "model.py", *QUICK)
    assert result.code == 0
    assert result.err == "warning: model.py defines optimiser(), which is not a hook; do you mean optimizer()?\n"


def test_a_file_that_cannot_be_imported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(home, ("import torch\n", "import torch\nimport no_such_module\n"))
    result = fxpipe("compile", "model.py", *QUICK)
    assert result.code == 1
    assert "No module named 'no_such_module'" in result.err
    assert f"at: model.py:{line_of(path, 'no_such_module')}: import no_such_module" in result.err
    assert "hint" not in result.err
    for package, extra in (("sklearn", "examples"), ("bitsandbytes", "packed")):
        monkeypatch.setitem(sys.modules, package, None)
        write_model(home, ("import torch\n", f"import torch\nimport {package}\n"))
        result = fxpipe("compile", "model.py", *QUICK)
        hint = f"hint: pip install -c constraints.txt 'fxpipe[{extra}]', or '.[{extra}]' in the repository"
        assert hint in result.err
    write_model(home, ("import torch\n", "import torch\nclass = 3\n"))
    result = fxpipe("compile", "model.py", *QUICK)
    assert result.code == 1
    assert "syntax error: invalid syntax\n  at: model.py:2: class = 3" in result.err


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (", reduction='none')", "returned a tensor of shape [4], not a scalar"),
        (").reshape(1)", "returned a tensor of shape [1], not a scalar"),
        (").item()", "the step depends on the values of a tensor"),
        ("), 1", "returned tuple, not a tensor"),
        (").detach()", "the loss does not depend on any parameter that requires a gradient"),
    ],
)
def test_a_loss_that_is_no_scalar_tensor(home: Path, returned: str, message: str) -> None:
    path = write_model(home, ('batch["y"])', f'batch["y"]{returned}'))
    err = compile_refused(home)
    assert message in err
    within = line_of(path, "def loss(")
    assert f"at: model.py:{within}, in loss" in err or f"at: model.py:{within + 1}: return" in err


def test_a_loss_that_is_a_dictionary(home: Path) -> None:
    path = write_model(home, ("return F.cross", 'return {"loss": F.cross'), ('batch["y"])', 'batch["y"])}'))
    err = compile_refused(home)
    assert "loss(model, batch) returned dict, not a tensor" in err
    assert f"at: model.py:{line_of(path, 'def loss(')}, in loss\n  hint: return one scalar tensor" in err


def test_a_parameter_without_gradient(home: Path) -> None:
    write_model(home, ("        self.norm =", "        self.spare = nn.Linear(2, 2)\n        self.norm ="))
    result = fxpipe("compile", "model.py", *QUICK, "--verify", "--json")
    warnings = [f"parameter spare.{name} gets no gradient: it keeps its value" for name in ("weight", "bias")]
    assert result.err == "".join(f"warning: {w}\n" for w in warnings)
    assert result.json["warnings"] == warnings
    assert fxpipe("run", "build", "--local", "--steps", 3).code == 0
    before, after = load_file("build/weights.safetensors"), load_file("out/model.safetensors")
    assert torch.equal(before["spare.weight"], after["spare.weight"])
    assert not torch.equal(before["head.weight"], after["head.weight"])


# Batches


def test_a_batch_unlike_the_first_that_compile_reads(home: Path) -> None:
    wrong = '{"x": torch.randn(4, 5), "y": torch.randint(0, 3, (4,))}'
    write_model(home, (TRAIN_DATA, f"{TRAIN_DATA} + [{wrong}]"))
    err = compile_refused(home)
    assert "after those of the first shape: batch['x'] float32[4, 5], batch['y'] int64[4]" in " ".join(err.split())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ('{"x": torch.randn(3, 6), "y": torch.randint(0, 3, (3,))}',
         "batch['x'] is float32[3, 6], captured as float32[4, 6]; batch['y'] is int64[3], captured as int64[4]"),
        ('{"x": torch.randn(4, 6).double(), "y": torch.randint(0, 3, (4,))}',
         "batch['x'] is float64[4, 6], captured as float32[4, 6]"),
        ('{"x": torch.randn(4, 6), "y": 1}', "batch['y'] is a int, captured as a tensor"),
        ('{"x": torch.randn(4, 6)}', "is built differently from the one captured"),
        ('{"x": torch.nested.nested_tensor([torch.randn(6)] * 4), "y": torch.randint(0, 3, (4,))}',
         "batch['x'] is a nested tensor, captured as a dense one"),
    ],
)  # fmt: skip
def test_a_batch_unlike_the_captured_one(home: Path, wrong: str, message: str) -> None:
    write_model(home, (TRAIN_DATA, f"{TRAIN_DATA} + [{wrong}]"))
    assert fxpipe("compile", "model.py", *QUICK, "--scan", 1).code == 0
    result = fxpipe("run", "build", "--local", "--json")
    assert (result.code, result.out) == (1, "")
    explained(result.err)
    assert f"the batch of step {STEPS + 1} " in result.err
    assert message in result.err
    assert "no weights of this run are saved: --checkpoint-every N" in result.err
    only_metrics(home / "out")


def only_metrics(out: Path) -> None:
    """The steps that were trained stand in the metrics; there are no weights."""
    assert [p.name for p in out.iterdir()] == ["metrics.jsonl"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) <= STEPS


@pytest.mark.parametrize("count", [3, 8])
def test_microbatches_that_do_not_divide_the_batch(home: Path, count: int) -> None:
    write_model(home)
    err = compile_refused(home, "--schedule", "1f1b", "--microbatches", count)
    assert f"error: {count} microbatches do not divide a batch of 4" in err
    assert "hint: choose --microbatches from 1, 2, 4" in err


@pytest.mark.parametrize(
    ("samples", "options", "problem", "fitting"),
    [
        (1, ("--dp", 2, "--schedule", "gpipe", "--microbatches", 1), "a batch of 1 cannot be shared by 2 replicas", 1),
        (4, ("--dp", 3, "--schedule", "gpipe", "--microbatches", 1), "a batch of 4 cannot be shared by 3", "1, 2, 4"),
        (4, ("--dp", 4, "--schedule", "1f1b", "--microbatches", 2), "a batch of 4 cannot be shared by 4", "1, 2"),
    ],
)
def test_a_batch_that_replicas_cannot_share(
    home: Path, samples: int, options: tuple[object, ...], problem: str, fitting: object
) -> None:
    write_model(home, ("torch.randn(4, 6)", f"torch.randn({samples}, 6)"), ("3, (4,)", f"3, ({samples},)"))
    err = compile_refused(home, *options)
    assert f"error: {problem}" in err
    assert f"hint: choose --dp from {fitting}, or a batch size that " in err


def test_a_batch_without_one_size(home: Path) -> None:
    write_model(home, ("torch.randint(0, 3, (4,))", "torch.randint(0, 3, (6,))"))
    err = compile_refused(home, "--schedule", "1f1b", "--microbatches", 2)
    assert "its size differs: batch['x'] has 4, batch['y'] has 6" in err


def test_a_batch_that_holds_something_else(home: Path) -> None:
    write_model(home, ('"y": torch', '"z": {1, 2}, "w": torch.randn(4).numpy(), "y": torch'))
    err = compile_refused(home)
    assert "batch['z'] is a builtins.set; batch['w'] is a numpy.ndarray" in err


# Cuts


def test_more_workers_than_units(home: Path) -> None:
    write_model(home)
    err = compile_refused(home, "-n", 500)
    units = int(err.partition("but the step has only ")[2].split()[0])
    assert f"error: 500 workers, but the step has only {units} units to share\n" in err
    assert err.endswith(f"hint: use -n {units} or fewer\n")


@pytest.mark.parametrize("option", ["--fp-cut", "--bp-cut"])
def test_a_cut_at_a_path_that_does_not_exist(home: Path, option: str) -> None:
    write_model(home)
    err = compile_refused(home, option, "block.2")
    assert f"error: {option} block.2: no module of that path runs in the forward pass, did you mean 'blocks.2'" in err


@pytest.mark.parametrize("option", ["--fp-cut", "--bp-cut"])
def test_cuts_out_of_order(home: Path, option: str) -> None:
    write_model(home)
    err = compile_refused(home, "-n", 3, option, "blocks.3", option, "blocks.1")
    assert f"error: {option} blocks.1 does not come after blocks.3: worker 1 would have nothing to do" in err
    assert "hint: give the cuts in the order in which the model runs its modules" in err


def test_too_few_cuts(home: Path) -> None:
    write_model(home)
    assert "error: 3 workers need 2 cuts, --fp-cut gives 1" in compile_refused(home, "-n", 3, "--fp-cut", "blocks.1")


# The build directory


@pytest.mark.parametrize("names", [["stage_1.py"], ["weights.safetensors"], ["stage_0.py", "weights.safetensors"]])
def test_an_incomplete_build(home: Path, build: Path, names: list[str]) -> None:
    for name in names:
        (build / name).unlink()
    err = run_refused(home)
    assert f"error: the build is incomplete: {', '.join(names)} missing\n  at: build\n" in err
    assert "hint: compile the model again: fxpipe compile MODEL -o build" in err


@pytest.mark.parametrize("gone", ["the plan", "the folder"])
def test_no_build_at_all(home: Path, build: Path, gone: str) -> None:
    (build / "plan.json").unlink()
    said = "build is not an fxpipe build: it has no plan.json"
    if gone == "the folder":
        shutil.rmtree(build)
        said = "build does not exist"
    assert f"error: {said}" in run_refused(home)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"owner": 1', '"owner": 0', "plan.json was changed after it was written"),
        ("\n}\n", "\n", "plan.json cannot be read"),
        (f'"format": {FORMAT}', f'"format": {FORMAT + 1}', f"has format {FORMAT + 1}, this fxpipe reads {FORMAT}"),
    ],
)
def test_a_changed_plan(home: Path, build: Path, old: str, new: str, message: str) -> None:
    plan = build / "plan.json"
    text = plan.read_text()
    assert old in text
    plan.write_text(text.replace(old, new, 1))
    err = run_refused(home)
    assert message in err
    assert "at: build/plan.json" in err


@pytest.mark.parametrize("how", ["a bit", "cut off", "more"])
def test_changed_weights(home: Path, build: Path, how: str) -> None:
    weights = build / "weights.safetensors"
    content = weights.read_bytes()
    spoilt = {"a bit": content[:-1] + bytes([content[-1] ^ 1]), "cut off": content[:-8], "more": content + b"\0"}
    weights.write_bytes(spoilt[how])
    assert "error: weights.safetensors was changed after it was written\n  at: build\n" in run_refused(home)


def test_a_build_of_another_version(home: Path, build: Path) -> None:
    plan: Plan = dataclasses.replace(read_plan(build), fxpipe="0.0.1")
    (build / "plan.json").write_text(plan.to_json())
    err = run_refused(home)
    assert "error: the build was made by fxpipe 0.0.1, this is " in err


def test_a_stale_build(home: Path, build: Path) -> None:
    model = home / "model.py"
    model.write_text(model.read_text() + "\ntorch.manual_seed(0)\n")
    err = run_refused(home)
    assert "error: the build is stale: since it was compiled, model.py: top level is new\n  at: build\n" in err
    assert (
        "hint: compile it again: fxpipe compile model.py -o build, with the options that stage_0.py begins with" in err
    )
    model.unlink()
    err = run_refused(home)
    assert "model.py is gone" in err
    assert "--model PATH" in err


def test_a_build_is_stale_when_a_file_that_the_model_imports_changed(home: Path) -> None:
    neighbour = home / "the_width.py"
    neighbour.write_text("WIDTH = 8\n")
    write_model(home, ("import torch\n", "import torch\nfrom the_width import WIDTH\n\nassert WIDTH\n"))
    assert fxpipe("compile", "model.py", *QUICK).code == 0
    del sys.modules["the_width"]
    neighbour.write_text("WIDTH = 9\n")
    assert "since it was compiled, the_width.py: WIDTH changed" in run_refused(home)
    neighbour.write_text("WIDTH = 8\n")
    assert fxpipe("run", "build", "--local", "--steps", 1).code == 0, "the same content is the same file"
    sys.modules.pop("the_width", None)


def test_a_build_that_moved_with_its_model(home: Path, build: Path) -> None:
    (home / "model.py").rename(home / "renamed.py")
    assert "model.py is gone" in run_refused(home)
    (home / "elsewhere").mkdir()
    shutil.move(home / "renamed.py", home / "elsewhere" / "model.py")
    assert fxpipe("run", "build", "--local", "--steps", 1, "--model", "elsewhere/model.py").code == 0


# The output directory


@pytest.mark.parametrize("out", ["wall", "wall/inside", "wall/far/inside"])
def test_an_output_directory_that_cannot_be_written(home: Path, build: Path, out: str) -> None:
    (home / "wall").write_text("a file")
    err = run_refused(home, "--out", out)
    assert f"error: {out} cannot be written: wall is a file\n" in err
    assert "hint: choose another --out" in err
    if out != "wall":
        err = refused(home, "compile", "model.py", "-o", out, *QUICK).err
        assert f"error: {out} cannot be written: wall is a file\n" in err
        assert "hint: choose another -o" in err


def test_a_metrics_file_that_cannot_be_written(home: Path, build: Path) -> None:
    (home / "out" / "metrics.jsonl").mkdir(parents=True)
    result = fxpipe("run", "build", "--local", "--steps", 2)
    assert result.code == 0, "no log ends a run"
    assert "metrics.jsonl cannot be written: Is a directory; it is in" in result.err


# Workers


def test_ctrl_c_in_one_process(home: Path) -> None:
    write_model(home, ("return [{", "yield from [{"), (TRAIN_DATA, f"{TRAIN_DATA}\n    raise KeyboardInterrupt"))
    assert fxpipe("compile", "model.py", *QUICK, "--scan", 1).code == 0
    result = fxpipe("run", "build", "--local", "--steps", 2 * STEPS, "--json")
    assert (result.code, result.out, result.err.strip()) == (130, "", "interrupted")
    only_metrics(home / "out")
