"""The parts of a worker's update: this list has their order, which the numbers depend on, and says what is saved."""

from __future__ import annotations

from typing import Any

from fxpipe.runtime.worker.around_step import AroundStep
from fxpipe.runtime.worker.averages import Averages
from fxpipe.runtime.worker.between_replicas import BetweenReplicas
from fxpipe.runtime.worker.clip import Clip
from fxpipe.runtime.worker.loss_scaler import LossScaler
from fxpipe.runtime.worker.outer_step import OuterMomentum, OuterStep
from fxpipe.runtime.worker.part import UpdatePart
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.runtime.worker.shared_update import SharedUpdate
from fxpipe.runtime.worker.staleness import StalenessLog
from fxpipe.runtime.worker.update import Updater

PARTS: tuple[type[UpdatePart], ...] = (
    LossScaler,
    Clip,
    Updater,
    AroundStep,
    OuterStep,
    OuterMomentum,
    SharedUpdate,
    Averages,
    BetweenReplicas,
    StalenessLog,
)


def make_parts(setting: WorkerSetting) -> list[UpdatePart]:
    """Make the parts of a worker's update; each may ask the setting for those before it."""
    for kind in PARTS:
        setting.parts.extend(kind.of(setting))
    return setting.parts


def forms() -> dict[str, Any]:
    """The types of the states of all parts, by their names in checkpoints."""
    return {name: form for kind in PARTS for name, form in kind.forms().items()}
