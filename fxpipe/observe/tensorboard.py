"""`fxpipe run --log tensorboard=DIR`: a run as TensorBoard's event files, written while it trains."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from fxpipe.errors import RunError
from fxpipe.files import check_creatable
from fxpipe.observe.logger import LoggedRun, Logger

PAUSE = 1.0
"""Seconds after which the writer's thread writes what it has got."""
MOST = 1000
"""Numbers that may wait for that thread; beyond that, training waits for it."""


class TensorboardLog(Logger):
    """Writes one run into a folder, by default OUT/tensorboard, next to existing event files.

    TensorBoard's relative time counts from when this object was made. Of an earlier run that this one continues, it
    forgets what came later. A process that is killed loses the last `PAUSE` seconds.
    """

    name: ClassVar[str] = "tensorboard"
    package: ClassVar[str] = "tensorboard"

    def __init__(self, where: str | None, run: LoggedRun) -> None:
        super().__init__(where, run)
        self.check(where, None if run.out is None else str(run.out))
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            hint = "pip install tensorboard"
            raise RunError(f"the package tensorboard cannot be imported: {error}", hint=hint) from error
        self._began = time.time()
        forgotten = None if run.continue_after is None else run.continue_after + 1
        folder = _folder(where, run.out)
        try:
            self._writer = SummaryWriter(folder, purge_step=forgotten, max_queue=MOST, flush_secs=PAUSE)
        except OSError as error:
            hint = "choose another folder: --log tensorboard=DIR"
            raise RunError(f"{folder} cannot be written: {error.strerror or error}", hint=hint) from error

    @classmethod
    def check(cls, where: str | None, out: str | None) -> None:
        """Refuse, too, a folder that cannot be created or written."""
        super().check(where, out)
        folder = _folder(where, out)
        check_creatable(folder.resolve(), folder, "folder: --log tensorboard=DIR")

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=self._began + seconds)

    def close(self) -> None:
        self._writer.close()


def _folder(where: str | None, out: str | Path | None) -> Path:
    return Path(where or (Path(out or ".") / "tensorboard"))
