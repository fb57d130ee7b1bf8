"""The Python interface, as the README shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_models import CASES

import fxpipe
from fxpipe.errors import BuildError, FxpipeError, RunError


def test_compile_save_load_and_train(tmp_path: Path) -> None:
    case = CASES["gpt"]
    model = case.make()
    build = fxpipe.compile(model, case.loss, case.batches(1)[0], workers=2, cost="analytic")
    saved = build.save(tmp_path / "build")
    loaded = fxpipe.load(tmp_path / "build")
    assert loaded.plan == saved.plan
    assert loaded.files == build.files
    assert loaded.workers == build.workers
    runs = [b.local(policy="stash").run(case.batches(5)) for b in (build, loaded)]
    assert runs[0] == runs[1]


def test_weights_load_back_into_the_model() -> None:
    case = CASES["conv"]
    model = case.make()
    build = fxpipe.compile(model, case.loss, case.batches(1)[0], workers=3, microbatches=1, cost="analytic")
    pipeline = build.local()
    pipeline.run(case.batches(3))
    model.load_state_dict(pipeline.state_dict())
    assert int(model.layers[0][1].num_batches_tracked) == 3


def test_non_contiguous_and_channels_last_batches() -> None:
    case = CASES["conv"]
    model = case.make()
    x, y = case.batches(1)[0]
    batches = [(x, y), (x.to(memory_format=torch.channels_last), y), (x.transpose(2, 3), y.clone())]
    build = fxpipe.compile(model, case.loss, batches[0], workers=2, cost="analytic")
    losses = build.local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0)).run(batches)
    expected = [case.loss(model, batch).item() for batch in batches]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_misspelt_option_is_named(tmp_path: Path) -> None:
    case = CASES["function"]
    build = fxpipe.compile(case.make(), case.loss, case.batches(1)[0], cost="analytic")
    with pytest.raises(FxpipeError, match="there is no option 'polcy', did you mean 'policy'"):
        build.local(polcy="stash")
    with pytest.raises(FxpipeError, match="there is no option 'steps'"):  # of a run, not of a pipeline
        build.local(steps=3)
    with pytest.raises(FxpipeError, match="there is no option 'epoch', did you mean 'epochs'"):
        build.save(tmp_path / "build").join(lambda: case.batches(2), epoch=1)


def test_a_dtype_that_no_file_holds_is_refused_by_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4, dtype=torch.complex128)
    batch = torch.randn(2, 4, dtype=torch.complex128)
    build = fxpipe.compile(model, lambda model, x: model(x).abs().mean(), batch, workers=1, cost="analytic")
    with pytest.raises(BuildError, match=r"cannot hold weight, bias \(complex128\)"):
        build.save(tmp_path / "build")
    assert not (tmp_path / "build").exists()


def test_an_unsaved_build_cannot_be_joined() -> None:
    case = CASES["function"]
    build = fxpipe.compile(case.make(), case.loss, case.batches(1)[0], cost="analytic")
    with pytest.raises(BuildError, match="only a saved build"):
        build.join(lambda: case.batches(2))


def test_joining_needs_torchrun(tmp_path: Path) -> None:
    case = CASES["function"]
    build = fxpipe.compile(case.make(), case.loss, case.batches(1)[0], cost="analytic").save(tmp_path / "build")
    assert len(repr(build)) < 2000
    with pytest.raises(RunError, match="not started by torchrun"):
        build.join(lambda: case.batches(2))


LATE = """
train(0)
time.sleep(3 * (rank == int(os.environ["LATE"])))
train(1)
"""


SCRIPT = """
import json, os, sys, time
sys.path.insert(0, {support!r})
import fxpipe, torch
import torch.distributed as dist
from small_models import CASES
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
mine = dist.group.WORLD

def train(number, **more):
    summary = fxpipe.load({build!r}).join(lambda: CASES["gpt"].batches(6), out=f"{out}/{{number}}", **more)
    if summary is not None:
        print(json.dumps(summary["losses"]), flush=True)

try:
    train(0, weights="missing.safetensors")
except fxpipe.FxpipeError:
    pass
else:
    raise SystemExit("there is no such file")
train(0)
assert dist.group.WORLD is mine
numbers = torch.ones(1)
dist.all_reduce(numbers)
assert numbers.item() == 2
time.sleep(3 * rank)
train(1)
"""


@pytest.mark.slow
@pytest.mark.multiproc
def test_join_under_torchrun(tmp_path: Path) -> None:
    """Beside a process group of the user's own, after an error, and again where the workers come late."""
    case = CASES["gpt"]
    build = fxpipe.compile(case.make(), case.loss, case.batches(1)[0], cost="analytic").save(tmp_path / "build")
    script, support = tmp_path / "train.py", str(Path(__file__).parent / "support")
    script.write_text(SCRIPT.format(support=support, build=str(tmp_path / "build"), out=tmp_path / "out"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [build.local().run(case.batches(6))] * 2
    assert (tmp_path / "out" / "1" / "model.safetensors").is_file()
