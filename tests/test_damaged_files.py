"""Every file that fxpipe reads, damaged in many ways: gives an error with a hint, or a value, and nothing else."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import lowered
from small_models import CASES
from traces import written as write_trace
from written_runs import write_run

import fxpipe
from fxpipe.costs.node_costs_file import MeasuredCosts
from fxpipe.costs.node_costs_file import read as read_node_costs
from fxpipe.errors import BuildError, FxpipeError
from fxpipe.inspection.run_comparison import comparison
from fxpipe.ir.program_table import read_table
from fxpipe.ir.saved_program import read_programs
from fxpipe.observe.run_folder import read_run
from fxpipe.passes import every_pass
from fxpipe.plan.build_folder import read_plan
from fxpipe.plan.signed import signed
from fxpipe.planner.costs_file import read_costs
from fxpipe.planner.device import read_device_spec
from fxpipe.planner.pipedream import read_profile

ROUNDS = 60
PLAN = lowered("function", workers=2).plan
NESTED = "[" * 100_000
STRANGE: tuple[Any, ...] = (None, True, -1, 7, 1e308, float("nan"), "", "x", [], [[]], {}, {"x": 1}, 10**30)
TEXTS: tuple[bytes, ...] = (b"", b"null", b"[]", b"{}", b"\xff\xfe", b"\0", NESTED.encode(), b'{"a":' + NESTED.encode())


def damaged(body: Any, rng: random.Random) -> Any:
    """A copy in which one value, somewhere, is strange, missing, or one too many."""
    body = copy.deepcopy(body)
    place, key = body, rng.choice(list(body))
    while isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.85:
        place = place[key]
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
    kind = rng.random()
    if kind < 0.15:
        del place[key]
    elif kind < 0.25 and isinstance(place, dict):
        place["unheard_of"] = 1
    else:
        place[key] = rng.choice(STRANGE)
    return body


def damages(text: str) -> Iterator[bytes]:
    rng = random.Random(0)
    yield from TEXTS
    for _ in range(20):
        yield text.encode()[: rng.randrange(len(text))]
        at = rng.randrange(len(text))
        yield text.encode()[:at] + bytes([rng.randrange(256)]) + text.encode()[at + 1 :]
    for _ in range(ROUNDS):
        yield json.dumps(damaged(json.loads(text), rng)).encode()


def check(path: Path, read: Callable[[], Any], contents: Iterator[bytes]) -> int:
    """How many of the contents are refused."""
    refused = 0
    for content in contents:
        path.write_bytes(content)
        error = None
        try:
            read()
        except FxpipeError as found:
            error = found
            refused += 1
        assert error is None or error.hint, (str(error), content[:200])
    return refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "build"
    lowered("function", workers=2).save(folder)
    costs = MeasuredCosts("mark", {"mm": 1e-3, "add": 0.0}, {"F": 1.0, "B": 1.1})
    (folder / "node_costs.json").write_text(costs.to_json())
    return folder


READERS: dict[str, Callable[[Path], Any]] = {
    "plan.json": lambda path: read_plan(path.parent),
    "costs.json": lambda path: read_costs(path.parent, PLAN),
    "nodes.json": read_table,
    "program.json": lambda path: read_programs(path, every_pass()),
    "profile.json": read_profile,
    "node_costs.json": lambda path: read_node_costs(path, "mark"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_a_build(folder: Path, tmp_path: Path, name: str) -> None:
    text = (folder / name).read_text()
    path = tmp_path / name
    path.write_text(text)
    READERS[name](path)
    assert check(path, partial(READERS[name], path), damages(text)) > ROUNDS / 2


def test_a_plan_that_was_signed_again(folder: Path, tmp_path: Path) -> None:
    """What no longer has the digest to protect it: types, and what refers to what."""
    rng = random.Random(1)
    body = json.loads((folder / "plan.json").read_text())

    def contents() -> Iterator[bytes]:
        for _ in range(2 * ROUNDS):
            changed = damaged({k: v for k, v in body.items() if k != "digest"}, rng)
            yield signed(changed).encode()

    assert check(tmp_path / "plan.json", lambda: read_plan(tmp_path), contents()) > ROUNDS
    path = tmp_path / "plan.json"
    changed = {k: v for k, v in body.items() if k != "digest"}
    changed["steps"][0]["stages"][0]["forward_units"][1] = "3"
    path.write_text(signed(changed))
    with pytest.raises(BuildError, match=r"plan\.json cannot be read: expected int, got str") as caught:
        read_plan(tmp_path)
    assert caught.value.where == f"{path}, $.steps[0].stages[0].forward_units[1]"


def changed_plan(folder: Path, path: Path, **changes: Any) -> Path:
    """A copy of the build whose plan someone has changed, and signed again."""
    shutil.copytree(folder, path)
    body = {k: v for k, v in json.loads((path / "plan.json").read_text()).items() if k != "digest"}
    for name, value in changes.items():
        record, _, field = name.rpartition(".")
        (body[record] if record else body if name in body else body["steps"][0])[field] = value
    (path / "plan.json").write_text(signed(body))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"microbatches": 2**31}, r"there are 2147483648 microbatches: a plan has 1 to 4096"),
        ({"microbatches": 0}, r"there are 0 microbatches"),
        ({"device": "0.1.0"}, r"there is no device '0\.1\.0'"),
        ({"batch_spec": ""}, "not a pytree in torch"),
        ({"batch_spec": "[1, " + "[" * 100_000}, "not a pytree in torch"),
        ({"weights.file": "../weights.safetensors"}, r"is not a file of the build"),
        ({"weights.file": "/etc/passwd"}, r"is not a file of the build"),
        ({"model_file.sources": {"../../secret": "0"}}, r"is not a file next to the model file"),
        ({"model_file.sources": {"/etc/passwd": "0"}}, r"is not a file next to the model file"),
    ],
)
def test_a_plan_that_no_compile_makes(folder: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BuildError, match=words) as caught:
        read_plan(changed_plan(folder, tmp_path / "build", **changes))
    assert caught.value.where
    assert caught.value.hint


@pytest.mark.parametrize("name", ["stage_0.py", "weights.safetensors", "plan.json", "costs.json", "engines"])
def test_a_link_out_of_the_build(folder: Path, tmp_path: Path, name: str) -> None:
    """A stranger's build may read, and run, no file of yours."""
    build = tmp_path / "build"
    shutil.copytree(folder, build)
    (tmp_path / "elsewhere").mkdir()
    if (build / name).exists():
        (build / name).rename(tmp_path / "elsewhere" / name)
    (build / name).symlink_to(tmp_path / "elsewhere" / name)
    with pytest.raises(BuildError, match=f"{name} leads out of the build, to {tmp_path}/elsewhere/{name}") as caught:
        read_plan(build)
    assert caught.value.where == str(build / name)
    assert caught.value.hint
    (tmp_path / "link").symlink_to(folder)
    assert read_plan(tmp_path / "link") == read_plan(folder), "the build itself may be one"


