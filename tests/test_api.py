"""The Python interface, as the README shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import free_port
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


def test_state_in_flight_is_refused() -> None:
    case = CASES["gpt"]
    pipeline = fxpipe.compile(case.make(), case.loss, case.batches(1)[0], cost="analytic").local()
    pipeline.step(case.batches(1)[0])
    with pytest.raises(RunError, match="in flight"):
        pipeline.state_dict()
    pipeline.flush()
    assert pipeline.state_dict()


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


SCRIPT = """
import json, os, sys, time
sys.path.insert(0, {support!r})
import fxpipe, torch
from small_models import CASES
torch.set_num_threads(1)
rank = int(os.environ["RANK"])

def train(number):
    summary = fxpipe.load({build!r}).join(lambda: CASES["gpt"].batches(6), out=f"{{{out!r}}}/{{number}}")
    if summary is not None:
        print(json.dumps(summary["losses"]), flush=True)

"""
ONCE = "train(0)"
LATE = """
train(0)
time.sleep(3 * (rank == int(os.environ["LATE"])))
train(1)
"""
OWN_GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo")
train(0)
assert dist.get_rank() == rank  # it is there again
numbers = torch.ones(1)
dist.all_reduce(numbers)
assert numbers.item() == 2
train(1)
dist.destroy_process_group()
"""
AFTER_AN_ERROR = """
import torch.distributed as dist
dist.init_process_group("gloo")
mine = dist.group.WORLD
try:
    fxpipe.load({build!r}).join(lambda: CASES["gpt"].batches(6), weights="missing.safetensors")
except fxpipe.FxpipeError:
    pass
else:
    raise SystemExit("there is no such file")
assert dist.group.WORLD is mine
train(0)
assert dist.group.WORLD is mine
train(1)
"""
SCRIPTS = {
    "once": (ONCE, {}),
    "again, worker 0 late": (LATE, {"LATE": "0"}),
    "again, worker 1 late": (LATE, {"LATE": "1"}),
    "own group": (OWN_GROUP, {}),
    "after an error": (AFTER_AN_ERROR, {}),
}


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "agent"), [*((name, "with torchrun's store") for name in SCRIPTS), ("again, worker 1 late", "without")]
)
def test_join_under_torchrun(name: str, agent: str, tmp_path: Path) -> None:
    case = CASES["gpt"]
    build = fxpipe.compile(case.make(), case.loss, case.batches(1)[0], cost="analytic").save(tmp_path / "build")
    code, environment = SCRIPTS[name]
    script = tmp_path / "train.py"
    support = str(Path(__file__).parent / "support")
    places = {"build": str(tmp_path / "build"), "out": str(tmp_path / "out")}
    code = code.replace("{build!r}", repr(places["build"])).replace("{out}", places["out"])
    script.write_text(SCRIPT.format(support=support, **places) + code)
    if agent == "without":  # as a Slurm script may start it: worker 0 has the store
        port = str(free_port())
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
        workers = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env={**os.environ, **environment, **meeting, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        written = "".join(worker.communicate(timeout=120)[0] for worker in workers)
        assert [worker.returncode for worker in workers] == [0, 0]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        written = done.stdout
    runs = [json.loads(line) for line in written.splitlines()]
    assert runs == [build.local().run(case.batches(6))] * (1 if name == "once" else 2)
    assert (tmp_path / "out" / str(len(runs) - 1) / "model.safetensors").is_file()
