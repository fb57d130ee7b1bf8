"""Throttled links: the rule by which messages arrive, and runs that keep it to the bit and to the time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import ProfileError
from fxpipe.plan.urgency import CHUNK, SAVED, URGENT, WEIGHTS
from fxpipe.planner.links import Links
from fxpipe.planner.throttle import read_throttle
from fxpipe.runtime.wires.distributed import Wires
from fxpipe.runtime.wires.mailbox import Mailbox
from fxpipe.runtime.wires.meter import Letter, Meter
from fxpipe.schedule import Action
from fxpipe.simulator.channel import Channel, Direction

SLOW = "4Mbit,20ms"
SECONDS = 64 * 64 * 4 / 0.5e6  # that one value of `wide` takes on such a link


class Clock:
    """Time that passes only when one waits, as little more than asked for."""

    def __init__(self) -> None:
        self.time = 0

    def now(self) -> int:
        return self.time

    def rest(self, seconds: float) -> None:
        self.time += round(seconds * 1e9) + 1


def test_messages_arrive_as_the_simulator_says() -> None:
    rng = random.Random(0)
    links = Links(((1.0, 3e6), (2e6, 1.0)), ((0.0, 0.01), (0.02, 0.0)))
    for worker in (0, 1):
        clock, direction = Clock(), Direction()
        meter = Meter(links, offset=0, now=clock.now, rest=clock.rest)
        for _ in range(50):
            clock.time += rng.randrange(20_000_000)
            size = rng.randrange(100_000)
            channel = Channel(worker, 1 - worker, size, links, direction, 1)
            channel.send(0, clock.time / 1e9)
            ready = channel.ready[0]
            assert ready is not None
            assert meter.send(worker, 1 - worker, size) == pytest.approx(ready * 1e9, abs=100)


def test_what_waits_its_turn_arrives_as_the_simulator_says() -> None:
    rng = random.Random(1)
    links = Links(4e6, 0.01)
    clock, direction = Clock(), Direction()
    meter = Meter(links, now=clock.now, rest=clock.rest)
    letters, channels = [], []
    for _ in range(300):
        clock.time += rng.randrange(200_000_000)
        turn = rng.choice([URGENT, URGENT, SAVED, WEIGHTS])
        channel = Channel(0, 1, rng.randrange(2_000_000) if turn else rng.randrange(100_000), links, direction, 1, turn)
        for _ in direction.carry(clock.time / 1e9):
            pass
        if turn == URGENT:
            channel.send(0, clock.time / 1e9)
            assert meter.send(0, 1, int(channel.bytes)) == pytest.approx((channel.ready[0] or 0) * 1e9, abs=2000)
            continue
        channel.wait(0, clock.time / 1e9, Action("F", 0))
        channels.append(channel)
        letters.append(meter.put(0, 1, int(channel.bytes), turn))
    expected = {message.channel: time for time, message in direction.expected()}
    assert expected
    for letter, channel in zip(letters, channels, strict=True):
        time = channel.ready[0] or expected[channel]
        assert meter.expected(letter) == pytest.approx(time * 1e9, abs=2000)
    for letter in letters:
        assert meter.settle(letter) <= clock.time + 10**7 + 256 * 1024 * 250


def test_when_the_last_chunk_has_started_the_arrival_is_known() -> None:
    clock = Clock()
    meter = Meter(Links(CHUNK, 0.25), now=clock.now, rest=clock.rest)
    letter = meter.put(0, 1, 2 * CHUNK + CHUNK // 2, WEIGHTS)
    assert (meter.expected(letter), letter.arrives) == (2_750_000_000, None)
    clock.time = 1_500_000_000
    assert meter.send(0, 1, CHUNK // 4) == 2_500_000_000
    assert meter.settle(letter) == 3_000_000_000
    assert 2_250_000_000 < clock.time < 2_250_000_100


def test_directions_do_not_wait_for_each_other() -> None:
    clock = Clock()
    meter = Meter(Links(1e3), now=clock.now, rest=clock.rest)
    assert [meter.send(0, to, size) for to, size in ((1, 1000), (2, 500), (1, 1000))] == [10**9, 5 * 10**8, 2 * 10**9]


def test_who_receives_waits_by_the_clock_of_worker_0() -> None:
    clock = Clock()
    meter = Meter(Links(1e3), offset=-(10**9), now=clock.now, rest=clock.rest)
    assert meter.is_due(-(10**9))
    assert not meter.is_due(0)
    meter.hold(5)
    assert clock.time == 10**9 + 6


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.complex128]
)
@pytest.mark.parametrize("count", [0, 5])
def test_a_message_keeps_its_bits(dtype: torch.dtype, count: int) -> None:
    meter = Meter(Links(1e9))
    wires = Wires(0, "gloo", [], torch.device("cpu"), meter)
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    flat = bits.view(dtype)
    message = wires._stamped(flat, 1)
    assert len(message) == count + wires._stamp(dtype)
    assert torch.equal(wires.received((None, message)).view(torch.uint8), bits)


@pytest.mark.parametrize(
    ("text", "links"),
    [("100Mbit,20ms", Links(12.5e6, 0.02)), ("1.5GB/s", Links(1.5e9)), ("10Gbit,50us", Links(1.25e9, 50e-6))],
)
def test_throttles_in_words(text: str, links: Links) -> None:
    found = read_throttle(text, 2)
    assert found is not None
    assert (found.bandwidth, found.latency) == pytest.approx((links.bandwidth, links.latency))


def test_a_throttle_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    path.write_text('[links]\nbandwidth = [["1GB/s", "10Mbit"], ["20Mbit", "1GB/s"]]\nlatency = "1ms"\n')
    links = read_throttle(str(path), 2)
    assert links is not None
    assert (links.bandwidth_of(0, 1), links.bandwidth_of(1, 0), links.latency_of(0, 1)) == (1.25e6, 2.5e6, 1e-3)
    with pytest.raises(ProfileError, match="must be 3×3"):
        read_throttle(str(path), 3)


@pytest.mark.parametrize("text", ["fast", "100Mbit,soon", "0Mbit", "missing.toml", ",20ms", "2", "2,20ms"])
def test_what_is_no_throttle(text: str) -> None:
    with pytest.raises(ProfileError):
        read_throttle(text, 2)


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())


def error(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def rows(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 64, 64, generator=generator)) for _ in range(count)]


@pytest.fixture(scope="module")
def build() -> Any:
    at = ["2"]
    where = {"forward_at": at, "backward_at": at, "links": read_throttle(SLOW, 2)}
    return fxpipe.compile(
        wide(), error, rows(1)[0], workers=2, microbatches=1, schedule="async", cost="analytic", **where
    )


def test_letters_of_a_local_pipeline_take_their_time(build: Any) -> None:
    import time

    losses = []
    for throttle in (None, SLOW):
        pipeline = build.local(optimizer=lambda p: torch.optim.SGD([t for _, t in p], lr=0.1), throttle=throttle)
        begin = time.perf_counter()
        losses.append([float(pipeline.step(batch)) for batch in rows(3)])
        pipeline.flush()
        took = time.perf_counter() - begin
    assert losses[0] == losses[1]
    assert took > 3 * SECONDS  # both ways at once


def test_letters_within_a_rank_take_none() -> None:
    mailbox = Mailbox((), Links(1e-6), placement=(0, 1, 0))
    mailbox.put(0, 2, "here", torch.zeros(1000))
    mailbox.put(0, 1, "there", torch.zeros(1000))
    assert mailbox.has("here")
    assert not mailbox.has("there")
    assert len(mailbox.take("here")) == 1000


TASK = """
import torch
from test_meter import error, rows, wide
model, loss = wide, error

