"""The interface of an engine, and the function that replaces an emitted one by what an engine builds."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxpipe.engines.kept_files import is_intact, made_once, record, remove
from fxpipe.engines.pieces import pieces
from fxpipe.errors import BackendError, FxpipeError, first_line
from fxpipe.ir.program import copy_graph
from fxpipe.plan.packing import Layout
from fxpipe.stages.derived_outputs import trim
from fxpipe.stages.part_call import Function
from fxpipe.stages.pure_function import Compute, PureFunction, in_stable_order
from fxpipe.stages.pure_part import PurePart


class Engine(ABC):
    """Runs pure parts.

    A part arrives trimmed (`fxpipe.stages.derived_outputs`): no output is an input, a view of one, or there twice.

    Attributes:
        stable: whether `sort` and `topk` keep the order of equal elements, which PyTorch does not promise.
        keeps: whether `build` writes files, for the next run.
    """

    name: ClassVar[str]
    stable: ClassVar[bool] = False
    keeps: ClassVar[bool] = True

    @abstractmethod
    def missing(self, device: str) -> str | None:
        """Why it cannot be used on this machine for `device` ('cpu', 'cuda'), and what to do; None if it can."""

    @abstractmethod
    def version(self) -> str:
        """What the result of `build` depends on in addition to the part: versions of the engine and its packages."""

    def describe(self) -> str:
        """For `fxpipe doctor`: versions, and the devices that the engine supports."""
        return self.version()

    @abstractmethod
    def build(self, part: PurePart, cache: Path | None) -> Compute:
        """Make the part ready to run with the process's present number of threads.

        Args:
            cache: a file or folder for only this part, engine and version: read if it exists, else written (completely
                or not at all). None keeps nothing.

        Returns:
            The function. Inputs may have any strides and are never changed; outputs have new memory at each call, in
            the `fxpipe.plan.packing.Layout` of their specs.

        Raises:
            BackendError: the engine cannot run the part; one line says why, and where. `EnginePart` makes one of every
                other error.
        """


class EnginePart(PureFunction):
    """A part on an engine, called as the emitted function is."""

    def __init__(
        self, part: PurePart, engine: Engine, cache: Path | None = None, say: Callable[[str], None] = lambda text: None
    ) -> None:
        """Make the part ready. `say` gets a line of text if the engine must build: `cache` has nothing, or a damaged
        file.
        """
        self.engine, self._stable = engine.name, engine.stable
        self.kept: list[str] = []
        self._pieces = []
        whole = pieces(part)
        for number, piece in enumerate(whole):
            trimmed = trim(piece.part)
            file_name = kept_as(trimmed.inner, engine)
            inner = _built(trimmed.inner, engine, cache / file_name if cache and engine.keeps else None, say)
            later = frozenset(i for other in whole[number + 1 :] for i in other.takes)
            self._pieces.append((piece, trimmed, inner, later))
            self.kept.append(file_name)
        super().__init__(part, self._computed)

    def _computed(self, values: list[Any]) -> Iterator[Iterable[tuple[int, Tensor]]]:
        """The outputs of one piece after the other; a value is let go after the last piece that takes it."""
        for piece, trimmed, inner, later in self._pieces:
            inputs = [values[i] for i in piece.takes]
            outputs = trimmed.finish(inputs, inner([inputs[i] for i in trimmed.takes]))
            values += outputs[len(piece.gives) :]
            values[:] = [value if i in later else None for i, value in enumerate(values)]
            del inputs
            yield zip(piece.gives, outputs, strict=False)

    def judge(self, function: Function) -> Function:
        """Adapt the emitted function, or the part in float64, for a comparison with the engine's results."""
        return in_stable_order(function) if self._stable else function


