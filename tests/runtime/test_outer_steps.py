"""Replicas that train apart: their own weights between outer steps, what they send, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from apart import compiled_file, launched
from cached import captured, cuts
from pipelines import pipeline_of
from small_models import CASES
from torch import Tensor, nn

import fxpipe as fxp
from fxpipe.errors import FxpipeError, NotFiniteError, RunError
from fxpipe.inspection.sentences import outer_facts, outer_text
from fxpipe.lowering.option_rules import outer_spec
from fxpipe.lowering.options import CompileOptions, options_like
from fxpipe.plan.build_folder import read_plan
from fxpipe.plan.consistency import check
from fxpipe.plan.mesh import OuterSpec
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.ends import process_name
from fxpipe.runtime.process.start import run_local
from fxpipe.runtime.wires.collective import LocalCollective
from fxpipe.typed_json import Malformed

STEPS = 7
Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def entropy(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches(count: int = STEPS, ignored: bool = False) -> list[Batch]:
    draw = torch.Generator().manual_seed(3)
    made = [(torch.randn(12, 6, generator=draw), torch.randint(0, 3, (12,), generator=draw)) for _ in range(count)]
    if ignored:
        for _, target in made:
            target[torch.rand(12, generator=draw) < 0.4] = -100
    return made


def compiled(net: nn.Module, loss: Loss, dp: int, own: int, workers: int, **options: Any) -> fxp.Build:
    cuts_at = ["2"] if workers == 2 else ()
    asked: dict[str, Any] = {
        "schedule": "1f1b",
        "forward_at": cuts_at,
        "cost": "analytic",
        "outer": "diloco",
        **options,
    }
    return fxp.compile(net, loss, batches(1)[0], workers=workers, dp=dp, microbatches=own, **asked)


def trained(build: fxp.Build, folder: Path, optimizer: Any, data: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    build.save(folder)
    pipeline = pipeline_of(folder, optimizer)
    return pipeline.run(data), pipeline.state_dict()


@pytest.mark.parametrize(
    ("delay", "codec"), [(0, "none"), (1, "none"), (1, "outer=sparseloco:8"), (0, "outer=lowrank:1")]
)
def test_a_flush_is_an_outer_step_out_of_turn(tmp_path: Path, delay: int, codec: str) -> None:
    """Of what was trained since the last one; one without any training changes nothing."""
    compiled(network(), entropy, 2, 1, 2, outer_every=4, outer_delay=delay, codec=codec).save(tmp_path / "build")
    pipeline = pipeline_of(tmp_path / "build", sgd)

    def weights(replica: int) -> dict[str, Tensor]:
        own = [e for e in pipeline.every if e.replica == replica]
        return {name: value.clone() for e in own for name, value in e.store.trained.items()}

    for step, batch in enumerate(batches(10), 1):
        pipeline.step(batch)
        if step in (3, 5, 7):
            before = weights(0)
            assert any(not torch.equal(value, before[name]) for name, value in weights(1).items())
            pipeline.flush()
            found = weights(0)
            assert all(torch.equal(value, found[name]) for name, value in weights(1).items())
            assert any(not torch.equal(value, before[name]) for name, value in found.items())
            pipeline.flush()
            assert all(torch.equal(value, found[name]) for name, value in weights(0).items())


@pytest.mark.parametrize(
    ("case", "policy", "clip_norm", "delay"),
    [
        ("gpt", "stash", None, 1),
        ("dict", "2bw", 0.1, 0),
        ("gpt", "spectrain+ef", 0.1, 1),
    ],
)
def test_replicas_of_one_mind_train_as_one_without_a_flush(
    tmp_path: Path, case: str, policy: str, clip_norm: float | None, delay: int
) -> None:
    """Each replica gets the same samples: then the mean of their changes is each one's, in every version of weights."""
    own = 2 if policy == "2bw" else 1
    at = cuts(CASES[case], 2, 1)
    asked: dict[str, Any] = {"workers": 2, "microbatches": own, "schedule": "async", "policy": policy, **at}
    program = captured(case, 2 * own, size=4 * own)[2]
    one = fxp.lower(program, cost="analytic", **asked)
    outer = {"outer": "diloco", "outer_every": 3, "outer_lr": 1.0, "outer_momentum": 0.0, "outer_delay": delay}
    two = fxp.lower(program, cost="analytic", dp=2, **outer, **asked)
    alone = CASES[case].batches(9, 2 * own)

    def twice(leaf: Any) -> Any:
        return torch.cat([part for part in leaf.chunk(own) for _ in range(2)]) if isinstance(leaf, Tensor) else leaf

    both = [torch.utils._pytree.tree_map(twice, batch) for batch in alone]
    results = []
    for name, build, data in (("one", one, alone), ("two", two, both)):
        build.save(tmp_path / name)
        pipeline = pipeline_of(tmp_path / name, sgd, clip_norm=clip_norm)
        results.append((pipeline.run(data), pipeline.state_dict()))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-3)
    for name, value in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], value, rtol=1e-3, atol=1e-4)


