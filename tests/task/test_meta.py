"""Models larger than memory: captured, compiled and run without the parameters' values being anywhere as a whole."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import lowered
from commands import QUICK, fxpipe
from safetensors.torch import load_file, save_file
from small_models import CASES
from torch import Tensor, nn

import fxpipe as package
from fxpipe.errors import BackendError, CaptureError, TaskError
from fxpipe.plan.build_folder import load_plan
from fxpipe.runtime.worker.initial_weights import initialised
from fxpipe.task.meta import on_meta, to_device

MODEL = """\
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.scale = nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        for block in self.blocks:
            nn.init.normal_(block.weight, std=0.5)

    def forward(self, ids):
        x = self.embed(ids).mean(1) * self.scale
        for block in self.blocks:
            x = F.dropout(torch.tanh(block(x)), 0.1, self.training)
        return self.head(self.norm(x))


def model():
    return Net()


def loss(model, batch):
    return F.cross_entropy(model(batch["ids"]), batch["y"])


def train_data():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 12, (5, 4, 3), generator=generator)
    return [{"ids": i, "y": i.sum(1) % 12} for i in ids]


def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1, momentum=0.9)


def eval_data():
    return train_data()[:2]


def metrics(model, batch):
    return {"held_out": loss(model, batch)}
"""
LARGE = MODEL.replace("8", "32768").replace("range(4)", "range(24)")
MEASURE = """\
import json, resource, sys, time
import torch
import fxpipe.cli.compile, fxpipe.lowering.lower, fxpipe.passes, fxpipe.task.model_file
from fxpipe.cli.main import main

model, build = sys.argv[1:]
fxpipe.task.model_file.load_task(model)  # imports what the model file imports
imported, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
try:
    main(["compile", model, "-n", "8", "--meta", "-o", build, "--json"])
except SystemExit as stopped:
    assert stopped.code == 0
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": time.process_time() - begin, "bytes": 1024 * (peak - imported)}))
"""


@pytest.mark.parametrize("name", ["gpt", "conv", "dict"])
def test_the_stages_are_those_of_the_model_with_values(name: str) -> None:
    case = CASES[name]
    batch = case.batches(1, 8)[0]
    model = on_meta(case.make).model
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    made = package.compile(model, case.loss, batch, workers=2)
    usual = lowered(name, workers=2)
    assert made.files == usual.files
    assert made.plan.weights.meta
    assert not usual.plan.weights.meta
    assert not {p.name for p in made.plan.parameters} & set(made.tensors)
    assert made.costs.optimizer_bytes == usual.costs.optimizer_bytes


def test_ties_lists_moves_and_casts() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            own = nn.Parameter(torch.ones(4, 4))
            self.first, self.second, self.listed = nn.Linear(4, 4), nn.Linear(4, 4), [own]
            self.first.weight = self.second.weight = own
            self.register_buffer("table", torch.arange(4))
            self.to("cpu").to(torch.float64).cpu()

    model = on_meta(Tied).model
    assert model.first.weight is model.second.weight is model.listed[0]
    assert model.first.weight.is_meta
    assert model.first.bias.dtype == torch.float64
    assert model.table.tolist() == [0, 1, 2, 3]
    moved, batch = to_device("cpu", model, torch.ones(2))
    assert moved.first.weight.is_meta
    assert not batch.is_meta
    assert nn.Parameter(torch.ones(1)).device.type == nn.Linear(2, 2).weight.device.type == "cpu", "as before"


def _squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


class _Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", self.weight.detach() > 0)


class _Held(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.held = self.weight.detach() * 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.held


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_Masked, "buffers without values, on the meta device: mask"),
        (_Held, "the step reads held, which was made from a parameter that has no value"),
    ],
)
def test_what_is_made_from_parameters_has_no_value(make: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        package.capture(on_meta(make).model, _squares, torch.ones(2, 4))


def test_some_parameters_without_values() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(CaptureError, match=r"some parameters have values.*: 0.weight, 0.bias have values"):
        package.capture(model, _squares, torch.ones(2, 4))


@pytest.mark.parametrize(("option", "value"), [("cost", "measured"), ("backend", "inductor")])
def test_what_needs_values_is_refused(option: str, value: str) -> None:
    options: Any = {option: value}
    with pytest.raises(BackendError, match="have no values"):
        package.compile(on_meta(lambda: nn.Linear(4, 4)).model, _squares, torch.ones(2, 4), workers=1, **options)


def test_a_build_from_objects_wants_the_model_or_a_checkpoint(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    build = package.compile(on_meta(make).model, _squares, torch.ones(2, 4), workers=2)
    with pytest.raises(TaskError, match="no model to initialise them"):
        build.local()
    model = make()
    save_file(model.state_dict(), tmp_path / "start.safetensors")
    state = build.local(weights=tmp_path / "start.safetensors").state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert build.local(model=make).step(torch.ones(2, 4)).isfinite()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file, its builds with values (`usual`) and without (`build`, of 2 workers, and `three`)."""
    made = tmp_path_factory.mktemp("meta")
    (made / "model.py").write_text(MODEL)
    assert fxpipe("compile", made / "model.py", "-o", made / "usual", *QUICK).code == 0
    for name, workers in (("build", 2), ("three", 3)):
        result = fxpipe("compile", made / "model.py", "--meta", "-n", workers, "-o", made / name)
        assert result.code == 0, result
        assert "weights: none (--meta)" in result.out
    return made


