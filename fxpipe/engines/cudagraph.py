"""Parts as CUDA graphs: all kernels of a part in one launch, for parts whose launches take longer than they compute."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxpipe.engines.engine import Engine, for_layouts, has_strides, layouts
from fxpipe.errors import BackendError
from fxpipe.stages.pure_function import Compute
from fxpipe.stages.pure_part import PurePart
from fxpipe.stages.random_inputs import PLACE
from fxpipe.torch_private import foreach_copy_

aten = torch.ops.aten


class CudaGraphEngine(Engine):
    """Captures each part at its first call, and replays it from then on. Keeps nothing on disk."""

    name: ClassVar[str] = "cudagraph"
    keeps: ClassVar[bool] = False

    def missing(self, device: str) -> str | None:
        if torch.device(device).type != "cuda":
            return "CUDA graphs run on CUDA devices alone: compile with --device cuda"
        return None if torch.cuda.is_available() else "torch sees no CUDA device"

    def version(self) -> str:
        return f"torch {torch.__version__}, CUDA {torch.version.cuda}"

    def build(self, part: PurePart, cache: Path | None) -> Compute:
        _check(part)
        return _Replayed(part, self.name)


class _Replayed:
    """A part that is captured at its first call, and again when a weight has moved.

    A graph reads and writes the same memory at every replay. So inputs are copied into that memory, and outputs out of
    it: several microbatches may be between their forward and their backward. Weights are read where they are; one that
    has moved is copied, too, from then on.
    """

    def __init__(self, part: PurePart, engine: str) -> None:
        self._layouts, self._results = layouts(part)
        self._compute = for_layouts(part, engine)
        self._device = torch.device(part.device).type
        # By index, the address of each weight that the graph reads where it is.
        self._placed: dict[int, int | None] = {i: None for i, row in enumerate(part.inputs) if row.kind == "weight"}
        self._graph: Any = None
        self._inputs: list[tuple[list[int], list[Tensor]]] = []  # by dtype: indices of inputs, and their copies
        self._outputs: list[tuple[list[int], list[Tensor]]] = []  # the same of outputs

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        moved = [i for i, address in self._placed.items() if self._address(i, inputs[i]) != address]
        if self._graph is None or moved:
            self._capture(inputs, moved)
        for indices, copies in self._inputs:
            foreach_copy_(copies, [inputs[i] for i in indices])
        self._graph.replay()
        outputs = [layout.empty(self._device) for layout in self._results]
        for indices, results in self._outputs:
            foreach_copy_([outputs[i] for i in indices], results)
        return outputs

    def _address(self, i: int, x: Tensor) -> int:
        """Where an input is; 0 if the graph cannot read it there."""
        return x.data_ptr() if x.device.type == self._device and has_strides(x, tuple(self._layouts[i].stride)) else 0

    def _capture(self, inputs: Sequence[Tensor], moved: Sequence[int]) -> None:
        for i in moved:
            address = self._address(i, inputs[i])
            if self._graph is None and address:
                self._placed[i] = address
            else:
                del self._placed[i]
        if self._graph is not None:
            torch.cuda.current_stream().synchronize()  # CUDA does not say that a graph may be destroyed while it runs
        self._graph, self._inputs, self._outputs = None, [], []  # their memory is free for the next graph
        arguments = [
            x if i in self._placed else layout.empty(self._device).copy_(x)
            for i, (x, layout) in enumerate(zip(inputs, self._layouts, strict=True))
        ]
        stream, pool = _stream_and_pool(torch.cuda.current_device())
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # also if capturing fails, nothing more goes onto this stream
            self._compute(*arguments)  # libraries make their handles, cuDNN chooses kernels: not possible in a graph
            # Other threads, which carry messages or read data, may wait for the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                results = self._compute(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = graph
        self._inputs = _by_dtype({i: x for i, x in enumerate(arguments) if i not in self._placed})
        self._outputs = _by_dtype(dict(enumerate(results)))


def _by_dtype(tensors: dict[int, Tensor]) -> list[tuple[list[int], list[Tensor]]]:
    """Indices and tensors, in lists that one kernel can copy."""
    groups: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
    for i, x in tensors.items():
        indices, alike = groups.setdefault(x.dtype, ([], []))
        indices.append(i)
        alike.append(x)
    return list(groups.values())


@functools.cache
def _stream_and_pool(device: int) -> tuple[Any, Any]:
    """For all graphs of a device: they never run at the same time, so they share memory for what they compute."""
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()


def _check(part: PurePart) -> None:
    """Refuse values that go between the CPU and the device: a replay would not make or move them again."""

    def device_of(node: fx.Node) -> str:
        shown = node.meta.get("val")
        return shown.device.type if isinstance(shown, Tensor) else torch.device(part.device).type

    for node in part.graph.graph.nodes:
        if node.op != "call_function":
            continue
        for read in node.all_input_nodes:
            if device_of(node) == device_of(read):
                continue
            if device_of(read) == "cpu" and read.meta["val"].dim() == 0 and node.target is not aten._to_copy.default:
                continue  # a number: kernels take it by value
            raise BackendError(
                f"{node.target} takes a value from {device_of(read)} to {device_of(node)}, which a CUDA graph cannot",
                where=node.meta.get(PLACE),
                hint="use --backend eager, or keep the value on one device",
            )
