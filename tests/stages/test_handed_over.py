"""Buckets of gradients outside the emitted code: parts on engines, edited files, plans, and the `comm` of a run."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from cached import lowered
from small_models import CASES
from torch import Tensor

from fxpipe.builds.build import Build
from fxpipe.engines import pieces
from fxpipe.engines.attach import CheckedPart
from fxpipe.engines.engine import Engine, EnginePart
from fxpipe.errors import BackendError, BuildError, RunError
from fxpipe.observe.watch import Watch
from fxpipe.passes.reduce import Reduce
from fxpipe.plan.build_folder import read_plan
from fxpipe.plan.consistency import check
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import BucketSpec
from fxpipe.runtime.wires.transport import EdgeComm, Transport
from fxpipe.stages.loaded import load_stage_text, load_stages
from fxpipe.stages.microbatch import record_calls
from fxpipe.stages.minibatch import Minibatches
from fxpipe.stages.part_call import PartCall, ReadyComm
from fxpipe.stages.pure_function import Compute, in_float64
from fxpipe.stages.pure_part import PurePart, trace_stage
from fxpipe.typed_json import Malformed


class Interpreter(Engine):
    """Runs parts operator by operator with torch."""

    name = "interpreter"

    def missing(self, device: str) -> str | None:
        return None

    def version(self) -> str:
        return "1"

    def build(self, part: PurePart, cache: Path | None) -> Compute:
        return part


@functools.cache
def built(sharded: bool = False) -> Build:
    return lowered("gpt", workers=2, reduce=Reduce((2, 2), 4096, 1024, sharded))


@functools.cache
def recorded() -> dict[Any, PartCall]:
    """What the parts are called with."""
    build = built()
    parts = Minibatches(build.plan, build.files, build.tensors, None)(CASES["gpt"].batches(1, 16)[0], 0)
    leaves = dict(zip([leaf.name for leaf in build.plan.step.batch], parts[0], strict=True))
    with torch.no_grad():
        return record_calls(build.plan, load_stages(build.plan, build.files), build.tensors, leaves)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("made", ["engine", "checked", "float64"])
def test_an_engine_hands_over_what_the_code_does(made: str, sharded: bool) -> None:
    """The graph has no call for it, but what takes the function's place makes it, with what it returns."""
    build = built(sharded)
    for worker, stage in enumerate(load_stages(build.plan, build.files)):
        spec = build.plan.stages[worker]
        _, part = trace_stage(build.plan, worker, stage)
        on_engine = EnginePart(part, Interpreter())
        functions: dict[str, Callable[..., Any]] = {
            "engine": on_engine,
            "checked": CheckedPart(on_engine, spec.backward, stage.functions["B"]),
            "float64": in_float64(part),
        }
        call = recorded()[worker, "B"]
        comm, emitted = ReadyComm(call.received), ReadyComm(call.received)
        with torch.no_grad():
            returned = functions[made](call.weights, call.buffers, list(call.third), comm)
            stage.functions["B"](call.weights, call.buffers, list(call.third), emitted)
        gradients = dict(zip(spec.gradients, returned, strict=True))
        assert list(comm.handed) == list(emitted.handed) == [b.name for b in spec.buckets]
        assert len(comm.handed) > 1
        for bucket in spec.buckets:
            handed = comm.handed[bucket.name]
            assert handed.call == emitted.handed[bucket.name].call == ("reduce_scatter" if sharded else "all_reduce")
            for parameter, given, expected in zip(
                bucket.parameters, handed.gradients, emitted.handed[bucket.name].gradients, strict=True
            ):
                assert given is gradients[parameter]
                assert expected is not None
                torch.testing.assert_close(given, expected, check_dtype=made != "float64", rtol=1e-4, atol=1e-6)


class Noting(Interpreter):
    """Notes each call of what it has built."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def build(self, part: PurePart, cache: Path | None) -> Compute:
        def compute(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            self.calls.append("piece")
            return part(inputs)

        return compute


@pytest.mark.parametrize(("least", "count"), [(1024, 4), (1 << 30, 1)])
def test_sums_begin_between_the_pieces_of_an_engine(least: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece has about as many bytes; few bytes are worth no piece. Together they make what the whole makes."""
    monkeypatch.setattr(pieces, "LEAST_BYTES", least)
    build = built()
    for worker, stage in enumerate(load_stages(build.plan, build.files)):
        _, part = trace_stage(build.plan, worker, stage)
        engine, call = Noting(), recorded()[worker, "B"]
        function = EnginePart(part, engine)
        comm = ReadyComm(call.received)
        noted = engine.calls
        monkeypatch.setattr(comm, "all_reduce", lambda name, gradients, to=noted: to.append(name))
        with torch.no_grad():
            returned = function(call.weights, call.buffers, list(call.third), comm)
            expected = call.run(stage.functions["B"])
        assert all(map(torch.equal, returned, expected.gradients))
        assert all(torch.equal(comm.sent[name], value) for name, value in expected.sent.items())
        buckets = build.plan.stages[worker].buckets
        assert [name for name in noted if name != "piece"] == [bucket.name for bucket in buckets]
        size, sizes = {bucket.name: bucket.bytes for bucket in buckets}, [0]
        for name in noted[1:]:
            sizes[-1] += size.get(name, 0)
            sizes += [0] if name == "piece" else []
        largest = max(size.values())
        assert len(sizes) == count
        assert all(abs(each - sum(sizes) / count) <= largest for each in sizes)


def edited(old: str, new: str) -> str:
    """The first stage, with the first match of a pattern replaced."""
    source, count = re.subn(old, new, built().files["stage_0.py"], count=1)
    assert count
    return source