def _trained(folder: Path, build: str, out: str, *options: object) -> tuple[list[float], dict[str, Tensor]]:
    given = ("--steps", 6, "--out", folder / out, "--threads", 1, "--json")
    losses = fxpipe("run", folder / build, *given, *options).json["losses"]
    return losses, load_file(folder / out / "model.safetensors")


def _equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_from_a_checkpoint_the_run_is_that_of_the_ordinary_build(folder: Path) -> None:
    held = load_file(folder / "build" / "weights.safetensors")
    assert {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} <= set(held)
    assert "embed.weight" not in held
    usual = _trained(folder, "usual", "usual_out", "--local")
    given = ("--weights", folder / "usual" / "weights.safetensors")
    assert usual[0] == _trained(folder, "build", "out", *given)[0]
    assert _equal(usual[1], load_file(folder / "out" / "model.safetensors"))


@pytest.mark.slow
def test_without_one_model_gives_the_values_however_it_is_cut(folder: Path) -> None:
    losses, state = _trained(folder, "build", "own", "--local", "--steps", 40)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    again = _trained(folder, "build", "own_again", "--local")
    apart = _trained(folder, "build", "own_apart")
    assert again[0] == apart[0] == losses[:6]
    assert _equal(again[1], apart[1])
    assert torch.equal(state["embed.weight"], state["head.weight"])
    assert _trained(folder, "build", "own_other", "--local", "--seed", 1)[0] != apart[0]
    two, three = (package.load(folder / name) for name in ("build", "three"))
    namespace: dict[str, Any] = {}
    exec(MODEL, namespace)
    values = two.local(model=namespace["model"], seed=3).state_dict()
    assert _equal(values, three.local(model=namespace["model"], seed=3).state_dict())
    assert 0.3 < float(values["blocks.2.weight"].std()) < 0.7, "model() itself sets it"


def own_rejection(tensor: Tensor) -> None:
    """Draws until every value fits; how often that is, the values say."""
    with torch.no_grad():
        tensor.normal_()
        while not tensor.is_meta and bool((tensor.abs() > 1).any()):
            tensor.copy_(torch.where(tensor.abs() > 1, torch.empty_like(tensor).normal_(), tensor))


def outside(tensor: Tensor) -> None:
    """Draws a tensor of its own, and multiplies by another."""
    with torch.no_grad():
        tensor.copy_(torch.randn(tensor.shape)).mul_(1 + torch.rand(1))


INITIALISERS: dict[str, Callable[[Tensor], Any]] = {
    "orthogonal": nn.init.orthogonal_,
    "trunc_normal": nn.init.trunc_normal_,
    "narrow trunc_normal": lambda tensor: nn.init.trunc_normal_(tensor, a=1.5, b=2.0),
    "sparse": lambda tensor: nn.init.sparse_(tensor, 0.5),
    "xavier_normal": nn.init.xavier_normal_,
    "own rejection": own_rejection,
    "outside": outside,
}


