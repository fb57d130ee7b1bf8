"""`fxpipe run --log wandb=PROJECT`: a run in Weights & Biases, under its own settings (`WANDB_MODE`, `wandb login`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fxpipe.errors import RunError, first_line
from fxpipe.observe.logger import LoggedRun, Logger


class WandbLog(Logger):
    """Logs into a project, by default `fxpipe`; the run has the name of its output folder, where wandb's files go, too.

    A run that goes on in the same folder goes on in wandb's run, which keeps the first value of every step.
    """

    name: ClassVar[str] = "wandb"
    package: ClassVar[str] = "wandb"

    def __init__(self, where: str | None, run: LoggedRun) -> None:
        super().__init__(where, run)
        self.check(where, None)
        import wandb

        earlier = None
        if run.out is not None and run.continue_after is not None:
            latest = run.out / "wandb" / "latest-run"
            earlier = latest.resolve().name.rpartition("-")[2] if latest.exists() else None
        try:
            self._run = wandb.init(
                project=where or "fxpipe",
                name=None if run.out is None else run.out.resolve().name,
                dir=run.out,
                config=dict(run.settings),
                id=earlier,
                resume=None if earlier is None else "allow",
                settings=wandb.Settings(console="off"),
            )
        except Exception as error:
            hint = "wandb login; or WANDB_MODE=offline keeps the run in files, for wandb sync"
            raise RunError(f"wandb starts no run: {first_line(error)}", hint=hint) from error

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "seconds": seconds}, step=step)

    def close(self) -> None:
        self._run.finish()
