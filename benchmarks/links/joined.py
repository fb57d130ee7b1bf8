"""fxpipe: each worker has a stage of a build, and joins the others in a loop of one's own."""

from __future__ import annotations

from typing import Any

from sides import Batch, Task

import fxpipe


class Stage:
    """A worker of a build.

    Args:
        settings: `build`, its folder; `throttle`, for links that only fxpipe's meter makes slow.
    """

    def __init__(self, task: Task, settings: dict[str, Any]) -> None:
        options = {"throttle": settings["throttle"]} if settings.get("throttle") else {}
        self._pipeline = fxpipe.join(settings["build"], optimizer=task.optimizer, threads=1, **options)
        self._losses: list[Any] = []

    def step(self, batch: Batch) -> None:
        self._losses.append(self._pipeline.step(batch))

    def losses(self) -> list[float]:
        self._pipeline.flush()
        return [float(loss) for loss in self._losses]

    def close(self) -> None:
        self._pipeline.flush()
        self._pipeline.close()