def train_data():
    return rows({steps})

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)
"""


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("schedule", ["async", "1f1b"])
def test_a_run_takes_as_long_as_the_simulator_forecasts(build: Any, tmp_path: Path, schedule: str) -> None:
    from fxpipe.runtime.options import RunOptions
    from fxpipe.runtime.process.launch import launch
    from fxpipe.runtime.process.local_run import run_local

    (tmp_path / "task.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n" + TASK.format(steps=40)
    )
    build.save(tmp_path / "build")
    options = {"build": str(tmp_path / "build"), "model_file": str(tmp_path / "task.py"), "schedule": schedule}
    found = launch(RunOptions(**options, throttle=SLOW), 2)
    expected = run_local(RunOptions(**options))
    assert found["losses"] == expected["losses"]
    forecast = found["forecast"]["samples_per_second"]
    assert found["samples_per_second"] == pytest.approx(forecast, rel=0.08)  # which also has the filling, of 40 steps
    assert 64 / forecast > (2 * SECONDS if schedule == "async" else 3 * SECONDS + 0.04)  # activations and targets


class Tall(nn.Module):
    """Its middle layer is large, and so is what it saves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(64, 5120)
        self.b = nn.Linear(5120, 64)
        self.c = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))))


FASTER = "64Mbit,50ms"  # 33 ms for a chunk


