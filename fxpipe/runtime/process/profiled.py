"""`fxpipe run --profile` and `--nvtx`: what the workers of a process do, in torch's profiler or in Nsight Systems."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fxpipe.files import temporary
from fxpipe.messages import warn
from fxpipe.observe.out_folder import PROFILE
from fxpipe.observe.ranges import Ranges
from fxpipe.observe.watch import Watch
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.world import World
from fxpipe.runtime.worker.observer import Observer

FILLED = 2
"""Steps that are not profiled, and one more for each worker: the pipeline fills, and what is slow once is over."""


@contextmanager
def profiled(
    options: RunOptions, workers: int, steps: range, world: World, watches: Sequence[Watch], observers: list[Observer]
) -> Iterator[dict[str, str]]:
    """Show what the workers here do inside, where the options ask for it.

    Args:
        workers: of the run.
        steps: of the run.
        watches, observers: of the workers, and of the rows, here.

    Yields:
        What `run.json` has of it for each worker here; at the end, `profile` is the name of the file.
    """
    row: dict[str, str] = {}
    found: _TorchProfile | None = None
    ranges = Ranges(torch.cuda.nvtx.range, on=True) if options.nvtx else Ranges(record_function, on=False)
    if options.profile is not None and options.out is not None and steps:
        found = _TorchProfile(profiled_steps(options.profile, workers, steps), world.device, ranges)
        observers.append(found)
    if options.nvtx or found is not None:
        world.turns.ranges = ranges
        for watch in watches:
            watch.ranges = ranges
    try:
        yield row
        path = Path(options.out or "", PROFILE.format(world.here[0]))
        if found is not None and found.write(path):
            row["profile"] = path.name
    except BaseException:
        if found is not None and world.alone:  # else the process ends, and its device may wait for a lost one
            with suppress(RuntimeError):
                found.stop()
        raise
    finally:
        ranges.leave()


def profiled_steps(asked: int, workers: int, steps: range) -> range:
    """The asked number of a run's steps, once the pipeline is full; of a short run the last ones."""
    first = min(steps.start + workers + FILLED, max(steps.stop - asked, steps.start))
    return range(first, min(first + asked, steps.stop))


class _TorchProfile(Observer):
    """Profiles this thread from the first forward here in the first of some steps until the one after the last."""

    def __init__(self, steps: range, device: torch.device, ranges: Ranges) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it reports each start and stop
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self._steps, self._ranges, self._profile = steps, ranges, profile(activities=kinds)
        self._profile.prepare_trace()
        self._begun = self._ended = False

    def begins(self, minibatch: int) -> None:
        if minibatch >= self._steps.stop:
            self.stop()
        elif minibatch >= self._steps.start and not self._begun:
            self._begun = True
            self._profile.start_trace()
            self._ranges.switch(True)

    def stop(self) -> None:
        """The last of the steps is over, or the run is; the process may have another profiler."""
        if self._ended:
            return
        self._ended = True
        self._ranges.switch(False)
        if not self._begun:
            self._profile.start_trace()
        self._profile.stop_trace()

    def write(self, path: Path) -> bool:
        """Write what was profiled in Chrome's trace format; if there is nothing, or that fails, print a warning."""
        self.stop()
        if not self._begun:
            warn(f"nothing was profiled: the run ended before step {self._steps.start + 1}")
            return False
        fresh = temporary(path)
        try:
            self._profile.export_chrome_trace(str(fresh))  # it removes a file that it cannot write whole
            fresh.replace(path)
        except (OSError, RuntimeError) as error:
            warn(f"the profile is lost: torch could not write {path}: {error}")
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            return False
        return True
