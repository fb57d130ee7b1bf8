"""Evaluation in the pipeline: what moves, how far ahead it reads, when it is asked, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from evaluated import build_of, write_evaluated
from safetensors.torch import load_file

from fxpipe import load
from fxpipe.builds.build import Build
from fxpipe.errors import BatchError, BuildError, RunError, TaskError
from fxpipe.policy.recipe import choose
from fxpipe.runtime.options import PipelineOptions, RunOptions
from fxpipe.runtime.process.check_run import check_evaluation
from fxpipe.runtime.process.distributed_evaluation import AHEAD, DistributedEvaluation
from fxpipe.runtime.process.launch import launch
from fxpipe.runtime.process.start import run_local
from fxpipe.runtime.wires.addresses import Addresses, ProcessLine, moves
from fxpipe.runtime.wires.one_process import Loopback, OneProcessWires, Turns
from fxpipe.runtime.wires.wired import WiredTransport
from fxpipe.runtime.worker.assembly import open_worker
from fxpipe.runtime.worker.evaluation import EvaluationData, Evaluator, Placed, whole_metrics
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.schedule.action import Action
from fxpipe.task.hooks import Hooks
from fxpipe.task.model_file import Task

STEPS = 7


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluated")


@pytest.fixture(scope="module")
def built(home: Path) -> tuple[Task, Build]:
    """Workers that own other weights than they run forward, and tie some: all kinds of tensors have to be moved."""
    path = write_evaluated(home)
    task, build = build_of(path, microbatches=2, schedule="async", policy="stash")
    return task, build.save(home / "build", model_file=path)


def options(home: Path, out: Path | None = None, **more: Any) -> RunOptions:
    steps = more.pop("steps", STEPS)
    return RunOptions(str(home / "build"), steps=steps, out=None if out is None else str(out), threads=1, **more)


def test_what_is_moved(built: tuple[Task, Build]) -> None:
    plan = built[1].plan
    assert len(plan.evaluations) == 2
    found = {(move.name, move.once) for move in moves(plan)}
    norms = {(f"blocks.{k}.norm.running_{what}", False) for k in (1, 3) for what in ("mean", "var")}
    assert found == {("embed.weight", False), ("scale", True), *norms}
    assert all(move.source != move.reader for move in moves(plan))


def test_no_worker_reads_far_ahead(built: tuple[Task, Build], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over wires where a send never waits: through shared memory, or as here within a process."""
    plan, folder = built[1].plan, str(built[1].folder)
    recipe, turns, read, ahead = choose(plan), Turns(), list[int](), list[int]()
    execute = Evaluator.execute

    def last(evaluator: Evaluator, action: Action, leaves: Any = None) -> None:
        ahead.append(len(read) - action.minibatch if evaluator.worker else 0)
        execute(evaluator, action, leaves)

    def data() -> Iterator[Any]:
        for batch in 6 * list(built[0].hooks.eval_data()):
            read.append(1)
            yield batch

    def work(rank: int) -> Callable[[], None]:
        addresses, wires = Addresses(plan, recipe.demand), OneProcessWires(plan, rank, torch.device("cpu"), loopback)
        transport = WiredTransport.of_training(plan, rank, wires, addresses, recipe.schedule)
        setting = WorkerSetting(plan, rank, recipe, Task(Hooks()), PipelineOptions())
        executor = open_worker(setting, folder, transport)
        source = EvaluationData(plan, data, 0, built[0]) if rank == 0 else None
        evaluation = DistributedEvaluation([executor], folder, source, ProcessLine.of(plan, rank))
        return lambda: evaluation.run([executor.state(0)]) and None

    monkeypatch.setattr(Evaluator, "execute", last)
    loopback = Loopback(turns)
    turns.walk([work(rank) for rank in range(plan.ranks)])
    assert len(read) > 20
    assert max(ahead) <= (AHEAD + 2) * (plan.ranks - 1)
    assert not loopback.left


def test_the_pipeline_evaluates_when_asked(built: tuple[Task, Build]) -> None:
    task, build = built
    pipeline = build.local(optimizer=task.optimizer, policy="stash")
    batches = list(task.eval_data())
    before = torch.get_rng_state()
    first = pipeline.evaluate(batches)
    assert torch.equal(torch.get_rng_state(), before)
    model = task.model()
    model.load_state_dict(pipeline.state_dict())
    assert first == eager(task, model, batches)
    for batch in task.train_data():
        pipeline.step(batch)
    with pytest.raises(RunError, match="call flush"):
        pipeline.evaluate(batches)
    pipeline.flush()
    model.load_state_dict(pipeline.state_dict())
    assert pipeline.evaluate(iter(batches)) == eager(task, model, batches) != first


