"""A converted model as a file that describes itself; its weights are inputs, inside it, or in a file next to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import onnx
import onnx.inliner
import torch
from torch import Tensor

import fxpipe
from fxpipe.errors import ExportError
from fxpipe.onnx.repeated_nodes import with_functions
from fxpipe.planner.quantity import size

WeightsForm = Literal["inputs", "initializers", "external"]
LIMIT = 2**31 - 1
"""Bytes of the largest protocol buffer."""

_ALIGNMENT = 4096  # of a tensor in a file next to the model, so that it can be mapped


def named(model: onnx.ModelProto, name: str, opset: int) -> onnx.ModelProto:
    """The model under its name; its functions are for what it repeats, and none of torch's."""
    version = {o.domain: o.version for o in model.opset_import}.get("")
    if version != opset:
        raise ExportError(f"{name} has opset {version}, not {opset}", hint="another --opset")
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    model.graph.name = name
    return with_functions(model)


def note(model: onnx.ModelProto, body: Mapping[str, Any], inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """Write into the model what it and each input and output is; returns the text of the property `fxpipe`."""
    text = json.dumps({"version": fxpipe.__version__, **body}, ensure_ascii=False)
    model.metadata_props.add(key="fxpipe", value=text)
    model.producer_name, model.producer_version = "fxpipe", fxpipe.__version__
    for values, words in ((model.graph.input, inputs), (model.graph.output, outputs)):
        for value, doc in zip(values, words, strict=True):
            value.doc_string = doc
    return text


def write(path: Path, model: onnx.ModelProto, weights: Mapping[str, Tensor], form: WeightsForm) -> Path | None:
    """Write a model, with those of its inputs that `weights` names in the given form; returns the file next to it that
    holds them, if there is one."""
    weights_file = None
    if form != "inputs" and weights:
        kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
        inputs = [value for value in model.graph.input if value.name not in weights]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        if form == "external":
            weights_file = path.with_name(path.name + ".data")
            with open(weights_file, "wb") as file:
                for name, tensor in weights.items():
                    file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
                    offset, count = file.tell(), file.write(_bytes(tensor))
                    initializer = onnx.TensorProto(name=name, dims=tensor.shape, data_type=kinds[name])
                    initializer.data_location = onnx.TensorProto.EXTERNAL
                    for key, value in (("location", weights_file.name), ("offset", offset), ("length", count)):
                        initializer.external_data.add(key=key, value=str(value))
                    model.graph.initializer.append(initializer)
        else:
            check_size(path.stem, model.ByteSize() + sum(t.nbytes for t in weights.values()), form)
            for name, tensor in weights.items():
                initializer = onnx.TensorProto(name=name, dims=tensor.shape, data_type=kinds[name])
                initializer.raw_data = bytes(_bytes(tensor))
                model.graph.initializer.append(initializer)
    check_size(path.stem, model.ByteSize(), form)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return weights_file


def check_size(name: str, count: int, form: WeightsForm) -> None:
    """Refuse a model that a file cannot hold."""
    if count > LIMIT:
        raise ExportError(
            f"{name}.onnx would be {size(count)}, and an ONNX file holds at most {size(LIMIT)}",
            hint="--weights external puts the weights into a file next to each model"
            if form == "initializers"
            else "more stages make smaller ones: constants in the code take this much",
        )


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's elements in order."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data).cast("B") if flat.numel() else memoryview(b"")
