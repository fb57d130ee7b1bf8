"""Parts compiled by torch's inductor: fused C++ on the CPU, Triton kernels on CUDA."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from fxpipe.engines.engine import Engine, copied, for_layouts, has_strides, layouts
from fxpipe.errors import BackendError, first_line
from fxpipe.files import owned, put, remove_abandoned
from fxpipe.plan.packing import Layout
from fxpipe.stages.pure_function import Compute
from fxpipe.stages.pure_part import PurePart
from fxpipe.threads import cores
from fxpipe.torch_private import DYNAMO, FUNCTORCH, INDUCTOR, FakeTensorMode
from fxpipe.tracing import kernels
from fxpipe.tracing.torch_versions import TESTED

aten = torch.ops.aten

_CONFIG = {
    "fx_graph_cache": True,  # `_save` takes its artifacts from these two caches
    "fx_graph_remote_cache": False,
    "force_disable_caches": False,
}
COMPILERS = 4
"""At most how many C++ compilers run at the same time: each takes 0.2 GB, and a block of a GPT has four to six kernels.

Threads wait for them. Triton's would be processes that outlive a Ctrl-C, so its kernels are compiled one by one.
"""
# Inductor's decompositions that do not compute the same as the kernels they replace: see fxpipe/tracing/kernels.py.
_NOT_DECOMPOSED = (aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default)
_LOGGERS = (INDUCTOR, DYNAMO, FUNCTORCH)


class InductorEngine(Engine):
    """Compiles each part once, for its static shapes and the process's number of threads.

    The cache is a folder: inductor's own (sources, libraries), and the artifact that finds them.
    """

    name: ClassVar[str] = "inductor"

    def missing(self, device: str) -> str | None:
        if importlib.util.find_spec(INDUCTOR) is None:
            return f"this torch has no inductor: install torch>={TESTED[0]}"
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            return "inductor needs Python's headers: install python3-dev, or a Python that has them"
        if torch.device(device).type == "cuda":
            if importlib.util.find_spec("triton") is None:
                return "inductor needs triton on CUDA: pip install triton"
            if not _installed(os.environ.get("CC", "gcc"), "gcc", "clang"):
                return "triton needs a C compiler: install gcc, or set CC"
        elif not _installed(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")):
            return "inductor needs a C++ compiler: install g++, or set CXX"
        return None

    def version(self) -> str:
        return f"torch {torch.__version__}, {_machine()}"

    def build(self, part: PurePart, cache: Path | None) -> Compute:
        # What compiled code depends on in addition to the part.
        index = torch.cuda.current_device() if torch.device(part.device).type == "cuda" else "cpu"
        situation = f"{self.version()}, {index}, {torch.get_num_threads()} threads"
        file = f"{hashlib.sha256(situation.encode()).hexdigest()[:16]}.artifact"
        function = (_load(part.device, cache, file) if cache else None) or self._compile(part, cache, file)
        return _Compiled(function, *layouts(part))

    def _compile(self, part: PurePart, cache: Path | None, file: str) -> Callable[..., Any]:
        graph = for_layouts(part, self.name)
        with FakeTensorMode():
            examples: list[Any] = [layout.empty(part.device) for layout in layouts(part)[0]]
        folder = _temporary(cache)
        try:
            with _quiet(part.device, folder) as inductor:
                artifact = inductor.standalone_compile(graph, examples, dynamic_shapes="from_example_inputs")
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, Exception):
                raise
            raise BackendError(
                f"inductor cannot compile {part.name}: {_reason(error)}",
                hint="use --backend eager for this build",
            ) from error
        function: Callable[..., Any] = artifact
        if cache is not None and _save(artifact, folder, cache, file):
            # Load it from the cache, as the next process will.
            return _load(part.device, cache, file) or function
        weakref.finalize(function, shutil.rmtree, folder, ignore_errors=True)
        return function


class _Compiled:
    """Compiled code that takes inputs of any strides and returns outputs of the promised strides."""

    __slots__ = ("_function", "_inputs", "_outputs", "_shared", "_strides")

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Layout], outputs: Sequence[Layout]) -> None:
        self._function = function
        self._inputs = [(layout, tuple(layout.stride)) for layout in inputs]
        self._outputs = list(outputs)
        self._strides = [tuple(layout.stride) for layout in outputs]
        self._shared: frozenset[int] | None = None

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        arguments = [
            x if has_strides(x, stride) else copied(x, layout)
            for x, (layout, stride) in zip(inputs, self._inputs, strict=True)
        ]
        results = self._function(*arguments)
        if self._shared is None:  # the same at every call
            self._shared = _sharing(arguments, results)
        return [
            x if x.stride() == stride and i not in self._shared else copied(x, layout)
            for i, (x, stride, layout) in enumerate(zip(results, self._strides, self._outputs, strict=True))
        ]


def _sharing(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> frozenset[int]:
    """The outputs that share memory with an input or an earlier output."""
    seen = {x.untyped_storage().data_ptr() for x in inputs} - {0}
    shared = set()
    for i, x in enumerate(outputs):
        at = x.untyped_storage().data_ptr()
        if at in seen:
            shared.add(i)
        elif at:
            seen.add(at)
    return frozenset(shared)


def _load(device: str, cache: Path, file: str) -> Callable[..., Any] | None:
    if not (cache / file).is_file():
        return None
    try:
        with _quiet(device, cache) as inductor:
            return inductor.CompiledArtifact.load(path=str(cache / file), format="binary")
    except Exception:  # damaged: it is built again
        return None


def _save(artifact: Any, folder: Path, cache: Path, file: str) -> bool:
    """Make `folder` the cache; False if that fails, which only costs the next compile."""
    try:
        artifact.save(path=str(folder / file), format="binary")
        put(folder, cache)
    except Exception:  # read-only, full, another process was faster, or code that inductor cannot save
        return False
    shutil.rmtree(folder, ignore_errors=True)  # what was there before
    return True


def _temporary(cache: Path | None) -> Path:
    if cache is not None:
        with contextlib.suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(cache.parent)
            return Path(tempfile.mkdtemp(owned(), f".{cache.name}.", cache.parent)).absolute()
    return Path(tempfile.mkdtemp(prefix="fxpipe-inductor-"))


@contextlib.contextmanager
def _quiet(device: str, folder: Path) -> Iterator[Any]:
    """Inside, inductor works only in this process, prints nothing, and writes only into `folder`."""
    from fxpipe.torch_private import inductor

    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        settings = _CONFIG | {"compile_threads": min(cores(), COMPILERS) if torch.device(device).type == "cpu" else 1}
        stack.enter_context(inductor.config.patch({k: v for k, v in settings.items() if hasattr(inductor.config, k)}))
        stack.enter_context(inductor.functorch_config.patch(enable_autograd_cache=True))
        stack.enter_context(torch.no_grad())
        stack.enter_context(kernels.traced())
        for table in (inductor.decomposition.decompositions, inductor.decomposition.fast_random_decomps()):
            stack.callback(table.update, {key: table.pop(key) for key in _NOT_DECOMPOSED if key in table})
        # If the variable CI is set, inductor refuses to call the kernel of an operator that torch can decompose.
        called = functools.partial(inductor.lowering.make_fallback, warn=False)
        stack.enter_context(mock.patch.object(inductor.graph, "make_fallback", called))
        if torch.device(device).type == "cpu":
            # Seconds of trial compiles, which inductor keeps for all processes of this user in its own cache.
            with contextlib.suppress(Exception):
                inductor.cpu_vec_isa.pick_vec_isa()
        stack.enter_context(inductor.temporary_cache_dir(str(folder.absolute())))
        for logger in map(logging.getLogger, () if os.environ.get("TORCH_LOGS") else _LOGGERS):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        yield inductor


def _reason(error: BaseException) -> str:
    """One line: the first error of a compiler's output, else the first line."""
    line = next((line.strip() for line in str(error).splitlines() if "error:" in line), first_line(error))
    return f"{type(error).__name__}: {line[:300]}"


def _machine() -> str:
    """This processor and this device: code is made for exactly these."""
    facts: list[Any] = []
    with contextlib.suppress(AttributeError, RuntimeError):
        facts += sorted((k, v) for k, v in torch.cpu.get_capabilities().items() if "num_" not in k)
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts += [device.name, device.major, device.minor, torch.version.cuda]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    return f"machine {torch.backends.cpu.get_cpu_capability()} {digest}"


def _installed(*names: str) -> bool:
    return any(shutil.which(name.split()[-1]) for name in names if name.strip())
