"""How codecs change one step: the emitted stages with codecs against the same stages without."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fxpipe.builds.build import Build
from fxpipe.lowering.agreement import agreement_of
from fxpipe.lowering.compare_with_eager import emitted_step
from fxpipe.lowering.independent_replicas import of_one_replica
from fxpipe.stages.compare import error_of_all, relative_error
from fxpipe.task.loss_weights import LossWeight


@dataclass(frozen=True)
class CodecEffect:
    """How far a step with codecs is from the same step without them: relative differences, of all gradients by norm.

    `worst` is the parameter whose gradient changes most, relative to at least a thousandth of the largest norm.
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
    both = {name: gradient for name, gradient in plain.gradients.items() if name in coded.gradients}
    return CodecEffect(
        loss=relative_error(coded.loss, plain.loss),
        gradients=error_of_all(coded.gradients, both),
        worst=agreement_of(coded, plain).worst_gradient,
    )