def _built(part: PurePart, engine: Engine, path: Path | None, say: Callable[[str], None]) -> Compute:
    """What computes a trimmed part."""
    if not part.outputs:
        return lambda inputs: ()  # a part that only passes values on needs no engine
    if path is not None and not is_intact(path):
        with made_once(path):
            if not is_intact(path):  # else another worker has made it meanwhile
                if path.exists():
                    say(f"warning: {path} was changed after {engine.name} made it, so it is made again")
                    path = path if remove(path) else None
                else:
                    say(f"building {part.name} for {engine.name}, kept in {path.parent}")
                return _build(part, engine, path)
    return _build(part, engine, path)


def _build(part: PurePart, engine: Engine, path: Path | None) -> Compute:
    """What the engine builds, or reads if it is kept; every error is a BackendError."""
    try:
        compute = engine.build(part, path)
        if path and not is_intact(path):
            record(path)
        return compute
    except BackendError:
        raise
    except FxpipeError as error:
        raise BackendError(error.what, where=error.where, hint=error.hint) from error
    except Exception as error:
        raise BackendError(
            f"{engine.name} cannot build {part.name}: {type(error).__name__}: {first_line(error)}"
        ) from error


def kept_as(part: PurePart, engine: Engine) -> str:
    """The name in the cache of what an engine builds from a trimmed part, with a digest of all that it depends on.

    Parts that compute the same, such as those of a deep model's middle stages, have one name.
    """
    digest = hashlib.sha256(f"{engine.version()}\n{_own_code()}\n{part.device}\n{part.graph.code}\n".encode())
    digest.update(f"{[row.tensor for row in part.inputs]}\n{[row.tensor for row in part.outputs]}\n".encode())
    for node in part.graph.graph.nodes:
        if node.op == "get_attr":  # a constant: the code has only its name
            constant = getattr(part.graph, node.target).detach().cpu().contiguous()
            digest.update(f"{node.target} {constant.dtype} {list(constant.shape)}\n".encode())
            digest.update(constant.flatten().view(torch.uint8).numpy().tobytes())
    return f"{engine.name}-{digest.hexdigest()[:16]}"


@functools.cache
def _own_code() -> str:
    """A digest of the code that prepares parts for engines: what older code built must not be used."""
    root = Path(__file__).parents[1]
    files = [file for room in ("stages", "onnx", "engines") for file in (root / room).rglob("*.py")]
    files.append(root / "plan" / "packing.py")
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


aten = torch.ops.aten


def has_strides(x: Tensor, stride: tuple[int, ...]) -> bool:
    """Whether a tensor is plain memory with these strides."""
    return x.stride() == stride and not x.is_conj() and not x.is_neg()


def copied(x: Tensor, layout: Layout) -> Tensor:
    """A copy of `x` in its layout."""
    return layout.empty(x.device).copy_(x)


def layouts(part: PurePart) -> tuple[list[Layout], list[Layout]]:
    """Of its inputs and its outputs, as engines take and return them."""
    inputs, outputs = ([Layout(row.tensor, row.name) for row in rows] for rows in (part.inputs, part.outputs))
    return inputs, outputs


def for_layouts(part: PurePart, engine: str) -> fx.GraphModule:
    """The graph for inputs and outputs without gaps; the strides differ from the traced ones if these have gaps."""
    inputs, outputs = layouts(part)
    graph = copy_graph(part.graph.graph)
    for node in graph.nodes:
        node.meta.clear()  # the strides it was traced with
        node.type = None  # code with an annotation that is text cannot be saved
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # an engine's strides can differ from the traced ones
    if any(i.tensor.stride != tuple(layout.stride) for i, layout in zip(part.inputs, inputs, strict=True)):
        for node in graph.nodes:
            if node.target is aten.as_strided.default:
                raise BackendError(f"{engine} cannot run {part.name}: as_strided, and inputs that are views")
    end = graph.output_node()
    results = list(end.args[0])  # type: ignore[arg-type]
    with graph.inserting_before(end):
        for i, (output, layout) in enumerate(zip(part.outputs, outputs, strict=True)):
            if output.tensor.stride != tuple(layout.stride):
                results[i] = graph.call_function(aten.clone.default, (results[i],))
    end.args = (tuple(results),)
    return fx.GraphModule(part.graph, graph)
