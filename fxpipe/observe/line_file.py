"""A file of JSON lines that a run writes while it trains, beside that of an earlier run, or on from it.

A run changes no file of an earlier run before it has ended well. Where the file is there already, the lines go to a
partial file beside it (`metrics.partial.jsonl`), which takes its place at the end.
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
    """Where the lines of a run go as long as an earlier run's file stays at `path`."""
    return path.with_name(f"{path.stem}.partial{path.suffix}")


class LineFile:
    """Appends JSON objects to a file, a line each; no line that cannot be written ends the run (see `AppendedFile`).

    Args:
        path: where the file is at the end of the run; its folder must exist.
        continue_after: go on with the file of an interrupted run after this step. Lines of later steps, and incomplete
            ones, are dropped, atomically. Of the file and the partial file it takes the one that comes nearest to this
            step. None begins a new file.
        earlier: the file of the interrupted run, if it may be elsewhere: where it is, the lines are taken from there
            alone; it stays as it is.
        in_place: go on in the file itself. Otherwise in the partial file, so that the file stays as it is until the
            end: it belongs to a run that has ended.
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
            partial.unlink(missing_ok=True)  # of a run that was interrupted beside an earlier one
            self._file = AppendedFile(partial if path.exists() else path)
            return
        elsewhere = [] if earlier is None or _same(earlier, path) else [partial_lines(earlier), earlier]
        # A file that is here, where the run comes from elsewhere, is another run's.
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
        """Have all lines so far on the disk itself, as far as they can be written."""
        self._file.sync()

    def take_place(self) -> None:
        """The run has ended well: the file takes the place of an earlier run's. Lines may follow; never raises."""
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


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


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
