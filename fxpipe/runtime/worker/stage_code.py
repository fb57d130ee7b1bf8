"""One worker's stage for one shape of batch, and the seed of each call of its code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import PHASES, EdgeSpec, Phase, StepSpec
from fxpipe.random_state import seed_of, seed_torch
from fxpipe.runtime.wires.transport import EdgeComm, Transport
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.stages.loaded import LoadedStage


def reseed(device: torch.device, *place: object) -> None:
    """Seed torch from the run's seed and the place of the call: the same in every process and every run."""
    seed_torch(seed_of(*place), device.type)


class StageOfStep:
    """A worker's stage of a step, with the arguments that its functions take by position or by name.

    Attributes:
        parts: the interfaces of its functions.
        incoming: the edges that each part receives.
        batch: the indices of the leaves that it reads among those of a microbatch.
        buffers: by part, the worker's names of the buffers that the part reads.
        updates: the names of the buffers that the forward updates.
    """

    def __init__(
        self,
        plan: Plan,
        step: StepSpec,
        worker: int,
        code: LoadedStage,
        transport: Transport,
        seed: int = 0,
        replica: int = 0,
    ) -> None:
        spec = step.stages[worker]
        self.step, self.code = step, code
        self.parts = spec.parts
        places = {leaf.name: i for i, leaf in enumerate(step.batch)}
        self.batch = [places[name] for name in spec.forward.batch]
        self.incoming: dict[Phase, list[EdgeSpec]] = {
            phase: [e for e in step.edges if (e.dst, e.dst_phase) == (worker, phase)] for phase in self.parts
        }
        edges = {e.name: e for e in step.edges if worker in (e.src, e.dst)}
        number = partial(plan.microbatch, worker=worker, replica=replica)
        share = replica if plan.outer is not None else 0
        self.comm = EdgeComm(edges, transport, transport.watch, seed, number, share)
        aliases = plan.first_names
        self.buffers = {phase: [aliases[name] for name in part.buffers] for phase, part in self.parts.items()}
        self.updates = [aliases[name] for name in spec.forward.updates]


class StageOfShape(StageOfStep):
    """A worker's stage of a training step for one shape.

    Weights and gradients have the order of the first shape's stage. The stage of another shape may read only some of
    these weights, and make only some of these gradients.

    Args:
        plan: of this shape; the setting has that of the first.

    Attributes:
        last: the phase of the last function, which makes gradients.
        run_in: the parts that the actions of each phase run: if the schedule has no W, B runs weight gradients too.
    """

    def __init__(self, plan: Plan, code: LoadedStage, transport: Transport, setting: WorkerSetting) -> None:
        worker, runs_in = setting.worker, setting.recipe.schedule.runs_in
        super().__init__(plan, plan.step, worker, code, transport, setting.options.seed, setting.replica)
        spec, of_first = plan.stages[worker], setting.plan.stages[worker]
        self.last = next(reversed(self.parts))
        self.run_in = {phase: [part for part in self.parts if runs_in(part) == phase] for phase in PHASES}
        self._weights = {
            phase: _places(part.weights, of_first.part(phase).weights) for phase, part in self.parts.items()
        }
        self._gradients = _places(of_first.gradients, spec.gradients)

    def weights(self, phase: Phase, held: tuple[Any, ...]) -> tuple[Any, ...]:
        """The weights that this code takes, selected from those that the first shape's code takes."""
        places = self._weights[phase]
        return held if places is None else tuple([held[i] for i in places if i is not None])

    def gradients(self, made: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients that the first shape's code returns; None for those that this code does not make."""
        places = self._gradients
        return made if places is None else [None if i is None else made[i] for i in places]


def _places(wanted: Sequence[str], held: Sequence[str]) -> list[int | None] | None:
    """The index of each wanted name among the held ones; None if both are the same."""
    if tuple(wanted) == tuple(held):
        return None
    places = {name: i for i, name in enumerate(held)}
    return [places.get(name) for name in wanted]
