"""The onnxruntime engine: a part as an ONNX graph in an inference session, weights and values fed without copies."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxpipe.engines.engine import Engine
from fxpipe.engines.kept_files import write_whole
from fxpipe.errors import BackendError, FxpipeError, first_line
from fxpipe.ir.program import copy_graph
from fxpipe.plan.packing import Layout
from fxpipe.plan.spec import TensorSpec
from fxpipe.stages.pure_function import Compute
from fxpipe.stages.pure_part import PartInput, PartOutput, PurePart

aten = torch.ops.aten

INSTALL = "pip install onnx onnxscript onnxruntime (or onnxruntime-gpu)"
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
NARROW = "compile a model in float32 without --autocast and --params, or use another engine"
PACKAGES = ("onnxruntime", "onnxruntime-gpu", "onnx", "onnxscript")


class OrtEngine(Engine):
    """Runs parts in onnxruntime: on CUDA devices by its CUDA provider, elsewhere by its CPU provider."""

    name: ClassVar[str] = "onnxruntime"
    stable: ClassVar[bool] = True

    def missing(self, device: str) -> str | None:
        absent = [name for name in ("onnxruntime", "onnx", "onnxscript") if importlib.util.find_spec(name) is None]
        if absent:
            return f"{' and '.join(absent)} not installed: {INSTALL}"
        import onnxruntime

        providers = onnxruntime.get_available_providers()
        if PROVIDERS.get(device) in providers:
            return None
        return f"onnxruntime {onnxruntime.__version__} has no provider for {device}: {', '.join(providers)}" + (
            "; install onnxruntime-gpu instead of onnxruntime" if device == "cuda" else ""
        )

    def version(self) -> str:
        return _packages()

    def describe(self) -> str:
        import onnxruntime

        return f"{_packages()}; {', '.join(onnxruntime.get_available_providers())}"

    def build(self, part: PurePart, cache: Path | None) -> Compute:
        if cache is not None and cache.is_file():
            return Session(part, cache.read_bytes())
        rows: tuple[PartInput | PartOutput, ...] = (*part.inputs, *part.outputs)
        odd = [f"{r.kind} {r.name} is {r.tensor.dtype}" for r in rows if r.tensor.dtype not in _TYPES]
        if odd:
            raise BackendError(f"onnxruntime has no such type: {', '.join(odd[:5])}")
        if part.left:
            raise BackendError(
                f"{part.name} trains recurrent layers with kernels of torch, of which ONNX has no backward"
            )
        narrow = "bfloat16" in part.dtypes()
        if narrow and part.device == "cpu":
            raise BackendError("onnxruntime's CPU provider has too few operators in bfloat16", hint=NARROW)
        try:
            model = _model(part)
            compute = Session(part, model)
        except FxpipeError as error:
            if not narrow:
                raise
            raise BackendError(f"in bfloat16, {error.what}", where=error.where, hint=NARROW) from error
        if cache is not None:
            write_whole(cache, model)
        return compute


def _packages() -> str:
    versions = {name: _version(name) for name in PACKAGES}
    return ", ".join(f"{name} {number}" for name, number in versions.items() if number)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _model(part: PurePart) -> bytes:
    from fxpipe.onnx.convert import convert

    module = _physical(part)
    examples = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    model: bytes = convert(module, examples, *_names(part)).SerializeToString()
    return model


def _names(part: PurePart) -> tuple[list[str], list[str]]:
    return [f"in_{i}" for i in range(len(part.inputs))], [f"out_{i}" for i in range(len(part.outputs))]


def physical_order(spec: TensorSpec) -> tuple[int, ...]:
    """The dimensions in their order in memory, outermost first."""
    stride = Layout(spec).stride
    return tuple(sorted(range(len(stride)), key=lambda i: (-stride[i], i)))


def _physical(part: PurePart) -> fx.GraphModule:
    """The part on tensors in memory order: a dense but permuted tensor, like channels last, stays permuted."""
    graph = copy_graph(part.graph.graph)
    holders = [n for n in graph.nodes if n.op == "placeholder"]
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for node, row in zip(holders, part.inputs, strict=True):
        order = physical_order(row.tensor)
        value = node.meta["val"]
        node.meta["val"] = value.permute(order).contiguous()
        if order == tuple(range(len(order))):
            continue
        with graph.inserting_before(first):
            logical = graph.call_function(aten.permute.default, (node, [order.index(i) for i in range(len(order))]))
        logical.meta["val"] = value
        node.replace_all_uses_with(logical, delete_user_cb=lambda user, new=logical: user is not new)
    end = graph.output_node()
    results = list(end.args[0])  # type: ignore[arg-type]
    for i, result in enumerate(part.outputs):
        order = physical_order(result.tensor)
        if order != tuple(range(len(order))):
            with graph.inserting_before(end):
                results[i] = graph.call_function(aten.permute.default, (results[i], list(order)))
    end.args = (tuple(results),)
    return fx.GraphModule(part.graph, graph)


class Session:
    """An inference session, called with a trimmed part's inputs.

    Memory is bound by its address. An address that is already bound is not bound again, so weights that stay in place
    cost nothing.
    """

    def __init__(self, part: PurePart, model: bytes) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._device = torch.device(part.device)
        index = self._device.index
        if index is None:
            index = torch.cuda.current_device() if self._device.type == "cuda" else 0
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = 3
        settings: dict[str, Any] = {}
        if self._device.type == "cuda":
            settings = {
                "device_id": index,
                # onnxruntime's default is to use it.
                "use_tf32": int(torch.backends.cuda.matmul.fp32_precision == "tf32"),
                "cudnn_conv_algo_search": "HEURISTIC",  # a choice by timing could differ between runs
            }
        try:
            self._session = ort.InferenceSession(model, options, providers=[(PROVIDERS[self._device.type], settings)])
            self._binding = self._session.io_binding()
        except Exception as error:
            raise BackendError(f"onnxruntime refuses {part.name}: {first_line(error)}") from error
        # Called by the methods of IOBinding, which make a new device object each time; that takes longer than the rest.
        self._bind = self._binding._iobinding
        self._place = ort.OrtDevice.make(self._device.type, index)._get_c_device()
        inputs, outputs = _names(part)
        input_names = {i.name for i in self._session.get_inputs()}
        self._inputs = [
            _BoundTensor(name, row.tensor) if name in input_names else None
            for name, row in zip(inputs, part.inputs, strict=True)
        ]
        self._outputs = [_BoundTensor(name, row.tensor) for name, row in zip(outputs, part.outputs, strict=True)]

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        outputs, _held = self.bind(inputs)  # bound memory must live until the session has run
        if self._device.type == "cuda":  # the session has its own stream: it takes torch's default stream, 0, for none
            torch.cuda.current_stream().synchronize()
        self._session.run_with_iobinding(self._binding, self._run_options)
        return outputs

    def bind(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Bind the inputs and new memory for outputs; returns the outputs, and copies of inputs with other strides."""
        bind, place = self._bind, self._place
        copies = []
        for port, value in zip(self._inputs, inputs, strict=True):
            if port is None:
                continue
            if value.stride() != port.stride and not port.fits(value):
                value = port.layout.empty(value.device).copy_(value)
                copies.append(value)
            address = value.data_ptr()
            if address != port.bound:
                bind.bind_input(port.name, place, port.type, port.physical, address)
                port.bound = address
        outputs = []
        for port in self._outputs:
            value = port.layout.empty(self._device)
            address = value.data_ptr()
            if address != port.bound:
                bind.bind_output(port.name, place, port.type, port.physical, address)
                port.bound = address
            outputs.append(value)
        return outputs, copies


class _BoundTensor:
    """An input or output as it is bound."""

    __slots__ = ("bound", "layout", "name", "physical", "stride", "type")

    def __init__(self, name: str, spec: TensorSpec) -> None:
        import onnx

        self.name = name
        self.layout = Layout(spec, name)
        self.stride = tuple(self.layout.stride)
        self.physical = [spec.shape[i] for i in physical_order(spec)]
        self.type = int(getattr(onnx.TensorProto, _TYPES[spec.dtype]))
        self.bound: int | None = None

    def fits(self, value: Tensor) -> bool:
        """Whether the memory layout is right; the stride of an axis of size 1 does not matter."""
        return all(
            a == b for a, b, size in zip(value.stride(), self.stride, self.layout.shape, strict=True) if size != 1
        )


_TYPES = {
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
    "int64": "INT64",
    "int32": "INT32",
    "int16": "INT16",
    "int8": "INT8",
    "uint8": "UINT8",
    "bool": "BOOL",
}
