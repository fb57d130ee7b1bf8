"""The inductor engine computes what eager PyTorch computes, compiles once, and keeps what it compiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import lowered
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.builds.build import Build
from fxpipe.engines.inductor import COMPILERS, InductorEngine, _quiet, _temporary
from fxpipe.errors import BackendError
from fxpipe.files import owned
from fxpipe.plan.packing import Layout
from fxpipe.stages.pure_part import PartInput, PartOutput, PurePart
from fxpipe.task.batch import tensor_spec
from fxpipe.threads import cores

aten = torch.ops.aten
ENGINE = InductorEngine()
needs_compiler = pytest.mark.skipif(ENGINE.missing("cpu") is not None, reason=str(ENGINE.missing("cpu")))


def pure(function: Callable[..., Any], *examples: Tensor) -> PurePart:
    """A part of its own, traced from a function of tensors."""
    graph = make_fx(function, tracing_mode="fake")(*examples)
    results = function(*examples)
    inputs = tuple(PartInput("saved", f"x{i}", tensor_spec(x)) for i, x in enumerate(examples))
    outputs = tuple(PartOutput("saved", f"y{i}", tensor_spec(y)) for i, y in enumerate(results))
    return PurePart(0, "F", graph, inputs, outputs, (), "cpu")


def product(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return ((x @ y).sin() * 2,)


def matrices() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 6), torch.randn(6, 6)


def no_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("In file included:\nx.cpp:3:1: error: no such thing\n  more")

    monkeypatch.setattr("fxpipe.torch_private.inductor.standalone_compile", refuse)


def close(found: Any, expected: Any) -> None:
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of `product`."""
    folder = tmp_path_factory.mktemp("inductor") / "product"
    ENGINE.build(pure(product, *matrices()), folder)
    return folder


@pytest.fixture(scope="module")
def build() -> Build:
    return lowered("gpt-dropout", forward_at=("blocks.1",), backward_at=("blocks.1",))


@pytest.mark.slow
@needs_compiler
def test_outputs_are_new_and_laid_out() -> None:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = x.sin()
        first, second = (y * 2).chunk(2, 1)  # with gaps
        return x.clone(), x + 0, z, z.clone(), y.t().contiguous().t().cos(), first, second

    x, y = matrices()
    part = pure(step, x, y)
    compute = ENGINE.build(part, None)
    for _ in range(2):
        given, results = (x.clone(), y.clone()), []
        results = list(compute(given))
        close(results, step(x, y))
        for result, output in zip(results, part.outputs, strict=True):
            assert result.stride() == Layout(output.tensor).stride
        assert len({r.untyped_storage().data_ptr() for r in (*given, *results)}) == len(given) + len(results)
        for result in results:
            result.zero_()
        assert torch.equal(given[0], x)
        assert torch.equal(given[1], y)


@needs_compiler
def test_inputs_of_any_strides(kept: Path) -> None:
    x, y = matrices()
    compute = ENGINE.build(pure(product, x, y), kept)
    wide = torch.randn(6, 12)
    expanded = torch.randn(6, 1).expand(6, 6)
    for inputs in ((x.t(), y), (wide[:, ::2], y.t()), (expanded, wide[:, 6:])):
        before = [i.clone() for i in inputs]
        close(compute(inputs), product(*inputs))
        close(inputs, before)


@needs_compiler
def test_view_of_an_input_with_gaps() -> None:
    wide = torch.randn(2, 4, 12)
    x = wide[..., :8].view(2, 4, 2, 4).transpose(1, 2)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return (x.transpose(1, 2).view(2, 4, 8).sin(),)  # a view in these strides alone

    compute = ENGINE.build(pure(step, x), None)
    close(compute([x]), step(x))
    close(compute([x.contiguous()]), step(x))


@needs_compiler
def test_cache_is_used(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = matrices()
    part = pure(product, x, y)
    no_compile(monkeypatch)
    close(ENGINE.build(part, kept)([x, y]), product(x, y))
    assert [p.name for p in kept.parent.iterdir()] == [kept.name]
    sources = [p.read_text() for p in kept.rglob("*.cpp")]
    assert sources
    assert not any("#pragma omp parallel" in text for text in sources)  # compiled for one thread
    with pytest.raises(BackendError, match=r"stage_0\.forward: RuntimeError: x\.cpp:3:1: error: no such thing\n"):
        ENGINE.build(part, kept.parent / "other")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with pytest.raises(BackendError):
        ENGINE.build(part, kept)
    assert [p.name for p in kept.parent.iterdir()] == [kept.name]


@pytest.mark.slow
@needs_compiler
def test_bad_cache_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = matrices()
    part, cache = pure(product, x, y), tmp_path / "part"
    first = ENGINE.build(part, cache)([x, y])
    for artifact in cache.glob("*.artifact"):
        artifact.write_bytes(artifact.read_bytes()[:100])
    again = ENGINE.build(part, cache)([x, y])
    no_compile(monkeypatch)
    loaded = ENGINE.build(part, cache)([x, y])
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[0], loaded[0])
    assert [p.name for p in tmp_path.iterdir()] == ["part"]


def test_what_another_process_is_compiling_stays(tmp_path: Path) -> None:
    fresh, old = (
        tmp_path / f".part.a{end}" for end in (owned(), owned().replace(f".{os.getpid()}.", f".{2**22 + 1}."))
    )
    for folder in (fresh, old):
        folder.mkdir()
    own = _temporary(tmp_path / "part")
    assert sorted(tmp_path.iterdir()) == sorted([fresh, own])


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert ENGINE.missing("cpu") == "inductor needs a C++ compiler: install g++, or set CXX"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else name)
    assert ENGINE.missing("cuda:0") == "inductor needs triton on CUDA: pip install triton"


@pytest.mark.slow
@needs_compiler
def test_margin_losses_are_not_what_torch_decomposes_them_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")  # under which inductor would rather not call a kernel
    scores = (torch.randn(4, 5, generator=torch.Generator().manual_seed(0)) * 2).round() / 4
    labels = torch.tensor([[3, -1, 0, 1, 2], [0, 1, 2, 3, 4], [-1, 0, 1, 2, 3], [1, 1, -1, 0, 0]])

    def losses(scores: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        several, are_labels = aten.multilabel_margin_loss_forward.default(scores, labels, 1)
        one = aten.multi_margin_loss.default(scores.where(scores != 0.5, torch.nan), labels[1, :4])
        return several, are_labels, one

    close(ENGINE.build(pure(losses, scores, labels), None)([scores, labels]), losses(scores, labels))


@needs_compiler
@pytest.mark.parametrize(("device", "most"), [("cpu", COMPILERS), ("cuda", 1)])
def test_compilers_that_end_with_the_process_run_at_the_same_time(device: str, most: int, tmp_path: Path) -> None:
    with _quiet(device, tmp_path) as inductor:
        assert inductor.config.compile_threads == min(cores(), most)
