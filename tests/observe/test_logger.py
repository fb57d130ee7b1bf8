"""Loggers: one interface, by which TensorBoard, Weights & Biases, MLflow and a user's own class get a run's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from packages import needs

from fxpipe.errors import RunError
from fxpipe.observe.logger import LoggedRun, Logger, check_loggers, open_loggers, register
from fxpipe.observe.rates import Work
from fxpipe.observe.record import Record, RecordedStep

Calls = list[tuple[int, dict[str, float]]]


@register
class Kept(Logger):
    """Keeps what it gets; breaks at the step that it is told."""

    name: ClassVar[str] = "kept"
    calls: ClassVar[Calls] = []
    closed: ClassVar[list[str | None]] = []

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        if self.where is not None and step >= int(self.where):
            raise ConnectionError("the server is gone\nand more")
        self.calls.append((step, dict(values)))

    def close(self) -> None:
        self.closed.append(self.where)


@pytest.fixture
def calls() -> Calls:
    Kept.calls.clear()
    Kept.closed.clear()
    return Kept.calls


def train(loggers: list[Logger], *work: Any) -> Record:
    record = Record(None, lambda minibatch: Work(4, *work), 3, None, loggers)
    record.step(RecordedStep(0, 2.5, 0.1, None, {"accuracy": 0.25}))
    record.evaluated(1, {"accuracy": 0.5}, 0.0)
    record.step(RecordedStep(1, math.inf))
    record.close()
    return record


def test_all_of_a_runs_numbers_come_under_one_kind_of_name(calls: Calls) -> None:
    train(open_loggers(["kept"], LoggedRun()), 64, 2e12, 1.0)
    (one, first), (after, evaluation), (two, second) = calls
    rates = {f"train/{n}" for n in ("samples_per_second", "tokens_per_second", "tflops_per_device", "mfu")}
    assert (one, after, two) == (1, 1, 2)
    assert first.keys() == {"train/loss", "train/lr", "train/accuracy"} | rates
    assert (first["train/loss"], first["train/accuracy"], second["train/loss"]) == (2.5, 0.25, math.inf)
    assert first["train/tokens_per_second"] == pytest.approx(16 * first["train/samples_per_second"])
    assert second.keys() == {"train/loss"} | rates
    assert evaluation == {"eval/accuracy": 0.5}
    assert Kept.closed == [None]


def test_one_that_breaks_ends_no_run_and_no_other(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    record = train(open_loggers(["kept=1", "kept"], LoggedRun()))
    assert [step for step, _ in calls] == [1, 1, 2]
    assert record.problems == [{"file": "kept", "lost": 3}]
    assert capsys.readouterr().err == "warning: --log kept gets no numbers from step 1 on: the server is gone\n"
    assert Kept.closed == ["1", None]


def test_refusals() -> None:
    with pytest.raises(RunError, match="there is no logger 'wandbb', did you mean 'wandb'"):
        open_loggers(["wandbb"], LoggedRun())
    with pytest.raises(RunError, match="there is a logger 'mlflow' already"):
        register(type("Other", (Kept,), {"name": "mlflow"}))
    with pytest.raises(RunError, match="Other has no name"):
        register(type("Other", (Kept,), {"name": ""}))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_refused_before_any_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpipe.observe.logger.find_spec", lambda package: None)
    with pytest.raises(RunError, match=f"--log {name} needs the package {name}, which is not installed") as caught:
        check_loggers([name], None)
    assert caught.value.hint == f"pip install {name}"


def records(path: Path) -> Iterator[Any]:
    """The records of a run that wandb kept offline: LevelDB's log, blocks of 32 KiB, after 7 bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record as Stored

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (rest := 32768 - at % 32768) < 7:
            at += rest
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the only part, or the last
            stored = Stored()
            stored.ParseFromString(whole)
            yield stored
            whole = b""


@needs("wandb")
def test_wandb_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    out = tmp_path / "out-a"
    out.mkdir()
    train(open_loggers(["wandb=mine"], LoggedRun(out, {"schedule": "1f1b", "peak": None})))
    (file,) = (out / "wandb").glob("offline-run-*/*.wandb")
    found = list(records(file))
    run = next(row.run for row in found if row.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("mine", "out-a")
    assert '"1f1b"' in [update.value_json for update in run.config.update]
    history = [row.history.item for row in found if row.WhichOneof("record_type") == "history"]
    rows = [{item.key or item.nested_key[-1]: item.value_json for item in items} for items in history]
    assert [(row["_step"], row["train/loss"]) for row in rows] == [("1", "2.5"), ("2", "Infinity")]
    assert rows[0]["eval/accuracy"] == "0.5"


@needs("mlflow")
def test_mlflow_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client, settings = MlflowClient(), {"schedule": "1f1b", "peak": None}
    for after, steps in ((None, 2), (2, 4)):
        train(open_loggers(["mlflow=mine"], LoggedRun(tmp_path / "out-a", settings, after)))
        (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
        found = client.get_metric_history(run.info.run_id, "train/loss")
        assert len(found) == steps, "a run that goes on goes on in the same run"
    assert [(row.step, row.value) for row in found[:2]] == [(1, 2.5), (2, math.inf)]
    assert (run.info.run_name, run.info.status, run.data.params) == (
        "out-a",
        "FINISHED",
        {"schedule": "1f1b", "peak": "None"},
    )
    assert run.data.metrics["eval/accuracy"] == 0.5


@needs("mlflow")
def test_an_mlflow_that_is_not_there_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nothing://there")
    with pytest.raises(RunError, match="MLflow starts no run"):
        open_loggers(["mlflow"], LoggedRun())
