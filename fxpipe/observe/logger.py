"""`fxpipe run --log NAME`: where a run's numbers go as it trains, in addition to its own files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fxpipe.errors import RunError, first_line, near
from fxpipe.messages import warn


@dataclass(frozen=True)
class LoggedRun:
    """The run whose numbers a logger gets.

    Attributes:
        out: its output folder, if it has one.
        settings: its options and what its build was compiled with, as `run.json` has them.
        continue_after: it goes on after this step of an interrupted run; None begins anew.
    """

    out: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    continue_after: int | None = None


class Logger(ABC):
    """Gets a run's numbers, only in the process of worker 0. If it raises, it gets no more numbers; the run goes on.

    Attributes:
        name: what `--log` calls it.
        package: what it needs installed, if anything.
        where: what `--log NAME=WHERE` says; None if nothing.

    Raises:
        RunError: when it is made: it cannot log. That ends the run before it trains.
    """

    name: ClassVar[str]
    package: ClassVar[str] = ""

    def __init__(self, where: str | None, run: LoggedRun) -> None:
        self.where, self.run = where, run

    @classmethod
    def check(cls, where: str | None, out: str | None) -> None:
        """Refuse what cannot be logged before any process starts; by default where the package is missing.

        Raises:
            FxpipeError: says what is missing.
        """
        if cls.package and find_spec(cls.package) is None:
            what = f"--log {cls.name} needs the package {cls.package}, which is not installed"
            raise RunError(what, hint=f"pip install {cls.package}")

    @abstractmethod
    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Numbers after this step, by names like `train/loss`; some may be infinite or NaN.

        Args:
            seconds: since training began, without evaluations.
        """

    def close(self) -> None:  # noqa: B027 (a logger may have nothing to close)
        """The run ends."""


_Kind = TypeVar("_Kind", bound=type[Logger])
_OWN = {"tensorboard": "TensorboardLog", "wandb": "WandbLog", "mlflow": "MlflowLog"}
_REGISTERED: dict[str, type[Logger]] = {}


def register(kind: _Kind) -> _Kind:
    """A class decorator: from now on, `--log` knows this logger by its name. Put it into the model file.

    Raises:
        RunError: it has no name, or the name of one of fxpipe's own.
    """
    name = getattr(kind, "name", "")
    if not name or "=" in name or name in _OWN:
        what = f"there is a logger {name!r} already" if name in _OWN else f"{kind.__name__} has no name"
        raise RunError(what, hint='name: ClassVar[str] = "…", without a =')
    _REGISTERED[name] = kind
    return kind


def check_loggers(asked: Sequence[str], out: str | None) -> None:
    """Refuse, before any work is done, built-in loggers that cannot log."""
    for text in asked:
        name, _, where = text.partition("=")
        if name in _OWN:
            _kind(name).check(where or None, out)


def open_loggers(asked: Sequence[str], run: LoggedRun) -> list[Logger]:
    """The loggers that texts like `tensorboard=runs/a` name."""
    parts = [text.partition("=") for text in asked]
    return [_kind(name)(where or None, run) for name, _, where in parts]


def _kind(name: str) -> type[Logger]:
    if name in _OWN:
        found: type[Logger] = getattr(import_module(f"fxpipe.observe.{name}"), _OWN[name])
        return found
    if name not in _REGISTERED:
        known = [*_OWN, *_REGISTERED]
        hint = f"one of {', '.join(known)}, or your own class, registered by fxpipe.observe.logger.register"
        raise RunError(f"there is no logger {name!r}{near(name, known)}", hint=hint)
    return _REGISTERED[name]


class Loggers:
    """The loggers of a run; none of them can end it."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = loggers
        self._lost = [0] * len(loggers)  # how often each got no numbers

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """See `Logger.log`; one that has failed once gets no more."""
        for i, logger in enumerate(self._loggers):
            if self._lost[i]:
                self._lost[i] += 1
                continue
            try:
                logger.log(step, seconds, values)
            except Exception as error:
                self._lost[i] = 1
                warn(f"--log {logger.name} gets no numbers from step {step} on: {first_line(error)}")

    def close(self) -> None:
        """See `Logger.close`."""
        for logger in self._loggers:
            try:
                logger.close()
            except Exception as error:
                warn(f"--log {logger.name} could not end: {first_line(error)}")

    @property
    def problems(self) -> list[dict[str, Any]]:
        """How often each got no numbers, if any: `{"file", "lost"}`."""
        pairs = zip(self._loggers, self._lost, strict=True)
        return [{"file": logger.name, "lost": count} for logger, count in pairs if count]
