"""Starts the workers of a run on this machine by torch's elastic launcher, and reports the error that came first."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fxpipe import errors
from fxpipe.errors import FxpipeError, PeerLost, PeerRefused, RunError
from fxpipe.observe.trace.writer import partial
from fxpipe.runtime.options import RunOptions

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def running_under_torchrun() -> bool:
    """Whether this process is a worker that torchrun (or anything like it) started."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def launch(options: RunOptions, workers: int) -> dict[str, Any]:
    """Run a build with `workers` local processes; return the summary (see `summarize_run`).

    Raises:
        FxpipeError: the first error of any worker.
        KeyboardInterrupt: Ctrl-C; no process and no file is left.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with tempfile.TemporaryDirectory(prefix="fxpipe_run_") as exchange, _quiet(), _signals_restored():
        options = dataclasses.replace(options, exchange=exchange)
        arguments = ("-P", "-m", "fxpipe.runtime.process.child", options.to_json())
        try:
            elastic_launch(_config(workers), sys.executable)(*arguments)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        except ChildFailedError as error:
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
            if -signal.SIGINT in exits.values() and set(exits.values()) <= {-signal.SIGINT, -signal.SIGTERM}:
                raise KeyboardInterrupt from None
            raise first_error(Path(exchange), exits) from None
        finally:
            with suppress(OSError):  # left by a worker that was stopped while it wrote
                if options.trace is not None:
                    partial(options.trace).unlink()
        summary: dict[str, Any] = json.loads((Path(exchange) / "summary.json").read_text())
        return summary


def first_error(exchange: Path, exits: dict[int, int]) -> FxpipeError:
    """The error that stopped a run, from the files the workers left and their exit codes (negative: signals).

    A worker's own error comes before a death by signal, and both before lost connections, which only follow from them.
    """
    left = sorted((json.loads(path.read_text()) for path in exchange.glob("*.json")), key=lambda e: e.get("time", 0))
    left = [entry for entry in left if "kind" in entry]
    own = [entry for entry in left if entry["kind"] not in (PeerLost.__name__, PeerRefused.__name__)]
    if own:
        return _rebuilt(own[0])
    # The launcher itself ends the remaining workers with SIGTERM: any other signal comes before it.
    for rank, code in sorted(exits.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[0])):
        if code < 0:
            name = signal.Signals(-code).name
            hint = (
                "the system's out-of-memory killer does that: try smaller batches" if code == -signal.SIGKILL else None
            )
            return RunError(f"worker {rank} was killed by signal {-code} ({name})", hint=hint)
    silent = [rank for rank in sorted(exits) if rank not in {entry["rank"] for entry in left}]
    if silent:
        return RunError(
            f"worker {silent[0]} exited with code {exits[silent[0]]} before it could say why",
            hint="what it wrote to stderr is above",
        )
    return _rebuilt(left[0]) if left else RunError("the workers stopped without an error")


def _rebuilt(entry: dict[str, Any]) -> FxpipeError:
    if entry["kind"] is None:
        return RunError(
            f"worker {entry['rank']} stopped on an unexpected error\n{entry['trace'].rstrip()}",
            hint="this is a defect of fxpipe: please report it with the lines above",
        )
    kind = getattr(errors, entry["kind"], RunError)
    error: FxpipeError = kind(entry["what"], where=entry["where"], hint=entry["hint"], page=entry["page"])
    return error


def _config(workers: int) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    wanted: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": workers,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "local_addr": "localhost",
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "logs_specs": DefaultLogsSpecs(log_dir=os.devnull),  # otherwise it leaves a folder in /tmp
        "signals_to_handle": ",".join(s.name for s in SIGNALS),
        "shutdown_timeout": 5,
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # they differ between versions of torch
    return LaunchConfig(**{name: value for name, value in wanted.items() if name in known})


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the launcher's own log: we report what it would say."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed", "torch.distributed.elastic")]
    loggers += [v for k, v in logging.Logger.manager.loggerDict.items()
                if k.startswith("torch.distributed.") and isinstance(v, logging.Logger)]  # fmt: skip
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _signals_restored() -> Iterator[None]:
    before = {s: signal.getsignal(s) for s in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
