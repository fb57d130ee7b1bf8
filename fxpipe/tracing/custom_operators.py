"""Checks that operators from outside torch can be captured, and can run where the build runs.

They need a shape function (register_fake), because capture computes no values; a gradient formula (register_autograd);
and a kernel for the build's device. No operator may contain graphs: a cut could not go through them.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable
from typing import Any

from torch import fx

from fxpipe import user_lines
from fxpipe.errors import CaptureError
from fxpipe.torch_private import OPDEFS, HigherOrderOperator, OpOverload, has_kernel, initial_function, with_effects
from fxpipe.tracing import origin

PAGE = "operators"
_TORCHS = ("aten", "prim", "prims", "prims_rng", "rngprims", "quantized", "sparse", "mkldnn", "higher_order")
_ANY_DEVICE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
_FAKE = r"no fake impl registered for <CustomOpDef\((\S+)\)>"
_GRADIENT = r"backward through (\S+) but no autograd formula|(\S+): an autograd kernel was not registered"
_KERNEL = r"Could not run '(\S+)' with arguments from|could not find kernel for (\S+) at"


def lacking(error: Exception, watch: origin.TracedStep) -> CaptureError | None:
    """What an operator lacks, if that is why a trace failed."""
    message = str(error)
    where = user_lines.user_traceback(error)
    function = getattr(error, "func", None)
    if changes := _changes(error):
        return _in_place(changes, where or _where(_plain(changes.name()), watch))
    if isinstance(function, OpOverload) and type(error).__name__ == "UnsupportedOperatorException":
        return None if function.namespace in _TORCHS else _no_fake(str(function), where, watch)
    if match := re.search(_FAKE, message):
        return _no_fake(match[1], where, watch)
    if match := re.search(_GRADIENT, message):
        name = _plain(match[1] or match[2])
        return CaptureError(
            f"the step needs a gradient through the operator {name}, which has no formula for one",
            where=where or _where(name, watch),
            hint="give it one with torch.library.register_autograd; if none is needed, call it on x.detach()",
            page=PAGE,
        )
    if match := re.search(_KERNEL, message):
        name = _plain(match[1] or match[2])
        return None if name.split(".")[0] in _TORCHS else _no_kernel(name, "this device", where or _where(name, watch))
    return None


def check(graph: fx.Graph, device: str, watch: origin.TracedStep) -> None:
    """Refuse operators of a traced graph that have no kernel for the device, change arguments, or contain graphs."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is with_effects:
            continue
        node_origin = origin.of(node.meta)
        where = watch.where((node_origin.file, node_origin.line))
        if isinstance(node.target, HigherOrderOperator):
            raise _higher(node, where)
        if isinstance(node.target, OpOverload) and node.target.namespace not in _TORCHS:
            name = node.target.name()
            kernels = (device.upper(), *_ANY_DEVICE)
            if not any(has_kernel(name, key) for key in kernels):
                raise _no_kernel(_plain(name), f"the device {device}", where)


def registering(graphs: Iterable[fx.Graph]) -> list[str]:
    """The installed modules that define a graph's custom operators in Python: code that calls them must import these.

    Operators from the user's own files are left out: a run imports those files anyway.
    """
    targets = {n.target for graph in graphs for n in graph.nodes if isinstance(n.target, OpOverload)}
    defined = (OPDEFS.get(target.name()) for target in targets if target.namespace not in _TORCHS)
    modules = {initial_function(definition).__module__ for definition in defined if definition is not None}
    installed = (m for m in modules if user_lines.is_installed(getattr(sys.modules.get(m), "__file__", None)))
    return sorted({*installed, *(m for m in modules if m.startswith("fxpipe."))})


def _higher(node: fx.Node, where: str | None) -> CaptureError:
    changed: Any = node.args[0] if node.args else None
    if str(node.target).startswith("auto_functionalized") and isinstance(changed, OpOverload):
        return _in_place(changed, where)
    return CaptureError(
        f"the step uses {node.target}, an operator that contains graphs: no cut can go through it",
        where=where,
        hint="use plain operators: torch.where for torch.cond, a Python loop of fixed length for while_loop and scan, "
        "scaled_dot_product_attention for flex_attention",
        page="higher-order",
    )


def _changes(error: Exception) -> OpOverload | None:
    """The operator in place whose call the trace was in, as torch rewrites it: 2.11 fails there, 2.13 makes a node."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        local = frame.f_locals
        if isinstance(local.get("self"), HigherOrderOperator) and isinstance(local.get("_mutable_op"), OpOverload):
            return local["_mutable_op"]
    return None


def _in_place(operator: OpOverload, where: str | None) -> CaptureError:
    return CaptureError(
        f"the operator {_plain(operator.name())} changes its arguments in place, which no stage can pass on",
        where=where,
        hint="let it return its result and leave its arguments unchanged",
        page=PAGE,
    )


def _no_fake(name: str, where: str | None, watch: origin.TracedStep) -> CaptureError:
    name = _plain(name)
    return CaptureError(
        f"the operator {name} has no shape function: capture computes shapes, not values",
        where=where or _where(name, watch),
        hint="give it one with torch.library.register_fake, which makes an empty tensor of the result's shape",
        page=PAGE,
    )


def _no_kernel(name: str, device: str, where: str | None) -> CaptureError:
    return CaptureError(
        f"the operator {name} has no kernel for {device}",
        where=where,
        hint="give it one (torch.library.register_kernel), compile on a device for which it has one (--device cuda), "
        "or choose the model's plain PyTorch path, if there is one",
        page=PAGE,
    )


def _plain(name: str) -> str:
    """`scan.forward` for `scan::forward` and `scan.forward.default`."""
    return name.replace("::", ".").removesuffix(".default")


def _where(name: str, watch: origin.TracedStep) -> str | None:
    """The line that last called an operator."""
    short = name.split(".")[1] if "." in name else name
    for seen in (short, f"{short}.default"):
        if seen in watch.operators:
            return watch.where(watch.operators[seen])
    return None
