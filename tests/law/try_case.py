"""Try one case of the law again, as a failed test names it: python tests/law/try_case.py 'model=gpt schedule=async'."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]


def main() -> int:
    import torch
    from case import of_text
    from judge import faults, references

    torch.set_num_threads(1)
    case = of_text(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        found = faults(case, Path(folder))
    print(f"judged by {', '.join(references(case))}:", *(found or ["the law holds"]), sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
