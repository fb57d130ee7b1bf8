"""Runs that the same worker processes make in turn: starting them is what takes long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from warm import Popen

from fxpipe.runtime.options import RunOptions

WORKER = """
import json, os, sys
from pathlib import Path
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.end_process import end_process
from fxpipe.runtime.process.rank import join

for number, (port, text) in enumerate(json.loads(Path(sys.argv[1]).read_text())):
    os.environ["MASTER_PORT"] = str(port)
    summary = join(RunOptions.from_json(text))
    if summary is not None:
        Path(sys.argv[1]).with_name(f"summary_{number}.json").write_text(json.dumps(summary))
end_process(0)
"""


def one_after_the_other(
    runs: Sequence[RunOptions], workers: int, folder: Path, quiet: bool = True
) -> list[dict[str, Any]]:
    """The summaries of runs that the same processes make in turn: starting them is what takes long.

    For each run they meet at a store of this process, as under torchrun.

    Args:
        quiet: nothing but warnings of the study may be said.
    """
    (folder / "worker.py").write_text(WORKER)
    stores = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in runs]
    listed = [(store.port, options.to_json()) for store, options in zip(stores, runs, strict=True)]
    (folder / "runs.json").write_text(json.dumps(listed))
    command = [sys.executable, str(folder / "worker.py"), str(folder / "runs.json")]
    for err in worker_errors(command, workers, 60):
        # The study's warnings (fxpipe.policy.accuracy_warnings, fxpipe.codecs.accuracy_warnings) are no errors.
        assert (
            not quiet
            or [line for line in err.splitlines() if not line.startswith(("warning: policy ", "warning: codec "))] == []
        )
    return [json.loads((folder / f"summary_{number}.json").read_text()) for number in range(len(runs))]


def worker_errors(command: Sequence[str], workers: int, timeout: float) -> list[str]:
    """What each of the processes of a run writes to stderr, all started by this command; they must end well."""
    shared = {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "localhost",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = [
        Popen(command, env={**os.environ, **shared, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(workers)
    ]
    found = []
    try:
        for process in processes:
            _, err = process.communicate(timeout=timeout)
            assert process.returncode == 0, err
            found.append(err)
    finally:
        for process in processes:
            process.kill()
    return found