def test_what_is_handed_over_but_not_returned_runs_on_no_engine() -> None:
    source = edited(r'comm\.all_reduce\("bucket_0", \[(\w+)', r'comm.all_reduce("bucket_0", [\1 * 2')
    stage = load_stage_text(source, built().plan.stages[0])
    with pytest.raises(BackendError, match="adds up gradients in bucket_0 that it does not return"):
        trace_stage(built().plan, 0, stage)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r"(?s)    comm\.all_reduce\(\"bucket_1.*?\]\)[^\n]*\n", "", "backward no longer hands over bucket_1"),
        (r"all_reduce\(\"bucket_1", 'all_reduce("other', "backward hands over other, which the plan does not know"),
        (r"all_reduce\(\"bucket_1", 'all_reduce("bucket_0', "backward hands over bucket_0 more than once"),
    ],
)
def test_an_edited_stage_hands_over_what_the_plan_says(old: str, new: str, said: str) -> None:
    with pytest.raises(BuildError, match=re.escape(said)):
        load_stage_text(edited(old, new), built().plan.stages[0])


def of_first(plan: Plan, **changes: Any) -> Plan:
    return plan.with_step(stages=(dataclasses.replace(plan.stages[0], **changes), *plan.stages[1:]))


def with_buckets(change: Callable[[tuple[BucketSpec, ...]], Sequence[BucketSpec]]) -> Callable[[Plan], Plan]:
    return lambda plan: of_first(plan, buckets=tuple(change(plan.stages[0].buckets)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plan: dataclasses.replace(plan, replicas=(2,)), "cannot have [2] replicas for 4"),
        (lambda plan: dataclasses.replace(plan, replicas=(2, 0)), "cannot have [2, 0] replicas"),
        (lambda plan: dataclasses.replace(plan, replicas=(2, 5)), "cannot have [2, 5] replicas"),
        (
            lambda plan: dataclasses.replace(plan, placement=(0, 0), replicas=(2, 3), microbatches=6),
            "different numbers of replicas",
        ),
        (lambda plan: dataclasses.replace(plan, replicas=()), "buckets without replicas"),
        (with_buckets(lambda found: found[1:]), "not every gradient is in exactly one bucket"),
        (with_buckets(lambda found: (*found, found[0])), "not every gradient is in exactly one bucket"),
        (with_buckets(lambda found: found[::-1]), "does not hand over the buckets in order"),
        (
            with_buckets(lambda found: [dataclasses.replace(b, name="same") for b in found]),
            "two buckets have the same name",
        ),
        (with_buckets(lambda found: [dataclasses.replace(b, bytes=-1) for b in found]), "negative bytes"),
        (
            with_buckets(lambda found: [dataclasses.replace(b, updaters=(0,)) for b in found]),
            "must have one replica as updater",
        ),
        (
            with_buckets(lambda found: [dataclasses.replace(b, sharded=True) for b in found]),
            "must have one replica as updater",
        ),
        (
            lambda plan: of_first(plan, forward=dataclasses.replace(plan.stages[0].forward, reduces=("bucket_0",))),
            "where it makes gradients",
        ),
    ],
)
def test_a_plan_whose_buckets_do_not_fit_is_refused(change: Callable[[Plan], Plan], said: str) -> None:
    plan = dataclasses.replace(built().plan, microbatches=4)
    check(plan)
    with pytest.raises(Malformed, match=re.escape(said)):
        check(change(plan))


def test_a_shape_with_other_buckets_is_refused() -> None:
    plan = dataclasses.replace(built().plan, microbatches=4)
    first = plan.stages[0]
    turned = dataclasses.replace(first, buckets=first.buckets[::-1])
    wrong = dataclasses.replace(plan.step, edges=(), stages=(turned, *plan.stages[1:]))
    with pytest.raises(Malformed, match="differ from those of the first shape"):
        check(dataclasses.replace(plan, steps=(plan.step, wrong)))


def test_the_comm_of_a_run_passes_gradients_on() -> None:
    comm = EdgeComm({}, cast(Transport, None), Watch())
    passed_on: list[tuple[str, int, int, Sequence[Tensor | None]]] = []
    comm.reduce = lambda *bucket: passed_on.append(bucket)
    one = torch.ones(2)
    comm.bind(3, 1)
    comm.all_reduce("bucket_0", [one, None])
    comm.reduce_scatter("bucket_1", [one])
    assert [bucket[:3] for bucket in passed_on] == [("bucket_0", 3, 1), ("bucket_1", 3, 1)]
    assert [list(bucket[3]) for bucket in passed_on] == [[one, None], [one]]
    assert passed_on[0][3][0] is one


def test_a_worker_without_replicas_says_so() -> None:
    comm = EdgeComm({}, cast(Transport, None), Watch())
    for call in (comm.all_reduce, comm.reduce_scatter):
        with pytest.raises(RunError, match="the gradients of bucket_0 over replicas, and this worker has none"):
            call("bucket_0", [torch.ones(1)])


def test_a_plan_with_replicas_is_read_as_it_was_written(tmp_path: Path) -> None:
    build = lowered("gpt", microbatches=4, workers=2, schedule="1f1b", reduce=Reduce((2, 4), 4096, 1024, sharded=True))
    build.save(tmp_path / "build")
    plan = read_plan(tmp_path / "build")
    assert plan.replicas == (2, 4)
    assert [stage.buckets for stage in plan.stages] == [stage.buckets for stage in build.plan.stages]
    assert plan.stages[0].buckets[0].call == "reduce_scatter"
    assert [stage.edited for stage in load_stages(plan, tmp_path / "build")] == [False, False]
