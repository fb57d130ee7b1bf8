"""`auto` takes the fastest engine that agrees, part by part, and says why it left others out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cached import captured, cuts, lowered
from small_models import CASES
from torch import Tensor

from fxpipe import engines as backends
from fxpipe.builds.build import Build
from fxpipe.engines.engine import Engine
from fxpipe.errors import BackendError
from fxpipe.lowering import choose_engines as choose
from fxpipe.lowering.choose_engines import choose_engines
from fxpipe.plan.build_folder import ENGINES
from fxpipe.plan.cost_records import EngineTime
from fxpipe.plan.plan import Plan
from fxpipe.stages.loaded import LoadedStage
from fxpipe.stages.pure_function import Compute
from fxpipe.stages.pure_part import PurePart


class Fake(Engine):
    """Runs a part with torch, `delay` seconds longer; what else it does is a matter of its name."""

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def missing(self, device: str) -> str | None:
        return "it is not here: install it" if self.name == "absent" else None

    def version(self) -> str:
        return "1"

    def build(self, part: PurePart, cache: Path | None) -> Compute:
        if self.name == "unable" and part.phase == "B":
            raise BackendError("unable has no operator for this", where="stage_0.py:7: blocks.1")
        if cache is not None:
            cache.parent.mkdir(parents=True, exist_ok=True)
            cache.write_text(self.name)

        def compute(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            if self.name == "crashing":
                raise RuntimeError("out of luck\nand more")
            if self.name == "slow":
                time.sleep(0.05)
            outputs = list(part(inputs))
            if self.name == "wrong":
                outputs[-1] = outputs[-1] * 1.01
            return outputs

        return compute


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Build]:
    """Chooses among eager, which is made slow, and the engines named."""
    monkeypatch.setattr(backends, "make", Fake)
    build = lowered("function", workers=2, **cuts(CASES["function"], 2, 1))
    program = captured("function")[2]
    leaves = {b.leaf.name: program.example[b.node] for b in program.batch if b.node}
    load = choose.load_stages
    delay = 0.0

    def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            time.sleep(delay)
            return function(*arguments)

        return call

    def slow_stages(plan: Plan, files: dict[str, str]) -> list[LoadedStage]:
        return [
            dataclasses.replace(stage, functions={phase: slowly(f) for phase, f in stage.functions.items()})
            for stage in load(plan, files)
        ]

    def run(*engines: str, eager: float = 0.02, backend: str = "auto", known: Path | None = None) -> Build:
        nonlocal delay
        delay = eager
        monkeypatch.setattr(choose, "MEASURED", ("eager", *engines))
        return choose_engines(build, leaves, backend=backend, threads=1, budget=0.0, known=known)

    monkeypatch.setattr(choose, "load_stages", slow_stages)
    return run


def of(build: Build, engine: str) -> list[EngineTime]:
    return [t for t in build.costs.engines if t.engine == engine]


@pytest.mark.slow
def test_the_fastest_that_agrees_is_taken(chosen: Callable[..., Build]) -> None:
    build = chosen("quick", "slow", "wrong", "crashing", "absent", "unable")
    assert {t.part for t in of(build, "eager")} == {f"stage_{k}.{f}ward" for k in (0, 1) for f in ("for", "back")}
    assert all(t.ratio is not None and t.ratio < 0.97 for t in of(build, "quick"))
    assert {t.reason for t in of(build, "absent")} == {"it is not here: install it"}
    assert {t.reason for t in of(build, "crashing")} == {"crashing fails when it runs: RuntimeError: out of luck"}
    assert all("wrong does not compute what eager PyTorch computes" in t.reason for t in of(build, "wrong"))
    assert all(t.seconds is None for name in ("absent", "crashing", "wrong") for t in of(build, name))
    able = {t.part: t.reason for t in of(build, "unable")}
    assert able["stage_0.backward"] == "unable has no operator for this (stage_0.py:7: blocks.1)"
    assert not able["stage_0.forward"]
    taken = {(t.worker, t.phase): t.engine for t in build.costs.engines if t.chosen}
    assert len(taken) == 4
    assert set(taken.values()) <= {"quick", "unable"}
    for k, stage in enumerate(build.plan.stages):
        assert stage.engines == (taken[k, "F"], taken[k, "B"])


def test_eager_stays_where_nothing_gains(chosen: Callable[..., Build]) -> None:
    build = chosen("slow", eager=0.0)
    assert [s.engines for s in build.plan.stages] == [("eager", "eager")] * 2
    assert not build.engine_files
    assert {t.engine for t in build.costs.engines if t.chosen} == {"eager"}


@pytest.mark.slow
def test_only_files_of_taken_engines_are_kept_and_found_again(chosen: Callable[..., Build], tmp_path: Path) -> None:
    build = chosen("quick", "slow")
    kept = [name for name in build.engine_files if not name.endswith(".sha256")]
    assert [name.split("-")[0] for name in kept] == ["quick"] * 4, "of two forwards and two backwards"
    assert set(build.engine_files) == {*kept, *(f"{name}.sha256" for name in kept)}
    build.save(tmp_path / "build")
    again = chosen("quick", known=tmp_path / "build" / ENGINES)
    assert again.engine_files == build.engine_files


def test_an_engine_sends_at_its_end_and_waits_at_its_start(chosen: Callable[..., Build]) -> None:
    build = chosen("quick")
    assert build.costs.timings == tuple(dataclasses.replace(t, made=1.0, needed=0.0) for t in build.costs.timings)


@pytest.mark.parametrize(
    ("engine", "why"),
    [("absent", "it is not here"), ("wrong", "does not compute"), ("crashing", "fails when it runs")],
)
def test_an_engine_that_is_asked_for_must_work(chosen: Callable[..., Build], engine: str, why: str) -> None:
    with pytest.raises(BackendError, match=why):
        chosen(engine, backend=engine)
