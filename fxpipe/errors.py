"""The one tree of errors. Each says what happened, where, and what to do.

`str(error)` is what a user reads; the command line prints it and exits with `exit_code`.
Anything that is not an `FxpipeError` is a defect of fxpipe itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from fxpipe.messages import from_here


class FxpipeError(Exception):
    """A user's problem, explained.

    Args:
        what: what happened, one or more sentences.
        where: the place: stage, node, or the user's file and line.
        hint: what to do about it.
        page: the page of `docs/errors` that shows more: its name without `.md`.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, where: str | None = None, hint: str | None = None, page: str | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint
        self.page = page

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += f"\n  at: {self.where}"
        if self.hint:
            text += f"\n  hint: {self.hint}"
        if self.page:
            text += f"\n  more: fxpipe explain {self.page}"
        return from_here(text)


class TaskError(FxpipeError):
    """The user's file: a hook is missing, misspelt or returns the wrong thing."""


class CaptureError(FxpipeError):
    """The training step could not be captured as one graph."""


class BatchError(FxpipeError):
    """A batch does not look like the one the build was compiled for."""


class CutError(FxpipeError):
    """The cuts asked for are impossible."""


class ProfileError(FxpipeError):
    """A profile for the planner cannot be read."""


class VerifyError(FxpipeError):
    """A program breaks the law of its level (a defect of a pass), or passes are in the wrong order."""


class BuildError(FxpipeError):
    """A build directory cannot be written, read or trusted."""


class ScheduleError(FxpipeError):
    """A schedule is wrong or cannot be used here."""


class PolicyError(FxpipeError):
    """A policy cannot be used with this schedule or optimizer."""


class CodecError(FxpipeError):
    """A codec does not exist, or cannot encode a value."""


class BackendError(FxpipeError):
    """An engine cannot run a part of a stage, or computes something different from eager PyTorch."""


class ExportError(FxpipeError):
    """A graph cannot be exported, or what was exported is not right."""


class RunError(FxpipeError):
    """Training failed on a worker."""


class NotFiniteError(RunError):
    """A loss, or weights, are infinite or NaN."""


class CheckpointError(RunError):
    """A checkpoint cannot be written, read or trusted."""


class PeerLost(RunError):
    """Another worker is gone: never the first error, only its consequence."""


class PeerRefused(RunError):
    """Another worker refused to begin, and sent its reason to every worker; never the first error."""


class WorkerLost(RunError):
    """A worker ended before its work was done, without an error that explains it: another start may succeed."""


def near(name: str, known: Iterable[str], limit: int = 3) -> str:
    """`", did you mean 'blocks.4'?"` for a misspelt name, or an empty string."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=limit, cutoff=0.6)
    if not close:
        return ""
    return ", did you mean " + " or ".join(f"'{c}'" for c in close) + "?"


def listed(names: Sequence[str], most: int = 20) -> str:
    """Names for a message: the first ones, and how many more there are; `none` without any."""
    more = len(names) - most
    return (", ".join(names[:most]) or "none") + (f" and {more} more" if more > 0 else "")


def first_line(error: BaseException) -> str:
    """The first line of an error's text that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else repr(error)
