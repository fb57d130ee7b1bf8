"""Nodes that repeat become calls of a function; the model computes the same."""

from __future__ import annotations

import needs_onnx  # noqa: F401
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from fxpipe.onnx.repeated_nodes import with_functions

WIDTH, DEPTH = 4, 4


def stack(constants: list[float], middle: dict[int, str] | None = None) -> onnx.ModelProto:
    """Blocks of nine nodes, each with a weight and a constant of its own; `middle` are other operators for some."""
    nodes, infos, initializers, x = [], [], [], "x"
    for i in range(DEPTH):
        initializers.append(numpy_helper.from_array(np.float32(constants[i]), f"c{i}"))
        operators = ["Neg", "Abs", (middle or {}).get(i, "Tanh"), "Sigmoid", "Relu", "Neg", "Tanh", "Abs"]
        steps = [("MatMul", [x, f"w{i}"]), *((operator, [f"b{i}.{k}"]) for k, operator in enumerate(operators))]
        steps[4] = "Add", [f"b{i}.3", f"c{i}"]
        for k, (operator, inputs) in enumerate(steps):
            nodes.append(helper.make_node(operator, inputs, [f"b{i}.{k}"]))
            infos.append(helper.make_tensor_value_info(f"b{i}.{k}", TensorProto.FLOAT, [2, WIDTH]))
        x = f"b{i}.{len(steps) - 1}"
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, WIDTH])]
    inputs += [helper.make_tensor_value_info(f"w{i}", TensorProto.FLOAT, [WIDTH, WIDTH]) for i in range(DEPTH)]
    graph = helper.make_graph(nodes, "net", inputs, [infos.pop()], initializers, value_info=infos)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize(
    ("model", "calls"),
    [(stack([0.5] * 4), 4), (stack([0.5, 0.5, 0.6, 0.5]), 3), (stack([0.5] * 4, {1: "Exp"}), 3)],
    ids=["equal", "another constant", "another operator"],
)
def test_equal_blocks_are_calls_of_one_function(model: onnx.ModelProto, calls: int) -> None:
    draw = np.random.default_rng(0)
    feed = {v.name: draw.standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim], np.float32)
            for v in model.graph.input}  # fmt: skip
    before = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feed)
    outlined = with_functions(model)
    onnx.checker.check_model(outlined, full_check=True)
    (function,) = outlined.functions
    assert sum(node.op_type == function.name for node in outlined.graph.node) == calls
    assert len(outlined.graph.node) == calls + (DEPTH - calls) * 9
    after = onnxruntime.InferenceSession(outlined.SerializeToString()).run(None, feed)
    assert np.array_equal(before, after)
