"""How codecs change one step: the emitted stages with codecs against the same stages without."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fxpipe.build.build import Build
from fxpipe.lowering.agreement import relative_error
from fxpipe.lowering.compare_with_eager import emitted_step
from fxpipe.lowering.independent_replicas import of_one_replica
from fxpipe.stages.compare import wide_dtype
from fxpipe.task.loss_weights import LossWeight


@dataclass(frozen=True)
class CodecEffect:
    """How far a step with codecs is from the same step without them.

    Attributes:
        loss: the relative difference.
        gradients: the relative difference of all gradients together, by their norm.
        worst: the parameter whose gradient changes most, and by how much; relative to at least a thousandth of the
            largest gradient's norm.
    """

    loss: float
    gradients: float
    worst: tuple[str, float]

    @property
    def finite(self) -> bool:
        """Whether the step with codecs gives finite numbers where the one without does."""
        return math.isfinite(self.loss) and math.isfinite(self.worst[1])


def codec_effect(build: Build, batch: Any, *, seed: int = 0, loss_weight: LossWeight | None = None) -> CodecEffect:
    """Run one minibatch of the build's first shape both ways, with the same random numbers.

    Raises:
        RunError: the emitted code fails; a lossless codec meets a value that does not fit.
    """
    build, batch = of_one_replica(build, batch)
    plain = emitted_step(build, batch, seed, loss_weight)
    coded = emitted_step(build, batch, seed, loss_weight, with_codecs=True)
    norms = {name: g.to(wide_dtype(g)).norm().item() for name, g in plain.gradients.items()}
    floor = 1e-3 * max(norms.values(), default=0.0)
    errors = {name: relative_error(coded.gradients.get(name), g, floor) for name, g in plain.gradients.items()}
    squares = [
        ((coded.gradients[name].to(wide_dtype(g)) - g).norm().item() ** 2, norms[name] ** 2)
        for name, g in plain.gradients.items()
        if name in coded.gradients
    ]
    off, whole = (sum(column) for column in zip(*squares, strict=True)) if squares else (0.0, 0.0)
    return CodecEffect(
        loss=relative_error(coded.loss, plain.loss, 0.0),
        gradients=(off / whole) ** 0.5 if whole else 0.0,
        worst=max(errors.items(), key=lambda item: item[1], default=("", 0.0)),
    )
