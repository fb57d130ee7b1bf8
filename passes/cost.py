"""cost: bytes and seconds of every node, measured on the device or computed for one that need not be here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fxpipe.costs.measured import MeasuredCosts, device_name, fingerprint, read
from fxpipe.costs.node_times import measure
from fxpipe.errors import BuildError
from fxpipe.ir.aten import is_view
from fxpipe.ir.program import Level, Program, info, size_of, value
from fxpipe.ir.transform import Pass
from fxpipe.planner.device import CPU, Device

TRUSTED = 0.25
"""How far the sum of the nodes' times may be from the whole's before a warning says so."""

aten = torch.ops.aten
# They read no more of their first input than they write.
_SPARSE = {aten.embedding.default, aten.index_select.default, aten.gather.default, aten.index.Tensor}


@dataclass(frozen=True)
class Cost(Pass):
    """Give every node its bytes and seconds.

    Fields:
        mode: 'measured' runs forward and backward on the model's own device (see `clock`); 'analytic' computes FLOPs
            and bytes from shapes and needs no data.
        repeats: runs after the warm-up; adapted to the step's length where None.
        threads: CPU threads while measuring: as many as one worker will have.
        device: what 'analytic' computes for.
        known: where an earlier compile may have left its measured costs; they are taken where they fit.
        keep: told the measured costs, new or known, so that they can be written with the build.
    """

    name: ClassVar[str] = "cost"
    requires: ClassVar[Level] = Level.NUMBERED
    provides: ClassVar[Level] = Level.COSTED

    mode: Literal["measured", "analytic"] = "measured"
    repeats: int | None = None
    threads: int | None = None
    device: Device = CPU
    known: Path | None = None
    keep: Callable[[MeasuredCosts], None] | None = None

    def __call__(self, program: Program) -> Program:
        warnings: tuple[str, ...] = ()
        seconds: Mapping[str, float]
        if self.mode == "measured":
            costs, warnings = self._measured(program)
            seconds = costs.seconds
            if self.keep is not None:
                self.keep(costs)
        else:
            seconds = {n.name: analytic_seconds(n, self.device) for n in program}
        program = program.copy(level=Level.COSTED, warnings=(*program.warnings, *warnings))
        for node in program:
            info(node).bytes = size_of(value(node))
            info(node).seconds = seconds[node.name]
        return program

    def _measured(self, program: Program) -> tuple[MeasuredCosts, tuple[str, ...]]:
        """An earlier compile's costs if they are this program's and beyond doubt, else new ones; and the warnings."""
        mark = fingerprint(program, device_name(program.device), self.threads or torch.get_num_threads())
        warnings: tuple[str, ...] = ()
        if self.known is not None:
            try:
                found = read(self.known, mark)
                complete = found is not None and found.seconds.keys() == {n.name for n in program}
                if found is not None and complete and not _doubts(found.ratios):
                    return found, ()
            except BuildError as error:
                warnings = (f"{error.what} ({error.where}); they are measured again",)
        seconds, ratios = measure(program, self.threads, self.repeats)
        return MeasuredCosts(mark, seconds, ratios), (*warnings, *_doubts(ratios))


def analytic_seconds(node: fx.Node, device: Device) -> float:
    """What a node takes on a device, from its FLOPs and the bytes it reads and writes; views take nothing."""
    if is_view(node):
        return 0.0
    written = size_of(value(node))
    inputs = [size_of(value(n)) for n in node.all_input_nodes]
    if node.target in _SPARSE and inputs:
        inputs[0] = min(inputs[0], written)
    return device.seconds(_flops(node), written + sum(inputs), _dtype(node))


def _doubts(ratios: Mapping[str, float]) -> tuple[str, ...]:
    names = {"F": "forward", "B": "backward"}
    return tuple(
        f"the times of {names[phase]}'s nodes add up to {1 / ratio:.2f} times what it takes as a whole; they were "
        "scaled to fit, but the machine may have been busy: compile again when it is not"
        for phase, ratio in ratios.items()
        if abs(1 / ratio - 1) > TRUSTED
    )


def _dtype(node: fx.Node) -> str:
    """The dtype in which a node multiplies: its first floating-point input's."""
    tensors = [value(n) for n in node.all_input_nodes]
    found = next((t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()), torch.float32)
    return str(found).removeprefix("torch.")


def _attention_flops(query: Any, key: Any, values: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, values.shape))


def _attention_backward_flops(
    gradient: Any, query: Any, key: Any, values: Any, *_: Any, out_val: Any = None, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, values.shape))


# What torch's own registry lacks. By the operator's name with its packet: a torch without one has no formula for it.
_FLOPS: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward_flops,
}


def _flops(node: fx.Node) -> float:
    packet = getattr(node.target, "overloadpacket", None)
    own = _FLOPS.get(str(packet))
    arguments = fx.map_arg(node.args, value)
    keywords = fx.map_arg(node.kwargs, value)
    if own is not None:
        return float(own(*arguments, **keywords))
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*arguments, **keywords, out_val=value(node)))
