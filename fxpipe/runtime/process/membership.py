"""A process of a run among the others: from the meeting of all to their leaving, in order or after errors."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from fxpipe.errors import FxpipeError, PeerLost, RunError
from fxpipe.observe.pulse import PULSES, Pulse, PulseFile, Pulses, StorePulses
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.agreement import Agreed, agree
from fxpipe.runtime.process.ends import end_process, process_name
from fxpipe.runtime.process.last_saved import name_checkpoint
from fxpipe.runtime.process.stall import LIMIT, LOADING, WatchingWorker
from fxpipe.runtime.wires.group import (
    close_group,
    forget_group,
    leave_after,
    name_process,
    open_group,
    peers,
    place_of_process,
)
from fxpipe.task.model_file import Task
from fxpipe.threads import threads_for
from fxpipe.torch_private import default_store

TIMEOUT = timedelta(minutes=30)
"""Of the process group, at least; who watches the workers ends a run that stands still."""

FOREVER = timedelta(days=365)
LINGER = 3.0
"""Seconds for which a worker that only lost its peer stays, so that the peer's own error is seen first."""


@dataclass(frozen=True)
class Member:
    """One process among those of a run.

    Attributes:
        agreed: what all of them run.
        pulse: its own.
        pulses: those of all.
    """

    agreed: Agreed
    rank: int
    pulse: Pulse
    pulses: Pulses


@contextmanager
def membership(options: RunOptions, task: Task | None = None, pulse: Pulse | None = None) -> Iterator[Member]:
    """Be one of the processes that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, …), or of the group that
    the caller has made.

    Args:
        task: the user's hooks; None takes those of the model file.
        pulse: this process's, if it was started by `launch`, where its launcher reads it.

    Raises:
        PeerLost: another worker stopped first; the caller exits quietly.
        FxpipeError: a mistake of the user's, on the worker that found it. Before the first step, on all of them.
    """
    if (place := place_of_process()) is None:
        raise RunError(
            "this process was not started by torchrun: it has no RANK and WORLD_SIZE",
            hint="torchrun --nproc-per-node N SCRIPT, or build.local() for all workers in one process",
        )
    pulse = pulse or Pulse()
    pulse.phase = "loading"
    rank, world = place
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    torch.set_num_threads(threads_for(options.threads, local_ranks))
    longest = 2 * LOADING * LIMIT * timedelta(seconds=options.stall_timeout) or FOREVER
    open_group(rank, world, max(TIMEOUT, longest), options.exchange, options.stall_timeout)
    with ExitStack() as held:
        try:
            agreed = agree(options, task, rank, world, held)
        except BaseException as error:
            leave_after(error)  # all workers are here, and all of them stop
            raise
        try:
            name_process(process_name(rank, agreed.plan.mesh))
            yield Member(agreed, rank, pulse, _pulses(pulse, agreed, rank, world))
        except PeerLost:
            time.sleep(LINGER)
            raise
        except FxpipeError as error:
            if options.exchange is None and pulse.begun:  # else the launcher does it
                name_checkpoint(error, agreed.options, agreed.options.out)
            raise
        finally:
            pulse.end()
            if sys.exc_info()[0] is None:
                close_group()
            else:
                forget_group()


def _pulses(pulse: Pulse, agreed: Agreed, rank: int, ranks: int) -> Pulses:
    """Where the pulses of all processes can be read, this one's among them."""
    options = agreed.options
    if options.exchange is not None:  # the launcher watches
        return PulseFile(Path(options.exchange) / PULSES, ranks)
    with peers(rank):
        store = StorePulses(default_store(), ranks)
        store.put(rank, pulse.numbers)
    pulse.after_beat = WatchingWorker(store, pulse, rank, options, end_process, agreed.plan.mesh)
    pulse.begin()
    return store
