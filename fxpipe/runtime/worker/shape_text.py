"""One more shape of batch as the workers of a run tell it each other: the plan and each worker's own stage, as text."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass

from safetensors.torch import load, save
from torch import Tensor

from fxpipe.plan.consistency import check
from fxpipe.plan.spec import Plan
from fxpipe.typed_json import convert


@dataclass(frozen=True)
class ShapeOfWorker:
    """What a worker needs for batches of one more shape.

    Attributes:
        files: the texts of its files by name: its stage, and on worker 0 what computes totals.
        tensors: the constants that the shape brings and that the worker reads, by name.
    """

    files: Mapping[str, str]
    tensors: Mapping[str, Tensor]

    def to_text(self) -> str:
        """As text; `of_text` is its inverse."""
        tensors = save({name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()})
        return json.dumps({"files": dict(self.files), "tensors": base64.b64encode(tensors).decode()})

    @staticmethod
    def of_text(text: str) -> ShapeOfWorker:
        """Read `to_text`'s text."""
        body = json.loads(text)
        return ShapeOfWorker(body["files"], load(base64.b64decode(body["tensors"])))


def plan_of_text(text: str) -> Plan:
    """Read the text of a plan (`Plan.to_json`) that another worker of this run has written."""
    body = json.loads(text)
    plan = convert({name: value for name, value in body.items() if name not in ("format", "digest")}, Plan)
    check(plan)
    return plan
