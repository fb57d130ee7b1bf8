"""The engine onnxruntime: what it lacks, its cache, memory of any layout, and what it refuses."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import needs_onnx  # noqa: F401
import onnxruntime
import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.engines.engine import EnginePart
from fxpipe.engines.onnxruntime import OrtEngine
from fxpipe.errors import BackendError
from fxpipe.onnx import convert
from fxpipe.stages.pure_part import PartInput, PartOutput, PurePart
from fxpipe.task.batch import tensor_spec


def part_of(function, *inputs: Tensor) -> PurePart:  # type: ignore[no-untyped-def]
    """A pure part of a function of tensors that returns a tuple of them."""
    graph: fx.GraphModule = make_fx(function, tracing_mode="fake")(*inputs)
    outputs = [n.meta["val"] for n in graph.graph.output_node().args[0]]  # type: ignore[union-attr]
    return PurePart(
        0,
        "F",
        graph,
        tuple(PartInput("saved", f"x{i}", tensor_spec(x)) for i, x in enumerate(inputs)),
        tuple(PartOutput("saved", f"y{i}", tensor_spec(y)) for i, y in enumerate(outputs)),
        (),
        "cpu",
    )


def check(part: PurePart, function, inputs: Sequence[Tensor], cache: Path | None = None) -> None:  # type: ignore[no-untyped-def]
    made = OrtEngine().build(part, cache)(inputs)
    for value, expected in zip(made, function(*inputs), strict=True):
        torch.testing.assert_close(value, expected)
        assert value.stride() == expected.stride()


def convolve(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    y = torch.ops.aten.convolution(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return (y * 2, y.sum(0))


def test_channels_last_comes_and_goes_as_it_lies() -> None:
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    check(part_of(convolve, x, torch.randn(4, 3, 3, 3)), convolve, (x, torch.randn(4, 3, 3, 3)))


def test_inputs_of_other_strides_than_traced_are_laid_out() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x @ y, x.t() + y)

    x, y = torch.randn(6, 5), torch.randn(5, 6)
    part = part_of(function, x, y)
    gapped, turned = torch.randn(6, 10)[:, ::2], torch.randn(6, 5).t()
    compute = OrtEngine().build(part, None)
    for inputs in ((gapped, turned), (x, y), (gapped, y), (torch.randn(6, 5), turned)):
        for value, expected in zip(compute(inputs), function(*inputs), strict=True):
            torch.testing.assert_close(value, expected)


def test_types_single_elements_and_nothing_at_all() -> None:
    def function(x: Tensor, keep: Tensor, place: Tensor, empty: Tensor, one: Tensor) -> tuple[Tensor, ...]:
        return (torch.where(keep, x, 0.0), place + 1, torch.cat([empty, x]), one * x.sum(), x.double(), ~keep)

    inputs = (torch.randn(4, 3), torch.rand(4, 3) > 0.5, torch.arange(5), torch.empty(0, 3), torch.tensor(2.0))
    check(part_of(function, *inputs), function, inputs)


def test_results_are_new_memory_every_time() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (x + 1,)

    compute = OrtEngine().build(part_of(function, torch.zeros(3)), None)
    first = compute((torch.zeros(3),))[0]
    second = compute((torch.ones(3),))[0]
    assert (first.tolist(), second.tolist()) == ([1.0] * 3, [2.0] * 3)


def test_the_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = (torch.randn(1, 3, 4, 4), torch.randn(2, 3, 3, 3))
    part, path = part_of(convolve, *inputs), tmp_path / "engines" / "part"
    check(part, convolve, inputs, path)
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.setattr(convert, "convert", None)  # must not be needed
    check(part, convolve, inputs, path)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    inputs = (torch.randn(1, 3, 4, 4), torch.randn(2, 3, 3, 3))
    (tmp_path / "engines").write_text("a file")
    check(part_of(convolve, *inputs), convolve, inputs, tmp_path / "engines" / "part")


def test_what_onnx_lacks_is_refused_with_its_operator() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.special.bessel_j1(x),)

    with pytest.raises(BackendError, match="bessel_j1"):
        EnginePart(part_of(function, torch.ones(3)), OrtEngine())


@pytest.mark.parametrize("package", ["onnxruntime", "onnx", "onnxscript"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a))
    reason = OrtEngine().missing("cpu")
    assert reason is not None
    assert reason.startswith(f"{package} not installed: pip install")


def test_a_missing_provider_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert OrtEngine().missing("cpu") is None
    reason = OrtEngine().missing("cuda")
    assert reason is not None
    assert "has no provider for cuda: CPUExecutionProvider; install onnxruntime-gpu" in reason


def test_types_that_onnxruntime_lacks_are_named() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.view_as_real(x * x),)

    with pytest.raises(BackendError, match="no such type: saved x0 is complex64"):
        OrtEngine().build(part_of(function, torch.ones(3, dtype=torch.complex64)), None)
