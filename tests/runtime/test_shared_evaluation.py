"""Replicas share an evaluation's batches out, and all of them know the metrics that one pipeline would have found."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluated import build_of, write_evaluated
from strict_wires import Hub, StrictWires
from torch import Tensor

from fxpipe.build.build import Build
from fxpipe.errors import RunError
from fxpipe.plan.spec import Mesh
from fxpipe.policy.recipe import choose
from fxpipe.runtime.process.distributed_evaluation import DistributedEvaluation
from fxpipe.runtime.wires.addresses import Addresses
from fxpipe.runtime.wires.collective import Key, LocalCollective, ReplicaBoard
from fxpipe.runtime.wires.process_line import ProcessLine
from fxpipe.runtime.worker.evaluation_data import EvaluationData
from fxpipe.runtime.worker.shared_evaluation import sharing
from fxpipe.task.model_file import Task

SIZES = (12, 5, 12, 12, 5, 12, 12)


class Meeting(LocalCollective):
    """The end of a replica whose pipeline runs in threads of its own."""

    changed = threading.Condition()

    def __init__(self, board: ReplicaBoard, replica: int) -> None:
        super().__init__(board, replica)

    def start_sum(self, key: Key, flat: Tensor, divisor: int = 1) -> None:
        with self.changed:
            super().start_sum(key, flat, divisor)
            self.changed.notify_all()

    def take(self, key: Key) -> Tensor:
        with self.changed:
            assert self.changed.wait_for(lambda: self.arrived(key), 10), "deadlock"
            return super().take(key)


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Task, Build]]:
    folder = tmp_path_factory.mktemp("shared")
    path = write_evaluated(
        folder, ("[(torch.randint(0, 11, (8,)), torch.randint(0, 11, (8,)))", "[(torch.randint(0, 11, (6,)),) * 2")
    )
    return {
        dp: (task, build.save(folder / str(dp), model_file=path))
        for dp in (2, 3)
        for task, build in [build_of(path, microbatches=1, dp=dp, schedule="1f1b")]
    }


def batches(sizes: Iterable[int], seed: int = 0) -> Iterator[Any]:
    """From a generator of their own: threads of one process share the process's."""
    draws = torch.Generator().manual_seed(seed)
    for size in sizes:
        yield torch.randint(0, 11, (size,), generator=draws), torch.randint(0, 11, (size,), generator=draws)


@pytest.mark.parametrize(
    ("dp", "count", "by_channel"), [(2, 7, True), (2, 1, False), (2, 2, False), (3, 7, False), (3, 2, True)]
)
def test_each_evaluates_its_share_and_all_know_the_metrics_of_one(
    builds: dict[int, tuple[Task, Build]], dp: int, count: int, by_channel: bool
) -> None:
    task, build = builds[dp]
    pipeline = build.local(optimizer=task.optimizer)
    pipeline.run(list(task.train_data()))
    data = EvaluationData(build.plan, lambda: batches(SIZES[:count]), 0)
    expected = pipeline.evaluate(data)
    states = [executor.state(pipeline.fed) for executor in pipeline.every]
    for number, state in enumerate(states):
        assert all(torch.equal(state[name], value) for name, value in states[number % build.plan.workers].items())
    shared = Shared(build, [data] * dp, by_channel)
    for _ in range(2):
        shared.run(states)
        for (replica, _), evaluation in shared.evaluations.items():
            assert evaluation.heard == expected
            for worker in evaluation.evaluators:
                assert shared.calls[replica, worker.worker] == list(range(replica, count, dp))
                shared.calls[replica, worker.worker].clear()


def test_other_batches_are_told(builds: dict[int, tuple[Task, Build]]) -> None:
    task, build = builds[2]
    pipeline = build.local(optimizer=task.optimizer)
    for sizes, seed in ((SIZES[:4], 1), (SIZES[:3], 0)):
        given = [list(batches(SIZES[:4])), list(batches(sizes, seed))]
        all_data = [EvaluationData(build.plan, lambda own=own: own, 0) for own in given]  # type: ignore[misc]
        shared = Shared(build, all_data, False)
        with pytest.raises(RunError, match="read different batches in an evaluation: replica 1 another than replica 0"):
            shared.run([executor.state(0) for executor in pipeline.every])


def test_batches_that_change_buffers_are_not_shared_out(tmp_path: Path) -> None:
    """The next batch reads what the one before has left: each replica evaluates all."""
    seen = '        self.register_buffer("seen", torch.zeros(()))\n'
    counts = "        if not self.training:\n            self.seen += 1\n"
    path = write_evaluated(
        tmp_path,
        ("        self.scale = nn", f"{seen}        self.scale = nn"),
        ("        x = self.embed(ids)", f"{counts}        x = (1 + self.seen) * self.embed(ids)"),
    )
    task, build = build_of(path, microbatches=1, dp=2, schedule="1f1b")
    build = build.save(tmp_path / "build", model_file=path)
    assert sharing(build.plan) == 1
    pipeline = build.local(optimizer=task.optimizer)
    data = EvaluationData(build.plan, lambda: batches(SIZES), 0)
    shared = Shared(build, [data] * 2, False)
    shared.run([executor.state(0) for executor in pipeline.every])
    assert all(evaluation.heard == pipeline.evaluate(data) for evaluation in shared.evaluations.values())
    assert all(calls == list(range(len(SIZES))) for calls in shared.calls.values())


class Shared:
    """The evaluations of all replicas, a thread for each worker of each.

    Attributes:
        evaluations: by replica and rank.
        calls: which batches each worker of each replica has evaluated.
    """

    def __init__(self, build: Build, data: list[EvaluationData], by_channel: bool) -> None:
        plan = self.plan = build.plan
        self.evaluations: dict[tuple[int, int], DistributedEvaluation] = {}
        self.calls: dict[tuple[int, int], list[int]] = {}
        board = ReplicaBoard(plan.dp)
        for replica in range(plan.dp):
            hub = Hub()
            for rank in range(plan.ranks):
                wires: Any = StrictWires(hub, rank, by_channel, Mesh(plan.placement))
                self.evaluations[replica, rank] = evaluation = DistributedEvaluation(
                    plan,
                    ProcessLine.of(plan, rank),
                    plan.hosted(rank),
                    str(build.folder),
                    0,
                    wires,
                    Addresses(plan, choose(plan).demand),
                    None if rank else data[replica],
                    replica=replica,
                    collective=None if rank else Meeting(board, replica),
                )
                for evaluator in evaluation.evaluators:
                    self._count(evaluator, self.calls.setdefault((replica, evaluator.worker), []))

    def run(self, states: list[dict[str, Tensor]]) -> None:
        """One evaluation of the states of all workers of replica 0, then 1, ….

        Raises:
            BaseException: the first that a thread has raised.
        """
        failures: list[BaseException] = []

        def work(replica: int, rank: int) -> None:
            own = [states[replica * self.plan.workers + worker] for worker in self.plan.hosted(rank)]
            try:
                self.evaluations[replica, rank].run(own)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=place, daemon=True) for place in self.evaluations]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not failures:
                thread.join(0.1)
        if failures:
            raise failures[0]

    def _count(self, evaluator: Any, calls: list[int]) -> None:
        run = evaluator.run

        def counted(shape: int, number: int, *rest: Any) -> Any:
            calls.append(number)
            return run(shape, number, *rest)

        evaluator.run = counted