def test_what_is_not_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(BuildError, match="it is not a file"):
        read_table(tmp_path / "pipe.json")


def test_a_stage_that_is_not_utf8(folder: Path, tmp_path: Path) -> None:
    build = fxpipe.load(folder)
    build.save(tmp_path / "build")
    (tmp_path / "build" / "stage_0.py").write_bytes(b"\xff")
    with pytest.raises(BuildError, match=r"stage_0\.py cannot be read") as caught:
        fxpipe.load(tmp_path / "build")
    assert caught.value.hint


class Own(torch.optim.SGD):
    """Its attributes are in checkpoints, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.count, self.shares = 0, {"all": [torch.ones(2), 0.5]}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1
        self.shares["all"][0].mul_(0.5)


def own_optimizer(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return Own([p for _, p in named], lr=0.1, momentum=0.9)


def adam(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


HOOKS = {"adam": {"optimizer": adam, "lr_scheduler": falling}, "own": {"optimizer": own_optimizer}}
RESUMED: dict[str, Any] = {"accept_optimizer_per_worker": True, "policy": "spectrain+ef", "clip_norm": 1.0}


def manifest_of(folder: Path) -> Any:
    """A checkpoint's manifest, without its signature."""
    manifest = json.loads((folder / "checkpoint.json").read_text())
    del manifest["digest"]
    return manifest


