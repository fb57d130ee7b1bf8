"""Digests of what the quick cases train: a change that is to change no number leaves them as they are.

    python tests/law/bits.py write before.json             on the tree as it was
    python tests/law/bits.py compare before.json           on the tree as it is: says which cases differ, and in what

They hold on one machine, with one version of torch; so none are kept in the repository.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]


def digests(text: str) -> dict[str, str]:
    """Of a case's emitted files, losses and metrics, trained weights and averages; or of the error that refuses it."""
    import torch
    from case import of_text
    from product import compiled, run_here, runs_of

    from fxpipe.errors import FxpipeError

    case = replace(of_text(text), stop=0)
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiled(case, Path(folder))
            left = run_here(runs_of(case, Path(folder))[0])
        except FxpipeError as error:
            return {"refused": error.what}
        code = [path.read_text() for path in sorted((Path(folder) / "build").glob("*.py"))]
    weights = [
        (name, hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest())
        for tensors in (left.weights, left.averages)
        for name, value in sorted(tensors.items())
    ]
    found = {"code": code, "losses": left.losses, "lines": left.lines, "metrics": left.evaluation, "weights": weights}
    return {what: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for what, value in found.items()}


def main() -> int:
    import torch
    from choose import quick

    torch.set_num_threads(1)
    verb, file = sys.argv[1], Path(sys.argv[2])
    if verb == "write":
        file.write_text(json.dumps({str(case): digests(str(case)) for case in quick()}, indent=1))
        return 0
    wrong = 0
    for case, before in json.loads(file.read_text()).items():
        now = digests(case)
        if differs := [what for what in {**before, **now} if before.get(what) != now.get(what)]:
            wrong += 1
            print(f"{case}: {', '.join(differs)}", flush=True)
    print(f"{wrong} cases differ")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
