"""Workers that were not given the same refuse to begin, all of them, and say who differs in what."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from commands import QUICK, fxpipe
from model_files import write_model
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore

from fxpipe.errors import TaskError
from fxpipe.plan.build_folder import read_plan
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process import membership
from fxpipe.runtime.process.membership import agree, differences, facts_of
from fxpipe.threads import cores

WORKER = """
import json, os, sys
from pathlib import Path
from fxpipe.errors import FxpipeError
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.ends import end_process
from fxpipe.runtime.process.start import join

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
for number, (port, texts) in enumerate(json.loads((folder / "cases.json").read_text())):
    os.environ["MASTER_PORT"] = str(port)
    try:
        join(RunOptions.from_json(texts[rank]))
        said = None
    except FxpipeError as error:
        said = [type(error).__name__, str(error)]
    (folder / f"said_{number}_{rank}.json").write_text(json.dumps(said))
end_process(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each of two workers: the model and its builds, and a checkpoint; equal to the byte."""
    made = tmp_path_factory.mktemp("agreement")
    one, other = made / "0", made / "1"
    one.mkdir()
    model = write_model(one)
    for name, more in {
        "build": (),
        "cuts": ("--fp-cut", "blocks.1"),
        "seed": ("--seed", 7),
        "three": ("-n", 3),
    }.items():
        cut = () if name in ("cuts", "three") else ("--fp-cut", "blocks.2")
        assert fxpipe("compile", model, "-o", one / name, *cut, *more, *QUICK).code == 0
    assert fxpipe("run", one / "build", "--local", "--steps", 1, "--out", one / "out").code == 0
    for name, more_steps in (("checkpoint", 1), ("trained", 2)):
        assert fxpipe("run", one / "build", "--local", "--steps", more_steps, "--out", one / "out").code == 0
        save_file(load_file(one / "out" / "model.safetensors"), one / f"{name}.safetensors")
    shutil.copytree(one, other)
    return made


def flip(file: Path) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / file).read_bytes())
        content[-1] ^= 1
        (folder / file).write_bytes(content)

    return change


def append(file: Path) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / file).open("a") as opened:
            opened.write("\n# a note\n")

    return change


# What is done to the folder of worker 1 (None: nothing), the options of both, and the words for it.
CASES = {
    "equal": (None, ({}, {}), None),
    "another checkpoint": (
        None,
        ({"weights": "checkpoint.safetensors"}, {"weights": "trained.safetensors"}),
        r"worker 1 on .*: --weights: trained\.safetensors is",
    ),
    "the same checkpoint elsewhere": (None, ({"weights": "checkpoint.safetensors"},) * 2, None),
    "a flipped checkpoint": (
        flip(Path("trained.safetensors")),
        ({"weights": "trained.safetensors"},) * 2,
        r"worker 1 on .*: --weights: trained\.safetensors is [0-9a-f]{16}, on worker 0 it is [0-9a-f]{16}",
    ),
    "another seed of the build": (None, ({}, {"build": "seed"}), r"worker 1 on .*: plan\.json: weights\.digest is"),
    "other cuts": (None, ({}, {"build": "cuts"}), r"worker 1 on .*: plan\.json: steps is"),
    "more workers": (None, ({}, {"build": "three"}), "the build has 3 workers, but 2 processes were started"),
    "a flipped weight": (
        flip(Path("build/weights.safetensors")),
        ({}, {}),
        r"weights\.safetensors was changed after it was written",
    ),
    "another model file": (append(Path("model.py")), ({}, {}), r"worker 1 on .*: source model\.py is"),
    "an edited stage": (append(Path("build/stage_0.py")), ({}, {}), r"worker 1 on .*: stage_0\.py is"),
    "seed": (None, ({}, {"seed": 1}), r"worker 1 on .*: option seed is 1, on worker 0 it is 0"),
    "threads": (None, ({"threads": 1}, {"threads": 2}), "option threads is 2, on worker 0 it is 1"),
    "schedule": (None, ({}, {"schedule": "1f1b"}), "option schedule is 1f1b, on worker 0 it is None"),
    "no output": (None, ({}, {"out": None}), "option out is not given, on worker 0 it is given"),
}


def started_alike(tmp_path: Path, listed: list[tuple[int, list[str]]], world: int, local: int | None = None) -> None:
    """Let processes join the runs that are listed, one after the other; each writes down what it was told.

    Args:
        listed: of each run, the port of its store and the options of each process.
        local: how many of them torchrun says are on this host, if not all.
    """
    (tmp_path / "cases.json").write_text(json.dumps(listed))
    (tmp_path / "worker.py").write_text(WORKER)
    shared = {"MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local or world)}
    workers = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "worker.py"), str(tmp_path)],
            env={**os.environ, **shared, "RANK": str(rank)},
        )
        for rank in range(world)
    ]
    try:
        assert [worker.wait(240) for worker in workers] == [0] * world
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_torchruns_on_one_host_share_its_cores(folder: Path, tmp_path: Path) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    options = [RunOptions(str(folder / str(k) / "build"), steps=2, out=str(tmp_path / "out")).to_json() for k in (0, 1)]
    started_alike(tmp_path, [(store.port, options)], 2, local=1)
    assert [json.loads((tmp_path / f"said_0_{rank}.json").read_text()) for rank in (0, 1)] == [None, None]
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["threads"] == max(1, cores() // 2)
    for row in run["workers"]:
        assert 0 < row["host"].pop("cpu_seconds") < 60
        assert row["host"] == {"processes": 2, "threads": run["threads"], "cores": cores()}


@pytest.mark.slow
@pytest.mark.multiproc
def test_what_differs_is_said_by_all(folder: Path, tmp_path: Path) -> None:
    listed, stores = [], []
    for number, (change, options, _) in enumerate(CASES.values()):
        texts = []
        for rank, own in enumerate(options):
            place = folder / str(rank)
            if rank and change is not None:
                place = tmp_path / str(number)
                shutil.copytree(folder / "1", place)
                change(place)
            given = {"build": "build", "steps": 2, "threads": 1, "out": str(tmp_path / f"out{number}"), **own}
            given |= {name: str(place / given[name]) for name in ("build", "weights") if name in given}
            texts.append(RunOptions(**given).to_json())
        stores.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        listed.append((stores[-1].port, texts))
    started_alike(tmp_path, listed, 2)
    for number, (name, (_, _, words)) in enumerate(CASES.items()):
        said = [json.loads((tmp_path / f"said_{number}_{rank}.json").read_text()) for rank in range(2)]
        if words is None:
            assert said == [None, None], name
            assert (tmp_path / f"out{number}" / "model.safetensors").is_file()
            continue
        for rank in range(2):
            assert said[rank] is not None, (name, rank)
            assert re.search(words, said[rank][1]), (name, rank, said[rank])
            assert "\n  at: " in said[rank][1], (name, said[rank])
            assert "\n  hint: " in said[rank][1], (name, said[rank])
        if "refused to begin" in said[0][1]:
            assert said[0][0] == "PeerRefused"
            assert "worker 1 on " in said[0][1]
        assert not (tmp_path / f"out{number}").exists(), name


def test_every_option_that_decides_the_numbers_is_compared(folder: Path, set_flag: Callable[..., None]) -> None:
    """A field that someone adds is compared without being named anywhere."""
    options = RunOptions(str(folder / "0" / "build"), steps=1)
    plan = read_plan(options.build)
    facts = facts_of(plan, options)
    assert {f.name for f in dataclasses.fields(RunOptions)} - {name.removeprefix("option ") for name in facts} == {
        "progress",
        "board",
        "plan_digest",
    }
    assert differences(facts, facts) == []
    other = facts_of(dataclasses.replace(plan, microbatches=3), dataclasses.replace(options, clip_norm=1.0))
    assert differences(other, facts) == [
        f"plan.json: microbatches is 3, on worker 0 it is {plan.microbatches}",
        "option clip_norm is 1.0, on worker 0 it is None",
    ]
    set_flag(torch.backends.mkldnn.matmul, "fp32_precision", "bf16")
    assert differences(facts_of(plan, options), facts) == [
        "precision is torch.backends.mkldnn.matmul.fp32_precision = bf16, on worker 0 it is torch's defaults"
    ]
    facts = facts_of(plan, options)
    moved = dataclasses.replace(options, out="elsewhere")
    assert differences(facts_of(plan, moved), facts_of(plan, dataclasses.replace(options, out="here"))) == []


def test_a_process_takes_its_device_before_it_imports_the_model_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else CUDA code at the top of the file makes a context on device 0 in every process."""
    done: list[object] = []
    monkeypatch.setattr(membership, "own_device", done.append)

    def load(*given: object, **more: object) -> None:
        done.append("imported")
        raise TaskError("enough")

    monkeypatch.setattr(membership, "task_of_run", load)
    with ExitStack() as held, pytest.raises(TaskError, match="enough"):
        agree(RunOptions(str(folder / "0" / "build"), steps=1), None, 0, 2, held)
    assert done == ["cpu", "imported"]