@pytest.fixture(scope="module")
def large() -> Any:
    """Worker 0 runs b forward, worker 1 backward: a large saved value goes there, and large gradients and weights come
    back."""
    where = {"forward_at": ["c"], "backward_at": ["b"], "links": read_throttle(FASTER, 2)}
    return fxpipe.compile(
        Tall(), error, rows(1)[0], workers=2, microbatches=4, schedule="async", cost="analytic", **where
    )


def test_a_gradient_overtakes_a_weight_copy(large: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    letters: list[Letter] = []
    overtaking: list[tuple[Letter, int]] = []
    put, send = Meter.put, Meter.send

    def spied_put(self: Meter, source: int, to: int, size: int, turn: int) -> Letter:
        letter = put(self, source, to, size, turn)
        if turn == WEIGHTS:
            letters.append(letter)
        return letter

    def spied_send(self: Meter, source: int, to: int, size: int) -> int:
        arrives = send(self, source, to, size)
        unsettled = (letter for letter in letters if letter.arrives is None and (source, to) == (1, 0))
        overtaking.extend((letter, arrives) for letter in unsettled)
        return arrives

    monkeypatch.setattr(Meter, "put", spied_put)
    monkeypatch.setattr(Meter, "send", spied_send)
    losses = []
    for throttle in (None, FASTER):
        pipeline = large.local(optimizer=lambda p: torch.optim.SGD([t for _, t in p], lr=0.1), throttle=throttle)
        losses.append([float(pipeline.step(batch)) for batch in rows(4)])
        pipeline.flush()
    assert losses[0] == losses[1]
    # At the end there may be weights that nothing reads.
    late = [letter.arrives - arrives for letter, arrives in overtaking if letter.arrives is not None]
    assert late
    assert min(late) > 0
    assert max(late) > CHUNK / 8e6 * 1e9


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(("schedule", "throttle"), [("async", FASTER), ("1f1b", None)])
def test_large_messages_wait_their_turn_between_processes(
    large: Any, tmp_path: Path, schedule: str, throttle: str | None
) -> None:
    from fxpipe.runtime.options import RunOptions
    from fxpipe.runtime.process.launch import launch
    from fxpipe.runtime.process.local_run import run_local

    task = TASK.format(steps=60).replace("error, rows, wide", "Tall, error, rows").replace("= wide,", "= Tall,")
    (tmp_path / "task.py").write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n" + task)
    large.save(tmp_path / "build")
    options = {"build": str(tmp_path / "build"), "model_file": str(tmp_path / "task.py"), "schedule": schedule}
    found = launch(RunOptions(**options, throttle=throttle), 2)
    assert found["losses"] == run_local(RunOptions(**options))["losses"]
    if throttle is not None and schedule == "async":  # one fifth less if all went in the order of sending
        assert found["samples_per_second"] == pytest.approx(found["forecast"]["samples_per_second"], rel=0.05)