def test_a_plan_says_how_replicas_come_together(tmp_path: Path) -> None:
    build = compiled(network(), entropy, 2, 1, 2, outer_every=5, outer_delay=1)
    build.save(tmp_path / "build")
    plan = read_plan(tmp_path / "build")
    assert plan.outer == OuterSpec(5, 0.7, 0.9, 1)
    assert [stage.buckets for stage in plan.stages] == [(), ()]
    for wrong in (
        replace(plan, outer=OuterSpec(0, 0.7, 0.9)),
        replace(plan, outer=OuterSpec(5, float("nan"), 0.9)),
        replace(plan, outer=OuterSpec(5, 0.7, 1.0)),
        replace(plan, outer=OuterSpec(5, 0.7, 0.9, 2)),
        replace(plan, replicas=(), microbatches=1),
    ):
        with pytest.raises(Malformed, match="replicas cannot combine weights by outer steps"):
            check(wrong)
    with pytest.raises(Malformed, match="not every gradient is in exactly one bucket"):
        check(replace(plan, outer=None))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"codec": "outer=sparseloco"}, OuterSpec(64, 1.0, 0.0, 0, "sparseloco:64")),
        ({"codec": "outer=topk:0.1,gradient=int8"}, OuterSpec(64, 1.0, 0.0, 0, "topk:0.1")),
        (
            {"codec": "sparseloco:8", "outer_momentum": 0.5},
            OuterSpec(64, 1.0, 0.5, 0, "sparseloco:8"),
        ),
        ({"codec": "outer=int8"}, OuterSpec(64, 0.7, 0.9, 0, "int8")),
        ({"codec": "int8"}, OuterSpec(64, 0.7, 0.9)),
    ],
)
def test_codecs_of_outer_steps(asked: dict[str, Any], expected: OuterSpec) -> None:
    assert outer_spec(CompileOptions(dp=2, outer="diloco", **asked)) == expected


def test_a_build_like_another_has_its_outer_steps() -> None:
    plan = compiled(network(), entropy, 2, 1, 2, outer_every=5, codec="outer=sparseloco:8").plan
    assert plan.outer == OuterSpec(5, 1.0, 0.0, 0, "sparseloco:8")
    assert outer_spec(CompileOptions(**options_like(plan))) == plan.outer


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_run_sends_what_its_build_says(tmp_path: Path) -> None:
    """Each replica its message to both others, in each of three outer steps; weights are those of one process."""
    compiled_file(tmp_path, "1f1b", 1, 3, 1, outer_every=2, codec="outer=sparseloco:4")
    asked = {"build": str(tmp_path / "build"), "steps": 5, "progress": False}
    found = [run(RunOptions(**asked, out=str(tmp_path / run.__name__))) for run in (run_local, launched)]
    plan = fxp.load(tmp_path / "build").plan
    facts = outer_facts(plan)
    assert facts is not None
    for row in (*found[1]["workers"], *found[1]["replicas"]):
        assert row["sent"]["outer"] == 3 * facts["bytes"]
    # a, b and c: 128, 256 and 64 values, 11 bytes for 4; norm: as they are, and 64 bytes at least
    assert facts["bytes"] == 2 * (3 * 64 + 5 * 64)
    assert outer_text(facts) == "in an outer step each replica sends 1.0 KiB, 3 times fewer bytes than without a codec"
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run_local", "launched")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("run", [run_local, pytest.param(launched, marks=[pytest.mark.slow, pytest.mark.multiproc])])
def test_a_loss_of_any_replica_that_is_not_finite_ends_a_run(tmp_path: Path, run: Any) -> None:
    more = """
def loss(net, batch):
    found = nn.functional.cross_entropy(net(batch[0]), batch[1])
    return found / (batch[0][:, 0] < 90).all()

def train_data():
    batches = [(torch.zeros(12, 8), torch.arange(12) % 4) for _ in range(6)]
    batches[1][0][-1, 0] = 99.0
    return batches
"""
    compiled_file(tmp_path, "1f1b", 1, 2, 1, more, outer_every=4)
    asked = {"build": str(tmp_path / "build"), "steps": 5, "progress": False}
    with pytest.raises(NotFiniteError, match="the loss of step 2 is inf"):
        run(RunOptions(**asked, out=str(tmp_path / "out")))


