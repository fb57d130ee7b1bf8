"""`fxpipe run --log mlflow=EXPERIMENT`: a run in MLflow, where `MLFLOW_TRACKING_URI` says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from fxpipe.errors import RunError, first_line
from fxpipe.observe.logger import LoggedRun, Logger

PAUSE = 5.0
"""Seconds between two batches of numbers: each is a request to a server."""
MOST = 1000
"""MLflow takes no more numbers at once."""


class MlflowLog(Logger):
    """Logs into an experiment, by default `fxpipe`; the run has the name of its output folder.

    A run that goes on in the same folder goes on in the same run of MLflow, which keeps both values of a step that is
    made again. A process that is killed loses the last `PAUSE` seconds.
    """

    name: ClassVar[str] = "mlflow"
    package: ClassVar[str] = "mlflow"

    def __init__(self, where: str | None, run: LoggedRun) -> None:
        super().__init__(where, run)
        self.check(where, None)
        self._waiting: list[Any] = []
        self._sent = time.monotonic()
        try:
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient

            self._metric = Metric
            self._client = MlflowClient()
            self._run = self._begin(where or "fxpipe", run)
            params = [Param(name, str(value)[:500]) for name, value in run.settings.items()]
            if run.continue_after is None:
                self._client.log_batch(self._run, params=params[:100])
        except Exception as error:
            hint = "look at MLFLOW_TRACKING_URI: the address of a server, or sqlite:///mlflow.db for a file"
            raise RunError(f"MLflow starts no run: {first_line(error)}", hint=hint) from error

    def _begin(self, experiment: str, run: LoggedRun) -> str:
        """The run of MLflow, by its id: that of the same folder, if this one goes on, else a new one."""
        client, folder = self._client, "" if run.out is None else str(run.out.resolve())
        found = client.get_experiment_by_name(experiment)
        place = client.create_experiment(experiment) if found is None else found.experiment_id
        if folder and run.continue_after is not None:
            mine = [each for each in client.search_runs([place]) if each.data.tags.get("fxpipe.out") == folder]
            if mine:  # newest first
                client.update_run(mine[0].info.run_id, status="RUNNING")
                return str(mine[0].info.run_id)
        name = folder.rpartition("/")[2] or None
        return str(client.create_run(place, run_name=name, tags={"fxpipe.out": folder}).info.run_id)

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._waiting += [self._metric(name, float(value), now, step) for name, value in values.items()]
        if time.monotonic() - self._sent >= PAUSE or len(self._waiting) >= MOST:
            self._send()

    def _send(self) -> None:
        self._sent = time.monotonic()
        while self._waiting:
            self._client.log_batch(self._run, metrics=self._waiting[:MOST])
            del self._waiting[:MOST]

    def close(self) -> None:
        try:
            self._send()
        finally:
            self._client.set_terminated(self._run)
