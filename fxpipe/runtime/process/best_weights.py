"""`best.safetensors`: the weights of a run's best evaluation so far, while it trains on.

An earlier run's file stays as it is until the run has ended well: meanwhile this one's is `best.partial.safetensors`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.files import replaced
from fxpipe.messages import warn
from fxpipe.observe.record import BEST_WEIGHTS
from fxpipe.observe.run_folder import RUN

PARTIAL = "best.partial.safetensors"

Write = Callable[[str, Sequence[Mapping[str, Tensor]]], None]
"""Writes a file of this name, of the tensors of this process's workers, by name."""


class BestWeights:
    """The file of one run, in the process of worker 0.

    Args:
        write: see `Write`.
        check: says what could not be written.
        goes_on: after an interruption, whose best weights stay until there are better ones.
        earlier: the output folder of the interrupted run, if it may be another one.
    """

    def __init__(
        self,
        out: str | Path,
        write: Write,
        check: Callable[[], None],
        goes_on: bool,
        earlier: Path | None = None,
    ) -> None:
        self._write, self._check = write, check
        self._file, self._partial = Path(out) / BEST_WEIGHTS, Path(out) / PARTIAL
        self._goes_on = goes_on
        self._warned = False
        if goes_on:
            here = self._file.exists() or self._partial.exists()
            if not here and earlier is not None and (earlier / BEST_WEIGHTS).exists():
                with (earlier / BEST_WEIGHTS).open("rb") as source, replaced(self._file) as target:
                    shutil.copyfileobj(source, target)
            beside = self._partial.exists() or (Path(out) / RUN).exists()
        else:
            self._partial.unlink(missing_ok=True)
            beside = self._file.exists()
        self._target = PARTIAL if beside else BEST_WEIGHTS

    def keep(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """These weights are the best so far. If they cannot be written that is said, and training goes on."""
        self._write(self._target, states)
        try:
            self._check()
        except RunError as error:
            if not self._warned:
                warn(f"the best weights so far are not where they should be: {error}")
            self._warned = True

    def take_place(self) -> None:
        """The run has trained to its end: its file takes the place of an earlier run's."""
        with suppress(OSError):
            if self._partial.exists():
                os.replace(self._partial, self._file)
            elif self._target == PARTIAL and not self._goes_on:
                self._file.unlink()  # another run's: this one had nothing that is best
        self._target = BEST_WEIGHTS
