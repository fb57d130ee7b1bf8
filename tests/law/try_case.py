"""Try one case of the law again, as a failed test names it: python tests/law/try_case.py 'model=gpt schedule=async'.

After it may stand a fault that breaks a rule of NCCL (`nccl.FAULTS`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]


def tried(case: Any, *fault: str) -> tuple[int, str]:
    """Try it in a process of its own: 0 if the law holds, and what the process wrote."""
    from warm import Popen

    command = [sys.executable, __file__, str(case), *fault]
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        text = process.communicate(timeout=300)[0]
    return process.returncode, text


def main() -> int:
    import nccl
    import torch
    from case import of_text
    from judge import faults, references

    torch.set_num_threads(1)
    case, fault = of_text(sys.argv[1]), "".join(sys.argv[2:3])
    nccl.plant(fault)
    with tempfile.TemporaryDirectory() as folder:
        found = faults(case, Path(folder), fault)
    print(f"judged by {', '.join(references(case))}:", *(found or ["the law holds"]), sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
