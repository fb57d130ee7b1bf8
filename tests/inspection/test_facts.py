"""The facts of a build: that they add up, and agree with who counts the same elsewhere."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from typing import Any

import pytest
from cached import captured, cuts, lowered

import fxpipe
from fxpipe.errors import PolicyError
from fxpipe.inspection import timeline
from fxpipe.inspection.facts import facts, recipe_of
from fxpipe.inspection.sentences import cuts_text
from fxpipe.inspection.subject import Subject, subject_of
from fxpipe.inspection.workers import partition_rows
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.partition import of_cuts
from fxpipe.planner.setting import Setting
from fxpipe.policy import make as make_policy
from fxpipe.policy import sees
from fxpipe.schedule import make as make_schedule
from fxpipe.simulator.memory import memory_of
from fxpipe.simulator.of_build import scenario_of
from fxpipe.simulator.simulate import simulate

BUILDS: dict[str, dict[str, Any]] = {
    "planned": {"workers": 3},
    "one worker": {"workers": 1},
    "distinct": {"workers": 2, "shift": 2},
    "three-way": {"workers": 3, "cuts": "three-way"},
    "microbatches": {"workers": 3, "microbatches": 4, "schedule": "1f1b", "shift": 1},
}


@functools.cache
def subject(name: str, case: str = "gpt") -> Subject:
    options = dict(BUILDS[name])
    if "shift" in options:
        options |= cuts(captured(case, options.get("microbatches", 1))[0], options["workers"], options.pop("shift"))
    return subject_of(lowered(case, **options))


@pytest.fixture(params=BUILDS, scope="module")
def named(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def looked_at(named: str) -> Subject:
    return subject(named)


@pytest.fixture(scope="module")
def found(looked_at: Subject) -> dict[str, Any]:
    return facts(looked_at)


def places(rows: list[list[Any]]) -> dict[int, tuple[float, int]]:
    return {worker: (ms, nodes) for worker, ms, nodes in rows}


def test_they_are_plain_json(found: dict[str, Any]) -> None:
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_what_each_pass_did(found: dict[str, Any]) -> None:
    names = [line.split()[0] for line in found["build"]["passes"]]
    assert next(name for name in names if name != "next_to") == "fold"  # that is first where there are microbatches
    assert "codegen" in names


def test_modules_stand_behind_their_parents_and_hold_what_is_in_them(found: dict[str, Any]) -> None:
    modules, nodes = found["modules"], found["nodes"]
    column = {name: i for i, name in enumerate(nodes["columns"])}
    own: list[dict[str, dict[int, list[float]]]] = [{"F": {}, "B": {}} for _ in modules]
    for row in nodes["rows"]:
        if row[column["phase"]] and row[column["op"]] not in ("send", "recv"):
            spent = own[row[column["module"]]][row[column["phase"]]].setdefault(row[column["worker"]], [0.0, 0])
            spent[0] += row[column["ms"]]
            spent[1] += 1
    for number in reversed(range(len(modules))):
        module = modules[number]
        assert module["parent"] is None if number == 0 else module["parent"] < number
        for phase, key in (("F", "forward"), ("B", "backward")):
            expected = {worker: pytest.approx(tuple(spent)) for worker, spent in own[number][phase].items()}
            assert places(module[key]) == expected
            for worker, spent in own[number][phase].items() if number else ():
                above = own[module["parent"]][phase].setdefault(worker, [0.0, 0])
                above[0] += spent[0]
                above[1] += spent[1]
    assert modules[0]["nodes"] == sum(1 for row in nodes["rows"] if row[column["phase"]])
    assert [m["name"] for m in modules if m["path"] is None] == ["(loss)"]


def test_the_model_takes_what_its_workers_take(found: dict[str, Any]) -> None:
    forward, backward = places(found["modules"][0]["forward"]), places(found["modules"][0]["backward"])
    for worker in found["workers"]:
        assert forward[worker["worker"]][0] == pytest.approx(worker["forward_ms"])
        assert backward[worker["worker"]][0] == pytest.approx(worker["backward_ms"])


def test_parameters_are_counted_once(looked_at: Subject, found: dict[str, Any]) -> None:
    """The embedding is tied to the head: each has it, the model has it once."""
    model = found["modules"][0]
    assert model["parameters"] == len(looked_at.plan.parameters)
    assert model["parameter_bytes"] == sum(p.tensor.bytes for p in looked_at.plan.parameters)
    assert model["owners"] == sorted({p.owner for p in looked_at.plan.parameters})
    tied = next(p for p in looked_at.plan.parameters if len(p.names) > 1)
    for name in tied.names:
        module = next(m for m in found["modules"] if m["path"] == name.rpartition(".")[0])
        assert module["parameters"] >= 1
        assert tied.owner in module["owners"]


@pytest.mark.parametrize(
    ("schedule", "policy"),
    [(None, None), ("gpipe", None), ("1f1b", None)]
    + [("async", policy) for policy in ("latest", "stash", "vertical", "spectrain", "xpipe", "pipeoptim+keep")],
)
def test_edges_add_up_to_the_workers_traffic(looked_at: Subject, schedule: str | None, policy: str | None) -> None:
    found = facts(looked_at, schedule=schedule, policy=policy)
    arriving, leaving = [0] * looked_at.plan.workers, [0] * looked_at.plan.workers
    for edge in found["edges"]:
        times = 1 if edge["kind"] == "weights" else looked_at.plan.microbatches
        arriving[edge["dst"]] += times * edge["bytes"]
        leaving[edge["src"]] += times * edge["bytes"]
    assert arriving == [w["bytes_in"] for w in found["workers"]]
    assert leaving == [w["bytes_out"] for w in found["workers"]]


@pytest.mark.parametrize(
    ("schedule", "policy"), [("async", "stash"), ("async", "latest"), ("gpipe", None), ("1f1b", None)]
)
def test_workers_hold_what_the_timeline_shows(looked_at: Subject, schedule: str, policy: str | None) -> None:
    found = facts(looked_at, schedule=schedule, policy=policy)
    for worker, memory in zip(found["workers"], found["timeline"]["memory"], strict=True):
        assert worker["memory_bytes"] == max(memory["bytes"])


def test_another_schedule_and_another_policy_change_what_workers_hold_and_send() -> None:
    """`gpipe` holds all microbatches everywhere; prediction sends weights for several distances."""
    own = subject("microbatches")
    assert [w["in_flight"] for w in facts(own)["workers"]] == [3, 2, 1]
    flushed = facts(own, schedule="gpipe")["workers"]
    assert [w["in_flight"] for w in flushed] == [4, 4, 4]
    compiled = {w.rank: w for w in own.costs.workers}
    for w in flushed:
        assert w["memory_bytes"] != compiled[w["worker"]].memory_bytes
    alternating = facts(own, schedule="1f1b")["workers"]
    more = flushed[0]["memory_bytes"] - alternating[0]["memory_bytes"]  # one microbatch, part of which was sent anyway
    left = compiled[0].parts[0].left
    assert 0.8 * left < more < left
    twice, once = (facts(own, schedule="async", policy=policy)["workers"] for policy in ("spectrain", "stash"))
    assert sum(w["bytes_in"] for w in twice) > sum(w["bytes_in"] for w in once)


def test_speeds_divide_the_workers_times() -> None:
    own = subject("planned")
    slow = dataclasses.replace(own, costs=dataclasses.replace(own.costs, speeds=(1.0, 0.5, 2.0), partitions=()))
    even, uneven = (facts(s) for s in (own, slow))
    assert (even["build"]["speeds"], uneven["build"]["speeds"]) == ([], [1.0, 0.5, 2.0])
    for one, other, speed in zip(even["workers"], uneven["workers"], (1.0, 0.5, 2.0), strict=True):
        assert other["speed"] == speed
        for name in ("forward_ms", "backward_ms", "update_ms"):
            assert other[name] == pytest.approx(one[name] / speed)
    busy = [
        sum(end - start for w, _, _, _, start, end in uneven["timeline"]["spans"] if w == worker) for worker in range(3)
    ]
    per = [1e-3 * (w["forward_ms"] + w["backward_ms"] + w["update_ms"]) for w in uneven["workers"]]
    runs = uneven["timeline"]["minibatches"]
    assert all(b >= runs * p * (1 - 1e-9) for b, p in zip(busy, per, strict=True))


def test_weight_copies_have_their_edges(found: dict[str, Any]) -> None:
    for worker in found["workers"]:
        sent = [
            n for e in found["edges"] if e["kind"] == "weights" and e["dst"] == worker["worker"] for n in e["names"]
        ]
        assert sorted(sent) == sorted(worker["copy_names"])


def test_one_partition_is_the_builds_own(named: str, looked_at: Subject, found: dict[str, Any]) -> None:
    (chosen,) = (p for p in found["partitions"] if p["chosen"])
    pinned = "shift" in BUILDS[named]
    assert chosen["mode"] == found["build"]["cuts"]
    assert (chosen["mode"] == "pinned") is pinned
    assert len(found["partitions"]) == (1 if pinned else len(looked_at.costs.partitions))
    assert chosen["efficiency"] == found["build"]["efficiency"]
    for partition in found["partitions"]:
        assert (partition["exact"] is None) is (partition["mode"] == "pinned")
        assert partition["bottleneck_ms"] == pytest.approx(max(w["total_ms"] for w in partition["workers"]))
        assert partition["efficiency"] == pytest.approx(partition["ideal_ms"] / partition["bottleneck_ms"])
    slowest = [p["bottleneck_ms"] for p in found["partitions"]]
    assert slowest == sorted(slowest, reverse=True), "wider kinds of cuts hold the narrower ones"


@pytest.mark.parametrize("mode", ["same", "bidirectional", "three-way"])
def test_given_cuts_cost_what_the_planner_says(mode: Any) -> None:
    build = lowered("gpt", workers=3, cuts=mode)
    chosen, plan = build.partitions[-1], build.plan
    assert build.profile is not None
    known = build.costs
    setting = Setting(
        plan.schedule,
        plan.policy,
        links=known.links,
        optimizer_bytes=known.optimizer_bytes,
        policy_times=known.policy_times,
    )
    priced = of_cuts(build.profile, setting.workers(3), chosen.cuts, mode=mode)
    assert dataclasses.replace(priced, lower_bound=chosen.lower_bound) == chosen
    assert chosen.moved == pytest.approx(sum(worker.bytes_in for worker in known.workers), rel=0.2)


def test_separate_cuts_are_told_with_what_they_move() -> None:
    partition = lowered("gpt", workers=3, cuts="same").partitions[-1]
    same = dataclasses.replace(partition, bottleneck=partition.ideal / 0.956, moved=1e9)
    separate = dataclasses.replace(same, mode="bidirectional", bottleneck=partition.ideal / 0.98, moved=3e9)
    moved = "for 1.9 GiB a minibatch more between workers"
    assert cuts_text("bidirectional", partition_rows([same, separate]), "") == (
        f"bidirectional, 0.980 of ideal {moved} (same 0.956)"
    )
    assert cuts_text("same", partition_rows([separate, same]), f"1 % {moved}") == (
        f"same, 0.956 of ideal (bidirectional 0.980); 1 % {moved}"
    )
    timed = [dataclasses.replace(same, simulated=1.03), dataclasses.replace(separate, simulated=1.0)]
    assert cuts_text("bidirectional", partition_rows(timed), "").endswith(" (same 0.956, 3.0% slower)")
    assert cuts_text("pinned", partition_rows([same])[:1], "") == "pinned, 0.956 of ideal"


def test_pinned_cuts_do_what_their_units_do(found: dict[str, Any], named: str) -> None:
    (chosen,) = (p for p in found["partitions"] if p["chosen"])
    for rank, load in enumerate(chosen["workers"]):
        for kind, key in (("forward", "forward_ms"), ("backward", "backward_ms"), ("weights", "weight_ms")):
            assert load[key] == pytest.approx(sum(u[key] for u in found["units"] if u[kind] == rank))


def test_the_timeline_is_the_simulators(looked_at: Subject, found: dict[str, Any]) -> None:
    recipe = recipe_of(looked_at, None, None)
    assert recipe is not None
    shown = found["timeline"]
    scenario = scenario_of(looked_at.plan, looked_at.costs, recipe.demand)
    run = simulate(recipe.schedule, scenario, shown["minibatches"])
    assert shown["seconds"] == run.seconds
    for worker, memory in enumerate(shown["memory"]):
        row = list(recipe.schedule.until(worker, shown["minibatches"]))
        held = memory_of(looked_at.plan, looked_at.costs, recipe.demand, worker, row)
        assert max(memory["bytes"]) == max(moment.during for moment in held)
        assert (memory["bytes"][0], memory["bytes"][-1]) == (max(held[0].before, memory["bytes"][0]), held[-1].after)
        assert memory["seconds"] == sorted(set(memory["seconds"]))
        spans = [s for s in shown["spans"] if s[0] == worker]
        assert sum(s[5] - s[4] for s in spans) == pytest.approx(sum(s.end - s.start for s in run.spans[worker]))
        assert all(a[5] <= b[4] + 1e-12 for a, b in itertools.pairwise(spans))


def test_so_much_of_the_timeline_as_a_page_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "SPANS", 40)
    shown = facts(subject("planned"))["timeline"]
    assert shown["minibatches"] == 3
    assert len(shown["spans"]) < 40


def test_the_forecast_is_the_compiles(looked_at: Subject, found: dict[str, Any]) -> None:
    from fxpipe.simulator.of_build import forecast

    expected = forecast(looked_at.plan, looked_at.costs)
    assert found["forecast"]["milliseconds"] == 1e3 * expected.seconds_per_minibatch
    assert found["forecast"]["bubble"] == expected.bubble
    assert 1 - sum(found["forecast"]["busy"]) / looked_at.plan.workers == pytest.approx(expected.bubble)


@pytest.mark.parametrize(("schedule", "policy"), [("async", "stash"), ("async", None), ("gpipe", None)])
def test_another_schedule_and_policy(schedule: str, policy: str | None) -> None:
    found = facts(subject("planned"), schedule=schedule, policy=policy)
    named = found["grid"]["policy"]
    assert named == (policy or {"async": "spectrain", "gpipe": "latest"}[schedule])
    assert (found["forecast"]["schedule"], found["forecast"]["policy"]) == (schedule, named)
    assert found["build"]["policy"] == "spectrain"
    minibatches = 1 + max(int(cell[1:].split("@")[0]) for row in found["grid"]["rows"] for cell in row if cell != "..")
    lines = sees(make_policy(named), make_schedule(schedule, 3), minibatches).splitlines()
    assert [line.split()[2:] for line in lines] == found["grid"]["rows"]
    (chosen,) = (p for p in found["partitions"] if p["chosen"])
    assert chosen["efficiency"] == found["build"]["efficiency"]
    modes = [p["mode"] for p in found["partitions"]]
    if policy is None and schedule == "async":
        assert chosen["mode"] == found["build"]["cuts"]
        return
    assert modes == ["pinned"]
    assert (chosen["mode"], chosen["exact"]) == ("pinned", None)


def test_a_run_brings_its_own(looked_at: Subject) -> None:
    run = {"schedule": "gpipe", "policy": "latest"}
    found = facts(looked_at, run=run)
    assert (found["grid"]["schedule"], found["grid"]["policy"]) == ("gpipe", "latest")
    assert found["run"] is run


def test_a_policy_that_only_the_model_file_knows() -> None:
    own = subject("planned")
    strange = dataclasses.replace(own, plan=dataclasses.replace(own.plan, policy="mine+fast"))
    found = facts(strange)
    assert (found["forecast"], found["timeline"], found["grid"]["rows"]) == (None, None, [])
    assert len(found["edges"]) == len(facts(own)["edges"])
    assert facts(strange, policy="stash")["forecast"] is not None
    with pytest.raises(PolicyError, match="no policy 'other'"):
        facts(own, policy="other")


def residual(forward: int, backward: int, weights: int) -> dict[str, Any]:
    """Facts of four residual layers on two workers, cut before these units.

    Of each layer there are three units: the linear one, tanh (no weights), the addition (no backward of its own).
    """
    import torch
    from torch import nn

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x

    build = fxpipe.compile(
        Residual(), lambda model, x: model(x).sum(), torch.ones(2, 4), workers=2, cost="analytic", split_backward=True,
        cuts=Cuts(*((0, cut, 13) for cut in (forward, backward, weights)), ()),
    )  # fmt: skip
    assert [i for i, path in enumerate(build.plan.step.units) if path] == [0, 3, 6, 9]
    return facts(subject_of(build))


@pytest.mark.parametrize(
    ("cuts", "units", "modules"),
    [
        ((3, 3, 3), [], {}),
        ((3, 3, 9), [3, 6], {"": 2, "layers": 2, "layers.1": 1, "layers.2": 1}),
        ((9, 3, 3), [3, 4, 6, 7], {"": 4, "layers": 2, "layers.1": 1, "layers.2": 1}),
        ((3, 6, 6), [3, 4], {"": 2, "layers": 1, "layers.1": 1}),
    ],
)
def test_units_cut_apart(cuts: tuple[int, int, int], units: list[int], modules: dict[str, int]) -> None:
    found = residual(*cuts)
    assert [i for i, unit in enumerate(found["units"]) if unit["apart"]] == units
    assert {m["path"]: m["apart"] for m in found["modules"] if m["apart"]} == modules


def test_shared_cuts_part_no_unit() -> None:
    """Some of its units are computed again elsewhere."""
    same = facts(subject_of(lowered("gpt", workers=3, cuts="same")))
    assert same["modules"][0]["apart"] == 0


def test_a_model_without_modules_and_its_own_code() -> None:
    """What is not in a module is the model's; behind the last module it is the loss function's."""
    import torch
    from torch import nn

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.weight)

    build = fxpipe.compile(
        Plain(), lambda model, x: model(x).sum(), torch.ones(2, 4), workers=2, cost="analytic", cuts="same"
    )
    found = facts(subject_of(build))
    assert [m["path"] for m in found["modules"]] == [""]
    assert found["modules"][0]["parameters"] == 1
