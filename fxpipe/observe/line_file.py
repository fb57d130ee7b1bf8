"""A file of JSON lines that a run writes while it trains: a new one, or the continuation of an earlier run's.

A run changes no file of an earlier run until it has ended without an error. If the file exists, the lines go to a
partial file next to it (`metrics.partial.jsonl`), which replaces it at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fxpipe.files import replaced
from fxpipe.messages import warn
from fxpipe.observe.appended_file import AppendedFile
from fxpipe.typed_json import dumps, parse_lines


def partial_lines(path: Path) -> Path:
    """Where a run's lines go while an earlier run's file is at `path`."""
    return path.with_name(f"{path.stem}.partial{path.suffix}")


class LineFile:
    """Appends JSON objects to a file, a line each; a failed write does not end the run (see `AppendedFile`).

    Args:
        path: where the file is at the end of the run; its folder must exist.
        continue_after: go on with the file of an interrupted run after this step. Lines of later steps, and incomplete
            ones, are dropped, atomically. Of the file and the partial file, the one whose last step is nearest to
            this step is used. None begins a new file.
        earlier: the file of the interrupted run, if that may be in another folder. If it exists, lines are taken only
            from it, and it does not change.
        in_place: go on in the file itself. Otherwise in the partial file: the file belongs to a run that has ended, and
            does not change until the end.
        kept: called with each line that is kept, as an object.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        *,
        continue_after: int | None = None,
        in_place: bool = True,
        earlier: Path | None = None,
        kept: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.path = path
        partial = partial_lines(path)
        if continue_after is None:
            partial.unlink(missing_ok=True)  # of a run that was interrupted while an earlier one's file existed
            self._file = AppendedFile(partial if path.exists() else path)
            return
        elsewhere = [] if earlier is None or earlier.resolve() == path.resolve() else [partial_lines(earlier), earlier]
        # If the run comes from another folder, a file that is here is another run's.
        there = [f for f in elsewhere if f.exists()] or [f for f in (partial, path) if f.exists()] or [path]
        found = there[0] if len(there) == 1 else max(there, key=lambda file: _reach(file, continue_after))
        fresh = found in elsewhere and not path.exists()
        target = path if fresh or (in_place and found == path) else partial
        if found.exists():
            with replaced(target) as file:
                for line, row in _lines(found, continue_after):
                    file.write(line)
                    if kept is not None:
                        kept(row)
        self._file = AppendedFile(target, fresh=False)

    def write(self, row: dict[str, Any]) -> None:
        """Append a line, with null for numbers that are not finite; never raises."""
        self._file.write(dumps(row).encode() + b"\n")

    def sync(self) -> None:
        """Sync all lines so far to the disk, as far as possible."""
        self._file.sync()

    def take_place(self) -> None:
        """The run has ended without an error: the file replaces an earlier run's. Lines may follow; never raises."""
        try:
            if self._file.path != self.path:
                os.replace(self._file.path, self.path)
                self._file.path = self.path
        except OSError as error:
            warn(f"{self.path} cannot be written: {error.strerror}; its lines are in {self._file.path.name}")

    def close(self) -> None:
        """Close the file, and remove it if it never got a line; never raises."""
        self._file.close()
        with suppress(OSError):
            if self._file.empty and not self._file.path.stat().st_size:
                self._file.path.unlink()

    @property
    def problems(self) -> list[dict[str, Any]]:
        """See `AppendedFile.problems`."""
        return [problem | {"file": self.path.name} for problem in self._file.problems]


def _lines(path: Path, after: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The whole lines of a file with a step up to `after`, as they stand and as objects."""
    with path.open("rb") as file:
        for line, row in parse_lines(file):
            step = row.get("step") if isinstance(row, dict) else None
            if line.endswith(b"\n") and isinstance(step, int) and step <= after:
                yield line, row


def _reach(path: Path, after: int) -> int:
    """The last step up to `after` of which a file has a line; -1 without any."""
    return max((row["step"] for _, row in _lines(path, after)), default=-1)