def sign_again(folder: Path, manifest: Any, *files: Path) -> None:
    """Write a manifest that fits the files that were changed."""
    for file in files:
        content = file.read_bytes()
        manifest["files"][file.name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / "checkpoint.json").write_text(signed(manifest))


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize(
    ("name", "rounds"), [("adam", 6), ("own", 6), *(pytest.param(n, 80, marks=pytest.mark.slow) for n in HOOKS)]
)
def test_a_checkpoint_that_was_signed_again(folder: Path, tmp_path: Path, name: str, rounds: int, worker: int) -> None:
    """What is not what a run writes is refused, or goes on: no traceback, no step with a type that is wrong."""
    build, batches = fxpipe.load(folder), CASES["function"].batches(8, 8)
    with build.local(out=tmp_path / "out", checkpoint_every=2, ema=0.9, **HOOKS[name], **RESUMED) as pipeline:
        for batch in batches[:5]:
            pipeline.step(batch)
    whole = tmp_path / "out" / "checkpoints" / "step-4"
    rng, refused = random.Random(f"{name} {rounds} {worker}"), 0
    for number in range(rounds):
        path = tmp_path / f"step-{number}"
        shutil.copytree(whole, path)
        file = path / f"worker-0000{worker + 1}-of-00002.json"
        manifest = manifest_of(path)
        if rng.random() < 0.2:
            sign_again(path, damaged(manifest, rng))
        else:
            body = json.loads(file.read_text())
            deep = rng.random() < 0.7
            body = body | {"optimizer": damaged(body["optimizer"], rng)} if deep else damaged(body, rng)
            file.write_text(json.dumps(body))
            sign_again(path, manifest, file)
        error: Exception | None = None
        try:
            with build.local(resume=str(path), ema=0.9, **HOOKS[name], **RESUMED) as pipeline:
                for batch in batches[4:6]:
                    pipeline.step(batch)
        except Exception as found:
            error = found
            refused += 1
        assert error is None or (isinstance(error, FxpipeError) and error.hint), (
            repr(error),
            manifest,
            file.read_text(),
        )
    assert refused > rounds / 4


CODE = [
    ("own", ("optimizer", "parts", 0, "attributes", "step"), {"dtype": "ones"}),
    ("own", ("optimizer", "parts", 0, "attributes", "step"), 1),
    ("own", ("optimizer", "parts", 0, "attributes", "count"), {"dtype": "set_num_threads"}),
    ("adam", ("scheduler", "step"), 1),
    ("adam", ("scheduler", "get_lr"), None),
]


@pytest.mark.parametrize(("name", "place", "value"), CODE, ids=[f"{place[-1]}-{value}" for _, place, value in CODE])
def test_a_checkpoint_replaces_no_code(
    folder: Path, tmp_path: Path, name: str, place: tuple[str | int, ...], value: Any
) -> None:
    build, batch = fxpipe.load(folder), CASES["function"].batches(1, 8)[0]
    with build.local(out=tmp_path, checkpoint_every=1, **HOOKS[name], **RESUMED) as pipeline:
        pipeline.step(batch)
        pipeline.flush()
    path = tmp_path / "checkpoints" / "step-1"
    file = path / "worker-00001-of-00002.json"
    body = json.loads(file.read_text())
    *way, last = place
    held = body["optimizer"]["updater"]
    for key in way:
        held = held[key]
    held[last] = value
    file.write_text(json.dumps(body))
    sign_again(path, manifest_of(path), file)
    with pytest.raises(FxpipeError, match=r"is not a state but code|is not a dtype") as error:
        build.local(resume=str(path), **HOOKS[name], **RESUMED).close()
    assert error.value.hint


def test_a_device_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    tables = {
        "device": {"flops": ["1T", 1, -1, True, [], {}, {"float32": "1T"}, {"float32": []}, {"x": 1}, "x"]},
        "links": {"bandwidth": ["1GB/s", [[1, 2]], [[1, 2], [3, "x"]], [[]], {}, True, "-1", "nan"]},
        "unheard_of": {"a": [1]},
    }
    contents = [
        f"[{table}]\n{key} = {json.dumps(value).replace(': ', ' = ')}\n".encode()
        for table, keys in tables.items()
        for key, values in keys.items()
        for value in values  # type: ignore[attr-defined]
    ]
    contents += [b"\xff", b"links = 3", b"[", b"a = " + NESTED[:5000].encode()]
    assert check(path, lambda: read_device_spec(path), iter(contents)) > len(contents) / 2


def test_a_run_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """No damage of a run's files stops a reader: what is missing is said."""
    folder = write_run(tmp_path / "run", steps=1, trace="trace.json")
    events = [("F", "F0", 0, 0, 0, 300), ("B", "B0", 0, 0, 300, 900)]
    write_trace(folder / "trace.json", [events, events])
    whole = read_run(folder)
    assert whole["timeline"]
    for name in ("run.json", "metrics.jsonl", "trace.json"):
        text = (folder / name).read_text()
        lines = text.encode().splitlines(keepends=True)
        last = max(i for i, line in enumerate(lines) if b'"F"' in line or name != "trace.json")
        for content in damages(text if name == "run.json" else lines[last].decode().strip().rstrip(",")):
            spoilt = content if name == "run.json" else b"".join([*lines[:last], content, b"\n", *lines[last + 1 :]])
            (folder / name).write_bytes(spoilt)
            found = read_run(folder)
            json.dumps(found, allow_nan=False)
            comparison(found, whole)
        (folder / name).write_text(text)
