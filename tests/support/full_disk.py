"""A run whose TMPDIR is a small disk that is full: python full_disk.py start|training TMPDIR OUT COMMAND…

The disk, of 300 KiB, is in the memory, and is there for this process and the command alone. Before the command starts,
or for three seconds once its run has trained a step, it is filled. The exit code and the output are the command's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path


def fill(folder: Path, left: int = 0) -> None:
    """Leave so many bytes."""
    with suppress(OSError), (folder / "filler").open("ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    os.truncate(folder / "filler", (folder / "filler").stat().st_size - left)


def main(moment: str, folder: Path, out: Path, command: list[str]) -> int:
    """Run the command."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder], check=True)
    if moment == "start":
        fill(folder, 8192)  # so that it seems to be a folder for temporary files
    run = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)})
    metrics = out / "metrics.jsonl"
    while moment == "training" and run.poll() is None:
        if metrics.is_file() and metrics.stat().st_size:
            fill(folder)
            time.sleep(3)
            os.truncate(folder / "filler", 0)
            break
        time.sleep(0.02)
    return run.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