def eager(task: Task, model: torch.nn.Module, batches: list[Any]) -> dict[str, float]:
    model.eval()
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        rows = [dict(task.metrics(model, batch)) for batch in batches]
    sizes = [float(len(batch[0])) for batch in batches]
    totals = {name: sum(size * float(row[name]) for size, row in zip(sizes, rows, strict=True)) for name in rows[0]}
    return {name: total / sum(sizes) for name, total in totals.items()}


def test_random_metrics_leave_the_random_state_alone(tmp_path: Path) -> None:
    """An optimizer may draw random numbers too: training stays the same."""
    path = write_evaluated(tmp_path, ('"norm": model.scale.norm()', '"norm": torch.rand(()) + model.scale.norm()'))
    task, build = build_of(path)
    plan = build.save(tmp_path / "build", model_file=path).plan
    random_workers = [stage.forward.random for stage in plan.evaluations[0].stages]
    assert any(random_workers)
    before, pipeline = torch.get_rng_state(), build.local()
    found = pipeline.evaluate(task.eval_data())
    assert torch.equal(torch.get_rng_state(), before)
    assert found == pipeline.evaluate(task.eval_data())


def test_means_are_summed_up_in_the_batches_order(built: tuple[Task, Build]) -> None:
    """As the plain loop does it, wherever a metric is made."""
    plan = built[1].plan
    batches = [Placed(0, None, 2.0), Placed(1, None, 1.0), Placed(0, None, 1.0)]
    values = {
        (worker, number): torch.full((len(stage.forward.metrics),), value, dtype=torch.float64)
        for number, (batch, value) in enumerate(zip(batches, [0.1, 1e16, -1e16], strict=True))
        for worker, stage in enumerate(plan.evaluations[batch.shape].stages)
    }
    found = whole_metrics(plan, batches, values, lambda gathered: {})
    assert found["size"] == (2 * 12 + 5 + 12) / 4
    assert found["accuracy"] == (((0.0 + 0.2) + 1e16) + -1e16) / 4 != 0.2 / 4


def test_evaluation_data_are_the_same_every_time(built: tuple[Task, Build]) -> None:
    plan = built[1].plan

    def batches() -> Iterator[Any]:
        for size in (12, 5):
            high = 1 + random.randrange(10) * numpy.random.randint(1, 2)
            yield torch.randint(0, high, (size,)), torch.randint(0, 11, (size,))

    data = EvaluationData(plan, batches, 3, Task(Hooks()))
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    first = list(data())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    torch.rand(3), random.random(), numpy.random.rand()
    again = list(data())
    assert [(placed.shape, placed.weight) for placed in first] == [(0, 12.0), (1, 5.0)]
    for one, two in zip(first, again, strict=True):
        assert one.leaves is not None
        assert two.leaves is not None
        assert all(map(torch.equal, one.leaves, two.leaves))
    (other, _) = EvaluationData(plan, batches, 4, Task(Hooks()))()
    assert first[0].leaves is not None
    assert other.leaves is not None
    assert not torch.equal(first[0].leaves[1], other.leaves[1])


def pair(*shape: int, dtype: torch.dtype = torch.int64) -> Any:
    return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (pair(3), r"batch 2 .* has a shape .*: batch\[0\] is int64\[3\], captured as int64\[12\]; .*of 2 captured"),
        (pair(12, dtype=torch.float32), r"batch\[0\] is float32\[12\], captured as int64\[12\] \(the nearest of 2"),
        (list(pair(12)), "batch 2 .* is built differently"),
        ((*pair(12), 1), "batch 2 .* is built differently"),
    ],
)
def test_a_batch_of_an_unknown_shape(built: tuple[Task, Build], batch: Any, said: str) -> None:
    with pytest.raises(BatchError, match=said) as caught:
        list(EvaluationData(built[1].plan, lambda: [pair(12), batch], 0, Task(Hooks()))())
    assert "compile again" in str(caught.value)
    assert "drop_last" in str(caught.value)


