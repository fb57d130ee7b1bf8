"""`fxpipe run --tensorboard DIR`: a run as TensorBoard's event files, written while it trains."""

from __future__ import annotations

import itertools
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from fxpipe.errors import RunError
from fxpipe.files import check_creatable
from fxpipe.observe.appended_file import AppendedFile
from fxpipe.task.metrics import NO_METRICS

_INSTALL = "pip install tensorboard"
_number = itertools.count()


def check_tensorboard(folder: str | Path) -> None:
    """Refuse, before any work is done, if event files cannot be written.

    Raises:
        RunError: the package tensorboard is not installed.
        BuildError: the folder cannot be created or written.
    """
    if find_spec("tensorboard") is None:
        raise RunError("--tensorboard needs the package tensorboard, which is not installed", hint=_INSTALL)
    check_creatable(Path(folder).resolve(), Path(folder), "--tensorboard")


class TensorboardLog:
    """Writes one run into `folder`, next to existing event files.

    Scalars, by step: `train/loss`, `train/lr`, `train/grad_norm`, `train/samples_per_second`, `train/NAME` for each
    metric that the loss came with, and one for each value of each worker, like `busy/worker_0`; `eval/NAME` for
    evaluations. TensorBoard's relative time counts from when this object was made. An event that cannot be written ends
    no run (see `AppendedFile`).

    Args:
        continue_after: what earlier files of this folder have after this step is forgotten when they are read.

    Raises:
        RunError: the package cannot be imported, or the folder cannot be written.
    """

    def __init__(self, folder: str | Path, continue_after: int | None = None) -> None:
        check_tensorboard(folder)
        try:
            from tensorboard.compat.proto.event_pb2 import SessionLog
            from tensorboard.summary.writer.record_writer import RecordWriter
            from torch.utils.tensorboard import summary
        except ImportError as error:
            raise RunError(f"the package tensorboard cannot be imported: {error}", hint=_INSTALL) from error
        self._began = time.time()
        self._step, self._seconds = continue_after or 0, 0.0
        self._summary: Any = summary
        self._buffer = BytesIO()
        self._records = RecordWriter(self._buffer)
        name = f"events.out.tfevents.{int(self._began):010}.{socket.gethostname()}.{os.getpid()}.{next(_number)}"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = AppendedFile(Path(folder) / name)
        except OSError as error:
            hint = "choose another --tensorboard"
            raise RunError(f"{folder} cannot be written: {error.strerror or error}", hint=hint) from error
        self._add(file_version="brain.Event:2")
        if continue_after is not None:
            self._step += 1  # TensorBoard forgets what it has read from this step on
            self._add(session_log=SessionLog(status=SessionLog.START))

    def step(
        self,
        step: int,
        loss: float,
        lr: float | None,
        norm: float | None,
        samples_per_second: float,
        seconds: float,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> None:
        """A step is finished, `seconds` after training began; None is left out."""
        self._step, self._seconds = step, seconds
        values = {"loss": loss, "lr": lr, "grad_norm": norm, "samples_per_second": samples_per_second}
        for name, value in values.items():
            if value is not None:
                self._scalar(f"train/{name}", value)
        for name, value in metrics.items():
            self._scalar(f"train/{name}", value)

    def workers(self, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """What the workers are doing, by rank: `{"busy": 0.9, "waiting": 0.08}`, shares of the time."""
        self._step = step
        for rank, row in enumerate(rows):
            for name, value in row.items():
                self._scalar(f"{name}/worker_{rank}", value)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """The state after `step` steps was evaluated."""
        self._step = step
        for name, value in metrics.items():
            self._scalar(f"eval/{name}", value)

    def close(self) -> None:
        """End the file."""
        self._file.close()

    @property
    def problems(self) -> list[dict[str, Any]]:
        """See `AppendedFile.problems`."""
        return self._file.problems

    def _scalar(self, tag: str, value: float) -> None:
        value = float(value)
        value = value if math.isfinite(value) else math.nan
        self._add(summary=self._summary.scalar(tag, value))

    def _add(self, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=self._began + self._seconds, step=self._step, **what).SerializeToString())
        self._file.write(self._buffer.getvalue())
        self._buffer.seek(0)
        self._buffer.truncate()
