"""`fxpipe run --log tensorboard=DIR`: a run as TensorBoard's event files, written while it trains."""

from __future__ import annotations

import itertools
import math
import os
import socket
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

from fxpipe.errors import RunError
from fxpipe.files import check_creatable
from fxpipe.observe.appended_file import AppendedFile
from fxpipe.observe.logger import LoggedRun, Logger

_number = itertools.count()


class TensorboardLog(Logger):
    """Writes one run into a folder, by default OUT/tensorboard, next to existing event files.

    TensorBoard's relative time counts from when this object was made. Of an earlier run that this one continues, it
    forgets what came later. An event that cannot be written ends no run (see `AppendedFile`).

    Raises:
        RunError: the package cannot be imported, or the folder cannot be written.
    """

    name: ClassVar[str] = "tensorboard"
    package: ClassVar[str] = "tensorboard"

    def __init__(self, where: str | None, run: LoggedRun) -> None:
        super().__init__(where, run)
        self.check(where, None if run.out is None else str(run.out))
        try:
            from tensorboard.compat.proto.event_pb2 import SessionLog
            from tensorboard.summary.writer.record_writer import RecordWriter
            from torch.utils.tensorboard import summary
        except ImportError as error:
            hint = "pip install tensorboard"
            raise RunError(f"the package tensorboard cannot be imported: {error}", hint=hint) from error
        self._began = time.time()
        self._step, self._seconds = run.continue_after or 0, 0.0
        self._summary: Any = summary
        self._buffer = BytesIO()
        self._records = RecordWriter(self._buffer)
        name = f"events.out.tfevents.{int(self._began):010}.{socket.gethostname()}.{os.getpid()}.{next(_number)}"
        folder = _folder(where, run.out)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = AppendedFile(folder / name)
        except OSError as error:
            hint = "choose another folder: --log tensorboard=DIR"
            raise RunError(f"{folder} cannot be written: {error.strerror or error}", hint=hint) from error
        self._add(file_version="brain.Event:2")
        if run.continue_after is not None:
            self._step += 1  # TensorBoard forgets what it has read from this step on
            self._add(session_log=SessionLog(status=SessionLog.START))

    @classmethod
    def check(cls, where: str | None, out: str | None) -> None:
        """Refuse, too, a folder that cannot be created or written."""
        super().check(where, out)
        folder = _folder(where, out)
        check_creatable(folder.resolve(), folder, "folder: --log tensorboard=DIR")

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self._step, self._seconds = step, seconds
        for name, value in values.items():
            self._add(summary=self._summary.scalar(name, float(value) if math.isfinite(value) else math.nan))

    def close(self) -> None:
        self._file.close()

    @property
    def problems(self) -> list[dict[str, Any]]:
        """See `AppendedFile.problems`."""
        return self._file.problems

    def _add(self, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=self._began + self._seconds, step=self._step, **what).SerializeToString())
        self._file.write(self._buffer.getvalue())
        self._buffer.seek(0)
        self._buffer.truncate()


def _folder(where: str | None, out: str | Path | None) -> Path:
    return Path(where or (Path(out or ".") / "tensorboard"))
