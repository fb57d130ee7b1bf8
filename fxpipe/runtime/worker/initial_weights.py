"""Where a worker's first weights come from: the build, a checkpoint, or the user's model().

For a build without values, model() gives them. It is called twice more (`fxpipe.task.meta`): first without values, to
see in which order its code makes the parameters, and which are made from others; then with values for the parameters
that the worker needs and those that they are made from. It does not matter what sets the values: a module's
reset_parameters(), the model's _init_weights(), or model() itself. All other parameters have no memory, and code that
initialises them does nothing.

The generator is seeded again for every random operator, by the run's seed and the name of a parameter: the one that the
numbers are for, or the one that was made last. So a parameter's values do not depend on which others have memory: they
are the same on every worker, and for all cuts. They are not the numbers that an ordinary model() draws.
"""

from __future__ import annotations

import hashlib
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from fxpipe import user_lines
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.errors import BuildError, FxpipeError, TaskError, listed
from fxpipe.messages import warn
from fxpipe.plan.packing import Layout
from fxpipe.plan.plan import BufferSpec, ParameterSpec, Plan, holder_of
from fxpipe.plan.spec import TensorSpec
from fxpipe.random_state import random_state_kept
from fxpipe.task.meta import on_meta
from fxpipe.task.model_file import Task
from fxpipe.task.wrapped_tensors import lengthened, plain_tensors
from fxpipe.torch_private import LightDispatchMode, memory_of, pytree, schema_of
from fxpipe.tracing.tensor_rows import TensorRows

AGAIN = "compile the model again: fxpipe compile MODEL -o BUILD"


def initial_weights(
    plan: Plan,
    folder: Path,
    worker: int,
    parameters: Sequence[ParameterSpec],
    buffers: Sequence[BufferSpec],
    task: Task,
    seed: int,
    device: torch.device | str,
    checkpoint: Checkpoint | None = None,
) -> dict[str, torch.Tensor]:
    """The values of one worker's parameters and buffers by first name, each in its own memory; reads nothing else.

    Args:
        checkpoint: what a run starts from; None for the build's own values.

    Raises:
        BuildError: the build's file or the checkpoint cannot be read, or does not fit the plan.
        TaskError: the build has no values of the parameters (`Plan.meta`), and the model does not initialise them.
    """
    found: dict[str, torch.Tensor] = {}
    names = {name for p in plan.parameters for name in p.names}
    hanging = [b for b in buffers if plan.weights.meta and holder_of(b.names, names)]
    if checkpoint is not None:
        if worker == 0:
            for warning in checkpoint.warnings:
                warn(warning)
        if hanging:
            raise BuildError(
                "the build has no values (--meta), and its weights are packed: a file does not say all of how they are",
                where=str(checkpoint.path),
                hint="load the base in model(), and run without --weights; or compile without --meta",
            )
        found = dict(checkpoint.read([*parameters, *(b for b in buffers if b.saved)], device))
        _check_packing(found, buffers, folder / plan.weights.file, checkpoint)
    elif plan.weights.meta and parameters:
        found = initialised(plan, [*parameters, *hanging], task.model, seed, device)
    rows: list[ParameterSpec | BufferSpec] = [*parameters, *buffers]
    rest = [(row.name, row.tensor) for row in rows if row.name not in found]
    return found | read_tensors(folder / plan.weights.file, rest, device)


def _check_packing(
    found: Mapping[str, Tensor], buffers: Sequence[BufferSpec], file: Path, checkpoint: Checkpoint
) -> None:
    """Refuse weights that bitsandbytes has packed in another form than the build's, which stages have as constants."""
    packing = [(b.name, b.tensor) for b in buffers if any(".quant_state." in name for name in b.saved)]
    for name, value in read_tensors(file, packing, "cpu").items() if packing else ():
        if not torch.equal(value, found[name].cpu()):
            raise BuildError(
                f"{name.partition('.quant_state.')[0]} is packed in another form than in the build",
                where=str(checkpoint.path),
                hint="compile the model with these weights",
            )


