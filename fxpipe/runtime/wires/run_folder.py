"""The folder of a run on one machine, through which its processes exchange texts, and a spare one on another disk.

What a run needs there to begin is written at once, in TMPDIR, or in the output folder if TMPDIR has no room. Later a
text is written into the spare folder if the first one's disk fails. Imports no torch, as the launcher does not.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from fxpipe.errors import RunError

SPARE = "spare"
"""A link in the folder of a run to the spare one."""

SUMMARY = "summary"
"""The name of the run's summary, as JSON."""

ASKED, MOVE = "asked", "move"
"""The name of a text that asks the run to stop after one more checkpoint, and what its content begins with if the run
then begins again under other cuts: the number of their build follows."""

TIMES = "times-{}"
"""The name of the text with what a process has noted of its messages (see `message_times`)."""

FULL = (errno.ENOSPC, errno.EDQUOT)


class RunFolder:
    """Texts by name, which all processes of the run see.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        spare = path / SPARE
        self.places = [path, spare.resolve()] if spare.is_dir() else [path]
        self._owners = {place: place.stat().st_uid for place in self.places if place.is_dir()}

    def write(self, name: str, text: str) -> None:
        """Write a text, or replace it.

        Raises:
            OSError: no disk takes it; if a disk is full, that is the error.
        """
        errors: list[OSError] = []
        for place in self.places:
            unfinished = place / f"{name}.{os.getpid()}.tmp"  # replicas may write the same text
            try:
                unfinished.write_text(text)
                os.replace(unfinished, place / name)
            except OSError as error:
                errors.append(error)
                _remove(unfinished)
                continue
            for other in self.places:
                if other != place:
                    _remove(other / name)
            return
        raise next((error for error in errors if error.errno in FULL), errors[0])

    def read(self, name: str) -> str | None:
        """A text; None if it is not there, or is of another user, who may write into the output folder."""
        for place in self.places:
            with suppress(FileNotFoundError), (place / name).open() as file:
                if os.fstat(file.fileno()).st_uid == self._owners.get(place):
                    return file.read()
        return None

    def remove(self, name: str) -> None:
        """Remove a text, if it is there."""
        for place in self.places:
            _remove(place / name)

    def names(self, ending: str) -> Iterator[str]:
        """The names of texts with this ending."""
        for place in self.places:
            yield from (path.name for path in place.glob(f"*{ending}"))


def make_folders(out: str | None) -> list[tempfile.TemporaryDirectory[str]]:
    """New folders that only this user can read, as contexts: in TMPDIR, and in the output folder if that is there.

    Raises:
        RunError: none can be made.
    """
    found, problems = [], []
    for place in (None, out) if out is not None and os.path.isdir(out) else (None,):
        prefix, parent = ("fxpipe_run_", None) if place is None else (".fxpipe_run_", os.path.abspath(place))
        try:
            found.append(tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True))
        except OSError as error:
            problems.append(f"{parent or 'TMPDIR'}: {error.strerror or error}")
    if not found:
        raise _no_room(problems)
    return found


def prepared(folders: list[Path], room: int, prepare: Callable[[Path], None]) -> Path:
    """The first of these folders that holds what `prepare` writes and so many bytes more; the next one is its spare.

    Raises:
        RunError: none does.
    """
    problems = []
    for place in folders:
        try:
            prepare(place)
            probe = place / "probe"
            probe.write_bytes(bytes(room))
            probe.unlink()
            for other in folders:
                if other != place:
                    (place / SPARE).symlink_to(other.absolute())
            return place
        except OSError as error:
            problems.append(f"{place.parent}: {error.strerror or error}")
            for path in place.iterdir():
                _remove(path)
    raise _no_room(problems, room)


def _no_room(problems: list[str], room: int = 0) -> RunError:
    needed = f"{room >> 10} KiB" if room else "a few KiB"
    return RunError(
        "the processes of the run have no folder to exchange files: " + "; ".join(problems),
        hint=f"free {needed} there, or set TMPDIR to a folder with room",
    )


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
