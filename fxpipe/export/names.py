"""The names of inputs and outputs of exported parts, and what the models' metadata says about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from fxpipe.onnx.model_file import WeightsForm, note
from fxpipe.plan.plan import Plan
from fxpipe.stages.pure_part import PartInput, PartOutput, PurePart

PREFIXES: dict[str, str] = {"gradient": "grad:", "update": "new:"}
"""The prefixes of outputs that are named after weights and buffers."""

NAMES = (
    "weights, buffers, batch, edges, saved and deferred values have the names they have in the build; gradients are "
    "grad:NAME, new values of buffers new:NAME; where a name is taken already, the value's kind is put before it: "
    "saved:NAME"
)


class Names:
    """The names of one model; see `NAMES`."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def free(self, kind: str, name: str) -> str:
        """A name for a value of this kind that no other value has."""
        name = PREFIXES.get(kind, "") + name
        while name in self._taken:
            name = f"{kind}:{name}"
        self._taken.add(name)
        return name


def names_of(part: PurePart) -> tuple[list[str], list[str]]:
    """Names for a part's inputs and outputs."""
    names = Names()
    inputs = [names.free(row.kind, row.name) for row in part.inputs]
    # A sent value keeps its name, so that it has the same name in the other worker's model.
    order = sorted(range(len(part.outputs)), key=lambda i: part.outputs[i].kind != "sent")
    outputs = {i: names.free(part.outputs[i].kind, part.outputs[i].name) for i in order}
    return inputs, [outputs[i] for i in range(len(part.outputs))]


def row_of(plan: Plan, value: str, row: PartInput | PartOutput) -> dict[str, Any]:
    """The metadata of an input or output, whose name in the model is `value`."""
    kind, name = row.kind, row.name
    metadata: dict[str, Any] = {"value": value, "kind": kind, "name": name}
    if kind in ("sent", "received"):
        edge = next(e for e in plan.edges if e.name == name)
        metadata |= {"edge": edge.kind, **({"to": edge.dst} if kind == "sent" else {"from": edge.src})}
    if kind in ("weight", "gradient"):
        parameter = next(p for p in plan.parameters if name in p.names)
        metadata |= {"owner": parameter.owner, "trained": parameter.trained}
        if len(parameter.names) > 1:
            metadata["names"] = list(parameter.names)
    return metadata


def _in_words(row: Mapping[str, Any], worker: int | None) -> str:
    """The same in words, for a reader of the graph."""
    kind = row["kind"]
    if kind == "received":
        return f"{row['edge']} received from worker {row['from']}"
    if kind == "sent":
        return f"{row['edge']} sent to worker {row['to']}"
    if kind == "weight":
        return "weight" if worker in (None, row["owner"]) else f"copy of a weight of worker {row['owner']}"
    words = {
        "buffer": "buffer",
        "batch": "leaf of the batch",
        "saved": "saved by forward for backward",
        "deferred": "left by backward for weight gradients",
        "mask": "random numbers, drawn outside",
        "loss": "loss",
        "update": "new value of a buffer",
        "gradient": f"gradient of {row['name']}",
    }
    return words[kind]


def describe(model: onnx.ModelProto, body: Mapping[str, Any], worker: int | None) -> str:
    """Write a description into the model, and return its text. `worker` is None for the model of all workers."""
    return note(model, body, *([_in_words(row, worker) for row in body[side]] for side in ("inputs", "outputs")))


def about(plan: Plan, form: WeightsForm) -> dict[str, Any]:
    """The metadata of every model of a build."""
    return {
        "workers": plan.workers,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "policy": plan.policy,
        "weights": form,
        "naming": NAMES,
    }
