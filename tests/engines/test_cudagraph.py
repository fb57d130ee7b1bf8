"""Parts as CUDA graphs, with a stand-in for torch's graphs that replays calls into the same memory on a CPU.

What only a device can show is in `tests/gpu/test_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from cached import cuts, lowered
from small_models import CASES
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.engines import cudagraph
from fxpipe.engines.cudagraph import CudaGraphEngine, _Replayed, _stream_and_pool
from fxpipe.errors import BackendError
from fxpipe.plan.packing import Layout
from fxpipe.policy.recipe import choose
from fxpipe.simulator.memory import _graphs as graphs_of
from fxpipe.simulator.memory import peak_bytes
from fxpipe.stages.pure_part import PartInput, PartOutput, PurePart
from fxpipe.task.batch import tensor_spec
from fxpipe.torch_private import FakeTensorMode

ENGINE = CudaGraphEngine()


class Graph(TorchDispatchMode):
    """Remembers calls, and repeats them on what is then in their memory, into the memory of their first results."""

    captured = 0
    dropped = 0  # while they ran
    running: ClassVar[set[int]] = set()  # ids of those that were replayed since the device was waited for

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __del__(self) -> None:
        Graph.dropped += id(self) in self.running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        self.running.add(id(self))
        for func, args, kwargs, made in self.calls:
            memory = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
            for old, new in zip(tensors(made), tensors(func(*args, **kwargs)), strict=True):
                if old.untyped_storage().data_ptr() not in memory:  # else it is a view
                    old.copy_(new)


def tensors(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


class Stream:
    def __init__(self, device: int = 0) -> None:
        pass

    def synchronize(self) -> None:
        Graph.running.clear()

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


@contextmanager
def capture(graph: Graph, pool: str, stream: Stream, capture_error_mode: str) -> Iterator[None]:
    assert (pool, capture_error_mode) == ("pool", "thread_local")
    Graph.captured += 1
    with graph:
        yield


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(CudaGraphEngine, "missing", lambda self, device: None)
    stands_in = {"CUDAGraph": Graph, "Stream": Stream, "graph": capture, "stream": lambda stream: nullcontext()}
    stands_in |= {"current_stream": Stream, "current_device": lambda: 0, "graph_pool_handle": lambda: "pool"}
    for name, value in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("captured", "dropped"):
        monkeypatch.setattr(Graph, name, 0)
    _stream_and_pool.cache_clear()
    yield
    _stream_and_pool.cache_clear()


def pure(function: Callable[..., Any], *examples: Tensor, kind: Any = "saved") -> PurePart:
    graph = make_fx(function, tracing_mode="fake")(*examples)
    inputs = tuple(PartInput(kind, f"x{i}", tensor_spec(x)) for i, x in enumerate(examples))
    outputs = tuple(PartOutput("saved", f"y{i}", tensor_spec(y)) for i, y in enumerate(function(*examples)))
    return PurePart(0, "F", graph, inputs, outputs, (), "cpu")


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ENGINE.missing("cpu") == "CUDA graphs run on CUDA devices alone: compile with --device cuda"
    assert ENGINE.missing("cuda:0") == "torch sees no CUDA device"


@pytest.mark.usefixtures("graphs")
def test_calls_keep_their_results_and_their_inputs() -> None:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = x.sin()
        return z @ y, z.t() + 1, (y * 2).chunk(2, 1)[0], (y > 0)

    x, wide = torch.randn(6, 6), torch.randn(6, 12)
    part = pure(step, x, x.clone())
    compute = ENGINE.build(part, None)
    kept = []
    for given in ((x, x.exp()), (x.t(), wide[:, ::2]), (wide[:, 6:], torch.randn(6, 1).expand(6, 6))):
        before = [x.clone(memory_format=torch.contiguous_format) for x in given]
        kept.append((compute(given), step(*before)))
        assert all(map(torch.equal, given, before))
    for made, expected in kept:
        assert all(map(torch.equal, made, expected))
        assert [x.stride() for x in made] == [Layout(row.tensor).stride for row in part.outputs]
    assert Graph.captured == 1


@pytest.mark.usefixtures("graphs")
def test_weights_are_read_in_place_until_they_move() -> None:
    w = torch.randn(4, 4)
    compute = ENGINE.build(pure(lambda w: (w.sin(),), w, kind="weight"), None)
    for _ in range(2):
        assert torch.equal(compute([w])[0], w.sin())
        w.mul_(2)
    assert Graph.captured == 1
    for moved in (w.clone(), w.clone() + 1, w, w.t()):
        assert torch.equal(compute([moved])[0], moved.sin())
    assert (Graph.captured, Graph.dropped) == (2, 0)


@pytest.mark.parametrize(
    ("name", "schedule", "microbatches", "captures"),
    [
        pytest.param("gpt-dropout", "1f1b", 4, 6, marks=pytest.mark.slow),
        ("function", "1f1b", 4, 5),
        pytest.param("conv", "async", 1, 6, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("graphs")
def test_trains_as_eager(
    name: str, schedule: str, microbatches: int, captures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several microbatches are between forward and backward. A weight that another worker owns comes anew with each
    update, and where updates are late, all weights have versions: parts that read such weights are captured twice.
    """
    options: dict[str, Any] = {"workers": 2, "schedule": schedule, **cuts(CASES[name], 2, 1)}
    build = lowered(name, microbatches, **options)
    batches = CASES[name].batches(4)
    eager = build.local(backend="eager").run(batches)
    replayed: list[_Replayed] = []
    monkeypatch.setattr(cudagraph, "_Replayed", lambda *given: replayed.append(_Replayed(*given)) or replayed[-1])
    assert build.local(backend="cudagraph").run(batches) == pytest.approx(eager, rel=1e-6)
    assert Graph.captured == captures
    copies = [x for graph in replayed for _, values in (*graph._inputs, *graph._outputs) for x in values]
    forecast = 0
    for worker, summary in enumerate(build.costs.workers):
        parts = [replace(part, inside=part.results) for part in summary.parts]  # the stand-in has no pool
        forecast += graphs_of(build.plan, choose(build.plan).demand, worker, parts)
    held = {x.untyped_storage()._cdata: x.nbytes for x in copies}
    assert sum(held.values()) == pytest.approx(forecast, rel=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs")
def test_their_memory_is_in_the_forecast() -> None:
    """Also where it must fit into `--memory`, and for each shape of batch."""
    options: dict[str, Any] = {"workers": 2, "schedule": "1f1b", **cuts(CASES["function"], 2, 1)}
    enough = max(worker.memory_bytes for worker in lowered("function", 4, **options).workers)
    build = lowered("function", 4, **options, backend="cudagraph", memory=[enough])
    demand = choose(build.plan).demand
    peaks = peak_bytes(build.plan, build.costs, demand)
    assert peaks == tuple(worker.memory_bytes for worker in build.workers)
    assert sum("of memory" in warning for warning in build.warnings) == sum(peak > enough for peak in peaks) > 0
    several = replace(build.plan, steps=2 * build.plan.steps)
    assert all(map(int.__lt__, peaks, peak_bytes(several, build.costs, demand)))


def test_values_that_cross_to_the_cpu_are_refused() -> None:
    def of(function: Callable[[Tensor], Any]) -> PurePart:
        with FakeTensorMode():
            graph = make_fx(function)(torch.empty(3, device="cuda"))
        row = tensor_spec(torch.empty(3))
        return PurePart(0, "F", graph, (PartInput("saved", "x", row),), (PartOutput("saved", "y", row),), (), "cuda")

    with pytest.raises(BackendError, match=r"aten\._to_copy\.default takes a value from cuda to cpu, which a CUDA gr"):
        ENGINE.build(of(lambda x: (x.cpu(),)), None)
    with pytest.raises(BackendError, match=r"aten\.index\.Tensor takes a value from cpu to cuda"):
        ENGINE.build(of(lambda x: (torch.ops.aten.index.Tensor(x, [torch.ones(3).long()]),)), None)
    ENGINE.build(of(lambda x: (x * torch.ones(()),)), None)
