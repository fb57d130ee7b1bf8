"""The kill test at length: python tests/survive/kills.py --seeds 200 [--first 0] [--folder DIR]

Each seed is a random model, schedule, policy, optimizer and number of workers, trained by `fxpipe run` in processes,
killed at random moments of its progress and resumed until it ends; what it leaves must be what the undisturbed run
leaves, to the last bit. Seeds take turns with what is killed for sure: see `THEMES`. Prints a line a seed, and at the
end how often each moment and way was met; the exit code is the number of seeds that differ, at most 100. The folder of
such a seed stays, with the model, the build and both runs. `--first 17 --seeds 1` plays seed 17 again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from killed_runs import drawn_case, played_in


def main() -> int:
    """Play the seeds that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--folder", type=Path, help="where they are played; default a new temporary folder")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="fxpipe_kills_"))
    wrong, met = 0, Counter[str]()
    for seed in range(given.first, given.first + given.seeds):
        begin = time.monotonic()
        result = played_in(folder / str(seed), seed)
        wrong += bool(result.differences)
        met += result.met
        word = "DIFFERS" if result.differences else "equal"
        print(f"seed {seed}: {word}, {time.monotonic() - begin:.0f} s: {'; '.join(result.story)}", flush=True)
        if result.differences:
            case = drawn_case(seed)
            print(f"  {' '.join(case.compile)} | {' '.join(case.run)}\n  {folder / str(seed)}", flush=True)
            print("".join(f"  {line}\n" for line in result.differences), flush=True)
    print(f"{given.seeds} seeds, {wrong} different; met: {', '.join(f'{name} {n}' for name, n in met.most_common())}")
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
