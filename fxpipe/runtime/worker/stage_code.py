"""What surrounds a call of emitted code: the seed of its random numbers, and errors that say where they came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fxpipe.errors import FxpipeError, PeerLost, RunError
from fxpipe.random_state import seed_of, seed_torch
from fxpipe.stages.loaded import stage_line

IN_A_STAGE = "if the file was edited, undo the edit; else step into it: fxpipe run BUILD --local --steps 1"


def reseed(device: torch.device, *place: object) -> None:
    """Seed torch by the run's seed and the place of the call: the same in every process and every run."""
    seed_torch(seed_of(*place), device.type)


@contextmanager
def explained(path: Path, worker: int, what: Callable[[], str], out_of_memory: str) -> Iterator[None]:
    """Turn errors of the emitted code in `path` into RunError with their place; give our own errors their place.

    Args:
        what: gives the words for what was done, if it fails.
        out_of_memory: the hint if the device has no memory left.
    """
    try:
        yield
    except PeerLost:
        raise
    except FxpipeError as error:
        place = stage_line(error, path)
        error.where = error.where or f"{what()} on worker {worker}" + (f", {place}" if place else "")
        raise
    except Exception as error:
        raise RunError(
            f"{what()} failed on worker {worker}: {type(error).__name__}: {error}",
            where=stage_line(error, path) or str(path),
            hint=out_of_memory if isinstance(error, torch.OutOfMemoryError) else IN_A_STAGE,
        ) from error
