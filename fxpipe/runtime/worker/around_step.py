"""What a policy does around each step of the optimizer: repairs of late gradients, predictions from its direction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fxpipe.policy.optimizers.predict import Predictor
from fxpipe.policy.optimizers.update_repair import UpdateRepair
from fxpipe.policy.repair import REPAIRS
from fxpipe.runtime.worker.part import UpdatePart
from fxpipe.runtime.worker.setting import WorkerSetting


class AroundStep(UpdatePart):
    """One repair, or the predictor. A checkpoint keeps its state by the names of parameters, under its `entry`.

    Repairs come before the predictor, which sees the whole update.
    """

    def __init__(self, work: UpdateRepair | Predictor, setting: WorkerSetting) -> None:
        self.work = work
        self.name = work.entry
        self._trained = setting.trained
        self._names = {id(parameter): name for name, parameter in self._trained.items()}

    @classmethod
    def of(cls, setting: WorkerSetting) -> Iterator[UpdatePart]:
        policy, optimizer = setting.recipe.policy, setting.optimizer
        if optimizer is None:
            return
        trained, lags = setting.trained, setting.recipe.demand.delays(setting.worker)
        delays: dict[Tensor, int] = {trained[name]: lag for name, lag in lags.items()}
        for repair in policy.repairs:
            yield cls(repair.kind(optimizer, delays), setting)
        if policy.predicts:
            yield cls(Predictor(optimizer, list(trained.values()), weight_form=policy.weight_form), setting)

    @classmethod
    def forms(cls) -> Mapping[str, Any]:
        kinds: list[type[UpdateRepair | Predictor]] = [Predictor, *(repair.kind for repair in REPAIRS.values())]
        return {kind.entry: kind.form for kind in kinds if kind.entry}

    def before_step(self) -> None:
        self.work.before_step()

    def after_step(self) -> None:
        self.work.after_step()

    def state(self, version: int) -> Any:
        if not self.name:
            return None
        return {self._names[id(parameter)]: tuple(kept) for parameter, *kept in self.work.state()}

    def load(self, states: Sequence[Any], version: int, same: bool) -> None:
        kept = {name: row for state in states for name, row in state.items()}
        self.work.load([(self._trained[name], *row) for name, row in kept.items() if name in self._trained])
