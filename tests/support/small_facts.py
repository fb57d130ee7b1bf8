"""The facts of a build so small that its values can be followed by hand."""

from __future__ import annotations

from typing import Any

COLUMNS = ["name", "phase", "module", "op", "type", "bytes", "ms", "worker", "unit", "weight", "source", "text"]


def row(name: str, phase: str | None, module: int, op: str, worker: int, *inputs: int, **more: Any) -> list[Any]:
    """A node's row; times are a millisecond and values four bytes."""
    own = {"type": "f32[1]", "bytes": 4, "ms": 1.0, "unit": 0, "weight": False, "source": None, "text": "", **more}
    own = {"name": name, "phase": phase, "module": module, "op": op, "worker": worker, **own}
    return [*(own[column] for column in COLUMNS), list(inputs)]


def edge(name: str, kind: str, src: int, src_phase: str, dst: int, dst_phase: str, *names: str) -> dict[str, Any]:
    place = {"src": src, "src_phase": src_phase, "dst": dst, "dst_phase": dst_phase, "codec": "", "plain_bytes": 4}
    return {"name": name, "kind": kind, "shape": [1], "dtype": "float32", "bytes": 4, **place, "names": list(names)}


def module(path: str | None, parent: int | None) -> dict[str, Any]:
    told = {"parameters": 0, "parameter_bytes": 0, "owners": [], "nodes": 0, "forward": [], "backward": []}
    return {"path": path, "name": "(loss)" if path is None else path, "depth": 0, "parent": parent, **told}


def small_facts() -> dict[str, Any]:
    """h = a(x) on worker 0; y = b(h) and the loss on worker 1; b's backward reads h; d_h goes back."""
    at = {"source": "tiny.py:7", "text": "h = self.a(x)"}
    rows = [
        row("a_weight", None, 1, "parameter", 0, text="a.weight", ms=None, unit=None),
        row("b_weight", None, 2, "parameter", 1, text="b.weight, c.weight", ms=None, unit=None),
        row("x", None, 0, "input", 0, text="batch", ms=None, unit=None),
        row("h", "F", 1, "aten.mul", 0, 0, 2, **at),
        row("h_send_1", "F", 1, "send", 0, 3),
        row("h_recv_1", "F", 2, "recv", 1, 4),
        row("y", "F", 2, "aten.mul", 1, 5, 1),
        row("loss", "F", 3, "aten.sum", 1, 6),
        row("d_y", "B", 2, "aten.mul", 1, 1),
        row("d_b", "B", 2, "aten.mul", 1, 5, 8, weight=True),
        row("d_y_send_0", "B", 2, "send", 1, 8),
        row("d_y_recv_0", "B", 1, "recv", 0, 10),
        row("d_a", "B", 1, "aten.mul", 0, 11, 2, weight=True),
    ]
    more = {"names": {"a_weight": ["a.weight"], "b_weight": ["b.weight", "c.weight"], "x": ["batch"]}}
    return {
        "build": {"folder": "build"},
        "modules": [module("", None), module("a", 0), module("b", 0), module(None, 0)],
        "nodes": {"columns": [*COLUMNS, "inputs"], "rows": rows, "gradients": {"a_weight": 12, "b_weight": 9}, **more},
        "workers": [
            {"worker": 0, "owned_names": ["a.weight"], "copy_names": ["b.weight"]},
            {"worker": 1, "owned_names": ["b.weight"], "copy_names": []},
        ],
        "edges": [
            edge("h", "activation", 0, "F", 1, "F"),
            edge("d_y:0", "gradient", 1, "B", 0, "B"),
            edge("weights of worker 1", "weights", 1, "update", 0, "F", "b.weight"),
        ],
    }