@pytest.mark.parametrize("name", INITIALISERS)
def test_a_worker_alone_gives_its_parameters_the_same_values(name: str) -> None:
    """Whatever the others have: some initialisers draw nothing for a tensor without memory, others until it fits."""

    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)), nn.Linear(6, 6))
        for layer in model[:4]:
            INITIALISERS[name](layer.weight)
        with torch.no_grad():
            model[4].weight.copy_(torch.randn(6, 6))
        return model

    batch = torch.randn(4, 6)
    build = package.compile(on_meta(make).model, lambda m, x: m(x).square().mean(), batch, workers=2, cost="analytic")
    parameters = build.plan.parameters
    together = initialised(build.plan, parameters, make, 3)
    for parameter in parameters:
        (alone,) = initialised(build.plan, [parameter], make, 3).values()
        assert torch.equal(alone, together[parameter.name]), parameter.name
    values = [together[f"{k}.weight"] for k in range(5)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(values, 2))


def test_a_run_goes_on_from_the_weights_of_another(folder: Path) -> None:
    _, state = _trained(folder, "usual", "first", "--local")
    build = package.load(folder / "usual")
    assert _equal(build.local(weights=folder / "first" / "model.safetensors").state_dict(), state)


def test_looking_at_it_needs_no_values(folder: Path) -> None:
    assert "F0" in fxpipe("inspect", folder / "build").out
    made = fxpipe("compile", folder / "model.py", "--meta", "--after", "cut")
    assert made.code == 0
    assert "warning" not in made.err
    assert fxpipe("plan", folder / "model.py", "--meta", "-n", 2, "--json").json["microbatches"] == 1
    difference = fxpipe("diff", folder / "build", folder / "usual").out
    assert "the initial weights differ" in difference


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cost", "measured"), "--cost measured runs the step"),
        (("--verify",), "--verify runs the step"),
        (("--backend", "auto"), "--backend auto is tried on the stages"),
    ],
)
def test_options_that_need_values(folder: Path, options: tuple[str, ...], message: str) -> None:
    result = fxpipe("compile", folder / "model.py", "--meta", "-o", folder / "none", *options)
    assert result.code == 2
    assert message in result.err


def test_a_model_that_looks_at_values(tmp_path: Path) -> None:
    looking = MODEL.replace("return Net()", "net = Net()\n    assert net.scale.sum() < 99\n    return net")
    (tmp_path / "model.py").write_text(looking)
    result = fxpipe("compile", tmp_path / "model.py", "--meta", "-o", tmp_path / "none")
    assert result.code == 1
    assert "model.py:27: assert net.scale.sum() < 99" in result.err
    assert "hint: parameters have no values here (--meta)" in result.err


def test_an_export_needs_values(folder: Path) -> None:
    result = fxpipe("export", folder / "build", "-o", folder / "onnx")
    assert result.code == 1
    assert "has no values of its parameters" in result.err


@pytest.mark.slow
def test_a_model_of_100_gigabytes(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(LARGE)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "model.py"), str(tmp_path / "build")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    _, measured = (json.loads(line) for line in done.stdout.splitlines())
    plan = load_plan(tmp_path / "build")
    assert sum(p.tensor.bytes for p in plan.parameters) > 100e9
    assert plan.workers == 8
    assert measured["bytes"] < 2 << 30
    assert measured["seconds"] < 60


class Asks(nn.Module):
    """Asks parameters where they are, and makes tensors there."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 24), nn.ReLU())
        where = next(self.trunk.parameters()).device
        self.head = nn.Linear(self.trunk(torch.zeros(1, 16, device=where)).shape[-1], 4)
        self.copied = copy.deepcopy(self.head)
        self.register_buffer("places", torch.arange(4, device=self.copied.weight.device))
        self.register_buffer("mask", torch.ones(3).to(torch.float16, False, True))
        self.sparse = nn.Parameter(torch.eye(4).to_sparse())


def test_code_that_asks_for_a_device_gets_the_one_that_there_would_be() -> None:
    model = on_meta(Asks).model
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.head.weight.shape == (4, 24)
    assert model.sparse.layout == torch.sparse_coo, "refused later, by its name"
    assert [b.device.type for b in model.buffers()] == ["cpu", "cpu"]
