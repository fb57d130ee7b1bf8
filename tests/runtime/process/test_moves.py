"""Units move to other workers during a run: when that pays, what follows from it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from moving import moving_build, signs
from safetensors.torch import load_file
from started_runs import StartedRun

from fxpipe.builds.build import load
from fxpipe.errors import FxpipeError, RunError, WorkerLost
from fxpipe.observe.pulse import Signs
from fxpipe.plan.build_folder import read_plan
from fxpipe.plan.user_files import ModelFileSpec
from fxpipe.planner.costs_file import BuildCosts, read_costs
from fxpipe.planner.links import Links
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process import better_cuts
from fxpipe.runtime.process.check_run import check_movable
from fxpipe.runtime.process.launch import launch
from fxpipe.runtime.process.moves import GONE_BACK, Moves
from fxpipe.runtime.process.new_build import NewBuild, _as_before
from fxpipe.runtime.process.start import join, join_by_command, run_local
from fxpipe.runtime.process.stopping import MovingProcess
from fxpipe.runtime.wires import measured_links
from fxpipe.runtime.wires.board import ASKED, MOVE, Board, DictBoard

SLOW = pytest.mark.slow
STEPS = 1200
SPEEDS = (1.0, 0.25)
FAILS = {
    "refuse": ("not under these cuts", "so the run goes on under the cuts before, and makes no other moves"),
    "full": ("No space left on device; training goes on", "the move cannot be made, and training goes on"),
}
"""What is said where a move fails: by the mark that makes it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moving")


@pytest.fixture(scope="module")
def build(folder: Path) -> Path:
    return moving_build(folder, STEPS)


def weights(out: Path) -> dict[str, Any]:
    return {name: value.tolist() for name, value in load_file(out / "model.safetensors").items()}


def torchrun(count: int, *command: object) -> subprocess.CompletedProcess[str]:
    """What a command prints that torchrun starts so many times on this machine."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*start, *map(str, command)], capture_output=True, text=True, timeout=300, env=environment)


class Compiled:
    """A compile that has ended: in `folder` is a build."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.given_up = folder, False

    def ended(self) -> bool:
        return True

    def check(self) -> None:
        pass

    def use(self) -> None:
        pass

    def give_up(self) -> None:
        self.given_up = True


@pytest.fixture(scope="module")
def other(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build of the same model with other cuts."""
    path = moving_build(tmp_path_factory.mktemp("other"), STEPS, forward_at=("10",))
    assert load(path).plan.model_file.parts == read_plan(build).model_file.parts
    return path


made: list[Compiled] = []
"""The last is what a compile makes."""


compiled_for: list[Links] = []
"""The links of compiles."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, ...]]:
    """The speeds for which a run has had cuts compiled."""
    found: list[tuple[float, ...]] = []

    def new_build(options: Any, plan: Any, costs: Any, workers: int, speeds: Any, guardian: Any) -> Compiled:
        found.append(tuple(round(speed, 2) for speed in speeds))
        compiled_for.append(costs.links)
        return made[-1]

    made.clear()
    compiled_for.clear()
    monkeypatch.setattr(better_cuts, "NewBuild", new_build)
    return found


def watched(build: Path, tmp_path: Path, **options: Any) -> tuple[Moves, Board]:
    """The moves of a run that has begun to train."""
    found = Moves(RunOptions(str(build), out=str(tmp_path / "out"), rebalance=True, **options))
    board = DictBoard()
    found.begin(board, None)  # type: ignore[arg-type]
    return found, board


def trains(found: Moves, work: tuple[float, ...], speeds: tuple[float, ...], windows: int, begin: int = 0) -> None:
    """The workers train for so many windows, at these speeds."""
    samples = better_cuts.SAMPLES + 2
    for beat in range(begin * samples, (begin + windows) * samples + 1):
        step = beat * better_cuts.STEPS
        busy = [step * each / speed for each, speed in zip(work, speeds, strict=True)]
        of_ranks: list[Signs] = [signs(beat, step, each, 1.2 * max(busy)) for each in busy]
        found.look(of_ranks)


def promised(build: Path) -> tuple[float, ...]:
    plan = read_plan(build)
    costs = read_costs(build, plan)
    assert costs is not None
    return better_cuts.promised(plan, costs)


def test_a_slower_worker_gives_units_away(build: Path, other: Path, tmp_path: Path, asked: Any, capfd: Any) -> None:
    made.append(Compiled(other))
    found, board = watched(build, tmp_path)
    trains(found, promised(build), (1.0, 1.0), 3)
    assert asked == [], "all is as planned"
    trains(found, promised(build), SPEEDS, 1, begin=3)
    assert asked == [], "one window may be a hiccup"
    trains(found, promised(build), SPEEDS, 2, begin=4)
    assert asked == [SPEEDS]
    assert found.asked
    assert board.get(ASKED) == f"{MOVE} {made[0].folder.name}"
    assert "other cuts are compiled" in capfd.readouterr().err


def test_a_move_leaves_room_for_the_final_weights(
    build: Path, other: Path, tmp_path: Path, asked: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.append(Compiled(other))
    size = (other / "weights.safetensors").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4 * size))
    found, _ = watched(build, tmp_path)
    trains(found, promised(build), SPEEDS, 3)
    assert not found.asked
    assert "no move is made" in capfd.readouterr().err


