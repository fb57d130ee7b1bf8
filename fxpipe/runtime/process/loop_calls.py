"""The calls of a user's own loop: when they may be made, and that all processes make the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

from fxpipe.errors import BatchError, FxpipeError, RunError
from fxpipe.observe.pulse import Pulse
from fxpipe.runtime.process.minibatch_notes import Calls
from fxpipe.runtime.wires.addresses import ProcessLine
from fxpipe.runtime.worker.executor import Executor


class LoopCalls:
    """Makes the calls of a pipeline, until it is closed or an error leaves messages in flight.

    Args:
        pulse: of this process; it says that the process moves on while the user's own code runs.

    Attributes:
        state: of the pipeline.
    """

    def __init__(self, pulse: Pulse) -> None:
        self.state: Literal["open", "broken", "closed"] = "open"
        self._pulse, self._inside = pulse, threading.Event()
        pulse.after_beat.insert(0, partial(_beat, pulse, self._inside))

    def compare(self, line: ProcessLine, executors: Sequence[Executor]) -> None:
        """From now on compare calls with those of other processes, by the wires of the workers here."""
        self._calls = Calls(line, executors)

    @contextmanager
    def call(self, name: str | None = None) -> Iterator[None]:
        """Inside, the workers here are expected to move on; `name` is sent to the next process.

        Raises:
            RunError: the pipeline was closed, or an earlier call failed in the middle.
        """
        if self.state == "closed":
            raise RunError("the pipeline was closed", hint="make a new one")
        if self.state == "broken":
            raise RunError("an earlier step failed in the middle", hint="make a new pipeline")
        self._inside.set()
        self._pulse.move()
        try:
            if name is not None:
                self.announce(name)
            yield
        finally:
            self._inside.clear()

    def announce(self, name: str, shape: int | None = None) -> int:
        """See `Calls.make`; after an error in it the workers here and elsewhere are at different points."""
        try:
            return self._calls.make(name, shape)
        except BatchError:
            raise
        except FxpipeError:
            self.state = "broken"
            raise

    @contextmanager
    def working(self) -> Iterator[None]:
        """An error inside leaves messages in flight: the pipeline cannot go on."""
        self.state = "broken"
        yield
        self.state = "open"


def _beat(pulse: Pulse, inside: threading.Event) -> None:
    if not inside.is_set():  # the user's own code may take any time
        pulse.move()