def read_tensors(
    path: str | Path, specs: Iterable[tuple[str, TensorSpec]], device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Only the named tensors of a safetensors file, in the layout of the specs, each in its own memory."""
    found: dict[str, torch.Tensor] = {}
    wrong: list[str] = []
    try:
        with safe_open(str(path), framework="pt") as file:
            present = set(file.keys())
            for name, spec in specs:
                tensor = file.get_tensor(name) if name in present else None
                layout = Layout(spec, name)
                if unlike := _unlike(name, tensor, layout):
                    wrong.append(unlike)
                elif tensor is not None:
                    found[name] = layout.empty(device).copy_(tensor)
    except Exception as error:
        raise BuildError(f"the weights cannot be read: {error}", where=str(path), hint=AGAIN) from error
    if wrong:
        raise BuildError("the weights do not fit the plan: " + "; ".join(wrong), where=str(path), hint=AGAIN)
    return found


def _unlike(name: str, found: Tensor | None, layout: Layout) -> str:
    """How a tensor differs from the plan; empty if it does not."""
    if found is None:
        return f"{name} is missing"
    if (found.shape, found.dtype) == (layout.shape, layout.dtype):
        return ""
    return f"{name} is {found.dtype}{list(found.shape)}, not {layout.dtype}{list(layout.shape)}"


CURE = "run with --weights CHECKPOINT, or give the parameters their values in the modules' reset_parameters()"


def initialised(
    plan: Plan,
    needed: Sequence[ParameterSpec | BufferSpec],
    make: Callable[[], nn.Module],
    seed: int,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """The initial values of some of a build's parameters and of what hangs from them, by first name, each in its own
    memory.

    The process's random state does not change.
    """
    if not needed:
        return {}
    with random_state_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were shown when the model was compiled
        lineage = _Lineage()
        with lineage:
            first = on_meta(make, on_birth=lineage.born)
        numbers = first.numbers()
        _check_same(first.model, [*plan.parameters, *needed])
        births = {row.name: _birth(row, numbers) for row in needed}
        unseen = [name for name, number in births.items() if number is None]
        if unseen:
            raise TaskError(f"fxpipe did not see how model() makes {listed(unseen)}", hint=CURE)
        mode = _Seeded(seed, {number: name for name, number in reversed(numbers.items())})
        _seed_others(seed)
        with mode:
            made = on_meta(_explained(make), lineage.of(n for n in births.values() if n is not None), mode.born)
    if made.numbers() != numbers:
        raise TaskError(
            "model() makes its parameters in a different order at each call",
            hint="let it use the same order at every call, or run with --weights CHECKPOINT",
        )
    present = _by_name(made.model)
    found = {row.name: present[row.name] for row in needed}
    without = [name for name, tensor in found.items() if tensor.is_meta]
    if without:
        raise TaskError(f"model() gives no values to {listed(without)}: it leaves them on the meta device", hint=CURE)
    return {row.name: _own(found[row.name].detach(), Layout(row.tensor), device) for row in needed}


def _birth(row: ParameterSpec | BufferSpec, numbers: Mapping[str, int]) -> int | None:
    """Which parameter that was made it is, is part of, or hangs from."""
    name = next((name for name in row.names if name in numbers), None) or holder_of(row.names, numbers)
    return None if name is None else numbers[name]


def _by_name(model: nn.Module) -> dict[str, Tensor]:
    rows = TensorRows(model)
    return {name: value for names, value in zip(rows.names, rows.values, strict=True) for name in names}


def _own(value: Tensor, layout: Layout, device: torch.device | str) -> Tensor:
    """A copy on the device with its own memory and this layout; the tensor itself if it already is that."""
    alone = value.untyped_storage().nbytes() == value.nbytes
    if value.shape != layout.shape:  # how bitsandbytes has packed a weight: what no worker knew at compile
        value = lengthened(value, *layout.shape)
    if alone and value.stride() == layout.stride and value.device == torch.device(device):
        return value
    return layout.empty(device).copy_(value)


def _check_same(model: nn.Module, rows: Iterable[ParameterSpec | BufferSpec]) -> None:
    present = _by_name(model)
    unlike = (_unlike(row.name, present.get(row.name), Layout(row.tensor)) for row in rows)
    if wrong := [text for text in unlike if text]:
        raise TaskError(
            f"model() returns a different model from the compiled one: {listed(wrong)}", hint="compile the model again"
        )


def _explained(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same function, with errors that name the likely cause: some parameters have no values."""

    def model() -> nn.Module:
        try:
            return make()
        except Exception as error:
            where = error.where if isinstance(error, FxpipeError) else user_lines.user_traceback(error)
            said = error.what if isinstance(error, FxpipeError) else f"model() raised {type(error).__name__}: {error}"
            raise TaskError(
                f"{said}\nonly the parameters of one worker have values here, all others are on the meta device",
                where=where,
                hint=CURE,
            ) from error

    return model


class _Lineage(LightDispatchMode):
    """Records which parameters are made from the values of others: copies, norms, averages."""

    def __init__(self) -> None:
        super().__init__()
        self._from: dict[int, set[int]] = {}  # by memory: the parameters whose values are in it
        self._owner: dict[int, int] = {}  # by memory: the parameter that it belongs to
        self._parents: dict[int, set[int]] = {}

    def born(self, number: int, parameter: nn.Parameter) -> None:
        memories = [memory_of(plain) for _, plain in plain_tensors("", parameter)]
        self._parents[number] = {source for memory in memories for source in self._from.get(memory, ())}
        for memory in memories:
            self._owner[memory] = number
            self._from[memory] = {number}

    def of(self, numbers: Iterable[int]) -> set[int]:
        """These parameters, and all parameters that they are made from."""
        found: set[int] = set()
        left = list(numbers)
        while left:
            number = left.pop()
            if number not in found:
                found.add(number)
                left += self._parents[number]
        return found

    def read(self, tensors: Any) -> set[int]:
        """The parameters whose values are in any of these tensors."""
        return {number for memory in _memories(tensors) for number in self._from.get(memory, ())}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        read = _memories((args, kwargs))
        sources = self.read((args, kwargs))
        written = [args[i] for i, a in enumerate(schema_of(func).arguments) if i < len(args) and _is_written(a)]
        for tensor in pytree.tree_leaves((made, written)):
            if isinstance(tensor, Tensor):
                memory = memory_of(tensor)
                if memory in self._owner:
                    self._parents[self._owner[memory]] |= sources - {self._owner[memory]}
                else:
                    self._from[memory] = sources | (self._from.get(memory, set()) if memory in read else set())
        return made


def _memories(tensors: Any) -> set[int]:
    return {memory_of(t) for t in pytree.tree_leaves(tensors) if isinstance(t, Tensor)}


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class _Seeded(_Lineage):
    """Seeds the random generator again for every random operator.

    Draws for a parameter, into it or into a tensor made from it, are counted for that parameter alone. Their number
    depends on whether it has memory: without memory, torch's initialisers return at once; with it, some draw until a
    value fits. All other draws are counted for the parameter that was made last. `names` are of parameters, by the
    order in which they were made.
    """

    def __init__(self, seed: int, names: Mapping[int, str]) -> None:
        super().__init__()
        self.seed = seed
        self.names = names
        self.mark = ""
        self.drawn: Counter[str] = Counter()

    def born(self, number: int, parameter: nn.Parameter) -> None:
        """A parameter was made: if it is in the model, later draws for no parameter count under its name."""
        super().born(number, parameter)
        if number in self.names:
            self.mark = f"made {self.names[number]}"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = (kwargs or {}).get("generator") or torch.default_generator
            drawn_for = self.read((args, kwargs)) or self.read(_initialised_by_torch())
            mark = " ".join(sorted(self.names.get(n, str(n)) for n in drawn_for)) or self.mark
            generator.manual_seed(_number(f"{self.seed}/{mark}/{self.drawn[mark]}"))
            self.drawn[mark] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def _initialised_by_torch() -> Tensor | None:
    """The tensor that a running function of torch.nn.init fills, if one is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != nn.init.__file__:
        frame = frame.f_back
    return frame.f_locals.get("tensor") if frame is not None else None


def _number(mark: str) -> int:
    return int.from_bytes(hashlib.sha256(mark.encode()).digest()[:7], "little")


def _seed_others(seed: int) -> None:
    """Seed Python's and numpy's generators: code also draws from them for parameters without memory."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