def test_errors_of_the_data(built: tuple[Task, Build]) -> None:
    plan = built[1].plan

    def broken() -> Iterable[Any]:
        yield pair(12)
        raise ValueError("no such file")

    with pytest.raises(TaskError, match=r"eval_data\(\) raised ValueError: no such file"):
        list(EvaluationData(plan, broken, 0, Task(Hooks()))())
    exhausted = iter([pair(12)])
    data = EvaluationData(plan, lambda: exhausted, 0, Task(Hooks()))
    assert len(list(data())) == 1
    with pytest.raises(TaskError, match=r"eval_data\(\) gave no batch\n.*hint: return a new iterable"):
        list(data())


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=[pytest.mark.multiproc, pytest.mark.slow])])
@pytest.mark.usefixtures("built")
def test_the_last_evaluation_fails_and_the_trained_weights_are_safe(
    home: Path, tmp_path: Path, processes: bool
) -> None:
    count = "COUNT = [0]\n\n\ndef eval_data():\n    COUNT[0] += 1\n    assert COUNT[0] < 2, 'gone'"
    path = write_evaluated(tmp_path, ("def eval_data():", count))
    found = options(home, tmp_path / "out", model_file=str(path), eval_every=STEPS - 1)
    with pytest.raises(TaskError) as caught:
        launch(found, 3) if processes else run_local(found)
    assert "eval_data() raised AssertionError: gone" in str(caught.value)
    assert "at: evaluated.py:" in str(caught.value)
    assert f"the trained weights are safe in {tmp_path / 'out' / 'model.safetensors'}" in str(caught.value)
    assert load_file(tmp_path / "out" / "model.safetensors")
    assert [e["step"] for e in json.loads((tmp_path / "out" / "run.json").read_text())["evaluations"]] == [STEPS - 1]


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_batch_of_an_unknown_shape_ends_the_run(built: tuple[Task, Build], home: Path, tmp_path: Path) -> None:
    """While others are on their way through the pipeline; nobody is left waiting."""
    path = write_evaluated(tmp_path, ("(12, 5, 12, 12)", "(12, 5, 12, 12, 3)"))
    found = options(home, tmp_path / "out", model_file=str(path), eval_every=2)
    with pytest.raises(BatchError) as caught:
        launch(found, 3)
    assert "batch 5 of eval_data() has a shape that the build was not compiled for" in str(caught.value)
    assert "hint: compile again" in str(caught.value)
    assert "weights are safe" not in str(caught.value)


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=[pytest.mark.multiproc, pytest.mark.slow])])
def test_an_edited_file(home: Path, built: tuple[Task, Build], tmp_path: Path, capfd: Any, processes: bool) -> None:
    build = load(home / "build").save(tmp_path / "build", model_file=home / "evaluated.py")
    file = tmp_path / "build" / "evaluate_1.py"
    text = file.read_text()
    file.write_text(text.replace("(weights, buffers, batch, comm):", "(weights, buffers, batch, comm):\n    1 / 0", 1))
    found = dataclasses.replace(options(home, tmp_path / "out", eval_every=1), build=str(build.folder))
    with pytest.raises(RunError) as caught:
        launch(found, 3) if processes else run_local(found)
    assert "evaluating batch 1 of eval_data() failed on worker 1: ZeroDivisionError" in str(caught.value)
    assert f"{file}:" in str(caught.value)
    assert f"{file} was edited" in capfd.readouterr().err
    file.write_text(text.replace("comm.recv(", "print("))
    with pytest.raises(BuildError, match=r"evaluate_1.py does not match its plan: evaluate no longer receives"):
        run_local(found)


def test_a_build_without_evaluation_says_why(built: tuple[Task, Build], home: Path) -> None:
    plan = dataclasses.replace(built[1].plan, evaluations=())
    with pytest.raises(RunError, match=r"--eval-every needs a build with evaluation.*\n.*define eval_data\(\)"):
        check_evaluation(plan, "--eval-every")
    with pytest.raises(RunError, match=r"this one has none: metrics\(\) is strange\n.*compile again"):
        check_evaluation(dataclasses.replace(plan, not_evaluated="metrics() is strange"), "--eval-every")
    pipeline = dataclasses.replace(built[1], plan=plan, folder=None).local()
    with pytest.raises(RunError, match=r"evaluate\(\) needs a build with evaluation"):
        pipeline.evaluate([])
