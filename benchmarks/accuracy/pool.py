"""Jobs over processes of one thread each: results as they come, and no process that outlives its parent."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from study import Job


def results(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, dict[str, Any] | None, str]]:
    """Every job with its result, or with None and what went wrong.

    Ctrl-C and SIGTERM end the processes at once; what they left lies in a folder that is removed here.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fxpipe_accuracy_") as scratch:
        pool = context.Pool(processes, _begin, (scratch,))
        try:
            yield from pool.imap_unordered(_execute, jobs)
        finally:
            pool.terminate()
            pool.join()


def _begin(scratch: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends the others
    tempfile.tempdir = scratch
    torch.set_num_threads(1)


def _execute(job: Job) -> tuple[Job, dict[str, Any] | None, str]:
    try:
        return job, job.execute(), ""
    except Exception:
        return job, None, traceback.format_exc()
