"""A graph as an ONNX model: names, order, shapes, and what cannot be exported."""

from __future__ import annotations

import needs_onnx  # noqa: F401
import numpy
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.errors import ExportError
from fxpipe.onnx.convert import convert, convert_exported
from fxpipe.stages.random_inputs import PLACE

aten = torch.ops.aten


def traced(f, *inputs: Tensor) -> fx.GraphModule:
    return make_fx(f, tracing_mode="fake")(*inputs)


def run(model: onnx.ModelProto, *inputs: Tensor) -> list[Tensor]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert len(session.get_inputs()) == len(inputs)
    feeds = {i.name: numpy.ascontiguousarray(x.numpy()) for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(numpy.array(o)) for o in session.run(None, feeds)]


def test_every_name_in_order_whatever_is_read_or_put_out() -> None:
    x, y, unread = torch.randn(3, 4), torch.randn(4, 5), torch.randn(2)

    def f(x: Tensor, y: Tensor, unread: Tensor) -> tuple[Tensor, ...]:
        product = x @ y
        return product, x, product, product.sum(), torch.ones(2)

    # Names that torch.onnx gives its own values, and names that swap places.
    inputs, outputs = ["matmul", "arg0_1", "val_0"], ["mm", "sum_1", "b", "arg1_1", "scale:0"]
    model = convert(traced(f, x, y, unread), [x, y, unread], inputs, outputs)
    assert [i.name for i in model.graph.input] == inputs
    assert [o.name for o in model.graph.output] == outputs
    assert [[d.dim_value for d in o.type.tensor_type.shape.dim] for o in model.graph.output] == [
        [3, 5],
        [3, 4],
        [3, 5],
        [],
        [2],
    ]
    for found, expected in zip(run(model, x, y, unread), f(x, y, unread), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_types_are_kept() -> None:
    inputs = [torch.randn(2).double(), torch.tensor([1, 2]), torch.tensor([True, False]), torch.tensor([1, 2]).int()]
    model = convert(traced(lambda *a: tuple(x.clone() for x in a), *inputs), inputs, list("abcd"), list("efgh"))
    assert [o.type.tensor_type.elem_type for o in model.graph.output] == [
        onnx.TensorProto.DOUBLE,
        onnx.TensorProto.INT64,
        onnx.TensorProto.BOOL,
        onnx.TensorProto.INT32,
    ]


def test_an_input_may_lie_otherwise_in_memory() -> None:
    x = torch.randn(4, 3).t()
    module = traced(lambda x: (x.t().view(12), torch.as_strided(x, (4,), (3,))), x)
    found = run(convert(module, [x], ["x"], ["y", "z"]), x)
    assert torch.equal(found[0], x.t().reshape(12))
    assert torch.equal(found[1], x[0])


def test_constants_go_along() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])
    module = make_fx(lambda x: (x * weights,), tracing_mode="fake", _allow_non_fake_inputs=True)(torch.ones(3))
    assert torch.equal(run(convert(module, [torch.ones(3)], ["x"], ["y"]), torch.ones(3))[0], weights)


def test_every_operator_that_cannot_be_is_named_with_its_places() -> None:
    x = torch.randn(3, 3)
    module = traced(lambda x: (torch.linalg.eigh(x @ x.t())[0] + torch.linalg.eigh(x)[0], torch.special.i1(x)), x)
    for i, node in enumerate(module.graph.nodes):
        node.meta[PLACE] = f"model.py:{i}"
    with pytest.raises(ExportError) as caught:
        convert(module, [x], ["x"], ["y", "z"])
    text = str(caught.value)
    assert "_linalg_eigh" in text
    assert "special_i1" in text
    assert text.count("model.py:") == 3


def test_a_decomposition_that_refuses_says_where() -> None:
    q = torch.randn(1, 1, 4, 8)
    module = traced(lambda q: (torch.as_strided(q, (4, 4), (2, 1)),), q)
    for node in module.graph.nodes:
        node.meta[PLACE] = "model.py:7"
    with pytest.raises(ExportError, match="as_strided") as caught:
        convert(module, [q], ["q"], ["o"])
    assert caught.value.where == "model.py:7"


def test_what_torch_cannot_convert_is_named_with_its_place() -> None:
    given = torch.randn(4, 5, 6), torch.ones(4, 5, dtype=torch.bool), torch.tensor([1, 2])

    def both(x: Tensor, mask: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        first = torch.index_put(x, (at,), x.sum())
        return (torch.ops.aten.index_put.default(first, [mask, at], x.sum()),)

    module = traced(both, *given)
    for i, node in enumerate(module.graph.nodes):
        node.meta[PLACE] = f"model.py:{i}"
    last = module.graph.output_node().prev
    with pytest.raises(ExportError, match=r"aten\.index_put\.default") as caught:
        convert(module, given, ["x", "mask", "at"], ["y"])
    assert caught.value.where == last.meta[PLACE]
    assert caught.value.hint


def test_a_name_given_twice_is_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(ExportError, match="twice"):
        convert(traced(lambda x: (x * 2,), x), [x], ["x"], ["x"])


def test_nothing_is_printed_and_no_path_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(2)
    model = convert(traced(lambda x: (x * 2,), x), [x], ["x"], ["y"])
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""
    assert __file__ not in str(model)


def test_the_same_graph_gives_the_same_bytes() -> None:
    x = torch.randn(2, 3)
    made = [convert(traced(lambda x: (x.softmax(-1),), x), [x], ["x"], ["y"]).SerializeToString() for _ in range(2)]
    assert made[0] == made[1]


def test_an_exported_program_keeps_its_batch_open() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = torch.nn.Conv2d(3, 4, 3)
            self.linear = torch.nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.convolution(x).relu().mean((2, 3)))

    model, x = Model().eval(), torch.randn(2, 3, 6, 6)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    made = convert_exported(program, ["image"], ["logits"], dynamic={"image": {0: "n"}, "logits": {0: "n"}})
    assert made.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"
    assert made.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "n"
    many = torch.randn(7, 3, 6, 6)
    assert torch.allclose(run(made, many)[0], model(many), atol=1e-5)