def test_workers_that_could_not_be_saved_go_on(
    build: Path, other: Path, tmp_path: Path, asked: Any, capfd: Any
) -> None:
    made.append(Compiled(other))
    found, board = watched(build, tmp_path)
    trains(found, promised(build), SPEEDS, 3)
    assert found.asked
    board.forget([ASKED])
    trains(found, promised(build), SPEEDS, 6, begin=3)
    assert not found.asked
    assert made[0].given_up
    assert asked == [SPEEDS], "the same speeds are tried once"
    assert "the move cannot be made, and training goes on" in capfd.readouterr().err


def test_an_unreadable_build_is_not_begun(build: Path, other: Path, tmp_path: Path, asked: Any, capfd: Any) -> None:
    """Where the workers have ended, they begin again under the cuts before."""
    made.append(Compiled(shutil.copytree(other, tmp_path / "1")))
    found, _ = watched(build, tmp_path)
    trains(found, promised(build), SPEEDS, 3)
    (made[0].folder / "plan.json").write_text("{")
    options = found.move_or_stay()
    assert (options.build, options.rebalance, found.rows) == (str(build), False, [])
    assert made[0].given_up
    assert GONE_BACK in capfd.readouterr().err


@pytest.mark.parametrize("error", [OSError(30, "Read-only file system"), ValueError("odd costs"), MemoryError("full")])
def test_an_error_ends_the_search_not_the_run(
    error: Exception, build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(better_cuts, "NewBuild", fails)
    found, board = watched(build, tmp_path)
    trains(found, promised(build), SPEEDS, 6)
    assert board.get(ASKED) is None
    assert re.findall(r"no longer looked for: .*(Read-only|odd|full)", capfd.readouterr().err)


def test_other_cuts_are_compiled_for_a_slower_link(build: Path, tmp_path: Path, asked: Any, capfd: Any) -> None:
    made.append(Compiled(build))
    found, board = watched(build, tmp_path)
    known, second = found._cuts.first_links, measured_links.SECOND
    for windows in range(3):
        sent = [(1, k * second // 2, 5, k, 10**6, k * 10**6) for k in range(20 * windows, 20 * windows + 20)]
        came = [(0, at + second // 2, tag, k, 0) for _, at, tag, k, *_ in sent]
        board.set("times-0", json.dumps({"sent": sent, "came": []}))
        board.set("times-1", json.dumps({"sent": [], "came": came}))
        trains(found, promised(build), (1.0, 1.0), 1, begin=windows)
        assert len(asked) == (windows > 0), "one window may be a hiccup; and a link is tried once"
    (links,) = compiled_for
    assert asked == [(1.0, 1.0)]
    assert links.bandwidth_of(0, 1) == pytest.approx(2e6, rel=0.01)
    assert (links.bandwidth_of(1, 0), links.latency, links.copy) == (
        known.bandwidth_of(1, 0),
        known.latency,
        known.copy,
    )
    said = capfd.readouterr().err
    assert "speeds are 1.00, 1.00 after step 55; link 0→1 16 of 2.4e+04 Mbit/s: other cuts are compiled" in said


def test_a_move_that_saves_too_little_is_not_made(build: Path, tmp_path: Path, asked: Any, capfd: Any) -> None:
    made.append(Compiled(build))  # no other cuts are better
    found, board = watched(build, tmp_path)
    trains(found, promised(build), SPEEDS, 9)
    assert asked == [SPEEDS], "the same speeds are tried once"
    assert made[0].given_up
    assert not found.asked
    assert board.get(ASKED) is None
    assert "other cuts would save 0% of a step's time, too little for a move" in capfd.readouterr().err
    trains(found, promised(build), (1.0, 0.15), 3, begin=9)
    assert asked == [SPEEDS, (1.0, 0.15)]


def test_too_few_steps_are_left(build: Path, tmp_path: Path, asked: Any) -> None:
    found, _ = watched(build, tmp_path, steps=90)
    found.since -= 1e6  # a start takes long
    trains(found, promised(build), SPEEDS, 9)
    assert asked == []


def test_other_cuts_are_of_the_same_model(build: Path, tmp_path: Path, asked: Any, capfd: Any) -> None:
    (tmp_path / "other").mkdir()
    other = moving_build(tmp_path / "other", STEPS, forward_at=("10",))
    plan = read_plan(other)
    parts = dict.fromkeys(plan.model_file.parts, "another")
    plan = dataclasses.replace(plan, model_file=dataclasses.replace(plan.model_file, parts=parts))
    (other / "plan.json").write_text(plan.to_json())
    made.append(Compiled(other))
    found, _ = watched(build, tmp_path)
    trains(found, promised(build), SPEEDS, 3)
    assert not found.asked
    assert "has changed since the run's build was compiled" in capfd.readouterr().err


def test_a_compile_is_that_of_the_build(build: Path) -> None:
    plan = read_plan(build)
    costs = read_costs(build, plan)
    assert costs is not None
    assert _as_before(plan, costs) == [
        *("--accept-optimizer-per-worker", "--cost", "analytic"),
        *("--microbatch-dims", "batch[0]=0,batch[1]=0"),
    ]
    stages = tuple(dataclasses.replace(stage, engines=("onnxruntime",) * 2) for stage in plan.stages)
    file = dataclasses.replace(plan.model_file, given_arguments=("--width", "3"))
    weights = dataclasses.replace(plan.weights, meta=True)
    plan = dataclasses.replace(plan, placement=(0, 0), device="cuda", weights=weights, model_file=file)
    plan = plan.with_step(stages=stages)
    costs = dataclasses.replace(costs, memory=(2.0**30,), partitions=())
    text = " ".join(_as_before(plan, costs))
    for part in ("--virtual 2", "--memory 1073741824B", "--backend onnxruntime", "--device cuda --meta", "--cuts same"):
        assert part in text, text
    assert text.endswith(" -- --width 3")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rebalance": True, "out": None}, "has no output folder"),
    ({"on_loss": "replan"}, "the run saves none"),
]


@pytest.mark.parametrize(("options", "what"), REFUSED)
def test_what_is_needed(options: dict[str, Any], what: str, build: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=what):
        launch(RunOptions(str(build), **{"out": str(tmp_path / "out"), **options}), 2)


def test_builds_that_cannot_move(build: Path, tmp_path: Path) -> None:
    plan, options = read_plan(build), RunOptions(str(build), out=str(tmp_path / "out"), rebalance=True)
    for changed, what in (
        (plan, r"it has no costs\.json"),
        (dataclasses.replace(plan, replicas=(2, 2)), "does not move units of workers with replicas"),
        (dataclasses.replace(plan, model_file=ModelFileSpec()), "made from Python objects"),
        (plan.with_step(stages=plan.stages[:1]), "needs other workers"),
    ):
        with pytest.raises(RunError, match=what):
            check_movable(options, changed, BuildCosts())


def test_where_workers_cannot_begin_again(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = RunOptions(str(build), out=str(tmp_path / "out"), rebalance=True)
    with pytest.raises(RunError, match=r"--rebalance starts workers again, .* here all of them are in one process"):
        run_local(options)
    with pytest.raises(RunError, match="these processes have no launcher"):
        join(options)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(RunError, match="processes that meet at one of them cannot"):
        join_by_command(options)
    with pytest.raises(RunError, match=r"--on-loss replan starts workers again, .* torchrun has started them"):
        join_by_command(dataclasses.replace(options, on_loss="replan", checkpoint_every=1))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(RunError, match="has no output folder"):
        join_by_command(dataclasses.replace(options, out=None))


def test_what_another_process_knows_of_its_moves_is_not_taken_over(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that a run under torchrun starts has its environment variables."""
    made = moving_build(tmp_path, STEPS, forward_at=("10",))
    options = RunOptions(str(build), out=str(tmp_path / "out"), rebalance=True)
    for process, found in ((os.getpid() + 1, build), (os.getpid(), made)):
        monkeypatch.setenv("FXPIPE_MOVED", json.dumps({"process": process, "build": str(made)}))
        assert MovingProcess(options).go_on().build == str(found)


@SLOW
@pytest.mark.multiproc
def test_units_move_without_a_change_of_a_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """What is trained is what the whole run trains under its first cuts, and what a resumed run trains under the new
    ones: a flush follows every step."""
    options = RunOptions(
        str(moving_build(tmp_path, STEPS)), eval_every=150, save_best="loss", threads=1, rebalance=True
    )
    whole = run_local(dataclasses.replace(options, out=str(tmp_path / "whole"), rebalance=False))
    (tmp_path / "slow").touch()
    monkeypatch.setattr(better_cuts.Window, "speeds", lambda *_: SPEEDS)
    monkeypatch.setattr(better_cuts, "SAMPLES", 1)
    summary = launch(dataclasses.replace(options, out=str(tmp_path / "out")), 2)
    (move,) = summary["moves"]
    assert (move["before"], move["speeds"]) == (move["before"], list(SPEEDS))
    assert move["after"] != move["before"]
    assert move["gain"] > 0.1
    assert move["seconds"] > 0
    assert summary["build"]["folder"] == str(tmp_path / "out" / "rebalanced" / "1")
    assert json.loads((tmp_path / "out/run.json").read_text())["moves"] == summary["moves"]
    assert summary["losses"] == whole["losses"]
    assert [row["metrics"] for row in summary["evaluations"]] == [row["metrics"] for row in whole["evaluations"]]
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert summary["best"] == whole["best"]
    assert "stopped; saved" not in capfd.readouterr().err
    saved = tmp_path / "out" / "checkpoints" / f"step-{move['step']}"
    resumed = RunOptions(summary["build"]["folder"], threads=1, resume=str(saved), out=str(tmp_path / "by"))
    run_local(resumed)
    assert weights(tmp_path / "by") == weights(tmp_path / "out")


@SLOW
@pytest.mark.multiproc
def test_units_move_from_a_link_that_became_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """To the one narrow place, where nearly all is on one worker."""
    build = moving_build(tmp_path, STEPS, widths=(12, 12, 256, 256, 256, 256, 12), bandwidth="400Mbit")
    options = RunOptions(str(build), threads=1, rebalance=True, throttle="400Mbit")
    run_local(dataclasses.replace(options, out=str(tmp_path / "whole"), rebalance=False, throttle=None))
    for mark in ("slow", "slow-link"):
        (tmp_path / mark).touch()
    monkeypatch.setattr(better_cuts.Window, "speeds", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(better_cuts.Window, "most", lambda *_: 0.0)
    for module, least in ((better_cuts, "SAMPLES"), (measured_links, "SECONDS")):
        monkeypatch.setattr(module, least, 1)
    summary = launch(dataclasses.replace(options, out=str(tmp_path / "out")), 2)
    (move,) = summary["moves"]
    assert move["gain"] > 0.1
    assert re.match(r"speeds 1\.00, 1\.00; link 0→1 [345]\.\d+ of 400 Mbit/s", move["because"])
    costs = read_costs(tmp_path / "out/rebalanced/1", read_plan(tmp_path / "out/rebalanced/1"))
    assert costs is not None
    assert costs.links.bandwidth_of(0, 1) == pytest.approx(5e7 / 100, rel=0.3)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


@SLOW
@pytest.mark.multiproc
@pytest.mark.parametrize("mark", FAILS)
def test_a_move_that_fails_ends_no_run(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    options = RunOptions(str(moving_build(tmp_path, STEPS)), threads=1, rebalance=True)
    run_local(dataclasses.replace(options, out=str(tmp_path / "whole"), rebalance=False))
    for name in ("slow", mark):
        (tmp_path / name).touch()
    monkeypatch.setattr(better_cuts.Window, "speeds", lambda *_: SPEEDS)
    monkeypatch.setattr(better_cuts, "SAMPLES", 1)
    summary = launch(dataclasses.replace(options, out=str(tmp_path / "out")), 2)
    assert summary["moves"] == []
    assert summary["build"]["folder"] == options.build
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert list((tmp_path / "out" / "rebalanced").iterdir()) == []
    err = capfd.readouterr().err
    assert all(part in err for part in FAILS[mark]), err


@SLOW
@pytest.mark.multiproc
@pytest.mark.parametrize("mark", ["", *FAILS])
def test_units_move_under_torchrun(mark: str, tmp_path: Path) -> None:
    """Every process begins again; if one cannot under the new cuts, all do under the cuts before."""
    build = moving_build(tmp_path, STEPS)
    options = RunOptions(str(build), threads=1, out=str(tmp_path / "whole"))
    whole = run_local(options)
    for name in ("slow", "speeds", mark or "slow"):
        (tmp_path / name).touch()
    command = ["run", build, "--threads", 1, "--rebalance", "--out", tmp_path / "out", "--json"]
    run = torchrun(2, "-m", "fxpipe", *command)
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout)
    assert json.loads((tmp_path / "out/run.json").read_text())["moves"] == summary["moves"]
    assert len(summary["moves"]) == (not mark), run.stderr
    assert summary["build"]["folder"] == str(build if mark else tmp_path / "out/rebalanced/1")
    assert summary["losses"] == whole["losses"]
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert all(part in run.stderr for part in FAILS.get(mark, ()))
    for move in summary["moves"]:
        assert 0 < move["seconds"] < 60
        assert move["after"] != move["before"]


@SLOW
@pytest.mark.multiproc
def test_a_run_that_is_killed_in_a_move_goes_on(tmp_path: Path) -> None:
    options = RunOptions(str(moving_build(tmp_path, STEPS)), threads=1, rebalance=True)
    whole = run_local(dataclasses.replace(options, out=str(tmp_path / "whole"), rebalance=False))
    (tmp_path / "slow").touch()
    options = dataclasses.replace(options, out=str(tmp_path / "out"))
    code = f"""import sys
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process import better_cuts
from fxpipe.runtime.process.check_run import check_movable
from fxpipe.runtime.process.launch import launch
better_cuts.Window.speeds, better_cuts.SAMPLES = lambda *_: {SPEEDS}, 1
launch(RunOptions.from_json({options.to_json()!r}), 2)"""
    run = StartedRun(["-c", code], tmp_path / "tmp")
    run.until(lambda: list((tmp_path / "out" / "checkpoints").glob("step-*")), 120)
    run.launcher.send_signal(signal.SIGKILL)
    run.ends(10)
    run.is_gone(10)
    (tmp_path / "slow").unlink()
    summary = launch(dataclasses.replace(options, rebalance=False, resume="newest"), 2)
    assert summary["losses"] == whole["losses"]
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


@SLOW
@pytest.mark.multiproc
def test_the_others_take_the_units_of_a_lost_worker(tmp_path: Path, capfd: Any) -> None:
    options = RunOptions(
        str(moving_build(tmp_path, 20, workers=3)), threads=1, on_loss="replan", checkpoint_every=4, max_restarts=1
    )
    whole = run_local(dataclasses.replace(options, out=str(tmp_path / "whole"), on_loss="end"))
    for step in (6, 11, 17):
        (tmp_path / f"kill-{step}").touch()
    summary = launch(dataclasses.replace(options, out=str(tmp_path / "out")), 3)
    assert len(summary["restarts"]) == 1
    moved = summary["moves"]
    assert [(move["step"] % 4, move["gain"], move["before"].count("+")) for move in moved] == [
        (0, None, 2),
        (0, None, 1),
    ]
    assert len(summary["workers"]) == 1
    assert sorted(os.listdir(tmp_path / "out" / "rebalanced")) == ["2"], "the build of two workers is not needed"
    assert summary["losses"] == whole["losses"]
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert "2 workers take over, after step " in capfd.readouterr().err


@SLOW
@pytest.mark.multiproc
def test_a_worker_that_is_lost_before_a_checkpoint(tmp_path: Path) -> None:
    build = moving_build(tmp_path, 20)
    (tmp_path / "kill-3").touch()
    options = RunOptions(str(build), threads=1, on_loss="replan", checkpoint_every=10, out=str(tmp_path / "out"))
    with pytest.raises(WorkerLost, match="worker 1 was killed") as caught:
        launch(options, 2)
    assert "none was complete: a smaller --checkpoint-every" in str(caught.value.hint)


@SLOW
@pytest.mark.multiproc
def test_a_compile_that_fails_leaves_what_it_began_with(tmp_path: Path, build: Path) -> None:
    options = RunOptions(str(build), out=str(tmp_path / "out"))
    plan = read_plan(build)
    costs = read_costs(build, plan)
    assert costs is not None

    class NoGuard:
        def guard(self, process: int) -> None:
            pass

    compile = NewBuild(options, plan, costs, 99, (), NoGuard())  # type: ignore[arg-type]
    while not compile.ended():
        pass
    with pytest.raises(FxpipeError, match="99 workers"):
        compile.check()
    compile.give_up()
    assert list((tmp_path / "out" / "rebalanced").iterdir()) == []
