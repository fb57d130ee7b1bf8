"""The soak: python tests/survive/soak.py [--steps 20000] [--every 1000] [--saved 250] [--seed 0] [--folder DIR]

Trains a small model on two workers for so many steps, once undisturbed and once killed about `--every` steps, in a way
that the seed draws, and resumed. What both leave must be the same to the last bit: weights, averages, the optimizer's
state, metrics, checkpoints. Of the undisturbed run's processes it says how the resident memory grew after a quarter of
the steps. The exit code is 1 if anything differs or the memory of any process grew by more than `FLAT` bytes a step;
the folder stays then. Half an hour on two cores.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from soaked_runs import soaked

FLAT = 16.0
"""Bytes a step: 8 are worker 0's losses, which `run.json` holds in the end."""


def main() -> int:
    """Soak as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--every", type=int, default=1000, help="steps between two kills")
    parser.add_argument("--saved", type=int, default=250, help="steps between two checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--folder", type=Path, help="an empty one; default a new temporary folder")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="fxpipe_soak_"))
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    found = soaked(folder, given.steps, given.every, given.saved, given.seed)
    print("\n".join(found.story))
    print(f"met: {', '.join(f'{name} {n}' for name, n in found.met.most_common())}")
    for name, growth in found.growth.items():
        print(f"{name}: {found.held[name] / 2**20:.1f} MiB, growing by {growth:.1f} bytes a step")
    print(f"{given.steps} steps, {time.monotonic() - begin:.0f} s: {len(found.differences)} differences")
    print("".join(f"  {line}\n" for line in found.differences), end="")
    wrong = bool(found.differences) or max(found.growth.values()) > FLAT
    if not wrong:
        shutil.rmtree(folder)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
