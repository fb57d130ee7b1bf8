"""cost: bytes and seconds of every node, measured on the device or from a roofline."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxpipe.aten import is_view
from fxpipe.errors import CaptureError
from fxpipe.printer import heading
from fxpipe.program import Level, Program, info, size_of, value
from fxpipe.transform import Pass


@dataclass(frozen=True)
class Roofline:
    """A device for analytic costs: a node takes max(FLOPs / flops, bytes / bandwidth) + launch seconds."""

    flops: float = 50e9
    bandwidth: float = 10e9
    launch: float = 2e-6


@dataclass(frozen=True)
class Cost(Pass):
    """Give every node its bytes and seconds.

    Fields:
        mode: 'measured' runs the graph node by node on the model's device (one warm-up, then `repeats` runs, the
            median of each node); 'analytic' computes FLOPs and bytes from shapes and needs no data.
        threads: CPU threads while measuring: as many as one worker will have.
    """

    name: ClassVar[str] = "cost"
    requires: ClassVar[Level] = Level.CAPTURED
    provides: ClassVar[Level] = Level.COSTED

    mode: Literal["measured", "analytic"] = "measured"
    repeats: int = 3
    threads: int | None = None
    roofline: Roofline = Roofline()

    def __call__(self, program: Program) -> Program:
        program = program.copy(level=Level.COSTED)
        seconds = self._measured(program) if self.mode == "measured" else self._analytic(program)
        for node in program:
            info(node).bytes = size_of(value(node))
            info(node).seconds = seconds[node.name]
        return program

    def _analytic(self, program: Program) -> dict[str, float]:
        return {n.name: _roofline_seconds(n, self.roofline) for n in program}

    def _measured(self, program: Program) -> dict[str, float]:
        threads = torch.get_num_threads()
        rng = torch.get_rng_state()
        torch.set_num_threads(self.threads or threads)
        try:
            module = fx.GraphModule(torch.nn.Module(), program.graph)
            feed = {**program.values, **program.example}
            args = [feed[name] for name in program.placeholders]
            clock = _Clock(module, cuda=program.device == "cuda")
            with torch.no_grad():
                clock.run(*args)
                clock.take()
                runs = []
                for _ in range(self.repeats):
                    clock.run(*args)
                    runs.append(clock.take())
        finally:
            torch.set_num_threads(threads)
            torch.set_rng_state(rng)
        return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


class _Clock(fx.Interpreter):
    """Runs a graph and keeps each call's seconds; on CUDA from events, with one synchronisation a run."""

    def __init__(self, module: fx.GraphModule, cuda: bool) -> None:
        super().__init__(module)
        self.extra_traceback = False  # an error here is the user's, and says so
        self.cuda = cuda
        self.seconds: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        if self.cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = self._run(n)
            end.record()
            self.seconds[n.name] = (start, end)
            return result
        before = time.perf_counter()
        result = self._run(n)
        self.seconds[n.name] = time.perf_counter() - before
        return result

    def _run(self, node: fx.Node) -> Any:
        try:
            return super().run_node(node)
        except Exception as error:
            record = info(node)
            raise CaptureError(
                f"the step fails on the first batch: {type(error).__name__}: {str(error).splitlines()[0]}",
                where=heading(record) or str(node),
                hint="eager PyTorch would fail here too: look at the batch, its dtypes and the range of its values",
            ) from error

    def take(self) -> dict[str, float]:
        """The last run's seconds by node name."""
        taken, self.seconds = self.seconds, {}
        if self.cuda:
            torch.cuda.synchronize()
            return {name: start.elapsed_time(end) / 1e3 for name, (start, end) in taken.items()}
        return taken


def _roofline_seconds(node: fx.Node, device: Roofline) -> float:
    if is_view(node):
        return 0.0
    moved = size_of(value(node)) + sum(size_of(value(n)) for n in node.all_input_nodes)
    return max(_flops(node) / device.flops, moved / device.bandwidth) + device.launch


def _flops(node: fx.Node) -> float:
    target = node.target
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args = fx.map_arg(node.args, value)
    kwargs = fx.map_arg(node.kwargs, value)
    return float(formula(*args, **kwargs, out_val=value(node)))
