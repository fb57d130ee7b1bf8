"""The output folder of a run, which holds the files of one run: an earlier one's stay until this one has ended well.

Where an earlier run's files are, a run writes into `out/partial/`; when it has ended, all that is there takes its place
in `out/` at once. Checkpoints have a folder of their own, and belong to both. Needs no torch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fxpipe.files import remove_abandoned, replaced
from fxpipe.messages import warn
from fxpipe.observe.run_json import RUN
from fxpipe.typed_json import parse_lines

METRICS = "metrics.jsonl"
FINAL_WEIGHTS = "model.safetensors"
AVERAGED_WEIGHTS = "ema.safetensors"
BEST_WEIGHTS = "best.safetensors"
BEST_NOTE = "best.json"
PROFILE = "profile_{}.json"
"""Of each process."""

PARTIAL = "partial"


class OutFolder:
    """The files of one run, in worker 0's process.

    The run goes on after a step of an interrupted one, `continue_after`, or begins anew. `earlier` is that one's output
    folder, if it may be another one: its files do not change.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, out: Path, continue_after: int | None = None, earlier: Path | None = None) -> None:
        self._out, partial = out, out / PARTIAL
        out.mkdir(parents=True, exist_ok=True)
        # where the interrupted run may have left files; in the first one, metrics come nearest to the step
        self.before: list[Path] = []
        if continue_after is None:
            # where this run's files go: `out`, or a folder in it until `take_place`
            self.own = partial if _earlier(out) else out
        else:
            home = out if earlier is None or earlier.resolve() == out.resolve() else earlier
            folders = [folder for folder in (home / PARTIAL, home) if (folder / METRICS).exists()] or [home]
            self.before = sorted(folders, key=lambda folder: -_reach(folder / METRICS, continue_after))
            # If the run comes from another folder, a file that is here is another run's.
            free = self.before[0] == out and not (out / RUN).exists() if home == out else not _earlier(out)
            self.own = out if free else partial
        if partial not in self.before[:1]:
            shutil.rmtree(partial, ignore_errors=True)
        for folder in {out, self.own}:
            folder.mkdir(exist_ok=True)
            remove_abandoned(folder)

    def continue_lines(self, name: str, after: int, kept: Callable[[dict[str, Any]], None]) -> None:
        """Take over the whole lines of the interrupted run with a step up to `after`, each of which `kept` gets; the
        others are dropped.

        Raises:
            OSError: they cannot be written.
        """
        if (source := self.before[0] / name).exists():
            with replaced(self.own / name) as file:
                for line, row in _lines(source, after):
                    file.write(line)
                    kept(row)

    def take_place(self, written: Collection[str]) -> None:
        """The run has ended without an error: replace an earlier run's files by this run's; never raises.

        This run has the files of `written` in their place already, or leaves them as they are.
        """
        if self.own == self._out:
            return
        fresh = sorted(path.name for path in self.own.glob("*"))
        for name in _earlier(self._out) - {*written, *fresh}:
            with suppress(OSError):
                (self._out / name).unlink()
        for name in fresh:
            try:
                os.replace(self.own / name, self._out / name)
            except OSError as error:
                warn(f"{self._out / name} cannot be written: {error.strerror}; it is in {self.own}")
        self.close()
        self.own = self._out

    def close(self) -> None:
        """Remove the run's own folder if it is empty."""
        if self.own != self._out:
            with suppress(OSError):
                self.own.rmdir()


def _earlier(out: Path) -> set[str]:
    """The names of an earlier run's files, without `run.json`, which each run writes last."""
    names = {METRICS, FINAL_WEIGHTS, AVERAGED_WEIGHTS, BEST_WEIGHTS, BEST_NOTE}
    names |= {path.name for path in out.glob(PROFILE.format("*"))}
    return {name for name in names if (out / name).exists()}


def _lines(path: Path, after: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The whole lines of a file with a step up to `after`, as they stand and as objects."""
    with path.open("rb") as file:
        for line, row in parse_lines(file):
            step = row.get("step") if isinstance(row, dict) else None
            if line.endswith(b"\n") and isinstance(step, int) and step <= after:
                yield line, row


def _reach(path: Path, after: int) -> int:
    """The last step up to `after` of which a file has a line; -1 without any."""
    return max((row["step"] for _, row in _lines(path, after)), default=-1) if path.exists() else -1