def test_the_processes_of_a_replica_are_next_to_each_other() -> None:
    """So that each replica's pipeline can be on a host of its own, with slow links between hosts."""
    plan = compiled(network(), entropy, 3, 1, 2).plan
    assert [plan.mesh.seat(process) for process in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert all(plan.mesh.process_of(*plan.mesh.seat(process)) == process for process in range(6))
    assert process_name(4, plan.mesh) == "worker 0, replica 2"


def test_in_one_process_nothing_else_is_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[tuple[str, int]] = []
    for name in ("start_sum", "start_gather"):
        start = getattr(LocalCollective, name)

        def counted(self: LocalCollective, key: tuple[str, int], *given: Any, start: Any = start) -> None:
            began.append(key)
            start(self, key, *given)

        monkeypatch.setattr(LocalCollective, name, counted)
    build = compiled(network(), entropy, 2, 1, 2, outer_every=3)
    trained(build, tmp_path / "build", sgd, batches())
    assert sorted(began) == [("outer torch.float32", step) for step in (3, 3, 3, 3, 6, 6, 6, 6, 7, 7, 7, 7)]


@pytest.mark.slow
@pytest.mark.multiproc
def test_replicas_that_read_other_batches_are_told_in_the_outer_step(tmp_path: Path) -> None:
    compiled_file(tmp_path, "1f1b", 1, 2, 1, "OWN_DATA = True\n", outer_every=2)
    with pytest.raises(RunError, match="worker 0 read different batches in steps 1 to 2: replica 1 unlike"):
        launched(RunOptions(str(tmp_path / "build"), steps=3, out=str(tmp_path / "out"), progress=False))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"outer_every": 4}, "outer_every is given without --outer"),
        ({"codec": "outer=int8"}, "--codec outer=int8 is for outer steps, and there is no --outer"),
        ({"outer": "diloco"}, "outer steps need replicas, and there is one"),
        ({"outer": "fedavg", "dp": 2}, "outer='fedavg' is not one of diloco"),
        ({"outer": "diloco", "dp": 2, "outer_every": 0}, "outer_every=0 is not a whole number of at least 1"),
        (
            {"outer": "diloco", "dp": 2, "outer_momentum": 1.0},
            "outer_momentum=1.0 is not a number of at least 0",
        ),
        ({"outer": "diloco", "dp": 2, "outer_lr": float("nan")}, "outer_lr=nan is not a number above 0"),
        (
            {"outer": "diloco", "dp": 2, "outer_delay": 2},
            "outer_delay=2 is not a whole number",
        ),
    ],
)
def test_outer_steps_without_sense_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(FxpipeError, match=said):
        fxp.compile(network(), entropy, batches(1)[0], workers=1, microbatches=1, schedule="1f1b", **asked)


@pytest.mark.parametrize(
    ("more", "outer", "options", "said"),
    [
        ("def on_step(step, loss, run): pass\n", {}, {}, r"would call on_step\(\) with different numbers"),
        ("def on_eval(step, metrics, run): pass\n", {}, {}, r"would call on_eval\(\) with different numbers"),
        ("", {}, {"save_best": "held_out", "eval_every": 3}, "--save-best follows evaluations"),
        (
            "",
            {"outer_delay": 1},
            {"save_best": "held_out", "patience": 1, "eval_every": 2},
            "--save-best follows evaluations",
        ),
        (
            "def lr_scheduler(optimizer): return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), 'held_out'\n",
            {},
            {"eval_every": 3},
            r"lr_scheduler\(\) follows evaluations",
        ),
    ],
)
def test_what_replicas_would_decide_apart_is_refused(
    tmp_path: Path, more: str, outer: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    compiled_file(tmp_path, "1f1b", 1, 2, 1, more, outer_every=2, **outer)
    asked = RunOptions(str(tmp_path / "build"), steps=4, out=str(tmp_path / "out"), progress=False, **options)
    with pytest.raises(RunError, match=said):
        run_local(asked)
