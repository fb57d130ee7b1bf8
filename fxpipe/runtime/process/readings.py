"""What a pipeline shows of itself between two calls of a user's own loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.resume import Resumed
from fxpipe.runtime.process.rows import FedRows
from fxpipe.runtime.process.world import World
from fxpipe.runtime.worker.averages import averages_of
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.final_weights import copies


class Readings:
    """The part of a pipeline that reads its workers: all are here, or those of one process.

    Attributes:
        fed: how many minibatches it has had, with those before the checkpoint that it goes on from.
        executors: of the workers here, in rising order; of replicas the first here.
    """

    plan: Plan
    recipe: Recipe
    world: World
    _rows: FedRows

    @property
    def fed(self) -> int:
        return self._rows.fed

    @property
    def executors(self) -> list[Executor]:
        return self._rows.executors

    @property
    def every(self) -> list[Executor]:
        """Those of all replicas here."""
        return self._rows.every

    @property
    def resumed(self) -> Resumed | None:
        """The checkpoint that it went on from; None if it began anew."""
        return self._rows.resumed

    @property
    def checkpoints(self) -> Checkpoints | None:
        """What saves it as the options ask; None if they do not."""
        return self._rows.checkpoints

    @property
    def edited(self) -> list[Path]:
        """Stage files of the workers here that were changed since they were emitted."""
        return [stage.path for e in self.executors for stage in e.stages if stage.edited]

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all parameters and persistent buffers, under every name the model has for them.

        Over processes, of the parameters that the workers here own: the whole model is never gathered on one worker,
        and `save` writes it.

        Raises:
            RunError: minibatches are in flight, so that workers are at different versions.
        """
        self._settled("state_dict")
        return self._copies([executor.store.parameters for executor in self.executors])

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """The same with the averages of the weights in place of those that are averaged (`ema`, or `averaged`).

        Raises:
            RunError: minibatches are in flight; or the pipeline keeps no averages.
            TaskError: the hook `averaged` failed.
        """
        self._settled("averaged_state_dict")
        averages = averages_of([executor.store.averages for executor in self.executors])
        if averages is None:
            raise RunError("the pipeline keeps no averages of the weights", hint="build.local(ema=0.999), or averaged=")
        own = zip(self.executors, averages, strict=True)
        return self._copies([{**executor.store.parameters, **found} for executor, found in own])

    def gradients(self) -> dict[str, Tensor]:
        """The mean gradient of the last step for every trained parameter, under its first name.

        Raises:
            RunError: the schedule is asynchronous: at no moment do all gradients of one step exist; or there are other
                processes.
        """
        if not self.recipe.schedule.synchronous:
            raise RunError(
                f"schedule '{self.recipe.schedule.name}' has no moment at which all gradients of one step exist",
                hint="use a schedule with a flush, such as 1f1b",
            )
        if not self.world.alone:
            raise RunError(
                "over processes, gradients are freed right after the update",
                hint="fxpipe.load(BUILD).local(...).gradients(); gradient_norm is known everywhere with clip_norm",
            )
        return {name: value for executor in self.executors for name, value in executor.store.gradients().items()}

    def staleness(self) -> list[dict[str, Any]]:
        """The means over the run by worker and parameter group (needs `log_staleness`; see `StalenessLog`)."""
        logs = [executor.store.staleness for executor in self.executors]
        return [{"worker": log.worker, **row} for log in logs if log is not None for row in log.summary()]

    @property
    def learning_rates(self) -> list[float]:
        """Those of an optimizer's next update, by group: of the first worker here that trains something; else empty.

        Over processes, a worker that trains nothing has none: decide by numbers of the script's own.
        """
        return next((rates for e in self.executors if (rates := e.store.updater.rates)), [])

    @property
    def gradient_norm(self) -> float | None:
        """That of all workers' gradients at the last update of the first worker here; None without `clip_norm`."""
        return self.executors[0].store.updater.norm

    @property
    def loss_scale(self) -> float | None:
        """What the next minibatch's loss is multiplied by; None unless the build was compiled with `--autocast fp16`.

        It is what the first worker here knows: over processes, they all know the same after `flush`.
        """
        scaler = self.executors[0].scaler
        return None if scaler is None else scaler.scale.value

    @property
    def skipped_steps(self) -> int:
        """How many steps made no update because gradients overflowed; 0 where nothing is scaled. See `loss_scale`."""
        scaler = self.executors[0].scaler
        return 0 if scaler is None else scaler.scale.skipped

    def _copies(self, parameters: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What a user sees of these values of each worker's parameters."""
        if self.world.alone:
            return copies(self.plan, self.executors, parameters)
        owned = {executor.worker: own for executor, own in zip(self.executors, parameters, strict=True)}
        return {
            name: owned[p.owner][p.name].detach().clone()
            for p in self.plan.parameters
            if p.owner in owned
            for name in p.names
        }

    def _settled(self, what: str) -> None:
        """Refuse a call while minibatches are in flight: on all workers, also where all updates are made."""
        in_flight = self._rows.begun and not self.recipe.schedule.synchronous
        if self.world.alone:
            in_flight = any(executor.store.version < self.fed for executor in self.every)
        if in_flight:
            raise RunError(f"{what}() was called while minibatches are in flight", hint="call flush() first")
