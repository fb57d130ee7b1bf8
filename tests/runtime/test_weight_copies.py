"""Readers of encoded weight copies: both ends agree, owners are exact, and readers follow them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipelines import pipeline_of
from torch import Tensor

from fxpipe.codecs import CODECS, register
from fxpipe.codecs.casts import Cast
from fxpipe.plan.build_folder import read_plan
from fxpipe.plan.spec import Plan
from fxpipe.policy.base import Policy
from fxpipe.policy.copy_messages import CopyMessages, Filling
from fxpipe.policy.demand import Demand
from fxpipe.runtime.process.local import LocalPipeline
from fxpipe.runtime.wires.mailbox import LocalTransport, Mailbox
from fxpipe.runtime.worker.weight_copies import WeightCopies
from fxpipe.schedule import make
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.versions import Versions

MIXED = {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True}
BACK = {"forward": (0, 1, 2, 2), "backward": (0, 0, 1, 2), "tied": True}
POLICIES = [
    ("latest", 1), ("stash", 2), ("vertical", 1), ("2bw", 2), ("2bw+predict", 2), ("spectrain", 1), ("spectrain", 2),
    ("pipeoptim", 1), ("pipeoptim+keep", 2), ("xpipe", 2), ("lwp", 1), ("lwp+ef", 2), ("spectrain+ef", 1),
]  # fmt: skip
SHAPED = list(zip(itertools.cycle([MIXED, BACK]), POLICIES, strict=False))


class Single(Cast):
    """float64 as float32: of differences, next to nothing is lost."""

    name = "single_of_tests"
    to = "float32"


@pytest.fixture(autouse=True)
def single() -> Any:
    register(Single)
    yield
    del CODECS[Single.name]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


@pytest.fixture
def pipeline(toy: Any, tmp_path: Path) -> Callable[..., LocalPipeline]:
    def made(weights_codec: str, shape: Mapping[str, Any], **options: Any) -> LocalPipeline:
        folder = tmp_path / str(len(list(tmp_path.iterdir()))) / "build"
        return pipeline_of(toy(**shape, **options, weights_codec=weights_codec).save(folder), sgd)

    return made


@pytest.mark.parametrize(("shape", "case"), SHAPED)
def test_differences_lose_next_to_nothing_with_a_fine_codec(
    batches: Any, pipeline: Any, shape: dict[str, Any], case: tuple[str, int]
) -> None:
    """Through a flush, too: a reader that took a wrong base would be far off."""
    policy, microbatches = case
    found = []
    for name in ("", Single.name):
        made = pipeline(name, shape, policy=policy, microbatches=microbatches)
        losses = [*made.run(batches), *made.run(batches)]
        found.append((losses, made.state_dict()))
    (losses, weights), (others, other_weights) = found
    assert others == pytest.approx(losses, rel=1e-6)
    assert other_weights.keys() == weights.keys()
    for key, value in weights.items():
        assert torch.allclose(other_weights[key], value, rtol=1e-6, atol=1e-9), key


@pytest.mark.parametrize(("codec", "bound"), [("int8", 0.02), ("topk:0.3", 3.0), ("lowrank:2", 3.0)])
def test_readers_follow_and_do_not_drift(batches: Any, pipeline: Any, codec: str, bound: float) -> None:
    """Over 240 updates, in units of how far the update before moved the weight."""
    made = pipeline(codec, MIXED, policy="latest")
    apart: list[float] = []
    true: dict[tuple[int, int], dict[str, Tensor]] = {}
    for batch in batches * 40:
        made.step(batch)
        for executor in made.executors:
            store = executor.store
            true[executor.worker, store.version] = {n: p.detach().clone() for n, p in store.trained.items()}
        for executor in made.executors:
            for (owner, version, _), tensors in executor.store.weight_copies._bases.items():
                if version > 1:
                    now, before = true[owner, version], true[owner, version - 1]
                    apart += [((t - now[n]).norm() / (now[n] - before[n]).norm()).item() for n, t in tensors.items()]
    assert len(apart) > 240
    assert 0 < max(apart) < bound
    assert max(apart[-100:]) < 2 * max(apart[:100])


@pytest.mark.parametrize(("shape", "case"), SHAPED)
def test_bases_do_not_grow_and_are_those_of_the_table(
    batches: Any, pipeline: Any, shape: dict[str, Any], case: tuple[str, int]
) -> None:
    policy, microbatches = case
    made = pipeline("int8", shape, policy=policy, microbatches=microbatches)
    sizes = []
    for batch in batches * 4:
        made.step(batch)
        of_worker = []
        for executor in made.executors:
            held = executor.store.weight_copies
            sent = sum(t.nbytes for _, of in held._made.values() for t in of.values())
            received = sum(t.nbytes for of in held._bases.values() for t in of.values())
            of_worker.append((sent, received))
        sizes.append(of_worker)
    assert all(size == sizes[-1] for size in sizes[10:])
    demand = made.recipe.demand
    messages, workers = CopyMessages(demand), range(made.plan.workers)
    kept = {(o, r): messages.base_bytes(o, r, 20, Filling()) for o in workers for r in demand.readers(o)}
    for worker in workers:
        sent = sum(size for (owner, _), size in kept.items() if owner == worker)
        received = sum(size for (_, reader), size in kept.items() if reader == worker)
        assert sizes[-1][worker] == (sent, received)
    assert sum(sent for sent, _ in sizes[-1]) > 0


@dataclass(frozen=True)
class Wild(Policy):
    """Lags and predictions that follow no rule, but are the same in every process."""

    name = "wild_of_tests"
    predicts = True
    seed: int = 0
    keep: bool = False

    @property
    def keeps_forward(self) -> bool:
        return self.keep

    def _draw(self, *about: int) -> int:
        return hash((self.seed, *about))

    def lag(self, newest: Versions, phase: Any, microbatch: int, reader: int, owner: int) -> int:
        return newest.lag(phase, reader, owner, microbatch) + self._draw(ord(phase), microbatch, reader, owner) % 3

    def ahead(self, action: Action, version: int, owner: int, schedule: Schedule) -> int:
        rule = self.seed % 3  # by distance, as sensible policies do; by minibatch, too; without any
        about = (action.minibatch - version,) if rule == 0 else (action.minibatch % 2, action.minibatch - version)
        return self._draw(ord(action.phase), action.microbatch, owner, *about, version if rule == 2 else 0) % 3

    def check(self, schedule: Schedule) -> None:
        pass


@pytest.fixture(scope="module")
def plans(toy: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Plan]:
    found = {}
    for number, shape in enumerate((MIXED, BACK)):
        for microbatches in (1, 2, 4):
            folder = tmp_path_factory.mktemp("plan") / "build"
            found[number, microbatches] = read_plan(toy(**shape, microbatches=microbatches).save(folder))
    return found


def values(demand: Demand, owner: int, version: int, ahead: int) -> dict[str, Tensor]:
    """What an owner has: anything, but the same in every process."""
    found = {}
    for number, parameter in enumerate(demand.plan.owned(owner)):
        generator = torch.Generator().manual_seed(
            1000 * number + 100 * owner + 10 * version + (ahead if version else 0)
        )
        found[parameter.name] = torch.randn(parameter.tensor.shape, dtype=torch.float64, generator=generator)
    return found


class Segment:
    """All workers of one segment of a run: owners write everything, then readers read in the order of their rows."""

    def __init__(self, demand: Demand, start: int, since: int, stop: int, told: bool) -> None:
        self.demand, self.start, self.since, self.stop = demand, start, since, stop
        self.owners_stop = stop if told else None
        self.mailbox = Mailbox(())
        self.weight_copies = [
            WeightCopies(CopyMessages(demand), worker, LocalTransport(self.mailbox, worker), 0)
            for worker in range(demand.plan.workers)
        ]
        self.had: dict[tuple[int, int, int, int], dict[str, Tensor]] = {}
        for worker, held in enumerate(self.weight_copies):
            held.begin(Filling(start, since))
            if since == 0:
                owners = [o for o in range(demand.plan.workers) if worker in demand.readers(o)]
                read = {name: value for owner in owners for name, value in values(demand, owner, 0, 0).items()}
                held.hold_initial(demand.readers(worker), values(demand, worker, 0, 0), owners, read)

    def write(self, again: Mapping[tuple[int, int, int, int], dict[str, Tensor]], first: int) -> None:
        """Versions from `first` to the end; those up to `since` in the values of `again`, if it has them."""
        for owner, held in enumerate(self.weight_copies):
            for version in range(max(first, 1 if self.since == 0 else 0), self.stop):
                for reader in self.demand.readers(owner):
                    for message, sent in held.due(reader, version, self.owners_stop):
                        weights = values(self.demand, owner, version, message.ahead)
                        if version <= self.since:
                            weights = again.get((owner, reader, version, message.ahead), weights)
                        block = held.write(reader, message, weights)
                        made = held.of_reader(reader, message.ahead, message.names, weights)
                        self.had[owner, reader, version, message.ahead] = made
                        if sent:
                            held.transport.send_weights(reader, version, message.ahead, block)
                            self.sizes_agree(owner, reader, version, message.ahead, block)
                held.written(version)

    def sizes_agree(self, owner: int, reader: int, version: int, ahead: int, block: Tensor) -> None:
        coming = dict(self.weight_copies[reader].coming(owner, version, self.owners_stop))
        assert coming[ahead] == block.numel()

    def read(self) -> int:
        """Every reader reads what its actions do, in their order; returns how many messages they have received."""
        count = 0
        for worker, held in enumerate(self.weight_copies):
            found: dict[tuple[int, int, int], dict[str, Tensor]] = {}
            row = self.demand.schedule.after(worker, self.since, self.start, self.stop)
            for action in row:
                for reading in self.demand.readings(worker, action.phase):
                    if reading.owner == worker:
                        continue
                    version = self.demand.version(reading, action, self.start)
                    ahead = self.demand.ahead(reading, action, version)
                    key = reading.owner, version, ahead
                    if version == 0:
                        continue
                    if key not in found:
                        for each, weights in held.receive(*key):
                            assert (reading.owner, each, ahead) not in found
                            found[reading.owner, each, ahead] = weights
                            count += 1
                    self.compare(found[key], (reading.owner, worker, version, ahead), reading.names)
        return count

    def compare(self, found: Mapping[str, Tensor], key: tuple[int, int, int, int], names: Sequence[str]) -> None:
        for name in names:
            assert torch.equal(found[name], self.had[key][name]), (key, name)


@given(data=st.data())
def test_both_ends_agree_under_any_policy(plans: dict[tuple[int, int], Plan], data: st.DataObject) -> None:
    """Whatever is read is what its owner believes; a run that goes on from a step has what the other one had."""
    plan = plans[data.draw(st.sampled_from(sorted(plans)))]
    plan = dataclasses.replace(plan, weights_codec=data.draw(st.sampled_from(["int8", "lowrank:2", "topk:0.2", ""])))
    schedule = make(data.draw(st.sampled_from(["async", "async", "1f1b", "gpipe"])), plan.workers, plan.microbatches)
    policy = Wild(seed=data.draw(st.integers(0, 99)), keep=data.draw(st.booleans()))
    demand = Demand(plan, schedule, policy)
    start = data.draw(st.sampled_from([0, 0, 3]))
    stop = start + data.draw(st.integers(3, 12))
    whole = Segment(demand, start, start, stop, data.draw(st.booleans()))
    whole.write({}, start)
    whole.read()
    step = data.draw(st.integers(start + 1, stop))
    longer = stop + data.draw(st.integers(0, 3))
    if longer > stop:
        whole = Segment(demand, start, start, longer, True)
        whole.write({}, start)
    again = Segment(demand, start, step, longer, True)
    reach = max(demand.reach(owner) for owner in range(plan.workers))
    again.write(whole.had, max(start, step - reach))
    again.read()
    for key, weights in again.had.items():
        if key[2] >= step:
            assert weights.keys() == whole.had[key].keys()
            again.compare(weights, key, list(weights))
            whole.compare(weights, key, list(weights))


def test_a_stream_begins_whole_and_goes_on_as_differences(plans: dict[tuple[int, int], Plan]) -> None:
    plan = dataclasses.replace(plans[0, 1], weights_codec="int8")
    demand = Demand(plan, make("async", 3, 1), Wild(seed=0))
    messages, filling = CopyMessages(demand), Filling(2, 5)
    pairs = [(owner, reader) for owner in range(3) for reader in demand.readers(owner)]
    assert pairs
    for owner, reader in pairs:
        for version in range(2, 12):
            for message in messages.kept_up(owner, reader, version, filling):
                names = messages.differences(owner, reader, version, message.ahead, filling)
                before = messages.kept_up(owner, reader, version - 1, filling)
                had = [name for m in before if m.ahead == message.ahead for name in m.names]
                wanted = [name for name in message.names if name in had] if version > 5 else []
                assert list(names) == wanted
                pack = messages.pack(owner, reader, version, message.ahead, filling)
                assert pack.differences == set(wanted)
                whole = len(message.names) - len(wanted)
                assert pack.bytes == 320 * whole + 128 * len(wanted)  # 288 bytes, or a block of 66, each aligned
