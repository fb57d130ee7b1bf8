"""`fxpipe run --tensorboard DIR`: a run as TensorBoard's event files, written while it trains."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpipe.errors import RunError
from fxpipe.files import check_creatable

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_INSTALL = "pip install tensorboard"
_SETTINGS = (
    "schedule", "policy", "microbatches", "sync_steps", "rate_discount", "clip_norm", "ema", "seed", "steps",
    "samples", "threads", "device",
)  # fmt: skip
_RESULTS = ("seconds", "samples_per_second", "bubble", "efficiency")


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

    Scalars, by step: `train/loss`, `train/lr`, `train/grad_norm`, `train/samples_per_second`, and one for each value of
    each worker, like `busy/worker_0`; `eval/NAME` for evaluations. Texts at the end: `settings`, `results` and
    `time_losses`. TensorBoard's relative time counts from when this object was made.

    Raises:
        RunError: the package cannot be imported, or the folder cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        check_tensorboard(folder)
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer: SummaryWriter = SummaryWriter(str(folder))
        except ImportError as error:
            raise RunError(f"the package tensorboard cannot be imported: {error}", hint=_INSTALL) from error
        except OSError as error:
            hint = "choose another --tensorboard"
            raise RunError(f"{folder} cannot be written: {error.strerror or error}", hint=hint) from error
        self._began = time.time()
        self._step, self._seconds = 0, 0.0

    def step(
        self, step: int, loss: float, lr: float | None, norm: float | None, samples_per_second: float, seconds: float
    ) -> None:
        """A step is finished, `seconds` after training began; None is left out."""
        self._step, self._seconds = step, seconds
        values = {"loss": loss, "lr": lr, "grad_norm": norm, "samples_per_second": samples_per_second}
        for name, value in values.items():
            if value is not None:
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

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """End the file; write a run's summary (`run.json`), if given, in words and numbers."""
        if summary is not None:
            self._text("settings", [f"{key}: {summary[key]}" for key in _SETTINGS if summary.get(key) is not None])
            self._text("results", [f"{key}: {summary[key]:.6g}" for key in _RESULTS if summary.get(key) is not None])
            self._text("time_losses", [row["text"] for row in summary.get("time_losses") or ()])
        self._writer.close()

    def _scalar(self, tag: str, value: float) -> None:
        value = float(value)
        value = value if math.isfinite(value) else math.nan
        self._writer.add_scalar(tag, value, self._step, walltime=self._began + self._seconds)

    def _text(self, tag: str, lines: Sequence[str]) -> None:
        if lines:
            self._writer.add_text(tag, "\n".join(f"- {line}" for line in lines), self._step)
